"""Transports against a fake server: the calls, their order, and the effects of failures."""

import asyncio
import base64
import io
import os
import pickle
import resource
import shutil
import threading

import numpy as np
import pytest
from aiohttp import web
from fixtures.fake_sglang import FakeServer, fuse, started
from fixtures.tensors import tensors

from jaxrl_async.config.settings import TRANSPORTS
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds import checksums, sglang
from jaxrl_async.servers.port import (
    NonsenseError,
    ObsoleteVersionError,
    ServerError,
    ServerTimeoutError,
)
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

TIMEOUT_SECS = 10.0


@pytest.fixture
def server():
    server = FakeServer().start()
    yield server
    server.stop()


@pytest.fixture
async def client():
    async with InferenceClient() as client:
        yield client


@pytest.fixture
def path(tmp_path):
    return WeightStore(tmp_path / "weights", keep=2).write(7, tensors(7).items(), {"a": 1})


async def push(name, client, server, path, *, version=7, mode="retract", timeout_secs=TIMEOUT_SECS):
    stored = path if isinstance(path, StoredVersion) else StoredVersion(path)
    await Transport(name, mode=mode)(
        client, server.address, files=stored, version=version, timeout_secs=timeout_secs
    )


async def test_a_server_that_verifies_takes_the_version_under_its_own_name(client, server, path):
    await push("disk", client, server, path)
    assert server.routes() == [
        "/model_info",
        "/weights/prepare",
        "/pause_generation",
        "/update_weights_from_disk",
        "/model_info",
        "/continue_generation",
    ]
    (update,) = server.payloads("/update_weights_from_disk")
    (prepare,) = server.payloads("/weights/prepare")
    digest = read_manifest(path)["digest"]
    for payload in (prepare, update):
        assert (payload["model_path"], payload["weight_version"]) == (str(path), "7")
        assert payload["weight_digest"] == digest
    assert update["flush_cache"] is True
    assert server.payloads("/pause_generation") == [{"mode": "retract"}]


async def test_sglang_gets_the_name_after_its_checksums_were_compared(client, server, path):
    server.sglang = True
    await push("disk", client, server, path)
    assert server.routes() == [
        "/model_info",
        "/server_info",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/weights_checker",
        "/update_weight_version",
        "/model_info",
        "/continue_generation",
    ]
    (update,) = server.payloads("/update_weights_from_disk")
    assert update["weight_version"] == "7-unverified"
    assert server.version == "7"


async def test_in_place_keeps_the_cache(client, server, path):
    await push("disk", client, server, path, mode="in_place")
    assert server.payloads("/pause_generation") == [{"mode": "in_place"}]
    assert server.payloads("/update_weights_from_disk")[0]["flush_cache"] is False


async def test_an_unknown_mode_is_refused_before_anything_is_sent(client, server, path):
    with pytest.raises(ValueError, match="mode .*retract, in_place.*drain"):
        await push("disk", client, server, path, mode="drain")
    assert server.routes() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_truncated_file_is_never_sent(client, server, path, transport):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ServerError, match=r"model\.safetensors: .*header"):
        await push(transport, client, server, path)
    assert server.routes() == []


async def test_a_digest_other_than_the_manifest_s_is_an_error(client, server, path, tmp_path):
    other = WeightStore(tmp_path / "other", keep=2).write(7, tensors(8).items(), {})
    await push("disk", client, server, other)
    server.ignore_updates = True
    with pytest.raises(ServerError, match="digest .* manifest"):
        await push("disk", client, server, path)
    assert server.routes()[-1] == "/continue_generation"
    assert "/abort_request" not in server.routes()  # Its requests run on verified weights.


def keep_weights(server):
    """From now on the server takes the name of a version and keeps its weights."""

    async def update_weights_from_disk(payload):
        return server._load(payload, server.path)

    server.update_weights_from_disk = update_weights_from_disk


async def test_wrong_checksums_leave_a_name_that_no_client_accepts(client, server, path, tmp_path):
    server.sglang = True
    other = WeightStore(tmp_path / "other", keep=2).write(6, tensors(8).items(), {})
    await push("disk", client, server, other, version=6)
    server.calls.clear()

    keep_weights(server)
    with pytest.raises(ServerError, match=r"model\.\S+ .*checksum \w{16}"):
        await push("disk", client, server, path)
    assert server.routes()[-2:] == ["/abort_request", "/continue_generation"]
    assert server.payloads("/abort_request") == [{"abort_all": True}]
    assert server.version == "7-unverified"
    with pytest.raises(ServerError, match="7-unverified.*RUN.epoch.version") as caught:
        await client.generate(
            server.address,
            rid="0",
            input_ids=[1],
            sampling_params={"max_new_tokens": 2, "sampling_seed": 0},
            timeout_secs=TIMEOUT_SECS,
        )
    assert caught.value.retryable


