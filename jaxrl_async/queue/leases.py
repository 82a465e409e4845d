"""Which held groups make which chunk of which step; pure.

A chunk is fixed once, by count and never by time, and the same chunk is given again to whoever asks
again. It knows nothing of what is in a group, of permits or of capacity.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence


class OrderError(RuntimeError):
    """An event that cannot follow what happened before; the message names both."""


@dataclasses.dataclass(frozen=True)
class FixedChunk:
    """The groups of one chunk, in the order in which the learner gets them."""

    indexes: tuple[int, ...]  # prompt_index of each group
    last: bool  # True on the step's last chunk


class Leases:
    """The chunks of every step that is not committed yet. Steps are leased and committed in order."""

    def __init__(self, *, batch_groups: int, chunk_groups: int | None, committed_step: int = 0):
        """Starts after `committed_step`.

        Args:
          batch_groups: B, groups per step.
          chunk_groups: None for one chunk, the whole batch in prompt order, whose head of line waits;
            k for chunks of k groups in completion order (the last one may be smaller).
          committed_step: the last step that is done with.
        """
        self.batch_groups = batch_groups
        self.chunk_groups = chunk_groups
        self.committed_step = committed_step
        self._chunks: dict[int, list[FixedChunk]] = {}  # by step, committed_step < step

    def recover(self, chunks: Mapping[int, tuple[FixedChunk, ...]]) -> None:
        """Takes over the chunks of the steps after `committed_step`, by step."""
        self._chunks = {step: list(fixed) for step, fixed in chunks.items()}

    @property
    def leased_step(self) -> int:
        """The last step whose chunks are all fixed."""
        full = [step for step, chunks in self._chunks.items() if chunks[-1].last]
        return max(full, default=self.committed_step)

    @property
    def missing_groups(self) -> int:
        """Groups that the step being leased still needs, 1 … B."""
        chunks = self._chunks.get(self.leased_step + 1, [])
        return self.batch_groups - sum(len(chunk.indexes) for chunk in chunks)

    def fixed(self, step: int, index: int) -> FixedChunk | None:
        """The chunk at position `index` of a step, None while it is not fixed.

        Raises:
          OrderError: the step is committed, or an earlier step or chunk was not leased.
        """
        if step <= self.committed_step:
            raise OrderError(
                f"lease of step {step}: it is committed (last committed step "
                f"{self.committed_step}) and its groups are gone"
            )
        if step > self.leased_step + 1:
            raise OrderError(
                f"lease of step {step}: step {self.leased_step + 1} was not leased in full"
            )
        chunks = self._chunks.get(step, [])
        if index > len(chunks) or (index == len(chunks) and step <= self.leased_step):
            raise OrderError(f"lease of step {step}: chunk {index}, but {len(chunks)} are fixed")
        return chunks[index] if index < len(chunks) else None

    def choose(self, held: Sequence[int], open_indexes: Collection[int]) -> tuple[int, ...] | None:
        """The groups that the next chunk is to have, None while they are not all there.

        Args:
          held: indexes of the held groups, in completion order.
          open_indexes: indexes that were issued and may still come.
        """
        if self.chunk_groups is not None:
            count = min(self.chunk_groups, self.missing_groups)
            return tuple(held[:count]) if len(held) >= count else None
        if len(held) < self.batch_groups:
            return None
        lowest = tuple(sorted(held)[: self.batch_groups])
        return lowest if lowest[-1] < min(open_indexes, default=lowest[-1] + 1) else None

    def fix(self, indexes: tuple[int, ...]) -> FixedChunk:
        """Makes the chosen groups the next chunk."""
        chunk = FixedChunk(indexes, last=len(indexes) == self.missing_groups)
        self._chunks.setdefault(self.leased_step + 1, []).append(chunk)
        return chunk

    def commit(self, step: int) -> tuple[int, ...]:
        """Forgets a step; returns the indexes of its groups.

        Raises:
          OrderError: not the step after the last committed one, or not leased in full.
        """
        if step != self.committed_step + 1 or step > self.leased_step:
            raise OrderError(
                f"commit of step {step}: the last committed step is {self.committed_step}, "
                f"the last step leased in full is {self.leased_step}"
            )
        self.committed_step = step
        return tuple(i for chunk in self._chunks.pop(step) for i in chunk.indexes)
