"""The rows of a sample: which call continues which, the seed of each, and the budget that counts it."""

import asyncio

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_async.rollout.context import Context, RolloutError, TrajectoryBuilder, rng_of
from jaxrl_async.servers.port import Completion
from jaxrl_async.types import Prompt

PROMPT = Prompt(0, np.array([2, 3], np.int32), "", "")
# Of the rows that begin after the first one, by `make_rng`: it is the same on every machine.
SEEDS = [156735756, 1770521436, 513176933]


def make_rng():
    return rng_of("rollout", 1, 7, 0, 0)


class Policy:
    """Samples tokens that nothing else is; notes the seed of each call, and the positions that it drew with it."""

    def __init__(self, num=3, reason="length"):
        self.num, self.reason = num, reason
        self.next, self.seeds, self.drawn = 1000, [], []
        self.error = None

    async def __call__(self, tokens, *, max_new_tokens=8, sampling_seed=None):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.seeds.append(sampling_seed)
        count = min(self.num, max_new_tokens)
        ids = np.arange(self.next, self.next + count, dtype=np.int32)
        self.next += count
        self.drawn += [(sampling_seed, len(tokens) + i) for i in range(count)]
        return Completion(ids, np.zeros(count, np.float32), np.zeros(count, np.int32), self.reason)


def context_of(policy, **changes):
    bounds = {"vocab_size": 10**6, "max_new_tokens": 8, "max_row_tokens": 10**4}
    return Context(policy, encode=None, decode=None, make_rng=make_rng, **bounds | changes)


@pytest.mark.parametrize("form", ["generate", "__call__"])
async def test_each_sample_of_one_row_has_a_seed_of_its_own(form):
    """The first one has the sample's: those of a run of an earlier version stay as they were."""
    policy = Policy()
    ask = getattr(context_of(policy), form)
    for _ in range(3):
        assert len((await ask([2, 3])).tokens) == 3
    assert policy.seeds == [None, *SEEDS[:2]]


async def test_samples_that_are_asked_for_at_once_have_seeds_in_the_order_of_their_calls():
    policy = Policy()
    context = context_of(policy)
    await asyncio.gather(*(context.generate([2, 3]) for _ in range(4)))
    assert policy.seeds == [None, *SEEDS]


async def test_draws_of_the_rollout_function_change_no_seed():
    policy = Policy()
    context = context_of(policy)
    drawn = context.rng.random(3).tolist()
    for _ in range(2):
        await context.generate([2, 3])
    assert policy.seeds == [None, SEEDS[0]] and drawn == make_rng().random(3).tolist()
    assert context.rng.random() == make_rng().random(4)[3]


@pytest.mark.parametrize("read", [[], [7], [7, 8, 9]])
@pytest.mark.parametrize("form", ["generate", "__call__"])
async def test_a_row_that_goes_on_keeps_its_seed(form, read):
    policy, row = Policy(num=2), TrajectoryBuilder(PROMPT)
    ask = getattr(context_of(policy), form)
    await ask([5, 6, 7])
    await ask([5, 6, 7])  # Another row has begun meanwhile.
    for _ in range(3):
        row.extend(await ask(row.tokens))
        row.append(read)
    assert policy.seeds == [None, SEEDS[0], *[SEEDS[1]] * 3]


async def test_a_stop_token_may_be_left_out_where_a_row_goes_on_beyond_it():
    policy = Policy(reason="stop")
    context = context_of(policy)
    ids = [2, 3, *(await context.generate([2, 3])).tokens]
    assert context.tokens_left([*ids[:-1], 7]) == 6
    await context.generate([*ids[:-1], 7, 8])
    assert policy.seeds == [None, None]


async def test_a_call_where_the_stop_token_stood_draws_it_anew():
    policy = Policy(reason="stop")
    context = context_of(policy)
    ids = [2, 3, *(await context.generate([2, 3])).tokens]
    await context.generate(ids[:-1])
    assert policy.seeds == [None, SEEDS[0]]


async def test_a_call_within_a_row_begins_another_whose_budget_counts_what_they_share():
    policy = Policy(num=4)
    context = context_of(policy)
    ids = [2, 3, *(await context.generate([2, 3])).tokens]
    assert context.tokens_left(ids[:4]) == 6 and context.tokens_left([2, 3]) == 8
    await context.generate(ids[:4], max_new_tokens=1)
    assert policy.seeds == [None, SEEDS[0]]
    # Two of the first row, one of the second: tokens thrown away cost neither.
    assert context.tokens_left() == 5 and context.tokens_left(ids) == 4


async def test_the_best_of_samples_has_the_rest_of_its_budget():
    policy = Policy(num=6)
    context = context_of(policy)
    rows = [[2, 3, *(await context.generate([2, 3])).tokens] for _ in range(4)]
    assert len({tuple(row) for row in rows}) == 4
    assert [context.tokens_left(row) for row in rows] == [2] * 4
    assert len((await context.generate([*rows[1], 7])).tokens) == 2
    assert policy.seeds[-1] == policy.seeds[1] == SEEDS[0]
    with pytest.raises(RolloutError, match="overlong"):
        await context.generate([*rows[1], 7, policy.next - 2, policy.next - 1])


async def test_a_call_that_is_made_again_after_a_failure_has_its_seed():
    policy = Policy()
    context = context_of(policy)
    for _ in range(3):
        policy.error = RolloutError("timeout", "late")
        with pytest.raises(RolloutError):
            await context.generate([2, 3])
        policy.error = None
        await context.generate([2, 3])
    assert policy.seeds == [None, *SEEDS[:2]]


async def test_a_seed_of_the_callers_is_taken_and_counts_no_row():
    policy = Policy()
    context = context_of(policy)
    first = await context.generate([2, 3], sampling_seed=5)
    await context.generate([2, 3])
    await context.generate([2, 3], sampling_seed=None)
    await context.generate([2, 3])
    assert policy.seeds == [5, None, None, SEEDS[0]]
    assert context.tokens_left([2, 3, *first.tokens]) == 5


PLANS = st.lists(
    st.tuples(
        st.integers(0, 30),  # the row that a call goes on from, modulo their number
        st.integers(0, 5),  # tokens that are cut off its end
        st.integers(0, 4),  # tokens that are appended
        st.integers(1, 4),  # tokens to sample
        st.booleans(),  # whether a stop token ends them
    ),
    max_size=12,
)


@hypothesis.given(PLANS)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_no_position_is_drawn_twice_with_one_seed_and_budgets_count_rows(plan):
    policy, read = Policy(), iter(range(10, 1000))
    context = context_of(policy, max_new_tokens=200)
    rows = [([2, 3], 0)]  # (tokens, those of them that were sampled)

    async def run():
        for which, cut, more, num, stops in plan:
            tokens = rows[which % len(rows)][0]
            tokens = [*tokens[: max(2, len(tokens) - cut)], *(next(read) for _ in range(more))]
            num_sampled = sum(id >= 1000 for id in tokens)
            assert context.tokens_left(tokens) == 200 - num_sampled
            policy.num, policy.reason = num, "stop" if stops else "length"
            found = await context.generate(tokens)
            rows.append(([*tokens, *found.tokens.tolist()], num_sampled + num))
            assert context.tokens_left() == 200 - rows[-1][1]

    asyncio.run(run())
    assert len(set(policy.drawn)) == len(policy.drawn)
