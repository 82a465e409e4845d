"""The disk of a workdir: how much of it a run takes, when it would be full, and whether it nearly is.

Bounds from above: completions of full length. Independent of JAX and of what is written.
"""

import dataclasses
import math
import pathlib
import shutil
import time
from collections.abc import Callable

from jaxrl_async import security
from jaxrl_async.config.settings import Settings
from jaxrl_async.queue.journal import BYTES_PER_TOKEN
from jaxrl_async.runtime.workdir import checkpoint_steps

RESERVE_BYTES = 64 << 20  # for logs, metrics and samples until the last checkpoint is written
LOOK_SECS = 1.0  # between two looks at the disk
_HEAD = "disk: "
_REMEDY = "free some, or lower journal.max_bytes or checkpoint.keep"


def step_bytes(settings: Settings, record_bytes: int) -> int:
    """Bytes of a step's groups in the journal, at most; `record_bytes`: of the record of a token."""
    learner, rollout = settings.learner, settings.rollout
    tokens = min(rollout.max_prompt_tokens + rollout.max_new_tokens, learner.row_tokens)
    return learner.groups_per_step * rollout.group_size * tokens * (BYTES_PER_TOKEN + record_bytes)


@dataclasses.dataclass(frozen=True)
class Room:
    """What a run writes to the disk of its workdir."""

    settings: Settings
    workdir: pathlib.Path
    checkpoint_bytes: int  # of one; 0 where they are in a bucket
    version_bytes: int  # of one; 0 where versions are not written
    record_bytes: int  # of a token's record of choices: types.Record.token_bytes
    free: Callable[[pathlib.Path], int] = lambda path: shutil.disk_usage(path).free

    def plan(self, step: int) -> tuple[str, bool]:
        """The bytes that the run takes from a step to its last one, in words, and whether that fits."""
        checkpoint, last = self.settings.checkpoint, self.settings.learner.num_steps
        left = last - step
        saves = math.ceil(left / checkpoint.every_steps)
        # Beside the newest ones: that of step 0, the best, and the one that is being written.
        most = checkpoint.keep + 3 - self._num_checkpoints()
        fixed = max(0, min(saves, most)) * self.checkpoint_bytes
        fixed += (self.settings.weights.keep + 1) * self.version_bytes
        each, bound, free = self._journal_step(), self._journal_bound(), self.free(self.workdir)
        total = fixed + min(left * each, bound)
        text = f"{_HEAD}journal, versions, checkpoints: at most {size(total)} of {size(free)} free by step {last:,}"
        if total <= free:
            return text, True
        full = step + (max(0, free - fixed) // each if each else 0)
        return f"{text}. The run may stop with a checkpoint from step {full:,} on: {_REMEDY}", False

    def is_low(self) -> bool:
        """Whether a step more might leave no room for its checkpoint."""
        return self.free(self.workdir) < self._needed()

    def error(self) -> str:
        """Why the run stopped."""
        free, needed = size(self.free(self.workdir)), size(self._needed())
        return f"stopped with a checkpoint before the disk is full: {free} are free, {needed} are needed: {_REMEDY}"

    def _needed(self) -> int:
        # A checkpoint takes the room of the one that is removed after it, once there are enough.
        grows = self._num_checkpoints() <= self.settings.checkpoint.keep
        return (
            (2 if grows else 1) * self.checkpoint_bytes
            + 2 * (self.version_bytes + self._journal_step())
            + RESERVE_BYTES
        )

    def _num_checkpoints(self) -> int:
        return len(checkpoint_steps(self.workdir)) if self.checkpoint_bytes else 0

    def _journal_step(self) -> int:
        journal = self.settings.journal
        writes = journal.keep != "none" and not journal.path
        return step_bytes(self.settings, self.record_bytes) if writes else 0

    def _journal_bound(self) -> float:
        journal, checkpoint = self.settings.journal, self.settings.checkpoint
        if journal.keep == "checkpointed":
            return self._journal_step() * checkpoint.every_steps * (checkpoint.keep + 1)
        return journal.max_bytes or math.inf


class Watch:
    """Looks at a room from time to time; once it was low it stays so."""

    def __init__(self, room: Room, clock: Callable[[], float] = time.monotonic):
        self._room, self._clock, self._looked, self.is_low = room, clock, -math.inf, False

    def __call__(self) -> bool:
        """Whether the room is low, as of the last LOOK_SECS."""
        if not self.is_low and self._clock() - self._looked >= LOOK_SECS:
            self._looked, self.is_low = self._clock(), self._room.is_low()
        return self.is_low


def said(log: pathlib.Path, start: int) -> str:
    """The plan of `Room.plan`, from a learner's log after its first `start` bytes; "" before it stands there."""
    with open(log, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        messages = (security.message_of(line) for line in file if line.endswith("\n"))
        found = next((text for text in messages if text.startswith(_HEAD)), "")
    return security.escaped(found.strip())


def size(num_bytes: float) -> str:
    """A number of bytes in words, with three digits."""
    power = min(3, max(0, len(str(int(num_bytes))) - 1) // 3)
    return f"{num_bytes / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB')[power]}"
