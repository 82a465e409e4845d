"""The shipped environments in whole runs: trained, evaluated, replayed and reported; --long: learnt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.metrics import read_metrics
from jaxrl_async.samples import read_samples

ROOT = Path(__file__).parent.parent
RUN_TIMEOUT_SECS = 900


def jaxrl(*words):
    known = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_SECS,
        stdin=subprocess.DEVNULL,
        env=known | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_a_run_of_several_turns_is_replayed_bit_for_bit_and_reported_as_a_conversation(tmp_path):
    run = tmp_path / "run"
    one = "--config.supervisor.processes=one"
    jaxrl("train", "--config=configs/tools.py:env=game,smoke", one, f"--workdir={run}")
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["component/turns"] > 1 for row in rows)
    jaxrl("replay", f"--workdir={run}")
    for before, after in zip(rows, read_metrics(run / "replay"), strict=True):
        for name in ("loss/policy", "policy/grad_norm", "reward/mean"):
            assert before[name] == after[name], name
    read = [
        s
        for found in read_samples(run).values()
        for s in found
        if any(v is None for _, v in s.spans)
    ]
    assert read and all(": " in s.completion for s in read)
    jaxrl("report", f"--workdir={run}")
    assert '<div class="read"' in (run / "report.html").read_text("utf-8")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("env", ["calculator", "game"])
def test_a_tiny_policy_learns_to_use_what_answers_it(env, mode, tmp_path):
    run = tmp_path / "run"
    jaxrl("train", f"--config=configs/tools.py:env={env},mode={mode},seed=1", f"--workdir={run}")
    jaxrl("evaluate", f"--workdir={run}", "--steps=0,last")
    before, after = json.loads((run / "evaluation.json").read_text("utf-8"))
    assert before["pass@1"] < 0.3 and after["pass@1"] > 0.8, (before, after)
    assert not {k for row in read_metrics(run) for k in row if k.startswith("returned/env")}
