"""A replay of a journal that lost its end, or contradicts itself, is refused with the file and a remedy."""

import pathlib
import types

import pytest
from fixtures.runs import QUICKSTART

from jaxrl_async.cli import main
from jaxrl_async.cli.config import load_config
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.tools.replay import ReplayError, _say_changes, steps_of


@pytest.fixture
def asked(monkeypatch):
    """The keywords of the replay that the verb would have made."""
    asked = {}
    monkeypatch.setattr(
        "jaxrl_async.tools.replay.replay", lambda *args, **how: asked.update(how) or []
    )
    return asked


@pytest.fixture
def workdir(tmp_path):
    workdirs.write_config(tmp_path / "run", load_config(f"{QUICKSTART}:smoke"))
    return tmp_path / "run"


def test_a_replay_into_a_file_is_refused(workdir, asked, capsys):
    assert main.main(["replay", f"--workdir={workdir}", f"--out={workdir}/config.json"]) == 2
    assert f"--out: [Errno 20] Not a directory: '{workdir}/config.json'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--noconfig.learner.fail_on_recompile", True),
        ("-config.learner.learning_rate=0.5", True),
        ("--config.learner.learning_rate 0.5", True),
        ("--noconfig.model.remat", False),
        ("--noconfig.task.changed", False),
    ],
)
def test_a_setting_that_is_changed_in_any_form_of_the_flag_is_compared_with_nothing(
    words, changed, workdir, asked, tmp_path
):
    (out := tmp_path / "out").mkdir()
    assert main.main(["replay", f"--workdir={workdir}", f"--out={out}", *words.split()]) == 0
    assert asked["changed"] == changed


def reader(steps, **audit):
    return types.SimpleNamespace(audit=lambda: {"lost": [], **audit}, steps=lambda: list(steps))


def steps(found, until=None, known=(0, 4)):
    return steps_of(found, pathlib.Path("run/journal.sqlite"), 0, until, known)


def test_a_replay_goes_to_the_last_step_of_the_journal():
    assert steps(reader([1, 2, 3, 4])) == steps(reader([1, 2, 3, 4, 5]), until=4) == 4


def test_a_journal_that_ends_before_the_last_checkpoint_is_refused_unless_asked_for():
    with pytest.raises(ReplayError, match=r"journal\.sqlite ends at step 2, .*step 4.*--until=2"):
        steps(reader([1, 2]))
    assert steps(reader([1, 2]), until=2) == 2


def test_a_journal_that_contradicts_itself_is_refused():
    with pytest.raises(ReplayError, match=r"journal\.sqlite .*'doubled': \[7\].*restore a copy"):
        steps(reader([1, 2, 3, 4], doubled=[7]))


def test_a_journal_without_a_step_is_named():
    with pytest.raises(ReplayError, match=r"journal run/journal\.sqlite has 1 to 4.*lacks \[2\]"):
        steps(reader([1, 3, 4]))


def test_a_replay_of_steps_that_had_other_settings_says_so(tmp_path, caplog):
    _say_changes(tmp_path, 0)
    for step in (3, 20):
        (tmp_path / f"config.until-step-{step}.json").touch()
    _say_changes(tmp_path, 20)
    assert caplog.text == ""
    _say_changes(tmp_path, 3)
    assert "changed after step 20" in caplog.text and "--first=20" in caplog.text
