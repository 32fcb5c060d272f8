"""Rows that stay with a window when the flight that brought them is complete: slab after slab, the oldest go first.

A slab has the rows of several flights, so that there are few places to copy from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import Tensor

from gnnsys.ops import BufferPool

_NUM_SLABS = 16  # about so many have all that is kept


class RowSlab:
    """Kept rows of several flights, one behind the other: the ids, and their rows in each table of a leg."""

    def __init__(self, key: Hashable, capacity: int, outs: Sequence[Tensor], buffers: BufferPool) -> None:
        self.key, self.capacity = key, capacity
        self.rows = [buffers.empty((capacity, *out.shape[1:]), out.dtype) for out in outs]
        self.ids: list[tuple[int, Tensor]] = []  # those that others may have: from which row on, and which
        self.num_taken = 0
        self.num_bytes = sum(rows.nbytes for rows in self.rows)


class KeptRows:
    """Slabs by number, oldest first. At most `keep` times as many bytes are kept as a flight has remote rows.

    Its window holds a lock around every call.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._slabs: dict[int, RowSlab] = {}
        self._buffers = BufferPool(max_free=4)

    def __contains__(self, number: int) -> bool:
        return number in self._slabs

    def __getitem__(self, number: int) -> RowSlab:
        return self._slabs[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._slabs)

    def __len__(self) -> int:
        return len(self._slabs)

    def num_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self._slabs.values())

    def keys(self) -> set[Hashable]:
        """Whose rows are kept."""
        return {slab.key for slab in self._slabs.values()}

    def room_for(
        self, key: Hashable, outs: Sequence[Tensor], num_rows: int, num_remote: int, new_number: Callable[[], int]
    ) -> tuple[int, RowSlab, int]:
        """Room for so many rows of these tables, in the newest slab of their kind or in a new one: its number, it,
        and from which of its rows on. A new one is made for flights that have `num_remote` rows to ask for."""
        number = next((number for number in reversed(self._slabs) if self._slabs[number].key == key), None)
        if number is None or self._slabs[number].num_taken + num_rows > self._slabs[number].capacity:
            number = new_number()
            capacity = max(num_rows, self.keep * num_remote // _NUM_SLABS)
            self._slabs[number] = RowSlab(key, capacity, outs, self._buffers)
        slab = self._slabs[number]
        first, slab.num_taken = slab.num_taken, slab.num_taken + num_rows
        return number, slab, first

    def shrink(self, flight_bytes: int) -> None:
        """Drops the oldest slabs until no more is kept than after a flight with so many bytes of remote rows."""
        surplus = self.num_bytes() - self.keep * flight_bytes
        for number in list(self._slabs):
            if surplus <= 0:
                break
            surplus -= self._slabs.pop(number).num_bytes

    def clear(self) -> None:
        self._slabs.clear()
