"""What a stranger can do: nothing without the key, and with it nothing that stops a listener.

Real gRPC and HTTP on loopback, certificates of openssl's, and random bytes at every border.
"""

import ast
import asyncio
import concurrent.futures
import contextlib
import io
import json
import logging
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import grpc
import hypothesis
import psutil
import pytest
from fixtures.queues import group, served
from google.protobuf import message as protobuf
from google.protobuf import message_factory
from hypothesis import strategies as st
from test_inference_http import CONFIG, SHAPE, serving, upload, weights, write_weights

from jaxrl_async import security
from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import main
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.inference import engine as engines
from jaxrl_async.inference import http, loading
from jaxrl_async.queue import client as queue_client
from jaxrl_async.queue import service as queue_service
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.client import LearnerQueue, QueueClient, QueueError
from jaxrl_async.queue.journal import Journal
from jaxrl_async.queue.records import Permit, ResumePoint, ServerRecord, Wait
from jaxrl_async.servers.client import InferenceClient, ServerError

ROOT = pathlib.Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.py"
TIMEOUTS = dict(connect_timeout_secs=20.0, call_timeout_secs=20.0)
SOON_SECS = 10.0  # What no waiting mends is said within this, far below the timeouts.
RUN_TIMEOUT_SECS = 400
TOKEN, API_KEY, ADMIN_KEY = "secret-of-the-queue", "secret-of-generation", "secret-of-control"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Directory of NAME.pem and NAME.key, each its own authority; that of "away" is for another host."""
    directory = tmp_path_factory.mktemp("certificates")
    for name, host in (("queue", "IP:127.0.0.1"), ("other", "IP:127.0.0.1"), ("away", "DNS:away")):
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2"]
        command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={host}"]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory


def tls_of(directory, name="queue"):
    return {"tls_cert": str(directory / f"{name}.pem"), "tls_key": str(directory / f"{name}.key")}


@contextlib.contextmanager
def in_a_thread(context):
    """What an asynchronous context manager yields, while it lives in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="listener")
    thread.start()

    def done(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    try:
        yield done(context.__aenter__())
        done(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def queue_of(address="127.0.0.1:0", *, max_message_bytes=100_000, journal=None, **access):
    """A served queue, for as long as a test runs; yields its address."""
    return served(
        address,
        max_message_bytes=max_message_bytes,
        journal=journal,
        access=access,
        hang_secs=RUN_TIMEOUT_SECS,
        max_staleness=2,
    )


# Who may listen where.


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True)),
        *(("localhost", True), ("LOCALHOST", True), ("", False), ("0.0.0.0", False)),
        *(("::", False), ("[::]", False), ("10.0.0.1", False), ("localhost.evil.org", False)),
        *(("127.0.0.1.evil.org", False), ("queue-0", False), ("::ffff:10.0.0.1", False)),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host, loopback):
    assert security.is_loopback(host) == loopback


async def test_a_queue_for_everyone_needs_a_token():
    message = r"the queue would listen on 0\.0\.0\.0:0, .* without a key: set queue\.token_env"
    with pytest.raises(ValueError, match=message):
        async with queue_of("0.0.0.0:0"):
            pass
    async with queue_of("0.0.0.0:0", token=TOKEN) as address:
        assert address.startswith("0.0.0.0:")


@pytest.mark.parametrize("keys", [{}, {"admin_api_key": ADMIN_KEY}])
async def test_a_server_for_everyone_needs_a_key(engine, keys):
    message = r"would listen on 0\.0\.0\.0:0, .* without a key: set the server's api_key"
    with pytest.raises(ValueError, match=message):
        async with http.serve(engine, host="0.0.0.0", port=0, **keys):
            pass
    async with http.serve(engine, host="0.0.0.0", port=0, api_key=API_KEY) as port:
        assert port


def parse(*overrides):
    argv = [f"--config={QUICKSTART}", *(f"--config.{text}" for text in overrides)]
    return config_lib.settings_of(config_lib.parse_flags("", argv, config=True).config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["queue.address=queue-0:7000"],
            r"queue\.address: .*listen on queue-0:7000, .*set queue\.token_env",
        ),
        (["queue.address=[::]:7000"], r"listen on \[::\]:7000"),
        (["queue.tls_cert=c.pem", "queue.tls_key=k.pem"], "queue.tls_ca go together, got 'c.pem'"),
        (["server.tls_cert=c.pem"], "server.tls_key go together, got 'c.pem' and ''"),
        (
            ["server.tls_cert=c", "server.tls_key=k", "server.addresses=('http://a:1',)"],
            "must be https:// with server.tls_cert, got http://a:1",
        ),
        (["server.command=serve --api-key=abc"], "server.command gives --api-key: keys stay in"),
        (["server.command=serve --admin-api-key abc"], "gives --admin-api-key: keys stay in"),
    ],
)
def test_settings_that_would_be_open_are_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        parse(*overrides)


