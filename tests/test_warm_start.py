"""Warm start: it learns, repeats itself by seed, and refuses what it cannot train on."""

import jax
import numpy as np
import pytest
from test_train_step import MODEL, flat, params_on

from jaxrl_async.learner import train_step
from jaxrl_async.learner.warm_start import warm_start
from jaxrl_async.models import sharding
from jaxrl_async.types import Batch

STOP = 0


def demonstrations(count=64):
    """A prompt of one token n; the completion is n + 1, n + 2 and the stop token."""
    firsts = 1 + np.arange(count) % 8
    return [(np.array([n]), np.array([n + 1, n + 2, STOP])) for n in firsts]


def train(demos, mesh_shape=(1, 1, 1), **settings):
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    losses = []

    def report(step, loss):
        losses.append(loss)
        assert step == len(losses)

    defaults = {
        "num_steps": 6,
        "batch_size": 8,
        "row_tokens": 6,
        "learning_rate": 1e-2,
        "head_chunk_tokens": None,
        "seed": 0,
    }
    params = params_on(mesh)
    params = warm_start(MODEL, mesh, params, demos, **(defaults | settings), report=report)
    return params, losses


def test_a_rule_is_learnt_with_its_stop_token():
    params, losses = train(demonstrations(), num_steps=150)
    assert len(losses) == 150
    assert losses[0] > 2
    assert np.mean(losses[-10:]) < 0.05
    row = np.array([[3, 4, 5, STOP, 0, 0]], np.int32)
    column = np.arange(6, dtype=np.int32)[None]
    batch = Batch(row, column, np.int32(column < 4), np.maximum(column - 1, 0), *[None] * 4)
    logprobs, _ = train_step.policy_logprobs(
        MODEL, params, batch, temperature=1.0, head_chunk_tokens=None
    )
    assert np.all(np.exp(logprobs[0, 1:4]) > 0.9)


def test_the_first_loss_is_the_mean_over_completion_tokens():
    demos = [(np.array([3, 4]), np.array([5, STOP])), (np.array([7]), np.array([1, 2, 3, STOP]))]
    _, losses = train(demos, num_steps=1, batch_size=2)
    params = params_on(sharding.make_mesh(1, 1, 1, jax.devices()[:1]))
    tokens = np.array([[3, 4, 5, STOP, 0], [7, 1, 2, 3, STOP]], np.int32)
    column = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    segments = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], np.int32)
    batch = Batch(tokens, column, segments, np.maximum(column - 1, 0), *[None] * 4)
    logprobs, _ = train_step.policy_logprobs(
        MODEL, params, batch, temperature=1.0, head_chunk_tokens=None
    )
    expected = -(logprobs[0, 2:4].sum() + logprobs[1, 1:5].sum()) / 6
    np.testing.assert_allclose(losses, [expected], rtol=1e-5)


def test_a_seed_repeats_itself_and_another_differs():
    first, again, other = (train(demonstrations(9), seed=seed) for seed in (1, 1, 2))
    assert first[1] == again[1]
    np.testing.assert_array_equal(flat(first[0]), flat(again[0]))
    assert first[1] != other[1]


def test_eight_devices_do_as_one():
    one, eight = (train(demonstrations(), mesh_shape=shape)[1] for shape in ((1, 1, 1), (2, 2, 2)))
    np.testing.assert_allclose(eight, one, rtol=1e-3)


def test_every_demonstration_is_seen_once_an_epoch():
    # One demonstration per step, learning nothing: the losses of two epochs are the same set.
    demos = [(np.array([n]), np.array([n + 1, STOP])) for n in range(1, 6)]
    _, losses = train(demos, num_steps=10, batch_size=1, learning_rate=0.0)
    assert len(set(losses[:5])) == 5
    assert sorted(losses[:5]) == sorted(losses[5:])
    assert losses[:5] != losses[5:], "each epoch has its own order"


def test_no_steps_change_nothing():
    params, losses = train(demonstrations(), num_steps=0)
    assert losses == []
    assert len(flat(params))


def test_a_loss_that_is_not_finite_names_its_step():
    with pytest.raises(FloatingPointError, match="loss of step 2 is nan"):
        train(demonstrations(), learning_rate=float("nan"))


@pytest.mark.parametrize(
    ("demos", "message"),
    [
        ([], "needs demonstrations, got none"),
        ([(np.array([1]), np.arange(6))], r"demonstration 0 has 1 \+ 6 tokens.* row_tokens 6"),
        ([(np.array([1]), np.array([]))], r"demonstration 0 has 1 \+ 0 tokens"),
        ([(np.array([]), np.array([1]))], r"demonstration 0 has 0 \+ 1 tokens"),
    ],
)
def test_demonstrations_that_cannot_be_trained_on_are_refused(demos, message):
    with pytest.raises(ValueError, match=message):
        train(demos)
