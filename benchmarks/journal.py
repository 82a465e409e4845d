"""The journal at the size of a long run: a queue's restart, and forgetting while calls go on.

    python benchmarks/journal.py [--indexes=10000000] [--gigabytes=100] [--forget=22] [--sparse] [--directory=DIR]

**restart.** A journal with so many indexes, all trained but the last 512, and so many gigabytes of groups, is made up:
rows are written to the file directly, their messages zeros. With --sparse their blocks are then given back to the disk
(`fallocate --dig-holes`; a quarter of the size is left, in so many pieces that deleting the file takes minutes). The
queue that wrote it is killed with a full log. Then, in a new process: seconds from the journal's opening to its state,
`RESTARTS` times, the page cache emptied before where this is root. `before` opens it as format 1 did: every row is
read, and the file is checked whole.

**forget.** A journal holds so many gigabytes of groups of 1.7 MB, with random bytes. 16 callers submit such groups, one
after the other, 20 a second together, first alone and then while the queue forgets the gigabytes. Milliseconds of a
call (`admitted` and `submitted`) as median, p99 and the longest. `at once` is one transaction that overwrites what it
deletes, as before.

**rows.** Steps of 64 groups are admitted, submitted, leased, trained and committed, with the checksums of rows (format
3) and without, in turns. CPU seconds of the process and seconds, a group; the journals lie in memory where /dev/shm is.

Results are printed and written to benchmarks/results/journal.json, or to --out, part by part; --smoke is quick.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import pathlib
import sqlite3
import subprocess
import tempfile
import time
import zlib

import numpy as np
import record

from jaxrl_async.queue import journal as journals
from jaxrl_async.queue.journal import Journal
from jaxrl_async.queue.leases import FixedChunk
from jaxrl_async.records import Permit, ResumePoint

ROOT = pathlib.Path(__file__).parent.parent
BATCH = 512
GROUP_BYTES = 1_700_000
NUM_OPEN = 512
RESTARTS = 5
NUM_CALLERS = 16
CALLS_A_SECOND = 20.0
ALONE_SECS = 20.0
DIG_BYTES = 4 << 30
ROWS_BATCH, ROWS_BYTES = 64, (1_000, 200_000)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--indexes", type=int, default=10_000_000)
    parser.add_argument(
        "--gigabytes", type=float, default=100.0, help="of the journal that restarts"
    )
    parser.add_argument("--forget", type=float, default=22.0, help="gigabytes that are forgotten")
    parser.add_argument("--sparse", action="store_true", help="needs a quarter of the room")
    parser.add_argument("--part", choices=("restart", "forget", "rows"), help="one alone")
    parser.add_argument("--directory", type=pathlib.Path, help="where the journals are made")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--smoke", action="store_true", help="20,000 indexes, 0.2 GB, 0.1 GB, 2 steps"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.indexes, args.gigabytes, args.forget = 20_000, 0.2, 0.1
    results = args.out / "journal.json"
    result = record.read(results) if args.part else {}

    def add(name: str, found: dict) -> None:
        result[name] = found
        print(json.dumps({name: found}, indent=2), flush=True)
        result.update(record.write(results, result, seeds=[0], raw=[name], part=name))

    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = pathlib.Path(directory) / "journal.sqlite"
        if args.part in (None, "restart"):
            num_bytes = round(args.gigabytes * 1e9)
            add("restart", restart(path, args, num_bytes))
            _remove(path)
        alone_secs = 2.0 if args.smoke else ALONE_SECS
        for name, slices in (("in slices", True), ("at once", False)):
            if args.part in (None, "forget"):
                num_bytes = round(args.forget * 1e9)
                add(f"forget {name}", asyncio.run(forget(path, num_bytes, slices, alone_secs)))
                _remove(path)
        if args.part in (None, "rows"):
            add("rows", rows(2 if args.smoke else 50, 2 if args.smoke else 5))


def restart(path: pathlib.Path, args: argparse.Namespace, num_bytes: int) -> dict:
    """Seconds of restarts of a journal that is made up here."""
    num_groups = make_up(path, args.indexes, num_bytes, args.sparse)
    _in_process(_leave_a_full_log, path)
    log = _log_of(path).read_bytes()
    size = path.stat().st_size
    secs, before = [], []
    for _ in range(1 if args.smoke else RESTARTS):
        _log_of(path).write_bytes(log)
        secs.append(_in_process(_seconds_to_state, path))
    before.append(_in_process(_seconds_of_before, path))
    return {
        "indexes": args.indexes,
        "groups": num_groups,
        "file_gb": size / 1e9,
        "log_mb": len(log) / 1e6,
        "sparse": args.sparse,
        "cold": os.geteuid() == 0,
        "secs": [round(s, 3) for s in secs],
        "before_secs": [round(s, 1) for s in before],
    }


def make_up(path: pathlib.Path, num_indexes: int, num_bytes: int, sparse: bool) -> int:
    """Writes the rows of a long run; returns the number of groups."""
    Journal(path, batch_groups=BATCH).close()
    num_trained = num_indexes - NUM_OPEN
    size = min(GROUP_BYTES, num_bytes // NUM_OPEN // 2)
    num_groups = min(num_bytes // size, num_indexes)
    with contextlib.closing(journals._connect(path, isolation_level=None)) as c:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
            c.execute(f"PRAGMA {pragma}")
        c.execute("BEGIN")
        c.executemany(
            "INSERT INTO permits VALUES (?, 0, 'trained', '', 'rollout-0', 1000, 0, NULL)",
            ((i,) for i in range(num_trained)),
        )
        c.executemany(
            "INSERT INTO permits VALUES (?, 0, 'held', '', 'rollout-0', 1000, 0, NULL)",
            ((i,) for i in range(num_trained, num_indexes)),
        )
        c.executemany(
            "INSERT INTO returns (prompt_index, attempt, reason, unix_time) VALUES (?, 0, 'dropped', 0)",
            ((i,) for i in range(0, num_trained, 10)),
        )
        last = num_trained // BATCH
        c.executemany(
            "INSERT INTO chunks VALUES (?, 0, 1, ?, NULL)",
            ((s + 1, json.dumps(list(range(s * BATCH, (s + 1) * BATCH)))) for s in range(last)),
        )
        point = json.dumps(ResumePoint(0, 0, (), {}, {}).to_json())
        c.executemany(
            "INSERT INTO commits VALUES (?, ?, 0, NULL)",
            (
                (s, json.dumps(json.loads(point) | {"step": s, "frontier": s * BATCH}))
                for s in range(1, last + 1)
            ),
        )
        c.execute(
            "INSERT INTO publications (version, run_epoch, unix_time) VALUES (?, 0, 0)", (last,)
        )
        totals = {"message_bytes": num_groups * size, "completion_tokens": num_indexes * 1000}
        c.executemany("INSERT INTO totals VALUES (?, ?, NULL)", totals.items())
        c.execute(
            "INSERT INTO totals VALUES ('returned/dropped', ?, NULL)",
            (len(range(0, num_trained, 10)),),
        )
        for table, columns in journals._CHECKED.items():
            c.execute(f"UPDATE {table} SET checksum = checksum_of({columns})")
        c.execute("COMMIT")
        checksum, done = zlib.crc32(bytes(size)), 0
        for first in range(0, num_groups, per := max(1, DIG_BYTES // size)):
            c.execute("BEGIN")
            c.executemany(
                "INSERT INTO groups (prompt_index, attempt, checksum, message) VALUES (?, 0, ?, zeroblob(?))",
                (
                    (num_indexes - 1 - i, checksum, size)
                    for i in range(first, min(first + per, num_groups))
                ),
            )
            c.execute("COMMIT")
            end = path.stat().st_size
            if sparse:
                _dig(path, done, end - done)
            done = end
    return num_groups


def _dig(path: pathlib.Path, offset: int, length: int) -> None:
    command = ["fallocate", "--dig-holes", f"--offset={offset}", f"--length={length}", str(path)]
    subprocess.run(command, check=True, timeout=600)


def _leave_a_full_log(path: pathlib.Path, pipe) -> None:
    """Issues permits until the log is nearly as large as it gets, and dies."""

    async def fill() -> None:
        journal = Journal(path, batch_groups=BATCH)
        journal._connection.execute("PRAGMA wal_autocheckpoint = 0")
        first, size = journal.recover().state.frontier, journals.CHECKPOINT_BYTES
        while not _log_of(path).exists() or _log_of(path).stat().st_size < size:
            await journal.admitted([Permit(first + i, 0) for i in range(64)], "rollout-1", 0)
            for i in range(64):
                await journal.returned(Permit(first + i, 0), "dropped", "retired", "dropped")
            first += 64

    asyncio.run(fill())
    pipe.send(0.0)
    time.sleep(3600)  # Until it is killed: the log is not brought in.


def _seconds_to_state(path: pathlib.Path, pipe) -> None:
    start = time.perf_counter()
    journal = Journal(path, batch_groups=BATCH)
    recovered = journal.recover()
    secs = time.perf_counter() - start
    assert len(recovered.messages) == NUM_OPEN
    pipe.send(secs)
    time.sleep(3600)


def _seconds_of_before(path: pathlib.Path, pipe) -> None:
    """What a restart did in format 1, in SQL alone."""
    start = time.perf_counter()
    c = sqlite3.connect(path)
    c.execute("PRAGMA quick_check(1)").fetchone()
    c.execute(
        "SELECT prompt_index, attempt, state, reason, worker, version FROM permits"
    ).fetchall()
    c.execute("SELECT reason, COUNT(*) FROM returns GROUP BY reason").fetchall()
    c.execute("SELECT COALESCE(SUM(completion_tokens), 0) FROM permits").fetchone()
    c.execute(
        "SELECT prompt_index, arrival FROM groups JOIN permits USING (prompt_index) WHERE state IN ('held', 'leased')"
    ).fetchall()
    pipe.send(time.perf_counter() - start)
    time.sleep(3600)


def _in_process(function, path: pathlib.Path) -> float:
    """Runs it in a new process, which is killed when it has answered; the answer."""
    if os.geteuid() == 0:
        os.sync()
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(path, there))
    process.start()
    there.close()
    try:
        if not here.poll(3600):
            raise TimeoutError(f"{function.__name__} has not ended in an hour")
        return here.recv()
    finally:
        process.kill()
        process.join()


async def forget(path: pathlib.Path, num_bytes: int, slices: bool, alone_secs: float) -> dict:
    """Milliseconds of calls alone, and while `num_bytes` are forgotten."""
    journal = Journal(path, batch_groups=BATCH, keep="checkpointed")
    size = min(GROUP_BYTES, num_bytes // 50)
    messages = [np.random.default_rng(i).bytes(size) for i in range(8)]
    num_groups = num_bytes // size
    await journal.published(0, 0, None)
    for first in range(0, num_groups, 64):
        permits = [Permit(i, 0) for i in range(first, min(first + 64, num_groups))]
        await journal.admitted(permits, "rollout-0", 0)
        await asyncio.gather(
            *(journal.submitted(p, messages[p.prompt_index % 8], 1000) for p in permits)
        )
    indexes = tuple(range(num_groups))
    await journal.leased(1, 0, FixedChunk(indexes, True), new=True)
    await journal.committed(ResumePoint(1, num_groups, (), {}, {}), indexes)
    counter = iter(range(num_groups, 1 << 60))

    async def calls(stop: asyncio.Event) -> list[float]:
        secs: list[float] = []

        async def caller(number: int) -> None:
            await asyncio.sleep(number / CALLS_A_SECOND)
            while not stop.is_set():
                permit = Permit(next(counter), 0)
                start = time.perf_counter()
                await journal.admitted([permit], "rollout-0", 0)
                middle = time.perf_counter()
                await journal.submitted(permit, messages[permit.prompt_index % 8], 1000)
                end = time.perf_counter()
                secs.extend((middle - start, end - middle))
                await asyncio.sleep(max(0.0, NUM_CALLERS / CALLS_A_SECOND - (end - start)))

        await asyncio.gather(*map(caller, range(NUM_CALLERS)))
        return secs

    async def during(work) -> tuple[list[float], float]:
        stop = asyncio.Event()
        task = asyncio.create_task(calls(stop))
        start = time.perf_counter()
        await work
        took = time.perf_counter() - start
        stop.set()
        return await task, took

    alone, _ = await during(asyncio.sleep(alone_secs))

    async def forgotten() -> None:
        if not slices:
            journals.SLICE_BYTES = journals.SLICE_GROUPS = 1 << 62
            await journal._put(lambda c: c.execute("PRAGMA secure_delete = ON").close())
        await journal.checkpointed(1)
        while True:
            meta = await journal._put(
                lambda c: dict(c.execute("SELECT key, value FROM meta").fetchall())
            )
            if meta.get("forgotten_step") == "1":
                return
            await asyncio.sleep(0.05)

    meanwhile, took = await during(forgotten())
    journal.close()
    return {
        "gb": num_groups * size / 1e9,
        "groups": num_groups,
        "secs": round(took, 1),
        "calls_ms": {"alone": quantiles(alone), "meanwhile": quantiles(meanwhile)},
    }


def rows(num_steps: int, num_pairs: int) -> dict:
    """Milliseconds of a group with the checksums of its rows and without, by the bytes of its message."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    found: dict = {"steps": num_steps, "groups_per_step": ROWS_BATCH}
    for size in ROWS_BYTES:
        ms = {f"{clock}_{way}": [] for clock in ("cpu_ms", "ms") for way in ("with", "without")}
        for pair in range(num_pairs + 1):  # The first one is not counted: it warms up.
            for way in ("with", "without")[:: 1 if pair % 2 else -1]:
                with tempfile.TemporaryDirectory(dir=memory) as directory:
                    path = pathlib.Path(directory) / "journal.sqlite"
                    secs = asyncio.run(train(path, num_steps, size, way == "with"))
                for clock, value in zip(("cpu_ms", "ms"), secs, strict=True):
                    if pair:
                        ms[f"{clock}_{way}"].append(value * 1e3 / num_steps / ROWS_BATCH)
        found[f"{size} bytes"] = {name: record.quartiles(values) for name, values in ms.items()}
    return found


