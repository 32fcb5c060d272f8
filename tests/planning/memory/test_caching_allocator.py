"""The model of torch's caching allocator: small cases by hand, and what holds in every order of calls."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gnnsys.planning.memory.caching_allocator import CachingAllocator, DeviceFull, round_size, segment_size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_chosen_as_torch_does(num_bytes, rounded, segment):
    assert round_size(num_bytes) == rounded
    assert segment_size(rounded) == segment


def test_small_blocks_share_a_segment_until_it_is_full():
    memory = CachingAllocator()
    for _ in range(4):
        memory.allocate(MIB // 2)
    assert (memory.allocated, memory.reserved) == (2 * MIB, 2 * MIB)
    memory.allocate(1)
    assert (memory.allocated, memory.reserved) == (2 * MIB + 512, 4 * MIB)


def test_a_large_block_is_split_only_where_more_than_a_mebibyte_remains():
    memory = CachingAllocator()
    first = memory.allocate(9 * MIB)  # of 20: 11 remain
    assert (memory.allocated, memory.reserved) == (9 * MIB, 20 * MIB)
    second = memory.allocate(10 * MIB)  # takes the 11 whole: 1 MiB would remain, which is not more than 1
    assert (memory.allocated, memory.reserved) == (20 * MIB, 20 * MIB)
    memory.free(first)
    memory.free(second)
    assert (memory.allocated, memory.reserved) == (0, 20 * MIB)
    memory.allocate(20 * MIB)  # the two are one again
    assert (memory.allocated, memory.reserved) == (20 * MIB, 20 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    memory = CachingAllocator()
    wide, _, narrow = memory.allocate(40 * MIB), memory.allocate(10 * MIB), memory.allocate(16 * MIB)
    memory.free(wide)
    memory.free(narrow)
    assert memory.allocate(15 * MIB).address == narrow.address
    assert memory.reserved == memory.peak_reserved == 66 * MIB


def test_streams_do_not_share_what_is_free():
    memory = CachingAllocator()
    memory.free(memory.allocate(12 * MIB, stream=0))
    memory.allocate(12 * MIB, stream=1)
    assert memory.reserved == 24 * MIB


def test_a_full_device_gives_back_whole_segments_before_it_refuses():
    memory = CachingAllocator(capacity=50 * MIB)
    memory.free(memory.allocate(30 * MIB))
    memory.allocate(40 * MIB)
    assert (memory.reserved, memory.peak_reserved) == (40 * MIB, 40 * MIB)
    with pytest.raises(DeviceFull, match=f"{20 * MIB} bytes are asked for, and {10 * MIB} of {50 * MIB} are left"):
        memory.allocate(2 * MIB)


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_calls_blocks_are_apart_and_bounds_hold(seed):
    draw, memory = random.Random(seed), CachingAllocator()
    live, asked, most_asked = [], 0, 0
    for _ in range(400):
        if live and draw.random() < 0.45:
            block, num_bytes = live.pop(draw.randrange(len(live)))
            memory.free(block)
            asked -= num_bytes
        else:
            num_bytes = int(2 ** draw.uniform(0, 25))
            live.append((memory.allocate(num_bytes, draw.randrange(2)), num_bytes))
            asked += num_bytes
        most_asked = max(most_asked, asked)
        assert asked <= memory.allocated <= memory.reserved
        assert memory.allocated == sum(block.size for block, _ in live)
        assert all(block.size >= round_size(num_bytes) for block, num_bytes in live)
        taken = sorted((block.address, block.size) for block, _ in live)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(taken))
    assert most_asked <= memory.peak_allocated <= memory.peak_reserved
    for block, _ in live:
        memory.free(block)
    assert memory.allocated == 0
    memory.release_cached()
    assert (memory.reserved, memory.num_segments) == (0, 0), "freed neighbours became whole segments again"


def test_what_comes_back_when_the_device_is_full_is_used():
    """As torch, which waits for the device before it is out of memory."""
    memory = CachingAllocator(capacity=64 * MIB)
    late = [memory.allocate(32 * MIB)]
    memory.allocate(32 * MIB)
    with pytest.raises(DeviceFull):
        memory.allocate(16 * MIB)
    memory.on_full = lambda: memory.free(late.pop())
    memory.allocate(16 * MIB)
    assert not late and memory.reserved == 48 * MIB
