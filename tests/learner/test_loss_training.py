"""Losses by name in the learner's programs: compilations, invariances, the pull of a penalty."""

import dataclasses

import jax
import numpy as np
import pytest
from fixtures.small_learner import assert_same, flat, params_on
from fixtures.train_steps import (
    DG,
    DR_GRPO,
    GSPO,
    LOSSES,
    PENALISED,
    VERSION,
    accumulated,
    groups_of,
    make,
    pack,
)

PROGRAMS = ("penalised",)  # with a reference; the rest with --long


def microbatches(microbatch_rows):
    return pack(groups_of(num_groups=13), microbatch_rows=microbatch_rows)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, id=name, marks=() if name in PROGRAMS else pytest.mark.long)
        for name, loss in LOSSES.items()
    ],
)
def test_a_loss_compiles_once(loss):
    jax.clear_caches()  # See test_train_step.
    mesh, train_step = make(loss, max_grad_norm=0.1)  # One of its own: nothing is compiled yet.
    (batch,) = pack(groups_of())
    frozen = params_on(mesh) if loss.needs_reference else None
    state, compiled = train_step.init(params_on(mesh)), []
    accumulator = train_step.zero_accumulator()
    for version in range(3):
        for _ in range(2):
            anchor = train_step.anchor(state.params, batch)
            accumulator = train_step.accumulate(
                state.params, accumulator, batch, anchor, VERSION + version, frozen
            )
        state, accumulator, metrics = train_step.update(state, accumulator)
        assert metrics["finite"] == 1
        compiled.append(train_step.num_compilations())
    # init, zeros, accumulate, update, and score where needed
    assert compiled == [4 + loss.needs_recompute] * 3


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(GSPO, id="gspo"),
        pytest.param(DR_GRPO, id="dr_grpo", marks=pytest.mark.long),
        pytest.param(PENALISED, id="penalised", marks=pytest.mark.long),
    ],
)
def test_no_cut_into_microbatches_changes_an_update_and_its_denominator_is_of_the_whole(loss):
    batches = microbatches(2)
    trajectories = sum(
        len(set(ids[mask]))
        for batch in batches
        for ids, mask in zip(batch.segment_ids, batch.mask, strict=True)
    )
    assert trajectories == 26 and len(batches) == 4
    denominator = trajectories * (loss.fixed_length or 1)
    one, four = accumulated(microbatches(8), make(loss)), accumulated(batches, make(loss))
    assert_same(four, one)
    expected = flat(one.grads) / denominator
    mesh, train_step = make(loss)
    before, losses = flat(params_on(mesh)), []
    for accumulator in (one, four):
        state, _, metrics = train_step.update(train_step.init(params_on(mesh)), accumulator)
        np.testing.assert_allclose(before - flat(state.params), expected, rtol=1e-3, atol=1e-6)
        losses.append(float(metrics["loss/policy"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["k1", pytest.param("k2", marks=pytest.mark.long), "k3"])
def test_a_penalty_pulls_to_its_reference_and_rests_there(name):
    loss = dataclasses.replace(DG, kl=name, kl_coefficient=0.02)
    mesh, train_step = make(loss)
    params = params_on(mesh)
    (batch,) = pack(groups_of())
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    own = params_on(mesh)
    other = jax.tree.map(lambda x: x * 1.1, params)

    def gradient_to(reference):
        zeros = train_step.zero_accumulator()
        return flat(train_step.accumulate(params, zeros, batch, None, VERSION, reference).grads)

    # k1's gradient is ∇log π wherever the reference stands: its mean over the policy is 0, no sample's is.
    rest, pull = np.abs(gradient_to(own)).max(), np.abs(gradient_to(other)).max()
    assert (rest < 1e-4 * pull) == (name != "k1")
    if name == "k1":
        return
    state, penalties = train_step.init(params), []
    for _ in range(4):
        accumulator = train_step.accumulate(
            state.params, train_step.zero_accumulator(), batch, None, VERSION, other
        )
        state, _, metrics = train_step.update(state, accumulator)
        penalties.append(float(metrics["policy/kl_penalty"]))
    assert penalties == sorted(penalties, reverse=True) and penalties[-1] < 0.95 * penalties[0]