async def train(
    path: pathlib.Path, num_steps: int, size: int, checksums: bool
) -> tuple[float, float]:
    """CPU seconds and seconds of the journal's events of steps."""
    journal = Journal(path, batch_groups=ROWS_BATCH, keep="checkpointed")
    triggers = "SELECT name FROM sqlite_temp_master WHERE type = 'trigger'"
    if not checksums:
        names = await journal._put(lambda c: c.execute(triggers).fetchall())
        assert names
        await journal._put(lambda c: [c.execute(f"DROP TRIGGER temp.{name}") for (name,) in names])
    message = np.random.default_rng(0).bytes(size)
    await journal.published(0, 0, None)
    cpu, began = time.process_time(), time.perf_counter()
    for step in range(1, num_steps + 1):
        indexes = tuple(range((step - 1) * ROWS_BATCH, step * ROWS_BATCH))
        permits = [Permit(index, 0) for index in indexes]
        await journal.admitted(permits, "rollout-0", step - 1)
        await asyncio.gather(*(journal.submitted(permit, message, 1000) for permit in permits))
        await journal.leased(step, 0, FixedChunk(indexes, True), new=True)
        await journal.committed(ResumePoint(step, indexes[-1] + 1, (), {}, {}), indexes)
        await journal.published(step, 0, None)
        if step % 20 == 0:
            await journal.checkpointed(step)
    await journal.flushed()
    used = time.process_time() - cpu, time.perf_counter() - began
    journal.close()
    return used


def quantiles(secs: list[float]) -> dict:
    ms = np.array(secs) * 1e3
    found = {
        "calls": len(secs),
        "median": np.median(ms),
        "p99": np.quantile(ms, 0.99),
        "max": ms.max(),
    }
    return {name: round(float(value), 1) for name, value in found.items()}


def _log_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + "-wal")


def _remove(path: pathlib.Path) -> None:
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


if __name__ == "__main__":
    main()