async def test_the_version_of_a_wrong_tensor_is_looked_for_while_other_pushes_go_on(
    client, server, path, tmp_path, monkeypatch
):
    looks, goes_on = threading.Event(), threading.Event()

    def origin(*_):
        looks.set()
        return ": looked for" if goes_on.wait(TIMEOUT_SECS) else ""

    monkeypatch.setattr(checksums, "_origin", origin)
    server.sglang = True
    other = WeightStore(tmp_path / "other", keep=2).write(6, tensors(8).items(), {})
    await push("disk", client, server, other, version=6)
    keep_weights(server)
    pushing = asyncio.create_task(push("disk", client, server, path))
    async with asyncio.timeout(TIMEOUT_SECS):
        while not looks.is_set():
            await asyncio.sleep(0.001)
    goes_on.set()
    with pytest.raises(ServerError, match="looked for"):
        await pushing


async def test_tensors_of_another_name_are_named(client, server, path, tmp_path):
    server.sglang = True
    fewer = {name: array for name, array in tensors(7).items() if "up_proj" not in name}
    del fewer["model.norm.weight"]
    other = WeightStore(tmp_path / "other", keep=2).write(6, fewer.items(), {})
    server.path, server.digest = str(other), "of the other"

    keep_weights(server)
    with pytest.raises(ServerError, match=r"tensors model\.norm\.weight "):
        await push("disk", client, server, path)


async def test_files_that_differ_from_their_manifest_are_not_pushed(client, server, path):
    server.sglang = True
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ServerError, match=r"model\.norm\.weight .*digest"):
        await push("disk", client, server, path)
    assert "/pause_generation" not in server.routes()


@pytest.mark.parametrize(("device", "tp_size"), [("cuda", 1), ("cpu", 2)])
async def test_where_hashes_cannot_be_computed_names_are_compared_and_a_warning_says_so(
    client, server, path, device, tp_size, caplog
):
    server.sglang, server.device, server.tp_size = True, device, tp_size
    await push("disk", client, server, path)
    assert "only the names of tensors are verified" in caplog.text
    assert server.version == "7"


async def success(_):
    return web.json_response({"success": True, "message": "done"})


async def test_a_server_that_keeps_another_name_is_an_error(client, server, path):
    server.sglang, server.update_weight_version = True, success
    with pytest.raises(ServerError, match="7-unverified.* version 7"):
        await push("disk", client, server, path)
    assert not server.paused


async def test_a_refusal_is_an_error_and_the_server_continues(client, server, path):
    server.fail["/update_weights_from_disk"] = (400, "wrong shapes")
    with pytest.raises(ServerError, match="HTTP 400: wrong shapes"):
        await push("disk", client, server, path)
    assert server.routes()[-1] == "/continue_generation"
    assert not server.paused


async def test_a_server_that_hangs_is_late(client, server, path):
    server.hang.add("/update_weights_from_disk")
    with pytest.raises(ServerTimeoutError, match="/update_weights_from_disk.* 0"):
        await push("disk", client, server, path, timeout_secs=0.3)
    assert not server.paused


