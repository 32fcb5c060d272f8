"""Which ways a loader could go: by what fits into which memory, and by what cannot be better than another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gnnsys.planning.execution.rates import Rates
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED, Way

_SHARE = 0.5  # of the memory that is left, for what a way takes beside the batches and the model
_WORTH_A_CACHE = 0.1  # of the rows that batches ask for: with less in it, a cache changes nothing
_WORTH_TRYING = 0.9  # of the seconds that loading is predicted to take without the host's help
_MOST_BY_HOST = 0.5  # of the batches: a draw takes the host ten times as long as a device
_READ_PER_BYTE = 2.5  # bytes of structure that cross the bus for each byte of a sample: whole sectors for single ids
PRODUCTS = "products of the first layer made by the host"


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
    sums: SumLoad | None = None  # where the first layer takes sums
    products: ProductLoad | str | None = None  # where it multiplies rows first, or why the host cannot do that
    sampling: SampleLoad | None = None
    given_hits: float | None = None  # the share that a cache of the user's own has, where there is one


@dataclass(frozen=True)
class SumLoad:
    """What the sums of a batch's first layer take: `own_bytes` are its destinations' rows, and as many have the sums.
    `seconds` by all cores of this rank, with rows in host memory."""

    own_bytes: int
    seconds: float


@dataclass(frozen=True)
class ProductLoad:
    """What products of a batch's first layer take on the host: `num_bytes` go up, and as many of gradients come down;
    `seconds` by all cores of this rank, for both."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class SampleLoad:
    """What sampling a batch takes: `host` by the threads that the host has for it, one batch each; `device` of the bus,
    where the structure is in pinned memory, None where it is not there yet; `num_bytes` has the sample."""

    host: float
    device: float | None
    num_bytes: int


def propose_places(
    graph_bytes: int, *, is_pinned: bool, memory: Memory, load: BatchLoad | None = None, rates: Rates | None = None
) -> tuple[list[Way], dict[str, str]]:
    """Ways for batches on a device whose graph is in host memory; and those that are not tried, with the reason.

    The first is what is done without a plan: the host samples and gathers, or the device does in pinned memory.
    """
    ways, passed_over = [Way()], {}
    if load is not None and load.given_hits is not None:
        passed_over["other places"] = "rows have a cache of your own"
        return _with_host_work(ways, is_pinned, load, rates, passed_over), passed_over
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
    return _with_host_work(ways, is_pinned, load, rates, passed_over), passed_over


def _with_host_work(
    ways: list[Way], is_pinned: bool, load: BatchLoad | None, rates: Rates | None, passed_over: dict[str, str]
) -> list[Way]:
    """The ways, and those where the host does some of the work for a device; with what is predicted of them."""
    if load is None:
        return ways
    if isinstance(load.products, str):
        passed_over[PRODUCTS] = load.products
    if load.sums is not None:
        ways = ways + [replace(way, sums=(True,)) for way in ways if way.place == DEVICE]
    if rates is None:
        return ways
    places = ways
    on_bus = [way for way in ways if way.place in (PINNED, CACHED) or (way.place == GIVEN and is_pinned)]
    if on_bus and on_bus[-1].place == CACHED and load.hit_rate(on_bus[-1].device_bytes) >= _WORTH_A_CACHE:
        on_bus = on_bus[-1:]
    if load.sums is not None:
        ways += [replace(way, sums=pattern) for way in on_bus for pattern in _mixes(way, load, rates)]
    elif load.sampling is not None:
        ways += [replace(way, by_host=pattern) for way in on_bus if any(pattern := _host_turns(way, load, rates))]
    ways = [replace(way, predicted=_loading_seconds(way, is_pinned, load, rates)) for way in ways]
    if isinstance(load.products, ProductLoad):
        where = [way for way in on_bus if way.place != CACHED or len(on_bus) == 1] or ways[:1]
        found = _with_products(places, where, ways, is_pinned, load, rates)
        if isinstance(found, str):
            passed_over[PRODUCTS] = found
        else:
            ways += found
    return ways


def _with_products(
    places: list[Way], where: list[Way], others: list[Way], is_pinned: bool, load: BatchLoad, rates: Rates
) -> list[Way] | str:
    """Ways where the host multiplies the rows of some batches, by the share that keeps bus and cores equally busy; or
    why none of them is better than the `others`."""
    assert isinstance(load.products, ProductLoad)
    if any(way.place == DEVICE for way in places):
        return "all of the graph fits the device, and nothing crosses the bus then"
    found, best = [], min(way.predicted for way in others if way.predicted is not None)
    for way in where:
        rows, made = _rows_seconds(way, is_pinned, load, rates), load.products.num_bytes / rates.bus
        if rows <= made:
            continue
        share = min(1.0, rows / (rows - made + load.products.seconds))
        for pattern in dict.fromkeys([spread(share), spread(2 * share / 3)]):
            mixed = replace(way, products=pattern)
            seconds = _loading_seconds(mixed, is_pinned, load, rates)
            if any(pattern) and seconds <= _WORTH_TRYING * best:
                found.append(replace(mixed, predicted=seconds))
    if found:
        return found
    took, bytes_up = 1000 * load.products.seconds, load.products.num_bytes
    return (
        f"products of a batch and their gradients take the cores {took:.1f} ms and are {bytes_up:,} bytes, and without "
        f"them loading is predicted to take {1000 * best:.1f} ms"
    )


