"""README and docs/ are true: their links, their names of metrics, their example, and every command that they show."""

import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxrl_async import rewards, tasks
from jaxrl_async.metrics import METRICS, read_metrics

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_TIMEOUT_SECS = 400
# What is not run here, and why; the named test runs it.
ELSEWHERE = {
    "./launch/quickstart.sh": "installs: test_long",
    "./tests/run.sh": "is this",
    "jaxrl_async serve": "serves for ever: test_inference_http",
    "jaxrl_async status": "is about a run under way: test_status, test_stalls",
    "jaxrl_async parity": "needs a server: test_parity",
    "sglang.launch_server": "SGLang's own: test_conformance",
    "benchmarks/": "test_benchmark_scripts",
    "pytest": "a test",
    "notebooks/": "test_notebooks",
    "my_task:Lines": "test_the_example_of_a_task_trains",
    "gcloud": "a cloud's own",
    "kubectl": "a cluster's own",
    "xpk": "a cloud's own",
    "launch/local.sh": "test_launch",
    "launch/tpu_pod.sh": "test_launch",
    "launch/slurm.sbatch": "test_slurm",
}


def blocks(page: pathlib.Path, *languages: str) -> list[str]:
    """The code blocks of a page that are fenced with one of the languages, "" for none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    return [block for language, block in found if language in languages]


def commands() -> list[str]:
    """Every line of a code block that calls a program of this project's, comments cut off, as pages show it."""
    lines = [
        line.partition("  #")[0].strip()
        for page in PAGES
        for block in blocks(page, "", "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if re.match(r"python -m|python \w|\./|sbatch|gcloud|kubectl|xpk", line)
    ]
    return list(dict.fromkeys(lines))


def is_elsewhere(command: str) -> bool:
    return command == "python -m jaxrl_async" or any(part in command for part in ELSEWHERE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_are_there(page):
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+?)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:tests|benchmarks|configs|launch|docs|notebooks)/[\w./]+)`", text):
        assert (ROOT / name).exists() or name.startswith("configs/X"), name


def test_the_reference_of_metrics_is_the_table():
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.M))
    assert rows == METRICS


def test_the_example_of_a_task_is_one(tmp_path, monkeypatch):
    (source,) = blocks(ROOT / "docs" / "extending.md", "python")
    (tmp_path / "my_task.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)  # another test's
    importlib.import_module("my_task")
    assert tasks.TASKS.pop("lines") == "my_task:Lines"
    assert rewards.REWARDS.pop("shorter") == "my_task:shorter"
    task = tasks.make_task("my_task:Lines", num_test=10)
    assert (len(task.examples("train")), len(task.examples("test"))) == (90, 10)
    assert len(task.demonstrations(7)) == 7
    del sys.modules["my_task"]


def test_the_example_of_a_task_trains(tmp_path):
    page = ROOT / "docs" / "extending.md"
    (command,) = [block for block in blocks(page, "") if "my_task:Lines" in block]
    (tmp_path / "my_task.py").write_text(blocks(page, "python")[0])
    found = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    call(f"{command.strip()} --workdir={tmp_path / 'run'}", **found)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    with pytest.raises(
        AssertionError, match=r"takes \(num_test: int\), and task.args is .*'forget_carry'"
    ):
        call(
            re.sub(r"--config.task.args=.*", f"--workdir={tmp_path / 'no'}", command.strip()),
            **found,
        )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A smoke run, which the commands are about."""
    workdir = tmp_path_factory.mktemp("docs") / "run"
    call(f"python -m jaxrl_async train --config=configs/quickstart.py:smoke --workdir={workdir}")
    return workdir


def call(command: str, **variables: str) -> str:
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_SECS,
        stdin=subprocess.DEVNULL,
        env=environment() | variables,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def environment() -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return known | {"PYTHONPATH": str(ROOT), "JAXRL_QUEUE_TOKEN": "made-up"}


def at_smoke_size(command: str, workdir: pathlib.Path, out: pathlib.Path) -> str:
    """A command of a page, about the smoke run, and writing into a directory of its own."""
    if "launch/sweep.py" in command:  # Printed, checked and gathered; test_sweeps runs them.
        command = re.sub(r"(sweeps/\w+\.py)", r"\1:smoke", command)
        command = re.sub(r"--run( --jobs=\d+)?", "--dry-run", command)
        command = re.sub(r"(--submit=\S+)", r"\1 --dry-run", command)
    if " train" in command:
        command = f"{command} --dry-run"
        command = re.sub(r"--workdir=\S+", f"--workdir={out / 'new'}", command)
        return command.replace(" --resume", "")
    command = re.sub(r"--workdir=\S+", f"--workdir={workdir}", command)
    command = re.sub(r"--(out|dir)=\S+", rf"--\1={out / 'out'}", command)
    command = re.sub(r"--checkpoint=\S+", f"--checkpoint={workdir}/checkpoints/2", command)
    return re.sub(r"--steps=\S+", "--steps=0,last", command)


@pytest.mark.parametrize("command", [c for c in commands() if not is_elsewhere(c)])
def test_a_command_of_a_page_runs(command, workdir, tmp_path):
    call(at_smoke_size(command, workdir, tmp_path))


def test_everything_that_a_run_logs_is_in_the_reference(workdir):
    rows = read_metrics(workdir)
    names = {name for row in rows for name in row} - {"step", "unix_time"}
    known = {n for n in names if n in METRICS or f"{n.split('/')[0]}/" in METRICS}
    assert len(rows) == 2 and names == known
    always = {n for n in METRICS if not n.endswith("/")} - {"weights/delay", "policy/kl_penalty"}
    assert always - names <= {
        "policy/max_anchor_ratio",
        "time/checkpoint_secs",
        "time/publish_secs",
        "time/wait_push_secs",
    }
