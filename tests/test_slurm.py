"""launch/slurm.sbatch on a real Slurm of three nodes on loopback: preempted, requeued, resumed to the same weights."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
from fixtures.runs import assert_same, params_of

from jaxrl_async.metrics import read_metrics
from jaxrl_async.queue.journal import JournalReader

ROOT = pathlib.Path(__file__).parent.parent
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


def test_a_preempted_job_is_requeued_and_ends_with_the_weights_of_one_that_was_not(
    slurm, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAXRL_PYTHON", sys.executable)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")

    def submit(workdir):
        script = ROOT / "launch" / "slurm.sbatch"
        output = f"--output={tmp_path}/{workdir.name}.txt"
        config = "configs/quickstart.py:smoke,mode=sync"
        steps = f"--config.learner.num_steps={NUM_STEPS}"
        return slurm("sbatch", "--parsable", output, script, config, workdir, steps).strip()

    def logs_of(workdir):
        files = [tmp_path / f"{workdir.name}.txt", *sorted((workdir / "logs").glob("*.log"))]
        files += [pathlib.Path(os.environ["SLURM_CONF"]).parent / "log" / "slurmctld.log"]
        jobs = slurm("squeue")
        return jobs + "\n".join(f"{f.name}:\n{f.read_text()}" for f in files if f.exists())

    def state_of(job):
        return slurm("scontrol", "show", "job", job)

    def wait_for(condition, job, workdir):
        deadline = time.monotonic() + TIMEOUT_SECS
        while not condition():
            assert time.monotonic() < deadline, logs_of(workdir)
            if "PENDING" in state_of(
                job
            ):  # The scheduler of an idle cluster sleeps until something changes.
                slurm("scontrol", "update", f"JobId={job}", f"Comment={time.monotonic()}")
            time.sleep(0.5)

    def wait_for_end(job, workdir):
        wait_for(lambda: not slurm("squeue", "--noheader"), job, workdir)

    preempted, whole = tmp_path / "preempted", tmp_path / "whole"
    job = submit(preempted)
    wait_for(lambda: len(read_metrics(preempted)) >= 3, job, preempted)
    signaled = time.monotonic()
    slurm(
        "sbatch", "--partition=high", "--nodes=3", "--exclusive", "--time=1", "--output=/dev/null",
        "--wrap", "sleep 2",
    )  # fmt: skip
    wait_for(lambda: "PENDING" in state_of(job), job, preempted)
    requeue_secs = time.monotonic() - signaled
    steps = [int(path.name) for path in (preempted / "checkpoints").iterdir()]
    assert max(steps) == read_metrics(preempted)[-1]["step"] < NUM_STEPS
    wait_for_end(job, preempted)
    secs = time.monotonic() - signaled
    with capsys.disabled():
        print(
            f"\nSlurm: preempted after step {max(steps)}, requeued {requeue_secs:.1f} s after the signal, "
            f"at the end after {secs:.0f} s"
        )
    assert "JobState=COMPLETED" in state_of(job) and "Restarts=1" in state_of(job), logs_of(
        preempted
    )
    learner, server = (
        (preempted / "logs" / f"{role}-0.log").read_text() for role in ("learner", "server")
    )
    assert "SIGTERM: stopping after this step" in learner
    assert f"stopped early after step {max(steps)}" in learner
    assert f"resumed at version {max(steps)}" in learner
    assert server.count("server 0 at http://127.0.0.12:30000") == 2
    assert [row["step"] for row in read_metrics(preempted)] == list(range(1, NUM_STEPS + 1))
    assert (preempted / "key").stat().st_mode & 0o777 == 0o600
    nothing = {"lost": [], "doubled": [], "gap": [], "stray": []}
    assert JournalReader(preempted / "journal.sqlite").audit() == nothing

    wait_for_end(submit(whole), whole)
    assert_same(params_of(whole, NUM_STEPS), params_of(preempted, NUM_STEPS))
