"""A pod of hosts that are directories, each with a home of its own: a stand-in for ssh runs the commands there."""

import contextlib
import errno
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from fixtures.runs import QUICKSTART, ROOT, RUN_TIMEOUT_SECS, environment

from jaxrl_async.cli import main
from jaxrl_async.cli.config import load_config
from jaxrl_async.config.build import base_config, make_settings
from jaxrl_async.metrics import read_metrics
from jaxrl_async.pods import host as guard
from jaxrl_async.pods import plan as plans
from jaxrl_async.pods import remote
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.runtime import workdir
from jaxrl_async.runtime.supervisor import RoleDiedError, free_port
from jaxrl_async.runtime.workdir import checkpoint_steps

SSH = """#!/bin/sh
# HOST COMMAND
host=$1 root={root}/$1
printf '%s\\0' "$host" "$2" >>{root}/commands
[ ! -e "$root.down" ] || {{ echo "no route to host $host" >&2; exit 255; }}
[ ! -e "$root.slow" ] || exec sleep 600
mkdir -p "$root" && cd "$root" || exit 255
PATH=$root/bin:$PATH exec env -u PYTHONPATH HOME="$root" sh -c "$2"
"""


@pytest.fixture
def hosts(tmp_path):
    """Makes hosts a, b, …: the flags of `pod` for them."""
    script = tmp_path / "ssh"
    script.write_text(SSH.format(root=tmp_path))
    script.chmod(0o755)

    def make(count):
        second, third = random.SystemRandom().sample(range(1, 255), 2)
        lines = [f"{chr(97 + i)} 127.{second}.{third}.{i + 1}" for i in range(count)]
        (tmp_path / "hosts").write_text("\n".join(lines))
        return [
            "pod", f"--hosts={tmp_path}/hosts", f"--ssh={script} {{host}}", f"--python={sys.executable}",
            f"--config={ROOT}/{QUICKSTART}:smoke", f"--workdir={tmp_path}/home",
        ]  # fmt: skip

    return make


