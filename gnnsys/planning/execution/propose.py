"""Which ways a loader could go: by what fits into which memory, and by what cannot be better than another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gnnsys.planning.execution.rates import Rates
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED, Way

_SHARE = 0.5  # of the memory that is left, for what a way takes beside the batches and the model
_MOST_SPLITS = 3  # of the cores, beside what is done without a plan


@dataclass(frozen=True)
class Memory:
    """Bytes that could still be taken, by this rank."""

    device: int
    host: int


@dataclass(frozen=True)
class BatchLoad:
    """What a batch asks for: `row_bytes` of rows, of which a cache of so many bytes would have the share `hit_rate`."""

    row_bytes: int
    hit_rate: Callable[[int], float]


def propose_places(
    graph_bytes: int, *, is_pinned: bool, memory: Memory, load: BatchLoad | None = None, rates: Rates | None = None
) -> tuple[list[Way], dict[str, str]]:
    """Ways for batches on a device whose graph is in host memory; and those that are not tried, with the reason.

    The first is what is done without a plan: the host samples and gathers, or the device does in pinned memory.
    """
    ways, passed_over = [Way()], {}
    fits = int(_SHARE * memory.device)
    if graph_bytes <= fits:
        ways.append(Way(place=DEVICE, device_bytes=graph_bytes))
        for other in (PINNED, CACHED):
            passed_over[other] = "all of the graph fits the device, and nothing crosses the bus then"
    else:
        passed_over[DEVICE] = f"the graph takes {graph_bytes:,} bytes, and half of what the device has left is {fits:,}"
        host_bytes = 0 if is_pinned else graph_bytes
        if host_bytes > _SHARE * memory.host:
            left = int(_SHARE * memory.host)
            why = f"a pinned copy takes {graph_bytes:,} bytes, and half of what the host has left is {left:,}"
            passed_over |= {PINNED: why, CACHED: why}
        else:
            if not is_pinned:
                ways.append(Way(place=PINNED, host_bytes=host_bytes))
            ways.append(Way(place=CACHED, host_bytes=host_bytes, device_bytes=fits))
    if load is not None and rates is not None:
        ways = [replace(way, predicted=_loading_seconds(way, is_pinned, load, rates)) for way in ways]
    return ways, passed_over


def propose_splits(num_cores: int, loading: int, computing: int) -> list[Way]:
    """Ways to divide a rank's cores between loading and computing, on the host. The first is what is done without.

    >>> [way.name for way in propose_splits(4, 1, 1)]
    ['as given', 'as given, threads: 1 loading, 3 computing', 'as given, threads: 2 loading, 2 computing']
    """
    splits = [(1, num_cores - 1), (num_cores // 2, num_cores - num_cores // 2), (0, num_cores)]
    known, ways = {(loading, computing)}, [Way()]
    for split in splits:
        if split in known or split[1] < 1 or (num_cores == 1 and split[0] > 0):
            continue
        if split[0] == 0 and num_cores > 2:
            continue  # one core that loads is a small share of many
        known.add(split)
        ways.append(Way(loading_threads=split[0], compute_threads=split[1]))
    return ways[: 1 + _MOST_SPLITS]


def _loading_seconds(way: Way, is_pinned: bool, load: BatchLoad, rates: Rates) -> float:
    """The rows of a batch, by whoever is the slowest on their way."""
    if way.place == DEVICE:
        return load.row_bytes / rates.device
    if way.place == CACHED:
        return (1 - load.hit_rate(way.device_bytes)) * load.row_bytes / rates.bus
    if way.place == PINNED or is_pinned:
        return load.row_bytes / rates.bus
    return load.row_bytes * max(1 / rates.bus, 1 / rates.host)


def is_given(way: Way) -> bool:
    """Whether a way is what a loader does by itself."""
    return way.place == GIVEN and way.loading_threads is None and way.compute_threads is None
