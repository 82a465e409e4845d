"""Environments: rows of several turns, rewards, cuts, and failures here and in processes of their own."""

import asyncio
import math
import os
import shutil
import sys
import types

import numpy as np
import pytest
from fixtures import environments as fixtures

import jaxrl_async
from jaxrl_async.environments import ENVIRONMENTS, calculator, environment_class
from jaxrl_async.rollout.context import RolloutError, rng_of
from jaxrl_async.rollout.environment import EnvironmentRollout
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.servers.port import Completion
from jaxrl_async.tasks import make_task
from jaxrl_async.tasks.prompts import demonstration_tokens
from jaxrl_async.tasks.tokenizer import CharTokenizer
from jaxrl_async.types import Prompt

TOKENIZER = CharTokenizer("0123456789+-*=: .abcdefghijklmnopqrstuvwxyz")
EOS = TOKENIZER.eos_id


def prompt_of(text, answer="", **metadata):
    return Prompt(0, np.array(TOKENIZER.encode(text), np.int32), text, answer, metadata)


def rollout_of(name, args=None, **changes):
    bounds = {"max_turns": 4, "max_turn_tokens": 0, "timeout_secs": 5.0, "num_processes": 2}
    bounds |= {"episode_secs": 60.0, "memory_bytes": 1 << 28}
    return EnvironmentRollout(name, args or {}, **bounds | changes)


def runner_of(name, args=None, *, max_new_tokens=64, max_tokens=200, **changes):
    return Runner(
        rollout_of(name, args, **changes),
        encode=TOKENIZER.encode,
        decode=TOKENIZER.decode,
        stop_token_ids=(EOS,),
        vocab_size=TOKENIZER.vocab_size,
        max_new_tokens=max_new_tokens,
        max_request_tokens=max_tokens,
        max_tokens=max_tokens,
    )


class Policy:
    """Writes given turns, each cut where its bound ends it; the version counts the turns."""

    def __init__(self, *turns):
        self.turns, self.rows = list(turns), []

    async def __call__(self, tokens, *, max_new_tokens):
        self.rows.append(list(tokens))
        whole = [*TOKENIZER.encode(self.turns[len(self.rows) - 1]), EOS]
        ids = np.array(whole[:max_new_tokens], np.int32)
        version = np.full(len(ids), len(self.rows), np.int32)
        reason = "stop" if len(ids) == len(whole) else "length"
        return Completion(ids, np.full(len(ids), -0.5, np.float32), version, reason)


def rng():
    return rng_of("rollout", 1, 2, 3, 4)


async def played(runner, prompt, policy):
    try:
        trajectory = await runner.run(prompt, policy, rng)
        runner.check(trajectory)
        return trajectory
    finally:
        await runner.close()


def text_of(trajectory):
    return TOKENIZER.decode(trajectory.tokens, special=True).replace("<eos>", "|")


async def test_the_calculator_computes_every_expression_and_judges_the_first_other_turn():
    runner = runner_of("calculator")
    prompt = prompt_of("tom has 482 and gets 715.", "1197")
    row = await played(runner, prompt, Policy("482-715", "482+715", "1197"))
    assert text_of(row) == "tom has 482 and gets 715.482-715|=-233:482+715|=1197:1197|"
    assert (row.reward, row.finish_reason) == (1.0, "stop")
    assert row.components == {"turns": 3.0, "calls": 2.0}
    row = await played(runner, prompt, Policy("1198"))
    assert (row.reward, row.components) == (0.0, {"turns": 1.0})
    # An episode that is cut before it was judged: the right answer, with no end to it.
    row = await played(runner_of("calculator", max_turn_tokens=4), prompt, Policy("1197"))
    assert (row.reward, row.finish_reason) == (0.0, "length")


async def test_a_computation_takes_log_normal_seconds_that_are_the_samples_own(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(calculator, "asyncio", types.SimpleNamespace(sleep=sleep))
    prompt = prompt_of("tom has 4.", "4")
    await played(runner_of("calculator"), prompt, Policy("4+0", "4"))
    assert not slept  # By default a tool takes no time.
    runner = runner_of("calculator", args={"median_secs": 0.1, "sigma": 2.0})
    for _ in range(2):  # two runs of one sample
        await played(runner, prompt, Policy("4+0", "4-0", "4"))
    logs = [math.log(seconds / 0.1) / 2.0 for seconds in slept]
    assert logs == pytest.approx(rng().standard_normal(2).tolist() * 2)


@pytest.mark.parametrize("args", [{"median_secs": -1.0}, {"sigma": math.inf}])
def test_seconds_of_the_calculator_outside_their_bounds_are_named(args):
    with pytest.raises(ValueError, match=rf"{next(iter(args))} of the calculator must be ≥ 0"):
        environment_class("calculator", args)


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (("e", "n", "take", "open"), 1.0),
        (("e", "take", "open"), 0.0),
        (("n", "open"), 0.0),
        (("take", "n", "take", "open"), 1.0),
        (("n", "take", "e", "take", "open"), 0.0),
    ],
)
async def test_only_the_key_of_the_doors_colour_opens_it(turns, reward):
    prompt = prompt_of("a red door.", door="red", keys={"n": "red", "e": "blue"})
    row = await played(runner_of("locked_door", max_turns=8), prompt, Policy(*turns))
    assert (row.reward, row.finish_reason) == (reward, "stop")


