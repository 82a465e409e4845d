"""Estimators of KL(p ‖ q) from tokens that p sampled, for any two policies p and q.

"Approximating KL divergence", Schulman, http://joschu.net/blog/kl-approx.html, with x = log q − log p.
Nothing is detached: the gradient of a penalty flows through every argument that carries one.
"""

import jax
import jax.numpy as jnp

from jaxrl_async.objectives import masked


def k1(p_logprobs: jax.Array, q_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """Unbiased, of high variance, possibly negative.

        −x

    Args:
      p_logprobs: float [B, T], nats, of the policy that sampled.
      q_logprobs: float [B, T], nats.
      mask: bool [B, T].

    Returns:
      float32 [B, T], nats, 0 where the mask is False.
    """
    return -_log_ratio(p_logprobs, q_logprobs, mask)


def k2(p_logprobs: jax.Array, q_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """Biased, of low variance, ≥ 0; arguments and result as of `k1`.

    x² / 2
    """
    return jnp.square(_log_ratio(p_logprobs, q_logprobs, mask)) / 2


def k3(p_logprobs: jax.Array, q_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """Unbiased, of low variance, ≥ 0; arguments and result as of `k1`.

    exp(x) − 1 − x,    of x up to masked.MAX_LOG_RATIO
    """
    x = jnp.minimum(_log_ratio(p_logprobs, q_logprobs, mask), masked.MAX_LOG_RATIO)
    return jnp.expm1(x) - x


KLS = {"k1": k1, "k2": k2, "k3": k3}


def _log_ratio(p_logprobs, q_logprobs, mask):
    return masked.keep(q_logprobs, mask) - masked.keep(p_logprobs, mask)
