"""Warm start: it learns, repeats itself by seed, and refuses bad demonstrations."""

import dataclasses

import jax
import numpy as np
import pytest
from fixtures.models import TINY
from fixtures.small_learner import flat, params_on

from jaxrl_async.config.settings import WarmStart
from jaxrl_async.learner import train_step
from jaxrl_async.learner.warm_start import warm_start
from jaxrl_async.models import sharding
from jaxrl_async.types import Batch

STOP = 0


def demonstrations():
    """A prompt of one token n; the completion is n + 1, n + 2 and the stop token."""
    return [(np.array([n]), np.array([n + 1, n + 2, STOP])) for n in range(1, 9)]


def train(demos, mesh_shape=(1, 1, 1), head_chunk_tokens=None, seed=0, **settings):
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    losses = []

    def report(step, loss):
        losses.append(loss)
        assert step == len(losses)

    stage = WarmStart(num_steps=6, batch_size=8, row_tokens=6, learning_rate=1e-2)
    stage = dataclasses.replace(stage, **settings)
    params = params_on(mesh)
    params = warm_start(
        TINY,
        mesh,
        params,
        [demo if len(demo) == 3 else (*demo, np.ones(len(demo[1]), bool)) for demo in demos],
        stage,
        head_chunk_tokens=head_chunk_tokens,
        seed=seed,
        report=report,
    )
    return params, losses


@pytest.fixture(scope="module")
def learnt():
    """Parameters and losses after 120 steps on the whole set at once."""
    return train(demonstrations(), num_steps=120)


def logprobs_of(params, *rows):
    """[B, T] of completed rows of up to 6 tokens."""
    tokens, segments = np.zeros((2, len(rows), 6), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    column = np.tile(np.arange(6, dtype=np.int32), (len(rows), 1))
    unshared, predictor = np.zeros_like(segments), np.maximum(column - 1, 0)
    batch = Batch(tokens, column, segments, unshared, predictor, *[None] * 5)
    return train_step.policy_logprobs(TINY, params, batch, temperature=1.0, head_chunk_tokens=None)[
        0
    ]


def test_a_rule_is_learnt_with_its_stop_token(learnt):
    params, losses = learnt
    assert len(losses) == 120
    assert np.mean(losses[-10:]) < 0.1 < 2 < losses[0]
    assert np.all(np.exp(logprobs_of(params, [3, 4, 5, STOP])[0, 1:4]) > 0.8)


def test_the_loss_is_the_mean_over_completion_tokens(learnt):
    params = params_on(sharding.make_mesh(1, 1, 1, jax.devices()[:1]))
    logprobs = logprobs_of(params, *(np.concatenate(demo) for demo in demonstrations()))
    np.testing.assert_allclose(learnt[1][0], -logprobs[:, 1:4].mean(), rtol=1e-5)


def test_a_seed_repeats_itself(learnt):
    assert train(demonstrations())[1] == learnt[1][:6]


def test_eight_devices_do_as_one(learnt):
    _, losses = train(demonstrations(), mesh_shape=(2, 2, 2))
    np.testing.assert_allclose(losses, learnt[1][:6], rtol=1e-3)


def test_every_demonstration_is_seen_once_an_epoch():
    # One demonstration per step, learning nothing: the losses of two epochs are the same set.
    demos = [(np.array([n]), np.array([n + 1, STOP])) for n in range(1, 6)]
    settings = {"num_steps": 10, "batch_size": 1, "learning_rate": 0.0}
    losses, other = (train(demos, seed=seed, **settings)[1] for seed in (0, 1))
    assert len(set(losses[:5])) == 5
    assert sorted(losses[:5]) == sorted(losses[5:]) == sorted(other[:5])
    assert losses[:5] != losses[5:], "each epoch has its own order"
    assert losses != other, "and so has each seed"


def test_no_steps_change_nothing():
    params, losses = train(demonstrations(), num_steps=0)
    assert losses == []
    first = params_on(sharding.make_mesh(1, 1, 1, jax.devices()[:1]))
    np.testing.assert_array_equal(flat(params), flat(first))


def test_a_loss_that_is_not_finite_names_its_step():
    with pytest.raises(FloatingPointError, match="step 2 .*nan"):
        train(demonstrations(), learning_rate=float("nan"))


def test_tokens_that_are_not_the_policys_are_read_and_not_imitated():
    (prompt, completion), whole = demonstrations()[0], np.array([True, False, True])
    other = completion.copy()
    other[1] = 7
    (_, masked), (_, changed), (_, removed) = (
        train([(prompt, ids, own)] * 8, num_steps=1)
        for ids, own in ((completion, whole), (other, whole), (completion, np.ones(3, bool)))
    )
    # The first step's loss: of two tokens, the second of which is predicted from what stands before it.
    logprobs = logprobs_of(train(demonstrations(), num_steps=0)[0], np.append(prompt, completion))
    own = logprobs[0, 1:4][whole]
    np.testing.assert_allclose(masked, -own.mean(), rtol=1e-5)
    assert changed != masked and removed != masked


@pytest.mark.parametrize(
    ("demos", "message"),
    [
        ([], "demonstrations.* none"),
        ([(np.array([1]), np.arange(6))], r"demonstration 0 has 1 \+ 6 tokens.* row_tokens 6"),
        ([(np.array([1]), np.array([]))], r"demonstration 0 has 1 \+ 0 tokens"),
        ([(np.array([]), np.array([1]))], r"demonstration 0 has 0 \+ 1 tokens"),
    ],
)
def test_demonstrations_that_cannot_be_trained_on_are_refused(demos, message):
    with pytest.raises(ValueError, match=message):
        train(demos)
