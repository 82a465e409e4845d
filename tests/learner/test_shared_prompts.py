"""Rows that share prompts: the same log-probs, losses and gradients as a row for every trajectory."""

import dataclasses

import jax
import numpy as np
import pytest
from fixtures.models import TINY, tiny
from fixtures.small_learner import assert_same, params_on
from fixtures.train_steps import (
    CURRENT,
    DR_GRPO,
    GSPO,
    LOSSES,
    RECOMPUTE,
    accumulated,
    group_of,
    make,
    pack,
    updated,
)

from jaxrl_async.config.settings import PACKINGS

# Each of the rows' 32 tokens at most, of groups [prompt; completions].
GROUPS = {
    "one completion": [group_of(4, 7)],
    "a prompt of one token": [group_of(1, 5, 3, 6, 2)],
    "equal lengths": [group_of(6, 4, 4, 4, 4)],
    "unequal lengths and a padded tail": [group_of(5, 9, 1, 4, 2)],
    "a row that is full": [group_of(8, 12, 12)],
    "several groups to a row": [group_of(3, 4, 2, index=i) for i in range(7)],
    "a group over several rows": [group_of(9, 10, 20, 3, 22)],
    "all of these": [
        group_of(3, 8, 1, 5, 9, index=0),
        group_of(12, 9, 13, 20, 4, index=1),
        group_of(1, 2, 3, 2, 1, index=2),
        group_of(7, 6, 25, 2, 11, index=3),
    ],
}


def logprobs_of(batches, made=None):
    """Log-probs of the sampled tokens at random weights, of all rows and columns in order."""
    mesh, train_step = make() if made is None else made
    params = params_on(mesh)
    return np.concatenate(
        [np.asarray(train_step.score(params, batch))[batch.mask] for batch in batches]
    )


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_log_probs_equal_those_of_replicated_rows(groups):
    # In order, the completions of both lie in the order of the trajectories.
    shared, replicated = (pack(groups, shared_prompts=shared) for shared in (True, False))
    np.testing.assert_allclose(logprobs_of(shared), logprobs_of(replicated), atol=1e-5)


@pytest.mark.parametrize("policy", PACKINGS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_gradients_and_statistics_equal_those_of_replicated_rows(groups, policy):
    shared = accumulated(pack(groups, shared_prompts=True, policy=policy), make())
    assert_same(shared, accumulated(pack(groups, shared_prompts=False), make()), tolerance=1e-5)


@pytest.mark.parametrize("shared_prompts", [False, True])
def test_gradients_by_the_kernel_for_tpus_equal_those_by_xla(shared_prompts):
    layout = dict(microbatch_rows=1, row_tokens=128, shared_prompts=shared_prompts)
    batches = pack(GROUPS["all of these"], **layout)
    splash = make(attention_kernel="splash", row_tokens=128, shared_prompts=shared_prompts)
    assert_same(accumulated(batches, splash), accumulated(batches), tolerance=1e-5)


@pytest.mark.parametrize(("mesh_shape", "context"), [((1, 1, 1), 1), ((1, 2, 2), 2)])
def test_windows_end_where_they_end_in_replicated_rows(mesh_shape, context):
    # Windows of 4 tokens end in the prompts of 7 to 12, behind completions of others.
    config, groups = tiny(family="gemma3", windows=(4, 0), remat=True), GROUPS["all of these"]
    one = make(config=dataclasses.replace(config, remat=False))
    expected = accumulated(pack(groups, shared_prompts=False), one, config=config)
    made = make(mesh_shape=mesh_shape, context=context, config=config)
    found = accumulated(pack(groups, shared_prompts=True), made, config=config)
    assert_same(found, expected, tolerance=1e-5)


def test_a_kernel_without_windows_is_refused_before_anything_is_compiled():
    config = tiny(family="gemma3", windows=(4, 0))
    with pytest.raises(ValueError, match="'splash' has no windows.* 4 tokens"):
        make(config=config, attention_kernel="splash", row_tokens=128)


ALL = {"recompute": RECOMPUTE, "current": CURRENT} | LOSSES
SHORT = ("recompute", "gspo", "dr_grpo")  # One of each ratio and reduction.


@pytest.mark.parametrize(
    "loss", [pytest.param(ALL[n], id=n, marks=() if n in SHORT else pytest.mark.long) for n in ALL]
)
def test_every_objective_is_the_same_as_on_replicated_rows_by_the_same_programs(loss):
    groups, made = GROUPS["all of these"], make(loss)
    replicated = accumulated(pack(groups, shared_prompts=False), made)
    compiled = made[1].num_compilations()
    assert_same(accumulated(pack(groups, shared_prompts=True), made), replicated, tolerance=1e-5)
    assert made[1].num_compilations() == compiled


@pytest.mark.parametrize("loss", [GSPO, DR_GRPO], ids=["gspo", "dr_grpo"])
def test_a_prompt_is_no_sequence_of_the_denominator(loss):
    _, train_step = made = make(loss)
    accumulator = accumulated(pack(GROUPS["all of these"], shared_prompts=True), made)
    denominator = train_step._statistics.denominator(accumulator.sums)
    np.testing.assert_allclose(denominator, 16 * (loss.fixed_length or 1), rtol=1e-6)


def test_an_updates_metrics_are_the_same_as_on_replicated_rows():
    groups, (_, train_step) = GROUPS["all of these"], make()
    found, expected = (
        jax.device_get(updated(train_step, pack(groups, shared_prompts=shared))[0][2])
        for shared in (True, False)
    )
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_eight_devices_agree_with_one():
    batches = pack(GROUPS["all of these"], shared_prompts=True)
    eight = accumulated(batches, make(RECOMPUTE, (2, 2, 2)))
    assert_same(eight, accumulated(batches, make(RECOMPUTE)))


def test_no_completion_and_no_other_group_changes_a_completions_log_probs():
    groups = [group_of(4, 6, 5, 4, index=0), group_of(2, 3, 3, index=1)]
    (batch,) = pack(groups, shared_prompts=True, advantages=[np.ones(3), np.ones(2)])
    mesh, train_step = make()
    params = params_on(mesh)
    before = np.asarray(train_step.score(params, batch))
    segments = batch.segment_ids[0]
    assert segments.max() == 7 and not batch.segment_ids[1:].any()
    for changed, seen_by in {1: {1, 2, 3, 4}, 2: {2}, 3: {3}, 4: {4}, 5: {5, 6, 7}, 7: {7}}.items():
        first = np.flatnonzero(segments == changed)[0]
        tokens = batch.tokens.copy()
        tokens[0, first] = (tokens[0, first] + 1) % TINY.vocab_size
        after = np.asarray(train_step.score(params, dataclasses.replace(batch, tokens=tokens)))
        moved = np.unique(segments[(after != before)[0] & (segments > 0)])
        assert set(moved) == seen_by, changed
