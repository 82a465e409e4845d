"""Slow tests: learning through the real processes on three seeds, benchmarks, GSM8K, the quickstart command.

No test asserts a time. The benchmarks print the figures, which stand in docs/results.md.
"""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest
from fixtures import real_servers
from fixtures.adapters import logits

from jaxrl_async.cli.config import load_config
from jaxrl_async.metrics import read_metrics
from jaxrl_async.models import hf
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.tasks.tokenizer import CharTokenizer

ROOT = pathlib.Path(__file__).parents[2]
GSM8K = pathlib.Path(os.environ.get("JAXRL_GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))

pytestmark = pytest.mark.long


def run(*words, **variables):
    """Runs a command as a user would."""
    subprocess.run(
        [*map(str, words)], cwd=ROOT, env=os.environ | variables, check=True, timeout=1800
    )


def jaxrl(*words):
    run(sys.executable, "-m", "jaxrl_async", *words)


@pytest.mark.parametrize("seed", [21, 22, 23])
@pytest.mark.parametrize("mode", ["async", "sync", "periodic"])
def test_rl_raises_held_out_accuracy_by_forty_points_to_eighty(mode, seed, tmp_path):
    config = f"--config=configs/quickstart.py:mode={mode},seed={seed}"
    jaxrl("train", config, f"--workdir={tmp_path}/run")
    jaxrl("evaluate", f"--workdir={tmp_path}/run")
    before, *_, after = json.loads((tmp_path / "run" / "evaluation.json").read_text())
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


def command_of(server):
    """The config's server.command, in the environment of these tests."""
    command = load_config(f"configs/arithmetic_{server}.py").server.command
    where = command.replace(f".venv-servers/{server}", str(real_servers.environment_of(server)))
    return f"--config.server.command={where}"


@pytest.mark.parametrize("server", ["sglang", "sglang_jax"])
def test_a_real_server_teaches_what_the_embedded_one_does(server, tmp_path):
    real_servers.require(server)
    config = f"--config=configs/arithmetic_{server}.py:seed=21"
    jaxrl("train", config, command_of(server), f"--workdir={tmp_path}/run")
    jaxrl("evaluate", f"--workdir={tmp_path}/run")
    before, *_, after = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert after["greedy"] >= 0.80
    assert after["greedy"] - before["greedy"] >= 0.40
    differences, padding = against_version_0(tmp_path)
    # SGLang's log-probs are of the logits with the bias that keeps padding from being sampled.
    shift = -np.log1p(-padding) if server == "sglang" else 0.0
    assert len(differences) > 500 and np.abs(differences - shift).max() <= 2e-5


def against_version_0(directory):
    """Of the tokens of step 1: log-probs less those of version 0, nats [N], and π(padding) [N]."""
    run, model = directory / "run", directory / "version-0"
    jaxrl("export", f"--workdir={run}", "--step=0", f"--out={model}")
    config = hf.read_config(model, dtype="float32", remat=False)
    params = hf.from_tensors(hf.read_tensors(model), config)
    with contextlib.closing(JournalReader(run / "journal.sqlite")) as journal:
        rows = [row for group in journal.chunk(1, 0)[0] for row in group.trajectories]
    length = max(map(len, rows))
    tokens = np.array([np.pad(row.tokens, (0, length - len(row))) for row in rows])
    logprobs = np.asarray(jax.nn.log_softmax(logits(config, params, tokens)[:, :-1]))
    known = np.take_along_axis(logprobs, tokens[:, 1:, None], 2)[..., 0]
    differences, padding = [], []
    for row, ours, all_ids in zip(rows, known, logprobs, strict=True):
        at = np.flatnonzero(row.mask & (row.versions == 0))
        differences.append(row.logprobs[at] - ours[at - 1])
        padding.append(np.exp(all_ids[at - 1, CharTokenizer.pad_id]))
    return np.concatenate(differences), np.concatenate(padding)


@pytest.mark.parametrize("replay", ["on", "off"])
def test_a_real_sglang_trains_a_mixture_of_experts_with_pushes_in_flight(replay, tmp_path):
    real_servers.require("sglang")
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 64}
    model = {"family": "qwen3_moe", "tied_embeddings": False, "head_dim": 32} | experts
    jaxrl(
        "train",
        "--config=configs/arithmetic_sglang.py:seed=21",
        command_of("sglang") + " --enable-return-routed-experts",
        f"--workdir={tmp_path}/run",
        *(f"--config.model.{name}={value}" for name, value in model.items()),
        f"--config.learner.replay_routes={replay}",
        "--config.rollout.sample_padding=True",  # Without a bias log-probs are exact.
        "--config.learner.num_minibatches=1",
        "--config.learner.num_steps=8",
        "--config.warm_start.num_steps=300",
    )
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    fresh = [row for row in rows if row["mismatch/tokens"] > 0]
    assert fresh and max(row["staleness/max"] for row in rows) > 0
    for row in fresh:
        assert row["mismatch/mean_abs"] <= 1e-5 and row["mismatch/max_abs"] <= 2e-4
    assert not any(row["experts/routes_differ"] for row in rows if not row["staleness/max"])
    for row in rows:
        assert row["experts/routes_known"] > 0.5
    with contextlib.closing(JournalReader(tmp_path / "run/journal.sqlite")) as journal:
        trained = [row for i in range(len(journal)) for row in journal[i].trajectories]
    assert any(len(np.unique(row.versions[row.mask])) > 1 for row in trained)
    assert "enable-return-routed-experts" not in (tmp_path / "run/logs/learner.log").read_text()


@pytest.mark.parametrize("server", ["sglang", "sglang_jax"])
def test_one_of_two_real_servers_is_killed_and_rejoins(server, tmp_path, capsys):
    """Prints the longest time without a step after the kill."""
    real_servers.require(server)
    workdir, num_steps = tmp_path / "run", 120
    command = [sys.executable, "-m", "jaxrl_async", "train", f"--workdir={workdir}"]
    command += [f"--config=configs/arithmetic_{server}.py", command_of(server)]
    command += ["--config.server.num_local=2"]
    command += [
        "--config.warm_start.num_steps=20",
        f"--config.learner.num_steps={num_steps}",
        "--config.checkpoint.every_steps=1000",
    ]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while len(read_metrics(workdir)) < 20:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        roles = psutil.Process(process.pid).children()
        (role,) = [r for r in roles if {"--role=server", "--index=1"} <= set(r.cmdline())]
        killed_at = time.time()
        for child in role.children(recursive=True):
            child.kill()
        assert process.wait(900) == 0
    finally:
        process.terminate()
        process.wait(60)
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    times = [row["unix_time"] for row in rows]
    gaps = [after - before for before, after in itertools.pairwise(times) if after > killed_at]
    usual = np.median([after - before for before, after in itertools.pairwise(times)])
    log = (workdir / "logs" / "learner.log").read_text()
    states = [line for line in log.splitlines() if "http://" in line and " is " in line]
    lost = next(i for i, line in enumerate(states) if "DEAD" in line or "STALE" in line)
    rejoined = [line for line in states[lost:] if line.count("is HEALTHY") == 2]
    with capsys.disabled():
        print(
            f"\n{server}: longest gap between steps after the kill {max(gaps):.1f} s "
            f"(median {usual:.1f} s); first lines: {states[lost][:200]} … {rejoined[:1]}"
        )
    assert rejoined, states[-3:]
    position = json.loads(
        (workdir / "checkpoints" / str(num_steps) / "position" / "metadata").read_text()
    )
    outstanding = {permit[0] for permit in position["outstanding"]}
    assert position["frontier"] - len(outstanding) == 64 * num_steps
    assert position["retired"] == {}


PARTS = ("rate", "policies", "blocks", "length")


@pytest.mark.parametrize("words", ["modes", *(f"learner --part={part}" for part in PARTS)])
def test_a_benchmark_runs_whole(words, tmp_path):
    name, *flags = words.split()
    run(sys.executable, f"benchmarks/{name}.py", *flags, f"--out={tmp_path}")
    assert json.loads((tmp_path / f"{name}.json").read_text())["proof"]


def test_the_benchmark_of_weights_runs_small(tmp_path):
    run(sys.executable, "benchmarks/weights.py", "--sizes=1", f"--out={tmp_path}/weights.json")
    rows = json.loads((tmp_path / "weights.json").read_text())["rows"]
    measured = {(row["server"], row["transport"]) for row in rows}
    assert measured == {
        (s, one) for s, all_of in real_servers.TRANSPORTS_OF.items() for one in all_of
    }


def test_the_benchmark_of_servers_runs_once(tmp_path):
    flags = ("--servers=embedded", "--every=1", "--seeds=11", f"--out={tmp_path}/servers.json")
    run(sys.executable, "benchmarks/servers.py", *flags)
    (row,) = json.loads((tmp_path / "servers.json").read_text())["rows"]
    assert row["greedy_after"] >= 0.80


def test_the_quickstart_command_makes_its_own_environment(tmp_path):
    run("./launch/quickstart.sh", "smoke", tmp_path / "run", JAXRL_VENV=str(tmp_path / "venv"))
    assert (tmp_path / "run" / "report.html").exists()
