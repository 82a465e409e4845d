"""Which slots hold the keys and values that a row begins with.

A prefix is known where computing it again would give the same bits: a row's whole blocks, and a row to its end, as they
were prefilled. What decode wrote differs in the last bits, so it is never one.
"""

from collections.abc import Collection


class Prefixes:
    """The rows of tokens that slots were filled with, by one version of the weights."""

    def __init__(self, block_tokens: int):
        self._block = 4 * block_tokens  # bytes
        self._rows: dict[int, bytes] = {}  # by slot
        self._slots: dict[bytes, dict[int, None]] = {}  # by prefix

    def hold(self, slot: int, row: bytes) -> None:
        """Notes that a slot was filled with a row of int32 tokens, in the place of another."""
        for prefix in self._prefixes(self._rows.pop(slot, b"")):
            self._slots[prefix].pop(slot)
            if not self._slots[prefix]:
                del self._slots[prefix]
        self._rows[slot] = row
        for prefix in self._prefixes(row):
            self._slots.setdefault(prefix, {})[slot] = None

    def find(self, row: bytes, free: Collection[int]) -> tuple[int, int | None, bool]:
        """The longest known prefix of a row.

        Returns:
          its tokens; a slot that holds them, None for 0 tokens; and whether this slot is one of the free ones, and what
          it was filled with goes on in the row, which may then take its place.
        """
        for prefix in self._prefixes(row):
            if slots := self._slots.get(prefix):
                for slot in slots:
                    if slot in free and row.startswith(self._rows[slot]):
                        return len(prefix) // 4, slot, True
                return len(prefix) // 4, next(iter(slots)), False
        return 0, None, False

    def clear(self) -> None:
        """Forgets all."""
        self._rows.clear()
        self._slots.clear()

    def _prefixes(self, row):
        """The row and its whole blocks, the longest first."""
        if row:
            yield row
        for end in range((len(row) - 1) // self._block * self._block, 0, -self._block):
            yield row[:end]
