"""Operators beside each other: how much longer each takes while the other one runs.

Two threads call one operator each, again and again, for a short while; and each of them alone. On a GPU each thread has
a stream of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from gnnsys.planning.costs.timing import CostProbe

HOST_PAIRS = (("sample/host", "spmm/host"), ("sample/host", "product/host"), ("spmm/host", "product/host"))
DEVICE_PAIRS = (
    ("spmm/host", "copy/up"),
    ("spmm/host", "gather/bus"),
    ("sample/host", "copy/up"),
    ("product/host", "copy/up"),
    ("copy/up", "copy/down"),
    ("gather/bus", "sample/pinned"),
    ("spmm/device", "copy/up"),
    ("spmm/device", "gather/bus"),
    ("product/device", "gather/bus"),
    ("sample/device", "spmm/device"),
)
_LEAST_CALLS = 3
_MOST_WAIT = 60.0


def measure_pairs(
    probes: dict[str, CostProbe], pairs: Sequence[tuple[str, str]], seconds: float, threads: int
) -> dict[tuple[str, str], float]:
    """Slow-downs of both operators of every pair that has probes, none below 1. Takes `seconds`, about."""
    pairs = [pair for pair in pairs if all(name in probes for name in pair)]
    names = sorted({name for pair in pairs for name in pair})
    each = seconds / max(1, len(names) + len(pairs))
    alone = {name: _rates([probes[name]], each, threads)[0] for name in names}
    found = {}
    for one, other in pairs:
        beside = _rates([probes[one], probes[other]], each, threads)
        found[one, other] = max(1.0, alone[one] / beside[0])
        found[other, one] = max(1.0, alone[other] / beside[1])
    return found


def _rates(probes: Sequence[CostProbe], seconds: float, threads: int) -> list[float]:
    """Calls per second of each, all at once: what was called while the others were still at it."""
    ready, over = threading.Barrier(len(probes)), threading.Event()
    ends: list[list[float]] = [[] for _ in probes]
    errors: list[BaseException] = []
    before = torch.get_num_threads()

    def work(number: int) -> None:
        probe = probes[number]
        try:
            torch.get_num_threads()  # a thread takes the process's number when it first asks, and no later
            torch.set_num_threads(threads)
            stream = nullcontext() if probe.device is None else torch.cuda.stream(torch.cuda.Stream(probe.device))
            with stream, torch.no_grad():
                probe.call()
                _wait(probe)
                ready.wait(_MOST_WAIT)
                ends[number].append(time.perf_counter())
                while len(ends[number]) <= _LEAST_CALLS or not over.is_set():
                    probe.call()
                    _wait(probe)
                    ends[number].append(time.perf_counter())
                    is_long = ends[number][-1] - ends[number][0] > seconds
                    if is_long and all(len(some) > _LEAST_CALLS for some in ends):
                        over.set()
        except BaseException as error:
            errors.append(error)
            ready.abort()
            over.set()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(probes))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(before)
    if errors:
        raise errors[0]
    until = min(some[-1] for some in ends)  # from then on somebody was alone
    return [_rate([end for end in some if end <= until]) for some in ends]


def _rate(ends: Sequence[float]) -> float:
    return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 1e-9


def _wait(probe: CostProbe) -> None:
    if probe.device is not None:
        torch.cuda.current_stream(probe.device).synchronize()
