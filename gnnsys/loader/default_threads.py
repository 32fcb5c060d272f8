"""How many threads a loader has where nobody says: what this process may use, less what training needs, within what
pays. `choose_num_threads` is a pure function; `default_num_threads` looks at this process."""

from __future__ import annotations

import os
from enum import Enum
from typing import NamedTuple

import torch

from gnnsys.observe import num_local_ranks, num_usable_cores


class LoadingWork(Enum):
    """What loading threads do."""

    HOST = "samples and gathers on the host"
    IN_ORDER = "the same, and runs functions of the user's, which see batches in order as long as one thread calls them"
    DEVICE = "queues work for a device that has the graph in its memory"
    BUS = "queues work for a device that reads the graph from host memory: one samples while another's rows come"
    SUMS = "the same, and makes sums of rows on the host: as many as make some at once, and two more, see `SumThreads`"
    MACHINES = "samples and gathers where hops and rows are waited for, on other machines"
    DEVICE_MACHINES = "the same, and a device has this machine's part: they wait for it, too, all in one stream"


_LIMITS = {  # the fewest and the most threads that pay
    LoadingWork.HOST: (1, 6),  # measured on 16 cores: a step of 77 ms with one takes 16 with six
    LoadingWork.IN_ORDER: (1, 1),
    LoadingWork.DEVICE: (1, 1),
    LoadingWork.BUS: (2, 2),
    LoadingWork.SUMS: (3, 6),
    LoadingWork.MACHINES: (3, 6),
    LoadingWork.DEVICE_MACHINES: (3, 3),  # measured on an H200: a step of 20 ms with three takes 27 with six
}


class SumThreads(NamedTuple):
    """How the host makes sums for a device: `at_once` batches, by `each` threads."""

    at_once: int
    each: int

    @classmethod
    def of(cls, num_cores: int) -> SumThreads:
        """Half of the cores: with more of them at work, training's own thread goes slower than sums are made faster.

        Measured on 16: a step of 3.1 ms takes as long beside 8 threads, and 5 to 8 beside 12.

        >>> SumThreads.of(16), SumThreads.of(2)
        (SumThreads(at_once=2, each=4), SumThreads(at_once=1, each=1))
        """
        half = max(1, num_cores // 2)
        each = min(4, half)
        return cls(half // each, each)

    @classmethod
    def here(cls) -> SumThreads:
        """Of this rank's share of the cores."""
        return cls.of(max(1, num_usable_cores() // num_local_ranks(os.environ)))


def choose_num_threads(work: LoadingWork, *, num_cores: int, num_local_ranks: int, num_training_threads: int) -> int:
    """The cores of this rank that training leaves free, within what pays for `work`."""
    fewest, most = _LIMITS[work]
    if work is LoadingWork.SUMS:
        most = min(most, SumThreads.of(num_cores // num_local_ranks).at_once + 2)
    return max(fewest, min(most, num_cores // num_local_ranks - num_training_threads))


def default_num_threads(work: LoadingWork, device: torch.device | None = None) -> int:
    """For a loader that is made now, whose batches go to `device`, or stay on the host.

    Training on a GPU takes one core; on the CPU it takes as many as torch has threads. Batches that stay on the host
    are taken to be trained on there.
    """
    on_gpu = device is not None and device.type != "cpu"
    return choose_num_threads(
        work,
        num_cores=num_usable_cores(),
        num_local_ranks=num_local_ranks(os.environ),
        num_training_threads=1 if on_gpu else torch.get_num_threads(),
    )


def default_fetch_threads(num_threads: int) -> int:
    """Of `num_threads` by default, so many wait for rows and put them in place: one for every two of them.

    >>> [default_fetch_threads(n) for n in (0, 1, 3, 4, 6)]
    [1, 1, 1, 2, 3]
    """
    return max(1, num_threads // 2)