async def test_tensors_travel_as_a_pickled_list_in_buckets(client, server, path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(sglang, "BUCKET_BYTES", 2300)
    server.sglang, server.tp_size, server.device = True, 2, "cuda"
    received = {}

    async def update(payload):
        first, second = payload["serialized_named_tensors"]
        assert first == second  # One for each rank.
        for name, tensor in pickle.load(io.BytesIO(base64.b64decode(first))):
            assert isinstance(tensor, torch.Tensor)
            received[name] = tensor.numpy()
        return server._load(payload, str(path))

    server.update_weights_from_tensor = update
    await push("tensor", client, server, path)
    for name, array in tensors(7).items():
        np.testing.assert_array_equal(received[name], array)
    updates = server.payloads("/update_weights_from_tensor")
    assert [update["flush_cache"] for update in updates] == [False] * (len(updates) - 1) + [True]
    assert len(updates) == 2
    assert {update["weight_version"] for update in updates} == {"7-unverified"}
    routes = server.routes()
    begin, end = (
        routes.index("/begin_weight_update"),
        len(routes) - 1 - routes[::-1].index("/end_weight_update"),
    )
    assert begin < routes.index("/update_weights_from_tensor") < end
    assert end < len(routes) - 1 - routes[::-1].index("/update_weight_version")
    assert not server.session_open


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tp_size", -1, r"tp_size: -1 is no integer in \[1, 4097\)"),
        ("tp_size", 10**9, "tp_size: 1000000000 is no"),
        ("tp_size", None, "tp_size: None is no"),
        ("dtype", ["float32"], r"dtype \['float32'\] is no text"),
    ],
)
async def test_settings_that_cannot_be_are_named(client, server, path, name, value, words):
    server.sglang, server.settings = True, {name: value}
    with pytest.raises(NonsenseError, match=f"/server_info: .*{words}"):
        await push("tensor", client, server, path)
    assert "/pause_generation" not in server.routes()


