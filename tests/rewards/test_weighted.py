"""Several rewards: their weighted sum, each a component, and right by the reward of the largest weight."""

import json

import pytest

from jaxrl_async import parts
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.build import base_config
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.preflight import machine
from jaxrl_async.rewards import check_reward, names_seen, register_reward, reward_function, weighted
from jaxrl_async.rewards.pool import Judgement, RewardError, RewardPool
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.runtime import workdir as workdirs

BOUNDS = {"num_processes": 1, "timeout_secs": 10, "memory_bytes": 0, "calls_per_process": 0}
MODULE = """
def ends(completion, answer, *, finish_reason):
    return finish_reason == "stop"

def detailed(completion, answer, *, metadata):
    return {"reward": metadata["worth"], "length": len(completion)}

def nothing(completion, answer):
    return None

def same(completion, answer):
    return {"reward": 0.0, "exact": 1.0}

def never(completion, answer, tokens):
    return 0.0

def picky(completion, answer):
    return 1.0

def check(examples):
    raise ValueError("picky reads no answer")

picky.check = check
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "weighted_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "weighted_rewards"


def settings(**rewards):
    config = base_config()
    config.task.rewards = rewards
    return settings_of(config)


async def test_the_sum_is_the_reward_and_each_part_a_component(module):
    rewards = {"exact": 1.0, f"{module}:ends": -0.25, "worth": (f"{module}:detailed", 2)}
    seen = {"finish_reason": "stop", "metadata": {"worth": 0.5}, "prompt": "?"}
    pool = parts.reward_pool_of(settings(**rewards), "last_number")
    async with pool:
        right = await pool.judge("12", "12", seen)
        wrong = await pool.judge("123", "12", seen | {"finish_reason": "length"})
    # 1 − 0.25 + 2 · 0.5, and 0 − 0 + 2 · 0.5
    assert right == Judgement(1.75, {"exact": 1.0, "ends": 1.0, "worth": 0.5, "length": 2.0})
    assert wrong == Judgement(1.0, {"exact": 0.0, "ends": 0.0, "worth": 0.5, "length": 3.0})


def test_the_name_of_a_sum_is_the_same_in_every_process_and_asks_for_what_its_parts_do(module):
    rewards = {f"{module}:ends": 1, f"{module}:detailed": 0.5, "exact": 0.5}
    names = {weighted.name_of(dict(order)) for order in (rewards.items(), [*rewards.items()][::-1])}
    assert len(names) == 1
    assert names_seen(reward_function(*names)) == ["finish_reason", "metadata"]
    assert parts.reward_name_of(settings(), "exact") == "exact"


def test_the_reward_of_the_largest_weight_says_which_answers_are_right():
    # "ends" alone reaches the bound of a right answer, and says nothing about it.
    assert weighted.deciding({"m:exact": 1.0, "ends": ("m:f", 0.9), "late": ("m:g", -2.0)}) == (
        "exact",
    )
    assert set(weighted.deciding({"a": 1, "b": 1.0})) == {"a", "b"}
    assert weighted.deciding({}) == ()


@pytest.mark.parametrize(
    "part, message",
    [
        ("nothing", "'nothing' returned None, not a finite number"),
        ("same", "two components are called 'exact'"),
    ],
)
async def test_a_part_that_is_no_number_is_named(module, part, message):
    name = weighted.name_of({"exact": 1.0, f"{module}:{part}": 1.0})
    async with RewardPool(name, **BOUNDS) as pool:
        with pytest.raises(RewardError, match=message):
            await pool.judge("1", "1")


def test_a_part_that_cannot_work_is_found_before_the_run(module):
    with pytest.raises(ValueError, match="picky reads no answer"):
        check_reward(reward_function(weighted.name_of({f"{module}:picky": 1.0})), iter([]))
    with pytest.raises(ValueError, match="unknown reward 'exakt', did you mean 'exact'"):
        reward_function(weighted.name_of({"exakt": 1.0}))
    with pytest.raises(ValueError, match="tokens"):
        names_seen(reward_function(weighted.name_of({f"{module}:never": 1.0})))


@pytest.mark.parametrize(
    "rewards, message",
    [
        ({"exact": 0}, r"task.rewards must be weights, finite and not 0, .* got 0 of 'exact'"),
        ({"exact": "1"}, "got '1' of 'exact'"),
        ({"exact": True}, "got True of 'exact'"),
        ({"a": ("exact", float("nan"))}, r"got \('exact', nan\) of 'a'"),
        ({"a": ("exact", 1.0, 2.0)}, "of 'a'"),
        ({"exact": -1.0}, r"task.rewards must have a weight > 0, got \{'exact': -1.0\}"),
    ],
)
def test_weights_that_are_none_are_refused(rewards, message):
    with pytest.raises(SettingsError, match=message):
        settings(**rewards)


@pytest.mark.parametrize(
    "rewards, message",
    [
        (
            {"a:score": 1.0, "b:score": 0.5},
            r"two components 'score': .*\{'NAME': \('b:score', 0.5\)\}",
        ),
        (
            {"exact": 1.0, "a:reward": 0.5},
            "no component may be called 'reward'.*'NAME': .'module:function', WEIGHT",
        ),
        ({"a:Score": 1.0}, "component.* 'Score'.*'NAME': .'module:function', WEIGHT"),
    ],
)
def test_what_cannot_name_a_component_is_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        weighted.parts_of(rewards)


def test_a_library_that_judges_by_itself_takes_no_rewards():
    config = base_config()
    config.task.name, config.task.rewards = "openenv:http://localhost:1", {"exact": 1.0}
    config.rollout.update(function="agent", agent="jaxrl_async.extras.openenv:agent")
    with pytest.raises(SettingsError, match="task.rewards must be {} with task.name = 'openenv:"):
        settings_of(config)


def test_an_environment_whose_turns_have_rewards_takes_no_others(tmp_path):
    config = load_config("tools:smoke")
    config.task.rewards = {"exact": 1.0, "ends": 0.1}
    settings = settings_of(config)
    refused = "task.rewards must be {} with environment.name = 'calculator'"
    with pytest.raises(machine.StartError, match=refused):
        machine.prepare(settings, tmp_path)
    machine.prepare(settings, tmp_path, resume=True)  # of a run that began before


def test_a_registered_reward_is_written_as_the_path_that_other_processes_find(module, tmp_path):
    import weighted_rewards

    register_reward("stops")(weighted_rewards.ends)
    config = base_config()
    config.task.rewards = {"stops": 0.5, "exact": 1.0, "math_verify": 1, "b": ("stops", 1.0)}
    workdirs.write_config(tmp_path, config)
    kept = json.loads((tmp_path / "config.json").read_text())["task"]["rewards"]
    assert kept == {
        "exact": 1.0,
        "math_verify": 1,
        "stops": [f"{module}:ends", 0.5],
        "b": [f"{module}:ends", 1.0],
    }
    assert weighted.name_of(kept) == weighted.name_of(config.task.rewards.to_dict())
    assert not workdirs.differences(tmp_path, config)


def test_a_wrong_answer_is_not_right_however_large_the_sum():
    nothing = dict.fromkeys(("function", "encode", "decode"))
    bounds = dict.fromkeys(("vocab_size", "max_new_tokens", "max_request_tokens", "max_tokens"), 1)
    runner = Runner(**nothing, **bounds, stop_token_ids=(), deciding=("exact",))
    assert not runner.is_right(Judgement(1.5, {"exact": 0.0, "ends": 1.0}))
    assert runner.is_right(Judgement(0.5, {"exact": 1.0, "ends": 0.0}))
    assert runner.is_right(Judgement(1.0))  # The reward of a rollout function's own.


def test_a_sum_says_what_a_time_out_is_worth_where_each_part_does(module, monkeypatch):
    import weighted_rewards

    name = weighted.name_of({"math_verify": 1.0, f"{module}:ends": 0.5})
    assert reward_function(name).times_out_as is None
    monkeypatch.setattr(weighted_rewards.ends, "times_out_as", -1.0, raising=False)
    assert reward_function(name).times_out_as == -0.5
