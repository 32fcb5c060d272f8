"""torch's caching allocator of CUDA devices, as a model: what allocations of given sizes, in order, take of a device.

Sizes are rounded up to 512 bytes. Up to 1 MiB they come from the small pool, in segments of 2 MiB; larger ones from the
large pool, in segments of 20 MiB, or from 10 MiB on of their own size rounded up to 2 MiB. The smallest free block of
the stream that is large enough is taken. It is split where 512 bytes (small pool) or more than 1 MiB (large) remain.
What is freed joins its free neighbours and stays reserved. A full device gives back segments that are free as a whole.

Of free blocks of one size the one with the lowest address is taken. So what is reserved depends on where the driver
puts segments: here those of 32 MiB or more each below all others, smaller ones one after the other above them, as CUDA
does on an H200 where nothing was given back before. Where something was, some lie in the gaps, and a job may reserve up
to a tenth more or less. With the addresses of such a run the model takes the very blocks that torch took.

Left out: expandable segments, `max_split_size_mb`, `roundup_power2_divisions`, garbage collection: all off by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

_MIN_BLOCK = 512
SMALL_SIZE, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE_SEGMENT, _MIN_LARGE, _ROUND_LARGE = 20 << 20, 10 << 20, 2 << 20
_PLACED_BELOW = 32 << 20


class DeviceFull(ValueError):
    """An allocation does not fit what is left of the device's capacity."""


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A part of a segment: taken or free. `before` and `after` are its neighbours there."""

    address: int
    size: int
    stream: int
    is_small: bool
    is_taken: bool = False
    before: CachedBlock | None = None
    after: CachedBlock | None = None

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


def round_size(num_bytes: int) -> int:
    return max(_MIN_BLOCK, -(-num_bytes // _MIN_BLOCK) * _MIN_BLOCK)


def segment_size(size: int) -> int:
    """What is asked of the device for a block of a rounded size that no free one has room for."""
    if size <= SMALL_SIZE:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _MIN_LARGE else -(-size // _ROUND_LARGE) * _ROUND_LARGE


@dataclass
class CachingAllocator:
    """`allocated` are bytes of blocks that are taken, `reserved` those of segments; peaks are the most of each.

    >>> memory = CachingAllocator()
    >>> block = memory.allocate(100)
    >>> memory.allocated, memory.reserved
    (512, 2097152)
    """

    capacity: int | None = None
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    num_segments: int = 0
    on_full: Callable[[], None] = lambda: None  # frees what comes back if torch waits for the device
    _free: dict[bool, list[tuple[int, int, int, CachedBlock]]] = field(default_factory=lambda: {True: [], False: []})
    _lowest: int = 0
    _next_small: int = 0

    def allocate(self, num_bytes: int, stream: int = 0, address: int | None = None) -> CachedBlock:
        """A block for `num_bytes`; DeviceFull where nothing is left. `address`: where a new segment lies, if known."""
        size = round_size(num_bytes)
        block = self._best_free(size, stream) or self._new_segment(size, stream, address)
        rest = block.size - size
        if rest >= _MIN_BLOCK if block.is_small else rest > SMALL_SIZE:
            self._put_free(self._split(block, size))
        block.is_taken = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: CachedBlock) -> None:
        assert block.is_taken
        block.is_taken = False
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_taken:
                self._take_free(neighbour)
                block = self._join(*sorted((block, neighbour), key=lambda each: each.address))
        self._put_free(block)

    def count(self, size: int) -> None:
        """Counts a small block of a rounded size, or with less than 0 its end, without a place."""
        self.allocated += size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def release_cached(self, address: int | None = None) -> None:
        """Gives segments back that are free as a whole, as `torch.cuda.empty_cache` does; or the one at `address`."""
        for pool in self._free.values():
            for entry in [entry for entry in pool if entry[-1].is_segment and address in (None, entry[-1].address)]:
                pool.remove(entry)
                self.reserved -= entry[-1].size
                self.num_segments -= 1

    def _best_free(self, size: int, stream: int) -> CachedBlock | None:
        pool = self._free[size <= SMALL_SIZE]
        place = bisect_left(pool, (stream, size))
        if place == len(pool) or pool[place][0] != stream:
            return None
        return pool.pop(place)[-1]

    def _new_segment(self, size: int, stream: int, address: int | None) -> CachedBlock:
        wanted = segment_size(size)
        if self.capacity is not None and self.reserved + wanted > self.capacity:
            self.on_full()
            self.release_cached()
            if self.reserved + wanted > self.capacity:
                raise DeviceFull(
                    f"{wanted} bytes are asked for, and {self.capacity - self.reserved} of {self.capacity} are left"
                )
        block = CachedBlock(self._place(wanted) if address is None else address, wanted, stream, size <= SMALL_SIZE)
        self.reserved += wanted
        self.num_segments += 1
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _place(self, num_bytes: int) -> int:
        """Where the driver puts a new segment."""
        if num_bytes >= _PLACED_BELOW:
            self._lowest -= num_bytes
            return self._lowest
        self._next_small += num_bytes
        return self._next_small - num_bytes

    @staticmethod
    def _split(block: CachedBlock, size: int) -> CachedBlock:
        rest = CachedBlock(block.address + size, block.size - size, block.stream, block.is_small)
        rest.before, rest.after, block.size = block, block.after, size
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        return rest

    @staticmethod
    def _join(first: CachedBlock, second: CachedBlock) -> CachedBlock:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _put_free(self, block: CachedBlock) -> None:
        insort(self._free[block.is_small], (block.stream, block.size, block.address, block))

    def _take_free(self, block: CachedBlock) -> None:
        pool = self._free[block.is_small]
        del pool[bisect_left(pool, (block.stream, block.size, block.address))]
