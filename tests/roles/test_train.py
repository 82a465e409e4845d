"""The main job through its real processes and wire: modes, resume, bad input, deaths and Ctrl-C."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from fixtures import strangers
from fixtures.runs import (
    FIRST_STEP_TIMEOUT_SECS,
    QUICKSTART,
    ROOT,
    RUN_TIMEOUT_SECS,
    assert_same,
    params_of,
    roles_of,
    wait_for_step,
)

from jaxrl_async.learner.versions import Delay
from jaxrl_async.metrics import METRICS, read_metrics
from jaxrl_async.runtime.workdir import lock

# The smoke run without its warm start, where the policy matters to nothing.
UNTRAINED = (f"--config={QUICKSTART}:smoke", "--config.warm_start.num_steps=0")
GSM8K = f"--config.task.args.directory={ROOT}/tests/gsm8k_tiny"


@pytest.mark.parametrize(
    "mode", ["sync", pytest.param("periodic", marks=pytest.mark.long), "async"]
)
def test_a_mode_trains_evaluates_and_reports(mode, finished, verb, tmp_path):
    workdir = shutil.copytree(finished(mode), tmp_path / "run")
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == [1, 2]
    if mode != "async":
        assert all(row["staleness/max"] == 0 for row in rows)
    assert rows[1]["compile/count"] == rows[0]["compile/count"], "a program compiled after step 1"
    for name in (
        "config.json", "metrics.jsonl", "tensorboard", "checkpoints/0", "checkpoints/2", "weights",
        "logs/queue.log", "logs/server-0.log", "logs/rollout-0.log", "logs/learner.log",
    ):  # fmt: skip
        assert (workdir / name).exists(), name
    for name in METRICS:
        if not name.endswith("/") and name not in NOT_IN_EVERY_RUN:
            assert any(name in row for row in rows), f"{name} is in the table and never logged"

    code, output = verb("evaluate", "--config.evaluate.num_prompts=8")
    assert code == 2, "evaluate takes its config from the workdir"
    code, output = verb("evaluate")
    assert code == 0, output
    assert [row["step"] for row in json.loads((workdir / "evaluation.json").read_text())] == [0, 2]
    code, output = verb("report")
    assert code == 0, output
    page = (workdir / "report.html").read_text()
    assert page.count("<svg") >= 14
    assert "Held-out evaluation" in page
    assert not re.search(r"(src|href)=.http", page), "the page is not self-contained"


NOT_IN_EVERY_RUN = {
    "policy/kl_penalty",
    "policy/kl_coefficient",
    "policy/kl_teacher",
    "learner/rate_scale",
    "time/wait_push_secs",
    "time/publish_secs",
    "weights/delay",
    "time/device_wait_secs",
    "rollout/device_wait_secs",
    # tests/roles/test_choices.py
    *(name for name in METRICS if name.startswith(("experts/", "rollout/kept_"))),
}


DRAWN = [Delay(3, uniform=True, seed=9).held(version) for version in range(6)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("delay_steps", "held", "keep"),
    [
        ("2", [0, 0, 0, 1, 2, 3], 4),
        ("uniform(3)", DRAWN, 5),
    ],
)
def test_delayed_servers_make_every_token_of_a_step_so_stale(
    delay_steps, held, keep, run, tmp_path
):
    code, output = run(
        "train",
        f"--config={QUICKSTART}:smoke,mode=sync,seed=9",
        "--config.learner.num_steps=6",
        f"--config.rollout.delay_steps={delay_steps}",
    )
    assert code == 0, output
    rows = read_metrics(tmp_path / "run")
    delays = [version - h for version, h in enumerate(held)]
    # Step s samples when version s − 1 is published.
    assert [row["staleness/mean"] for row in rows] == delays
    assert [row["staleness/max"] for row in rows] == delays
    for version, row in enumerate(rows):  # The push of the step itself may be over as well.
        pushed = list(zip(held, delays, strict=True))[version : version + 2]
        assert (row["weights/version"], row["weights/delay"]) in pushed
    kept = sorted(int(path.name) for path in (tmp_path / "run" / "weights").iterdir())
    assert kept == list(range(6))[-keep:]


def test_drawn_delays_of_the_test_above_are_several_and_go_back():
    assert sorted(DRAWN) != DRAWN and len({n - h for n, h in enumerate(DRAWN)}) >= 3


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("gsm8k_tiny", marks=pytest.mark.long),
        pytest.param("gsm8k_qwen2_5_1p5b", marks=pytest.mark.long),
        pytest.param("reason", marks=pytest.mark.long),  # test_notebooks trains with it.
    ],
)
def test_the_smoke_of_a_config_trains_two_steps(config, run, tmp_path):
    few = "--config.evaluate.num_prompts=2"
    code, output = run("train", f"--config=configs/{config}.py:smoke", GSM8K, few)
    assert code == 0, output
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.optimised
def test_a_resumed_sync_run_equals_the_uninterrupted_one_bit_for_bit(run, finished, tmp_path):
    sync, four = f"--config={QUICKSTART}:smoke,mode=sync", "--config.learner.num_steps=4"
    whole, parts = tmp_path / "whole", shutil.copytree(finished("sync"), tmp_path / "parts")
    assert run("train", sync, four, workdir=whole)[0] == 0
    code, output = run("train", sync, four, "--resume", workdir=parts)
    assert code == 0, output
    assert [row["step"] for row in read_metrics(parts)] == [1, 2, 3, 4]
    assert_same(params_of(whole, 4), params_of(parts, 4))


def test_a_workdir_that_holds_a_run_is_not_overwritten(verb, tmp_path):
    (tmp_path / "run" / "checkpoints" / "0").mkdir(parents=True)
    code, output = verb("train", f"--config={QUICKSTART}:smoke")
    assert code == 2
    assert "--resume" in output


def test_the_workdir_of_a_run_that_goes_on_is_left_alone(verb, tmp_path):
    workdir = tmp_path / "run"
    with lock(workdir):
        (workdir / "config.json").write_text("of the first run")
        code, output = verb("train", f"--config={QUICKSTART}:smoke")
        assert code == 2
        assert f"{workdir} belongs to a run that goes on (process {os.getpid()})" in output
        assert {path.name for path in workdir.iterdir()} == {".lock", "config.json"}
        assert (workdir / "config.json").read_text() == "of the first run"


@pytest.fixture
def ctrl_c_is_not_ignored():
    """A shell's background job, which may run these tests, ignores Ctrl-C, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_not_ignored")
