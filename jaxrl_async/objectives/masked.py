"""Masking before any exp.

A mask that is applied only in the reduction gives a finite loss and a NaN gradient where padding holds an infinity:
0 · inf in the backward pass. Here masked entries are replaced first.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# nats. A policy that finds a token e^20 times as likely as another one does is broken, or the token is; beyond 88 nats
# float32 overflows, and the gradient of a token that a clip or a cap drops is 0 · inf.
MAX_LOG_RATIO = 20.0


def keep(x: ArrayLike, mask: jax.Array) -> jax.Array:
    """x where the mask is True, 0 elsewhere, even where x is NaN or infinite.

    Args:
      x: [...], of any number type, or one number.
      mask: bool [...].

    Returns:
      float32 [...]. The gradient is 0 where the mask is False.
    """
    return jnp.where(mask, x, 0.0).astype(jnp.float32)


def exp(log_ratio: jax.Array) -> jax.Array:
    """exp(min(x, MAX_LOG_RATIO)): finite, with a gradient that is finite everywhere and 0 beyond the bound.

    Args:
      log_ratio: float [...], nats, finite.

    Returns:
      float32 [...]; the very bits of exp(x) up to the bound.
    """
    return jnp.exp(jnp.minimum(jnp.asarray(log_ratio, jnp.float32), MAX_LOG_RATIO))


def total(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ m·x, float32 []."""
    return jnp.sum(keep(x, mask))


def largest(x: jax.Array, mask: jax.Array) -> jax.Array:
    """max(0, max of x over the mask), and 0 for an empty mask, float32 []."""
    return jnp.max(keep(x, mask))


def segment_sum(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Σ of x over each segment, on every token of the segment.

    Args:
      x: float [B, T], 0 where it is masked.
      segment_ids: int [B, T], in [0, T].

    Returns:
      float [B, T].
    """

    def row(x, ids):
        return jax.ops.segment_sum(x, ids, num_segments=ids.shape[0] + 1)[ids]

    return jax.vmap(row)(x, segment_ids)
