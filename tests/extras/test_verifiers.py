"""Environments of the real library `verifiers`: its tasks, episodes and rewards, and the rows of the endpoint."""

import dataclasses
import os
import pathlib

import numpy as np
import pytest
from fixtures import chat
from fixtures.conversations import call_of
from fixtures.sessions import Policy, rng, runner_of

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.checks import LIBRARY_AGENTS
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.rollout.agent import agent_of
from jaxrl_async.rollout.context import RolloutError
from jaxrl_async.tasks import make_task
from jaxrl_async.tasks.checked import CheckedTask
from jaxrl_async.types import Prompt

# In the library's use of tenacity.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def library(monkeypatch):
    """The library, with the environments of the fixtures installed."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(FIXTURES))
    path = os.pathsep.join([str(FIXTURES), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)  # of tools' processes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat.tokenizer_of(tmp_path_factory.mktemp("chat") / "qwen", "qwen")


def sums(**config):
    """The task of the fixture `verifiers_sums`."""
    taskset = {"task": config.pop("task", {}), **config}
    whole = {"taskset": taskset, "agent": {"timeout": {"scoring": 0.5}}}
    return make_task("verifiers:verifiers_sums", num_test=3, config=whole)


def prompt_of(example):
    return Prompt(0, np.ones(1, np.int32), example.text, example.answer, dict(example.metadata))


async def played(task, tokenizer, *turns, example=None, **changes):
    """(row, policy) of one session on the task's first example."""
    policy = Policy(tokenizer, *turns)
    runner = runner_of(agent_of(LIBRARY_AGENTS["verifiers"]), tokenizer, **changes)
    try:
        found = await runner.run(prompt_of(example or task.examples("train")[0]), policy, rng)
        runner.check(found)
        (row,) = found.trajectories
        return row, policy
    finally:
        await runner.close()


def sampled(row, tokenizer):
    """The text of the tokens that are trained."""
    return tokenizer.decode(row.tokens[np.asarray(row.mask, bool)])


async def test_a_single_turn_has_the_environments_prompt_and_reward(library, tokenizer):
    task = sums(system="Add.")
    (example, *_) = task.examples("train")
    row, policy = await played(task, tokenizer, example.answer)
    assert row.reward == 0.5  # The reward's weight.
    text = tokenizer.decode(policy.given[0], special=True)
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>") and example.text in text
    row, _ = await played(task, tokenizer, "0")
    assert row.reward == 0.0


async def test_the_example_of_the_docs_is_one(library, tokenizer):
    source = (FIXTURES / "my_sums.py").read_text("utf-8")
    assert source in (FIXTURES.parent.parent / "docs" / "agents.md").read_text("utf-8")
    task = make_task("verifiers:my_sums", num_test=20)
    example = task.examples("test")[0]
    row, _ = await played(task, tokenizer, f" {example.answer}\n", example=example)
    assert row.reward == 1.0


async def test_a_tools_result_is_read_and_what_was_sampled_is_trained(library, tokenizer):
    task = sums(task={"has_tool": True})
    (example, *_) = task.examples("train")
    call = call_of("add", a=1, b=41)
    row, policy = await played(task, tokenizer, call, example.answer)
    assert row.reward == 0.5
    first, second = policy.given
    assert second[: len(first)] == first and "add" in tokenizer.decode(first)
    assert "\n42\n</tool_response>" in tokenizer.decode(second[len(first) :], special=True)
    assert sampled(row, tokenizer) == call + example.answer


async def test_an_environment_answers_until_it_ends_the_episode(library, tokenizer):
    task = make_task("verifiers:verifiers_guess", num_test=2, num_tasks=6)
    (example, *_) = task.examples("train")
    low = int(example.text.split()[1])
    turns = [str(low + 1), str(low + 9), str(low + 3)]
    row, policy = await played(task, tokenizer, *turns)
    assert row.reward == 1.0 and not policy.turns
    assert sampled(row, tokenizer) == "".join(turns)
    read = tokenizer.decode(policy.given[-1])
    assert read.index("higher") < read.index("lower")


