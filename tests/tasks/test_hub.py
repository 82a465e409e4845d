"""Checkpoints by name: directories, ids of the hub in its cache, and what is said where an id cannot be had."""

import json
import pathlib

import pytest
from huggingface_hub import constants

from jaxrl_async.tasks import hub

ID = "some-org/some-model"


@pytest.fixture
def snapshot(monkeypatch, tmp_path):
    """Writes files of ID into a cache, as a download does; the hub cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "cache" / "models--some-org--some-model"
    revision = "0" * 40

    def write(**files):
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text(revision)
        (root / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = root / "snapshots" / revision / name
            path.write_text(json.dumps(content))
        return root / "snapshots" / revision

    return write


def model(needed=hub.MODEL_FILES):
    return hub.directory_of("model.path", ID, needed=needed)


def test_an_id_is_the_snapshot_in_the_cache(snapshot):
    directory = snapshot(**{"config.json": {}, "model.safetensors": 0})
    assert model().samefile(directory)


def test_a_directory_comes_before_an_id_of_that_name(snapshot, monkeypatch, tmp_path):
    snapshot(**{"config.json": {}, "model.safetensors": 0})
    (tmp_path / ID).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model() == pathlib.Path(ID)


@pytest.mark.parametrize("path", ["checkpoints", "/a/b", "./a/b", "a/b/c", "../a"])
def test_what_is_no_id_is_a_path(path, snapshot):
    assert hub.directory_of("model.path", path, needed=hub.MODEL_FILES) == pathlib.Path(path)


def test_without_a_network_one_line_says_what_to_do(snapshot):
    with pytest.raises(FileNotFoundError) as caught:
        model()
    message = str(caught.value)
    assert message.startswith("model.path = 'some-org/some-model' is no directory here")
    assert message.endswith("run `hf download some-org/some-model` where there is a network")
    assert "\n" not in message


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {}},
        {
            "config.json": {},
            "model-1.safetensors": 0,
            "model.safetensors.index.json": {
                "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}
            },
        },
    ],
    ids=["no weights", "one part of two"],
)
def test_a_download_that_was_cut_off_is_not_taken_for_the_model(files, snapshot):
    directory = snapshot(**files)
    with pytest.raises(FileNotFoundError, match="hf download"):
        model()
    assert model(("config.json",)).samefile(directory)
