"""The queue over a real gRPC connection on loopback."""

import asyncio
import contextlib
import gc
import inspect
import json
import re
import sys
import time
import weakref

import grpc
import numpy as np
import pytest
from fixtures.queues import (
    GROUP_SIZE,
    HANG_SECS,
    MAX_TOKENS,
    VOCAB_SIZE,
    connected,
    group,
    learner_of,
    make_admission,
    opened,
    served,
    worker_of,
)

from jaxrl_async import rpc
from jaxrl_async.learner.follower import FollowerQueue
from jaxrl_async.queue import calls as queue_calls
from jaxrl_async.queue import client as queue_client
from jaxrl_async.queue import service as queue_service
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.calls import Glance, QueueError
from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.queue.replay import ReplayQueue
from jaxrl_async.queue.source import GroupSource
from jaxrl_async.records import (
    SILENT_SECS,
    Permit,
    RunFailedError,
    ServerRecord,
    Share,
    SupersededError,
    Wait,
)
from jaxrl_async.types import Group, InvalidTrajectoryError

SERVERS = (ServerRecord("http://a:1", "HEALTHY", 0), ServerRecord("http://b:1", "DEAD", None))


def stub_of(channel):
    return rpc.Stub(channel, pb.DESCRIPTOR.services_by_name["TrajectoryQueue"])


def indexes(chunks):
    return [[g.prompt_index for g in chunk.groups] for chunk in chunks]


@pytest.mark.parametrize("queue", [LearnerQueue, FollowerQueue, ReplayQueue])
def test_a_queue_of_the_loop_has_the_methods_of_a_group_source(queue):
    methods = {name for name, value in vars(GroupSource).items() if inspect.isfunction(value)}
    methods = {name for name in methods if not name.startswith("_")}
    assert methods == {"lease", "commit", "status"}
    for name in methods:
        found = inspect.signature(getattr(queue, name))
        assert found == inspect.signature(getattr(GroupSource, name)), name


async def test_a_step_goes_round():
    async with opened() as queue:
        await queue.publish(0)
        permits = await queue.fill(9)
        assert permits == [Permit(i, 0) for i in range(4)]
        (chunk,) = await queue.lease(1)
        assert (chunk.step, chunk.index, chunk.last) == (1, 0, True)
        for permit, got in zip(permits, chunk.groups, strict=True):
            assert (got.prompt_index, got.attempt) == (permit.prompt_index, permit.attempt)
            row, sent = got.trajectories[1], group(permit).trajectories[1]
            np.testing.assert_array_equal(row.tokens, sent.tokens)
            np.testing.assert_array_equal(row.logprobs, sent.logprobs)
        resume_point = await queue.commit(1)
        assert (resume_point.step, resume_point.frontier, resume_point.outstanding) == (1, 4, ())
        assert await queue.commit(1) == resume_point
        status = await queue.status()
        assert (status.depth_groups, status.leased_groups, status.depth_bytes) == (0, 0, 0)
        assert status.completion_tokens == 4 * GROUP_SIZE * 3
        assert status.last_push_age_secs >= 0


