"""The rows that the calls of one sample make, and the seed of each.

A call continues a row where it begins with all its tokens, but for a stop token at its end. A server's random keys
depend on the seed and the position, so no position may be drawn twice with one seed. The first row has the sample's;
each call that continues no row begins another, and the n-th of these has the n-th seed of a generator.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_async.servers.port import Completion


@dataclasses.dataclass(eq=False)
class Row:
    """A row as its last call left it."""

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))  # [T]
    is_sampled: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, bool))  # [T]
    num_kept: int = 0  # tokens with which a call continues it: without a stop token at the end
    seed: int | None = None  # None: the sample's
    is_open: bool = True  # no call has continued it

    def common(self, ids: np.ndarray) -> int:
        """The number of first tokens that are equal."""
        length = min(len(ids), len(self.tokens))
        if not length:  # A sample's first call, mostly its only one.
            return 0
        differ = ids[:length] != self.tokens[:length]
        return int(np.argmax(differ)) if differ.any() else length


class Rows:
    """The rows of one sample."""

    def __init__(self, make_rng: Callable[[], np.random.Generator]):
        """`make_rng`: makes the generator of the sample; that of the seeds is another one."""
        self._seeds = functools.cache(lambda: make_rng().spawn(1)[0])
        self._rows = [Row()]  # The last one is of the last call that ended.

    def take(self, ids: np.ndarray) -> Row:
        """The longest row that a call continues, for it alone; an empty one with a new seed where there is none."""
        found = [row for row in self._rows if row.is_open and row.common(ids) >= row.num_kept]
        found = [row for row in found if len(row.tokens) <= len(ids)]
        if not found:
            found = [Row(seed=int(self._seeds().integers(2**31)))]
            self._rows[:0] = found
        taken = max(found, key=lambda row: len(row.tokens))
        taken.is_open = False
        return taken

    def add(self, ids: np.ndarray, completion: Completion, taken: Row | None) -> None:
        """What a call has made of the row that it took; `taken`: None for a call with a seed of its own."""
        tokens = np.concatenate([ids, completion.tokens])
        is_sampled = np.concatenate([self._sampled(ids), np.ones(len(completion.tokens), bool)])
        num_kept = len(tokens) - (completion.finish_reason == "stop")
        kept = [r for r in self._rows if r.is_open or r.common(tokens) < len(r.tokens)]
        new = Row(tokens, is_sampled, num_kept, taken and taken.seed, taken is not None)
        self._rows = [*kept, new]

    def num_sampled(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Tokens among these that were sampled in the row that they are part of; of the last call's row without any."""
        found = self._sampled(np.ravel(tokens)) if len(tokens) else self._rows[-1].is_sampled
        return int(found.sum())

    def _sampled(self, ids: np.ndarray) -> np.ndarray:
        """bool [T]: of the row that has the most sampled tokens in common."""
        parts = [row.is_sampled[: row.common(ids)] for row in self._rows]
        part = max(parts, key=np.count_nonzero)
        return np.concatenate([part, np.zeros(len(ids) - len(part), bool)])