def test_a_run_goes_on_whatever_strangers_call_and_ctrl_c_ends_every_process_within_ten_seconds(
    command, verb, tmp_path
):
    process = command(
        "train",
        *UNTRAINED,
        "--config.learner.num_steps=100000",
    )
    wait_for_step(tmp_path / "run", 1)
    commands = strangers.calls(tmp_path / "run", process.pid)
    wait_for_step(tmp_path / "run", read_metrics(tmp_path / "run")[-1]["step"] + 2)
    code, shown = verb("status")
    assert code == 0 and "server http://" in shown, shown
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5  # four roles, and a reward process
    with pytest.raises(ValueError, match=f"process {process.pid}"), lock(tmp_path / "run"):
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "--resume" in output
    assert psutil.wait_procs(children, timeout=1)[1] == []
    strangers.sees_no_key(tmp_path / "run", [*commands, output, shown])


def wait_for_words(workdir, role):
    """Until the log of a role has a line."""
    deadline = time.monotonic() + FIRST_STEP_TIMEOUT_SECS
    while not any(log.stat().st_size for log in (workdir / "logs").glob(f"{role}*.log")):
        assert time.monotonic() < deadline, f"the {role} says nothing"
        time.sleep(0.05)


@pytest.mark.parametrize("role", ["queue", "server", "rollout", "learner"])
def test_a_role_that_dies_is_named_with_the_end_of_its_log(role, command, tmp_path):
    process = command(
        "train",
        *UNTRAINED,
        "--config.learner.num_steps=100000",
        "--config.supervisor.max_restarts=0",
    )
    if role == "learner":
        wait_for_step(tmp_path / "run", 1)
    else:
        wait_for_words(tmp_path / "run", role)
    roles = roles_of(process.pid)
    roles[role].kill()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search(
        rf"role '{role}(-0)?' ended by signal SIGKILL; the end of .*{role}.*log", output
    )
    assert psutil.wait_procs(list(roles.values()), timeout=1)[1] == []


HELD_ROLLOUT = """
import asyncio, pathlib
from jaxrl_async.rollout.single_turn import single_turn

async def held(prompt, generate):
    "Prompts from the fourth step on wait for the test."
    while prompt.index >= 24 and not pathlib.Path({go!r}).exists():
        await asyncio.sleep(0.05)
    return await single_turn(prompt, generate)
"""


