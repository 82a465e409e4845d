"""Surrogate losses: from ratio and advantage to a loss per token. Knows nothing of masks."""

import jax
import jax.numpy as jnp


def clipped(
    ratio: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> jax.Array:
    """PPO's pessimistic bound, as a loss to be minimised.

        loss = −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A),    and where A < 0 at most c·|A|

    "Proximal Policy Optimization Algorithms", Schulman et al., arXiv 1707.06347; the dual clip from
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", Ye et al.,
    arXiv 1912.09729.

    Args:
      ratio: float [B, T], > 0; carries the gradient.
      advantages: float [B, T]; detached here.
      clip_low: ε_low, in [0, 1].
      clip_high: ε_high, ≥ 0.
      dual_clip: c > 1, or None for no dual clip.

    Returns:
      float32 [B, T].
    """
    advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(-ratio * advantages, -bounded * advantages)
    if dual_clip is None:
        return loss
    # Where A ≥ 0 the loss is not positive, and this changes nothing.
    return jnp.minimum(loss, dual_clip * jnp.abs(advantages))


def is_clipped(
    ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float
) -> jax.Array:
    """Where the clip stops the gradient.

        r > 1 + ε_high and A > 0,    or    r < 1 − ε_low and A < 0

    Args:
      ratio: float [B, T].
      advantages: float [B, T].
      clip_low: ε_low.
      clip_high: ε_high.

    Returns:
      bool [B, T].
    """
    above = (ratio > 1.0 + clip_high) & (advantages > 0)
    below = (ratio < 1.0 - clip_low) & (advantages < 0)
    return above | below