async def test_an_episode_out_of_tokens_is_judged_as_it_is(library, tokenizer):
    task = make_task("verifiers:verifiers_guess", num_test=2, num_tasks=6)
    low = int(task.examples("train")[0].text.split()[1])
    row, _ = await played(task, tokenizer, f"{low + 1}", "12345", max_new_tokens=4)
    assert (row.reward, row.finish_reason) == (0.0, "length")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "TaskError: .*LookupError: lost the answer"),
        ("none", "TaskError: .*TypeError"),
        ("slow", "no reward of .*right.*: scoring_timeout"),
        ("nan", "must return a finite number or None, got nan"),
        ("setup", "TaskError: .*no such sum"),
    ],
)
async def test_an_episode_without_a_reward_is_no_sample(library, tokenizer, fault, text):
    with pytest.raises(RolloutError, match=text) as caught:
        await played(sums(task={"fault": fault}), tokenizer, "1")
    assert caught.value.reason == "agent_error"


async def test_another_tasks_prompt_is_no_sample(library, tokenizer):
    (example, *_) = make_task("arithmetic", **ARITHMETIC).examples("train")
    with pytest.raises(RolloutError, match="needs task.name = 'verifiers:ENVIRONMENT'"):
        await played(None, tokenizer, "1", example=example)


ARITHMETIC = {"num_digits": 1, "num_test": 2, "forget_carry": 0.0, "seed": 0}


def test_splits_share_no_prompt_and_are_those_of_every_process(library):
    task = sums()
    train, test = task.examples("train"), task.examples("test")
    assert len(train) == 9 and len(test) == 3
    assert not {e.text for e in train} & {e.text for e in test}
    assert sums().examples("train") == train
    other = dataclasses.replace(task, seed=1)
    assert other.examples("train") != train


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("verifiers_sums", {"num_test": 7}, r"num_test must be in \[1, 6\], half of the 12 tasks"),
        ("verifiers_sums", {"num_test": 0}, r"num_test must be in \[1, 6\]"),
        ("verifiers_sums", {"num_test": 1, "num_tasks": 1}, "num_tasks must be ≥ 2, got 1"),
        ("verifiers_sun", {"num_test": 1}, "'verifiers:verifiers_sun' cannot be loaded: .*not found"),
        ("json", {"num_test": 1}, "'verifiers:json' cannot be loaded: .*exports no Taskset"),
        ("verifiers_guess", {"num_test": 1}, "its taskset is endless: give num_tasks"),
        ("verifiers_sums", {"num_test": 1, "config": {"taskset": {"nun": 3}}}, "nun"),
        ("verifiers_sums", {"num_test": 1, "config": {"id": "user-sim"}}, "every other needs a client"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_run_is_refused(library, name, args, text):
    with pytest.raises(ValueError, match=text):
        make_task(f"verifiers:{name}", **args)


def test_a_seat_with_a_client_of_its_own_is_not_the_policys(library):
    user = {"model": "judge", "client": {"type": "eval", "base_url": "http://127.0.0.1:9/v1"}}
    config = {"id": "user-sim", "user": user}
    task = make_task("verifiers:verifiers_sums", num_test=1, config=config)
    assert task._loaded.seat == "assistant"


def test_there_are_no_demonstrations(library):
    assert CheckedTask(sums()).demonstrations(1) == []


def test_without_the_library_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "verifiers.v1", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_async\[verifiers\]'"):
        make_task("verifiers:anything", num_test=1)


@pytest.mark.parametrize("agent", ["", "fixtures.agents:twice"])
def test_an_environment_needs_its_agent(agent):
    config = load_config("configs/quickstart.py:smoke")
    with config.unlocked():
        config.task.name = "verifiers:sums"
        config.rollout.agent = agent
        config.rollout.function = "agent" if agent else "single_turn"
    with pytest.raises(SettingsError, match="needs rollout.function = 'agent' and rollout.agent ="):
        settings_of(config)


def test_a_library_has_a_task_and_an_agent_unless_it_gives_questions_alone():
    from jaxrl_async.tasks import LIBRARIES

    assert LIBRARIES.keys() == LIBRARY_AGENTS.keys() | {"datasets", "reasoning_gym"}
