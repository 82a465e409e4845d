"""A run that is resumed: with which config, what it may change, what is kept, and when there is nothing to do."""

import json
import pathlib
import re
import shutil

import pytest

from jaxrl_async.cli import main, train
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config import build
from jaxrl_async.roles import start
from jaxrl_async.runtime import supervisor
from jaxrl_async.runtime import workdir as workdirs

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"


@pytest.fixture
def workdir(tmp_path):
    """A smoke run that was left after step 1."""
    (tmp_path / "a b" / "checkpoints" / "1").mkdir(parents=True)
    config = load_config(f"{QUICKSTART}:smoke")
    text = config.to_json(indent=2)
    (tmp_path / "a b" / "config.json").write_text(text)
    return tmp_path / "a b"


@pytest.fixture
def started(monkeypatch):
    """The settings of the runs that `train` would have started."""
    started = []
    monkeypatch.setattr(train, "run_all", lambda settings, *_, **__: started.append(settings) or 0)
    return started


def resume(workdir, *words):
    return main.main(["train", "--resume", f"--workdir={workdir}", *words])


@pytest.mark.parametrize("form", ["--workdir={}", "--workdir {}"])
def test_a_run_goes_on_with_the_config_of_its_workdir(form, workdir, started, capsys):
    words = form.split()
    words[-1] = words[-1].format(workdir)
    assert main.main(["train", *words, "--resume"]) == 0
    assert started[0].learner.num_steps == 2
    assert capsys.readouterr().out == ""
    assert [p.name for p in workdir.glob("config*")] == ["config.json"]


def test_a_dry_run_of_it_prints_settings_and_then_a_command_that_works(workdir, capsys):
    assert resume(workdir, "--config.learner.num_steps=7", "--dry-run") == 0
    settings, _, command = capsys.readouterr().out.strip().rpartition("\n")
    assert json.loads(settings)["learner"]["num_steps"] == 7
    assert command.startswith("python -m jaxrl_async train")
    assert f"'--config={workdir}/config.json' --config.learner.num_steps=7" in command
    assert command.endswith("--resume")


def test_a_dry_run_prints_each_change_in_whatever_form_it_was_given(workdir, capsys):
    words = ("--config.learner.num_steps", "7", "--noconfig.learner.deterministic")
    assert resume(workdir, *words, "--config.model.remat", "--dry-run") == 0
    command = capsys.readouterr().out.strip().rpartition("\n")[2]
    changes = "--config.learner.num_steps=7 --noconfig.learner.deterministic --config.model.remat"
    assert f" {changes} --role=" in command


def test_what_is_changed_is_said_and_the_old_config_is_kept(workdir, started, capsys):
    old = (workdir / "config.json").read_text()
    changed = ("--config.learner.num_steps=9", "--config.journal.path=x")
    assert resume(workdir, f"--config={QUICKSTART}:smoke", *changed) == 0
    assert started[0].learner.num_steps == 9
    path = workdir / "config.json"
    assert capsys.readouterr().out.splitlines() == [
        f"config differs from {path}: journal.path '' → 'x'",
        f"config differs from {path}: learner.num_steps 2 → 9",
    ]
    assert json.loads(path.read_text())["learner"]["num_steps"] == 9
    kept = workdir / "config.until-step-1.json"
    assert kept.read_text() == old
    assert resume(workdir, "--config.learner.num_steps=11") == 0
    assert kept.read_text() == old  # What came in between has made no checkpoint.
    (workdir / "checkpoints" / "5").mkdir()
    assert resume(workdir, "--config.learner.num_steps=12") == 0
    kept = json.loads((workdir / "config.until-step-5.json").read_text())
    assert kept["learner"]["num_steps"] == 11


