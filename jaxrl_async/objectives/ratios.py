"""Importance ratios of the policy to the anchor of the clip, at most e^20. All functions have the same arguments."""

import jax
import jax.numpy as jnp

from jaxrl_async.objectives import masked


def token(
    logprobs: jax.Array,
    anchor_logprobs: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Ratio of each token.

        r_t = π_θ(t) / π_p(t)

    "Batch size-invariance for policy optimization", Hilton, Cobbe, Schulman, arXiv 2110.00641.

    Args:
      logprobs: float [B, T], nats; carries the gradient.
      anchor_logprobs: float [B, T], nats; detached here.
      mask: bool [B, T].
      segment_ids: int [B, T], in [0, T], of `sequence` alone; equal ids in a row are one trajectory.

    Returns:
      float32 [B, T], 1 where the mask is False.
    """
    return masked.exp(_log_ratio(logprobs, anchor_logprobs, mask))


def sequence(
    logprobs: jax.Array, anchor_logprobs: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Length-normalised ratio of each segment, on each of its tokens.

        r_t = exp(mean over the masked tokens j of t's segment of log(π_θ(j) / π_p(j)))

    "Group Sequence Policy Optimization", Zheng et al., arXiv 2507.18071. Arguments and result as of `token`.
    """
    log_ratio = _log_ratio(logprobs, anchor_logprobs, mask)
    sums = masked.segment_sum(log_ratio, segment_ids)
    counts = masked.segment_sum(masked.keep(1.0, mask), segment_ids)
    return masked.exp(masked.keep(sums / jnp.maximum(counts, 1.0), mask))


# Name → ratio of each token; all with the arguments of `token`.
RATIOS = {"token": token, "sequence": sequence}


def _log_ratio(logprobs, anchor_logprobs, mask):
    return masked.keep(logprobs, mask) - masked.keep(jax.lax.stop_gradient(anchor_logprobs), mask)