async def test_what_the_environment_says_is_read_and_not_trained():
    row = await played(
        runner_of("fixtures.environments:Echo"), prompt_of("ab"), Policy("cd", "stop")
    )
    first = TOKENIZER.encode(str(rng().integers(10)))
    parts = [TOKENIZER.encode("ab"), first, [*TOKENIZER.encode("cd"), EOS]]
    parts += [TOKENIZER.encode(":cd"), [*TOKENIZER.encode("stop"), EOS]]
    assert row.tokens.tolist() == [token for part in parts for token in part]
    own = [(i % 2 == 0 and i > 0) * 1 for i in range(5)]
    lengths = [len(p) for p in parts]
    assert row.mask.tolist() == np.repeat(own, lengths).astype(bool).tolist()
    assert row.versions.tolist() == np.repeat([-1, -1, 1, -1, 2], lengths).tolist()
    assert row.prompt_length == 2


async def test_rewards_of_turns_are_summed_and_each_is_a_component():
    runner = runner_of("fixtures.environments:Echo")
    row = await played(runner, prompt_of("a"), Policy("b", "c", "stop"))
    assert row.reward == 1.5
    assert [turn.reward for turn in row.turns] == [0.25, 0.25, 1.0]
    ends = [turn.end for turn in row.turns]
    assert [row.tokens[end - 1] for end in ends] == [EOS] * 3 and ends[-1] == len(row)
    assert row.mask[[end - 1 for end in ends]].all() and not row.mask[ends[:-1]].any()
    assert row.components == {
        **{"turns": 3.0, "echoes": 2.0, "stops": 1.0},
        **{"turn_1": 0.25, "turn_2": 0.25, "turn_3": 1.0},
    }
    row = await played(runner, prompt_of("a"), Policy("stop"))
    assert row.components == {"turns": 1.0, "stops": 1.0}


async def test_an_environment_that_takes_tokens_is_given_the_sampled_ones_and_leaves_the_reward_to_the_task():
    row = await played(runner_of("fixtures.environments:Tokens"), prompt_of("a"), Policy("xy", ""))
    x, y = TOKENIZER.encode("xy")
    assert row.tokens.tolist() == [*TOKENIZER.encode("a"), 5, 6, x, y, EOS, x, EOS]
    assert row.reward is None and row.components == {"turns": 2.0}
    with pytest.raises(RolloutError, match="gave a reward, and its `judges` is False"):
        await played(runner_of("fixtures.environments:Rewarded"), prompt_of("a"), Policy("xy"))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"max_turns": 2}, "a7b|:bc|"),  # as many turns
        ({"max_turn_tokens": 3}, "a7b|:bc|:cddd"),  # a turn beyond its bound
        ({"max_new_tokens": 5}, "a7b|:bc|"),  # no token left after two turns of two: one more
        ({"max_tokens": 8}, "a7b|:bc|"),  # no room for the observation and a token
    ],
)
async def test_an_episode_is_cut_by_turns_and_by_tokens(bounds, expected):
    policy = Policy("b", "c", "dddd", "stop")
    row = await played(runner_of("fixtures.environments:Echo", **bounds), prompt_of("a"), policy)
    shown = text_of(row)
    assert shown.startswith(expected[0]) and row.finish_reason == "length"
    if bounds == {"max_new_tokens": 5}:
        expected += ":cd"  # The fifth token, of a turn that the environment does not see.
    assert shown[2:] == expected[2:]
    assert row.reward == 0.5


async def test_an_episode_is_closed_however_it_ends():
    fixtures.Bad.closed = 0
    runner = runner_of("fixtures.environments:Bad")
    await played(runner, prompt_of("a"), Policy("stop"))
    with pytest.raises(RolloutError):
        await played(runner, prompt_of("a"), Policy("raise"))
    assert fixtures.Bad.closed == 2


