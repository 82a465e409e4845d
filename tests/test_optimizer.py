"""The schedule of the learning rate and the decay of the weights."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_async.learner.optimizer import make_optimizer

ADAM = {
    "learning_rate": 0.1,
    "warmup_updates": 0,
    "decay_updates": None,
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
}


def steps(count, gradient=1.0, **settings):
    """How far each update moves a parameter that starts at 1."""
    optimizer, param, moved = make_optimizer(**(ADAM | settings)), jnp.ones(()), []
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


def test_decay_is_half_a_cosine_behind_the_warm_up():
    # Two updates of warm-up, then cos over 4: (1 + cos(π n/4))/2 at n = 0 … 4.
    expected = [0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447, 0.0, 0.0]
    moved = steps(8, warmup_updates=2, decay_updates=6)
    np.testing.assert_allclose(moved, [-x for x in expected], rtol=1e-4, atol=1e-7)


def test_weight_decay_pulls_to_zero_at_the_learning_rate():
    # −lr · wd · param, beside a zero gradient.
    np.testing.assert_allclose(steps(1, gradient=0.0, weight_decay=0.5), [-0.05], rtol=1e-6)


def test_a_decay_within_the_warm_up_is_refused():
    with pytest.raises(ValueError, match="decay_updates .*4.* warmup_updates .*4"):
        make_optimizer(**(ADAM | {"warmup_updates": 4, "decay_updates": 4}))