async def test_half_of_the_tensors_are_no_version(client, server, path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(sglang, "BUCKET_BYTES", 1000)
    server.sglang = True
    calls = []

    async def update(payload):
        calls.append(payload)
        if len(calls) == 2:
            server.fail["/update_weights_from_tensor"] = (500, "lost")
        return server._load(payload, str(path))

    server.update_weights_from_tensor = update
    with pytest.raises(ServerError, match="HTTP 500: lost"):
        await push("tensor", client, server, path)
    assert server.version == "7-unverified"
    assert server.routes()[-2:] == ["/abort_request", "/continue_generation"]
    assert not server.session_open


@pytest.mark.parametrize("left_by", ["a push that failed", "a learner that was killed"])
async def test_a_session_left_open_blocks_no_later_push(client, server, path, left_by):
    pytest.importorskip("torch")
    server.sglang = True
    if left_by == "a learner that was killed":
        server.session_open = True
    else:
        server.fail["/update_weights_from_tensor"] = (500, "lost")
        with pytest.raises(ServerError, match="HTTP 500: lost"):
            await push("tensor", client, server, path)
        server.fail.clear()

    async def update(payload):
        return server._load(payload, str(path))

    server.update_weights_from_tensor = update
    await push("tensor", client, server, path)
    assert (server.version, server.session_open) == ("7", False)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
async def test_the_name_is_no_version_s_before_the_first_byte_changes(
    client, server, path, transport
):
    """A load that fails halfway has changed some weights: they are no longer those of the version before."""
    if transport == "tensor":
        pytest.importorskip("torch")
    server.sglang, server.version = True, "6"
    server.fail[f"/update_weights_from_{transport}"] = (500, "out of memory in the first bucket")
    with pytest.raises(ServerError, match="out of memory"):
        await push(transport, client, server, path)
    assert server.version == "7-unverified"
    assert not server.paused


async def test_a_stream_uploads_every_file_before_the_pause(client, server, path):
    server.digest = read_manifest(path)["digest"]
    await push("stream", client, server, path)
    assert server.uploads == {f"7/{file.name}": file.read_bytes() for file in path.iterdir()}
    routes = server.routes()
    last = max(i for i, route in enumerate(routes) if route.startswith("/weights/7/"))
    assert last < routes.index("/weights/prepare") < routes.index("/pause_generation")
    named = {"weight_version": "7", "weight_digest": server.digest}
    assert server.payloads("/weights/prepare") == [named]
    assert server.payloads("/update_weights_from_upload") == [named | {"flush_cache": True}]


@pytest.mark.parametrize("transport", ["disk", "stream"])
@pytest.mark.parametrize(("status", "reason"), [(507, "no room"), (404, "Not Found")])
async def test_a_server_that_cannot_prepare_loads_in_the_pause(
    client, server, path, transport, status, reason, caplog
):
    server.fail["/weights/prepare"] = (status, reason)
    server.digest = read_manifest(path)["digest"]
    await push(transport, client, server, path)
    update = "disk" if transport == "disk" else "upload"
    (payload,) = server.payloads(f"/update_weights_from_{update}")
    assert "weight_digest" not in payload and server.version == "7" and not server.paused
    assert f"loads in the pause: HTTP {status}: {reason}" in caplog.text


@pytest.mark.parametrize("transport", ["disk", "stream"])
async def test_a_preparation_that_is_refused_pauses_nothing(client, server, path, transport):
    server.fail["/weights/prepare"] = (400, "tensor model.norm.weight is altered")
    with pytest.raises(ServerError, match="/weights/prepare.*is altered"):
        await push(transport, client, server, path)
    assert "/pause_generation" not in server.routes() and server.version == "default"


@pytest.fixture
def step(tmp_path):
    """Writes versions 1, 2, …: steps so small that a difference is short."""
    store = WeightStore(tmp_path / "steps", keep=2)

    def write(version):
        moved = {name: array + version * np.float32(1e-6) for name, array in tensors(7).items()}
        return store.write(version, moved.items(), {"a": 1})

    return write


def difference_of(server):
    return [p.get("difference") for p in server.payloads("/weights/prepare")]


async def delta_push(transport, client, server, path, version):
    server.digest = read_manifest(path)["digest"]
    await Transport(transport, mode="retract", delta=True)(
        client,
        server.address,
        files=StoredVersion(path),
        version=version,
        timeout_secs=TIMEOUT_SECS,
    )


@pytest.mark.parametrize("transport", ["disk", "stream"])
async def test_after_a_first_version_in_full_a_server_gets_differences(
    client, server, step, transport
):
    for version in (1, 2, 3):
        await delta_push(transport, client, server, path := step(version), version)
        assert server.prepared == (str(version), read_manifest(path)["digest"])
    assert difference_of(server) == [None, "from-00000001.difference", "from-00000002.difference"]
    assert all(payload["keep"] for payload in server.payloads("/weights/prepare"))
    sent = {name: len(data) for name, data in server.uploads.items()}
    if transport == "disk":
        assert sent == {}
        return
    versions = [{n: size for n, size in sent.items() if n.startswith(f"{v}/")} for v in (1, 3)]
    assert versions[0].keys() == {f"1/{n}" for n in _FILES}
    assert versions[1].keys() == {"3/from-00000002.difference"}
    assert sum(versions[1].values()) < sum(versions[0].values())


@pytest.mark.parametrize("transport", ["disk", "stream"])
@pytest.mark.parametrize("number", [1, 2])
async def test_weights_that_a_server_has_kept_go_out_as_a_difference(
    client, server, step, transport, number
):
    """Of a second attempt at a version, or of an unchanged one."""
    await delta_push(transport, client, server, path := step(1), 1)
    if number == 2:
        first = StoredVersion(path)
        same = [(name, first.tensor(name)) for name in first.names()]
        path = WeightStore(path.parent, keep=2).write(2, same, {"a": 1})
    await delta_push(transport, client, server, path, number)
    assert difference_of(server) == [None, f"from-{number:08d}.difference"]
    assert server.prepared == (str(number), read_manifest(path)["digest"])


_FILES = ("config.json", "manifest.json", "model.safetensors")


@pytest.mark.parametrize("transport", ["disk", "stream"])
@pytest.mark.parametrize("doubt", ["refused", "restarted", "missed", "unrelated", "not kept"])
async def test_in_any_doubt_a_server_gets_the_full_version(client, server, step, transport, doubt):
    await delta_push(transport, client, server, step(1), 1)
    path = step(2)
    if doubt == "refused":  # Its copy, or the difference, is not what it should be.
        server.refuse_difference = True
    elif doubt == "restarted":
        server.base = None
    elif doubt == "missed":  # Two versions, of which the store keeps the last two.
        step(3)
        path = step(4)
    elif doubt == "unrelated":
        path = WeightStore(path.parent, keep=9).write(2, tensors(8).items(), {"a": 1})
    else:
        server.base = "of another run's version"
    server.calls.clear()
    server.uploads.clear()
    await delta_push(transport, client, server, path, 2)
    tried = ["from-00000001.difference"] if doubt == "refused" else []
    assert difference_of(server) == [*tried, None]
    assert server.prepared == ("2", read_manifest(path)["digest"]) and server.version == "2"
    if transport == "stream":
        assert {name for name in server.uploads if "difference" not in name} == {
            f"2/{name}" for name in _FILES
        }


async def test_without_delta_nothing_is_kept_and_no_difference_is_made(client, server, step):
    for version in (1, 2):
        server.base = read_manifest(step(1))["digest"]
        await push("disk", client, server, path := step(version), version=version)
    assert not list(path.glob("*.difference"))
    assert not any("keep" in payload for payload in server.payloads("/weights/prepare"))


async def test_sglang_gets_versions_in_full(client, server, step):
    server.sglang = True
    for version in (1, 2):
        await delta_push("disk", client, server, path := step(version), version)
    assert server.version == "2" and not list(path.glob("*.difference"))


async def test_a_push_whose_turn_does_not_come_is_late(client, server, path):
    never = asyncio.Semaphore(0)
    with pytest.raises(ServerTimeoutError, match="no turn to pause"):
        await Transport("disk", mode="retract")(
            client,
            server.address,
            files=StoredVersion(path),
            version=7,
            timeout_secs=0.3,
            pausing=lambda: never,
        )
    assert "/pause_generation" not in server.routes()


@pytest.mark.parametrize(
    ("transport", "sglang", "other"),
    [("tensor", False, "stream"), ("stream", True, "tensor"), ("distributed", False, "stream")],
)
async def test_a_transport_that_a_server_lacks_is_named(
    client, server, path, transport, sglang, other
):
    server.sglang = sglang
    with pytest.raises(ServerError, match=f"'{transport}'.*'disk'.*'{other}'"):
        await push(transport, client, server, path)
    assert not server.paused
    assert "/pause_generation" not in server.routes()


@pytest.mark.parametrize("transport", ["disk", "stream", "tensor"])
async def test_a_version_that_is_no_longer_wanted_is_not_loaded(client, server, path, transport):
    if transport == "tensor":
        server.sglang = True
    with pytest.raises(ObsoleteVersionError, match="version 7 was dropped"):
        await Transport(transport, mode="retract")(
            client,
            server.address,
            files=StoredVersion(path),
            version=7,
            timeout_secs=TIMEOUT_SECS,
            is_wanted=lambda: False,
        )
    assert set(server.routes()) <= {"/model_info", "/server_info"}
    assert (server.version, server.paused) == ("default", False)


async def test_a_preparation_and_a_pause_have_their_lease_in_a_header(client, server, path):
    await Transport("disk", mode="retract", pause_lease_secs=120.0)(
        client,
        server.address,
        files=StoredVersion(path),
        version=7,
        timeout_secs=TIMEOUT_SECS,
    )
    assert server.leases == {"/weights/prepare": "120", "/pause_generation": "120"}


async def test_a_server_that_was_only_paused_keeps_its_requests(client, server, path):
    server.sglang = True
    server.hang.add("/pause_generation")
    with pytest.raises(ServerTimeoutError, match="/pause_generation"):
        await push("disk", client, server, path, timeout_secs=0.3)
    assert server.routes()[-1] == "/continue_generation"
    assert "/abort_request" not in server.routes()


async def push_cancelled_when(asked, client, server, path):
    pushing = asyncio.create_task(push("disk", client, server, path))
    async with asyncio.timeout(TIMEOUT_SECS):
        await asked.wait()
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing


async def test_a_push_that_is_cancelled_while_a_server_takes_its_pause_leaves_it_running(
    client, server, path
):
    asked, taken, take = asyncio.Event(), [], server.pause_generation
    loop = asyncio.get_running_loop()

    async def slowly(payload):
        loop.call_soon_threadsafe(asked.set)
        await asyncio.sleep(0.2)
        taken.append(payload)
        return await take(payload)

    server.pause_generation = slowly
    await push_cancelled_when(asked, client, server, path)
    async with asyncio.timeout(TIMEOUT_SECS):
        while not taken:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not server.paused and server.routes()[-1] == "/continue_generation"


@pytest.mark.parametrize("sglang", [False, True])
async def test_a_push_whose_last_call_fails_ends_its_pause_all_the_same(
    client, server, path, sglang
):
    calls, go_on, server.sglang = [], server.continue_generation, sglang

    async def fail_once(payload):
        calls.append(payload)
        return await go_on(payload) if len(calls) > 1 else web.Response(status=503)

    server.continue_generation = fail_once
    with pytest.raises(ServerError, match="/continue_generation: HTTP 503"):
        await push("disk", client, server, path)
    assert (server.version, server.paused) == ("7", False)
    assert "/abort_request" not in server.routes()  # The weights are those of the name.


async def test_a_push_that_is_cancelled_in_its_last_call_ends_its_pause(client, server, path):
    asked, calls, go_on = asyncio.Event(), [], server.continue_generation
    loop = asyncio.get_running_loop()

    async def lose_once(payload):
        calls.append(payload)
        loop.call_soon_threadsafe(asked.set)
        if len(calls) == 1:
            await asyncio.sleep(3600)
        return await go_on(payload)

    server.continue_generation = lose_once
    await push_cancelled_when(asked, client, server, path)
    assert not server.paused


async def test_pushes_of_one_version_compute_its_checksums_once(client, path, monkeypatch):
    stored, computed, checksums_of = StoredVersion(path), [], checksums.checksums_of

    def counted(version, dtype):
        if version is stored:  # and not what a server computes of its own weights
            computed.append(dtype)
        return checksums_of(version, dtype)

    monkeypatch.setattr(checksums, "checksums_of", counted)
    with started(4) as servers:
        for server in servers:
            server.sglang = True
        await asyncio.gather(*(push("disk", client, server, stored) for server in servers))
        assert [server.version for server in servers] == ["7"] * 4
    assert computed == ["float32"]


@pytest.fixture
def few_descriptors():
    """The soft limit on open files, 100 above those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))

    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 100, hard))

    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_version_of_many_files_goes_to_many_servers_with_few_descriptors(
    client, tmp_path, few_descriptors
):
    layers = {f"model.layers.{i}.norm.weight": np.full(8, i, np.float32) for i in range(140)}
    path = WeightStore(tmp_path, keep=1, max_shard_bytes=32).write(7, layers.items(), {})
    assert len(list(path.glob("*.safetensors"))) == 140
    with started(8) as servers:
        few_descriptors()
        stored = StoredVersion(path)
        await asyncio.gather(*(push("disk", client, server, stored) for server in servers))
        assert [server.version for server in servers] == ["7"] * 8
        for name, array in layers.items():
            np.testing.assert_array_equal(stored.tensor(name), array)


async def test_checksums_that_cannot_be_compared_are_not_computed(
    client, server, path, monkeypatch
):
    server.sglang, server.device = True, "cuda"
    stored = StoredVersion(path)
    monkeypatch.setattr(stored, "tensor", None)
    await push("disk", client, server, stored)
    assert server.version == "7"


def test_sglang_s_names_stack_projections_and_pad_vocabularies():
    fused = fuse(tensors(0) | {"lm_head.weight": np.ones((64, 8), np.float32)})
    shapes = {name: [part.shape for part in parts] for name, parts in fused.items()}
    assert shapes == {
        "model.embed_tokens.weight": [(128, 8)],
        "model.layers.0.self_attn.qkv_proj.weight": [(8, 8), (4, 8), (4, 8)],
        "model.layers.0.mlp.gate_up_proj.weight": [(16, 8), (16, 8)],
        "model.norm.weight": [(8,)],
        "lm_head.weight": [(64, 8)],
    }
    assert not fused["model.embed_tokens.weight"][0][70:].any()


def test_projections_stack_in_sglang_s_order_in_any_order_of_the_file():
    names = [f"model.layers.0.self_attn.{p}_proj.bias" for p in ("v", "q", "k")]
    (parts,) = fuse({n: np.array([ord(n.split("_proj")[0][-1])]) for n in names}).values()
    assert "".join(chr(part[0]) for part in parts) == "qkv"


async def test_keys_of_both_kinds_go_to_their_routes(server, path):
    async with InferenceClient(api_key="data", admin_api_key="admin") as client:
        await push("disk", client, server, path)
    keys = dict(zip(server.routes(), server.keys, strict=True))
    assert keys["/model_info"] == "Bearer data"
    for route in ("/pause_generation", "/update_weights_from_disk", "/continue_generation"):
        assert keys[route] == "Bearer admin"


async def test_one_key_serves_all_routes_and_none_sends_none(server, path):
    async with InferenceClient(api_key="data") as client:
        await push("disk", client, server, path)
    assert set(server.keys) == {"Bearer data"}
    server.keys.clear()
    async with InferenceClient() as client:
        await push("disk", client, server, path)
    assert set(server.keys) == {None}


def test_copies_of_a_version_elsewhere_are_the_same_version(path, tmp_path):
    copy = shutil.copytree(path, tmp_path / "copy")
    first = checksums.checksums_of(StoredVersion(path), "float32")
    assert checksums.checksums_of(StoredVersion(copy), "float32") == first
    assert checksums.checksums_of(StoredVersion(copy), "bfloat16") != first