@contextlib.asynccontextmanager
async def learners(address, count):
    """Learners that began one after the other, as if each had been frozen when the next one was started."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            learner = learner_of(address)
            await asyncio.to_thread(stack.enter_context, learner)
            await asyncio.to_thread(learner.begin)
            made.append(learner)
        yield made


async def test_a_learner_is_refused_once_another_one_has_begun():
    async with opened() as queue, learners(queue.address, 2) as (elder, younger):
        await asyncio.to_thread(younger.publish_version, 0, SERVERS)
        await queue.fill(8)
        both = r"generation 1 of run [a-z2-7]{12}, whose generation 2 "
        for call in (
            lambda: next(elder.lease(1, 1.0, lambda: False)),
            lambda: elder.commit(1),
            lambda: elder.checkpointed(0),
            lambda: elder.snapshot(0),
            lambda: elder.publish_version(0, SERVERS),
        ):
            with pytest.raises(SupersededError, match=both):
                await asyncio.to_thread(call)
        with pytest.raises(SupersededError, match=r"generation 1, .*generation 2 "):
            await asyncio.to_thread(elder.confirm)
        await asyncio.to_thread(younger.confirm)
        await asyncio.to_thread(lambda: next(younger.lease(1, 1.0, lambda: False)))
        assert (await asyncio.to_thread(younger.commit, 1)).step == 1
        assert (await queue.status()).committed_step == 1
        assert (await queue.status()).servers == SERVERS


async def test_a_learner_that_waits_for_groups_ends_when_another_one_begins():
    async with opened() as queue, learners(queue.address, 1) as (elder,):
        await asyncio.to_thread(elder.publish_version, 0, SERVERS)
        waiting = asyncio.create_task(
            asyncio.to_thread(lambda: next(elder.lease(1, HANG_SECS, lambda: False)))
        )
        while not (await queue.status()).waits:
            await asyncio.sleep(0.01)
        async with learners(queue.address, 1):
            with pytest.raises(SupersededError, match=r"generation 1 .*generation 2 "):
                await waiting


async def test_a_learner_that_begins_again_after_a_lost_reply_has_one_generation():
    async with opened() as queue, grpc.aio.insecure_channel(queue.address) as channel:
        stub = stub_of(channel)
        first = await stub.Begin(pb.BeginRequest(nonce="a"))
        assert await stub.Begin(pb.BeginRequest(nonce="a")) == first
        assert (await stub.Begin(pb.BeginRequest(nonce="b"))).generation == 2
        for nonce, bound in (("", "empty"), ("x" * 300, "at most 256 characters, got 300")):
            with pytest.raises(grpc.aio.AioRpcError, match=bound):
                await stub.Begin(pb.BeginRequest(nonce=nonce))


async def test_each_process_of_a_learner_gets_the_tokens_of_its_share_alone():
    async with opened() as queue:
        await queue.publish(0)
        permits = await queue.fill(4)
        for process, own in enumerate(([0, 2], [1, 3])):
            learner = learner_of(queue.address, share=Share(process, 2, 2))
            with contextlib.ExitStack() as stack:
                stack.push(await asyncio.to_thread(learner.__enter__))
                (chunk,) = await asyncio.to_thread(
                    lambda learner=learner: list(learner.lease(1, 30.0, lambda: None))
                )
            assert [Permit(g.prompt_index, g.attempt) for g in chunk.groups] == permits
            for i, (permit, got) in enumerate(zip(permits, chunk.groups, strict=True)):
                for sent, found in zip(group(permit).trajectories, got.trajectories, strict=True):
                    for name in ("prompt_length", "reward", "finish_reason"):
                        assert getattr(found, name) == getattr(sent, name)
                    assert (len(found), len(found.completion)) == (len(sent), len(sent.completion))
                    assert found.mask.any() == (i in own)
                    if i in own:
                        np.testing.assert_array_equal(found.tokens, sent.tokens)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (dict(num_processes=1, num_minibatches=3), "num_minibatches 3 .* 4 groups"),
        (dict(process=2, num_processes=2), r"process .*num_processes = 2\), got 2"),
    ],
)
async def test_a_share_that_does_not_divide_the_chunk_is_refused(share, said):
    async with opened() as queue, grpc.aio.insecure_channel(queue.address) as channel:
        await queue.publish(0)
        await queue.fill(4)
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            async for _ in stub_of(channel).Lease(pb.LeaseRequest(step=1, **share)):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_submission_of_a_group_is_ignored():
    async with opened() as queue:
        await queue.publish(0)
        permits = await queue.fill(4)
        assert await queue.client.submit(group(permits[0], num_tokens=9)) == "duplicate"
        (chunk,) = await queue.lease(1)
        assert [g.num_tokens for g in chunk.groups] == [10] * 4
        assert await queue.client.submit(group(permits[0])) == "duplicate"
        await queue.commit(1)
        assert await queue.client.submit(group(permits[0])) == "stale"
        assert (await queue.status()).completion_tokens == 4 * GROUP_SIZE * 3


async def test_a_permit_that_timed_out_is_never_trained_twice():
    now = 0.0
    async with opened(clock=lambda: now, permit_timeout_secs=1.0) as queue:
        await queue.publish(0)
        late, *others = await queue.client.admit(4, 1.0)
        for permit in others:
            await queue.client.submit(group(permit))
        now += 1.5  # A longer time would be a stop of the queue.
        async with asyncio.timeout(HANG_SECS):
            while not (await queue.status()).returned:
                await asyncio.sleep(0.01)
        now += 1.0  # after its back-off
        assert await queue.client.admit(4, 300.0) == [Permit(0, 1)]
        assert await queue.client.submit(group(late)) == "stale"
        assert await queue.client.submit(group(Permit(0, 1))) == "held"
        assert await queue.client.submit(group(late)) == "stale"
        (chunk,) = await queue.lease(1)
        attempts = [(g.prompt_index, g.attempt) for g in chunk.groups]
        assert attempts == [(0, 1), (1, 0), (2, 0), (3, 0)]
        status = await queue.status()
        assert (status.returned, status.stale_events) == ({"timeout": 1}, 2)


async def test_a_return_is_answered_with_the_fate_of_the_index():
    async with opened() as queue:
        await queue.publish(0)
        a, b, *_ = await queue.client.admit(4, 1.0)
        assert await queue.client.return_permit(a, "server_error", "HTTP 500") == "reissued"
        assert await queue.client.return_permit(a, "server_error") == "stale"
        assert await queue.client.return_permit(b, "equal_rewards") == "retired"
        with pytest.raises(ValueError, match="'tired'.*aborted"):
            await queue.client.return_permit(Permit(2, 0), "tired")
        given = []
        while len(given) < 2:  # One of them after its back-off.
            given += await queue.client.admit(4, 30.0)
        assert sorted(given) == [Permit(0, 1), Permit(4, 0)]
        status = await queue.status()
        assert status.returned == {"server_error": 1, "equal_rewards": 1}
        assert status.retired == {"equal_rewards": 1}
        assert status.details == {
            "server_error": "prompt 0: HTTP 500",
            "equal_rewards": "prompt 1: ",
        }


async def test_a_return_may_quote_any_text_of_a_model():
    """JSON has half a pair of surrogates as an escape, which is no character of a message."""
    async with opened() as queue:
        await queue.publish(0)
        [permit] = await queue.client.admit(1, 1.0)
        said = "KeyError: " + json.loads(r'"no tool \ud83d"')
        assert await queue.client.return_permit(permit, "environment_error", said) == "reissued"
        details = (await queue.status()).details
        assert details == {"environment_error": r"prompt 0: KeyError: no tool \ud83d"}


async def test_admit_waits_for_a_publication_and_answers_empty_when_none_comes():
    async with opened() as queue:
        assert await queue.client.admit(4, 0.05) == []
        waiting = asyncio.create_task(queue.client.admit(4, 300.0))
        await until_waits(queue, r"^admit of up to 4 permits, for \d+\.\d s$")
        await queue.publish(0)
        assert len(await waiting) == 4


async def until_waits(queue, pattern):
    async with asyncio.timeout(10.0):
        while not any(re.search(pattern, wait) for wait in (await queue.status()).waits):
            await asyncio.sleep(0.01)


async def test_a_chunk_is_the_same_for_every_caller():
    async with opened(chunk_groups=2) as queue:
        await queue.publish(0)
        permits = await queue.client.admit(4, 1.0)
        for i in (3, 1):
            await queue.client.submit(group(permits[i]))
        first = await queue.first_chunk(1)
        for i in (0, 2):
            await queue.client.submit(group(permits[i]))
        chunks = await queue.lease(1)
        assert indexes(chunks) == [[3, 1], [0, 2]]
        assert [chunk.last for chunk in chunks] == [False, True]
        assert indexes([first]) == indexes(chunks[:1])
        assert indexes(await queue.lease(1)) == indexes(chunks)


async def test_a_lease_blocks_until_its_groups_are_there():
    async with opened() as queue:
        await queue.publish(0)
        permits = await queue.client.admit(4, 1.0)
        lease = asyncio.create_task(queue.lease(1))
        for permit in reversed(permits):
            assert not lease.done()
            await queue.client.submit(group(permit))
        assert indexes(await lease) == [[0, 1, 2, 3]]


async def test_should_stop_is_called_before_a_wait_and_not_where_there_is_none(monkeypatch):
    monkeypatch.setattr(queue_client, "POLL_SECS", 300.0)
    async with opened(max_staleness=1) as queue:
        await queue.publish(0)
        await queue.fill(4)
        await queue.lease(1)
        assert queue.waited == []
        lease = asyncio.create_task(queue.lease(2))
        async with asyncio.timeout(5.0):
            while not queue.waited:
                await asyncio.sleep(0.01)
        assert queue.waited == [2] and not lease.done()
        await queue.fill(4)
        assert indexes(await lease) == [[4, 5, 6, 7]]


async def test_groups_that_a_lease_waited_for_do_not_wait_for_the_garbage_collector():
    async with opened() as queue:
        await queue.publish(0)
        gc.collect()
        gc.disable()
        try:
            lease = asyncio.create_task(queue.lease(1))
            async with asyncio.timeout(HANG_SECS):
                while len(queue.waited) < 2:  # An attempt has ended without groups.
                    await asyncio.sleep(0.01)
            await queue.fill(4)
            found = [weakref.ref(g) for chunk in await lease for g in chunk.groups]
            del lease
            assert len(found) == 4
            async with asyncio.timeout(HANG_SECS):
                while [of() for of in found if of() is not None]:
                    await asyncio.sleep(0.01)  # The threads that leased let go of their results.
        finally:
            gc.enable()


async def test_a_lease_that_is_stopped_has_no_chunk_and_takes_none():
    async with opened() as queue:
        await queue.publish(0)
        calls = []

        def should_stop():
            calls.append(True)
            return len(calls) == 3

        lease = queue.learner.lease(1, 300.0, should_stop)
        assert await asyncio.to_thread(list, lease) == []
        assert len(calls) == 3
        await queue.fill(4)
        assert indexes(await queue.lease(1)) == [[0, 1, 2, 3]]


async def test_a_lease_that_times_out_names_the_missing_groups():
    async with opened() as queue:
        await queue.publish(0)
        permits = await queue.client.admit(4, 1.0)
        for permit in permits[1:]:
            await queue.client.submit(group(permit))
        missing = r"step 1: 3 of 4 groups.*prompt_index 0 \(attempt 0, running \d+ s\).*0\.1 s"
        with pytest.raises(TimeoutError, match=missing):
            await queue.lease(1, timeout_secs=0.1)
        await queue.client.submit(group(permits[0]))
        assert indexes(await queue.lease(1)) == [[0, 1, 2, 3]]


async def test_an_event_out_of_order_is_a_failed_precondition():
    async with opened() as queue:
        await queue.publish(0)
        with pytest.raises(QueueError, match="FAILED_PRECONDITION.*prompt_index 3.*never issued"):
            await queue.client.submit(group(Permit(3, 0)))
        await queue.fill(4)
        with pytest.raises(QueueError, match="FAILED_PRECONDITION.*lease of step 2.*step 1"):
            await queue.lease(2)
        with pytest.raises(QueueError, match="FAILED_PRECONDITION.*commit of step 1.* is 0"):
            await queue.commit(1)
        await queue.lease(1)
        await queue.commit(1)
        with pytest.raises(QueueError, match="FAILED_PRECONDITION.*lease of step 1.*committed"):
            await queue.lease(1)
        await queue.publish(1)
        await queue.publish(1)
        with pytest.raises(QueueError, match="FAILED_PRECONDITION.*version 0.*version 1"):
            await queue.publish(0)


async def test_a_new_queue_starts_from_the_resume_point():
    async with opened(max_staleness=1) as queue:
        await queue.publish(0)
        permits = await queue.client.admit(8, 1.0)
        for permit in permits[:5]:
            await queue.client.submit(group(permit))
        await queue.client.return_permit(permits[6], "timeout")
        await queue.lease(1)
        resume_point = await queue.commit(1)
    async with opened(max_staleness=1) as queue:
        await queue.publish(1, resume_point=resume_point)
        again = await queue.client.admit(100, 1.0)
        expected = [Permit(4, 0), Permit(5, 0), Permit(6, 1), Permit(7, 0)]
        assert again == expected + [Permit(i, 0) for i in range(8, 12)]  # (1 + 1 + 1)·4 − 4
        for permit in again:
            await queue.client.submit(group(permit))
        assert indexes(await queue.lease(2)) == [[4, 5, 6, 7]]


async def test_malformed_bytes_are_refused_and_the_service_lives():
    async with opened() as queue, grpc.aio.insecure_channel(queue.address) as channel:
        await queue.publish(0)
        (permit,) = await queue.client.admit(1, 1.0)
        valid = wire.encode_group(group(permit)).SerializeToString()
        push = channel.unary_unary("/jaxrl_async.TrajectoryQueue/Push")
        for raw in (b"\xff" * 50, b"", valid[:-3], valid[:40], valid + b"\x07"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await push(raw, timeout=10.0)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, raw
        assert await queue.client.submit(group(permit)) == "held"


async def test_a_group_that_breaks_a_bound_is_refused_with_the_bound():
    async with opened() as queue:
        await queue.publish(0)
        (permit,) = await queue.client.admit(1, 1.0)
        with pytest.raises(InvalidTrajectoryError, match=r"length 65 .*\[1, 64\]"):
            await queue.client.submit(group(permit, num_tokens=65))
        alone = Group(permit.prompt_index, 0, group(permit).trajectories[:1])
        with pytest.raises(InvalidTrajectoryError, match="2 samples, got 1"):
            await queue.client.submit(alone)
        assert (await queue.status()).running_groups == 1
        assert await queue.client.return_permit(permit, "invalid") == "retired"


async def test_a_message_that_is_too_large_is_refused_with_both_numbers():
    async with opened(max_message_bytes=1000) as queue:
        await queue.publish(0)
        (permit,) = await queue.client.admit(1, 1.0)
        with pytest.raises(InvalidTrajectoryError, match=r"\(\d+ vs\. 1000\)"):
            await queue.client.submit(group(permit, num_tokens=10_000))
        assert await queue.client.submit(group(permit)) == "held"


async def test_a_full_queue_gives_no_permits_beyond_the_next_lease():
    async with opened(max_staleness=2, max_bytes=1) as queue:
        await queue.publish(0)
        assert len(await queue.fill(4)) == 4
        assert await queue.client.admit(4, 0.05) == []
        status = await queue.status()
        assert (status.capacity, status.depth_groups) == (8, 4)
        assert status.depth_bytes == sum(
            wire.encode_group(group(Permit(i, 0))).ByteSize() for i in range(4)
        )
        waiting = asyncio.create_task(queue.client.admit(4, 300.0))
        await queue.lease(1)
        await queue.commit(1)
        assert len(await waiting) == 4


async def test_a_commit_frees_the_memory_of_its_groups():
    service = queue_service.QueueService(
        make_admission(batch_groups=1),
        group_size=GROUP_SIZE,
        vocab_size=VOCAB_SIZE,
        max_tokens=MAX_TOKENS,
    )
    await service.PublishVersion(pb.PublishRequest(version=0))
    await service.Admit(pb.AdmitRequest(max_permits=1))
    message = wire.encode_group(group(Permit(0, 0)))
    await service.Push(message)
    assert len([reply async for reply in service.Lease(pb.LeaseRequest(step=1))]) == 2
    references = sys.getrefcount(message)
    await service.Commit(pb.CommitRequest(step=1))
    assert sys.getrefcount(message) < references


async def test_a_wait_outside_its_bound_is_refused():
    async with opened() as queue, grpc.aio.insecure_channel(queue.address) as channel:
        for wait_secs in (-1.0, 1e6, float("nan")):
            request = pb.AdmitRequest(max_permits=1, wait_secs=wait_secs)
            with pytest.raises(grpc.aio.AioRpcError, match=r"wait_secs .*\[0, 3600\]"):
                await stub_of(channel).Admit(request, timeout=10.0)


async def test_the_table_of_servers_is_watched(monkeypatch):
    monkeypatch.setattr(queue_service, "HEARTBEAT_SECS", 300.0)
    async with opened() as queue:
        fleets = queue.client.watch_fleet()
        assert await anext(fleets) == ()
        await queue.publish(0, SERVERS)
        assert await anext(fleets) == SERVERS
        await queue.publish(0, SERVERS[:1])
        assert await anext(fleets) == SERVERS[:1]
        await fleets.aclose()
        with pytest.raises(ValueError, match="http://a:1.*'ILL'.*HEALTHY"):
            await queue.publish(0, [ServerRecord("http://a:1", "ILL", 1)])


async def test_a_worker_is_told_the_published_version_with_its_permits_and_with_the_table():
    async with opened() as queue:
        client, fleets = queue.client, queue.client.watch_fleet()
        assert await anext(fleets) == () and client.table_v_pub is None
        assert await client.admit(1, 0.0) == [] and client.v_pub is None
        await queue.publish(0, SERVERS)
        assert await anext(fleets) == SERVERS and client.table_v_pub == 0
        await queue.fill(4)
        assert client.v_pub == 0
        await queue.lease(1)
        await queue.publish(1, SERVERS)
        assert await client.admit(1, 5.0) and client.v_pub == 1
        assert await anext(fleets) == SERVERS and client.table_v_pub == 1  # of the same servers
        await fleets.aclose()


async def test_the_permits_of_a_worker_that_leaves_go_to_another_at_once_with_their_attempt():
    async with opened() as queue, connected(queue.address) as other:
        await queue.publish(0)
        permits = await queue.client.admit(4, 5.0, worker="rollout-0")
        waiting = asyncio.create_task(other.client.admit(3, 300.0, worker="rollout-1"))
        await asyncio.sleep(0)
        await queue.client.leave("rollout-0")
        assert await asyncio.wait_for(waiting, HANG_SECS) == permits[:3]
        again = await other.client.admit(4, 5.0, worker="rollout-1", working_on=permits[:3])
        assert again == permits[3:]  # the same attempt: its samples are seeded alike
        assert await other.client.submit(group(permits[0])) == "held"
        assert await queue.client.submit(group(permits[0])) == "duplicate"
        status = await queue.status()
        assert (status.running_groups, status.reissue_groups, status.returned) == (3, 0, {})
        assert "rollout-0" not in [role.role for role in status.roles]


async def test_a_worker_that_comes_back_has_its_permits_again_and_an_elder_process_gives_none_away():
    async with opened() as queue, connected(queue.address) as younger:
        await queue.publish(0)
        permits = await queue.client.admit(2, 5.0, worker="rollout-0")
        assert await younger.client.admit(2, 5.0, worker="rollout-0") == permits
        await queue.client.leave("rollout-0")  # the elder process
        again = await younger.client.admit(4, 5.0, worker="rollout-1")
        assert not set(again) & set(permits)
        await younger.client.leave("rollout-0")
        third = await younger.client.admit(2, 5.0, worker="rollout-0")
        assert third == permits
        assert await younger.client.admit(4, 0.0, worker="rollout-1", working_on=again) == []


async def test_a_learner_watches_the_published_version_alone():
    async with opened() as queue:
        learner = await asyncio.to_thread(learner_of(queue.address).__enter__)
        versions = learner.watch_version()
        await queue.publish(0, SERVERS)
        assert await asyncio.to_thread(next, versions) == 0
        await queue.publish(0, SERVERS[:1])  # no change of the version
        await queue.fill(4)
        await queue.lease(1)
        await queue.publish(1, SERVERS)
        assert await asyncio.to_thread(next, versions) == 1
        rest = asyncio.create_task(asyncio.to_thread(list, versions))
        await asyncio.to_thread(learner.__exit__)
        assert await rest == []  # It ends with the client.


async def test_the_table_of_servers_has_their_speeds():
    async with opened() as queue:
        record = ServerRecord("http://a:1", "HEALTHY", 0, speed=2.5)
        await queue.publish(0, [record])
        fleets = queue.client.watch_fleet()
        assert await anext(fleets) == (record,)
        await fleets.aclose()
        for speed in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=r"http://a:1.*speed .*> 0"):
                await queue.publish(0, [ServerRecord("http://a:1", "HEALTHY", 0, speed=speed)])


async def test_a_watch_outlives_a_restart_of_the_queue():
    async with served() as address:
        client = await worker_of(address).__aenter__()
        fleets = client.watch_fleet()
        assert await anext(fleets) == ()
    async with served(address), connected(address) as queue:
        await queue.publish(0, SERVERS)
        assert await anext(fleets) == SERVERS
        await fleets.aclose()
        await client.__aexit__()


async def test_a_watch_sends_heartbeats(monkeypatch):
    monkeypatch.setattr(queue_service, "HEARTBEAT_SECS", 0.05)
    async with opened() as queue, grpc.aio.insecure_channel(queue.address) as channel:
        call = stub_of(channel).WatchFleet(pb.WatchRequest(), timeout=10.0)
        for _ in range(3):
            assert not (await call.read()).servers
        call.cancel()


async def test_the_loads_that_workers_report_are_added_up_and_sent(monkeypatch):
    monkeypatch.setattr(queue_service, "LOADS_SECS", 0.05)
    async with opened() as queue:
        await queue.publish(0, SERVERS)
        first, second = (record.address for record in SERVERS)
        fleets = queue.client.watch_fleet()
        assert await anext(fleets) == SERVERS
        await queue.client.report("rollout-0", [], {}, {first: 100, "http://gone:1": 7})
        await queue.client.report("rollout-1", [], {}, {first: 20, second: 3})
        async for records in fleets:
            if [record.load for record in records] == [120, 3]:
                break
        await queue.client.report("rollout-0", [], {}, {})
        assert [record.load for record in await anext(fleets)] == [20, 3]
        await fleets.aclose()


async def test_the_loads_of_a_silent_worker_count_no_more():
    now = 100.0
    service = queue_service.QueueService(
        make_admission(), group_size=2, vocab_size=100, max_tokens=9, clock=lambda: now
    )
    servers = [pb.ServerRecord(address="http://a:1", state="HEALTHY", version=0)]
    await service.PublishVersion(pb.PublishRequest(version=0, servers=servers))
    await service.Report(pb.RoleReport(role="rollout-0", loads={"http://a:1": 5}))
    for secs, load in ((0.0, 5), (SILENT_SECS + 1, 0)):
        now += secs
        await service.tick()
        watch = service.WatchFleet(pb.WatchRequest())
        assert [s.load for s in (await anext(watch)).servers] == [load]
        await watch.aclose()


async def test_a_failure_that_a_worker_reports_ends_a_run_without_a_group():
    async with opened() as queue:
        await queue.publish(0)
        lease = asyncio.create_task(queue.lease(1))
        await until_waits(queue, "lease of step 1")
        await queue.client.fail("rollout-0", "the reward raises\nValueError: bad")
        await queue.client.fail("rollout-1", "another")
        for call in (lease, queue.client.admit(1, 0.0), queue.lease(1)):
            with pytest.raises(RunFailedError, match=r"^the reward raises\nValueError: bad$"):
                await call
        assert (await queue.status()).failure == "the reward raises\nValueError: bad"
        await asyncio.to_thread(queue.learner.begin)  # A new start, perhaps of mended code.
        assert (await queue.status()).failure == ""
        await queue.fill(4)
        await queue.client.fail("rollout-0", "the code worked for other workers")
        assert (await queue.status()).failure == "" and len(await queue.lease(1)) == 1


async def test_a_failure_of_any_length_ends_a_run():
    """An error may quote a long answer that is white space alone."""
    async with opened() as queue:
        await queue.publish(0)
        await queue.client.fail("rollout-0", "the reward raises" + "\n" * 3000)
        with pytest.raises(RunFailedError, match="^the reward raises"):
            await queue.lease(1)


async def test_the_wait_of_a_lease_is_in_the_status_and_in_a_glance():
    async with opened() as queue:
        lease = asyncio.create_task(queue.lease(1))
        async with asyncio.timeout(HANG_SECS):
            while not queue.waited:  # Its first attempt waits for a moment alone.
                await asyncio.sleep(0.01)
        await until_waits(queue, r"^lease of step 1: 0 of 4 groups; .*version.*, for \d+\.\d s$")
        with contextlib.closing(Glance(queue.address)) as glance:
            shown = await asyncio.to_thread(glance)
        assert shown.waits[0].startswith("lease of step 1: 0 of 4 groups; ")
        await queue.publish(0)
        await queue.fill(4)
        assert len(await lease) == 1
        assert (await queue.status()).waits == ()


async def test_a_port_that_is_taken_is_named():
    async with served() as address:
        with pytest.raises(OSError, match=f"{address}.*port"):
            async with served(address):
                pass


async def test_an_address_without_a_queue_is_an_error_with_address_and_seconds(caplog):
    caplog.set_level("INFO")
    async with served() as address:
        pass
    short = dict(connect_timeout_secs=0.3, call_timeout_secs=1.0, outage_secs=1.0)
    said = rf"queue .*{address} within 0\.3 s"
    with pytest.raises(ConnectionError, match=said):
        async with worker_of(address, **short):
            pass
    with pytest.raises(ConnectionError, match=said):
        await asyncio.to_thread(learner_of(address, **short).__enter__)
    assert len(re.findall(rf"queue at {address}.* 0\.3 s", caplog.text)) == 2


async def test_calls_are_retried_while_the_queue_is_away():
    async with served() as address:
        client = await worker_of(address).__aenter__()
        learner = learner_of(address)
        await asyncio.to_thread(learner.__enter__)
    calls = [
        asyncio.create_task(client.admit(4, 10.0)),
        asyncio.create_task(asyncio.to_thread(learner.status)),
        asyncio.create_task(asyncio.to_thread(lambda: next(learner.lease(1, 10.0, lambda: None)))),
    ]
    await asyncio.sleep(0.1)
    assert not any(call.done() for call in calls)
    async with served(address):
        assert (await calls[1]).v_pub is None
        await asyncio.to_thread(learner.publish_version, 0, ())
        for permit in await calls[0]:
            await client.submit(group(permit))
        assert len((await calls[2]).groups) == 4
        await client.__aexit__()
        learner.__exit__()


async def test_a_call_ends_after_the_longest_outage_and_names_the_queue():
    short = dict(connect_timeout_secs=10.0, call_timeout_secs=0.2, outage_secs=0.5)
    async with served() as address:
        client = await worker_of(address, **short).__aenter__()
        learner = learner_of(address, **short)
        await asyncio.to_thread(learner.__enter__)
    with pytest.raises((ConnectionError, TimeoutError), match=f"Admit .*{address}.* 0.5 s"):
        await client.admit(1, 0.1)
    with pytest.raises((ConnectionError, TimeoutError), match=f"Status .*{address}.* 0.5 s"):
        await asyncio.to_thread(learner.status)
    await client.__aexit__()
    learner.__exit__()


async def test_a_report_that_is_not_taken_is_no_error():
    async with served() as address:
        client = worker_of(address, call_timeout_secs=0.5)
        await client.__aenter__()
        learner = learner_of(address, call_timeout_secs=0.5)
        await asyncio.to_thread(learner.__enter__)
    await client.report("rollout-0", [])
    await asyncio.to_thread(learner.report, "learner-0", [])
    await client.__aexit__()
    learner.__exit__()
    learner.report("learner-0", [])


def test_an_attempt_counts_with_its_deadline_at_most():
    """A process is stopped for ten minutes in its first attempt: it has as many attempts left as another."""
    now = [0.0]
    outage = queue_calls._Outage(60.0, lambda: now[0])
    for secs, goes_on in ((600.0, True), (29.0, True), (1.0, False)):
        outage.start()
        now[0] += secs
        assert outage.goes_on(TimeoutError(), 30.0) == goes_on


async def test_a_lease_waits_in_attempts_that_a_stop_of_the_queue_cannot_use_up(monkeypatch):
    """The queue is stopped in the learner's first attempt: its deadline has passed when the queue wakes."""
    monkeypatch.setattr(queue_client, "LEASE_WAIT_SECS", 0.2)
    async with opened() as queue:
        await queue.publish(0)
        call = asyncio.create_task(queue.lease(1, timeout_secs=5.0))
        while not (await queue.status()).waits:
            await asyncio.sleep(0.01)
        time.sleep(6.0)  # the queue's loop, too
        await queue.fill(4)
        assert len((await call)[0].groups) == 4
        with pytest.raises(TimeoutError, match=r"within 0.5 s: Lease .*step 2: 0 of 4 groups"):
            await queue.lease(2, timeout_secs=0.5)


