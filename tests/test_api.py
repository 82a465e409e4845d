"""The Python API: a run, and a user's own tasks and rewards."""

import json
import re
import subprocess
import sys

import jax
import pytest

import jaxrl_async
from jaxrl_async import rewards, tasks
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.learner.train_step import mesh_of
from jaxrl_async.metrics import read_metrics
from jaxrl_async.roles import start
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.tools import replay

MODULE = """
import jaxrl_async


@jaxrl_async.register_reward("same_length")
def same_length(completion: str, answer: str) -> float:
    return float(len(completion) == len(answer))


@jaxrl_async.register_task("echo")
class Echo:
    reward = "same_length"

    def examples(self, split):
        first = 0 if split == "train" else 50
        return [jaxrl_async.Example(f"{i}+", str(i)) for i in range(first, first + 50)]

    def demonstrations(self, num=None):
        pairs = [(e.text, e.answer) for e in self.examples("train")]
        return [pairs[i % len(pairs)] for i in range(num or len(pairs))]
"""


@pytest.fixture
def echo_task(tmp_path, monkeypatch):
    """A module of the user's, found by every process that is started here."""
    (tmp_path / "echo_task.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "echo_task", None)
    del sys.modules["echo_task"]
    import echo_task

    yield echo_task
    tasks.TASKS.pop("echo", None)
    rewards.REWARDS.pop("same_length", None)


def smoke(**changes):
    config = load_config("configs/quickstart.py:smoke")
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.optimised  # As all runs of the quickstart, whose programs it finds in the cache.
def test_a_run_from_python_with_a_task_and_reward_of_ones_own(
    echo_task, tmp_path, monkeypatch, capsys
):
    config = smoke(**{"learner.groups_per_step": 4, "warm_start.num_steps": 0})
    config.learner.update(schedule="cosine", warmup_updates=3)  # of 4 updates
    with config.unlocked():
        config.task.args = {}
    config.task.name = "echo"
    seen = []
    run = jaxrl_async.run(
        config, workdir=tmp_path / "run", on_step=lambda run: seen.append(run.metrics[-1]["step"])
    )
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert seen == [1, 2]
    assert run.config.task.name == "echo_task:Echo"  # what other processes can import
    (row,) = run.evaluate(["last"])
    assert row["step"] == 2 and 0 <= row["greedy_low"] <= row["greedy"] <= row["greedy_high"] <= 1
    assert run.report().read_text().startswith("<!doctype html>")
    assert len(run.replay(tmp_path / "again").metrics) == 2  # else it would have raised
    monkeypatch.setattr(replay, "mesh_of", lambda learner: mesh_of(learner, jax.devices()[:1]))
    replay.replay(settings_of(config), run.workdir, out=tmp_path / "until", until=1)
    (found,) = read_metrics(tmp_path / "until")
    assert found["learner/learning_rate"] == run.metrics[0]["learner/learning_rate"] > 0
    with pytest.raises(ValueError, match="holds a run"):
        jaxrl_async.run(config, workdir=run.workdir)
    assert jaxrl_async.run(config, workdir=run.workdir, resume=True).metrics == run.metrics
    assert "nothing to do: the last checkpoint is of step 2 " in capsys.readouterr().out
    config.seed = 7
    with pytest.raises(ValueError, match=r"seed 0 → 7: .*cannot change"):
        jaxrl_async.run(config, workdir=run.workdir, resume=True)


def test_what_other_processes_cannot_import_is_refused():
    def local(completion, answer):
        return 0.0

    with pytest.raises(ValueError, match="cannot import"):
        jaxrl_async.register_reward("mine")(local)
    local.__qualname__, local.__module__ = "local", "__main__"
    with pytest.raises(ValueError, match="%%writefile"):
        jaxrl_async.register_reward("mine")(local)
    assert "mine" not in rewards.REWARDS


def test_a_name_that_is_taken_is_refused_and_the_same_again_is_not(echo_task):
    jaxrl_async.register_task("echo")(echo_task.Echo)
    with pytest.raises(ValueError, match="task 'arithmetic'"):
        jaxrl_async.register_task("arithmetic")(echo_task.Echo)


def test_a_workdir_is_begun_once_and_resumed_only_with_a_checkpoint(tmp_path):
    workdir = tmp_path / "run"
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        workdirs.check(workdir, resume=True)
    workdirs.check(workdir, resume=False)
    workdirs.write_config(workdir, smoke())
    assert json.loads((workdir / "config.json").read_text())["task"]["name"] == "arithmetic"
    (workdir / "checkpoints" / "0").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run"):
        workdirs.check(workdir, resume=False)
    workdirs.check(workdir, resume=True)


def test_a_run_leaves_its_config_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "begin", lambda config, settings, *_, **__: found.append(settings))
    found, config = [], load_config("configs/quickstart.py:smoke")
    for preset in ("dapo", "gspo", ""):
        config.loss.preset = preset
        jaxrl_async.run(config, workdir=tmp_path / f"of-{preset}")
    assert found[2].loss == settings_of(load_config("configs/quickstart.py:smoke")).loss


@pytest.mark.parametrize(
    ("task", "name"), [("arithmetic", "arithmetic"), ("pkg.tasks:Echo", "pkg.tasks")]
)
def test_the_default_workdir_is_named_by_the_task_without_a_colon(task, name):
    workdir = start.default_workdir(settings_of(smoke(**{"task.name": task})))
    assert re.fullmatch(rf"runs/{re.escape(name)}-\d{{8}}-\d{{6}}", str(workdir))


def test_an_evaluation_that_fails_says_why(tmp_path):
    workdirs.write_config(tmp_path, smoke())
    with pytest.raises(RuntimeError, match="no checkpoint"):
        jaxrl_async.Run(tmp_path).evaluate()


def test_importing_the_package_loads_nothing_else():
    code = (
        "import sys, jaxrl_async; print([m for m in sys.modules if m.startswith(('jax', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['jaxrl_async']"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxrl_async.nothing  # noqa: B018
