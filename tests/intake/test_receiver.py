"""The receiver of versions, whatever the server above it: files that come, preparations, updates and refusals."""

import dataclasses
import hashlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_async.intake.receiver import Receiver
from jaxrl_async.versions import protocol
from jaxrl_async.versions.layout import NoRoomError, WeightsError
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest


@dataclasses.dataclass(frozen=True)
class Weights:
    directory: pathlib.Path
    digest: str


class Engine:
    """Remembers what it was asked for."""

    def __init__(self):
        self.calls, self.error = [], None

    async def load(self, directory):
        self.calls.append("load")
        if self.error:
            raise self.error
        StoredVersion(directory).verify()
        return Weights(directory, read_manifest(directory)["digest"])

    async def swap(self, weights, update):
        self.calls.append(("swap", update.weight_version))
        return 2

    async def update(self, directory, update):
        self.calls.append(("update", update.weight_version))
        if self.error:
            raise self.error
        StoredVersion(directory).verify()
        return 3

    async def resume(self):
        self.calls.append("resume")


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
async def receiver(engine, tmp_path):
    made = Receiver(engine, roots=[tmp_path / "weights"])
    made.open(str(tmp_path))
    yield made
    made.close()
    assert [path.name for path in tmp_path.iterdir() if path.name != "weights"] == []


@pytest.fixture
def path(tmp_path):
    """The directory of a version."""
    return WeightStore(tmp_path / "weights", keep=1).write(1, [("w", np.arange(9.0))], {"a": 1})


def named(path, version="4", **more):
    digest = read_manifest(path)["digest"]
    return {"weight_version": version, "weight_digest": digest} | more


async def chunks(content):
    yield content


async def send(receiver, version, name, content=b"data", sha256=None):
    return await receiver.receive(version, name, len(content), sha256, chunks(content))


async def send_all(receiver, path, version="4"):
    for file in path.iterdir():
        status, _ = await send(receiver, version, file.name, file.read_bytes())
        assert status == 200


def message(answer):
    status, body = answer
    return status, body["error"]["message"]


# Files.


@pytest.mark.parametrize(
    "file",
    [
        *("", ".", "..", "../config.json", "a/b.safetensors", ".safetensors", ".a.safetensors"),
        *("x.bin", "config.json\n", "Config.json", "a\0.safetensors", "\\.safetensors"),
        "a" * 200 + ".safetensors",
    ],
)
async def test_a_file_that_is_none_of_a_version_is_refused(receiver, file):
    status, why = message(await send(receiver, "1", file))
    assert status == 400 and "and a file *.safetensors" in why
    assert message(await receiver.hand_on("1", file)) == (400, why)


@pytest.mark.parametrize("version", ["", ".", "..", "a/b", "-1", "1 ", "1\n", "x" * 65])
async def test_a_version_that_is_no_directory_name_is_refused(receiver, version):
    status, why = message(await send(receiver, version, "config.json"))
    assert status == 400 and "a version must be a name" in why


async def test_a_file_without_its_length_or_with_other_bytes_is_refused(receiver):
    answer = await receiver.receive("1", "config.json", None, None, chunks(b""))
    assert message(answer) == (400, "an upload needs Content-Length, config.json has none")
    other = hashlib.sha256(b"other").hexdigest()
    status, why = message(await send(receiver, "1", "config.json", sha256=other))
    assert status == 400 and "SHA-256" in why


async def test_the_files_of_a_version_are_taken_and_handed_on(receiver):
    names = ["config.json", "manifest.json", "model.safetensors.index.json", "model.safetensors"]
    names.append("model-00001-of-00002.safetensors")
    for name in names:
        assert (await send(receiver, "12", name))[0] == 200
    for name in names:
        reading = await receiver.hand_on("12", name)
        assert b"".join([chunk async for chunk in reading.chunks]) == b"data"


async def test_only_the_newest_version_is_kept(receiver):
    await send(receiver, "1", "config.json")
    await send(receiver, "2", "config.json")
    for version, why in (("1", "no file of version '1' was uploaded"), ("2", "model.safetensors")):
        body = {"weight_version": version, "weight_digest": "abc"}
        status, answer = await receiver.prepare(body, None)
        assert status == 400 and (version == "2" or why in answer["error"]["message"])


async def test_a_file_that_arrives_after_a_newer_version_is_refused(receiver):
    async def late():
        yield b"da"
        assert (await send(receiver, "2", "config.json"))[0] == 200
        yield b"ta"

    status, why = message(await receiver.receive("1", "config.json", 4, None, late()))
    assert status == 400 and "version 1 is superseded here" in why


async def test_nobody_else_reads_the_files(receiver, tmp_path):
    (root,) = [path for path in tmp_path.iterdir() if path.name != "weights"]
    assert root.stat().st_mode & 0o77 == 0


# Versions.


async def test_a_version_that_came_is_prepared_swapped_in_and_gone(receiver, engine, path):
    await send_all(receiver, path)
    status, answer = await receiver.prepare(named(path), None)
    assert (status, answer["success"]) == (200, True)
    status, answer = await receiver.update_from_upload(named(path))
    assert (status, answer["num_paused_requests"]) == (200, 2)
    assert answer["message"] == "weights are now version 4"
    assert engine.calls == ["load", ("swap", "4")]
    assert message(await receiver.prepare(named(path), None))[0] == 400  # Its files are gone.


