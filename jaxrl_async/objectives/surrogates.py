"""Surrogate losses: ratio, log-prob and advantage of a token to its loss. Masks are applied elsewhere."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import masked
from jaxrl_async.objectives.tokens import Tokens


def clipped(
    ratio: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> jax.Array:
    """PPO's pessimistic bound, as a loss to minimise.

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
    ratio: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> jax.Array:
    """Where the clip, or the dual clip, stops the gradient.

        r > 1 + ε_high and A > 0,    or    r < 1 − ε_low and A < 0,    or    r > c and A < 0

    Arguments as of `clipped`. Returns bool [B, T].
    """
    above = (ratio > 1.0 + clip_high) & (advantages > 0)
    below = (ratio < 1.0 - clip_low) & (advantages < 0)
    if dual_clip is None:
        return above | below
    return above | below | ((ratio > dual_clip) & (advantages < 0))


def unclipped(ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """The importance-weighted surrogate without a clip.

        loss = −r·A

    Arguments and result as of `clipped`.
    """
    return -ratio * jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))


def cispo(
    logprobs: jax.Array, ratio: jax.Array, advantages: jax.Array, *, clip_high: float
) -> jax.Array:
    """The clip acts on a detached weight, so that no token's gradient is dropped.

        loss = −sg(min(r, 1 + ε_high))·A·log π_θ

    "MiniMax-M1", arXiv 2506.13585 (ε_high = 4, r to the behavior policy). Arguments and result as of `clipped` and
    `reinforce`, but the ratio is detached here.
    """
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, 1.0 + clip_high))
    return weight * reinforce(logprobs, advantages)


def reinforce(logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
    """The plain policy gradient: no ratio, no clip.

        loss = −A·log π_θ

    "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", Williams, 1992.

    Args:
      logprobs: float [B, T], nats; carries the gradient.
      advantages: float [B, T]; detached here.

    Returns:
      float32 [B, T].
    """
    return -jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32)) * logprobs


def dg(
    logprobs: jax.Array, advantages: jax.Array, *, temperature: float, threshold: float
) -> jax.Array:
    """The policy gradient gated by delight, advantage times surprisal; uses no behavior probabilities.

        loss = −sg(g)·A·log π_θ,    g = σ((A·(−log π_θ) − λ) / η)

    "Delightful Policy Gradient", Osband, arXiv 2603.14608v1; distributed, arXiv 2603.20521v2, in which the gate is
    that of v1 and two claims are weaker (benchmarks/README.md, Contaminated gradients).

    Args:
      logprobs: float [B, T], nats, of the policy being trained; carries the gradient.
      advantages: float [B, T], in units of reward, not divided by its spread; detached here.
      temperature: η > 0; towards 0 the gate becomes the indicator of A·(−log π_θ) > λ.
      threshold: λ, nats times reward.

    Returns:
      float32 [B, T].
    """
    advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    delight = -jax.lax.stop_gradient(logprobs) * advantages
    return jax.nn.sigmoid((delight - threshold) / temperature) * reinforce(logprobs, advantages)


def sapo(ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """A soft gate in the place of the clip; at r = 1 the slope is that of −r·A.

        loss = −(4/τ)·σ(τ·(r − 1))·A,    τ = 1.0 where A > 0, else 1.05

    "Soft Adaptive Policy Optimization", arXiv 2511.20347. Arguments and result as of `clipped`.
    """
    advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    temperature = jnp.where(advantages > 0, 1.0, 1.05)
    return -4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages


def topr(
    logprobs: jax.Array, behavior_logprobs: jax.Array, advantages: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """The policy gradient, tapered where the advantage is negative by the trajectory's truncated importance ratio.

        loss = −sg(w)·A·log π_θ,    w = 1 where A ≥ 0, else min(Π_t π_θ(t)/π_b(t), 1) over t's trajectory

    "Tapered Off-Policy REINFORCE", Le Roux, Bellemare et al., arXiv 2503.14286. The baseline decides what is negative.

    Args:
      logprobs: float [B, T], nats, 0 where masked; carries the gradient.
      behavior_logprobs: float [B, T], nats, 0 where masked.
      advantages: float [B, T]; detached here.
      segment_ids: int [B, T], one per trajectory.

    Returns:
      float32 [B, T].
    """
    log_ratio = masked.segment_sum(jax.lax.stop_gradient(logprobs) - behavior_logprobs, segment_ids)
    weight = jnp.where(advantages < 0, jnp.exp(jnp.minimum(log_ratio, 0.0)), 1.0)
    return weight * reinforce(logprobs, advantages)


# Name → loss of each token, from (tokens, ratio, config).
SURROGATES: dict[str, Callable[[Tokens, jax.Array, LossConfig], jax.Array]] = {
    "clipped": lambda t, ratio, c: clipped(
        ratio, t.advantages, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip
    ),
    "unclipped": lambda t, ratio, c: unclipped(ratio, t.advantages),
    "cispo": lambda t, ratio, c: cispo(t.logprobs, ratio, t.advantages, clip_high=c.clip_high),
    "reinforce": lambda t, ratio, c: reinforce(t.logprobs, t.advantages),
    "dg": lambda t, ratio, c: dg(
        t.logprobs, t.advantages, temperature=c.dg_temperature, threshold=c.dg_threshold
    ),
    "sapo": lambda t, ratio, c: sapo(ratio, t.advantages),
    "topr": lambda t, ratio, c: topr(t.logprobs, t.behavior_logprobs, t.advantages, t.segment_ids),
}

# Name → where its clip acts, from (tokens, ratio, config). Surrogates without a clip are absent.
CLIPS: dict[str, Callable[[Tokens, jax.Array, LossConfig], jax.Array]] = {
    "clipped": lambda t, ratio, c: is_clipped(
        ratio, t.advantages, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip
    ),
    "cispo": lambda t, ratio, c: ratio > 1.0 + c.clip_high,
}
