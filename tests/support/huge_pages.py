"""Memory in large pages, for a process that others are forked from: a fork copies one entry of a table per page.

With small pages it takes 10 ms of a processor to fork a process that has imported torch and to end it again, with large
ones 5, and a run forks thousands. Where the kernel has no large pages everything is as it was.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

SIZE = 2 << 20  # of a large page, where pages have 4 KiB
MADV_COLLAPSE = 25  # since Linux 6.1


def use_huge_pages() -> int:
    """Moves what this process has written so far, its heap above all, to large pages; how many there are now.

    A page is left as it is where nothing was written to it, or where the kernel has no place for it.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, file_number, *name = line.split()
        if access != "rw-p" or file_number != "0" or name not in ([], ["[heap]"]):
            continue
        first, end = (int(number, 16) for number in addresses.split("-"))
        places = range(-(-first // SIZE) * SIZE, end // SIZE * SIZE, SIZE)
        count += sum(madvise(place, SIZE, MADV_COLLAPSE) == 0 for place in places)
    return count
