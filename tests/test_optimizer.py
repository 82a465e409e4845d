"""The schedule of the learning rate and the decay of the weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_async.config.settings import Learner
from jaxrl_async.learner.optimizer import make_optimizer

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