@pytest.fixture
def pod(tmp_path):
    """Starts `pod`, with its output in a file; it is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            output = stack.enter_context(open(tmp_path / "output", "w"))
            command = [sys.executable, "-m", "jaxrl_async", *words]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=output, stderr=output
            )
            stack.callback(process.kill)
            return process

        yield start


def pid_of(tmp_path, host, role):
    """Of a role's process, once it runs."""
    path = tmp_path / host / "jaxrl" / "home" / f"{role}.pid"
    while True:
        with contextlib.suppress(OSError, IndexError):
            guard = path.read_text()
            return int(pathlib.Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
        time.sleep(0.1)


def wait_for(tmp_path, process, text):
    """Until the output of a pod has a text."""
    while text not in (output := (tmp_path / "output").read_text()):
        assert process.poll() is None, output
        time.sleep(0.2)


def commands(tmp_path):
    """The (host, command) that the stand-in was given."""
    words = (tmp_path / "commands").read_text().split("\0")[:-1]
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.long
def test_two_hosts_train_a_killed_role_is_restarted_and_the_workdir_comes_home(
    hosts, pod, run, tmp_path, capfd
):
    words = [*hosts(2), "--servers=1"]
    assert main.main([*words, "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert not (tmp_path / "commands").exists()
    process = pod(*words)
    wait_for(tmp_path, process, "a rollout-0: ")
    os.kill(pid_of(tmp_path, "a", "rollout-0"), signal.SIGKILL)
    assert process.wait(RUN_TIMEOUT_SECS) == 0, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_text()
    assert "b server-0: " in output and "role 'rollout-0' ended by signal SIGKILL" in output
    # The dry run has shown every command but the copies home.
    lines = [shlex.split(line)[1:] for line in shown.splitlines() if line.startswith(str(tmp_path))]
    first, *_ = commands(tmp_path)
    token = first[1].rpartition("echo ")[2].split()[0]
    known = {(host, command.replace("TOKEN", token)) for host, command in lines}
    more = {command.rpartition(" && ")[2][:10] for _, command in {*commands(tmp_path)} - known}
    copies = {"tar czf - ", "tar xzf - ", "tar xzf -", "touch .hos"}
    assert more <= {*copies, "grep -l " + token[:2], "ls run/che", "true"}
    assert known <= {*commands(tmp_path)}
    # Each host has what it needs, and nothing of the other.
    home, a, b = (tmp_path / p for p in ("home", "a/jaxrl/home", "b/jaxrl/home"))
    assert (a / "run/journal.sqlite").exists() and not (b / "run/journal.sqlite").exists()
    assert (b / "jaxrl_async/pods/plan.py").exists() and not (b / "run/metrics.jsonl").exists()
    keys = [(p / "queue").read_text() for p in (home / "keys", a / "run/keys", b / "run/keys")]
    assert len(set(keys)) == 1 and (b / "run/keys/queue").stat().st_mode & 0o777 == 0o600
    # The workdir is whole.
    assert [row["step"] for row in read_metrics(home)] == [1, 2]
    assert checkpoint_steps(home) == [0, 2] and not (home / "weights").exists()
    assert {p.stem for p in (home / "logs").glob("*")} == {
        "queue", "server-0", "rollout-0", "learner",
    }  # fmt: skip
    assert main.main(["report", f"--workdir={home}"]) == 0
    code, output = run("replay", workdir=home)
    assert code == 0 and "step 2: equal, bit for bit" in output, output
    assert main.main(words) == 0  # again
    assert "nothing to do: the last checkpoint is of step 2" in capfd.readouterr().out


def test_a_role_ends_with_its_connection_and_where_another_takes_its_place(hosts, tmp_path):
    *_, config, _ = hosts(1)
    root = tmp_path / "a" / "jaxrl" / "home"
    (root / "run").mkdir(parents=True)
    (root / "jaxrl_async").symlink_to(ROOT / "jaxrl_async")
    workdir.write_config(root / "run", load_config(config.partition("=")[2]))
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", "jaxrl/home", sys.executable)
    flags = (f"--config.queue.address=127.0.0.1:{free_port()}",)
    role = plans.Role("queue", plans.Host("a", "a"), {"JAX_PLATFORMS": "cpu"})
    words = shell.words(role.host, remote.command_of(role, shell, flags))

    def start():
        process = remote._Process(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        stack.enter_context(process)
        stack.callback(subprocess.Popen.send_signal, process, signal.SIGKILL)
        assert any(b"queue at" in line for line in process.stdout)
        return process, pid_of(tmp_path, "a", "queue")

    with contextlib.ExitStack() as stack:
        lost, pid = start()
        # Its connection hangs, and another takes its place.
        second, other = start()
        assert lost.wait(60) == 1 and not pathlib.Path(f"/proc/{pid}").exists()
        second.stdin.close()
        assert second.wait(60) == 1 and not pathlib.Path(f"/proc/{other}").exists()


@pytest.mark.parametrize(("name", "place"), [("server-0", "a"), ("learner", "b")])
def test_the_number_of_a_role_that_another_process_has_ends_none(
    name, place, tmp_path, monkeypatch
):
    """As after a reboot."""
    for directory in (own := tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
    monkeypatch.chdir(own)
    words = [sys.executable, "-c", "input(print(flush=True))", "jaxrl_async.pods.host", name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path / place, **pipes) as other:
        other.stdout.readline()
        path = pathlib.Path("learner.pid")
        path.write_text(str(other.pid))
        guard._take_the_place(path)
        assert path.read_text() == str(os.getpid())
        other.communicate(b"\n", timeout=60)
    assert other.returncode == 0


@pytest.mark.parametrize(("code", "found"), [(0, 0), (75, 75), (137, -9), (143, -15), (255, -9)])
def test_a_lost_connection_counts_as_a_killed_role(code, found):
    with remote._Process(["sh", "-c", f"exit {code}"]) as process:
        assert process.wait(60) == process.poll() == found


def stop_host(tmp_path, host):
    """All processes of a host end at once, and it does not answer."""
    (tmp_path / f"{host}.down").touch()
    for path in (tmp_path / host / "jaxrl" / "home").glob("*.pid"):
        for pid in (pid_of(tmp_path, host, path.stem), int(path.read_text())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_run_goes_on_without_a_server_host(hosts, pod, tmp_path, comes_back):
    words = [*hosts(3), "--servers=2", "--config.learner.num_steps=12"]
    process = pod(*words)
    wait_for(tmp_path, process, "version 1: pushed")
    stop_host(tmp_path, "c")
    wait_for(tmp_path, process, "role 'server-1' ended by signal SIGKILL")
    if comes_back:
        (tmp_path / "c.down").unlink()
    assert process.wait(RUN_TIMEOUT_SECS) == 0, (tmp_path / "output").read_text()
    assert [row["step"] for row in read_metrics(tmp_path / "home")] == list(range(1, 13))
    restarts = (tmp_path / "output").read_text().count("; restart ")
    assert restarts == 1, "a host that is gone is awaited, not counted again and again"


@pytest.mark.long
def test_a_run_goes_on_by_itself_without_a_slice_that_is_lost(hosts, pod, tmp_path):
    process = pod(
        *hosts(4), "--servers=1", "--queue_hosts=1", f"--directory={tmp_path}/disk", "--config.learner.slices=2",
        "--config.learner.num_steps=20", "--config.checkpoint.every_steps=2", "--slice_secs=5",
    )  # fmt: skip
    wait_for(tmp_path, process, "version 3: pushed")
    (tmp_path / "b.down").touch()
    guard = int((tmp_path / "disk" / "learner-1.pid").read_text())
    children = pathlib.Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    for pid in (guard, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(RUN_TIMEOUT_SECS) == 0, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_text()
    flags = "--config.learner.slices=1 --config.learner.num_processes=1 --config.learner.microbatch_rows="
    assert f"b: lost; the run goes on without, by {flags}" in output
    assert "a learner: " in output and "b learner-1: " in output
    assert [row["step"] for row in read_metrics(tmp_path / "home")] == list(range(1, 21))
    audit = JournalReader(tmp_path / "home" / "journal.sqlite").audit()
    assert audit == {"lost": [], "doubled": [], "gap": [], "stray": []}


@pytest.mark.long
def test_a_run_with_its_queue_elsewhere_resumes_on_other_hosts_from_what_came_home(
    hosts, pod, run, tmp_path
):
    words = [*hosts(3), "--servers=1", "--queue_hosts=1"]
    process = pod(*words, "--config.learner.num_steps=60")
    wait_for(tmp_path, process, "version 2: pushed")
    process.terminate()
    assert process.wait(RUN_TIMEOUT_SECS) == 75, (tmp_path / "output").read_text()
    home = tmp_path / "home"
    assert (
        "c queue: " in (output := (tmp_path / "output").read_text()) and "c rollout-0: " in output
    )
    assert not list(tmp_path.glob("a/jaxrl/home/run/journal*"))
    (last,) = {max(checkpoint_steps(home))}
    assert 2 <= last < 60
    for host in "abc":
        shutil.rmtree(tmp_path / host)
    process = pod(*words, f"--config.learner.num_steps={last + 2}")
    assert process.wait(RUN_TIMEOUT_SECS) == 0, (tmp_path / "output").read_text()
    assert [row["step"] for row in read_metrics(home)] == list(range(1, last + 3))
    code, output = run("replay", workdir=home)
    compared = len(checkpoint_steps(home)) - 1
    assert code == 0 and output.count("equal, bit for bit") == compared, output


@pytest.mark.long
def test_a_pod_that_is_killed_leaves_no_role(hosts, pod, tmp_path):
    process = pod(*hosts(2), "--servers=1", "--config.learner.num_steps=60")
    wait_for(tmp_path, process, "version 1: pushed")
    roles = {"a": ("queue", "rollout-0", "learner"), "b": ("server-0",)}
    pids = [pid_of(tmp_path, host, role) for host, names in roles.items() for role in names]
    process.kill()
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_hosts_that_cannot_take_part_are_all_named_before_a_role_starts(hosts, tmp_path, capsys):
    words = [*hosts(4), "--servers=3", "--deadline_secs=1"]
    (tmp_path / "b.down").touch()
    (tmp_path / "d.slow").touch()
    assert main.main(words) == 1
    said = capsys.readouterr().err
    assert "b is not reached: no route to host b" in said
    assert "d did not answer within 1 s" in said and "a is" not in said
    for name in ("b.down", "d.slow"):
        (tmp_path / name).unlink()
    # Another Python, and another copy of the package.
    other = tmp_path / "c" / "bin" / "python3"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\nexit 127\n")
    other.chmod(0o755)
    words = [
        *(w for w in words if not w.startswith(("--python", "--deadline"))),
        "--python=python3",
    ]
    setup = "[ $HOME != " + f"{tmp_path}/b ] || echo >>jaxrl_async/api.py"
    assert main.main([*words, f"--setup={setup}"]) == 1
    assert "c: exit code 127" in capsys.readouterr().err
    other.unlink()
    assert main.main([*words, f"--setup={setup}"]) == 1
    said = capsys.readouterr().err
    assert "b has another jaxrl_async, of digest" in said and "c has another" not in said
    assert not any("pods.host" in command for _, command in commands(tmp_path))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--servers=2"], "--servers = 2 of 2 hosts leaves none to learn"),
        (["--servers=0"], "nothing would sample"),
        (["--servers=1", "--hosts=none.json"], "no file none.json"),
        (
            ["--servers=1", "--config.queue.address=a:1"],
            "come from --hosts: --config.queue.address=a:1",
        ),
        (["--servers=1", "--include=/none"], "--include: no /none"),
        (["--servers=1", "--ssh=ssh {hots}"], "--ssh=ssh {hots}: 'hots'"),
        (["--servers=1", "--ssh=ssh '"], "--ssh=ssh ': No closing quotation"),
        (["--servers=1", "--include=/usr/bin,/bin"], "two of one name would be one on the hosts"),
        (["--servers=1", "--chips=v5e:4"], "mesh has 1 devices, and 1 hosts with 4 chips"),
    ],
)
def test_words_of_no_pod_are_refused_before_any_host_is_asked(
    hosts, words, error, tmp_path, capsys
):
    assert main.main([*hosts(2), *words]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "commands").exists()


def test_several_learner_hosts_need_a_directory_that_they_share_or_a_bucket(
    hosts, tmp_path, capsys
):
    words = [*hosts(3), "--servers=1", "--config.learner.data=2"]
    assert main.main(words) == 1
    said = capsys.readouterr().err
    assert "b and a learn and do not share jaxrl/home" in said
    assert "checkpoint.directory to a bucket" in said
    plan = plans.make(
        plans.read_hosts((tmp_path / "hosts").read_text()), servers=1, learner_devices=2
    )
    (tmp_path / "disk").mkdir()
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", str(tmp_path / "disk"), "python3")
    assert [host.name for host in remote.owners(plan, shell, bucket="", secs=60)] == ["a"]
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", "own", "python3")
    found = remote.owners(plan, shell, bucket="gs://b", secs=60)
    assert [host.name for host in found] == ["a", "b", "c"]


@pytest.mark.parametrize(("code", "result"), [(1, 2), (2, 1), (0, 1)])
def test_a_learner_that_does_not_fit_its_chips_is_refused(
    code, result, hosts, tmp_path, monkeypatch, capsys
):
    asked, real = [], subprocess.run

    def run(words, **how):
        if "fit" not in words:
            return real(words, **how)
        asked.append(words)
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "a.down").touch()
    words = [*hosts(2), "--servers=1", "--chips=v5e:4", "--config.learner.fsdp=4"]
    assert main.main(words) == result
    assert asked[0][2:5] == ["jaxrl_async", "fit", "--target=v5e-4"]
    assert ("does not fit its chips" in capsys.readouterr().err) == (code == 1)


def of(name, num_hosts, number=0):
    """A TPU VM of 4 × 4 chips, as gcloud describes it."""
    return {
        "name": f"projects/p/locations/z/nodes/{name}",
        "acceleratorType": "v5litepod-16",
        "acceleratorConfig": {"topology": "4x4"},
        "networkEndpoints": [{"ipAddress": f"10.0.{number}.{i}"} for i in range(1, num_hosts + 1)],
    }


SLICE = of("a", 4)


def test_the_first_command_of_the_page_plans_its_slice(tmp_path, monkeypatch, capsys):
    block = (ROOT / "docs" / "pods.md").read_text().partition("```\n")[2].partition("```")[0]
    command = next(line for line in block.splitlines() if line.startswith("python"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "slice.json").write_text(json.dumps(SLICE))
    words = [word.replace("$SETUP", "true") for word in shlex.split(command)[3:]]
    assert main.main([*words, "--dry-run"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "--target=v5e-4" in shown and shown.count("pods.host server-") == 12
    assert "config.queue.token_env=@run/keys/queue" in shown and "queue-0:7000" not in shown


def test_a_dry_run_over_two_slices_shows_their_variables_and_what_fit_is_asked(tmp_path, capsys):
    nodes = [SLICE, of("b", 4, 1), of("c", 1, 2) | {"acceleratorType": "v6e-8"}]
    (tmp_path / "slices.json").write_text(json.dumps(nodes))
    words = [
        "pod", f"--hosts={tmp_path}/slices.json", "--servers=1", f"--config={ROOT}/{QUICKSTART}", "--dry-run",
        f"--workdir={tmp_path}/a", "--config.learner.fsdp=16", "--config.learner.microbatch_rows=32",
    ]  # fmt: skip
    assert main.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (fit,) = (line for line in lines if "jaxrl_async fit" in line)
    assert "--target=2xv5e-16 " in fit
    (last,) = (line for line in lines if "pods.host learner-7 " in line and "MEGASCALE" in line)
    for text in ("MEGASCALE_NUM_SLICES=2", "MEGASCALE_SLICE_ID=1", "--coordinator=10.0.0.1:8476"):
        assert text in last


def test_gcloud_gets_the_worker_and_the_whole_command():
    host = remote.Host("n-1", "10.0.0.2", node="n", worker=1, place="p/z")
    words = remote.Shell(remote.GCLOUD, "a b", "python3").words(host, "echo 'x y'")
    assert words[4:7] == ["ssh", "n", "--project=p"] and "--worker=1" in words
    command = words[-1].removeprefix("--command=")
    assert shlex.split(command)[-4:] == ["a b", "&&", "echo", "x y"]


@pytest.mark.parametrize(
    ("down", "names"), [("", "abcdef"), ("b", "cdef"), ("cd", "abef"), ("f", "abcdef")]
)
def test_a_slice_of_which_a_host_is_lost_is_left_out(hosts, tmp_path, down, names):
    hosts(6)
    for host in down:
        (tmp_path / f"{host}.down").touch()
    found = plans.read_hosts((tmp_path / "hosts").read_text())
    plan = plans.make(found, servers=2, learner_devices=4)
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", "jaxrl", sys.executable)
    assert [host.name for host in remote.left(plan, shell, 2, secs=60)] == list(names)


@pytest.fixture
def fleet(hosts, tmp_path):
    """The fleet of a pod with hosts a, which learns, and b, which samples; and the list that its learner reads."""
    hosts(2)
    (tmp_path / "a" / "jaxrl" / "run").mkdir(parents=True)
    plan = plans.make(plans.read_hosts((tmp_path / "hosts").read_text()), servers=1)
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", "jaxrl", sys.executable)
    urls = [f"https://{address}" for address in plan.servers]
    return remote._Fleet(plan, shell, 2, urls), tmp_path / "a" / "jaxrl" / "run" / "servers"


def test_hosts_join_and_leave_and_the_learners_list_has_those_that_joined(fleet):
    fleet, listed = fleet
    c, d = plans.read_hosts("c 10.0.0.3\nd 10.0.0.4")
    assert fleet.join([c, d]) == ["server-1", "server-2", "server-3", "server-4"]
    assert listed.read_text().split() == [
        "https://10.0.0.3:30000", "https://10.0.0.3:30001", "https://10.0.0.4:30000", "https://10.0.0.4:30001",
    ]  # fmt: skip
    assert fleet.leave(["b", "c"]) == ["server-0", "server-1", "server-2"]
    assert listed.read_text().split() == ["https://10.0.0.4:30000", "https://10.0.0.4:30001"]
    assert fleet.join([c]) == ["server-5", "server-6"]  # Numbers are not used again.
    assert fleet.roles["server-6"].host == c and fleet.flag().count("10.0.0.3:30001") == 2


@pytest.mark.parametrize(
    ("join", "leave", "error"),
    [
        ("b 10.0.0.9", "", "the name b stands for several hosts"),
        ("", "x", "no host x is in the run"),
        ("", "a", "a has queue, rollout-0, learner: only hosts that sample leave"),
        ("", "b", "nothing would sample without b"),
    ],
)
def test_hosts_that_cannot_join_or_leave_are_refused_by_name(fleet, join, leave, error):
    fleet, listed = fleet
    with pytest.raises(plans.PlanError, match=error):
        fleet.join(plans.read_hosts(join)) if join else fleet.leave([leave])
    assert not listed.exists() and len(fleet.roles) == 4


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--hosts=a", "--add=b"], "--workdir is needed, and --hosts, or --add or --remove"),
        (["--add=b"], "no pod has begun in"),
    ],
)
def test_hosts_join_a_pod_that_runs(words, error, tmp_path, capsys):
    config = f"--config={ROOT}/{QUICKSTART}:smoke"
    assert main.main(["pod", f"--workdir={tmp_path}", config, *words]) == 2
    assert error in capsys.readouterr().err


def test_a_pod_that_does_not_answer_is_named(tmp_path):
    (tmp_path / "pod").mkdir()
    with pytest.raises(remote.PodError, match=f"no pod of {tmp_path} answers within 0 s"):
        remote.ask(tmp_path, remove=["a"], secs=0)
    assert not (tmp_path / remote.REQUEST).exists()


def test_output_that_cannot_be_written_is_read_all_the_same(capsys):
    """Else a role would wait for its reader once the pipe between them is full."""
    lines = iter([b"step 1\n", b"step 2\n"])
    remote._follow(lines, pathlib.Path("/dev/full"), "a learner: ")
    assert list(lines) == [] and "a learner: step 2" in capsys.readouterr().out


def test_what_is_large_comes_home_at_the_end_alone(hosts, tmp_path, monkeypatch):
    """A copy that takes longer than COLLECT_SECS brings no metrics, by which a run is known to go on."""
    monkeypatch.setattr(remote, "COLLECT_SECS", 2.0)
    hosts(2)
    plan = plans.make(plans.read_hosts((tmp_path / "hosts").read_text()), servers=1)
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", ".", sys.executable)
    pull, came = remote.pull, threading.Event()

    def pulled(*args, **how):
        pull(*args, **how)
        came.set()

    monkeypatch.setattr(remote, "pull", pulled)
    large = ["profile/plugins/trace", "checkpoints/4/state", "damaged-checkpoint-3/state"]
    for name in ("metrics.jsonl", *large):
        (file := tmp_path / "a" / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (home := tmp_path / "home").mkdir()
    with remote._coming_home(shell, plan, home):
        assert came.wait(60)
        assert [path.name for path in home.iterdir()] == ["metrics.jsonl"]
    assert all((home / name).exists() for name in large)


def test_the_log_of_a_role_is_there_when_it_has_started(hosts, tmp_path, monkeypatch):
    """However late the thread is that writes it."""
    hosts(2)
    plan = plans.make(plans.read_hosts((tmp_path / "hosts").read_text()), servers=1)
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(remote, "_follow", lambda *_: None)
    monkeypatch.setattr(remote, "_coming_home", lambda *_: contextlib.nullcontext())

    def supervise(names, num_learners, settings, workdir, queue, start, **_):
        role = start(names[0], False)
        with role.process:
            pass
        return role.log.read_bytes() == b""

    monkeypatch.setattr(remote.supervisor, "supervise", supervise)
    shell = remote.Shell("true", "jaxrl", sys.executable)
    settings = make_settings(base_config().to_dict())
    about = (plan, shell, [], "", 0, 1, settings)
    assert remote.run(*about, workdir=tmp_path / "home", stop_requested=lambda: False)


def test_what_ended_a_run_is_its_error_where_the_workdir_does_not_come_home(
    hosts, tmp_path, capsys
):
    hosts(2)
    plan = plans.make(plans.read_hosts((tmp_path / "hosts").read_text()), servers=1)
    shell = remote.Shell(f"{tmp_path}/ssh {{host}}", "jaxrl", sys.executable)
    (tmp_path / "a.down").touch()
    with pytest.raises(RoleDiedError, match="role 'learner' ended"):
        with remote._coming_home(shell, plan, tmp_path):
            raise RoleDiedError("role 'learner' ended with exit code 1")
    assert "pod: a: the workdir came not home" in capsys.readouterr().err
    with pytest.raises(remote.PodError, match="a: the workdir came not home"):
        with remote._coming_home(shell, plan, tmp_path):
            pass


def test_a_copy_that_cannot_begin_is_an_error_of_its_host(tmp_path, monkeypatch):
    def start(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(subprocess, "Popen", start)
    (host,), shell = plans.read_hosts("a"), remote.Shell("ssh {host}", "jaxrl", sys.executable)
    with pytest.raises(remote.PodError, match="^a: .*no process is left"):
        remote.pull(shell, host, tmp_path, [], secs=60)
