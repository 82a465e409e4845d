"""The schedule of the learning rate and the decay of the weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_async.config.settings import Learner
from jaxrl_async.learner.optimizer import make_optimizer, stochastic_round

ADAM = Learner(learning_rate=0.1, adam_b2=0.99)


def steps(count, gradient=1.0, **settings):
    """How far each update moves a parameter that starts at 1."""
    optimizer = make_optimizer(dataclasses.replace(ADAM, **settings))
    param, moved = jnp.ones(()), []
    state = optimizer.init(param)
    for _ in range(count):
        update, state = optimizer.update(jnp.asarray(gradient), state, param)
        param = optax.apply_updates(param, update)
        moved.append(float(update))
    return moved


def test_adam_moves_by_the_learning_rate_under_a_constant_gradient():
    # m̂ = g and v̂ = g²: each update is −lr · g/|g|.
    np.testing.assert_allclose(steps(3, gradient=7.0), [-0.1] * 3, rtol=1e-5)


def test_warm_up_is_linear_and_its_first_update_moves():
    np.testing.assert_allclose(
        steps(6, warmup_updates=4), [-0.025, -0.05, -0.075, -0.1, -0.1, -0.1], rtol=1e-5
    )


def test_weight_decay_pulls_to_zero_at_the_learning_rate():
    # −lr · wd · param, beside a zero gradient.
    np.testing.assert_allclose(steps(1, gradient=0.0, weight_decay=0.5), [-0.05], rtol=1e-6)


def test_the_first_moment_alone_has_the_dtype_that_is_asked_for():
    optimizer = make_optimizer(dataclasses.replace(ADAM, moment_dtype="bfloat16"))
    adam = optimizer.init(jnp.ones(3))[0]
    assert adam.mu.dtype == jnp.bfloat16 and adam.nu.dtype == jnp.float32


def test_rounding_at_random_has_the_value_as_its_mean():
    # A quarter of the way from 1 to 1 + 2⁻⁷, its neighbour, and the same below 0.
    x = jnp.tile(jnp.array([1 + 2.0**-9, -1 - 2.0**-9]), 20_000)
    rounded = np.asarray(stochastic_round(x, jax.random.key(0)), np.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + 2.0**-7, -1.0, -1 - 2.0**-7}
    up = np.mean(rounded > 1)  # of all, of which one half is negative
    np.testing.assert_allclose(up, 0.125, atol=0.01)
    np.testing.assert_allclose(np.mean(rounded < -1), 0.125, atol=0.01)


def test_what_bfloat16_holds_is_not_rounded():
    x = jnp.array([0.0, 1.0, -2.5, 3e38, jnp.inf, -jnp.inf, 2.0**-120])
    exact = x.astype(jnp.bfloat16).astype(jnp.float32)
    rounded = stochastic_round(exact, jax.random.key(1))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), exact)
