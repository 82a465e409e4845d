"""The benchmark of the reward pool runs in small; its figures are in benchmarks/results."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from jaxrl_async.rewards import reward_function

PATH = pathlib.Path(__file__).parent.parent / "benchmarks" / "rewards.py"
spec = importlib.util.spec_from_file_location("benchmarks_rewards", PATH)
rewards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rewards)


def test_the_pool_is_measured_beside_one_process_and_none(tmp_path):
    rewards.main(["--smoke", f"--out={tmp_path}"])
    result = json.loads((tmp_path / "rewards.json").read_text())
    assert set(result["rewards"]) == {"last_number", "math_verify"}
    for reward in result["rewards"].values():
        assert list(reward["processes"]) == [rewards.IN_PROCESS, "1", "2"]
        assert reward["processes"]["1"]["over_one"] == {"median": 1, "low": 1, "high": 1}
        assert all(row["calls_per_sec"]["low"] > 0 for row in reward["processes"].values())


@pytest.mark.parametrize("name", ["last_number", "math_verify"])
def test_every_second_completion_is_right(name):
    calls = rewards.make_calls(name, 40, np.random.default_rng(1))
    assert [reward_function(name)(*call) for call in calls] == [1.0, 0.0] * 20