def test_loopback_needs_no_token():
    for address in ("", "127.0.0.1:7000", "localhost:7000", "[::1]:7000"):
        parse(f"queue.address={address}")
    parse("queue.address=queue-0:7000", "queue.token_env=ANY")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.addresses=('http://0.0.0.0:1',)"], r"0\.0\.0\.0:1, .*set server\.api_key_env"),
        (["server.addresses=('https://127.0.0.1:1',)"], "speaks https with a certificate"),
        (
            [
                "server.addresses=('https://127.0.0.1:1',)",
                "server.tls_cert=no",
                "server.tls_key=no",
            ],
            "no certificate and key in tls_cert no, tls_key no: No such file",
        ),
    ],
)
def test_a_server_role_that_would_be_open_is_refused_before_it_starts(
    overrides, message, tmp_path, capsys
):
    argv = [f"--config={QUICKSTART}", *(f"--config.{text}" for text in overrides)]
    code = main.main(["train", *argv, "--role=server", f"--workdir={tmp_path}/run"])
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_served_checkpoint_for_everyone_needs_a_key(capsys):
    assert main.main(["serve", "--workdir=nowhere", "--host=0.0.0.0"]) == 2
    assert "listen on 0.0.0.0:30000, which is not loopback" in capsys.readouterr().err


# Keys.


def test_a_key_comes_from_the_environment_or_from_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("A_KEY", "abc")
    assert security.read_key("option", "A_KEY") == "abc"
    (tmp_path / "key").write_text("from-a-file\n")
    monkeypatch.setenv("A_KEY", f"@{tmp_path}/key")
    assert security.read_key("option", "A_KEY") == "from-a-file"
    assert security.read_key("option", "") is None


