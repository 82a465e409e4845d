"""Environments of the real library OpenEnv: episodes of a server, its rewards, and the rows of the endpoint."""

import sys

import numpy as np
import pytest
from fixtures import chat
from fixtures.sessions import Policy, rng, runner_of

from jaxrl_async.config.checks import LIBRARY_AGENTS
from jaxrl_async.rollout.agent import agent_of
from jaxrl_async.rollout.context import RolloutError
from jaxrl_async.tasks import make_task
from jaxrl_async.types import Prompt


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("openenv.core")
    from fixtures import openenv_server

    with openenv_server.serving() as url:
        yield url


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat.tokenizer_of(tmp_path_factory.mktemp("chat") / "qwen", "qwen")


def task_of(url, **args):
    known = {"num_train": 2, "num_test": 3, "action": "guess", "observation": "text"}
    return make_task(f"openenv:{url}", **known | args)


async def played(task, tokenizer, *turns, **changes):
    """(row, policy) of one session on the task's first example of train, whose number is 3."""
    example = task.examples("train")[0]
    prompt = Prompt(0, np.ones(1, np.int32), example.text, "", dict(example.metadata))
    policy = Policy(tokenizer, *turns)
    runner = runner_of(agent_of(LIBRARY_AGENTS["openenv"]), tokenizer, **changes)
    try:
        found = await runner.run(prompt, policy, rng)
        runner.check(found)
        (row,) = found.trajectories
        return row, policy
    finally:
        await runner.close()


async def test_a_server_answers_and_its_rewards_are_added_up(url, tokenizer):
    task = task_of(url, system_prompt="Guess.", reset={"low": 20})
    row, policy = await played(task, tokenizer, "21", "29", "23")
    assert row.reward == 0.5 and row.finish_reason == "stop"
    assert tokenizer.decode(row.tokens[np.asarray(row.mask, bool)]) == "212923"
    first = tokenizer.decode(policy.given[0], special=True)
    assert first.startswith("<|im_start|>system\nGuess.<|im_end|>") and "from 20 on" in first
    read = tokenizer.decode(policy.given[-1])
    assert read.index("higher") < read.index("lower")


async def test_actions_and_observations_may_be_json(url, tokenizer):
    task = task_of(url, action="", observation="")
    row, policy = await played(task, tokenizer, '{"guess": "1"}', '{"guess": "3"}')
    assert row.reward == 0.75
    assert '"text": "higher"}' in tokenizer.decode(policy.given[-1])


@pytest.mark.parametrize(
    ("turns", "max_turns", "bound", "reward"),
    [
        (["1", "9"], 2, 64, -0.5),
        (["1", "1234567"], 9, 6, -0.25),  # in an answer
        (["1", "9"], 9, 4, -0.5),  # between two
    ],
)
async def test_an_episode_that_is_cut_has_the_rewards_up_to_there(
    url, tokenizer, turns, max_turns, bound, reward
):
    task = task_of(url, max_turns=max_turns)
    row, _ = await played(task, tokenizer, *turns, max_new_tokens=bound)
    assert row.reward == reward


@pytest.mark.parametrize(
    ("args", "turn", "text"),
    [
        ({}, "raise", "no such guess"),
        ({}, "give up", "gave no reward"),
        ({"action": "word"}, "1", "raised RuntimeError"),
        ({"action": ""}, "no JSON", "raised RuntimeError"),
        ({"observation": "hint"}, "1", "an observation has no field 'hint', of"),
    ],
)
async def test_an_episode_that_fails_is_no_sample(url, tokenizer, args, turn, text):
    with pytest.raises(RolloutError, match=text) as caught:
        await played(task_of(url, **args), tokenizer, turn)
    assert caught.value.reason == "agent_error"


async def test_a_server_that_is_not_there_is_named(url, tokenizer):
    with pytest.raises(RolloutError, match="127.0.0.1:9"):
        await played(task_of("http://127.0.0.1:9"), tokenizer, "1")


def test_prompts_are_seeds_that_the_splits_do_not_share(url):
    task = task_of(url)
    assert [e.text for e in task.examples("test")] == ["seed 0", "seed 1", "seed 2"]
    assert [e.text for e in task.examples("train")] == ["seed 3", "seed 4"]
    assert task.examples("train")[0].metadata["openenv"]["seed"] == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"num_train": 0}, "num_train must be ≥ 1, got 0"),
        ({"max_turns": 0}, "max_turns must be ≥ 1, got 0"),
        ({"url": "localhost:8000"}, "needs http:// or https://, got 'localhost:8000'"),
    ],
)
def test_a_task_that_cannot_run_is_refused(url, args, text):
    args = {"url": url} | args
    with pytest.raises(ValueError, match=text):
        task_of(args.pop("url"), **args)


def test_without_the_library_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_async\[openenv\]'"):
        task_of("http://127.0.0.1:9")