async def test_a_watch_ends_when_the_queue_stays_away():
    async with served() as address:
        short = dict(connect_timeout_secs=5.0, call_timeout_secs=5.0, outage_secs=0.5)
        client = worker_of(address, **short)
        await client.__aenter__()
        fleets = client.watch_fleet()
        await anext(fleets)
    with pytest.raises(ConnectionError, match=rf"{address} within 0.5 s"):
        await anext(fleets)
    await client.__aexit__()


async def test_of_two_workers_with_one_name_the_elder_is_refused():
    async with opened() as queue, worker_of(queue.address) as younger:
        await queue.publish(0)
        permits = await queue.client.admit(2, 5.0, worker="rollout-0")
        assert await younger.admit(2, 5.0, worker="rollout-0") == permits
        with pytest.raises(SupersededError, match="rollout-0 .*--index"):
            await queue.client.admit(1, 5.0, worker="rollout-0", working_on=permits)
        assert await younger.admit(0, 0.0, worker="rollout-0", working_on=permits) == []


async def test_lengths_are_counted_by_the_fate_of_a_group():
    async with opened() as queue:
        await queue.publish(0)
        await queue.fill(3)
        (permit,) = await queue.client.admit(1, 5.0)
        for reason in ("server_error", "timeout"):  # The second one is stale, and counts nothing.
            await queue.client.return_permit(
                permit, reason, prompt_tokens=2, completion_tokens=[30, 50]
            )
        await queue.fill(1)
        assert len(await queue.lease(1)) == 1
        await queue.commit(1)
        status = await queue.status()
        assert status.lengths == {
            "prompt/admitted": 2.0,
            "completion/admitted": 3.0,
            "prompt/dropped": 2.0,
            "completion/dropped": 40.0,
            "prompt/trained": 2.0,
            "completion/trained": 3.0,
        }
        assert status.returned == {"server_error": 1}


async def test_the_status_has_the_last_report_of_each_role():
    async with opened() as queue:
        await queue.client.report("rollout-0", [Wait("group 5.0", "server a", 3.0)])
        await queue.client.report("learner-0", [])
        wait, secs = Wait("group 6.1", "server b", 4.5), {"up": 5.0, "idle": 1.5}
        await queue.client.report("rollout-0", [wait], secs)
        learner, worker = (await queue.status()).roles
        assert (learner.role, learner.waits, learner.secs) == ("learner-0", (), {})
        assert (worker.role, worker.waits, worker.secs) == ("rollout-0", (wait,), secs)
        assert 0 <= worker.silent_secs < HANG_SECS