async def test_without_a_preparation_the_files_are_loaded_once(receiver, engine, path):
    await send_all(receiver, path)
    assert (await receiver.update_from_upload({"weight_version": "4"}))[0] == 200
    assert message(await receiver.update_from_upload({"weight_version": "4"}))[0] == 400
    body = named(path, model_path=str(path))
    assert (await receiver.update_from_disk(body))[1]["num_paused_requests"] == 3
    assert engine.calls == [("update", "4"), ("update", "4")]


async def test_a_name_that_is_not_verified_yet_takes_the_version_that_was_prepared(
    receiver, engine, path
):
    await send_all(receiver, path)
    await receiver.prepare(named(path), None)
    name = f"4{protocol.UNVERIFIED}"
    assert (await receiver.update_from_upload(named(path, name)))[0] == 200
    assert engine.calls == ["load", ("swap", name)]


async def test_an_update_with_another_digest_than_the_prepared_is_refused(receiver, engine, path):
    await send_all(receiver, path)
    await receiver.prepare(named(path), None)
    status, answer = await receiver.update_from_upload(named(path, weight_digest="abc"))
    assert (status, answer["success"]) == (400, False)
    assert answer["message"] == "no version with digest 'abc' was prepared"
    assert engine.calls == ["load"]


async def test_where_the_pause_reads_the_files_they_stay_and_a_preparation_is_needed(engine, path):
    receiver = Receiver(engine, reads_in_the_pause=True)
    receiver.open()
    await send_all(receiver, path)
    status, answer = await receiver.update_from_upload(named(path))
    assert status == 400 and "was prepared" in answer["message"] and engine.calls == []
    await send_all(receiver, path)
    await receiver.prepare(named(path), None)
    assert (await receiver.update_from_upload(named(path)))[0] == 200
    assert (await receiver.prepare(named(path), None))[0] == 200
    receiver.close()


async def test_files_that_an_update_has_removed_are_fetched_again(receiver, path):
    (file,) = path.glob("*.safetensors")
    content = file.read_bytes()
    piece = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    await send(receiver, "4", file.name, content, piece["sha256"])
    body = {"weight_version": "4", "source": "http://127.0.0.1:1", "timeout_secs": 20.0}
    body |= {"files": {file.name: piece}}
    assert (await receiver.fetch(body))[0] == 200  # They are here.
    assert (await receiver.update_from_upload(named(path)))[0] == 400  # No manifest came.
    status, why = message(await receiver.fetch(body))
    assert status == protocol.NO_SOURCE and "127.0.0.1:1" in why


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NoRoomError("no room"), protocol.NO_ROOM),
        (WeightsError("damaged"), 400),
        (OSError("gone"), 400),
    ],
)
async def test_a_refusal_of_the_engine_is_the_answer(receiver, engine, path, error, status):
    engine.error = error
    refused = {"success": False, "message": str(error), "num_paused_requests": 0}
    body = named(path, model_path=str(path))
    assert await receiver.prepare(body, None) == (status, refused)
    assert await receiver.update_from_disk(body) == (status, refused)


async def test_a_difference_to_nowhere_is_refused_with_its_status(receiver, path):
    body = named(path, model_path=str(path), difference="from-0.difference")
    status, answer = await receiver.prepare(body, None)
    assert (status, answer["success"]) == (protocol.NO_DIFFERENCE, False)


async def test_a_superseded_learner_is_refused_in_its_run_alone(receiver, path):
    def writer(run_id, generation):
        made = {"run_id": run_id, "generation": generation}
        return named(path, model_path=str(path), writer=made)

    for run_id, generation, status in (("a", 2, 200), ("a", 1, 400), ("a", 3, 200), ("b", 1, 200)):
        assert (await receiver.update_from_disk(writer(run_id, generation)))[0] == status
        assert (await receiver.prepare(writer(run_id, generation), None))[0] == status


async def test_a_lease_out_of_its_bounds_is_refused(receiver, path):
    body = named(path, model_path=str(path))
    status, why = message(await receiver.prepare(body, "0"))
    assert status == 400 and protocol.LEASE_HEADER in why


_OPENS = """
import sys
from jaxrl_async.intake.receiver import Receiver
from types import SimpleNamespace
receiver = Receiver(SimpleNamespace(resume=None))
receiver.open(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


async def test_the_files_of_a_server_that_was_killed_go_with_the_next_start(engine, tmp_path):
    open_ = [sys.executable, "-c", _OPENS, str(tmp_path)]
    with subprocess.Popen(open_, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (killed,) = tmp_path.iterdir()
        (killed / "copy").mkdir()
        alive, last = Receiver(engine), Receiver(engine)
        alive.open(str(tmp_path))
        assert killed.exists()
        process.kill()
        process.wait()
    last.open(str(tmp_path))
    assert not killed.exists() and len(list(tmp_path.iterdir())) == 2
    for receiver in (alive, last):
        receiver.close()
    assert list(tmp_path.iterdir()) == []
