"""Packing: layouts, refusals, and that no token is lost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config.settings import PACKINGS, Learner
from jaxrl_async.learner import packing
from jaxrl_async.queue import wire
from jaxrl_async.records import Share
from jaxrl_async.types import NOT_SAMPLED, Choices, Group, Record, Trajectory, Turn

each_policy = pytest.mark.parametrize("policy", PACKINGS)


def trajectory(length, prompt_length=1, first_token=1):
    """Tokens first_token, first_token + 1, …; version and log-prob follow from the token."""
    tokens = np.arange(first_token, first_token + length, dtype=np.int32)
    mask = np.arange(length) >= prompt_length
    return Trajectory(
        tokens=tokens,
        logprobs=np.where(mask, -tokens, 0).astype(np.float32),
        versions=np.where(mask, tokens + 100, NOT_SAMPLED).astype(np.int32),
        mask=mask,
        prompt_length=prompt_length,
    )


def groups_of(*lengths, group_size=1):
    """Groups of trajectories with these lengths, no token twice."""
    firsts = np.cumsum([1, *lengths])
    all_ = [trajectory(n, first_token=f) for n, f in zip(lengths, firsts, strict=False)]
    return [Group(i, 0, tuple(all_[i : i + group_size])) for i in range(0, len(all_), group_size)]


def pack(
    groups,
    advantages=None,
    *,
    microbatch_rows=2,
    row_tokens=8,
    policy="in_order",
    shared_prompts=False,
    by_prompt=False,
):
    if advantages is None:
        advantages = np.ones((len(groups), len(groups[0].trajectories)), np.float32)
    if advantages.ndim == 1:  # of groups of several sizes, one after the other
        ends = np.cumsum([len(group.samples) for group in groups])
        advantages = np.split(advantages, ends[:-1])
    learner = Learner(
        microbatch_rows=microbatch_rows,
        row_tokens=row_tokens,
        packing=policy,
        shared_prompts=shared_prompts,
    )
    return packing.Packer(learner, by_prompt=by_prompt)(groups, advantages, last=True)


def test_two_trajectories_share_a_row_and_padding_is_what_types_says():
    (batch,) = pack(groups_of(3, 2), np.array([[7.0], [9.0]]), microbatch_rows=1, row_tokens=6)
    expected = {
        "tokens": [1, 2, 3, 4, 5, 0],
        "positions": [0, 1, 2, 0, 1, 0],
        "segment_ids": [1, 1, 1, 2, 2, 0],
        "prefix_ids": [0, 0, 0, 0, 0, 0],
        "predictor_index": [0, 0, 1, 3, 3, 0],
        "mask": [False, True, True, False, True, False],
        "behavior_logprobs": [0, -2, -3, 0, -5, 0],
        "token_versions": [-1, 102, 103, -1, 105, -1],
        "advantages": [7, 7, 7, 9, 9, 0],
    }
    for name, row in expected.items():
        np.testing.assert_array_equal(getattr(batch, name), [row], err_msg=name)


def test_arrays_have_the_dtypes_of_the_vocabulary():
    (batch,) = pack(groups_of(3))
    assert batch.routes is None and batch.kept is None
    dtypes = {name: array.dtype for name, array in vars(batch).items() if array is not None}
    assert dtypes == {
        "tokens": np.int32,
        "positions": np.int32,
        "segment_ids": np.int32,
        "prefix_ids": np.int32,
        "predictor_index": np.int32,
        "mask": np.bool_,
        "behavior_logprobs": np.float32,
        "token_versions": np.int32,
        "advantages": np.float32,
        "sample_share": np.float32,
    }


@pytest.mark.parametrize("shared_prompts", [False, True])
def test_choices_lie_with_their_tokens_and_a_shared_prompt_has_those_of_the_first(shared_prompts):
    record = Record(num_layers=2, experts_per_token=1, num_experts=200, max_kept=3)
    rows = [trajectory(4, 2, first_token=1), trajectory(3, 2, first_token=1), trajectory(2)]
    for number, row in enumerate(rows[:2]):
        routes = np.arange(len(row) * 2, dtype=np.uint8).reshape(-1, 2, 1) + 100 * number
        kept = np.where(row.mask, row.tokens, -1).astype(np.int32)[:, None]
        choices = Choices(routes=routes, kept=kept)
        rows[number] = dataclasses.replace(row, choices=choices)
    learner = Learner(microbatch_rows=1, row_tokens=10, shared_prompts=shared_prompts)
    packer = packing.Packer(learner, record=record)
    groups = [Group(0, 0, tuple(rows[:2])), Group(1, 0, (rows[2],))]
    (batch,) = packer(groups, [np.ones(2, np.float32), np.ones(1, np.float32)], last=True)
    first, second = rows[0].choices.routes[:, :, 0].tolist(), rows[1].choices.routes[:, :, 0]
    expected = first + (second[2:] if shared_prompts else second).tolist()
    none = [[255, 255]] * (10 - len(expected))
    np.testing.assert_array_equal(batch.routes[0, :, :, 0], expected + none)
    sampled = batch.kept[0][batch.mask[0]]
    assert sampled[:, 0].tolist() == [3, 4, 3, -1] and (sampled[:, 1:] == -1).all()
    assert (batch.kept[0][~batch.mask[0]] == -1).all()
    padding = packer.padding()
    assert padding.routes.shape == (1, 10, 2, 1) and (padding.routes == 255).all()
    assert padding.kept.shape == (1, 10, 3) and (padding.kept == -1).all()
    found = packing.kept_metrics([batch])
    assert found == {"rollout/kept_mean": 0.75, "rollout/kept_bound_share": 0}
    assert packing.kept_metrics([packing.empty_batch(1, 4)]) == {}


def test_in_order_is_next_fit():
    # 5 | 4 does not fit behind 5 (8 columns) | 3 fits behind 4 | 6 opens the third row.
    rows, columns = packing.assign_rows(np.array([5, 4, 3, 6]), row_tokens=8, policy="in_order")
    np.testing.assert_array_equal(rows, [0, 1, 1, 2])
    np.testing.assert_array_equal(columns, [0, 0, 4, 0])


def test_first_fit_goes_by_length_and_fills_gaps():
    # By length: 6 → row 0; 5 → row 1; 3 behind the 5; the 2s behind the 6 and on a new row.
    rows, columns = packing.assign_rows(np.array([2, 5, 3, 6, 2]), row_tokens=8, policy="first_fit")
    np.testing.assert_array_equal(rows, [0, 1, 1, 0, 2])
    np.testing.assert_array_equal(columns, [6, 0, 5, 0, 0])


def test_fewest_goes_by_length_into_the_row_that_holds_the_fewest_and_of_equals_the_emptiest():
    # By length: 7 and 5 open rows 0 and 1; the 3 goes behind the 5, the 2 opens row 2. Row 0 has room for the
    # first 1, and so has row 2: both hold one, row 2 is emptier. Then row 0, with one, comes before row 2.
    rows, columns = packing.assign_rows(np.array([1, 5, 2, 7, 3, 1]), row_tokens=8, policy="fewest")
    np.testing.assert_array_equal(rows, [2, 1, 2, 0, 1, 0])
    np.testing.assert_array_equal(columns, [2, 0, 0, 0, 5, 7])


@given(lengths=st.lists(st.integers(1, 12), max_size=60), row_tokens=st.integers(12, 40))
def test_fewest_is_the_algorithm_of_its_source(lengths, row_tokens):
    """Algorithm 1 of AReaL as it is written, over lists of lengths."""
    expected = []
    for length in sorted(lengths, reverse=True):
        with_room = [row for row in expected if sum(row) + length <= row_tokens]
        if with_room:
            min(with_room, key=lambda row: (len(row), sum(row))).append(length)
        else:
            expected.append([length])
    rows, columns = packing.assign_rows(
        np.array(lengths, int), row_tokens=row_tokens, policy="fewest"
    )
    found = [[] for _ in expected]
    for row, _, length in sorted(zip(rows, columns, lengths, strict=True)):
        found[row].append(length)
    assert found == expected


@each_policy
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_rows_hold_every_sequence_once_without_overlap_or_holes(policy, lengths):
    rows, columns = packing.assign_rows(np.array(lengths), row_tokens=16, policy=policy)
    used = {}
    for row, column, length in sorted(zip(rows, columns, lengths, strict=True)):
        assert column == used.get(row, 0), "a segment starts where the one before it ends"
        used[row] = column + length
    assert max(used.values()) <= 16
    assert sorted(used) == list(range(len(used)))
    # Only in order are two rows left half empty: the second would have fitted into the first.
    assert sum(n <= 8 for n in used.values()) <= (len(used) if policy == "in_order" else 1)


@each_policy
@given(lengths=st.lists(st.integers(2, 16), min_size=1, max_size=40))
def test_every_token_arrives_with_what_is_about_it(policy, lengths):
    groups = groups_of(*lengths)
    advantages = np.arange(1, len(groups) + 1, dtype=np.float32)[:, None]
    batches = pack(groups, advantages, microbatch_rows=3, row_tokens=16, policy=policy)
    assert {batch.tokens.shape for batch in batches} == {(3, 16)}
    found = {}
    for batch in batches:
        rows, columns = np.nonzero(batch.segment_ids)
        for row, column in zip(rows, columns, strict=True):
            cell = (row, column)
            found[int(batch.tokens[cell])] = (
                batch.positions[cell],
                batch.mask[cell],
                batch.behavior_logprobs[cell],
                batch.token_versions[cell],
                batch.advantages[cell],
            )
            if batch.mask[cell]:  # Tokens count up within a trajectory.
                assert batch.tokens[row, batch.predictor_index[cell]] == batch.tokens[cell] - 1
    expected = {
        int(token): (i, t.mask[i], t.logprobs[i], t.versions[i], advantage)
        for (group, (advantage,)) in zip(groups, advantages, strict=True)
        for t in group.trajectories
        for i, token in enumerate(t.tokens)
    }
    assert found == expected


def test_segments_of_a_row_are_numbered_by_column():
    (batch,) = pack(groups_of(2, 4, 2), policy="first_fit", microbatch_rows=1)
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 2, 2, 3, 3]])


def test_in_order_keeps_the_lease_order():
    batches = pack(groups_of(5, 1, 7, 2, 6), microbatch_rows=2)
    order = np.concatenate([batch.tokens[batch.segment_ids > 0] for batch in batches])
    np.testing.assert_array_equal(order, np.arange(1, 22))


def test_advantages_belong_to_the_trajectories_of_a_group():
    (batch,) = pack(groups_of(2, 2, 2, 2, group_size=2), np.array([[1.0, 2], [3, 4]]))
    np.testing.assert_array_equal(batch.advantages[0], [1, 1, 2, 2, 3, 3, 4, 4])


def with_turns(trajectory, *ends):
    return dataclasses.replace(trajectory, turns=tuple(Turn(end, 0.0) for end in ends))


@pytest.mark.parametrize("shared_prompts", [False, True])
def test_advantages_of_turns_belong_to_the_tokens_up_to_their_ends(shared_prompts):
    one, two = trajectory(6), trajectory(5)
    groups = [Group(0, 0, (with_turns(one, 3, 6), two)), Group(1, 0, (with_turns(two, 4, 5), one))]
    advantages = np.array([[[1.0, 2], [3, 0]], [[4, 5], [6, 0]]])
    found = {}
    for batch in pack(groups, advantages, row_tokens=13, shared_prompts=shared_prompts):
        for row in range(len(batch.tokens)):
            sampled = batch.mask[row]
            found[row] = batch.advantages[row][sampled].tolist()
    # The prompt is one token.
    assert found == {0: [1, 1, 2, 2, 2, 3, 3, 3, 3], 1: [4, 4, 4, 5, 6, 6, 6, 6, 6]}


def test_chunks_may_have_different_numbers_of_turns():
    short, long = with_turns(trajectory(3), 3), with_turns(trajectory(3), 2, 3)
    learner = Learner(microbatch_rows=2, row_tokens=3, num_processes=1)
    packer = packing.Packer(learner)
    assert packer([Group(0, 0, (short,))], np.array([[7.0]]), last=False) == []
    (batch,) = packer([Group(1, 0, (long,))], np.array([[[8.0, 9.0]]]), last=True)
    assert batch.advantages.tolist() == [[7, 7, 7], [8, 8, 9]]


def test_the_last_microbatch_is_filled_up_with_empty_rows():
    batches = pack(groups_of(8, 8, 8), microbatch_rows=2)
    empty = packing.empty_batch(1, 8)
    assert len(batches) == 2
    for name, array in vars(empty).items():
        if array is not None:
            np.testing.assert_array_equal(getattr(batches[1], name)[1:], array, err_msg=name)


def test_padding_share_counts_padding_over_all_tokens():
    # 3 rows of 8 in 2 microbatches of 2 rows: 32 columns, 21 of them used.
    batches = pack(groups_of(7, 6, 8), microbatch_rows=2)
    assert packing.padding_share(batches) == 1 - 21 / 32
    assert packing.padding_share([packing.empty_batch(2, 4)]) == 1
    assert packing.padding_share([]) == 0


def test_a_trajectory_longer_than_a_row_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"trajectory .*\b9\b.* row_tokens .*8"):
        pack(groups_of(3, 9))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=f"{', '.join(PACKINGS)}; .*'best_fit'"):
        pack(groups_of(3), policy="best_fit")


def test_advantages_that_do_not_match_the_trajectories_are_refused():
    with pytest.raises(ValueError, match=r"3 advantages .*\b2 groups"):
        pack(groups_of(3, 3), np.ones((3, 1)))
    with pytest.raises(ValueError, match=r"3 advantages .*\b2 samples"):
        pack(groups_of(3, 3, group_size=2), np.ones((1, 3)))


def test_no_groups_make_no_batches():
    for shared_prompts in (False, True):
        assert pack([], np.ones((0, 4)), shared_prompts=shared_prompts) == []


def test_minibatches_are_consecutive_slices():
    assert packing.split_minibatches("abcdef", 3) == ["ab", "cd", "ef"]


def test_minibatches_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match=r"num_minibatches .*4.* 6 groups"):
        packing.split_minibatches("abcdef", 4)


def shared_groups_of(*shapes):
    """Groups (prompt length, completion lengths …), no token twice but for a group's prompt."""
    groups, first = [], 1
    for prompt, *completions in shapes:
        shared, trajectories = np.arange(first, first + prompt), []
        first += prompt
        for length in completions:
            t = trajectory(prompt + length, prompt, first - prompt)
            tokens = np.concatenate([shared, t.tokens[prompt:]]).astype(np.int32)
            trajectories.append(dataclasses.replace(t, tokens=tokens))
            first += length
        groups.append(Group(len(groups), 0, tuple(trajectories)))
    return groups