def test_an_older_workdir_goes_on_with_the_values_of_its_time(
    workdir, started, monkeypatch, capsys
):
    values = json.loads((workdir / "config.json").read_text())
    del values["loss"]["clip_low"]
    values["loss"]["behavior_cap_mode"] = values["loss"].pop("behavior_weight")
    (workdir / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(build, "ADDED", {"loss.clip_low": 0.5})
    assert resume(workdir) == 0
    assert started[-1].loss.clip_low == 0.5
    assert capsys.readouterr().out == "" and not list(workdir.glob("config.until*"))
    assert json.loads((workdir / "config.json").read_text())["loss"]["clip_low"] == 0.5
    (workdir / "config.json").write_text(json.dumps(values))
    assert resume(workdir, f"--config={QUICKSTART}:smoke") == 0  # Of now, with the default of now.
    assert capsys.readouterr().out.endswith("config.json: loss.clip_low 0.5 → 0.2\n")
    assert started[-1].loss.clip_low == 0.2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (f"--config={QUICKSTART}:smoke,mode=sync",),
            "mode 'async' → 'sync': a resumed run cannot",
        ),
        (("--config.task.args.num_digits=3",), "task.args.num_digits 2 → 3: .*prompts"),
        (("--config.tokenizer.alphabet=0123456789+ a",), "tokenizer.alphabet .*prompts"),
        (("--config.model.mlp_dim=96",), "model.mlp_dim 192 → 96: .*the checkpoint"),
        (("--config.rollout.group_size=4",), "rollout.group_size .* → 4: .*the journal"),
        (("--config.rollout.max_prompt_tokens=9",), "rollout.max_prompt_tokens .* → 9"),
        (("--config.learner.groups_per_step=4",), "learner.groups_per_step .* → 4"),
        (("--config.seed=1",), "seed 0 → 1"),
        (("--config.learner.blocks=2",), "learner.blocks 1 → 2: .*turns"),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused(words, said, workdir, started, capsys):
    before = (workdir / "config.json").read_text()
    assert resume(workdir, *words) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"train: config differs from {workdir}/config.json: ")
    assert re.search(said, found), found
    assert started == [] and (workdir / "config.json").read_text() == before


def test_what_changes_no_number_of_the_model_is_taken(workdir, started):
    assert resume(workdir, "--config.model.remat=True") == 0
    assert started[0].model.remat


@pytest.mark.parametrize("counted", [{"blocks": 2}, {"schedule": "cosine"}], ids=str)
def test_the_updates_of_a_step_change_only_where_nothing_follows_from_their_number(
    counted, workdir, started, capsys
):
    minibatches = "--config.learner.num_minibatches=4"
    assert resume(workdir, minibatches) == 0
    values = json.loads((workdir / "config.json").read_text())
    values["learner"] |= {"num_minibatches": 2, **counted}
    del values["crc"]
    (workdir / "config.json").write_text(json.dumps(values))
    assert resume(workdir, minibatches) == 2
    assert "learner.num_minibatches 2 → 4: a resumed run cannot" in capsys.readouterr().err
    assert [settings.learner.num_minibatches for settings in started] == [4]


@pytest.mark.parametrize("role", ["all", "learner"])
def test_a_run_that_has_come_to_its_last_step_has_nothing_to_do(role, workdir, started, capsys):
    (workdir / "checkpoints" / "3").mkdir()
    (workdir / ".lock").touch()  # of the run before
    before = sorted(workdir.iterdir())
    words = [
        "--config.queue.address=localhost:1",
        "--config.server.addresses=('http://localhost:1',)",
    ]
    assert resume(workdir, f"--role={role}", *words) == 0
    out = capsys.readouterr().out
    assert out == "nothing to do: the last checkpoint is of step 3 (learner.num_steps = 2)\n"
    assert started == [] and sorted(workdir.iterdir()) == before


def test_a_role_that_a_supervisor_starts_again_leaves_the_config_alone(workdir, monkeypatch):
    monkeypatch.setenv("JAXRL_PARENT", "1")
    monkeypatch.setattr(train, "_run_one", lambda *_, **__: 0)
    words = [
        "--config.queue.address=localhost:1",
        "--config.server.addresses=('http://localhost:1',)",
    ]
    before = (workdir / "config.json").read_text()
    assert resume(workdir, "--role=learner", *words) == 0
    assert (workdir / "config.json").read_text() == before
    assert list(workdir.glob("config.until*")) == []


def test_a_run_that_has_its_workdir_is_not_said_to_be_resumable(workdir):
    with pytest.raises(ValueError, match="holds a run: continue it with --resume"):
        workdirs.check(workdir, resume=False)
    names = {path.name for path in workdir.iterdir()}
    with workdirs.lock(workdir), pytest.raises(ValueError, match="belongs to a run that goes on"):
        workdirs.check(workdir, resume=False)
    assert names | {".lock"} == {path.name for path in workdir.iterdir()}


