"""Leases: the assignment of held groups to the chunks of a step. Pure.

A chunk is fixed once, by count and never by time, and is the same for every caller. Independent of the contents of
groups, of permits and of capacity.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence


class OrderError(RuntimeError):
    """An event that contradicts earlier ones; the message names both."""


@dataclasses.dataclass(frozen=True)
class FixedChunk:
    """The groups of one chunk, in the order of training."""

    indexes: tuple[int, ...]  # prompt_index of each group
    last: bool  # True on the step's last chunk


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Leases:
    """The chunks of every uncommitted step. Steps are leased and committed in order, from step 1 on."""

    batch_groups: int  # B, groups per step
    # None for one chunk, the whole batch in prompt order, which waits for its lowest indexes; k for chunks of k groups
    # in completion order (the last one may be smaller).
    chunk_groups: int | None

    def __post_init__(self):
        self.committed_step = 0
        self._chunks: dict[int, list[FixedChunk]] = {}  # by step, committed_step < step

    def recover(self, chunks: Mapping[int, tuple[FixedChunk, ...]]) -> None:
        """Takes over the chunks of the uncommitted steps, by step."""
        self._chunks = {step: list(fixed) for step, fixed in chunks.items()}

    @property
    def leased_step(self) -> int:
        """The last step leased in full: all its chunks are fixed."""
        full = [step for step, chunks in self._chunks.items() if chunks[-1].last]
        return max(full, default=self.committed_step)

    @property
    def missing_groups(self) -> int:
        """Groups that the first step not leased in full still needs, 1 … B."""
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
            before = self.leased_step + 1
            raise OrderError(f"lease of step {step}: step {before} was not leased in full")
        chunks = self._chunks.get(step, [])
        if index > len(chunks) or (index == len(chunks) and step <= self.leased_step):
            raise OrderError(f"lease of step {step}: chunk {index}, but {len(chunks)} are fixed")
        return chunks[index] if index < len(chunks) else None

    def choose(self, held: Sequence[int], open_indexes: Collection[int]) -> tuple[int, ...] | None:
        """The groups of the next chunk, None while one of them is missing.

        Args:
          held: indexes of the held groups, in completion order.
          open_indexes: issued indexes whose groups may still be submitted.
        """
        if self.chunk_groups is not None:
            count = min(self.chunk_groups, self.missing_groups)
            return tuple(held[:count]) if len(held) >= count else None
        if len(held) < self.batch_groups:
            return None
        lowest = tuple(sorted(held)[: self.batch_groups])
        return lowest if lowest[-1] < min(open_indexes, default=lowest[-1] + 1) else None

    def fix(self, indexes: tuple[int, ...]) -> FixedChunk:
        """Makes the next chunk of the chosen groups."""
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