def test_a_shared_prompt_stands_once_before_its_groups_completions():
    groups = shared_groups_of((2, 2, 1), (1, 2))
    (batch,) = pack(
        groups, np.array([7.0, 8, 9]), microbatch_rows=1, row_tokens=9, shared_prompts=True
    )
    expected = {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 0],
        "positions": [0, 1, 2, 3, 2, 0, 1, 2, 0],
        "segment_ids": [1, 1, 2, 2, 3, 4, 5, 5, 0],
        "prefix_ids": [0, 0, 1, 1, 1, 0, 4, 4, 0],
        # Both completions begin behind the prompt's last column.
        "predictor_index": [0, 0, 1, 2, 1, 5, 5, 6, 0],
        "mask": [False, False, True, True, True, False, True, True, False],
        "behavior_logprobs": [0, 0, -3, -4, -5, 0, -7, -8, 0],
        "token_versions": [-1, -1, 103, 104, 105, -1, 107, 108, -1],
    }
    for name, row in expected.items():
        np.testing.assert_array_equal(getattr(batch, name), [row], err_msg=name)
    np.testing.assert_array_equal(batch.advantages[batch.mask], [7, 7, 8, 9, 9])


def test_a_group_too_long_for_a_row_is_divided_and_its_prompt_repeated():
    # Rows of 8 with a prompt of 3 have room for 5: 2 + 3 | 4 | 5. The next group fits behind the 4.
    groups = shared_groups_of((3, 2, 3, 4, 5), (1, 0))
    batches = pack(groups, np.ones(5), row_tokens=8, microbatch_rows=3, shared_prompts=True)
    np.testing.assert_array_equal(
        batches[0].tokens,
        [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 10, 11, 12, 0], [1, 2, 3, 13, 14, 15, 16, 17]],
    )
    assert len(batches) == 2 and batches[1].tokens[0].tolist() == [18] + [0] * 7