def test_a_fallback_goes_with_resume_and_is_no_end(workdir, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(train, "run_all", lambda *_, **how: given.append(how) or 0)
    assert main.main(["train", "--fallback", f"--config={QUICKSTART}:smoke"]) == 2
    assert "--fallback goes with --resume" in capsys.readouterr().err
    (workdir / "checkpoints" / "2").mkdir()
    assert resume(workdir) == 0 and "nothing to do" in capsys.readouterr().out
    assert resume(workdir, "--fallback") == 0
    assert given == [{"resume": True, "fallback": True}]


def test_a_config_that_is_no_json_is_named(workdir, started, capsys):
    (workdir / "config.json").write_text("{")
    assert resume(workdir, f"--config={QUICKSTART}:smoke") == 2
    said = capsys.readouterr().err
    assert f"{workdir}/config.json is damaged" in said and "delete it and resume with" in said


@pytest.mark.parametrize("trains", [False, True])
def test_a_start_that_fails_before_a_step_leaves_the_config_that_was_there(
    workdir, monkeypatch, trains
):
    def fail(*_, **__):
        if trains:
            (workdir / "metrics.jsonl").write_text('{"step": 3}\n')
        raise supervisor.RoleDiedError("checkpoint 2 is damaged")

    monkeypatch.setattr(start.machine, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(start.supervisor, "run", fail)
    before = (workdir / "config.json").read_text()
    config = load_config(str(workdir / "config.json"))
    config.learner.num_steps = 9
    settings = settings_of(config)
    assert start.begin(config, settings, workdir, resume=True)
    assert (workdir / "config.json").read_text() != before
    with pytest.raises(supervisor.RoleDiedError):
        start.run(settings, workdir=workdir, resume=True)
    assert ((workdir / "config.json").read_text() == before) is not trains
    assert not (workdir / workdirs.BEFORE).exists()


def test_a_config_with_an_altered_value_is_refused_until_its_seal_is_taken_off(
    workdir, started, capsys
):
    workdirs.write_config(workdir, load_config(f"{QUICKSTART}:smoke"))
    text = (workdir / "config.json").read_text()
    altered = text.replace('"seed": 0', '"seed": 1')
    assert altered != text
    (workdir / "config.json").write_text(altered)
    assert resume(workdir) == 2
    assert "config.json is damaged: its checksum is" in capsys.readouterr().err
    values = json.loads(altered)
    del values["crc"]
    (workdir / "config.json").write_text(json.dumps(values))
    assert load_config(str(workdir / "config.json")).seed == 1


@pytest.mark.parametrize("name", ["config.json", "best.json"])
def test_a_file_that_is_not_there_or_damaged_is_named_by_evaluate(workdir, capsys, name):
    (workdir / "best.json").write_text('{"version": 2, "greedy": 0.5, "crc": 1}')
    if name == "config.json":
        (workdir / "best.json").unlink()
        (workdir / name).unlink()
    assert main.main(["evaluate", f"--workdir={workdir}"]) == 2
    assert f"{workdir}/{name}" in capsys.readouterr().err


def test_without_a_workdir_the_config_is_needed(capsys):
    assert main.main(["train", "--resume"]) == 2
    assert "--config=FILE" in capsys.readouterr().err


def test_the_command_that_goes_on_is_quoted(workdir):
    assert workdirs.resume_command(workdir).endswith(f"train --resume '--workdir={workdir}'")


def test_a_directory_that_is_deleted_renamed_or_replaced_meanwhile_is_named(workdir):
    def remove(path):
        path.rename(path.with_name("elsewhere"))

    def replace(path):
        remove(path)
        shutil.copytree(path.with_name("elsewhere"), path)

    def empty(path):
        (path / "config.json").unlink()

    for change in (remove, replace, empty, shutil.rmtree):
        copy = workdir.with_name(change.__name__)
        shutil.copytree(workdir, copy)
        with workdirs.watched(copy) as check:
            check()
            (copy / "config.json").with_name("other").write_text("a file more")
            check()
            change(copy)
            with pytest.raises(workdirs.GoneError, match=f"^--workdir={copy} was deleted, renamed"):
                check()
        shutil.rmtree(workdir.with_name("elsewhere"), ignore_errors=True)
