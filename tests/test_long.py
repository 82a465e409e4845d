"""What takes minutes: learning through the real processes on three seeds, benchmarks, GSM8K, the other command.

Nothing here asserts a time. The figures are printed by the benchmarks and stand in the README.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_async.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
GSM8K = pathlib.Path(os.environ.get("JAXRL_GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))

pytestmark = pytest.mark.long


def run(*words, **variables):
    """Runs a command as a user would: without the 8 host devices that the tests ask for."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(
        [*map(str, words)], cwd=ROOT, env=environment | variables, check=True, timeout=1800
    )


def jaxrl(*words):
    run(sys.executable, "-m", "jaxrl_async", *words)


@pytest.mark.parametrize("seed", [21, 22, 23])
@pytest.mark.parametrize("mode", ["async", "sync", "periodic"])
def test_rl_raises_held_out_accuracy_by_forty_points_to_eighty(mode, seed, tmp_path):
    config = f"--config=configs/quickstart.py:mode={mode},seed={seed}"
    jaxrl("train", config, f"--workdir={tmp_path}/run")
    jaxrl("evaluate", f"--workdir={tmp_path}/run")
    before, after = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert after["greedy"] >= 0.80
    assert after["greedy"] - before["greedy"] >= 0.40
    counts = [row["compile/count"] for row in read_metrics(tmp_path / "run")]
    assert counts[1] == counts[-1], "a program compiled after the first two steps"


def test_twenty_steps_of_gsm8k_in_async_mode(tmp_path):
    if not GSM8K.is_dir():
        pytest.skip(
            "no GSM8K here: set JAXRL_GSM8K_DIR to the directory of train.jsonl and test.jsonl"
        )
    jaxrl(
        "train",
        "--config=configs/gsm8k_tiny.py",
        f"--config.task.args.directory={GSM8K}",
        f"--workdir={tmp_path}/run",
    )
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, 21))


@pytest.mark.parametrize("name", ["learner", "modes"])
def test_a_benchmark_runs_whole(name):
    run(sys.executable, f"benchmarks/{name}.py")


def test_the_quickstart_command_makes_its_own_environment(tmp_path):
    run("./launch/quickstart.sh", "smoke", tmp_path / "run", JAXRL_VENV=str(tmp_path / "venv"))
    assert (tmp_path / "run" / "report.html").exists()
