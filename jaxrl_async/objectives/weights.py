"""Behavior weights: the correction from the policy that sampled to the anchor. All detached."""

import jax
import jax.numpy as jnp

MODES = ("none", "uncapped", "mask", "clamp")


def capped(log_u: jax.Array, *, cap: float | None, mode: str) -> jax.Array:
    """Weight of each token's loss, u = π_p / π_b.

        "none"      1
        "uncapped"  u
        "mask"      u where u ≤ C, 0 above: the token is dropped, and stays in the denominator
        "clamp"     min(u, C)

    "Batch size-invariance for policy optimization", Hilton, Cobbe, Schulman, arXiv 2110.00641
    (clamp); "AReaL", Fu et al., arXiv 2505.24298 (mask).

    Args:
      log_u: float [B, T], log π_p − log π_b in nats, already masked.
      cap: C > 0, or None: without a cap, whatever the mode.
      mode: one of MODES.

    Returns:
      float32 [B, T], detached.

    Raises:
      ValueError: an unknown mode, or a cap that the mode would not apply.
    """
    if mode not in MODES:
        raise ValueError(f"behavior cap mode must be one of {', '.join(MODES)}; got {mode!r}")
    if mode in ("none", "uncapped") and cap is not None:
        raise ValueError(f"behavior cap mode {mode!r} applies no cap, got cap = {cap}")
    u = jax.lax.stop_gradient(jnp.exp(jnp.asarray(log_u, jnp.float32)))
    if mode == "none":
        return jnp.ones_like(u)
    if cap is None:
        return u
    return jnp.where(u <= cap, u, 0.0) if mode == "mask" else jnp.minimum(u, cap)
