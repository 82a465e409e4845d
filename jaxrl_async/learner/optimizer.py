"""The optimizer of the learner. Clipping is in `update`, which needs the norm for its flag."""

import jax
import jax.numpy as jnp
import optax

from jaxrl_async.config.settings import Learner


def make_optimizer(settings: Learner) -> optax.GradientTransformation:
    """AdamW after a linear warm-up; Adam where weight_decay is 0.

        lr(n) = learning_rate · min(1, (n + 1) / warmup_updates),    n updates made before

    "Decoupled Weight Decay Regularization", Loshchilov, Hutter, arXiv 1711.05101.

    Args:
      settings: learning_rate, warmup_updates, adam_b1, adam_b2, adam_eps, moment_dtype and weight_decay are read.
        The first update of the warm-up already moves; weight decay is per unit of learning rate, on every parameter.
    """
    peak, updates = settings.learning_rate, settings.warmup_updates
    schedule = optax.constant_schedule(peak)
    if updates:
        warmup = optax.linear_schedule(peak / updates, peak + peak / updates, updates)
        schedule = optax.join_schedules([warmup, schedule], [updates])
    return optax.adamw(
        schedule,
        b1=settings.adam_b1,
        b2=settings.adam_b2,
        eps=settings.adam_eps,
        mu_dtype=settings.moment_dtype,
        weight_decay=settings.weight_decay,
    )


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 [...] → bfloat16 [...]: one of the two neighbours at random, so that the mean is x.

    Rounded to the nearest, updates below 1/512 of a parameter would change nothing, however many there are.

    "Deep Learning with Limited Numerical Precision", Gupta et al., arXiv 1502.02551.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jax.random.bits(key, x.shape, jnp.uint16)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
