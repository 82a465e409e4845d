"""Log-probs of tokens that were drawn from a few kept ids: of the head, the rows of these ids alone.

A gather of [M, D] rows for each token instead of a product with all of the vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrl_async.models import axes

_GATHERED = 1 << 24  # numbers of the head's rows that are in memory at a time, on a device
_NEVER = -1e30  # Finite: 0 · −1e30 is 0, but 0 · −∞ is NaN.


def kept_logprobs(model, hidden_BTD, tokens_BT, kept_BTM, *, temperature):
    """Log-prob of each token among its kept ids, and entropy of the distribution over them.

        logprobs[b, t] = log_softmax(logits(hidden[b, t])[kept[b, t]] / temperature)[of tokens[b, t]]

    Args:
      model: a Transformer.
      hidden_BTD: [B, T, D], of the column that predicts each token.
      tokens_BT: int32 [B, T], each among its kept ids.
      kept_BTM: int32 [B, T, M], in [0, V), padded with −1.
      temperature: of sampling, > 0; carries no gradient.

    Returns:
      logprobs float32 [B, T]; entropy float32 [B, T] in nats, without a gradient; both 0 without kept ids.
    """
    kernel, vocab_axis = model.head_kernel()
    name = "embedding" if vocab_axis == 0 else "head.kernel"
    if model.config.lora is not None:
        kernel = jax.lax.stop_gradient(kernel)
    kernel = axes.gathered(kernel, axes.of_param(name), model.config.dtype)
    kernel_VD = kernel.astype(model.config.dtype)
    kernel_VD = kernel_VD if vocab_axis == 0 else kernel_VD.T

    def of_device(hidden_BTD, kernel_VD, tokens_BT, kept_BTM, temperature):
        B, T, D = hidden_BTD.shape
        size = max(1, min(B * T, _GATHERED // (kept_BTM.shape[2] * D)))
        flat = (x.reshape(B * T, *x.shape[2:]) for x in (hidden_BTD, tokens_BT, kept_BTM))
        hidden_ND, tokens_N, kept_NM = flat
        found = _chunked(size, hidden_ND, kernel_VD, tokens_N, kept_NM, temperature)
        return tuple(x.reshape(B, T) for x in found)

    arguments = (hidden_BTD, kernel_VD, tokens_BT, kept_BTM, jnp.float32(temperature))
    mesh = jax.typeof(hidden_BTD).sharding.mesh
    if mesh.empty:
        return of_device(*arguments)
    whole, tokens = (
        jax.sharding.PartitionSpec(),
        jax.sharding.PartitionSpec(axes.ROWS, axes.COLUMNS),
    )
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(tokens, whole, tokens, tokens, whole),
        out_specs=(tokens, tokens),
        check_vma=False,
    )(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(size, hidden_ND, kernel_VD, tokens_N, kept_NM, temperature):
    """Log-probs and entropies, float32 [N] each; `size` tokens at a time."""
    return _forward(size, hidden_ND, kernel_VD, tokens_N, kept_NM, temperature)[0]


def _forward(size, hidden_ND, kernel_VD, tokens_N, kept_NM, temperature):
    def visit(_, chunk):
        hidden_CD, tokens_C, kept_CM = chunk
        _, probs_CM, own_CM, scaled_CM, log_z_C = _of_chunk(
            hidden_CD, kernel_VD, tokens_C, kept_CM, temperature
        )
        is_kept_C = kept_CM[:, 0] >= 0
        logprobs_C = jnp.sum(jnp.where(own_CM, scaled_CM, 0), axis=1) - log_z_C
        entropy_C = log_z_C - jnp.sum(probs_CM * scaled_CM, axis=1)
        return None, tuple(jnp.where(is_kept_C, x, 0) for x in (logprobs_C, entropy_C))

    _, found = jax.lax.scan(visit, None, _chunks(size, hidden_ND, tokens_N, kept_NM))
    saved = hidden_ND, kernel_VD, tokens_N, kept_NM, temperature
    return tuple(x.reshape(-1)[: len(tokens_N)] for x in found), saved


def _backward(size, saved, cotangents):
    """∂ logprob / ∂ logits = (one-hot of the token − softmax) / temperature, of the kept ids alone."""
    hidden_ND, kernel_VD, tokens_N, kept_NM, temperature = saved

    def visit(d_kernel_VD, chunk):
        hidden_CD, tokens_C, kept_CM, scale_C = chunk
        rows_CMD, probs_CM, own_CM, _, _ = _of_chunk(
            hidden_CD, kernel_VD, tokens_C, kept_CM, temperature
        )
        d_logits_CM = (own_CM - probs_CM) * scale_C[:, None]
        d_hidden_CD = jnp.einsum(
            "cm,cmd->cd", d_logits_CM, rows_CMD, preferred_element_type=jnp.float32
        )
        d_rows_CMD = d_logits_CM[:, :, None] * hidden_CD[:, None].astype(jnp.float32)
        return d_kernel_VD.at[jnp.maximum(kept_CM, 0)].add(d_rows_CMD), d_hidden_CD

    scale_N = cotangents[0] / temperature  # The entropy's cotangent is dropped.
    chunks = _chunks(size, hidden_ND, tokens_N, kept_NM, scale_N)
    d_kernel_VD, d_hidden = jax.lax.scan(visit, jnp.zeros(kernel_VD.shape, jnp.float32), chunks)
    d_hidden_ND = d_hidden.reshape(-1, hidden_ND.shape[1])[: len(hidden_ND)]
    return (
        d_hidden_ND.astype(hidden_ND.dtype),
        d_kernel_VD.astype(kernel_VD.dtype),
        None,
        None,
        None,
    )


_chunked.defvjp(_forward, _backward)


def _chunks(size, *arrays):
    """[N, …] → [chunks, size, …]; what is added has no kept id, as its ids are −1."""

    def cut(x):
        padding = [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, padding, constant_values=-1 if x.ndim == 2 and x.dtype == jnp.int32 else 0)
        return x.reshape(-1, size, *x.shape[1:])

    return tuple(map(cut, arrays))


def _of_chunk(hidden_CD, kernel_VD, tokens_C, kept_CM, temperature):
    """Rows of the head, probabilities, whether an id is the token's, logits / temperature, and log of their sum.

    Without kept ids, and for padding, the probability of an id is 0.
    """
    is_kept_CM = kept_CM >= 0
    rows_CMD = kernel_VD[jnp.maximum(kept_CM, 0)]
    logits_CM = jnp.einsum("cd,cmd->cm", hidden_CD, rows_CMD, preferred_element_type=jnp.float32)
    scaled_CM = jnp.where(is_kept_CM, logits_CM / temperature, _NEVER)
    log_z_C = jax.nn.logsumexp(scaled_CM, axis=1)
    probs_CM = jnp.where(is_kept_CM, jnp.exp(scaled_CM - log_z_C[:, None]), 0)
    own_CM = is_kept_CM & (kept_CM == tokens_C[:, None])
    return rows_CMD, probs_CM, own_CM, scaled_CM, log_z_C