FAILURES = [
    ("raise", "environment_error", "raised KeyError: 'no such room'", "KeyError at"),
    ("late", "environment_error", "raised TimeoutError: of its own", "TimeoutError at"),
    ("none", "environment_error", "must return an Observation, got None", "TypeError at"),
    ("both", "environment_error", "one of text, tokens and messages", "ValueError at"),
    ("x", "environment_error", "'é' .*is not in the alphabet", "ValueError at"),
]


@pytest.mark.parametrize("name", ["Bad", "Own"])
@pytest.mark.parametrize(("turn", "reason", "message", "place"), FAILURES)
async def test_a_failure_is_returned_with_its_reason_and_is_no_sample(
    name, turn, reason, message, place
):
    with pytest.raises(RolloutError, match=message) as caught:
        await played(runner_of(f"fixtures.environments:{name}"), prompt_of("a"), Policy(turn))
    assert caught.value.reason == reason and caught.value.cause.place.startswith(place)


async def test_a_step_on_this_event_loop_has_a_bound():
    runner = runner_of("fixtures.environments:Bad", timeout_secs=0.05)
    with pytest.raises(RolloutError, match="took longer than 0.05 s") as caught:
        await played(runner, prompt_of("a"), Policy("wait"))
    assert caught.value.reason == "environment_timeout"


@pytest.mark.parametrize(
    ("turn", "reason", "message"),
    [
        ("hang", "environment_timeout", "took longer than 1 s"),
        ("wait", "environment_timeout", "took longer than 1 s"),
        ("crash", "environment_error", "ended its process .exit code 3"),
        ("memory", "environment_error", "took more than 268435456 bytes"),
    ],
)
async def test_a_process_that_fails_is_killed_and_another_takes_the_next_episode(
    turn, reason, message
):
    runner = runner_of("fixtures.environments:Own", timeout_secs=1.0, num_processes=1)
    try:
        seen = []
        for turns in (("pid", turn), ("pid", "stop")):
            policy = Policy(*turns)
            try:
                await runner.run(prompt_of("a"), policy, rng)
            except RolloutError as error:
                assert error.reason == reason
                assert message.split(" .")[0] in str(error)
            seen.append(int(TOKENIZER.decode(policy.rows[1]).partition("pid")[2]))
        assert seen[0] != seen[1]
        with pytest.raises(ProcessLookupError):
            os.kill(seen[0], 0)
    finally:
        await runner.close()


async def test_a_process_that_does_not_start_is_a_failure_of_the_environment(monkeypatch):
    runner = runner_of("fixtures.environments:Own")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RolloutError, match="did not start: it ended .exit code 1") as caught:
        await played(runner, prompt_of("a"), Policy("stop"))
    assert caught.value.reason == "environment_error"


async def test_whole_episodes_share_a_process_and_at_most_num_processes_run_at_once():
    runner = runner_of("fixtures.environments:Own", {"prefix": "+"}, num_processes=2)
    try:
        policies = [Policy("pid", "print", "stop") for _ in range(6)]
        rows = await asyncio.gather(
            *(runner.run(prompt_of("a", worth=1), policy, rng) for policy in policies)
        )
        pids = {TOKENIZER.decode(p.rows[1]).partition("pid")[2] for p in policies}
        assert len(pids) == 2
        draw = rng().integers(10)
        for row in rows:
            assert text_of(row).startswith(f"a{draw}1pid|") and row.reward == 1.25
            assert "print|+print" in text_of(row)
    finally:
        await runner.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_episodes_wait_for_a_process_in_every_event_loop_that_runs_them():
    """`evaluate` scores each checkpoint in a loop of its own."""
    runner = runner_of("fixtures.environments:Own", num_processes=1)

    async def rewards():
        policies = [Policy("stop") for _ in range(3)]
        try:
            runs = (runner.run(prompt_of("a"), policy, rng) for policy in policies)
            found = await asyncio.gather(*runs, return_exceptions=True)
            return [getattr(row, "reward", row) for row in found]
        finally:
            await runner.close()

    assert asyncio.run(rewards()) == asyncio.run(rewards()) == [1.0] * 3