def test_first_fit_places_the_parts_of_groups_by_their_length():
    # Parts of 3 + 2, 1 + 6 and 2 + 1 tokens: 7 → row 0, 5 → row 1, 3 behind it.
    groups = shared_groups_of((3, 2), (1, 6), (2, 1))
    (batch,) = pack(groups, row_tokens=8, policy="first_fit", shared_prompts=True)
    np.testing.assert_array_equal(
        batch.tokens, [[6, 7, 8, 9, 10, 11, 12, 0], [1, 2, 3, 4, 5, 13, 14, 15]]
    )


shared_shapes = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
    min_size=1,
    max_size=8,
).map(lambda shapes: [(prompt, *completions) for prompt, completions in shapes])


@each_policy
@settings(deadline=None)
@given(shapes=shared_shapes)
def test_every_completion_token_sees_its_trajectory_so_far_and_nothing_else(policy, shapes):
    groups = shared_groups_of(*shapes)
    trajectories = [t for group in groups for t in group.trajectories]
    advantages = np.arange(1, len(trajectories) + 1, dtype=np.float32)
    batches = pack(
        groups, advantages, microbatch_rows=4, row_tokens=16, policy=policy, shared_prompts=True
    )
    assert {batch.tokens.shape for batch in batches} == {(4, 16)}
    of_token = {
        int(token): (t, advantage)
        for t, advantage in zip(trajectories, advantages, strict=True)
        for token in t.completion
    }
    prompts = {
        int(t)
        for group in groups
        for t in group.trajectories[0].tokens[: shapes[group.prompt_index][0]]
    }
    column, seen = np.arange(16), []
    for batch in batches:
        for row, segments in enumerate(batch.segment_ids):
            used = np.count_nonzero(segments)
            assert (segments[:used] > 0).all(), "padding comes last"
            for c in range(used):
                token = int(batch.tokens[row, c])
                allowed = (column <= c) & (segments > 0)
                allowed &= (segments == segments[c]) | (segments == batch.prefix_ids[row, c])
                visible = batch.tokens[row, allowed]
                np.testing.assert_array_equal(
                    batch.positions[row, allowed], np.arange(len(visible))
                )
                if token in prompts:
                    assert batch.prefix_ids[row, c] == 0 and not batch.mask[row, c]
                    continue
                t, advantage = of_token[token]
                np.testing.assert_array_equal(visible, t.tokens[: len(visible)])
                at = len(visible) - 1
                assert t.tokens[at] == token and batch.mask[row, c]
                assert batch.tokens[row, batch.predictor_index[row, c]] == t.tokens[at - 1]
                assert batch.behavior_logprobs[row, c] == t.logprobs[at]
                assert batch.token_versions[row, c] == t.versions[at]
                assert batch.advantages[row, c] == advantage
                seen.append(token)
    assert sorted(seen) == sorted(of_token), "every completion token once"


