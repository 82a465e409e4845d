"""The scripts of Slurm on a real one of four nodes on loopback: preempted, requeued, resumed to the same weights."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from fixtures.runs import assert_same, params_of

from jaxrl_async.metrics import read_metrics
from jaxrl_async.queue.journal import JournalReader

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 40
TIMEOUT_SECS = 400.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")

pytestmark = pytest.mark.long


@pytest.fixture
def slurm(monkeypatch):
    """Starts a Slurm for the test, and runs its clients: their output."""
    missing = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
    if missing or os.getuid() != 0:
        pytest.skip(
            f"needs root and Slurm, missing here: {', '.join(missing) or 'root'}: "
            "apt-get install --no-install-recommends slurm-wlm munge"
        )
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    script = ROOT / "tests" / "real" / "slurm.sh"
    # Not in tmp_path: a socket of Slurm's has a path of 107 characters at most.
    directory = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))
    monkeypatch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
    try:
        subprocess.run([script, "up", directory], check=True, timeout=60)
        yield (
            lambda *words: (
                subprocess.run(
                    list(map(str, words)),
                    cwd=ROOT,
                    check=True,
                    timeout=30,
                    text=True,
                    stdout=subprocess.PIPE,
                ).stdout
            )
        )
    finally:
        subprocess.run([script, "down", directory], check=False, timeout=60)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def job_of(slurm, tmp_path, monkeypatch):
    """Submits runs of the quickstart, and waits for them."""
    monkeypatch.setenv("JAXRL_PYTHON", sys.executable)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    return lambda workdir, *flags, **options: Job(slurm, tmp_path, workdir, flags, **options)


class Job:
    """One job of slurm.sbatch."""

    def __init__(
        self,
        slurm,
        tmp_path,
        workdir,
        flags,
        script=ROOT / "launch" / "slurm.sbatch",
        before=(),
        plan=(),
    ):
        self._slurm, self.workdir = slurm, workdir
        self.output = tmp_path / f"{workdir.name}.txt"
        config = "configs/quickstart.py:smoke,mode=sync"
        flags = (f"--config.learner.num_steps={NUM_STEPS}", *flags)
        more = ["--nodes=2"] if before else []
        words = ["--parsable", f"--output={self.output}", *more, script, *before]
        words += [config, workdir, *flags]
        if plan:  # Its script has the words.
            more = [*plan, f"--config={config}", f"--workdir={workdir}", *flags]
            command = [sys.executable, "-m", "jaxrl_async", "pod", "--manifest=slurm", *more]
            script = tmp_path / "job.sbatch"
            script.write_text(subprocess.check_output(command, cwd=ROOT, text=True))
            words = ["--parsable", f"--output={self.output}", script]
        self._id = slurm("sbatch", *words).strip()

    def logs(self):
        files = [self.output, *sorted((self.workdir / "logs").glob("*.log"))]
        files += [pathlib.Path(os.environ["SLURM_CONF"]).parent / "log" / "slurmctld.log"]
        shown = (f"{f.name}:\n{f.read_text()}" for f in files if f.exists())
        return self._slurm("squeue") + "\n".join(shown)

    def log_of(self, role):
        path = self.workdir / "logs" / f"{role}-0.log"
        return path.read_text() if path.exists() else ""

    def output_text(self):
        return self.output.read_text() if self.output.exists() else ""

    def state(self):
        return self._slurm("scontrol", "show", "job", self._id)

    def wait_for(self, condition):
        deadline = time.monotonic() + TIMEOUT_SECS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            if (
                "PENDING" in self.state()
            ):  # The scheduler of an idle cluster sleeps until something changes.
                comment = f"Comment={time.monotonic()}"
                self._slurm("scontrol", "update", f"JobId={self._id}", comment)
            time.sleep(0.5)

    def wait_for_end(self):
        self.wait_for(lambda: not self._slurm("squeue", "--noheader"))

    def kill(self, role):
        """Kills the process of a role, which `train --role=auto` names nowhere but in its environment."""
        group = {"learner": "0", "server": "1", "rewards": "3"}[role]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    "jaxrl_async" in process.cmdline()
                    and f"--workdir={self.workdir}" in process.cmdline()
                ):
                    environ = process.environ()
                    nodes = environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}")
                    own = environ.get("SLURM_JOB_NODELIST")
                    if process.name().startswith("python") and own == nodes:
                        process.kill()
                        return
        raise AssertionError(self.logs())


def preempt(slurm):
    slurm(
        "sbatch", "--partition=high", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null",
        "--wrap", "sleep 2",
    )  # fmt: skip


def test_a_preempted_job_is_requeued_and_ends_with_the_weights_of_one_that_was_not(
    slurm, job_of, tmp_path, capsys
):
    job = job_of(tmp_path / "preempted")
    preempted = job.workdir
    job.wait_for(lambda: len(read_metrics(preempted)) >= 3)
    signaled = time.monotonic()
    preempt(slurm)
    job.wait_for(lambda: "PENDING" in job.state())
    requeue_secs = time.monotonic() - signaled
    steps = [int(path.name) for path in (preempted / "checkpoints").iterdir()]
    assert max(steps) == read_metrics(preempted)[-1]["step"] < NUM_STEPS
    job.wait_for_end()
    secs = time.monotonic() - signaled
    with capsys.disabled():
        print(
            f"\nSlurm: preempted after step {max(steps)}, requeued {requeue_secs:.1f} s after the signal, "
            f"at the end after {secs:.0f} s"
        )
    assert "JobState=COMPLETED" in job.state() and "Restarts=1" in job.state(), job.logs()
    learner, server = job.log_of("learner"), job.log_of("server")
    assert "SIGTERM: stopping after this step" in learner
    assert f"stopped early after step {max(steps)}" in learner
    assert f"resumed at version {max(steps)}" in learner
    assert server.count("server 0 at http://127.0.0.12:30000") == 2
    assert [row["step"] for row in read_metrics(preempted)] == list(range(1, NUM_STEPS + 1))
    assert (preempted / "keys" / "queue").stat().st_mode & 0o777 == 0o600
    nothing = {"lost": [], "doubled": [], "gap": [], "stray": []}
    assert JournalReader(preempted / "journal.sqlite").audit() == nothing

    other = job_of(tmp_path / "whole")
    other.wait_for_end()
    assert_same(params_of(other.workdir, NUM_STEPS), params_of(preempted, NUM_STEPS))


def test_a_server_that_is_killed_starts_again_alone_and_a_learner_that_is_killed_requeues_the_job(
    slurm, job_of, tmp_path
):
    job = job_of(tmp_path / "killed", "--config.checkpoint.every_steps=2")
    job.wait_for(lambda: len(read_metrics(job.workdir)) >= 3)
    job.kill("server")
    job.wait_for(lambda: job.log_of("server").count("server 0 at http://") == 2)
    step = len(read_metrics(job.workdir))
    job.wait_for(lambda: len(read_metrics(job.workdir)) >= min(step + 3, NUM_STEPS - 5))
    assert "ended with code 137; started again" in job.log_of("server"), job.logs()
    assert "resumed" not in job.log_of("learner") and "Restarts=0" in job.state()
    job.kill("learner")
    job.wait_for_end()
    assert "JobState=COMPLETED" in job.state() and "Restarts=1" in job.state(), job.logs()
    assert "the learner ended with code 137: requeued" in job.output.read_text()
    assert "resumed at version" in job.log_of("learner")
    assert [row["step"] for row in read_metrics(job.workdir)] == list(range(1, NUM_STEPS + 1))


def test_a_service_of_rewards_in_a_planned_job_that_is_killed_starts_again_alone(
    slurm, job_of, tmp_path
):
    job = job_of(tmp_path / "rewards", plan=("--hosts=n[1-2]", "--servers=1", "--rewards=1"))
    job.wait_for(lambda: len(read_metrics(job.workdir)) >= 3)
    job.kill("rewards")
    job.wait_for_end()
    assert "JobState=COMPLETED" in job.state() and "Restarts=0" in job.state(), job.logs()
    assert job.log_of("rewards").count("reward exact at 127.0.0.14:7100") == 2
    assert "ended with code 137; started again" in job.log_of("rewards")
    assert "resumed" not in job.log_of("learner")
    assert len(read_metrics(job.workdir)) == NUM_STEPS
    logs = job.log_of("queue") + (job.workdir / "logs" / "queue-1.log").read_text()
    assert "the reward service 127.0.0.14:7100 gives no answer" in logs
    config = json.loads((job.workdir / "config.json").read_text())
    assert config["rollout"]["reward_addresses"] == ["127.0.0.14:7100"]


def test_a_job_whose_usage_is_bad_is_not_requeued(slurm, job_of, tmp_path):
    job = job_of(tmp_path / "bad", "--config.learner.num_processes=2", "--config.learner.data=2")
    job.wait_for_end()
    assert "JobState=FAILED" in job.state() and "Restarts=0" in job.state(), job.logs()
    assert "ExitCode=2:0" in job.state()


@pytest.mark.parametrize("cause", ["its time limit", "a preemption"])
def test_a_job_of_one_kind_of_node_trains_by_pod_and_is_requeued_at(slurm, job_of, tmp_path, cause):
    job = job_of(tmp_path / "pod", script=ROOT / "launch" / "slurm_pod.sbatch", before=(1,))
    job.wait_for(lambda: "version 2: pushed" in job.output_text())
    if cause == "a preemption":
        preempt(slurm)
    else:
        slurm("scancel", "--batch", "--signal=TERM", job._id)  # as --signal=B: does
    job.wait_for_end()
    assert "JobState=COMPLETED" in job.state() and "Restarts=1" in job.state(), job.logs()
    (resumed,) = re.findall(r"resumed at version (\d+)", job.output_text())
    assert 2 <= int(resumed) < NUM_STEPS, job.logs()  # from the checkpoint of the signal
    assert [row["step"] for row in read_metrics(job.workdir)] == list(range(1, NUM_STEPS + 1))
    assert "127.0.0.12 server-0: " in job.output_text()
    nothing = {"lost": [], "doubled": [], "gap": [], "stray": []}
    assert JournalReader(job.workdir / "journal.sqlite").audit() == nothing
