"""Anchors of the clip: the proximal log-probs. All are detached.

No function here runs a model: `recompute` takes the result of a forward pass at the step's first weights.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import masked
from jaxrl_async.objectives.tokens import Tokens, given


def recompute(proximal_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """Log-probs of the weights that the step starts from, by one more forward pass.

        log π_p = log π_{θ at the start of the step}

    "Batch size-invariance for policy optimization", Hilton, Cobbe, Schulman, arXiv 2110.00641.

    Args:
      proximal_logprobs: float [B, T], nats.
      mask: bool [B, T].

    Returns:
      float32 [B, T], detached, 0 where the mask is False.
    """
    return _detached(proximal_logprobs, mask)


def current(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """The policy itself: free, and equal to `recompute` until the step's first update.

        log π_p = sg(log π_θ)

    With several minibatches per step nothing would ever be clipped; `LossConfig.check_minibatches` refuses that.
    Arguments and result as of `recompute`.
    """
    return _detached(logprobs, mask)


def behavior(behavior_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """The policy that sampled: plain PPO against π_b, with a behavior weight of 1.

        log π_p = log π_b

    "Proximal Policy Optimization Algorithms", Schulman et al., arXiv 1707.06347.
    Arguments and result as of `recompute`.
    """
    return _detached(behavior_logprobs, mask)


def a3po(
    logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    staleness: jax.Array,
    mask: jax.Array,
    *,
    fresh: str = "behavior",
) -> jax.Array:
    """A log-linear path from π_b to π_θ by the token's staleness; needs no forward pass.

        log π_p = α(d)·log π_b + (1 − α(d))·sg(log π_θ),    α(d) = 1/d for d ≥ 1

    α(0) is 1 with fresh="behavior" (the paper) and 0 with fresh="current" (its author's blog), where fresh tokens
    are never clipped. d < 0 does not occur and counts as 0.

    "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy
    Approximation", Li, Wu, Zheng, arXiv 2512.06547.

    Args:
      logprobs: float [B, T], nats.
      behavior_logprobs: float [B, T], nats.
      staleness: int [B, T], d in steps, ≥ 0 where the mask is True.
      mask: bool [B, T].
      fresh: anchor of tokens with d = 0, "behavior" or "current".

    Returns:
      float32 [B, T], detached, 0 where the mask is False.

    Raises:
      ValueError: an unknown `fresh`.
    """
    alpha = _alpha(staleness, fresh)
    log_b, log_theta = masked.keep(behavior_logprobs, mask), masked.keep(logprobs, mask)
    return _detached(alpha * log_b + (1.0 - alpha) * log_theta, mask)


def linear(
    logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    staleness: jax.Array,
    mask: jax.Array,
    *,
    fresh: str = "behavior",
) -> jax.Array:
    """A-3PO's path, linear in probabilities instead of log-probs.

        π_p = α(d)·π_b + (1 − α(d))·sg(π_θ),    α as in `a3po`

    AReaL's alternative to A-3PO. Arguments, result and error as of `a3po`.
    """
    alpha = _alpha(staleness, fresh)
    log_b, log_theta = masked.keep(behavior_logprobs, mask), masked.keep(logprobs, mask)
    mixed = jnp.logaddexp(jnp.log(alpha) + log_b, jnp.log1p(-alpha) + log_theta)
    return _detached(mixed, mask)


# Name → log π_p, from (tokens, config).
ANCHORS: dict[str, Callable[[Tokens, LossConfig], jax.Array]] = {
    "recompute": lambda t, c: recompute(given(t.proximal_logprobs), t.mask),
    "current": lambda t, c: current(t.logprobs, t.mask),
    "a3po": lambda t, c: a3po(
        t.logprobs, t.behavior_logprobs, t.staleness, t.mask, fresh=c.a3po_fresh
    ),
    "linear": lambda t, c: linear(
        t.logprobs, t.behavior_logprobs, t.staleness, t.mask, fresh=c.a3po_fresh
    ),
    "behavior": lambda t, c: behavior(t.behavior_logprobs, t.mask),
}

# Anchors without a forward pass of their own; `proximal_metrics` compares them with "recompute".
APPROXIMATIONS = ("a3po", "linear", "current", "behavior")


def _alpha(staleness, fresh):
    if fresh not in ("behavior", "current"):
        raise ValueError(f"fresh must be 'behavior' or 'current', got {fresh!r}")
    alpha = 1.0 / jnp.maximum(staleness, 1).astype(jnp.float32)
    if fresh == "current":
        alpha = jnp.where(jnp.asarray(staleness) >= 1, alpha, 0.0)
    return alpha


def _detached(x, mask):
    return jax.lax.stop_gradient(masked.keep(x, mask))
