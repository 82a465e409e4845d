"""The journal: the history of every prompt index, and every group, in one SQLite file.

It is the authority on a run. The queue answers a call after the change is written here. So a killed queue restarts in
the state that it answered, and a learner restored at an earlier step gets the groups of later steps again.

    permits       one row for each issued index, in exactly one state
    groups        every submitted group, its message as received, with a checksum
    chunks        the groups of each chunk of each step: the data of training, in order
    returns, commits, publications
    totals        sums over permits, groups and returns, kept with every change

Every row has a checksum, which is compared where it is read.

One thread owns the connection and writes all waiting events in one transaction. It forgets groups in slices between
them. What a restart reads does not grow with the run: the totals, the permits that an index lists as open, and their
groups. `JournalReader` reads the file of a finished run. Independent of gRPC and of admission's rules; only the reader
decodes groups.
"""

import asyncio
import collections
import contextlib
import functools
import json
import os
import pathlib
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from sqlite3 import Connection
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.admission import State
from jaxrl_async.queue.leases import FixedChunk
from jaxrl_async.records import BLAMELESS, Identity, Permit, ResumePoint, new_run_id
from jaxrl_async.types import Group

FORMAT = 3
_FORMATS = (2, FORMAT)  # 2: without checksums of rows
BYTES_PER_TOKEN = 13  # of a group in the file: id, log-probability, version and mask of a token
MAX_TRANSACTION = 256  # events
# A call waits for at most one slice of the groups that are forgotten.
SLICE_BYTES = 2 << 20
SLICE_GROUPS = 256
# Larger files are not read whole at the start, which would take minutes. Every group has a checksum of its own.
MAX_CHECKED_BYTES = 64 << 20
# Size of the log at which SQLite copies it into the file and waits for the disk; at its default of 4 MB it always does.
CHECKPOINT_BYTES = 64 << 20
# A group takes many of SQLite's default pages of 4 KB, each with a checksum and a frame of its own.
PAGE_BYTES = 16 << 10
CLOSE_TIMEOUT_SECS = 10.0

_P = ParamSpec("_P")
_T = TypeVar("_T")

_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"}
    | {"fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.glusterfs"}
)