async def test_a_wait_for_a_free_process_is_named_and_ends_with_the_episodes_before_it():
    rollout = rollout_of("fixtures.environments:Own", num_processes=1, episode_secs=0.2)
    assert rollout.waits_for() == "its environment 'fixtures.environments:Own'"
    late = "Own' had none of its 1 processes free for 0.[24] s"

    async def waits():
        with pytest.raises(RolloutError, match=late) as caught:
            async with rollout._episode():
                pass
        assert caught.value.reason == "environment_timeout"
        return str(caught.value)[-5:]

    try:
        async with rollout._episode():
            waiting = [asyncio.create_task(waits()) for _ in range(2)]
            await asyncio.sleep(0)
            assert rollout.waits_for().endswith(", in which 2 episodes wait for a free process")
            # The second has two episodes before it.
            assert await asyncio.gather(*waiting) == ["0.2 s", "0.4 s"]
        async with rollout._episode():  # It is free again.
            assert rollout.waits_for() == "its environment 'fixtures.environments:Own'"
    finally:
        await rollout.close()


def test_an_environment_is_found_by_its_name_and_checked_with_its_arguments():
    with pytest.raises(ValueError, match="did you mean 'calculator'"):
        environment_class("calculater", {})
    with pytest.raises(TypeError, match="'prefixx'.*takes .*environment.args"):
        environment_class("fixtures.environments:Echo", {"prefixx": 1})
    with pytest.raises(ValueError, match="must not be empty"):
        environment_class("fixtures.environments:Echo", {"prefix": ""})
    with pytest.raises(ValueError, match="must have `async def step`"):
        environment_class("fixtures.environments:NoStep", {})


def test_a_registered_environment_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr("jaxrl_async.environments.ENVIRONMENTS", dict(ENVIRONMENTS))
    from jaxrl_async import environments

    assert jaxrl_async.register_environment("echo")(fixtures.Echo) is fixtures.Echo
    assert environments.environment_class("echo", {}) is fixtures.Echo
    with pytest.raises(ValueError, match="there is a environment 'echo' already"):
        jaxrl_async.register_environment("echo")(fixtures.Bad)


WORDS = dict(num_digits=3, num_train=300, num_test=50, guesses=0.6, mistakes=0.5, seed=0)


def test_word_problems_are_right_distinct_and_shown_with_few_good_episodes():
    task = make_task("word_problems", **WORDS)
    train, test = task.examples("train"), task.examples("test")
    assert len({e.text for e in [*train, *test]}) == 350
    answers = {e.text: e.answer for e in train}
    for example in train:
        a, b = (
            int("".join(c for c in w if c.isdigit()))
            for w in example.text.split()
            if any(map(str.isdigit, w))
        )
        signs = {"gets": "+", "finds": "+", "loses": "-", "gives": "-", "bags": "*", "boxes": "*"}
        sign = next(s for word, s in signs.items() if word in example.text)
        assert int(example.answer) == {"+": a + b, "-": a - b, "*": a * b}[sign]
    shown = task.demonstrations(3000)
    right = np.mean([answers[text] == turns[-1] for text, turns in shown])
    assert 0.17 < right < 0.24  # 0.4 · 0.5
    assert 0.57 < np.mean([len(turns) == 1 for _, turns in shown]) < 0.63
    with pytest.raises(ValueError, match=r"guesses must be in \[0, 1\], got 2"):
        make_task("word_problems", **WORDS | {"guesses": 2})


@pytest.mark.parametrize("careless", [0, 1])
async def test_demonstrations_of_games_are_played_by_the_rules(careless):
    task = make_task(
        "locked_door", num_rooms=4, num_train=40, num_test=10, careless=careless, seed=0
    )
    examples = {e.text: e for e in task.examples("train")}
    assert len(examples) == 40 and not examples.keys() & {e.text for e in task.examples("test")}
    wins = []
    for text, turns in task.demonstrations(200):
        example = examples[text]
        prompt = prompt_of(text, example.answer, **example.metadata)
        runner = runner_of("locked_door", max_turns=8)
        row = await played(runner, prompt, Policy(*turns[::2]))
        assert TOKENIZER.decode(row.tokens) == text + "".join(turns)
        wins.append(row.reward)
    assert set(wins) == {1.0 - careless}


def test_a_demonstration_of_an_episode_imitates_the_policys_turns_alone():
    task = make_task("word_problems", **WORDS | {"guesses": 0.0})
    rows = demonstration_tokens(task, TOKENIZER, num=5, max_tokens=60)
    for (text, turns), (prompt, completion, own) in zip(task.demonstrations(5), rows, strict=True):
        assert TOKENIZER.decode(prompt) == text
        whole = TOKENIZER.decode(completion, special=True)
        assert whole == f"{turns[0]}<eos>{turns[1]}{turns[2]}<eos>"
        assert TOKENIZER.decode(completion[~own]) == turns[1]
        assert TOKENIZER.decode(completion[own], special=True) == f"{turns[0]}<eos>{turns[2]}<eos>"
