"""The versions of the libraries under a run: noted at its starts, and said where a resume has others."""

import json
import pathlib

import pytest

from jaxrl_async.cli import main, train
from jaxrl_async.cli.config import load_config
from jaxrl_async.runtime import libraries

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"


@pytest.fixture
def workdir(tmp_path):
    """A smoke run that was left after step 0."""
    (tmp_path / "run" / "checkpoints" / "0").mkdir(parents=True)
    text = load_config(f"{QUICKSTART}:smoke").to_json(indent=2)
    (tmp_path / "run" / "config.json").write_text(text)
    return tmp_path / "run"


@pytest.fixture
def resume(workdir, monkeypatch, capsys):
    """Resumes a run up to the start of its roles; what it printed."""
    monkeypatch.setattr(train, "run_all", lambda *_, **__: 0)

    def resume():
        assert main.main(["train", "--resume", f"--workdir={workdir}"]) == 0
        return capsys.readouterr().out

    return resume


def notes(workdir):
    return json.loads((workdir / libraries.FILE).read_text())["starts"]


def install(monkeypatch, **versions):
    monkeypatch.setattr(libraries, "installed", lambda: versions)


def test_a_resume_with_other_libraries_names_old_and_new_and_keeps_the_old(
    workdir, resume, monkeypatch
):
    install(monkeypatch, jax="0.9.0", flax="0.12.8", orbax="1")
    assert resume() == ""  # The workdir is of before there was a record.
    first = {"step": 0, "versions": {"jax": "0.9.0", "flax": "0.12.8", "orbax": "1"}}
    assert notes(workdir) == [first]
    assert resume() == "" and notes(workdir) == [first]
    (workdir / "checkpoints" / "1").mkdir()
    install(monkeypatch, jax="0.10.2", flax="0.12.8", grpcio="2")
    said = (
        "warning: other libraries than at the run's last start, which may compute other last bits: "
    )
    assert resume() == f"{said}grpcio none → 2, jax 0.9.0 → 0.10.2, orbax 1 → none\n"
    second = {"step": 1, "versions": {"jax": "0.10.2", "flax": "0.12.8", "grpcio": "2"}}
    assert notes(workdir) == [first, second]
    assert resume() == ""


def test_an_altered_record_is_said_and_ends_nothing(workdir, resume):
    resume()
    path = workdir / libraries.FILE
    text = path.read_text()
    path.write_text(text.replace('"jax": "', '"jax": "9', 1))
    said = resume()
    assert said.startswith(f"warning: {path} is damaged: its checksum is ")
    assert said.endswith("; the next start of the run writes it anew\n")
    assert path.read_text() == text and resume() == ""


def test_what_is_installed_is_noted():
    found = libraries.installed()
    assert {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= set(found)