@each_policy
@settings(deadline=None)
@given(shapes=shared_shapes)
def test_shared_rows_repeat_a_prompt_only_where_a_group_is_divided(policy, shapes):
    segments = packing.lay_out(
        [[prompt + n for n in completions] for prompt, *completions in shapes],
        [prompt for prompt, *_ in shapes],
        row_tokens=16,
        policy=policy,
        shared_prompts=True,
    )
    used = {}
    for row, column, length in sorted(
        zip(segments.row, segments.column, segments.length, strict=True)
    ):
        assert column == used.get(row, 0), "a segment starts where the one before it ends"
        used[row] = column + length
    assert max(used.values()) <= 16
    heads = np.flatnonzero(segments.prefix < 0)
    expected = 0
    for prompt, *completions in shapes:  # Greedily, in order.
        expected, room = expected + 1, 16 - prompt
        for n in completions:
            if n > room:
                expected, room = expected + 1, 16 - prompt
            room -= n
    assert len(heads) == expected
    behind = segments.prefix >= 0
    assert (segments.row[behind] == segments.row[segments.prefix[behind]]).all()


def test_a_completion_that_fits_no_row_with_its_prompt_is_refused():
    with pytest.raises(ValueError, match=r"trajectory .*\b9\b.* row_tokens .*8"):
        pack(shared_groups_of((4, 2, 5, 1)), np.ones(3), shared_prompts=True)


