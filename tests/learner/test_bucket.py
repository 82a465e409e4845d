"""Checkpoints in buckets of both kinds: killed in an upload, damaged, read on another machine, and written by two."""

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time

import pytest
from etils import epath
from fixtures import buckets
from orbax.checkpoint._src.path.atomicity import CommitFileTemporaryPath
from orbax.checkpoint._src.path.atomicity_defaults import get_default_temporary_path_class
from orbax.checkpoint._src.serialization.tensorstore_utils import build_kvstore_tspec

import jaxrl_async.learner.checkpoint  # noqa: F401  # It teaches orbax s3://.
from jaxrl_async.cli import pod
from jaxrl_async.cli.config import load_config
from jaxrl_async.config.fields import StartError
from jaxrl_async.learner import lease as leases
from jaxrl_async.queue.journal import DeletedError, JournalReader
from jaxrl_async.records import SupersededError
from jaxrl_async.runtime import archive
from jaxrl_async.runtime.workdir import write_config

PROCESS = str(pathlib.Path(buckets.__file__).with_name("bucket_process.py"))
TRAIN = ["-m", "jaxrl_async", "train", "--config=configs/quickstart.py:smoke,mode=sync"]
S3 = pytest.param("s3", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["gs", S3])
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def environ(scheme):
    with buckets.bucket(scheme) as environ:
        yield environ


@pytest.fixture(scope="module")
def place(scheme):
    return f"{scheme}://{buckets.BUCKET}/run"


def begin_upload(environ, place):
    """Saves steps 0 to 2, and is killed while it uploads 3."""
    words = [sys.executable, PROCESS, "write", place]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "2\n"
        deadline = time.monotonic() + buckets.START_SECS
        while not buckets.names(environ, "run/3/") and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    found = buckets.names(environ, "run/3/")
    assert found and "run/3/commit_success.txt" not in found


@pytest.mark.parametrize(
    ("place", "endpoint", "base"),
    [
        ("gs://b/x/3", "", {"driver": "gcs", "bucket": "b", "path": "x/3"}),
        ("s3://b/x/3", "", {"driver": "s3", "bucket": "b", "path": "x/3"}),
        (
            "s3://b/x/3",
            "http://h:1",
            {"driver": "s3", "bucket": "b", "path": "x/3", "endpoint": "http://h:1"}
            | {"aws_region": "us-east-1"},
        ),
    ],
)
def test_orbax_hands_arrays_to_the_driver_of_the_bucket(place, endpoint, base, monkeypatch):
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert build_kvstore_tspec(place)["base"] == base
    kind = get_default_temporary_path_class(epath.Path(place))
    assert kind is CommitFileTemporaryPath  # Complete by a file, for want of a rename.


def test_an_upload_that_was_killed_is_none_and_another_machine_resumes_from_the_one_before(
    environ, place
):
    begin_upload(environ, place)
    done = buckets.run(environ, PROCESS, "read", place)
    assert done.returncode == 0, done.stderr
    # Compared with what was saved, and by its digests.
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "steps": [0, 1, 2],
        "step": 2,
        "same": True,
        "journal": 2,
        "position": {"step": 2},
    }
    assert "run/3/commit_success.txt" in buckets.names(environ, "run/3/")  # Saved anew, whole.


@pytest.mark.long
def test_a_damaged_checkpoint_in_a_bucket_is_named_and_put_aside_by_a_fallback(environ, place):
    if "run/3/commit_success.txt" not in buckets.names(environ, "run/3/"):
        begin_upload(environ, place)
        buckets.run(environ, PROCESS, "read", place)
    done = buckets.run(environ, PROCESS, "damage", place)
    said, found = done.stdout.splitlines()
    assert f"checkpoint 3, {place}/3, is damaged" in said and "checkpoint 2 is intact" in said
    assert found == "2 [0, 1, 2] 1 True"
    assert not buckets.names(environ, "run/3/") and buckets.names(
        environ, "run/damaged-checkpoint-3/"
    )


