"""`pod` over a real ssh, to hosts that have a network, processes and a disk of their own (fixtures/hosts.py)."""

import contextlib
import importlib.util
import re
import subprocess
import sys
import time

import pytest
from fixtures import buckets
from fixtures.hosts import hosts as make_hosts
from fixtures.runs import QUICKSTART, ROOT, RUN_TIMEOUT_SECS, environment

from jaxrl_async.metrics import read_metrics
from jaxrl_async.pods import remote
from jaxrl_async.queue.journal import JournalReader

NOTHING = {"lost": [], "doubled": [], "gap": [], "stray": []}


class Pod:
    """`pod` on the hosts of a test."""

    def __init__(self, hosts, directory):
        self.hosts, self._directory, self._process = hosts, directory, None
        self.home, self._output = directory / "home", directory / "output"

    def start(self, names, *words, environ=None):
        """Starts it; its output is kept, behind that of the one before."""
        self.hosts.start(*(name for name in names if not self.hosts.is_up(name)))
        lines = [f"{name} {self.hosts.address(name)}" for name in names]
        (self._directory / "hosts").write_text("\n".join(lines))
        command = [sys.executable, "-m", "jaxrl_async", "pod", *self.flags(), *words]
        with open(self._output, "a") as output:
            self._process = subprocess.Popen(
                self.hosts.words(*command), cwd=ROOT, env=environ or environment(), stdout=output, stderr=output
            )  # fmt: skip

    def flags(self):
        ssh = remote.SSH.replace("ssh ", f"ssh -F {self.hosts.ssh()} ", 1)
        return [
            f"--hosts={self._directory}/hosts", f"--ssh={ssh}", f"--python={sys.executable}",
            f"--config={ROOT}/{QUICKSTART}:smoke", f"--workdir={self.home}",
        ]  # fmt: skip

    def output(self):
        return self._output.read_text()

    def last_version(self):
        return max(map(int, re.findall(r"version (\d+): pushed", self.output())))

    def verb(self, *words):
        """Another `pod` on the run: what it says against it."""
        command = [sys.executable, "-m", "jaxrl_async", "pod", f"--workdir={self.home}", *words]
        self.hosts.ssh()
        done = subprocess.run(
            self.hosts.words(*command), cwd=ROOT, env=environment(), text=True, capture_output=True
        )
        assert bool(done.returncode) == bool(done.stderr), done
        return done.stderr

    def terminate(self):
        self._process.terminate()

    def wait_for(self, text, after=""):
        """Until the output has a text, behind another one."""
        deadline = time.monotonic() + RUN_TIMEOUT_SECS
        while text not in self.output().partition(after)[2] if after else text not in self.output():
            assert self._process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def wait(self):
        return self._process.wait(RUN_TIMEOUT_SECS)

    def close(self):
        if self._process:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def pod(tmp_path):
    with (
        make_hosts(tmp_path, environment()) as hosts,
        contextlib.closing(Pod(hosts, tmp_path)) as pod,
    ):
        yield pod


def test_two_hosts_train_over_ssh_and_the_workdir_comes_home(pod):
    pod.start("ab", "--servers=1")
    assert pod.wait() == 0, pod.output()
    assert [row["step"] for row in read_metrics(pod.home)] == [1, 2]
    assert JournalReader(pod.home / "journal.sqlite").audit() == NOTHING
    assert "b server-0: " in pod.output() and "a learner: " in pod.output()
    assert "metrics.jsonl" not in pod.hosts.inside("b", "ls /tmp/home/jaxrl/home/run")


GCS = "10.7.0.254:9023"


@pytest.fixture
def bucket(pod, tmp_path):
    """The environment of a bucket on the machine from which `pod` runs; hosts that start later have it."""
    (tmp_path / "data" / buckets.BUCKET).mkdir(parents=True)
    (tmp_path / "data" / buckets.BUCKET / "readme").write_text("runs")
    if None in map(importlib.util.find_spec, buckets.NEEDED["gs"]):
        pytest.skip(f"needs {' and '.join(buckets.NEEDED['gs'])}, of the extra `test`")
    command, own = buckets.gcs(GCS, f"http://{GCS}", f"-data={tmp_path}/data")
    environ = environment() | own
    pod.hosts.environ = environ
    with subprocess.Popen(pod.hosts.words(*map(str, command)), stderr=subprocess.DEVNULL) as server:
        yield environ
        server.kill()


@pytest.mark.long
def test_a_run_of_seven_hosts_outlives_what_happens_to_hosts(pod, bucket):
    """Two learn, as two slices, four sample, and one has queue and workers, at the settings that ship.

    A fault comes when the run goes on after the one before.
    """
    hosts, home = pod.hosts, pod.home
    words = [
        "--servers=4", "--queue_hosts=1", "--config.learner.slices=2", "--config.rollout.num_workers=2",
        f"--config.checkpoint.directory=gs://{buckets.BUCKET}/run", "--config.checkpoint.every_steps=5",
    ]  # fmt: skip

    def goes_on(steps=3):
        """Waits for later steps."""
        log = f"version {pod.last_version() + steps}: pushed"
        pod.wait_for(log)

    hosts.start("f", size="24M")
    pod.start("abcdefh", *words, "--config.learner.num_steps=100000", environ=bucket)
    pod.wait_for("version 2: pushed")
    hosts.kill("c")  # It never comes back.
    goes_on()
    hosts.freeze("d")
    goes_on()
    hosts.freeze("d", thaw=True)
    goes_on()
    hosts.slow("e", "64kbit")
    goes_on()
    hosts.slow("e", "")
    hosts.inside("f", "dd if=/dev/zero of=/tmp/full bs=1M")
    goes_on()
    # A late joiner, and one that leaves.
    hosts.start("g")
    assert pod.verb("--add", f"g {hosts.address('g')}") == ""
    pod.wait_for("g server-4: ")
    pod.wait_for(f"http://{hosts.address('g')}:30000 is HEALTHY")
    assert "b has learner-1: only hosts that sample leave" in pod.verb("--remove", "b")
    assert pod.verb("--remove", "f") == ""
    goes_on()
    # A learner's host is preempted, and another one comes with its name.
    hosts.kill("b")
    time.sleep(5)
    hosts.start("b")
    pod.wait_for("b learner-1: ", after="role 'learner-1' ended")
    goes_on()
    pod.terminate()
    assert pod.wait() == 75, pod.output()
    last = read_metrics(home)[-1]["step"]
    assert JournalReader(home / "journal.sqlite").audit() == NOTHING
    assert [row["step"] for row in read_metrics(home)] == list(range(1, last + 1))
    pod.start(
        "abdegh",
        *words[1:],
        "--servers=3",
        f"--config.learner.num_steps={last + 2}",
        environ=bucket,
    )
    assert pod.wait() == 0, pod.output()
    assert [row["step"] for row in read_metrics(home)] == list(range(1, last + 3))
    assert JournalReader(home / "journal.sqlite").audit() == NOTHING