def test_prompts_that_differ_cannot_be_shared():
    first, second = shared_groups_of((3, 2), (3, 2))
    mixed = Group(17, 0, first.trajectories + second.trajectories)
    with pytest.raises(ValueError, match=r"shared_prompts.* prompt_index 17 .*\b3\b.*\b3\b"):
        pack([mixed], row_tokens=16, shared_prompts=True)
    t = first.trajectories[0]
    longer = Group(18, 0, (t, dataclasses.replace(t, prompt_length=4)))
    with pytest.raises(ValueError, match=r"shared_prompts.* prompt_index 18 .*\b3\b.*\b4\b"):
        pack([longer], row_tokens=16, shared_prompts=True)
    assert pack([mixed], row_tokens=16), "rows of whole trajectories take any prompts"


def test_padding_share_counts_a_shared_prompt_once():
    batches = pack(
        shared_groups_of((3, 2, 1)), row_tokens=8, microbatch_rows=1, shared_prompts=True
    )
    assert packing.padding_share(batches) == 2 / 8


def sampled_groups(*groups):
    """Groups of samples, each a tuple of rows (prompt length, completion length); the first rows share a prompt."""
    found, first = [], 1
    for samples in groups:
        shared, rows_of_samples = np.arange(first, first + samples[0][0][0]), []
        first += len(shared)
        for shapes in samples:
            rows = []
            for number, (prompt, completion) in enumerate(shapes):
                t = trajectory(prompt + completion, prompt, first)
                first += len(t)
                if number == 0:
                    tokens = np.concatenate([shared, t.tokens[prompt:]]).astype(np.int32)
                    t = dataclasses.replace(t, tokens=tokens)
                rows.append(t)
            rows_of_samples.append(rows)
        found.append(Group.of_samples(len(found), 0, rows_of_samples))
    return found