@pytest.fixture
def archived(environ, scheme, tmp_path, monkeypatch):
    """A bucket, and a workdir."""
    for name in environ.keys() - os.environ.keys():
        monkeypatch.setenv(name, environ[name])
    directory = f"{scheme}://{buckets.BUCKET}/archived"
    for name in ("config.json", "samples.jsonl", "logs/learner.log", "keys/queue", ".lock"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text(name)
    yield directory
    epath.Path(directory).rmtree()


def files(workdir):
    return {p.relative_to(workdir).as_posix() for p in workdir.rglob("*") if p.is_file()}


def fails_once(monkeypatch, method):
    """A method of TarFile fails at its second file."""
    kept, calls = getattr(tarfile.TarFile, method), []

    def fails(*args, **kwargs):
        calls.append(0)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        return kept(*args, **kwargs)

    monkeypatch.setattr(tarfile.TarFile, method, fails)


def test_a_finished_workdir_comes_back_from_the_bucket_whole_or_not_at_all(
    archived, tmp_path, monkeypatch
):
    place, a, b = f"{archived}/workdir-3.tar.gz", tmp_path / "a", tmp_path / "b"
    fails_once(monkeypatch, "addfile")
    with pytest.raises(ValueError, match="the run is done, its workdir not copied.*disk is gone"):
        archive.sync(a, archived, 3)
    assert not epath.Path(place).exists()
    assert archive.sync(a, archived, 3) == f"{a} is copied to {place}"
    assert archive.sync(a, archived, 3) == ""
    fails_once(monkeypatch, "_extract_one")
    with pytest.raises(ValueError, match="disk is gone"):
        archive.sync(b, archived, 3)
    assert files(b) and "config.json" not in files(b)  # It comes last: this is no workdir yet.
    assert archive.sync(b, archived, 3) == f"{b} is that of {place}"
    assert files(b) == {
        "config.json",
        "samples.jsonl",
        "logs/learner.log",
    }  # Neither keys nor locks.
    assert all((b / name).read_text() == name for name in files(b))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sending a large body")  # gcsfs does.
def test_a_copy_of_a_workdir_that_was_killed_is_none(environ, archived, tmp_path):
    (tmp_path / "a" / "samples.jsonl").unlink()
    large = tmp_path / "a" / "aa"
    large.write_bytes(os.urandom(120 << 20))  # More than a part of an upload.
    for name in ("logs", "keys"):
        shutil.rmtree(tmp_path / "a" / name)
    words = [sys.executable, PROCESS, "archive", archived, f"{tmp_path}/a"]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.kill()
    assert not [n for n in buckets.names(environ, "archived/") if "workdir" in n]
    archive.sync(tmp_path / "a", archived, 3)
    archive.sync(tmp_path / "b", archived, 3)
    assert large.read_bytes() == (tmp_path / "b" / "aa").read_bytes()


@pytest.fixture
def leased(scheme):
    return f"{scheme}://{buckets.BUCKET}/leased"


@pytest.fixture
def lease_of(environ, leased, tmp_path, monkeypatch):
    """Makes leases on the bucket, of workdirs by their names; watched for so long that only a change ends it."""
    for name in environ.keys() - os.environ.keys():
        monkeypatch.setenv(name, environ[name])
    monkeypatch.setattr(leases, "BEAT_SECS", 0.04)
    yield lambda name: leases.Lease(leased, tmp_path / name)
    leases.Lease(leased, tmp_path)._store.write(leases.NAME, None).result(buckets.START_SECS)


def lost(lease):
    """The sentence with which a holder ends."""
    deadline = time.monotonic() + buckets.START_SECS
    while time.monotonic() < deadline:
        try:
            lease.check()
        except SupersededError as error:
            return str(error)
        time.sleep(0.02)


def test_a_younger_run_is_refused_while_the_lease_of_the_elder_changes(lease_of, leased, tmp_path):
    elder, younger = lease_of("a"), lease_of("b")
    with elder.held():
        with pytest.raises(StartError) as refused:
            younger.take()
        elder.check()
    said = f"{leased} belongs to a run that goes on, of {platform.node()} in {tmp_path}/a: end it"
    assert str(refused.value).startswith(said)
    assert f"delete {leased}/lease.json" in str(refused.value) and "60 s" in str(refused.value)
    assert younger._store.read(leases.NAME).result().state == "missing"  # Given back at its end.


def test_of_two_that_take_a_free_lease_at_once_one_keeps_it(lease_of, scheme):
    first, second = lease_of("a"), lease_of("b")
    free = first._store.read(leases.NAME).result()
    assert first._write(free)
    # moto knows conditional writes, and fake-gcs-server does not.
    assert second._write(free) == (scheme == "gs")
    with pytest.raises(SupersededError):
        (first if scheme == "gs" else second).confirm()


def test_a_run_is_refused_before_it_writes_to_the_bucket_of_another(
    lease_of, leased, tmp_path, monkeypatch, capsys
):
    config = load_config("configs/quickstart.py:smoke")
    config.checkpoint.directory = leased
    write_config(tmp_path / "asked", config)  # As `pod` does here, and then on the first host:
    monkeypatch.chdir(tmp_path)
    with lease_of("a").held():
        assert pod.prepare([f"--config={tmp_path}/asked/config.json"]) == 2
    assert f"{leased} belongs to a run that goes on" in capsys.readouterr().err
    assert not (epath.Path(leased) / "config.json").exists()
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_lease_that_did_not_change_is_taken_and_its_holder_ends(lease_of, tmp_path, monkeypatch):
    elder, younger = lease_of("a"), lease_of("b")
    elder.take()  # Its process is frozen.
    monkeypatch.setattr(leases, "LEASE_SECS", 0.2)
    younger.take()
    with pytest.raises(SupersededError, match=f"is of another run, of .* in {tmp_path}/b"):
        elder.confirm()
    younger.confirm()


def test_a_later_process_of_a_workdir_takes_its_lease_at_once(lease_of, tmp_path):
    elder = lease_of("a")
    with elder.held():
        later = lease_of("a")
        later.take()
        assert f"in {tmp_path}/a: this one ends" in lost(elder)
    later.confirm()  # The elder does not give back what is another's.


def test_a_lease_that_is_deleted_ends_its_holder(lease_of, leased):
    elder = lease_of("a")
    with elder.held():
        elder._store.write(leases.NAME, None).result(buckets.START_SECS)
        assert lost(elder) == f"{leased}/lease.json was deleted: this one ends"


@pytest.mark.long
def test_the_younger_of_two_runs_is_refused_and_the_elder_ends_with_its_lease(
    environ, leased, lease_of, tmp_path
):
    words = [*TRAIN, f"--config.checkpoint.directory={leased}", "--config.learner.num_steps=100000"]
    words += ["--config.checkpoint.every_steps=1"]
    log, elder = tmp_path / "log", [sys.executable, *words, f"--workdir={tmp_path}/a"]
    with open(log, "w") as file, subprocess.Popen(elder, env=environ, stderr=file) as elder:
        try:
            deadline = time.monotonic() + buckets.PROCESS_SECS
            while not buckets.names(environ, "leased/1/commit_success.txt"):
                assert elder.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            younger = buckets.run(environ, *words, f"--workdir={tmp_path}/b", "--resume")
            assert younger.returncode == 2
            assert f"{leased} belongs to a run that goes on" in younger.stderr
            lease_of("b")._store.write(leases.NAME, None).result(buckets.START_SECS)
            elder.wait(buckets.PROCESS_SECS)
        finally:
            elder.kill()
    assert elder.returncode == 1
    assert f"{leased}/lease.json was deleted: this one ends" in log.read_text()


@pytest.mark.long
def test_a_run_resumes_on_a_machine_that_has_nothing_but_the_bucket(environ, scheme, tmp_path):
    place = f"{scheme}://{buckets.BUCKET}/whole"
    train = [*TRAIN, "--config.checkpoint.every_steps=2"]
    words = [*train, f"--config.checkpoint.directory={place}"]
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
    lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6]
    a, b = (JournalReader(tmp_path / name / "journal.sqlite") for name in ("a", "b"))
    assert b.steps() == [1, 2, 3, 4, 5, 6] and not any(b.audit().values())
    assert b.run_epochs()[: len(a.run_epochs())] == a.run_epochs()
    with pytest.raises(DeletedError):  # Trained before the checkpoint that it came with.
        b.chunk(4, 0)
    assert len(b.chunk(5, 0)[0]) and {epoch for _, epoch in b.run_epochs()} == {0}
    # A third machine has the workdir, too.
    home = [*words, f"--workdir={tmp_path}/d", "--config.learner.num_steps=6", "--resume"]
    brought = buckets.run(environ, *home)
    assert brought.returncode == 0 and f"is that of {place}/workdir-6.tar.gz" in brought.stdout
    alike = ("metrics.jsonl", "samples.jsonl", "config.json", "libraries.json", "journal.sqlite")
    for name in alike:
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    for verb in (["report"], ["evaluate"], ["replay", "--first=4", f"--out={tmp_path}/e"]):
        done = buckets.run(environ, "-m", "jaxrl_async", *verb, f"--workdir={tmp_path}/d")
        assert done.returncode == 0, done.stdout + done.stderr
    # Of a run that was never interrupted.
    other = [*train, f"--config.checkpoint.directory={place}2", f"--workdir={tmp_path}/c"]
    whole = buckets.run(environ, *other, "--config.learner.num_steps=6")
    assert whole.returncode == 0, whole.stderr
    assert digests(environ, scheme, "whole/6") == digests(environ, scheme, "whole2/6")


def digests(environ, scheme, step):
    script = f"from etils import epath; print(epath.Path('{scheme}://{buckets.BUCKET}/{step}/digests/process_0.json')"
    return json.loads(buckets.run(environ, "-c", f"{script}.read_text())").stdout)["tensors"]


@pytest.mark.long
def test_a_bucket_without_permission_is_refused_before_anything_starts(tmp_path):
    with buckets.bucket("s3", INITIAL_NO_AUTH_ACTION_COUNT="1") as environ:
        words = [*TRAIN, f"--workdir={tmp_path}/a", "--config.checkpoint.directory=s3://runs/a"]
        refused = buckets.run(environ, *words)
    assert refused.returncode == 2
    assert re.search(
        r"checkpoint.directory = s3://runs/a is not reached: .*(Forbidden|Denied|does not exist)",
        refused.stderr,
    )
    assert not (tmp_path / "a" / "config.json").exists()