_OPEN = "state NOT IN ('trained', 'retired')"
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE permits (
    prompt_index INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,            -- reissue, running, held, leased, trained or retired
    reason TEXT NOT NULL,           -- of retired
    worker TEXT NOT NULL,
    completion_tokens INTEGER NOT NULL,
    version INTEGER                 -- published when it was issued, NULL where a resume point gave it
);
CREATE TABLE groups (
    arrival INTEGER PRIMARY KEY,
    prompt_index INTEGER NOT NULL UNIQUE,
    attempt INTEGER NOT NULL,
    checksum INTEGER NOT NULL,      -- CRC-32 of the message
    message BLOB NOT NULL           -- Group of trajectory_queue.proto
);
CREATE TABLE returns (
    id INTEGER PRIMARY KEY,
    prompt_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    reason TEXT NOT NULL,
    unix_time REAL NOT NULL
);
CREATE TABLE chunks (
    step INTEGER NOT NULL,
    chunk INTEGER NOT NULL,
    last INTEGER NOT NULL,
    prompt_indexes TEXT NOT NULL,   -- JSON, in the order of training
    PRIMARY KEY (step, chunk)
);
CREATE TABLE commits (step INTEGER PRIMARY KEY, position TEXT NOT NULL, unix_time REAL NOT NULL);
CREATE TABLE publications (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    run_epoch INTEGER NOT NULL,
    unix_time REAL NOT NULL
);
CREATE TABLE totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE INDEX open_permits ON permits (state) WHERE {_OPEN};
"""
_OPEN_INDEXES = f"SELECT prompt_index FROM permits INDEXED BY open_permits WHERE {_OPEN}"
_LOST = (
    f"SELECT prompt_index, COUNT(*) FROM returns WHERE prompt_index IN ({_OPEN_INDEXES}) "
    f"AND reason IN {tuple(sorted(BLAMELESS))} GROUP BY prompt_index"
)
# Since format 3: tables whose rows have a checksum, with the columns that it is of. Groups have one of their messages.
_CHECKED = {
    "meta": "key, value",
    "permits": "prompt_index, attempt, state, reason, worker, completion_tokens, version",
    "returns": "id, prompt_index, attempt, reason, unix_time",
    "chunks": "step, chunk, last, prompt_indexes",
    "commits": "step, position, unix_time",
    "publications": "id, version, run_epoch, unix_time",
    "totals": "name, value",
}

_DELETED = (
    "deleted; only journal.keep = 'all' without a journal.max_bytes keeps the groups of steps before the oldest "
    "checkpoint, on the machine where they were trained on"
)
_REMEDY = (
    "restore a copy of it, or move it away, with its -wal and -shm: a resumed run then goes on from its checkpoint "
    "with a new one"
)


class JournalError(RuntimeError):
    """A journal that cannot be written or read, or is damaged; the message names the file and the cause."""


class DeletedError(JournalError):
    """Groups that the journal kept no longer, by its settings."""


class Recovered(NamedTuple):
    """The state of a former queue, from its journal."""

    state: State
    messages: dict[int, bytes]  # of the groups held and leased, by prompt_index
    run_epoch: int
    completion_tokens: int  # submitted so far
    servers: list[tuple[str, str, int | None]]  # address, state and version of each


def _in_turn(
    work: Callable[Concatenate["Journal", Connection, _P], _T],
) -> Callable[Concatenate["Journal", _P], "asyncio.Future[_T]"]:
    """A method that the journal's thread runs with the connection, in turn; its caller awaits the result.

    The result is no cursor: dropped in another thread, one resets a statement that may be running in the journal's.
    """

    @functools.wraps(work)
    def put(journal: "Journal", *args: _P.args, **more: _P.kwargs) -> "asyncio.Future[_T]":
        return journal._put(lambda c: work(journal, c, *args, **more))

    return put


class Journal:
    """The queue's end of a journal: records events, and recovers the state of a former queue."""

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        batch_groups: int,
        keep: str = "all",
        max_bytes: int | None = None,
        mode: str = "wal",
        synchronous: str = "normal",
    ):
        """Opens or creates the file and locks it for this process. A small file is checked whole.

        Args:
          path: of the file.
          batch_groups: B, groups per step; a journal with another B is refused.
          keep: "all", or "checkpointed", which deletes the groups of steps up to the oldest checkpoint.
          max_bytes: with keep = "all", the groups of the oldest of these steps are deleted while all groups have more
            bytes; None for no bound.
          mode: "wal", or "delete", which is slower and also safe on network file systems.
          synchronous: "normal", which survives a killed process, or "full", which survives a loss of power.

        Raises:
          JournalError: the file is not a journal, damaged, of another format or run, in use by another process, or on
            a network file system in mode "wal".
        """
        self._path = pathlib.Path(path).absolute()
        # Of the groups of steps up to the oldest checkpoint, as many bytes are kept.
        self._max_bytes = 0 if keep == "checkpointed" else max_bytes
        self._may_forget = self._max_bytes is not None
        if mode == "wal" and (kind := file_system_of(self._path.parent)) in _NETWORK_FILE_SYSTEMS:
            raise JournalError(
                f"journal {self._path} is on a network file system ({kind}), where a write-ahead log is unsafe: set "
                "journal.mode = 'delete', or journal.path to a local disk"
            )
        with _named(self._path):
            self._connection = _connect(self._path, isolation_level=None)
            try:
                self._open(batch_groups, mode, synchronous)
            except BaseException:
                self._connection.close()  # Else it is locked while somebody has the error.
                raise
        # Who uses the connection: in two threads at once, one would wait for the other within SQLite, and hold Python's
        # lock, which the checksums of the other need.
        self._using = threading.Lock()
        self._failure: JournalError | None = None
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _open(self, batch_groups: int, mode: str, synchronous: str) -> None:
        c = self._connection
        c.execute("PRAGMA locking_mode = EXCLUSIVE")
        c.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        # Of a new file: it knows which pages a group takes, so that forgetting a group reads none of them.
        c.execute("PRAGMA auto_vacuum = INCREMENTAL")
        c.execute(f"PRAGMA journal_mode = {mode.upper()}")
        c.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        (page_bytes,) = c.execute("PRAGMA page_size").fetchone()
        c.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // page_bytes}")
        # Else what is forgotten is overwritten, byte for byte.
        c.execute("PRAGMA secure_delete = OFF")
        c.execute("BEGIN IMMEDIATE")  # Takes the lock now, or fails.
        tables = c.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        if not tables:
            for statement in _SCHEMA.split(";"):  # `executescript` would end the transaction.
                c.execute(statement)
            _set_meta(c, "format", FORMAT)
            _set_meta(c, "batch_groups", batch_groups)
            _add_checksums(c)
        c.execute("COMMIT")
        (num_pages,) = c.execute("PRAGMA page_count").fetchone()
        if num_pages * page_bytes <= MAX_CHECKED_BYTES:
            damage = c.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise JournalError(f"journal {self._path} is damaged: {damage}; {_REMEDY}")
        meta = _meta(c)
        if meta.get("format") not in _FORMATS:
            raise JournalError(
                f"journal {self._path} has format {meta.get('format')}, this program reads {FORMAT}; {_REMEDY}"
            )
        if meta["batch_groups"] != batch_groups:
            raise JournalError(
                f"journal {self._path} is of a run with learner.groups_per_step = {meta['batch_groups']}, "
                f"not {batch_groups}"
            )
        if meta["format"] < FORMAT:
            _bring_up_to_date(c)
        for table, columns in _CHECKED.items():  # Triggers of this connection alone keep them.
            new = ", ".join(f"NEW.{column}" for column in columns.split(", "))
            for event in ("INSERT", f"UPDATE OF {columns}"):
                c.execute(
                    f"CREATE TEMP TRIGGER {table}_{event[:6]} AFTER {event} ON {table} BEGIN UPDATE {table} "
                    f"SET checksum = checksum_of({new}) WHERE rowid = NEW.rowid; END"
                )
        for table in ("meta", "totals"):
            _check(c, self._path, table)
        # Journals of before have none.
        c.execute("CREATE INDEX IF NOT EXISTS returns_of ON returns (prompt_index)")

    def close(self) -> None:
        """Writes the waiting events and closes the file."""
        if self._thread.is_alive():
            self._events.put(None)
            self._thread.join(CLOSE_TIMEOUT_SECS)

    def check(self) -> None:
        """Raises the error that stopped the journal, if there is one."""
        if self._failure is not None:
            raise self._failure

    def recover(self) -> Recovered | None:
        """Reads the state of the former queue; None for a new journal. Blocks: to be called before any event.

        Raises:
          JournalError: a group is missing or damaged.
        """
        with self._using, _named(self._path):
            return _recover(self._connection, self._path)

    def identity(self) -> tuple[Identity, str]:
        """The run, whose id is drawn at the first start, with its last learner, and that learner's nonce.

        Blocks: to be called before any event.
        """
        with self._using, _named(self._path):
            c = self._connection
            _insert(c, "meta", [("run_id", json.dumps(new_run_id()))], "OR IGNORE")
            meta = _meta(c)
            return Identity(meta["run_id"], meta.get("generation", 0)), meta.get("nonce", "")

    # Events. Each returns after it is written.

    @_in_turn
    def begun(self, c: Connection, generation: int, nonce: str) -> None:
        """A learner began."""
        _set_meta(c, "generation", generation)
        _set_meta(c, "nonce", nonce)

    @_in_turn
    def admitted(
        self, c: Connection, permits: Sequence[Permit], worker: str, version: int | None
    ) -> None:
        """Permits were issued while `version` was the published one."""
        rows = [(p.prompt_index, p.attempt, "running", "", worker, 0, version) for p in permits]
        _insert(c, "permits", rows, "OR REPLACE")

    @_in_turn
    def submitted(
        self, c: Connection, permit: Permit, message: bytes, completion_tokens: int
    ) -> None:
        """A group was submitted, and is held."""
        index, attempt = permit.prompt_index, permit.attempt
        c.execute(
            "INSERT INTO groups (prompt_index, attempt, checksum, message) VALUES (?, ?, ?, ?)",
            (index, attempt, zlib.crc32(message), message),
        )
        _add(c, "message_bytes", len(message))
        _add(c, "completion_tokens", completion_tokens)
        c.execute(
            "UPDATE permits SET attempt = ?, state = 'held', completion_tokens = ? WHERE prompt_index = ?",
            (attempt, completion_tokens, index),
        )

    @_in_turn
    def returned(
        self,
        c: Connection,
        permit: Permit,
        reason: str,
        outcome: str,
        retired_as: str,
        *,
        held: bool = False,
    ) -> None:
        """A permit was returned, with the outcome "reissued", or "retired" under the reason `retired_as`.

        `held`: its group was submitted, and is deleted.
        """
        index, attempt = permit.prompt_index, permit.attempt
        state, last = ("retired", attempt) if outcome == "retired" else ("reissue", attempt + 1)
        _insert(c, "returns", [(index, attempt, reason, time.time())])
        c.execute(
            "UPDATE permits SET attempt = ?, state = ?, reason = ? WHERE prompt_index = ?",
            (last, state, retired_as if state == "retired" else "", index),
        )
        _add(c, f"returned/{reason}", 1)
        if held:
            group = " FROM groups WHERE prompt_index = ?"
            (num_bytes,) = c.execute(f"SELECT LENGTH(message){group}", (index,)).fetchone()
            c.execute(f"DELETE{group}", (index,))
            _add(c, "message_bytes", -num_bytes)
        if state == "retired":
            _add(c, f"retired/{retired_as}", 1)

    @_in_turn
    def leased(self, c: Connection, step: int, chunk: int, fixed: FixedChunk, *, new: bool) -> None:
        """A chunk was leased; `new` where it was fixed now. Returns after the fixing is written."""
        if new:
            _insert(c, "chunks", [(step, chunk, fixed.last, json.dumps(fixed.indexes))])
            _set_states(c, "leased", fixed.indexes)

    @_in_turn
    def committed(self, c: Connection, resume_point: ResumePoint, indexes: Sequence[int]) -> None:
        """A step was committed, trained on the groups with these indexes."""
        _insert(c, "commits", [_commit_row(resume_point)])
        _set_states(c, "trained", indexes)

    @_in_turn
    def published(
        self,
        c: Connection,
        version: int,
        run_epoch: int,
        resume_point: ResumePoint | None,
        servers: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        """A version was published; a new queue may give the point that it starts from.

        Args:
          servers: as of `fleet`, where the table changed with it.
        """
        if servers is not None:
            _set_meta(c, "servers", servers)
        if resume_point is not None:
            _insert(c, "commits", [row := _commit_row(resume_point)])
            out = [(p.prompt_index, p.attempt) for p in resume_point.outstanding]
            _insert(c, "permits", [(*p, "reissue", "", "", 0, None) for p in out])
            _insert(c, "meta", [("start", row[1])])
        _insert(c, "publications", [(version, run_epoch, time.time())])

    @_in_turn
    def fleet(self, c: Connection, servers: Sequence[Sequence[Any]]) -> None:
        """The table of servers changed; (address, state, version) of each. A restarted queue gives it to workers."""
        _set_meta(c, "servers", servers)

    @_in_turn
    def checkpointed(self, c: Connection, step: int) -> None:
        """The oldest checkpoint is of `step`: the groups up to it may be forgotten, in slices after this call."""
        (committed,) = c.execute("SELECT COALESCE(MAX(step), 0) FROM commits").fetchone()
        # Groups of steps after the last commit are not trained on yet.
        last = max(min(step, committed), _meta(c).get("checkpointed_step", 0))
        _set_meta(c, "checkpointed_step", last)
        self._may_forget = self._max_bytes is not None

    @_in_turn
    def snapshot(self, c: Connection, step: int) -> pathlib.Path:
        """Writes a copy, from which a queue resumes at a committed step, to a file beside this one.

        The copy has all rows but groups that no learner of that step will ask for: those of steps up to it.

        Raises:
          JournalError: it cannot be written.
        """
        path = self._path.with_name(f"{self._path.name}.snapshot")
        with _named(path):
            path.unlink(missing_ok=True)
            with contextlib.closing(_connect(path, isolation_level=None)) as into:
                _copy(c, into, step)
        return path

    @_in_turn
    def flushed(self, c: Connection) -> None:
        """Returns after all earlier events are written."""

    # Reads, in turn with the events.

    @_in_turn
    def chunk(self, c: Connection, step: int, index: int) -> tuple[FixedChunk, list[bytes]]:
        """Reads a fixed chunk and its groups.

        Raises:
          JournalError: it was not fixed, or its groups are deleted or damaged.
        """
        if self._max_bytes == 0 and step <= _meta(c).get("checkpointed_step", 0):
            # Whether its slice has come or not.
            raise DeletedError(f"journal {self._path}: the groups of step {step} are {_DELETED}")
        return _chunk(c, self._path, step, index)

    @_in_turn
    def resume_point(self, c: Connection, step: int) -> ResumePoint:
        """Reads the resume point of a committed step. Raises JournalError: it was not committed."""
        _check(c, self._path, "commits", f"step = {step:d}")
        row = c.execute("SELECT position FROM commits WHERE step = ?", (step,)).fetchone()
        if row is None:
            raise JournalError(f"journal {self._path} has no commit of step {step}")
        return ResumePoint.from_json(json.loads(row[0]))

    def _put(self, event: Callable[[Connection], Any]) -> asyncio.Future:
        self.check()
        done = asyncio.get_running_loop().create_future()
        self._events.put((event, done))
        return done

    def _run(self) -> None:
        """Writes all waiting events in one transaction, then forgets a slice, again and again until `close`."""
        closed = False
        while not closed:
            batch = []
            if not self._may_forget:
                batch.append(self._events.get())
            with contextlib.suppress(queue.Empty):
                while len(batch) < MAX_TRANSACTION:
                    batch.append(self._events.get_nowait())
            closed = None in batch
            events = batch[: batch.index(None)] if closed else batch
            if events:
                self._transact(events)
            if self._may_forget and not closed:
                self._write([self._forget])
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _transact(self, events: Sequence[tuple[Callable, asyncio.Future]]) -> None:
        outcomes = self._write([event for event, _ in events])
        futures = [future for _, future in events]
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            futures[0].get_loop().call_soon_threadsafe(_answer, futures, outcomes)

    def _write(self, events: Sequence[Callable[[Connection], Any]]) -> list[Any]:
        """Runs events in one transaction; their outcomes."""
        outcomes: list[Any] = []
        try:
            if self._failure is None:
                with self._using, _named(self._path):
                    self._connection.execute("BEGIN")
                    for event in events:
                        try:
                            outcomes.append(event(self._connection))
                        except JournalError as refusal:
                            # The result of a read, which changed nothing.
                            outcomes.append(refusal.with_traceback(None))
                    self._connection.execute("COMMIT")
        except Exception as error:  # The thread must not die while its callers wait.
            # The queue's memory is ahead of the file now, so every later call fails.
            known = isinstance(error, JournalError)
            self._failure = error if known else JournalError(f"journal {self._path}: {error!r}")
        if self._failure is not None:
            self._may_forget = False
            outcomes = [self._failure] * len(events)
        return outcomes

    def _forget(self, c: Connection) -> None:
        """Deletes a slice of the groups of the oldest step that has groups, where they may go."""
        meta = _meta(c)
        (step,) = c.execute(
            "SELECT MIN(step) FROM chunks WHERE step > ?", (meta.get("forgotten_step", 0),)
        ).fetchone()
        bound, num_bytes = self._max_bytes, _totals(c).get("message_bytes", 0)
        over = bound is not None and num_bytes > bound
        self._may_forget = over and step is not None and step <= meta.get("checkpointed_step", 0)
        if not self._may_forget:
            return
        rows = c.execute("SELECT prompt_indexes FROM chunks WHERE step = ?", (step,)).fetchall()
        num_groups = num_bytes = 0
        for index in (index for (indexes,) in rows for index in json.loads(indexes)):
            found = c.execute(
                "SELECT LENGTH(message) FROM groups WHERE prompt_index = ?", (index,)
            ).fetchone()
            if found is None:  # deleted in an earlier slice
                continue
            if num_groups == SLICE_GROUPS or (num_groups and num_bytes + found[0] > SLICE_BYTES):
                break
            c.execute("DELETE FROM groups WHERE prompt_index = ?", (index,))
            num_groups, num_bytes = num_groups + 1, num_bytes + found[0]
        else:
            _set_meta(c, "forgotten_step", step)
        _add(c, "message_bytes", -num_bytes)


class JournalReader:
    """The journal of a finished run: a sequence of groups in the order of training.

    A source for `grain.MapDataset.source`.
    """

    def __init__(self, path: str | os.PathLike):
        """Opens the file. Raises JournalError: there is none, it is damaged, or a queue is writing it."""
        self._path = pathlib.Path(path).absolute()
        if not self._path.exists():
            raise JournalError(f"no journal at {self._path}: restore a copy of it")
        with _named(self._path):
            # Opened for writing: SQLite copies the log of a killed queue into the file.
            self._connection = _connect(self._path)
            if (found := _meta(self._connection).get("format")) not in _FORMATS:
                raise JournalError(f"{self._path} is no journal of format {FORMAT}; {_REMEDY}")
            for table in _CHECKED if found == FORMAT else ():
                _check(self._connection, self._path, table)
        self._order = [i for step in self.steps() for c in self._chunks(step) for i in c.indexes]

    def __len__(self) -> int:
        """Number of groups that were trained on."""
        return len(self._order)

    def __getitem__(self, position: int) -> Group:
        """The group at a position, 0 for the first one trained on.

        Raises:
          IndexError: the position is outside.
          JournalError: the group is deleted (journal.keep) or damaged.
        """
        with _named(self._path):
            return _decode(_message(self._connection, self._path, self._order[position]))

    def steps(self) -> list[int]:
        """The committed steps that have chunks, ascending."""
        with _named(self._path):
            rows = self._connection.execute(
                "SELECT DISTINCT step FROM chunks JOIN commits USING (step) ORDER BY step"
            )
            return [step for (step,) in rows.fetchall()]

    def num_chunks(self, step: int) -> int:
        """Number of chunks of a step."""
        return len(self._chunks(step))

    def chunk(self, step: int, index: int) -> tuple[tuple[Group, ...], bool]:
        """The groups of a chunk, and whether it is the last of its step.

        Raises:
          JournalError: there is none, or its groups are deleted or damaged.
        """
        with _named(self._path):
            fixed, messages = _chunk(self._connection, self._path, step, index)
        return tuple(map(_decode, messages)), fixed.last

    def run_epochs(self) -> list[tuple[int, int]]:
        """(version, run_epoch) of every publication, in order."""
        with _named(self._path):
            query = "SELECT version, run_epoch FROM publications ORDER BY id"
            return self._connection.execute(query).fetchall()

    def audit(self) -> dict[str, list[int]]:
        """Finds contradictions, each list empty in a sound journal.

        Returns:
          "lost": indexes that were issued and have no state. "doubled": indexes in more than one chunk. "gap": steps
          before the last commit that lack their commit or chunks. "stray": indexes that are trained without a chunk of
          a committed step, or the reverse.
        """
        with _named(self._path):
            c, start = self._connection, _meta(self._connection).get("start")
            first, step = (start["frontier"], start["step"]) if start else (0, 0)
            (frontier,) = c.execute("SELECT MAX(prompt_index) + 1 FROM permits").fetchone()
            known = {i for (i,) in c.execute("SELECT prompt_index FROM permits")}
            query = "SELECT prompt_index FROM permits WHERE state = 'trained'"
            trained = {i for (i,) in c.execute(query)}
            commits = {s for (s,) in c.execute("SELECT step FROM commits WHERE step > ?", (step,))}
        counts = collections.Counter(self._order)
        whole = set(self.steps())
        return {
            "lost": sorted(set(range(first, frontier or first)) - known),
            "doubled": sorted(i for i, n in counts.items() if n > 1),
            "gap": sorted(
                (commits - whole) | set(range(step + 1, max(commits, default=step) + 1)) - commits
            ),
            "stray": sorted(trained ^ set(counts)),
        }

    def close(self) -> None:
        self._connection.close()

    def _chunks(self, step: int) -> list[FixedChunk]:
        rows = self._connection.execute(
            "SELECT last, prompt_indexes FROM chunks WHERE step = ? ORDER BY chunk", (step,)
        )
        return [FixedChunk(tuple(json.loads(i)), bool(last)) for last, i in rows.fetchall()]


def settle(path: str | os.PathLike) -> None:
    """Copies the write-ahead log of a killed queue into the file of its journal.

    Does nothing where no log is there, another process has the file open, or it is damaged.
    """
    if pathlib.Path(f"{os.fspath(path)}-wal").exists():
        with contextlib.suppress(sqlite3.Error):
            with contextlib.closing(sqlite3.connect(path, timeout=0.0)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def file_system_of(path: str | os.PathLike) -> str:
    """The kind of file system of a path, as in /proc/mounts; "" where it is unknown."""
    try:
        mounts = pathlib.Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    fields = [line.split() for line in mounts]
    points = {pathlib.PurePath(f[1].replace("\\040", " ")): f[2] for f in fields if len(f) > 2}
    resolved = pathlib.Path(path).resolve()
    return next((points[p] for p in (resolved, *resolved.parents) if p in points), "")


def _connect(path: pathlib.Path, **how: Any) -> Connection:
    connection = sqlite3.connect(path, check_same_thread=False, timeout=0.0, **how)
    connection.create_function("checksum_of", -1, _checksum_of, deterministic=True)
    return connection


def _checksum_of(*values: Any) -> int:
    """Of the values of a row."""
    return zlib.crc32(repr(values).encode())


def _check(c: Connection, path: pathlib.Path, table: str, where: str = "TRUE") -> None:
    """Raises JournalError where a row of a table is not as it was written."""
    columns = _CHECKED[table]
    query = (
        f"SELECT {columns} FROM {table} WHERE {where} AND checksum IS NOT checksum_of({columns})"
    )
    if (row := c.execute(f"{query} LIMIT 1").fetchone()) is not None:
        raise JournalError(f"journal {path}: row {row} of {table} is damaged (checksum); {_REMEDY}")


def _recover(c: Connection, path: pathlib.Path) -> Recovered | None:
    if not c.execute("SELECT EXISTS (SELECT 1 FROM publications)").fetchone()[0]:
        return None
    _check(c, path, "commits", "step = (SELECT MAX(step) FROM commits)")
    _check(c, path, "chunks", "step > (SELECT COALESCE(MAX(step), 0) FROM commits)")
    _check(c, path, "publications", "id = (SELECT MAX(id) FROM publications)")
    _check(c, path, "permits", f"prompt_index IN ({_OPEN_INDEXES})")
    meta, totals = _meta(c), _totals(c)
    start = meta.get("start")
    base = ResumePoint.from_json(start) if start else ResumePoint(0, 0, (), {}, {})
    last = c.execute("SELECT position FROM commits ORDER BY step DESC LIMIT 1").fetchone()
    resume_point = ResumePoint.from_json(json.loads(last[0])) if last else base
    (newest,) = c.execute("SELECT MAX(prompt_index) FROM permits").fetchone()
    rows = c.execute(
        "SELECT prompt_index, permits.attempt, state, worker, version, arrival FROM permits INDEXED BY open_permits "
        f"LEFT JOIN groups USING (prompt_index) WHERE {_OPEN} ORDER BY prompt_index"
    ).fetchall()
    by_state: dict[str, list] = collections.defaultdict(list)
    order = {}  # of the groups that are here
    for index, attempt, state, worker, version, arrival in rows:
        by_state[state].append((Permit(index, attempt), worker, version))
        if state in ("held", "leased"):
            order[index] = arrival
    if lost := [index for index, arrival in order.items() if arrival is None]:
        raise JournalError(
            f"journal {path}: the groups of prompt_index {lost[:5]} are missing; {_REMEDY}"
        )
    messages = {i: _message(c, path, i) for i in order}

    def sized(state: str) -> tuple[tuple[Permit, int], ...]:
        permits = sorted((p for p, *_ in by_state[state]), key=lambda p: order[p.prompt_index])
        return tuple((p, len(messages[p.prompt_index])) for p in permits)

    chunks: dict[int, list[FixedChunk]] = collections.defaultdict(list)
    fixed = "SELECT step, last, prompt_indexes FROM chunks WHERE step > ? ORDER BY step, chunk"
    for step, is_last, indexes in c.execute(fixed, (resume_point.step,)).fetchall():
        chunks[step].append(FixedChunk(tuple(json.loads(indexes)), bool(is_last)))
    v_pub, run_epoch = c.execute(
        "SELECT version, run_epoch FROM publications ORDER BY id DESC LIMIT 1"
    ).fetchone()
    state = State(
        resume_point=resume_point,
        v_pub=v_pub,
        frontier=max(base.frontier, 0 if newest is None else newest + 1),
        retired=_counts(totals, "retired/", base.retired),
        returned=_counts(totals, "returned/", base.returned),
        reissue=tuple(p for p, *_ in by_state["reissue"]),
        running=tuple(by_state["running"]),
        held=sized("held"),
        leased=sized("leased"),
        chunks={step: tuple(fixed) for step, fixed in chunks.items()},
        lost=dict(c.execute(_LOST).fetchall()),
    )
    servers = [tuple(record) for record in meta.get("servers", [])]
    return Recovered(state, messages, run_epoch, totals.get("completion_tokens", 0), servers)


def _chunk(c: Connection, path: pathlib.Path, step: int, index: int):
    if _meta(c)["format"] == FORMAT:
        _check(c, path, "chunks", f"step = {step:d} AND chunk = {index:d}")
    row = c.execute(
        "SELECT last, prompt_indexes FROM chunks WHERE step = ? AND chunk = ?", (step, index)
    ).fetchone()
    if row is None:
        raise JournalError(f"journal {path} has no chunk {index} of step {step}")
    indexes = tuple(json.loads(row[1]))
    return FixedChunk(indexes, bool(row[0])), [_message(c, path, i) for i in indexes]


def _copy(c: Connection, into: Connection, step: int) -> None:
    """Copies a journal to an empty file, of the groups those of later steps, or that wait for one."""
    for pragma in (f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL", "journal_mode = OFF"):
        into.execute(f"PRAGMA {pragma}")
    into.execute("BEGIN")
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    for (sql,) in c.execute(query):
        into.execute(sql)
    later = "SELECT value FROM chunks, json_each(prompt_indexes) WHERE step > :step"
    where = {"groups": f" WHERE prompt_index IN ({later} UNION {_OPEN_INDEXES})"}
    for table in (*_CHECKED, "groups"):
        rows = c.execute(f"SELECT * FROM {table}{where.get(table, '')}", {"step": step})
        marks = ", ".join("?" * len(rows.description))
        into.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    (num_bytes,) = into.execute("SELECT COALESCE(SUM(LENGTH(message)), 0) FROM groups").fetchone()
    for table, row in (
        ("totals", ("message_bytes", num_bytes)),
        ("meta", ("forgotten_step", json.dumps(step))),
    ):
        into.execute(f"INSERT OR REPLACE INTO {table} VALUES (?1, ?2, checksum_of(?1, ?2))", row)
    into.execute("COMMIT")


def _message(c: Connection, path: pathlib.Path, index: int) -> bytes:
    query = "SELECT checksum, message FROM groups WHERE prompt_index = ?"
    row = c.execute(query, (index,)).fetchone()
    if row is None:
        raise DeletedError(f"journal {path}: the group of prompt_index {index} is {_DELETED}")
    if zlib.crc32(row[1]) != row[0]:
        raise JournalError(
            f"journal {path}: the group of prompt_index {index} is damaged (checksum); {_REMEDY}"
        )
    return row[1]


def _decode(message: bytes) -> Group:
    return wire.decode_group(pb.Group.FromString(message))


def _set_states(c: Connection, state: str, indexes: Sequence[int]) -> None:
    rows = [(state, index) for index in indexes]
    c.executemany("UPDATE permits SET state = ? WHERE prompt_index = ?", rows)


def _insert(c: Connection, table: str, rows: Sequence[tuple], conflict: str = "") -> None:
    """Rows of all columns of a table of _CHECKED, but its `id`."""
    columns = _CHECKED[table].removeprefix("id, ")
    marks = ", ".join("?" * len(columns.split(", ")))
    c.executemany(f"INSERT {conflict} INTO {table} ({columns}) VALUES ({marks})", rows)


def _commit_row(resume_point: ResumePoint) -> tuple[int, str, float]:
    return resume_point.step, json.dumps(resume_point.to_json()), time.time()


def _bring_up_to_date(c: Connection) -> None:
    """Makes a journal of an older format one of this; it reads every row, once."""
    c.execute("BEGIN")
    _set_meta(c, "format", FORMAT)
    _add_checksums(c)
    c.execute("COMMIT")


def _add_checksums(c: Connection) -> None:
    for table, columns in _CHECKED.items():
        c.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")
        c.execute(f"UPDATE {table} SET checksum = checksum_of({columns})")


def _add(c: Connection, name: str, amount: int) -> None:
    c.execute(
        "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) "
        "DO UPDATE SET value = value + excluded.value",
        (name, amount),
    )


def _totals(c: Connection) -> dict[str, int]:
    return dict(c.execute("SELECT name, value FROM totals").fetchall())


def _counts(totals: Mapping[str, int], prefix: str, base: Mapping[str, int]) -> dict[str, int]:
    """The totals of a prefix, by the rest of their names, added to those of the run's start."""
    counts = collections.Counter(base)
    counts.update({n.removeprefix(prefix): v for n, v in totals.items() if n.startswith(prefix)})
    return dict(counts)


def _set_meta(c: Connection, key: str, value: Any) -> None:
    _insert(c, "meta", [(key, json.dumps(value))], "OR REPLACE")


def _meta(c: Connection) -> Mapping[str, Any]:
    return {key: json.loads(value) for key, value in c.execute("SELECT key, value FROM meta")}


def _answer(futures: Sequence[asyncio.Future], outcomes: Sequence[Any]) -> None:
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():  # Its caller was cancelled.
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Raises SQLite's errors as JournalError, with the file's name."""
    try:
        yield
    except sqlite3.OperationalError as error:
        reason = {
            "database is locked": "another process has it open",
            "unable to open database file": "it cannot be opened: does its directory exist, and may it be written?",
        }.get(str(error), f"{error}; if it is damaged, {_REMEDY}")
        raise JournalError(f"journal {path}: {reason}") from error
    except (sqlite3.Error, ValueError, TypeError, LookupError) as error:
        # The other three come from a row that is not as it was written.
        raise JournalError(
            f"journal {path} is damaged, or not a journal: {error!r}; {_REMEDY}"
        ) from error