SAMPLED = (
    ([(2, 3), (3, 1), (1, 4)], [(2, 1)]),
    ([(3, 2)], [(3, 2)]),
    ([(1, 1)], [(1, 2), (6, 2)]),
)


@pytest.mark.parametrize("shared_prompts", [False, True])
@pytest.mark.parametrize("policy", PACKINGS)
@pytest.mark.parametrize("by_prompt", [False, True])
def test_all_rows_of_a_sample_have_its_advantage_and_their_share_of_it(
    policy, shared_prompts, by_prompt
):
    groups = sampled_groups(*SAMPLED)
    advantages = np.arange(1.0, 7).reshape(3, 2)
    batches = pack(
        groups, advantages, policy=policy, shared_prompts=shared_prompts, by_prompt=by_prompt
    )
    found = {}
    for batch in batches:
        for cell in zip(*np.nonzero(batch.mask), strict=True):
            token = int(batch.tokens[cell])
            assert token not in found, "every sampled token once"
            found[token] = (batch.advantages[cell], batch.sample_share[cell])
    expected = {}
    for group, of_group in zip(groups, advantages, strict=True):
        for rows, advantage in zip(group.samples, of_group, strict=True):
            total = sum(row.num_sampled for row in (group.trajectories if by_prompt else rows))
            for row in rows:
                share = np.float32(row.num_sampled / total)
                expected |= {int(t): (advantage, share) for t in row.tokens[row.mask]}
    assert found == expected