def _rows_seconds(way: Way, is_pinned: bool, load: BatchLoad, rates: Rates) -> float:
    """Of the rows of a batch, from host memory to the device, where no work is done for it."""
    return _loading_seconds(way.without_patterns(), is_pinned, load, rates)


def _host_turns(way: Way, load: BatchLoad, rates: Rates) -> tuple[bool, ...]:
    """Which batches the host should sample, so that neither the bus nor its threads wait for the other."""
    sampling = load.sampling
    assert sampling is not None
    rows, copied = _missed(way, load) * load.row_bytes / rates.bus, sampling.num_bytes / rates.bus
    device = _READ_PER_BYTE * copied if sampling.device is None else sampling.device
    if device <= copied:
        return ()
    share = min(_MOST_BY_HOST, (rows + device) / (device - copied + sampling.host))
    is_worth_it = rows + device - share * (device - copied) <= _WORTH_TRYING * (rows + device)
    return spread(share) if is_worth_it else ()


def spread(share: float) -> tuple[bool, ...]:
    """A pattern of one, two or four batches in which about `share` are True, spread evenly: a turn has whole ones.

    >>> spread(0.5), spread(0.76), spread(1.0)
    ((False, True), (False, True, True, True), (True,))
    """
    count = min(4, max(0, round(4 * share)))
    size = {0: 1, 2: 2, 4: 1}.get(count, 4)
    count = count * size // 4
    return tuple((place + 1) * count // size > place * count // size for place in range(size))


def _mixes(way: Way, load: BatchLoad, rates: Rates) -> list[tuple[bool, ...]]:
    """Which batches' sums the host should make, so that neither bus nor cores wait for the other: the share that makes
    the busier of the two as little busy as can be. And two thirds of that, as training needs cores too."""
    rows, summed, cores = _on_bus_and_cores(way, load, rates)
    if rows <= summed:
        return []
    share = min(1.0, rows / (rows - summed + cores))
    if rows - share * (rows - summed) > _WORTH_TRYING * rows:
        return []
    patterns = dict.fromkeys([spread(share), spread(2 * share / 3)])
    return [pattern for pattern in patterns if any(pattern)]


def _on_bus_and_cores(way: Way, load: BatchLoad, rates: Rates) -> tuple[float, float, float]:
    """Seconds of the bus for a batch's rows, and for its sums and own rows; seconds of the cores for these."""
    assert load.sums is not None
    missed = _missed(way, load)
    rows = missed * load.row_bytes / rates.bus
    summed = (1 + missed) * load.sums.own_bytes / rates.bus
    return rows, summed, missed * load.sums.seconds


def propose_loading_threads(num_cores: int, loading: int) -> list[Way]:
    """Numbers of loading threads on the host, where the loader has `loading` without a plan: the first way.

    torch's own threads stay as they are: sums by more or fewer threads are rounded differently, so a choice by the
    clock would change what is trained.

    >>> [way.name for way in propose_loading_threads(8, 3)]
    ['as given', 'as given, threads: 1 loading', 'as given, threads: 4 loading']
    """
    # With two cores, a loading thread takes half of them from training, so we also try none.
    counts = [0] if num_cores == 1 else [1, num_cores // 2] + [0] * (num_cores == 2)
    return [Way(), *(Way(loading_threads=count) for count in dict.fromkeys(counts) if count != loading)]


def _missed(way: Way, load: BatchLoad) -> float:
    """The share of rows that no cache has."""
    return 1 - (load.hit_rate(way.device_bytes) if way.place == CACHED else load.given_hits or 0.0)


def _loading_seconds(way: Way, is_pinned: bool, load: BatchLoad, rates: Rates) -> float:
    """The rows of a batch, by whoever is the slowest on their way."""
    if any(way.sums) and way.place != DEVICE:
        rows, summed, cores = _on_bus_and_cores(way, load, rates)
        share = sum(way.sums) / len(way.sums)
        return max((1 - share) * rows + share * summed, share * cores)
    if any(way.products):
        assert isinstance(load.products, ProductLoad)
        share, rows = sum(way.products) / len(way.products), _rows_seconds(way, is_pinned, load, rates)
        return max((1 - share) * rows + share * load.products.num_bytes / rates.bus, share * load.products.seconds)
    if way.place == DEVICE:
        return load.row_bytes / rates.device
    if way.place in (CACHED, PINNED) or is_pinned:
        return _missed(way, load) * load.row_bytes / rates.bus
    return load.row_bytes * max(1 / rates.bus, 1 / rates.host)


def is_given(way: Way) -> bool:
    """Whether a way is what a loader does by itself."""
    threads = (way.loading_threads, way.compute_threads)
    return way.place == GIVEN and threads == (None, None) and not way.has_patterns