@pytest.mark.parametrize(
    "key", ["abc def", "abc\ndef", "clé", "x" * 1025, "abc\0", "abc\r\nX-Other: header"]
)
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key, monkeypatch, tmp_path):
    (tmp_path / "key").write_text(key)
    monkeypatch.setenv("A_KEY", f"@{tmp_path}/key")
    with pytest.raises(ValueError, match="server.x_env names A_KEY, whose file .* 1 to 1024") as e:
        security.read_key("server.x_env", "A_KEY")
    assert key[:3] not in str(e.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(("value", "message"), [("", "unset or empty"), ("@/no/file", "No such")])
def test_a_key_that_is_not_there_is_named(value, message, monkeypatch):
    monkeypatch.setenv("A_KEY", value)
    with pytest.raises(ValueError, match=f"queue.token_env names A_KEY, .*{message}"):
        security.read_key("queue.token_env", "A_KEY")


@pytest.mark.parametrize("role", ["all", "queue", "learner", "rollout"])
def test_a_role_without_the_queues_token_does_not_start(role, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    argv = [f"--config={QUICKSTART}", "--config.queue.token_env=NO_TOKEN", f"--role={role}"]
    assert main.main(["train", *argv, f"--workdir={tmp_path}/run"]) == 2
    assert "queue.token_env names NO_TOKEN, which is unset" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given", ["", "t", "Bearer", "Bearer x", "Basic t", "Bearer  t", "Bearer té", "Bearer \udcff"]
)
def test_a_header_without_the_key_is_refused(given):
    assert not security.is_bearer(given, "t")
    assert security.is_bearer("bearer t", "t")


# The queue.


def learner_connects(address, **access):
    with LearnerQueue(address, **TIMEOUTS, **access) as queue:
        return queue.status()


async def worker_connects(address, **access):
    async with QueueClient(address, **TIMEOUTS, **access) as queue:
        return await queue.admit(1, 0.0)


async def refused_soon(kind, message, address, **access):
    """Both clients raise it, long before their timeouts."""
    for connect in (
        lambda: worker_connects(address, **access),
        lambda: asyncio.to_thread(learner_connects, address, **access),
    ):
        start = time.monotonic()
        with pytest.raises(kind, match=message):
            await connect()
        assert time.monotonic() - start < SOON_SECS


async def test_the_right_token_over_tls_is_let_in(certificates):
    access = {"token": TOKEN, "tls_ca": str(certificates / "queue.pem")}
    async with queue_of(token=TOKEN, **tls_of(certificates)) as address:
        assert await worker_connects(address, **access) == []
        assert (await asyncio.to_thread(learner_connects, address, **access)).capacity == 0
        with contextlib.closing(queue_client.open_channel(address, **access)) as channel:
            assert (await asyncio.to_thread(queue_client.glance, channel)).capacity == 0


@pytest.mark.parametrize("token", [None, "another", TOKEN + "x", TOKEN[:-1]])
async def test_another_token_is_refused_at_once_and_named(token):
    async with queue_of(token=TOKEN) as address:
        message = f"the queue {address} asks for a token.*queue.token_env"
        await refused_soon(PermissionError, message, address, token=token)
        with contextlib.closing(queue_client.open_channel(address, token=token)) as channel:
            assert await asyncio.to_thread(queue_client.glance, channel) is None


async def test_a_queue_whose_token_changed_refuses_calls_and_watches_at_once():
    async with queue_of(token=TOKEN) as address:
        client = await QueueClient(address, **TIMEOUTS, token=TOKEN).__aenter__()
        fleets = client.watch_fleet()
        assert await anext(fleets) == ()
        watch = asyncio.create_task(anext(fleets))
    async with queue_of(address, token="changed"):
        start = time.monotonic()
        for call in (client.admit(1, 0.0), watch):
            with pytest.raises(PermissionError, match=f"the queue {address} asks for a token"):
                await call
        assert time.monotonic() - start < SOON_SECS
        await client.__aexit__()


@pytest.mark.parametrize(
    ("token", "code", "said"),
    [
        (TOKEN, 0, "last step done: none"),
        ("another", 2, "asks for a token"),
        (None, 2, "queue.token_env names SEC_TOKEN, which is unset"),
    ],
)
async def test_the_verb_status_gives_the_token(token, code, said, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("SEC_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("SEC_TOKEN", token)
    config = config_lib.load_config(str(QUICKSTART)).unlock()
    config.queue.token_env = "SEC_TOKEN"
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    async with queue_of(token=TOKEN) as address:
        argv = ["status", f"--workdir={tmp_path}", f"--queue={address}"]
        assert await asyncio.to_thread(main.main, argv) == code
    out, err = capsys.readouterr()
    assert said in out + err


METHODS = [m.name for m in pb.DESCRIPTOR.services_by_name["TrajectoryQueue"].methods]


@pytest.mark.parametrize("method", [*METHODS, "NoSuchMethod"])
async def test_no_call_without_the_token_is_looked_at(method, monkeypatch):
    looked = []
    for name in ("_unary", "_streaming"):
        make = getattr(queue_service, name)

        def spied(call, parse, *rest, make=make):
            return make(call, lambda raw: looked.append(raw) or parse(raw), *rest)

        monkeypatch.setattr(queue_service, name, spied)
    async with queue_of(token=TOKEN) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/jaxrl_async.TrajectoryQueue/{method}")
        for metadata in ((), (("authorization", "Bearer x"),), (("authorization", TOKEN),)):
            # Larger than the queue takes: it would say so, if it had received it.
            for raw in (b"", b"\xff" * 50, b"x" * 1_000_000):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(raw, metadata=metadata, timeout=20)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert TOKEN not in caught.value.details()
    assert looked == []


async def test_a_queue_of_another_authority_or_host_is_refused(certificates):
    ca = str(certificates / "other.pem")
    async with queue_of(token=TOKEN, **tls_of(certificates)) as address:
        message = f"certificate of the queue {address} is not of an authority in queue.tls_ca"
        await refused_soon(PermissionError, message, address, token=TOKEN, tls_ca=ca)
    ca = str(certificates / "away.pem")
    async with queue_of(token=TOKEN, **tls_of(certificates, "away")) as address:
        message = f"certificate of the queue {address} is .*not of that host"
        await refused_soon(PermissionError, message, address, token=TOKEN, tls_ca=ca)


async def test_one_side_without_tls_is_named(certificates):
    async with queue_of(token=TOKEN, **tls_of(certificates)) as address:
        message = f"the queue {address} speaks TLS: set queue.tls_ca"
        await refused_soon(QueueError, message, address, token=TOKEN)
        # And it is still there.
        ca = str(certificates / "queue.pem")
        assert await worker_connects(address, token=TOKEN, tls_ca=ca) == []
    async with queue_of(token=TOKEN) as address:
        message = f"the queue {address} speaks no TLS, and queue.tls_ca is set"
        await refused_soon(QueueError, message, address, token=TOKEN, tls_ca=ca)


async def test_certificates_that_cannot_be_read_are_named(certificates):
    with pytest.raises(ValueError, match="no certificate in tls_ca /no/ca.pem: No such file"):
        QueueClient("127.0.0.1:1", **TIMEOUTS, tls_ca="/no/ca.pem")
    with pytest.raises(ValueError, match="no certificate in tls_ca .*queue.key"):
        InferenceClient(tls_ca=str(certificates / "queue.key"))
    mixed = {
        "tls_cert": str(certificates / "queue.pem"),
        "tls_key": str(certificates / "other.key"),
    }
    with pytest.raises(
        ValueError, match="no certificate and key in tls_cert .*queue.pem.*other.key"
    ):
        async with queue_of(**mixed):
            pass


# Sizes at the queue.

LONG = "x" * 5000


def refusals():
    """Name → (method, message, what the refusal says)."""
    permit, text = pb.Permit(prompt_index=0), "has at most {} characters, got 5000"
    name, words = text.format(256), text.format(2000)
    entries = "at most {} entries, got {}".format
    table = {}

    def returned(field, said, **values):
        table[field] = ("Return", pb.ReturnRequest(permit=permit, **values), said)

    def reported(field, said, *waits, role="a", secs=None):
        table[field] = ("Report", pb.RoleReport(role=role, waits=waits, secs=secs), said)

    def published(field, said, *servers, version=0, **position):
        message = pb.PublishRequest(
            version=version, servers=servers, position=pb.Position(**position)
        )
        table[field] = ("PublishVersion", message, said)

    def pushed(field, said, values):
        message = wire.encode_group(group(Permit(0, 0)))
        message.ClearField(field)
        getattr(message, field).extend(values)
        table[f"{field} {said}"] = ("Push", message, said)

    pushed("lengths", "2 trajectories, got 90000", [0] * 90_000)
    pushed("lengths", r"4294967295 is outside \[1, 64\]", [5, 2**32 - 1])
    pushed("finish_reasons", f"finish_reason {name}", ["stop", LONG])
    returned("reason", f"reason {name}", reason=LONG)
    returned("detail", f"detail {words}", reason="timeout", detail=LONG)
    returned("completions", entries(65536, 70000), completion_tokens=[1] * 70_000)
    table["worker"] = ("Admit", pb.AdmitRequest(worker=LONG), f"worker {name}")
    many = pb.AdmitRequest(working_on=[pb.Permit()] * 66_000)
    table["working_on"] = ("Admit", many, entries(65536, 66000))
    reported("role", f"role {name}", role=LONG)
    reported("waits", entries(64, 65), *[pb.Wait(what="a", on="b")] * 65)
    reported("what", f"waits.what {words}", pb.Wait(what=LONG))
    reported("on", f"waits.on {words}", pb.Wait(on=LONG))
    reported("secs", "finite and ≥ 0, got nan", pb.Wait(secs=float("nan")))
    reported("kinds of secs", entries(64, 65), secs={str(i): 1.0 for i in range(65)})
    reported("spent on", f"a key of secs {name}", secs={LONG: 1.0})
    reported("spent", "'a' must be finite and ≥ 0, got -1.0", secs={"a": -1.0})
    published("servers", entries(4096, 4097), *[pb.ServerRecord()] * 4097)
    published("address", f"address of a server {name}", pb.ServerRecord(address=LONG))
    published("state", "state 'x{79} is none of", pb.ServerRecord(state=LONG))
    published("version", rf"in \[0, {2**31 - 1}\], got {2**40}", version=2**40)
    published("frontier", rf"in \[0, {2**53}\], got {2**60}", frontier=2**60)
    published("outstanding", entries(65536, 66000), outstanding=[permit] * 66_000)
    published("reasons", entries(64, 65), retired={str(i): 1 for i in range(65)})
    published("count", "returned must be .* got -1", returned={"timeout": -1})
    return table


@pytest.mark.parametrize("name", refusals())
async def test_what_is_too_large_is_refused_with_value_and_bound(name):
    method, message, said = refusals()[name]
    async with queue_of(max_message_bytes=1_000_000) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/jaxrl_async.TrajectoryQueue/{method}")
            with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
                await call(message.SerializeToString(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(caught.value.details()) < 400
        await worker_connects(address)


async def test_what_is_within_the_bounds_is_taken():
    served = queue_of(max_message_bytes=1_000_000)
    async with served as address, QueueClient(address, **TIMEOUTS) as client:
        await client.report("r" * 256, [Wait("a" * 5000, "b" * 5000, 1.0)] * 64)
        learner = LearnerQueue(address, **TIMEOUTS)
        await asyncio.to_thread(learner.__enter__)
        (role,) = (await asyncio.to_thread(learner.status)).roles
        assert {len(wait.what) for wait in role.waits} == {2000}  # Cut before it was sent.
        servers = [ServerRecord(f"http://{i:0249}", "DEAD", None) for i in range(300)]
        await asyncio.to_thread(learner.publish_version, 0, servers, ResumePoint(0, 0, (), {}, {}))
        learner.__exit__()
        (permit, *_) = await client.admit(4, 5.0, worker="w" * 256)
        assert await client.return_permit(permit, "timeout", "d" * 5000) == "reissued"


@pytest.mark.parametrize(("num_bytes", "taken"), [(6000, True), (9000, False), (50_000, False)])
async def test_metadata_is_bounded(num_bytes, taken):
    async with queue_of() as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/jaxrl_async.TrajectoryQueue/Status")
        metadata = (("x", "y" * num_bytes),)
        if taken:
            await call(b"", metadata=metadata, timeout=20)
        else:
            with pytest.raises(grpc.aio.AioRpcError, match=f"metadata.*{num_bytes} vs. 8192"):
                await call(b"", metadata=metadata, timeout=20)
        await worker_connects(address)


async def test_a_refusal_fits_into_a_header():
    async with queue_of() as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/jaxrl_async.TrajectoryQueue/PublishVersion")
        record = pb.ServerRecord(address="\U0001f600" * 256, state="\U0001f600" * 20_000)
        with pytest.raises(grpc.aio.AioRpcError, match="is none of") as caught:
            await call(pb.PublishRequest(servers=[record]).SerializeToString(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# The servers.


@pytest.fixture(scope="module")
def engine():
    """A started engine of a tiny model, which holds version 3."""
    started = engines.Engine(CONFIG, **SHAPE, max_queued_requests=8, name="secured")
    started.start()
    started.update_weights(weights(0), "3").result(60)
    yield started
    started.close(timeout_secs=30)


@pytest.fixture
async def client(engine):
    async with serving(engine) as client:
        yield client


async def test_a_server_speaks_https_to_whom_trusts_it(engine, certificates):
    keys = {"api_key": API_KEY, "admin_api_key": ADMIN_KEY}
    served = http.serve(engine, host="127.0.0.1", port=0, **keys, **tls_of(certificates))
    async with served as port:
        address = f"https://127.0.0.1:{port}"
        async with InferenceClient(**keys, tls_ca=str(certificates / "queue.pem")) as client:
            info = await client.model_info(address, timeout_secs=10)
            assert info["weight_version"] == "3"
            sampling = {"max_new_tokens": 3, "sampling_seed": 1}
            asked = {"input_ids": [1, 2], "sampling_params": sampling}
            answer = await client.generate(address, rid="r", **asked, timeout_secs=10)
            assert len(answer.tokens) == 3
            await client.continue_(address, timeout_secs=10)
            with pytest.raises(ServerError, match="connection lost"):
                await client.model_info(f"http://127.0.0.1:{port}", timeout_secs=10)
        for ca in ("", str(certificates / "other.pem")):
            async with InferenceClient(**keys, tls_ca=ca) as client:
                said = f"{address}/model_info: its certificate is of no authority in server.tls_ca"
                with pytest.raises(ServerError, match=said) as caught:
                    await client.model_info(address, timeout_secs=10)
                assert not caught.value.retryable
    async with http.serve(engine, host="127.0.0.1", port=0) as port:
        async with InferenceClient(tls_ca=str(certificates / "queue.pem")) as client:
            with pytest.raises(ServerError, match="connection lost: .*SSL"):
                await client.model_info(f"https://127.0.0.1:{port}", timeout_secs=10)


async def test_a_server_for_another_host_is_not_trusted(engine, certificates):
    served = http.serve(engine, host="127.0.0.1", port=0, **tls_of(certificates, "away"))
    async with served as port, InferenceClient(tls_ca=str(certificates / "away.pem")) as client:
        with pytest.raises(ServerError, match="or not of that host: .*127.0.0.1"):
            await client.model_info(f"https://127.0.0.1:{port}", timeout_secs=10)


def post(address, route, body, headers=None):
    """(status, JSON) of a POST of bytes."""
    headers = {"Content-Type": "application/json"} | (headers or {})
    request = urllib.request.Request(address + route, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"{}")


@pytest.mark.parametrize("key", ["", "x", "é", "\udcff"])
async def test_a_key_of_odd_bytes_is_401(engine, key):
    async with http.serve(engine, host="127.0.0.1", port=0, api_key=API_KEY) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        header = f"Authorization: Bearer {key}".encode("utf-8", "surrogateescape")
        writer.write(b"GET /model_info HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b" 400 "),
        (b"GET /model_info HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 9000 + b"\r\n\r\n", b" 400 "),
        (
            b"GET /model_info HTTP/1.1\r\nHost: a\r\n"
            + b"".join(b"X-%d: a\r\n" % i for i in range(65))
            + b"\r\n",
            b" 400 ",
        ),
        (
            b"GET /model_info HTTP/1.1\r\nHost: a\r\n"
            + b"".join(b"X-%d: a\r\n" % i for i in range(60))
            + b"\r\n",
            b" 200 ",
        ),
    ],
    ids=["line", "field", "fields", "within"],
)
async def test_headers_of_http_are_bounded(engine, head, status):
    async with http.serve(engine, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert status in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


# Paths.


@pytest.fixture
def places(tmp_path):
    """A root with a version in it, a version outside, and links to it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    inside = pathlib.Path(write_weights(root))
    foreign = pathlib.Path(write_weights(outside))
    (root / "link").symlink_to(foreign)
    (root / "loop").symlink_to(root / "loop")
    write_weights(tmp_path / "root-beside")
    return {"root": root, "inside": inside, "foreign": foreign}


def confined_paths(places):
    root, foreign = places["root"], places["foreign"]
    return {
        "elsewhere": foreign,
        "up": root / ".." / "outside" / foreign.name,
        "up from nowhere": f"{root}/none/../../outside/{foreign.name}",
        "link": root / "link",
        "through a link": root / "link" / ".." / foreign.name,
        "a name that begins alike": f"{root}-beside/{foreign.name}",
        "relative": os.path.relpath(places["inside"]),
        "circle": root / "loop" / "x",
        "zero byte": f"{root}/\0",
        "system": "/etc",
        "proc": "/proc/self/cwd",
        "dot": ".",
    }


@pytest.mark.parametrize("name", confined_paths({"root": ROOT, "foreign": ROOT, "inside": ROOT}))
async def test_weights_from_outside_the_roots_are_refused(engine, places, name):
    path = str(confined_paths(places)[name])
    roots = [places["root"]]
    async with http.serve(engine, host="127.0.0.1", port=0, weight_roots=roots) as port:
        body = json.dumps({"model_path": path, "weight_version": "9"}).encode()
        address = f"http://127.0.0.1:{port}"
        status, answer = await asyncio.to_thread(post, address, "/update_weights_from_disk", body)
        assert (status, answer["success"]) == (400, False), answer
        if name == "circle":
            assert "is no path" in answer["message"] or "not a directory" in answer["message"]
        else:
            assert re.search("model_path .* (within the directories|is no path)", answer["message"])
    assert engine.weight_version == "3"


async def test_weights_from_within_a_root_are_loaded(engine, places, tmp_path):
    (tmp_path / "to-root").symlink_to(places["root"])
    name = places["inside"].name
    for roots, path in (
        ([places["root"]], places["inside"]),
        ([tmp_path / "to-root"], places["inside"]),
        ([places["root"]], tmp_path / "to-root" / name),
        ([places["inside"]], places["inside"]),
        # Out through a link and in again: where it ends counts.
        (["/nowhere", places["root"]], places["root"] / "link" / ".." / ".." / "root" / name),
    ):
        async with http.serve(engine, host="127.0.0.1", port=0, weight_roots=roots) as port:
            body = {"model_path": str(path), "weight_version": "3", "abort_all_requests": True}
            status, answer = await asyncio.to_thread(
                post,
                f"http://127.0.0.1:{port}",
                "/update_weights_from_disk",
                json.dumps(body).encode(),
            )
        assert status == 200, answer
    async with http.serve(engine, host="127.0.0.1", port=0) as port:
        body = json.dumps({"model_path": str(places["inside"]), "weight_version": "3"}).encode()
        address = f"http://127.0.0.1:{port}"
        status, answer = await asyncio.to_thread(post, address, "/update_weights_from_disk", body)
        assert status == 400 and answer["message"].endswith("weights may come from: none")


async def test_an_upload_of_a_later_run_epoch_is_taken(client, tmp_path):
    await upload(client, pathlib.Path(write_weights(tmp_path)), "1.12")
    status, answer = await client("/update_weights_from_upload", {"weight_version": "1.12"})
    assert status == 200, answer
    assert (await client.get("/model_info"))[1]["weight_version"] == "1.12"


async def test_the_bytes_of_an_upload_are_bounded(client):
    bound = 8 * loading.num_parameters(CONFIG) + http.MAX_BODY_BYTES
    part = bound // 2 + 1
    for name, status in (("a", 200), ("a", 200), ("b", 400), ("c", 400)):
        url = f"http://127.0.0.1:{client.port}/weights/9/{name}.safetensors"
        async with client.session.put(url, data=io.BytesIO(b"x" * part)) as answer:
            assert answer.status == status
            if status == 400:
                message = (await answer.json())["error"]["message"]
                assert f"at most {bound} bytes together: {name}.safetensors" in message
    assert len((await client.generate())["output_ids"]) == 5


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/generate", {"rid": "x" * 257}, "rid must be a string of 1 to 256 characters"),
        (
            "/update_weights_from_disk",
            {"model_path": "/" * 4097},
            "at most 4096 characters, got 4097",
        ),
        (
            "/update_weights_from_disk",
            {"model_path": "/", "weight_version": "1" * 129},
            "weight_version has at most 128 characters, got 129",
        ),
        ("/update_weights_from_upload", {"weight_version": "1" * 129}, "at most 128 characters"),
        ("/generate", {LONG: 1}, "unknown keys: xxx"),
    ],
)
async def test_strings_over_http_are_bounded(client, route, body, message):
    status, answer = await client(
        route, {"input_ids": [1]} | body if route == "/generate" else body
    )
    assert status == 400
    assert message in answer["error"]["message"] and len(answer["error"]["message"]) < 400


async def test_nesting_without_end_is_no_json(client):
    status, answer = await client("/generate", data=b"[" * 200_000)
    assert status == 400 and "the body is not JSON" in answer["error"]["message"]


# Random bytes.


def fuzz(request, check, **strategies):
    """300 examples, or 5,000 with --long."""
    examples = 5000 if request.config.getoption("--long") else 300
    settings = hypothesis.settings(
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(**strategies)(check))()


PERMIT = pb.Permit(prompt_index=0)
VALID = {
    "Admit": pb.AdmitRequest(max_permits=2, worker="w", working_on=[PERMIT]),
    "Push": wire.encode_group(group(Permit(0, 0))),
    "Return": pb.ReturnRequest(permit=PERMIT, reason="timeout", detail="d", completion_tokens=[3]),
    "WatchFleet": pb.WatchRequest(),
    "Lease": pb.LeaseRequest(step=1, num_processes=1, num_minibatches=1),
    "Commit": pb.CommitRequest(step=1),
    "Checkpointed": pb.CheckpointedRequest(step=1),
    "PublishVersion": pb.PublishRequest(
        version=0,
        servers=[pb.ServerRecord(address="http://a:1", state="HEALTHY", version=0)],
        position=pb.Position(step=0, frontier=1, outstanding=[PERMIT], retired={"overlong": 1}),
    ),
    "Report": pb.RoleReport(
        role="r", waits=[pb.Wait(what="a", on="b", secs=1.0)], secs={"up": 1.0}
    ),
    "Status": pb.StatusRequest(),
}
# How a byte string is changed: (where, what is put there, how many bytes go).
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 400), st.binary(max_size=12), st.integers(0, 12)),
    min_size=1,
    max_size=4,
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
)


def mutated(raw, mutations):
    for where, put, gone in mutations:
        where %= len(raw) + 1
        raw = raw[:where] + put + raw[where + gone :]
    return raw


def with_numbers(message, numbers):
    """A message some of whose numbers are others, where they fit; those within it, too."""
    other = type(message)()
    other.CopyFrom(message)
    numbers = iter(numbers)
    _change(other, numbers)
    return other


def _change(message, numbers):
    for field in message.DESCRIPTOR.fields:
        if field.message_type and field.message_type.GetOptions().map_entry:
            continue
        value = getattr(message, field.name)
        if field.message_type:
            for inner in value if field.is_repeated else [value]:
                _change(inner, numbers)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT32, field.CPPTYPE_DOUBLE):
            number = next(numbers, None)
            with contextlib.suppress(ValueError):  # Out of the field's range.
                if number is not None and field.is_repeated:
                    value.append(number)
                elif number is not None:
                    setattr(message, field.name, number)


class Caller:
    """Sends bytes to a method, and looks whether the queue still answers."""

    def __init__(self, channel):
        self._channel = channel
        service = pb.DESCRIPTOR.services_by_name["TrajectoryQueue"]
        self._methods = {method.name: method for method in service.methods}

    def __call__(self, method, raw):
        """The status of a call; never that of a handler that failed, or hung."""
        described = self._methods[method]
        path = f"/jaxrl_async.TrajectoryQueue/{method}"
        waits = self._waits(described, raw)
        timeout = 0.05 if waits else 20
        try:
            if described.server_streaming:
                call = self._channel.unary_stream(path)(raw, timeout=timeout)
                next(call, None)
                call.cancel()
            else:
                self._channel.unary_unary(path)(raw, timeout=timeout)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
            assert code in REFUSALS, (method, raw, code, error.details())
            assert waits or code is not grpc.StatusCode.DEADLINE_EXCEEDED or method == "Lease"
        self._channel.unary_unary("/jaxrl_async.TrajectoryQueue/Status")(b"", timeout=20)
        return code

    @staticmethod
    def _waits(described, raw):
        try:
            message = message_factory.GetMessageClass(described.input_type).FromString(raw)
        except protobuf.DecodeError:
            return False
        return getattr(message, "wait_secs", 0) > 0


REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture
def caller(tmp_path):
    journal = Journal(tmp_path / "journal", batch_groups=4, keep="all")
    served = in_a_thread(queue_of(journal=journal))
    with served as address, grpc.insecure_channel(address) as channel:
        channel.unary_unary("/jaxrl_async.TrajectoryQueue/PublishVersion")(b"", timeout=20)
        yield Caller(channel)


def test_the_valid_messages_are_valid(caller):
    answers = {method: caller(method, VALID[method].SerializeToString()) for method in METHODS}
    refused = {method for method, code in answers.items() if code is not grpc.StatusCode.OK}
    # Nothing is leased in full.
    assert refused <= {"Lease", "Commit", "PublishVersion"}


def test_random_bytes_never_stop_the_queue(caller, request):
    def check(method, raw):
        caller(method, raw)

    fuzz(request, check, method=st.sampled_from(METHODS), raw=st.binary(max_size=200))


def test_changed_messages_never_stop_the_queue(caller, request):
    def check(method, mutations):
        caller(method, mutated(VALID[method].SerializeToString(), mutations))

    fuzz(request, check, method=st.sampled_from(METHODS), mutations=MUTATIONS)


def test_odd_numbers_never_stop_the_queue(caller, request):
    def check(method, numbers):
        caller(method, with_numbers(VALID[method], numbers).SerializeToString())

    numbers = st.lists(st.one_of(st.none(), NUMBERS), min_size=1, max_size=12)
    fuzz(request, check, method=st.sampled_from(METHODS), numbers=numbers)


JSON = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.floats(), st.text(max_size=20)),
        *(st.integers(-3, 20), st.integers(-(2**70), 2**70)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
SAMPLING = st.dictionaries(st.sampled_from(sorted(http._SAMPLING_DEFAULTS)), JSON, max_size=4)
PROMPT = st.lists(st.integers(-1, 20), max_size=5)
FIELDS = {
    "rid": st.one_of(JSON, st.sampled_from(["a", "b"])),
    "input_ids": st.one_of(JSON, PROMPT, st.lists(PROMPT, max_size=3)),
    "sampling_params": st.one_of(JSON, SAMPLING, st.just({"max_new_tokens": 2})),
    "return_logprob": st.one_of(JSON, st.booleans()),
    "stream": JSON,
    "mode": st.one_of(JSON, st.sampled_from(["abort", "retract", "in_place"])),
    "abort_all": JSON,
    "model_path": st.one_of(JSON, st.sampled_from(["/", "/etc", "..", "\0"])),
    "weight_version": st.one_of(JSON, st.sampled_from(["3", "..", "a/b"])),
    "flush_cache": st.one_of(JSON, st.booleans()),
    "abort_all_requests": st.one_of(JSON, st.booleans()),
    "load_format": st.one_of(JSON, st.sampled_from(["auto"])),
}
KEYS = {
    "/generate": ("rid", "input_ids", "sampling_params", "return_logprob", "stream"),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/abort_request": ("rid", "abort_all"),
    "/flush_cache": (),
    "/update_weights_from_disk": (
        *("model_path", "weight_version", "flush_cache", "abort_all_requests", "load_format"),
    ),
    "/update_weights_from_upload": ("weight_version", "flush_cache"),
}
BODIES = st.sampled_from(sorted(KEYS)).flatmap(
    lambda route: st.tuples(
        st.just(route),
        st.one_of(
            JSON, st.fixed_dictionaries({}, optional={key: FIELDS[key] for key in KEYS[route]})
        ),
    )
)


@pytest.fixture
def address(engine, tmp_path):
    served = http.serve(engine, host="127.0.0.1", port=0, weight_roots=[tmp_path])
    with in_a_thread(served) as port:
        yield f"http://127.0.0.1:{port}"


def still_answers(address):
    """Whatever came before: it says what it holds, and generates."""
    assert post(address, "/continue_generation", b"")[0] == 200
    with urllib.request.urlopen(f"{address}/model_info", timeout=20) as answer:
        assert json.load(answer)["weight_version"] in ("3", "1.12")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert post(address, "/generate", json.dumps(body).encode())[0] == 200


def test_random_bodies_never_stop_the_server(address, request):
    def check(route, body):
        status, _ = post(address, route, body)
        assert status in (200, 400, 413), (route, body, status)
        still_answers(address)

    fuzz(request, check, route=st.sampled_from(sorted(KEYS)), body=st.binary(max_size=100))


def test_random_json_never_stops_the_server(address, request):
    def check(asked):
        route, body = asked
        status, answer = post(address, route, json.dumps(body).encode())
        assert status in (200, 400), (route, body, status, answer)
        still_answers(address)

    fuzz(request, check, asked=BODIES)


HTTP_PIECES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [
                *(b"POST /generate HTTP/1.1\r\n", b"GET /model_info HTTP/1.1\r\n", b"\r\n"),
                *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Host: a\r\n"),
                *(b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffff\r\n", b"0\r\n\r\n"),
                *(b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"{}"),
                *(b"PUT /weights/1/config.json HTTP/1.1\r\n", b"Upgrade: h2c\r\n", b"\0"),
            ]
        ),
    ),
    max_size=8,
)


def test_random_bytes_on_the_wire_never_stop_the_server(address, request, caplog):
    caplog.set_level(logging.CRITICAL)
    host, port = address.removeprefix("http://").split(":")

    def check(pieces):
        with socket.create_connection((host, int(port)), 20) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(b"".join(pieces))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        with urllib.request.urlopen(f"{address}/health", timeout=20) as answer:
            assert answer.status == 200

    fuzz(request, check, pieces=HTTP_PIECES)


# No pickle.

FORBIDDEN_MODULES = {"pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib", "cPickle"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load", "torch.load"}
SENDS = "weights/transports.py"  # SGLang's tensor route takes nothing else.


def unsafe(tree):
    """What in a module could run what it is given to read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            loads = [k for k in node.keywords if k.arg in ("allow_pickle", "weights_only")]
            yield from (f"{called}({ast.unparse(k.value)}: {k.arg})" for k in loads)
            if called in FORBIDDEN_CALLS or called.split(".")[0] in FORBIDDEN_MODULES:
                yield called
            continue
        else:
            continue
        yield from (f"import {name}" for name in sorted(names & FORBIDDEN_MODULES))


def test_nothing_unpickles_or_evaluates():
    found = {}
    files = sorted((ROOT / "jaxrl_async").glob("**/*.py"))
    assert len(files) > 50
    for path in files:
        what = set(unsafe(ast.parse(path.read_text("utf-8"))))
        if what:
            found[str(path.relative_to(ROOT / "jaxrl_async"))] = what
    assert found == {SENDS: {"import pickle", "pickle.dumps"}}


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from cloudpickle import loads", "import dill as d", "import shelve"),
        *("eval(x)", "exec(x)", "torch.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(x)"),
        *("pickle.loads(x)", "import a, marshal", "__import__(x)"),
    ],
)
def test_what_unpickles_or_evaluates_is_found(source):
    assert set(unsafe(ast.parse(source)))


# A run.


def test_a_run_with_every_key_and_tls_keeps_them_secret(certificates, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    (tmp_path / "token").write_text(TOKEN + "\n")
    environment |= {
        "SEC_TOKEN": f"@{tmp_path}/token",
        "SEC_KEY": API_KEY,
        "SEC_ADMIN_KEY": ADMIN_KEY,
    }
    pem, key = certificates / "queue.pem", certificates / "queue.key"
    names = {"queue.token_env": "SEC_TOKEN", "server.api_key_env": "SEC_KEY"}
    names |= {"server.admin_api_key_env": "SEC_ADMIN_KEY"}
    for block in ("queue", "server"):
        names |= {f"{block}.tls_cert": pem, f"{block}.tls_key": key, f"{block}.tls_ca": pem}
    workdir = tmp_path / "run"
    verb = [sys.executable, "-m", "jaxrl_async"]
    command = [*verb, "train", f"--config={QUICKSTART}:smoke", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in names.items()]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        printed = pool.submit(process.communicate, timeout=RUN_TIMEOUT_SECS)
        lines = set()  # As `ps` shows them.
        while not printed.done():
            lines |= command_lines(process.pid)
            time.sleep(0.3)
    output, _ = printed.result()
    assert process.returncode == 0, output
    assert "https://127.0.0.1:" in output
    assert {"queue", "server", "rollout", "learner"} <= set(
        re.findall(r"--role=(\w+)", " ".join(lines))
    )
    subprocess.run(
        [*verb, "report", f"--workdir={workdir}"], cwd=ROOT, check=True, capture_output=True
    )
    files = [path for path in workdir.glob("**/*") if path.is_file()]
    names = {path.name for path in files}
    wanted = {"config.json", "metrics.jsonl", "report.html", "queue.log", "server-0.log"}
    assert wanted | {"learner.log", "rollout-0.log", "journal.sqlite"} <= names
    for secret in (TOKEN, API_KEY, ADMIN_KEY):
        assert secret not in output
        assert not [line for line in lines if secret in line]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def command_lines(pid):
    lines = set()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                lines.add(" ".join(process.cmdline()))
    return lines