def test_the_first_rows_of_a_group_share_its_prompt_and_further_ones_stand_alone():
    (batch,) = pack(
        sampled_groups(([(2, 1), (1, 2)], [(2, 2)])),
        np.array([[7.0, 8.0]]),
        microbatch_rows=1,
        row_tokens=9,
        shared_prompts=True,
    )
    # The prompt 1, 2; its completions; then the further row, 6, 7, 8.
    assert batch.tokens.tolist() == [[1, 2, 5, 11, 12, 6, 7, 8, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 3, 3, 4, 5, 5, 0]]
    assert batch.prefix_ids.tolist() == [[0, 0, 1, 1, 1, 0, 4, 4, 0]]
    assert batch.advantages.tolist() == [[7, 7, 7, 8, 8, 7, 7, 7, 0]]
    np.testing.assert_allclose(batch.sample_share[0][batch.mask[0]], [1 / 3, 1, 1, 2 / 3, 2 / 3])


def test_rows_of_samples_wait_for_the_next_chunk_with_their_advantage_and_share():
    groups, advantages = sampled_groups(*SAMPLED), np.arange(1.0, 7).reshape(3, 2)
    for shared_prompts in (False, True):
        layout = {"microbatch_rows": 2, "row_tokens": 8, "shared_prompts": shared_prompts}
        packer = packing.Packer(Learner(**layout, packing="in_order", num_processes=1))
        batches = []
        for i, group in enumerate(groups):
            batches += packer([group], advantages[i : i + 1], last=i == 2)
        whole = pack(groups, advantages, shared_prompts=shared_prompts)
        assert len(batches) == len(whole)
        for name in vars(whole[0]):
            for one, other in zip(batches, whole, strict=True):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def test_two_processes_make_as_many_microbatches_of_samples_of_several_rows():
    single = ([(1, 1)], [(1, 1)])  # The second process has these, and pads.
    groups = sampled_groups(*SAMPLED, single, single, single)
    outlines = [wire.decode_outline(wire.encode_group(judged(group))) for group in groups]
    layout = {"microbatch_rows": 2, "row_tokens": 8, "packing": "in_order"}
    batches = []
    for process in range(2):
        packer = packing.Packer(Learner(**layout, num_processes=2), process=process)
        own = Share(process, 2).of_minibatch(6)
        seen = [group if i in own else outlines[i] for i, group in enumerate(groups)]
        batches.append(packer(seen, np.ones((6, 2)), last=True))
    assert len(batches[0]) == len(batches[1]) > 1
    packed = [batch for of_process in batches for batch in of_process]
    sampled = np.concatenate([batch.tokens[batch.mask] for batch in packed])
    rows = [t for group in groups for t in group.trajectories]
    assert sorted(sampled) == sorted(np.concatenate([t.tokens[t.mask] for t in rows]))


def judged(group):
    rows = tuple(dataclasses.replace(t, reward=0.0) for t in group.trajectories)
    return dataclasses.replace(group, trajectories=rows)
