"""Log-probs of given tokens, from hidden states, without the logits of a whole row in memory.

It knows nothing of masks, segments or policies: padding gets a finite number like any token.
"""

import jax
import jax.numpy as jnp


def token_logprobs(
    model,
    hidden_BTD,
    tokens_BT,
    predictor_index_BT,
    *,
    temperature: float,
    chunk_tokens: int | None,
):
    """Log-prob of each token, and the entropy of the distribution that it was drawn from.

        logprobs[b, t] = log_softmax(logits(hidden[b, predictor_index[b, t]]) / temperature)[tokens[b, t]]

    Args:
      model: a Transformer; its `logits` is the head.
      hidden_BTD: [B, T, D], after the final norm.
      tokens_BT: int32 [B, T], in [0, V).
      predictor_index_BT: int32 [B, T], in [0, T): the column whose hidden state predicts the token.
      temperature: the sampling temperature, > 0.
      chunk_tokens: columns whose logits exist at a time; they are computed again in the backward
        pass. None: all T at once, and kept.

    Returns:
      logprobs float32 [B, T]; entropy float32 [B, T] in nats, which carries no gradient.

    Raises:
      ValueError: chunk_tokens < 1.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be ≥ 1 or None, got {chunk_tokens}")
    hidden_BTD = jnp.take_along_axis(hidden_BTD, predictor_index_BT[:, :, None], axis=1)

    def head(hidden_BTD, tokens_BT):
        return _logprobs_and_entropy(model.logits(hidden_BTD) / temperature, tokens_BT)

    T = tokens_BT.shape[1]
    if chunk_tokens is None or chunk_tokens >= T:
        return head(hidden_BTD, tokens_BT)
    chunks = _split(hidden_BTD, chunk_tokens), _split(tokens_BT, chunk_tokens)
    recomputed_head = jax.checkpoint(head, prevent_cse=False)  # Not needed within a scan.
    _, (logprobs, entropy) = jax.lax.scan(
        lambda carry, chunk: (carry, recomputed_head(*chunk)), None, chunks
    )
    return _join(logprobs, T), _join(entropy, T)


def _logprobs_and_entropy(logits_BTV, tokens_BT):
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A comparison and not a gather: it partitions over a sharded vocabulary, and its gradient is a
    # select that fuses with the softmax's, where a gather's is a scatter into [B, T, V].
    chosen_BTV = jnp.arange(logits_BTV.shape[-1])[None, None] == tokens_BT[:, :, None]
    logprobs_BT = jnp.sum(jnp.where(chosen_BTV, logits_BTV, 0), axis=-1) - log_z_BT
    logits_BTV, log_z_BT = jax.lax.stop_gradient((logits_BTV, log_z_BT))
    probs_BTV = jnp.exp(logits_BTV - log_z_BT[:, :, None])
    return logprobs_BT, log_z_BT - jnp.sum(probs_BTV * logits_BTV, axis=-1)


def _split(array, chunk_tokens):
    """[B, T, ...] → [chunks, B, chunk_tokens, ...]; the last chunk is padded with zeros."""
    B, T = array.shape[:2]
    padding = [(0, 0), (0, -T % chunk_tokens)] + [(0, 0)] * (array.ndim - 2)
    array = jnp.pad(array, padding).reshape(B, -1, chunk_tokens, *array.shape[2:])
    return jnp.moveaxis(array, 1, 0)


def _join(chunks, T):
    """[chunks, B, chunk_tokens] → [B, T]"""
    return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1)[:, :T]