def test_a_server_that_is_killed_is_started_again_and_no_group_is_lost_or_doubled(
    command, tmp_path, monkeypatch
):
    workdir, go = tmp_path / "run", tmp_path / "go"
    (tmp_path / "held_rollout.py").write_text(HELD_ROLLOUT.format(go=str(go)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = command(
        "train",
        *UNTRAINED,
        "--config.learner.num_steps=8",
        "--config.server.num_local=2",
        "--config.rollout.function=held_rollout:held",
        "--config.weights.poll_secs=0.5",
    )
    wait_for_step(workdir, 1)
    children = psutil.Process(process.pid).children()
    (server,) = [c for c in children if {"--role=server", "--index=1"} <= set(c.cmdline())]
    server.kill()
    log, again = workdir / "logs" / "learner.log", re.compile(r"STALE.*|DEAD.*")
    deadline = time.monotonic() + FIRST_STEP_TIMEOUT_SECS
    while True:  # Until the last line about the servers calls both HEALTHY, after one that did not.
        lines = [line for line in log.read_text().splitlines() if "http://" in line]
        if any(again.search(line) for line in lines) and lines[-1].count("is HEALTHY") == 2:
            break
        assert time.monotonic() < deadline, lines[-3:]
        time.sleep(0.1)
    go.touch()
    output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
    assert process.returncode == 0, output
    line = "role 'server-1' ended by signal SIGKILL; restart 1 of at most 4"
    assert line in output and line in (workdir / "logs" / "server-1.log").read_text()
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == list(range(1, 9))
    lines = [line for line in log.read_text().splitlines() if ": pushed;" in line]
    assert lines[-1].count("is HEALTHY") == 2
    # The 8 × 8 trained groups have distinct indexes: every issued index is trained, out, or held.
    position = json.loads((workdir / "checkpoints" / "8" / "position" / "metadata").read_text())
    outstanding = [permit[0] for permit in position["outstanding"]]
    assert len(set(outstanding)) == len(outstanding)
    assert position["frontier"] - len(outstanding) == 64 and position["retired"] == {}
    returned = {k: v for k, v in rows[-1].items() if k.startswith("returned/")}
    assert set(returned) <= {"returned/server_error", "returned/aborted"}, returned


SERVER_OF_A_COMMAND = f"""
import pathlib, subprocess, sys, threading
sys.path.insert(0, {str(ROOT / "tests")!r})
from fixtures import fake_sglang

pids, model_path, host, port = sys.argv[1:]
assert [p.name for p in pathlib.Path(model_path).iterdir()] == ["config.json"], model_path
assert host == "127.0.0.1"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(pids, "a") as file:
    print(threading.get_native_id(), child.pid, file=file)
fake_sglang.VOCAB_SIZE = 10
server = fake_sglang.FakeServer()
server.vocab_size = 14  # the model's, as the learner asks
server.port = int(port)
server.start()
threading.Event().wait()
"""


def live(pids):
    """Processes of a text of process ids that still run."""
    return [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]


@pytest.mark.parametrize("end", ["done", "the supervisor is killed"])
def test_a_command_starts_the_local_server_and_nothing_of_it_or_of_a_role_is_left(
    end, command, tmp_path
):
    script, pids = tmp_path / "server.py", tmp_path / "pids"
    script.write_text(SERVER_OF_A_COMMAND)
    process = command(
        "train",
        *UNTRAINED,
        f"--config.server.command={sys.executable} {script} {pids} {{model_path}} {{host}} {{port}}",
        f"--config.learner.num_steps={12 if end == 'done' else 100000}",
        "--config.weights.poll_secs=0.2",
        "--config.weights.push_every_steps=1",
    )
    wait_for_step(tmp_path / "run", 1)
    left = live(pids.read_text())
    assert len(left) == 2
    roles = list(roles_of(process.pid).values())
    assert len(roles) == 4
    if end == "done":
        left[0].kill()  # The run continues: the role is restarted.
        output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
        assert process.returncode == 0, output
        assert (
            "server.command ended by signal SIGKILL"
            in (tmp_path / "run" / "logs" / "server-0.log").read_text()
        )
        assert "role 'server-0' ended with exit code 1; restart 1 of at most 4" in output
        left += live(pids.read_text().splitlines()[1])
    else:
        process.kill()
        process.communicate(timeout=10)
    assert psutil.wait_procs([*left, *roles], timeout=20)[1] == []


BROKEN = """
from jaxrl_async.tasks import make_task

def broken_reward(completion, answer):
    raise ValueError("a reward that is broken")

def task(**args):
    made = make_task("arithmetic", **args)
    type(made).reward = "broken:broken_reward"
    return made
"""


@pytest.mark.parametrize("processes", [pytest.param("many", marks=pytest.mark.long), "one"])
def test_a_reward_that_raises_from_the_start_ends_the_run_with_its_traceback(
    processes, run, tmp_path, monkeypatch
):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    code, output = run(
        "train",
        *UNTRAINED,
        "--config.learner.num_steps=100000",
        "--config.task.name=broken:task",
        f"--config.supervisor.processes={processes}",
    )
    assert code == 1, output
    assert "all failed with the same error of the run's own code" in output
    assert 'raise ValueError("a reward that is broken")' in output
    assert re.search(r"prompt \d+: \d+\+\d+=", output)


@pytest.mark.long
def test_weights_that_are_not_finite_stop_the_run_before_anything_is_saved(run, tmp_path):
    code, output = run(
        "train",
        f"--config={QUICKSTART}:smoke,mode=sync",
        "--config.learner.learning_rate=1e38",
        "--config.learner.max_grad_norm=1e38",
        "--config.learner.num_steps=6",
        "--config.checkpoint.every_steps=1",
        "--config.warm_start.num_steps=400",
    )
    assert code == 1
    found = re.search(r"step (\d+), minibatch \d: loss .* prompt_index ([\d, ]+);", output)
    assert found, output
    step = int(found[1])
    kept = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept[-1] == step - 1
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, step))


