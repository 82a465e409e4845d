"""The queue's border: token, TLS, sizes, and random messages that never stop it."""

import asyncio
import contextlib
import time

import grpc
import pytest
from fixtures.queues import group, learner_of, worker_of
from fixtures.security import (
    LONG,
    QUICKSTART,
    SOON_SECS,
    TIMEOUTS,
    TOKEN,
    fuzz,
    in_a_thread,
    queue_of,
    tls_of,
)
from google.protobuf import message as protobuf
from google.protobuf import message_factory
from hypothesis import strategies as st

from jaxrl_async import rpc
from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import main
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.calls import Glance, GrpcCalls, QueueError
from jaxrl_async.queue.journal import Journal
from jaxrl_async.records import Permit, ResumePoint, ServerRecord, Wait
from jaxrl_async.servers.client import InferenceClient

# The queue.


def learner_connects(address, **access):
    with learner_of(address, **access) as queue:
        return queue.status()


async def worker_connects(address, **access):
    async with worker_of(address, **access) as queue:
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
        with contextlib.closing(Glance(address, **access)) as glance:
            assert (await asyncio.to_thread(glance)).capacity == 0


@pytest.mark.parametrize("token", [None, "another", TOKEN + "x", TOKEN[:-1]])
async def test_another_token_is_refused_at_once_and_named(token):
    async with queue_of(token=TOKEN) as address:
        message = f"the queue {address} asks for a token.*queue.token_env"
        await refused_soon(PermissionError, message, address, token=token)
        with contextlib.closing(Glance(address, token=token)) as glance:
            assert await asyncio.to_thread(glance) is None


async def test_a_queue_whose_token_changed_refuses_calls_and_watches_at_once():
    async with queue_of(token=TOKEN) as address:
        client = await worker_of(address, token=TOKEN).__aenter__()
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


@pytest.mark.parametrize("raw", [b"", b"x" * 1_000_000])
async def test_a_probe_needs_no_token_and_its_message_is_not_received(raw):
    async with queue_of(token=TOKEN) as address, grpc.aio.insecure_channel(address) as channel:
        # Larger than the queue takes: it would say so, if it had received it.
        answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(raw, timeout=20)
        assert answer == b"\x08\x01"  # SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Watch")(raw, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


METHODS = [m.name for m in pb.DESCRIPTOR.services_by_name["TrajectoryQueue"].methods]


@pytest.mark.parametrize("method", [*METHODS, "NoSuchMethod"])
async def test_no_call_without_the_token_is_looked_at(method, monkeypatch):
    looked, parser = [], rpc.parser

    def spied(message):
        return lambda raw: looked.append(raw) or parser(message)(raw)

    monkeypatch.setattr(rpc, "parser", spied)
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
        GrpcCalls("127.0.0.1:1", **TIMEOUTS, tls_ca="/no/ca.pem")
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


def refusals():
    """Name → (method, message, what the refusal says)."""
    permit, text = pb.Permit(prompt_index=0), "has at most {} characters, got 5000"
    name, words = text.format(256), text.format(2000)
    entries = "at most {} entries, got {}".format
    table = {}

    def returned(field, said, **values):
        table[field] = ("Return", pb.ReturnRequest(permit=permit, **values), said)

    def reported(field, said, *waits, role="a", secs=None, loads=None):
        message = pb.RoleReport(role=role, waits=waits, secs=secs, loads=loads)
        table[field] = ("Report", message, said)

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

    pushed("lengths", "2 samples, got 90000", [0] * 90_000)
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
    reported("loaded servers", entries(4096, 4097), loads={str(i): 1 for i in range(4097)})
    reported("loaded at", f"an address of loads {name}", loads={LONG: 1})
    reported("load", "load of 'a' must be ≤ 1099511627776 tokens", loads={"a": 1 << 41})
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
    async with served as address, worker_of(address) as client:
        await client.report("r" * 256, [Wait("a" * 5000, "b" * 5000, 1.0)] * 64)
        learner = learner_of(address)
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


PERMIT = pb.Permit(prompt_index=0)
VALID = {
    "Admit": pb.AdmitRequest(max_permits=2, worker="w", working_on=[PERMIT]),
    "Push": wire.encode_group(group(Permit(0, 0))),
    "Return": pb.ReturnRequest(permit=PERMIT, reason="timeout", detail="d", completion_tokens=[3]),
    "Begin": pb.BeginRequest(nonce="a"),
    "WatchFleet": pb.WatchRequest(),
    "Lease": pb.LeaseRequest(step=1, num_processes=1, num_minibatches=1),
    "Commit": pb.CommitRequest(step=1),
    "Checkpointed": pb.CheckpointedRequest(step=1, generation=1),
    "Snapshot": pb.SnapshotRequest(step=1, generation=1),
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
