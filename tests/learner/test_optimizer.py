"""The schedule of the learning rate and the decay of the weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fixtures.models import TINY
from fixtures.small_learner import host_params, make_train_step, params_on

from jaxrl_async.config import settings
from jaxrl_async.config.build import base_config
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import Learner
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.optimizer import (
    OPTIMIZERS,
    learning_rate,
    make_optimizer,
    stochastic_round,
)
from jaxrl_async.learner.statistics import LAG_BUCKETS
from jaxrl_async.models import sharding
from jaxrl_async.runtime import workdir

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


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Warm-up: 1/2, 1. Then the share of the other 8 updates that is over: 0, 1/8, …, 7/8; x at 1/2 is 0.55.
        ("constant", [0.5, 1.0] + [1.0] * 8),
        ("linear", [0.5, 1.0] + [1 - 0.9 * k / 8 for k in range(8)]),
        ("cosine", [0.5, 1.0] + [0.1 + 0.45 * (1 + np.cos(np.pi * k / 8)) for k in range(8)]),
    ],
)
def test_a_schedule_goes_from_the_learning_rate_to_its_floor(schedule, rates):
    learner = Learner(
        learning_rate=1.0, schedule=schedule, final_learning_rate=0.1, warmup_updates=2, num_steps=5
    )
    found = learning_rate(learner)(np.arange(12))
    np.testing.assert_allclose(found[:10], rates, rtol=1e-6)
    floor = 1.0 if schedule == "constant" else 0.1
    np.testing.assert_allclose(found[10:], floor, rtol=1e-6)  # after the last update


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_pulls_to_zero_at_the_learning_rate(optimizer):
    # −lr · wd · param, beside a zero gradient.
    found = steps(1, gradient=0.0, weight_decay=0.5, optimizer=optimizer)
    np.testing.assert_allclose(found, [-0.05], rtol=1e-6)


def test_sgd_moves_by_the_sum_of_its_decayed_gradients():
    found = steps(3, gradient=2.0, optimizer="sgd", momentum=0.5)
    np.testing.assert_allclose(found, [-0.2, -0.3, -0.35], rtol=1e-6)


def test_adafactor_moves_by_the_learning_rate_whatever_the_parameter():
    np.testing.assert_allclose(steps(3, gradient=7.0, optimizer="adafactor"), [-0.1] * 3, rtol=1e-5)


def test_muon_turns_the_matrices_of_layers_and_moves_as_much_as_adam():
    optimizer = make_optimizer(dataclasses.replace(ADAM, optimizer="muon"))
    gradient = jnp.asarray(
        np.random.default_rng(0).normal(size=(2, 16, 8)) @ np.diag(2.0 ** -np.arange(8))
    )
    params = {"kernel": jnp.zeros((2, 16, 8)), "scale": jnp.ones((2, 8))}
    found, _ = optimizer.update(
        {"kernel": gradient, "scale": jnp.full((2, 8), 3.0)}, optimizer.init(params), params
    )
    assert (found["scale"] < 0).all()
    singular = np.linalg.svd(found["kernel"] / (0.1 * 0.2 * 4), compute_uv=False)  # √16 = 4
    assert 0.5 < singular.min() and singular.max() < 1.3


def test_each_optimizer_of_the_settings_is_one():
    assert tuple(OPTIMIZERS) == settings.OPTIMIZERS


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_optimizer_divides_its_state_over_a_mesh_and_comes_back_from_a_checkpoint(
    name, tmp_path
):
    learner = Learner(optimizer=name, learning_rate=0.1)
    optimizer = make_optimizer(learner)

    def updated(params):
        gradient = jax.tree.map(lambda x: 1e-3 * jnp.cos(100 * x), params)
        moved, _ = optimizer.update(gradient, optimizer.init(params), params)
        return optax.apply_updates(params, moved), gradient

    expected, gradient = jax.jit(updated)(host_params())
    mesh = sharding.make_mesh(2, 2, 2)
    train_step = make_train_step(TINY, mesh, LossConfig(), optimizer=optimizer)
    state, accumulator = train_step.init(params_on(mesh)), train_step.abstract_accumulator()
    filled = dataclasses.replace(
        accumulator,
        grads=gradient,
        sums=np.full(accumulator.sums.shape, 1 / len(LAG_BUCKETS), np.float32),  # one token
        maxima=np.ones(accumulator.maxima.shape, np.float32),
    )
    filled = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), filled, accumulator)
    state, *_ = train_step.update(state, filled)
    for found, wanted in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)

    like = train_step.abstract_state()
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    checkpoints.written(wait=True)
    restored, _ = checkpoints.restore(1, like)
    for leaf, of, kept in zip(*map(jax.tree.leaves, (restored, like, state)), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (of.shape, of.dtype, of.sharding)
        np.testing.assert_array_equal(leaf, kept)
    # As `fit` sees it.
    assert jax.tree.structure(train_step.abstract_moments()) == jax.tree.structure(state.opt_state)


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


def test_a_resumed_run_keeps_its_optimizer_and_may_change_its_schedule(tmp_path):
    config = base_config().unlock()
    workdir.write_config(tmp_path, config)
    config.learner.schedule = "cosine"
    assert len(workdir.changes(tmp_path, config)) == 1
    config.learner.optimizer = "muon"
    message = "learner.optimizer 'adamw' → 'muon': a resumed run cannot change it, the checkpoint"
    with pytest.raises(StartError, match=message):
        workdir.changes(tmp_path, config)
