"""Behavior weights: the correction from the policy that sampled to the anchor, at most e^20. All are detached."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import masked
from jaxrl_async.objectives.tokens import Tokens, given

MODES = ("none", "uncapped", "mask", "clamp")


def capped(log_u: jax.Array, *, cap: float | None, mode: str) -> jax.Array:
    """Weight of each token's loss, u = π_p / π_b.

        "none"      1
        "uncapped"  u
        "mask"      u where u ≤ C, else 0: the token is dropped but stays in the denominator
        "clamp"     min(u, C)

    "Batch size-invariance for policy optimization", Hilton, Cobbe, Schulman, arXiv 2110.00641
    (clamp); "AReaL", Fu et al., arXiv 2505.24298 (mask).

    Args:
      log_u: float [B, T], log π_p − log π_b in nats, already masked.
      cap: C > 0, or None for no cap.
      mode: one of MODES.

    Returns:
      float32 [B, T], detached.

    Raises:
      ValueError: an unknown mode, or a cap with a mode that applies none.
    """
    if mode not in MODES:
        raise ValueError(f"behavior cap mode must be one of {', '.join(MODES)}; got {mode!r}")
    if mode in ("none", "uncapped") and cap is not None:
        raise ValueError(f"behavior cap mode {mode!r} applies no cap, got cap = {cap}")
    u = jax.lax.stop_gradient(masked.exp(log_u))
    if mode == "none":
        return jnp.ones_like(u)
    if cap is None:
        return u
    return jnp.where(u <= cap, u, 0.0) if mode == "mask" else jnp.minimum(u, cap)


def banded(log_u: jax.Array, *, low: float, high: float) -> jax.Array:
    """u inside a band, 0 outside: drops tokens on which engine and trainer differ too much.

        u where low ≤ u ≤ high, else 0

    "Every Step Evolves" (IcePop), arXiv 2510.18855 (0.5, 5).

    Args:
      log_u: float [B, T], log π_p − log π_b in nats, already masked.
      low: ≥ 0.
      high: ≥ low.

    Returns:
      float32 [B, T], detached.
    """
    u = jax.lax.stop_gradient(masked.exp(log_u))
    return jnp.where((u >= low) & (u <= high), u, 0.0)


def dppo_mask(
    logprobs: jax.Array, behavior_logprobs: jax.Array, advantages: jax.Array, *, delta: float
) -> jax.Array:
    """A trust region in probabilities, since ratios of rare tokens say little: 1, or 0 for a dropped token.

        0 where A > 0 and π_θ − π_b > δ,    or A < 0 and π_θ − π_b < −δ

    "DPPO", arXiv 2602.04879 (δ = 0.2).

    Args:
      logprobs: float [B, T], log π_θ in nats, already masked.
      behavior_logprobs: float [B, T], nats, already masked.
      advantages: float [B, T].
      delta: δ in (0, 1), a difference of probabilities.

    Returns:
      float32 [B, T], detached.
    """
    moved = jax.lax.stop_gradient(jnp.exp(logprobs) - jnp.exp(behavior_logprobs))
    dropped = ((advantages > 0) & (moved > delta)) | ((advantages < 0) & (moved < -delta))
    return jnp.where(dropped, 0.0, 1.0)


def off_policy_mask(
    logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    advantages: jax.Array,
    segment_ids: jax.Array,
    mask: jax.Array,
    *,
    delta: float,
) -> jax.Array:
    """1, or 0 for a trajectory that is worse than the baseline and far from the policy that sampled it.

        0 where A < 0 and mean over the trajectory of (log π_b − log π_θ) > δ

    "DeepSeek-V3.2", arXiv 2512.02556.

    Args:
      logprobs: float [B, T], log π_θ in nats, already masked.
      behavior_logprobs: float [B, T], nats, already masked.
      advantages: float [B, T].
      segment_ids: int [B, T], one per trajectory.
      mask: bool [B, T].
      delta: δ > 0, nats.

    Returns:
      float32 [B, T], detached.
    """
    away = behavior_logprobs - jax.lax.stop_gradient(logprobs)
    return jnp.where((advantages < 0) & (_mean(away, segment_ids, mask) > delta), 0.0, 1.0)


def _mean(x: jax.Array, segment_ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the sampled tokens of each segment, on every token of it."""
    counts = masked.segment_sum(masked.keep(1.0, mask), segment_ids)
    return masked.segment_sum(x, segment_ids) / jnp.maximum(counts, 1.0)


# Name → weight of each token, from (tokens, log π_p − log π_b, config).
WEIGHTS: dict[str, Callable[[Tokens, jax.Array, LossConfig], jax.Array]] = {
    "none": lambda t, log_u, c: capped(log_u, cap=None, mode="none"),
    "uncapped": lambda t, log_u, c: capped(log_u, cap=None, mode="uncapped"),
    "mask": lambda t, log_u, c: capped(log_u, cap=c.behavior_cap, mode="mask"),
    "clamp": lambda t, log_u, c: capped(log_u, cap=c.behavior_cap, mode="clamp"),
    # Truncated importance sampling, Yao et al. 2025. LossConfig requires an anchor of the trainer's own log-probs.
    "tis": lambda t, log_u, c: capped(log_u, cap=c.behavior_cap, mode="clamp"),
    "icepop": lambda t, log_u, c: banded(
        log_u, low=given(c.behavior_floor), high=given(c.behavior_cap)
    ),
    "dppo_mask": lambda t, log_u, c: dppo_mask(
        t.logprobs, t.behavior_logprobs, t.advantages, delta=given(c.dppo_delta)
    ),
    # Truncated and masked importance sampling by the product over the trajectory: "When Speed Kills Stability", Liu et
    # al. 2025; TRL's `sequence_truncate` and `sequence_mask`.
    "sequence_tis": lambda t, log_u, c: capped(
        masked.segment_sum(log_u, t.segment_ids), cap=c.behavior_cap, mode="clamp"
    ),
    "sequence_mis": lambda t, log_u, c: capped(
        masked.segment_sum(log_u, t.segment_ids), cap=c.behavior_cap, mode="mask"
    ),
    # The same by the trajectory's geometric mean, whose length does not count; the mask has no weight beside it.
    "geometric_tis": lambda t, log_u, c: capped(
        _mean(log_u, t.segment_ids, t.mask), cap=c.behavior_cap, mode="clamp"
    ),
    "geometric_mask": lambda t, log_u, c: jnp.sign(
        banded(
            _mean(log_u, t.segment_ids, t.mask),
            low=given(c.behavior_floor),
            high=given(c.behavior_cap),
        )
    ),
}
