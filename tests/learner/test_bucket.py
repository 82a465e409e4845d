"""Checkpoints in a bucket: killed in an upload, damaged, read on another machine, and written by two."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
from fixtures import buckets

PROCESS = str(pathlib.Path(buckets.__file__).with_name("bucket_process.py"))
PLACE = f"gs://{buckets.BUCKET}/run"


@pytest.fixture(scope="module")
def environ():
    with buckets.bucket() as environ:
        yield environ


def begin_upload(environ):
    """Saves steps 0 to 2, and is killed while it uploads 3."""
    words = [sys.executable, PROCESS, "write", PLACE]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "2\n"
        deadline = time.monotonic() + buckets.START_SECS
        while not buckets.names(environ, "run/3/") and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    found = buckets.names(environ, "run/3/")
    assert found and "run/3/commit_success.txt" not in found


def test_an_upload_that_was_killed_is_none_and_another_machine_resumes_from_the_one_before(environ):
    begin_upload(environ)
    done = buckets.run(environ, PROCESS, "read", PLACE)
    assert done.returncode == 0, done.stderr
    # Compared with what was saved, and by its digests.
    expected = {"steps": [0, 1, 2], "step": 2, "same": True, "position": {"step": 2}}
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert "run/3/commit_success.txt" in buckets.names(environ, "run/3/")  # Saved anew, whole.


@pytest.mark.long
def test_a_damaged_checkpoint_in_a_bucket_is_named_and_put_aside_by_a_fallback(environ):
    if "run/3/commit_success.txt" not in buckets.names(environ, "run/3/"):
        begin_upload(environ)
        buckets.run(environ, PROCESS, "read", PLACE)
    done = buckets.run(environ, PROCESS, "damage", PLACE)
    said, found = done.stdout.splitlines()
    assert f"checkpoint 3, {PLACE}/3, is damaged" in said and "checkpoint 2 is intact" in said
    assert found == "2 [0, 1, 2] 1 True"
    assert not buckets.names(environ, "run/3/") and buckets.names(
        environ, "run/damaged-checkpoint-3/"
    )


@pytest.mark.long
def test_of_two_learners_on_one_bucket_the_elder_stops(environ):
    done = buckets.run(environ, PROCESS, "two", PLACE)
    assert (
        f"checkpoint 5 is not written: another learner has begun to write to {PLACE}" in done.stdout
    )


@pytest.mark.long
def test_a_run_resumes_on_a_machine_that_has_nothing_but_the_bucket(environ, tmp_path):
    place = f"gs://{buckets.BUCKET}/whole"
    words = [
        "-m",
        "jaxrl_async",
        "train",
        "--config=configs/quickstart.py:smoke",
        "--config.checkpoint.every_steps=2",
    ]
    words += [f"--config.checkpoint.directory={place}"]
    first = buckets.run(environ, *words, f"--workdir={tmp_path}/a", "--config.learner.num_steps=4")
    assert first.returncode == 0, first.stderr
    assert not (tmp_path / "a" / "checkpoints").exists()
    elsewhere = [*words, f"--workdir={tmp_path}/b", "--config.learner.num_steps=6"]
    again = buckets.run(environ, *elsewhere)
    assert (
        again.returncode == 2 and f"{place} holds a run: continue it with --resume" in again.stderr
    )
    other = buckets.run(environ, *elsewhere, "--resume", "--config.rollout.group_size=4")
    assert (
        other.returncode == 2
        and f"config differs from {place}/config.json: rollout.group_size" in other.stderr
    )
    resumed = buckets.run(environ, *elsewhere, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    rows = [
        json.loads(line)["step"]
        for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == [5, 6]
