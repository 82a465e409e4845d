"""The journal: a killed queue restarts as it was, a restored learner gets its batches again, damage is named."""

import asyncio
import contextlib
import dataclasses
import pathlib
import random
import sqlite3
import tempfile
import threading

import grain
import hypothesis
import numpy as np
import pytest
from fixtures.queues import (
    HANG_SECS,
    SOUND_AUDIT,
    connected,
    group,
    journaled,
    make_service,
    opened,
    served,
    service_ends,
    worker_of,
)
from hypothesis import strategies as st

from jaxrl_async.queue import journal as journals
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue.client import QueueError
from jaxrl_async.queue.journal import Journal, JournalError, JournalReader
from jaxrl_async.queue.replay import ReplayQueue
from jaxrl_async.queue.service import QueueService
from jaxrl_async.records import Identity, Permit, ResumePoint, ServerRecord
from jaxrl_async.types import Group


async def copied(path: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """The files as a SIGKILL would leave them now: the log beside them, nothing brought in."""
    for file in path.parent.glob(path.name + "*"):
        (to / file.name).write_bytes(file.read_bytes())
    return to / path.name


def seen(status) -> dict:
    changing = {
        "last_push_age_secs",
        "waits",
        "stale_events",
        "lengths",
        "roles",
        "servers",
        "details",
    }
    return {k: v for k, v in dataclasses.asdict(status).items() if k not in changing}


async def some_history(queue):
    """Step 1 is committed, step 2 leased; of 7 permits 2 are held, 1 is to be reissued, 1 retired, 3 are running."""
    await queue.publish(0)
    await queue.train(1)
    await queue.fill(4)
    await queue.lease(2)
    permits = await queue.client.admit(7, 5.0, worker="w", working_on=())
    await queue.client.submit(group(permits[0]))
    await queue.client.submit(group(permits[3]))
    await queue.client.return_permit(permits[1], "server_error")
    await queue.client.return_permit(permits[2], "equal_rewards")
    return permits


async def test_a_killed_queue_restarts_as_it_was(tmp_path):
    path = tmp_path / "a" / "journal.sqlite"
    path.parent.mkdir()
    (tmp_path / "b").mkdir()
    async with journaled(path) as queue:
        permits = await some_history(queue)
        before = await queue.status()
        left = await copied(path, tmp_path / "b")
    async with journaled(left) as queue:
        assert seen(await queue.status()) == seen(before)
        (chunk,) = await queue.lease(2)
        assert [g.prompt_index for g in chunk.groups] == [4, 5, 6, 7]
        np.testing.assert_array_equal(
            chunk.groups[3].trajectories[0].tokens, group(Permit(7, 0)).trajectories[0].tokens
        )
        # A running permit may still submit, once; a group that was held is a duplicate.
        assert await queue.client.submit(group(permits[4])) == "held"
        assert await queue.client.submit(group(permits[4])) == "duplicate"
        assert await queue.client.submit(group(permits[3])) == "duplicate"
        # The returned index is issued again, with its next attempt.
        assert (await queue.client.admit(1, 5.0))[0] == Permit(permits[1].prompt_index, 1)
    reader = JournalReader(left)
    assert reader.audit() == SOUND_AUDIT


async def test_an_attempt_that_was_lost_before_a_restart_is_none_of_the_prompts_own(tmp_path):
    for reason in ("worker_lost", "timeout"):
        async with journaled(tmp_path / "j") as queue:
            await queue.publish(0)
            for _ in range(2):
                (permit,) = await queue.client.admit(1, 5.0)
                assert await queue.client.return_permit(permit, reason) == "reissued"
    async with journaled(tmp_path / "j") as queue:
        (permit,) = await queue.client.admit(1, 5.0)
        assert permit == Permit(0, 4)
        assert await queue.client.return_permit(permit, "timeout") == "retired"


async def test_a_killed_queue_leaves_no_log_beside_its_journal(tmp_path):
    path = tmp_path / "a" / "journal.sqlite"
    path.parent.mkdir()
    (tmp_path / "b").mkdir()
    async with journaled(path) as queue:
        await some_history(queue)
        left = await copied(path, tmp_path / "b")
        journals.settle(path)  # A queue that has it open is left alone.
        await queue.client.admit(1, 5.0)
    log = left.with_name("journal.sqlite-wal")
    assert log.stat().st_size
    journals.settle(left)
    assert not log.exists()
    with contextlib.closing(JournalReader(left)) as reader:
        assert reader.steps() == [1] and not any(reader.audit().values())


async def test_a_copy_that_is_asked_for_again_waits_for_the_one_at_work(tmp_path):
    """The connection of the call before was lost."""
    begun, goes_on, ended = [], threading.Event(), threading.Event()

    def archive(step, path):
        begun.append(step)
        assert (goes_on if len(begun) == 1 else ended).wait(HANG_SECS)
        path.rename(tmp_path / f"{len(list(tmp_path.glob('*.kept')))}.kept")
        ended.set()

    journal = Journal(tmp_path / "j", batch_groups=4)
    service, request = make_service(journal=journal), pb.SnapshotRequest(step=0)
    service.archive = archive
    first = asyncio.create_task(service.Snapshot(request))
    async with asyncio.timeout(HANG_SECS):
        while not begun:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(service.Snapshot(request))
        await asyncio.sleep(0)
        await journal.flushed()
        goes_on.set()
        await second
    assert len(list(tmp_path.glob("*.kept"))) == 2
    service.close()


async def test_the_run_and_its_newest_learner_survive_a_kill(tmp_path):
    path, known = tmp_path / "journal.sqlite", []
    for generation in (1, 2):
        async with journaled(path) as queue:
            if known:  # The learner of before goes on.
                queue.learner.join(1)
                await queue.publish(0)
            known.append(await asyncio.to_thread(queue.learner.begin))
            status = await queue.status()
            assert known[-1] == Identity(status.run_id, status.generation)
            assert status.generation == generation
    assert known[0].run_id == known[1].run_id
    async with journaled(tmp_path / "other.sqlite") as queue:
        assert (await queue.status()).run_id != known[0].run_id


async def test_a_watch_of_the_fleet_takes_the_run_of_the_next_queue(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        async with served(journal=Journal(tmp_path / "j", batch_groups=4)) as address:
            queue = await stack.enter_async_context(connected(address))
            first, watch = queue.client.run_id, queue.client.watch_fleet()
            assert await anext(watch) == ()
        journal = Journal(tmp_path / "other", batch_groups=4)
        await stack.enter_async_context(served(address, journal=journal))
        assert await anext(watch) == ()
        assert queue.client.run_id == journal.identity()[0].run_id != first
        await watch.aclose()


async def test_workers_find_the_servers_that_the_learner_published_last(tmp_path):
    """Without them nothing is generated and no step ends, so the learner would never publish again."""
    servers = (ServerRecord("http://a:1", "HEALTHY", 1), ServerRecord("http://b:1", "DEAD", None))
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0, [ServerRecord("http://a:1", "STALE", 0)])
        await queue.publish(0, servers)
    async with journaled(tmp_path / "j") as queue:
        watch = queue.client.watch_fleet()
        assert await anext(watch) == servers
        await watch.aclose()


async def test_the_version_of_a_permit_survives_a_kill(tmp_path):
    path, values = tmp_path / "journal.sqlite", {"weight_delay": 0}
    async with journaled(path, **values) as queue:
        await queue.publish(0)
        for _ in range(4):
            (permit,) = await queue.client.admit(1, 5.0)
            assert await queue.client.submit(group(permit, version=0)) == "held"
        await queue.lease(1)
        await queue.commit(1)
        await queue.publish(1)
        permits = await queue.client.admit(3, 5.0)
    async with journaled(path, **values) as queue:
        outcomes = [
            await queue.client.submit(group(permit, version=version))
            for permit, version in zip(permits, (0, 1, 2), strict=True)
        ]
        assert outcomes == ["over_age", "held", "foreign_version"]
        status = await queue.status()
        assert status.returned == {"over_age": 1, "foreign_version": 1}
        assert status.lengths["completion/dropped"] == 3
        missing = {Permit(p.prompt_index, 1) for p in (permits[0], permits[2])}
        async with asyncio.timeout(60):
            while missing:  # They come after a back-off, others before.
                missing -= set(await queue.client.admit(1, 5.0))


def as_format_2(connection) -> None:
    for table in journals._CHECKED:
        connection.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    connection.execute("UPDATE meta SET value = '2' WHERE key = 'format'")
    connection.commit()


async def test_the_order_of_submission_survives(tmp_path):
    async with journaled(tmp_path / "j", chunk_groups=2) as queue:
        await queue.publish(0)
        permits = await queue.client.admit(4, 5.0)
        for i in (3, 0, 2):
            await queue.client.submit(group(permits[i]))
    async with journaled(tmp_path / "j", chunk_groups=2) as queue:
        await queue.client.submit(group(permits[1]))
        chunks = await queue.lease(1)
        assert [[g.prompt_index for g in c.groups] for c in chunks] == [[3, 0], [2, 1]]


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
async def test_a_group_that_is_overtaken_leaves_queue_and_journal(tmp_path, monkeypatch, killed):
    path = tmp_path / "j"
    values = dict(batch_groups=2, chunk_groups=2, max_staleness=1, weight_delay=0)

    async def submit(queue, version, *permits):
        for permit in permits:
            assert await queue.client.submit(group(permit, version=version)) == "held"

    async with journaled(path, **values) as queue:
        await queue.publish(0)
        slow, waits, *others = await queue.client.admit(4, 5.0)
        await submit(queue, 0, *others)
        await queue.lease(1)
        await queue.commit(1)
        await queue.publish(1)
        await submit(queue, 1, *await queue.client.admit(2, 5.0))
        await submit(queue, 0, waits)
        with monkeypatch.context() as patch:
            if killed:  # after it wrote the lease, and before the rest
                patch.setattr(QueueService, "_drop_overtaken", lambda self: [])
            (chunk,) = await queue.lease(2)
        assert [g.prompt_index for g in chunk.groups] == [4, 5]
        assert (await queue.status()).depth_groups == killed
    async with journaled(path, **values) as queue:
        leasing = asyncio.create_task(queue.lease(3))
        await queue.commit(2)
        await queue.publish(2)
        async with asyncio.timeout(HANG_SECS):
            while not (status := await queue.status()).returned:
                await asyncio.sleep(0.01)
        assert (status.returned, status.depth_groups) == ({"overtaken": 1}, 0)
        assert status.depth_bytes == 0
        assert await queue.client.submit(group(slow, version=0)) == "overtaken"
        permits = await queue.client.admit(2, 5.0)
        assert permits == [Permit(slow.prompt_index, 1), Permit(waits.prompt_index, 1)]
        await submit(queue, 2, *permits)
        (chunk,) = await leasing
        assert [g.attempt for g in chunk.groups] == [1, 1]
        await queue.commit(3)
    with contextlib.closing(JournalReader(path)) as journal:
        assert journal.audit() == SOUND_AUDIT
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (num_bytes,) = connection.execute("SELECT SUM(LENGTH(message)) FROM groups").fetchone()
        totals = dict(connection.execute("SELECT name, value FROM totals").fetchall())
    assert totals["message_bytes"] == num_bytes and totals["returned/overtaken"] == 2


async def test_a_learner_restored_earlier_gets_the_same_batches_again(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        chunks, resume_points = [], []
        for step in (1, 2, 3):
            await queue.fill(4)
            chunks += await queue.lease(step)
            resume_points.append(await queue.commit(step))
            await queue.publish(step)
        await assert_steps_again(queue, chunks, resume_points)
    async with journaled(tmp_path / "j") as queue:
        await assert_steps_again(queue, chunks, resume_points)


async def assert_steps_again(queue, chunks, resume_points):
    """Steps 2 and 3 are as they were, and nothing else has changed."""
    for step in (2, 3):
        (chunk,) = await queue.lease(step)
        for got, sent in zip(chunk.groups, chunks[step - 1].groups, strict=True):
            assert (got.prompt_index, got.attempt) == (sent.prompt_index, sent.attempt)
            np.testing.assert_array_equal(
                got.trajectories[0].logprobs, sent.trajectories[0].logprobs
            )
        assert await queue.commit(step) == resume_points[step - 1]
    status = await queue.status()
    assert (status.committed_step, status.v_pub, status.frontier) == (3, 3, 12)
    await queue.publish(3)  # The servers hold it again; versions do not go back.
    with pytest.raises(QueueError, match="version 2 .*version 3"):
        await queue.publish(2)


async def test_admission_is_bounded_by_the_history_after_recovery(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        permits = await queue.client.admit(100, 5.0)
        assert len(permits) == 12  # (η 2 + v 0 + 1) · 4
        for permit in permits[:5]:
            await queue.client.submit(group(permit))
    async with journaled(tmp_path / "j") as queue:
        status = await queue.status()
        assert (status.capacity, status.running_groups, status.depth_groups) == (0, 7, 5)
        assert await queue.client.admit(100, 0.0) == []


async def test_a_restarted_worker_is_given_its_permits_again(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        ask = queue.client.admit
        mine = await ask(3, 5.0, worker="mine", working_on=())
        other = await ask(2, 5.0, worker="other", working_on=())
        # A reply was lost: the worker has one permit only.
        assert await ask(5, 5.0, worker="mine", working_on=mine[:1]) == [
            *mine[1:],
            *[Permit(i, 0) for i in (5, 6, 7)],
        ]
    async with journaled(tmp_path / "j") as queue:
        again = await queue.client.admit(8, 5.0, worker="other", working_on=())
        assert again[:2] == other
        assert not set(again) & set(mine)


async def test_groups_before_the_oldest_checkpoint_are_forgotten(tmp_path):
    async with journaled(tmp_path / "j", keep="checkpointed") as queue:
        await queue.publish(0)
        await queue.train(1, 2, 3)
        await queue.checkpointed(2)
        (chunk,) = await queue.lease(3)
        assert len(chunk.groups) == 4
        with pytest.raises(QueueError, match="groups of step 2 are deleted.*journal.keep"):
            await queue.lease(2)
        await forgotten(queue.journal, 4)
    reader = JournalReader(tmp_path / "j")
    assert reader.audit()["gap"] == []
    assert reader[8].prompt_index == 8
    with pytest.raises(JournalError, match="j: .*prompt_index 0 is deleted"):
        reader[0]


async def test_a_copy_resumes_at_its_checkpoint_without_the_groups_before(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await some_history(queue)
        before, chunks = await queue.status(), await queue.lease(2)
        whole = (await queue.journal.snapshot(0)).rename(tmp_path / "0")
        copy = (await queue.journal.snapshot(1)).rename(tmp_path / "1")
    # A checkpoint may be behind the journal: steps after it are trained again.
    async with journaled(whole) as queue:
        assert await num_groups(queue.journal) == 4 + 4 + 2
        assert [g.prompt_index for g in (await queue.lease(1))[0].groups] == [0, 1, 2, 3]
    async with journaled(copy, max_bytes=1) as queue:
        assert seen(await queue.status()) == seen(before)
        assert await num_groups(queue.journal) == 4 + 2
        found = await queue.lease(2)
        for one, other in zip(found[0].groups, chunks[0].groups, strict=True):
            assert one.prompt_index == other.prompt_index
            np.testing.assert_array_equal(one.trajectories[0].tokens, other.trajectories[0].tokens)
        with pytest.raises(QueueError, match="prompt_index 0 is deleted.*where they were trained"):
            await queue.lease(1)
        await queue.commit(2)
        await queue.checkpointed(2)
        await forgotten(queue.journal, 2)  # It counts the bytes that it has.
    with contextlib.closing(JournalReader(copy)) as reader:
        assert reader.steps() == [1, 2] and reader.audit() == SOUND_AUDIT


async def num_groups(journal) -> int:
    (count,) = await journal._put(lambda c: c.execute("SELECT COUNT(*) FROM groups").fetchone())
    return count


async def forgotten(journal, count) -> None:
    """Waits until `count` groups are left."""
    for _ in range(3000):
        if await num_groups(journal) <= count:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"there are {await num_groups(journal)} groups, not {count}")


@contextlib.contextmanager
def watched_transactions(journal):
    """Groups deleted in each transaction from now on, of those that deleted some."""
    deleted = [0]

    def seen(statement):
        if statement.startswith("DELETE FROM groups"):
            deleted[-1] += 1
        elif statement == "COMMIT" and deleted[-1]:
            deleted.append(0)

    journal._connection.set_trace_callback(seen)
    yield deleted
    journal._connection.set_trace_callback(None)


@pytest.mark.parametrize("bounds", [{"SLICE_GROUPS": 3}, {"SLICE_BYTES": 3 * 200}])
async def test_groups_are_forgotten_in_slices(tmp_path, monkeypatch, bounds):
    for name, value in bounds.items():
        monkeypatch.setattr(journals, name, value)
    async with journaled(tmp_path / "j", keep="checkpointed") as queue:
        await queue.publish(0)
        await queue.train(1, 2, 3)
        with watched_transactions(queue.journal) as deleted:
            await queue.checkpointed(2)
            await forgotten(queue.journal, 4)
        assert sum(deleted) == 8 and 1 <= max(deleted) <= 3


async def test_what_one_process_has_not_forgotten_the_next_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal, "_forget", lambda journal, c: None)
    async with journaled(tmp_path / "j", keep="checkpointed") as queue:
        await queue.publish(0)
        await queue.train(1, 2, 3)
        await queue.checkpointed(2)
        assert await num_groups(queue.journal) == 12
        with pytest.raises(QueueError, match="groups of step 2 are deleted"):
            await queue.lease(2)
    monkeypatch.undo()
    async with journaled(tmp_path / "j", keep="checkpointed") as queue:
        await forgotten(queue.journal, 4)
        assert len((await queue.lease(3))[0].groups) == 4


def test_the_journals_connection_is_not_read_while_its_thread_forgets(tmp_path, monkeypatch):
    forgetting, go_on, recovered = (threading.Event() for _ in range(3))

    def forget(journal, connection):
        journal._may_forget = False
        forgetting.set()
        assert go_on.wait(HANG_SECS)

    monkeypatch.setattr(Journal, "_forget", forget)
    monkeypatch.setattr(journals, "_recover", lambda connection, path: recovered.set())
    journal = Journal(tmp_path / "j", batch_groups=1, max_bytes=1)
    assert forgetting.wait(HANG_SECS)
    thread = threading.Thread(target=journal.recover)
    thread.start()
    assert not recovered.wait(0.1)
    go_on.set()
    assert recovered.wait(HANG_SECS)
    thread.join(HANG_SECS)
    journal.close()


async def test_beyond_its_bound_the_oldest_steps_with_a_checkpoint_are_forgotten(tmp_path):
    async with journaled(tmp_path / "j", max_bytes=10**6) as queue:
        await queue.publish(0)
        await queue.train(1, 2, 3)
        await queue.checkpointed(2)
        assert len((await queue.lease(1))[0].groups) == 4
    path = tmp_path / "j"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (size,) = connection.execute("SELECT SUM(LENGTH(message)) FROM groups").fetchone()
    # Room for two steps of three: the first goes. For half a step: the second goes too, the third has no checkpoint.
    for bound, left in ((size * 3 // 4, 8), (size // 6, 4)):
        async with journaled(path, max_bytes=bound) as queue:
            await forgotten(queue.journal, left)
            await queue.checkpointed(2)
            await queue.journal.flushed()
            assert await num_groups(queue.journal) == left
            assert len((await queue.lease(3))[0].groups) == 4
    assert JournalReader(path)[8].prompt_index == 8


async def test_a_journal_of_an_older_format_is_taken_over(tmp_path):
    path = tmp_path / "j"
    async with journaled(path) as queue:
        await some_history(queue)
        before = await queue.status()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        as_format_2(connection)
    with contextlib.closing(JournalReader(path)) as reader:
        assert len(reader) == 4 and len(reader.chunk(1, 0)[0]) == 4
    for _ in range(2):
        async with journaled(path) as queue:
            assert seen(await queue.status()) == seen(before)


def recovery_steps(path: pathlib.Path, num_trained: int, monkeypatch) -> int:
    """Instructions of SQLite's machine from the opening of a journal to its state, with so many trained indexes."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for i in range(10**6, 10**6 + num_trained):
            connection.execute(
                "INSERT INTO permits VALUES (?, 0, 'trained', '', 'w', 3, 0, NULL)", (i,)
            )
            connection.execute(
                "INSERT INTO returns (prompt_index, attempt, reason, unix_time) VALUES (?, 0, 'dropped', 0)",
                (i,),
            )
            connection.execute(
                "INSERT INTO groups (prompt_index, attempt, checksum, message) VALUES (?, 0, 0, 'x')",
                (i,),
            )
        connection.commit()
    steps, connect = [0], sqlite3.connect

    def count():
        steps[0] += 1

    def counted(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.set_progress_handler(count, 10)
        return connection

    monkeypatch.setattr(sqlite3, "connect", counted)
    journal = Journal(path, batch_groups=4)
    assert journal.recover().state.held
    monkeypatch.undo()
    journal.close()
    return steps[0] * 10


async def test_a_restart_reads_no_more_of_a_long_history(tmp_path, monkeypatch):
    counts = []
    for num_trained in (10, 10_000):
        path = tmp_path / str(num_trained)
        async with journaled(path) as queue:
            await some_history(queue)
        monkeypatch.setattr(journals, "MAX_CHECKED_BYTES", 0)
        counts.append(recovery_steps(path, num_trained, monkeypatch))
    assert counts[1] <= counts[0] + 100


async def test_with_keep_all_nothing_is_forgotten(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        await queue.train(1)
        await queue.checkpointed(1)
        assert len((await queue.lease(1))[0].groups) == 4


async def test_a_queue_that_started_from_a_resume_point_restarts_as_it_was(tmp_path):
    start = ResumePoint(
        5, 26, tuple(Permit(i, 1) for i in (3, 20, 25)), {"invalid": 3}, {"invalid": 3}
    )
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(5, resume_point=start)
        await queue.fill(4)
        await queue.lease(6)
        before = await queue.status()
    async with journaled(tmp_path / "j") as queue:
        assert seen(await queue.status()) == seen(before)
        await queue.commit(6)
    assert JournalReader(tmp_path / "j").audit() == SOUND_AUDIT


async def test_a_worker_that_waits_gets_the_permits_of_a_resume_point(tmp_path):
    servers = [ServerRecord("http://a", "HEALTHY", 5)]
    start = ResumePoint(5, 23, tuple(Permit(i, 1) for i in (3, 20, 22)), {}, {})
    async with journaled(tmp_path / "j") as queue:
        waiting = asyncio.create_task(queue.client.admit(3, 5.0, worker="w", working_on=()))
        while not (await queue.status()).waits:
            await asyncio.sleep(0.01)
        await queue.publish(5, servers=servers, resume_point=start)
        permits = await waiting
        assert permits == list(start.outstanding)
        for permit in permits:
            await queue.client.submit(group(permit))
        await queue.fill(1)
        await queue.lease(6)
        await queue.commit(6)
    async with journaled(tmp_path / "j") as queue:
        assert (await queue.status()).committed_step == 6
        assert [s.address for s in (await queue.status()).servers] == ["http://a"]


async def test_rows_of_a_sample_survive_a_kill_and_are_replayed(tmp_path):
    def rows_of(permit):
        row = group(permit).trajectories[0]
        other = dataclasses.replace(row, tokens=row.tokens + 1, reward=1.0, prompt_length=1)
        rows = [[row, dataclasses.replace(other, reward=0.0)], [row]]
        return Group.of_samples(permit.prompt_index, permit.attempt, rows)

    (tmp_path / "b").mkdir()
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        for permit in await queue.client.admit(4, 5.0):
            assert await queue.client.submit(rows_of(permit)) == "held"
        left = await copied(tmp_path / "j", tmp_path / "b")
    async with journaled(left) as queue:
        (chunk,) = await queue.lease(1)
        await queue.commit(1)
        assert (await queue.status()).lengths["completion/trained"] == (3 + 4 + 3) / 2
    reader = JournalReader(left)
    (replayed,) = ReplayQueue(reader, 1).lease(1, 1.0, lambda: False)
    for found in (chunk, replayed):
        assert [g.prompt_index for g in found.groups] == [0, 1, 2, 3]
        for of_permit in found.groups:
            assert of_permit.num_rows == (2, 1)
            sent = rows_of(Permit(of_permit.prompt_index, 0)).trajectories
            for row, as_sent in zip(of_permit.trajectories, sent, strict=True):
                assert row.tokens.tolist() == as_sent.tokens.tolist()
                assert (row.reward, row.prompt_length) == (0.0, as_sent.prompt_length)


async def test_a_journal_is_a_dataset(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        await queue.train(1, 2)
    data = grain.MapDataset.source(JournalReader(tmp_path / "j")).shuffle(seed=0)
    assert sorted(data[i].prompt_index for i in range(len(data))) == list(range(8))


async def test_no_cursor_leaves_the_journals_thread(tmp_path, monkeypatch):
    """Dropped in another thread, it may reset a running statement: "bad parameter or other API misuse"."""
    given, answer = [], journals._answer
    monkeypatch.setattr(
        journals,
        "_answer",
        lambda futures, outcomes: given.extend(outcomes) or answer(futures, outcomes),
    )
    async with journaled(tmp_path / "j") as queue:
        await some_history(queue)
        await queue.publish(1, [ServerRecord("http://a:1", "HEALTHY", 1)])
        await queue.checkpointed(1)
        await queue.lease(1)
    assert len(given) > 20
    assert not [outcome for outcome in given if isinstance(outcome, sqlite3.Cursor)]


def rotten(path, statement, *values):
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def rewritten(path, statement):
    """As a program does that is wrong: the checksums are right."""
    with contextlib.closing(journals._connect(path)) as connection, connection:
        connection.execute(statement)
        for table, columns in journals._CHECKED.items():
            connection.execute(f"UPDATE {table} SET checksum = checksum_of({columns})")


async def with_groups(path):
    async with journaled(path) as queue:
        await queue.publish(0)
        await queue.fill(4)
        await queue.lease(1)


async def test_a_group_that_was_damaged_is_named(tmp_path):
    await with_groups(tmp_path / "j")
    rotten(tmp_path / "j", "UPDATE groups SET message = zeroblob(200) WHERE prompt_index = 2")
    with pytest.raises(JournalError, match="j: .*prompt_index 2 is damaged"):
        Journal(tmp_path / "j", batch_groups=4).recover()


async def test_a_group_that_is_gone_is_named(tmp_path):
    await with_groups(tmp_path / "j")
    rotten(tmp_path / "j", "DELETE FROM groups WHERE prompt_index = 2")
    with pytest.raises(JournalError, match=r"j: .*\[2\] are missing"):
        Journal(tmp_path / "j", batch_groups=4).recover()


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("meta", "value = json_quote('another') WHERE key = 'run_id'"),
        ("permits", "completion_tokens = completion_tokens + 1 WHERE state = 'leased'"),
        ("chunks", "prompt_indexes = '[4, 5, 7, 6]' WHERE step = 2"),
        ("commits", "position = position || ' '"),
        ("publications", "version = 7"),
        ("totals", "value = value + 1"),
    ],
)
async def test_a_row_that_was_altered_is_named_by_its_table(table, change, tmp_path):
    path = tmp_path / "j"
    async with journaled(path) as queue:
        await some_history(queue)
    rotten(path, f"UPDATE {table} SET {change}")
    damaged = pytest.raises(JournalError, match=rf"{path}: row .* of {table} is damaged .*move it")
    with damaged, contextlib.closing(Journal(path, batch_groups=4)) as journal:
        journal.recover()
    with damaged:
        JournalReader(path)


async def test_a_commit_that_was_altered_is_named_where_a_learner_is_restored_to_it(tmp_path):
    path = tmp_path / "j"
    async with journaled(path) as queue:
        await queue.publish(0)
        await queue.train(1, 2)
    rotten(path, "UPDATE commits SET unix_time = 5 WHERE step = 1")
    rotten(path, "UPDATE chunks SET last = 0 WHERE step = 1")
    with contextlib.closing(Journal(path, batch_groups=4)) as journal:
        journal.recover()
        with pytest.raises(JournalError, match="of commits is damaged"):
            await journal.resume_point(1)
        with pytest.raises(JournalError, match="of chunks is damaged"):
            await journal.chunk(1, 0)


async def test_an_audit_finds_contradictions(tmp_path):
    path = tmp_path / "j"
    async with journaled(path) as queue:
        await queue.publish(0)
        await queue.train(1, 2)
    rewritten(path, "UPDATE chunks SET prompt_indexes = '[0, 1, 2, 3]' WHERE step = 2")
    rotten(path, "DELETE FROM permits WHERE prompt_index = 6")
    rotten(path, "DELETE FROM commits WHERE step = 1")
    audit = JournalReader(path).audit()
    assert audit["lost"] == [6]
    assert audit["gap"] == [1]
    assert audit["stray"] == [4, 5, 7]
    rewritten(path, "INSERT INTO commits VALUES (1, '{}', 0, NULL)")
    assert JournalReader(path).audit()["doubled"] == [0, 1, 2, 3]


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "j").write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError, match="j is damaged"):
        Journal(tmp_path / "j", batch_groups=4)


async def test_a_damaged_file_is_refused(tmp_path):
    await with_groups(tmp_path / "j")
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[4096 * 2 : 4096 * 4] = b"\x07" * 8192
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(JournalError, match="j is damaged"):
        Journal(tmp_path / "j", batch_groups=4).recover()


def test_a_journal_of_other_batches_is_refused(tmp_path):
    Journal(tmp_path / "j", batch_groups=4).close()
    with pytest.raises(JournalError, match=r"j .*learner\.groups_per_step.* 4.* 8"):
        Journal(tmp_path / "j", batch_groups=8)


def test_one_process_has_the_journal(tmp_path):
    first = Journal(tmp_path / "j", batch_groups=4)
    with pytest.raises(JournalError, match="another process has it open"):
        Journal(tmp_path / "j", batch_groups=4)
    with pytest.raises(JournalError, match="another process has it open"):
        JournalReader(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j", batch_groups=4).close()


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(JournalError, match="nowhere/j: .*directory"):
        Journal(tmp_path / "nowhere" / "j", batch_groups=4)


def test_a_network_file_system_needs_the_other_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "file_system_of", lambda path: "nfs4")
    with pytest.raises(JournalError, match=r"j .*\(nfs4\).*journal\.mode.*delete"):
        Journal(tmp_path / "j", batch_groups=4)
    Journal(tmp_path / "j", batch_groups=4, mode="delete").close()


def test_the_kind_of_a_file_system_is_found():
    assert journals.file_system_of("/proc/self") == "proc"


async def test_a_full_disk_stops_the_queue_and_says_so(tmp_path):
    journal = Journal(tmp_path / "j", batch_groups=4)
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(JournalError, match="j: .*full"):
        async with opened(journal=journal, max_staleness=2) as queue:
            await queue.publish(0)
            with pytest.raises(QueueError, match="j: .*full"):
                for permit in await queue.client.admit(12, 5.0):
                    await queue.client.submit(group(permit, num_tokens=60))
            await service_ends()  # It checks its journal.
    # Every answered event is there, and a queue with room starts from it.
    again = Journal(tmp_path / "j", batch_groups=4)
    state, messages, *_ = again.recover()
    assert len(state.held) == len(messages) > 0
    again.close()


async def test_a_queue_without_memory_ends_and_the_next_one_has_what_was_answered(
    tmp_path, monkeypatch
):
    path, short = tmp_path / "j", {"outage_secs": 0.1}

    async def fail(*_):
        raise MemoryError

    with pytest.raises(MemoryError):
        async with journaled(path) as queue, worker_of(queue.address, **short) as worker:
            await queue.publish(0)
            permits = await worker.admit(4, 5.0)
            assert await worker.submit(group(permits[0])) == "held"
            with monkeypatch.context() as patch, pytest.raises(ConnectionError, match="of memory"):
                patch.setattr(queue.journal, "submitted", fail)
                await worker.submit(group(permits[1]))
            await service_ends()
    async with journaled(path) as queue:
        outcomes = [await queue.client.submit(group(permit)) for permit in permits]
        assert outcomes == ["duplicate", "held", "held", "held"]
        assert len((await queue.lease(1))[0].groups) == 4
        await queue.commit(1)
    assert JournalReader(path).audit() == SOUND_AUDIT


class Sound:
    """A journal that is in order; its repr is short."""

    def __init__(self, raw, messages):
        self.raw, self.messages = raw, messages


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a journal with groups, and what it says."""
    path = tmp_path_factory.mktemp("sound") / "j"
    asyncio.run(with_groups(path))
    journal = Journal(path, batch_groups=4)
    _, messages, *_ = journal.recover()
    journal.close()
    return Sound(path.read_bytes(), messages)


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_flipped_bytes_are_an_error_with_the_files_name_or_do_no_harm_to_a_group(sound, seed):
    raw, messages = sound.raw, sound.messages
    broken, rng = bytearray(raw), random.Random(seed)
    for _ in range(rng.randint(1, 8)):
        broken[rng.randrange(len(raw))] ^= rng.randint(1, 255)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "j"
        path.write_bytes(broken)
        try:
            journal = Journal(path, batch_groups=4)
            try:
                found = journal.recover()
            finally:
                journal.close()
        except JournalError as error:
            assert str(path) in str(error)
            return
        # A row may be gone with its page; a group that is there has the bytes that were submitted.
        for index, message in (found.messages if found else {}).items():
            assert message == messages.get(index, message)