def test_a_taken_port_is_named(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, output = run("train", *UNTRAINED, f"--config.queue.address={address}")
    assert code == 1
    assert re.search(
        rf"role 'queue' ended.*^queue: .*cannot listen on {address}", output, re.M | re.S
    )
    assert "Traceback" not in output


def test_an_inference_address_that_never_answers_is_named_with_the_seconds(run):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, output = run(
            "train",
            *UNTRAINED,
            f"--config.server.addresses=('{address}',)",
            "--config.server.start_timeout_secs=3.0",
        )
    assert code == 1
    assert re.search(rf"^learner: .* within 3 s.*: {address} .*not answered", output, re.M), output
    assert "Traceback" not in output


@pytest.mark.long
def test_on_a_cpu_the_learner_is_shown_as_many_devices_as_its_mesh_has(run):
    code, output = run("train", f"--config={QUICKSTART}:smoke", "--config.learner.data=2")
    assert code == 0, output


def test_a_run_resumes_with_the_command_that_it_prints(command, run, verb, tmp_path):
    """The command takes the config of the workdir, with overrides; once done, there is nothing to do."""
    workdir = tmp_path / "run"
    process = command("train", *UNTRAINED, "--config.learner.num_steps=100000")
    wait_for_step(workdir, 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
    assert process.returncode == 75, output
    resume = re.search(r"resume with: python -m jaxrl_async (.*)", output)[1].split()
    assert resume == ["train", "--resume", f"--workdir={workdir}"]
    code, output = verb("status")
    step = read_metrics(workdir)[-1]["step"]
    assert code == 0, output
    assert output.startswith(f"the run stopped after step {step:.0f}; resume with: python -m")
    more = f"--config.learner.num_steps={step + 2:.0f}"
    code, output = run(*resume, more)
    assert code == 0, output
    assert f"config.json: learner.num_steps 100000 → {step + 2:.0f}\n" in output
    assert read_metrics(workdir)[-1]["step"] == step + 2
    code, output = verb("status")
    assert code == 0 and output.startswith(f"the run is done: its last step was {step + 2:.0f}\n")
    logs = {log: log.stat().st_mtime_ns for log in (workdir / "logs").iterdir()}
    code, output = run(*resume)
    assert code == 0 and f"the last checkpoint is of step {step + 2:.0f} " in output, output
    # No role was started.
    assert {log: log.stat().st_mtime_ns for log in (workdir / "logs").iterdir()} == logs


@pytest.mark.long
def test_keys_guard_the_servers_of_a_run_and_a_served_checkpoint(
    run, command, monkeypatch, tmp_path
):
    names = {"api_key": "TEST_SERVER_KEY", "admin_api_key": "TEST_ADMIN_KEY"}
    for name, variable in names.items():
        monkeypatch.setenv(variable, f"secret-{name}")
    keys = [f"--config.server.{name}_env={variable}" for name, variable in names.items()]
    code, out = run("train", f"--config={QUICKSTART}:smoke,mode=sync", *keys)
    assert code == 0, out
    for file in (tmp_path / "run").glob("**/*.*"):
        assert file.is_dir() or b"secret-" not in file.read_bytes(), file
    server = command("serve", "--port=0", "--step=2", "--api_key_env=TEST_SERVER_KEY")
    lines = []
    for line in server.stdout:
        lines.append(line)
        if address := re.search(r"http://127.0.0.1:\d+", line):
            break
    try:
        assert lines and address, lines
        request = {"input_ids": [6, 9, 12, 5, 10, 13], "sampling_params": {"max_new_tokens": 3}}
        answer = urllib.request.Request(
            f"{address[0]}/generate",
            data=json.dumps(request).encode(),
            headers={"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(answer, timeout=30)
        answer.add_header("Authorization", "Bearer secret-api_key")
        with urllib.request.urlopen(answer, timeout=30) as reply:
            answer = json.load(reply)
        assert len(answer["output_ids"]) == 3
        assert answer["meta_info"]["weight_version"] == "2"
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)


def test_a_missing_data_set_is_named(verb):
    code, output = verb("train", "--config=configs/gsm8k_tiny.py:smoke")
    assert code in (1, 2)
    assert "data/gsm8k/train.jsonl" in output
