"""The context of a rollout function: its budget, its random generator, the older form, and rows of several turns."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from fixtures.calculator import calculator
from fixtures.sums import PROMPTS, TOKENIZER, policy

from jaxrl_async import parts
from jaxrl_async import types as vocabulary
from jaxrl_async.config.settings import Settings
from jaxrl_async.rollout import context
from jaxrl_async.rollout.context import Context, RolloutError, TrajectoryBuilder, rng_of
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.servers.port import Completion
from jaxrl_async.tasks.tokenizer import completion_text
from jaxrl_async.types import Choices, InvalidTrajectoryError, Prompt, check_trajectory

PROMPT = Prompt(0, np.array([2, 3], np.int32), "", "")
SEEDS = [156735756, 1770521436, 513176933]  # of the rows that begin after the first one, by `rng`


def completion(ids, version=3, reason="length"):
    ids = np.array(ids, np.int32)
    logprobs = -0.5 * np.ones(len(ids), np.float32)
    return Completion(ids, logprobs, np.full(len(ids), version, np.int32), reason)


class Policy:
    """Writes as many tokens as it may, or `num`; notes what it was asked."""

    def __init__(self, num=100):
        self.num, self.calls = num, []

    async def __call__(self, tokens, **sampling):
        self.calls.append((tokens, sampling))
        return completion([4] * min(self.num, sampling.get("max_new_tokens", 100)))


def rng():
    return rng_of("rollout", 1, 7, 0, 0)


def context_of(generate, **changes):
    arguments = {"max_new_tokens": 8, "max_row_tokens": 100, "make_rng": rng, "vocab_size": 14}
    tokenizer = {"encode": TOKENIZER.encode, "decode": TOKENIZER.decode}
    return Context(generate, **tokenizer | arguments | changes)


def with_choices(ids, row_length, mark, width):
    """A completion whose request computed the whole row with these routes, each of two layers."""
    routes = np.full((row_length, 2, 1), mark, np.uint8)
    kept = np.full((len(ids), width), -1, np.int32)
    kept[:, 0] = ids
    return dataclasses.replace(completion(ids), routes=routes, kept=kept)


def test_the_routes_of_a_later_turn_replace_those_before_and_tool_output_has_no_kept_ids():
    row = TrajectoryBuilder(PROMPT)
    row.extend(with_choices([4, 5], 4, mark=1, width=1))
    other, branch = row.copy(), row.fork()
    row.append([6, 6])
    row.extend(with_choices([7], 7, mark=2, width=3))
    row.append([8])
    found = row.trajectory(reward=0.0)
    check_trajectory(found, vocab_size=14, max_tokens=8)
    assert found.choices.routes[:, 0, 0].tolist() == [2] * 7 + [255], "of the last token none"
    assert found.choices.kept[:, 0].tolist() == [-1, -1, 4, 5, -1, -1, 7, -1]
    assert found.choices.kept.shape == (8, 3) and (found.choices.kept[:, 1:] == -1).all()
    assert other.trajectory().choices.routes[:, 0, 0].tolist() == [1] * 4
    assert branch.trajectory().choices == Choices()


def test_routes_of_a_request_for_another_row_are_not_the_rows():
    row = TrajectoryBuilder(PROMPT)
    row.extend(with_choices([4, 5], 9, mark=1, width=1))
    assert row.trajectory().choices.routes is None


async def test_generate_samples_what_is_left_of_the_budget():
    policy = Policy(num=3)
    context = context_of(policy)
    row, left = TrajectoryBuilder(PROMPT), []
    for _ in range(3):
        row.extend(await context.generate(row.tokens))
        left.append((context.tokens_left(), context.tokens_left(row.tokens)))
        row.append([5])
    assert left == [(5, 5), (2, 2), (0, 0)]
    assert [sampling["max_new_tokens"] for _, sampling in policy.calls] == [8, 5, 2]
    with pytest.raises(RolloutError, match=r"8 of rollout\.max_new_tokens = 8") as caught:
        await context.generate(row.tokens)
    assert caught.value.reason == "overlong" and len(policy.calls) == 3
    assert all(type(sampling["max_new_tokens"]) is int for _, sampling in policy.calls)


async def test_a_turn_may_be_bounded_further_and_never_less():
    policy = Policy()
    context = context_of(policy, is_trained=False)
    found = await context.generate([2], max_new_tokens=3, temperature=0.5)
    await context.generate([2, *found.tokens], max_new_tokens=30)
    await context.generate([2, *found.tokens], max_new_tokens=None)  # the run's
    assert [sampling for _, sampling in policy.calls[:2]] == [
        {"max_new_tokens": 3, "temperature": 0.5},
        {"max_new_tokens": 5},
    ]
    assert policy.calls[2][1]["max_new_tokens"] == 5


async def test_the_row_is_bounded_with_the_tokens_that_stand_between():
    policy = Policy(num=2)
    context = context_of(policy, max_row_tokens=10)
    assert [context.tokens_left([2] * n) for n in (1, 3, 9, 10, 11)] == [8, 7, 1, 0, 0]
    await context.generate([2] * 9)
    assert policy.calls[0][1]["max_new_tokens"] == 1 and context.tokens_left() == 7
    with pytest.raises(RolloutError, match=r"row has 10 of 10 .*server\.max_total_tokens"):
        await context_of(policy, max_row_tokens=10).generate([2] * 10)


async def test_the_older_form_is_a_generate_without_a_budget():
    policy = Policy(num=6)
    context = context_of(policy)

    async def twice(prompt, generate):
        await generate(prompt.tokens)
        return await single_turn(prompt, functools.partial(generate, stop_token_ids=[5]))

    runner = runner_of(twice)
    row = await runner.run(PROMPT, policy, rng)
    second = {"stop_token_ids": [5], "sampling_seed": SEEDS[0]}
    assert policy.calls == [([2, 3], {}), ([2, 3], second)]
    assert row.completion.tolist() == [4] * 6
    await context([2, 3])
    assert context.tokens_left() == 2


def runner_of(function, **changes):
    bounds = {"vocab_size": 14, "max_new_tokens": 8, "max_request_tokens": 64, "max_tokens": 64}
    tokenizer = {
        "encode": TOKENIZER.encode,
        "decode": TOKENIZER.decode,
        "stop_token_ids": TOKENIZER.stop_token_ids,
    }
    return Runner(function, **tokenizer | bounds | changes)


async def test_a_row_is_bounded_by_what_is_trained_and_by_what_a_server_takes():
    left = []

    async def look(prompt, context):
        left.append(context.tokens_left())

    for bounds in ({"max_tokens": 7}, {"max_request_tokens": 6}, {}):
        await runner_of(look, **bounds).run(PROMPT, Policy(), None)
    assert left == [7, 6, 8]


def test_a_row_of_two_turns_is_aligned_and_valid():
    row = TrajectoryBuilder(PROMPT)
    row.extend(completion([4, 5], version=3))
    row.append([9, 9])
    assert row.tokens == [2, 3, 4, 5, 9, 9]
    row.extend(completion([6], version=4, reason="stop"))
    trajectory = row.trajectory()
    check_trajectory(trajectory, vocab_size=10, max_tokens=7, judged=False)
    assert trajectory.tokens.tolist() == [2, 3, 4, 5, 9, 9, 6]
    assert trajectory.versions.tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert trajectory.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert trajectory.mask.tolist() == [False, False, True, True, False, False, True]
    assert (trajectory.prompt_length, trajectory.num_sampled) == (2, 3)
    assert (trajectory.finish_reason, trajectory.reward) == ("stop", None)
    assert row.trajectory(reward=0.5).reward == 0.5


async def test_the_calculator_answers_and_is_not_part_of_the_completion():
    async def generate(tokens, **sampling):
        return completion(policy(tokens), reason="stop")

    runner = runner_of(calculator, max_new_tokens=6)
    row = await runner.run(PROMPTS[2], generate, None)
    runner.check(row)
    assert TOKENIZER.decode(row.tokens) == "2+4=2+4=6=6" and row.reward == 1.0
    # Without "=6=", and without the stop token of either turn.
    stops = {"stop_token_ids": TOKENIZER.stop_token_ids}
    ids = completion_text(row, decode=list, **stops)
    assert TOKENIZER.decode(ids) == "2+46" and len(ids) == 4 and row.num_sampled == 6
    # Four tokens of the first turn leave no room for a second one.
    row = await runner_of(calculator, max_new_tokens=4).run(PROMPTS[2], generate, None)
    assert TOKENIZER.decode(row.tokens) == "2+4=2+4" and row.reward == 0.0


def test_a_generator_belongs_to_one_stream_and_sample():
    seen = {
        rng_of(*key).random()
        for key in [("rollout", 1, 7, 0, 0), ("evaluation", 1, 7, 0, 0), ("rollout", 1, 7, 1, 0)]
    }
    assert len(seen) == 3 and rng_of("rollout", 1, 7, 0, 0).random() in seen


async def test_encode_and_decode_are_the_tokenizers_for_arrays_too():
    context = context_of(Policy())
    ids = np.array(context.encode("1+2="), np.int32)
    assert context.decode(np.append(ids, TOKENIZER.eos_id)) == "1+2="
    with pytest.raises(ValueError, match="'x'"):
        context.encode("x")


def test_a_token_that_is_ruled_out_is_asked_for_as_a_bias_and_refused_where_it_comes_back():
    sampled, read = TrajectoryBuilder(PROMPT), TrajectoryBuilder(PROMPT)
    sampled.extend(completion([4, 0, 4]))
    read.extend(completion([4]))
    read.append([0])  # a tool's output may hold it
    runner = runner_of(single_turn)
    assert runner.bias == {}
    runner.check(sampled.trajectory())
    runner = runner_of(single_turn, never_token_ids=(0,))
    assert runner.bias == {"logit_bias": {"0": -100.0}}
    runner.check(read.trajectory())
    with pytest.raises(InvalidTrajectoryError, match="token id 0, padding, is sampled, .* ignores"):
        runner.check(sampled.trajectory())


def test_padding_is_never_sampled_unless_it_ends_a_completion_or_the_run_is_an_old_one():
    settings = Settings()
    assert parts.never_token_ids(settings, TOKENIZER) == (TOKENIZER.pad_id,)
    old = dataclasses.replace(settings.rollout, sample_padding=True)
    assert parts.never_token_ids(dataclasses.replace(settings, rollout=old), TOKENIZER) == ()
    ends = SimpleNamespace(pad_id=1, stop_token_ids=(2, 1))
    assert parts.never_token_ids(settings, ends) == ()


def test_rollout_functions_of_version_0_1_find_their_names():
    assert context.Row is TrajectoryBuilder and vocabulary.Rows is vocabulary.Sample
