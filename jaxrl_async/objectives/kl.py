"""Estimators of KL(p ‖ q) from tokens that p sampled, for any two policies p and q.

"Approximating KL divergence", Schulman, http://joschu.net/blog/kl-approx.html, with x = log q − log p.
All take the log-probs of p and of q, float [B, T] in nats, and a mask, bool [B, T], and return float32 [B, T] in nats,
0 where the mask is False. Nothing is detached: the gradient of a penalty flows through every argument that carries one.
"""

import jax
import jax.numpy as jnp

from jaxrl_async.objectives import masked


def k1(p_logprobs: jax.Array, q_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """−x: unbiased, of high variance, possibly negative."""
    return -_log_ratio(p_logprobs, q_logprobs, mask)


def k2(p_logprobs: jax.Array, q_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """x² / 2: biased, of low variance, never negative."""
    return jnp.square(_log_ratio(p_logprobs, q_logprobs, mask)) / 2


def k3(p_logprobs: jax.Array, q_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """exp(x) − 1 − x, of x up to masked.MAX_LOG_RATIO: unbiased, of low variance, never negative."""
    x = jnp.minimum(_log_ratio(p_logprobs, q_logprobs, mask), masked.MAX_LOG_RATIO)
    return jnp.expm1(x) - x


KLS = {"k1": k1, "k2": k2, "k3": k3}


def _log_ratio(p_logprobs, q_logprobs, mask):
    return masked.keep(q_logprobs, mask) - masked.keep(p_logprobs, mask)
