"""How many threads and connections messages have where nobody says: from the cores of a machine, and who shares them.

A connection stays with one thread of libzmq, which with CURVE encrypts about 0.6 GB/s. Sealed requests on several lanes
are gathered and sealed by several threads of the server. A few cores are left to those who train.
"""

from __future__ import annotations

_MOST_LANES = 4  # with as many threads at the other end: over 2 GB/s, which is more than most networks carry
_MOST_SERVER_THREADS = 8


def default_lanes(num_cores: int, num_local_ranks: int) -> int:
    """Connections of a rank to each server, and I/O threads of its client: at most half of the rank's cores."""
    return max(1, min(_MOST_LANES, num_cores // num_local_ranks // 2))


def default_server_io_threads(num_cores: int) -> int:
    """Threads of a machine's server that encrypt: at most a quarter of the cores, as trainers here decrypt as much."""
    return max(1, min(_MOST_SERVER_THREADS, num_cores // 4))


def default_server_threads(num_cores: int) -> int:
    """Threads of a machine's server that run handlers: two, or as many as encrypt."""
    return max(2, default_server_io_threads(num_cores))
