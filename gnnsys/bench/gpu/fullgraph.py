"""Full-graph training by one process on the device, beside PyG, torch.sparse and what memory and arithmetic allow.

GraphSAGE with means, 100-256-256-47, no dropout; an epoch is forward, cross-entropy over all nodes, backward and Adam.
The first losses of all sides must agree before anything is timed. A peer that cannot run here, for want of memory or of
a kernel, is named with the reason and left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, refusing, value
from gnnsys.bench.gpu.fullgraph_sides import (
    NO_BUDGET,
    ON_DEVICE,
    Epoch,
    Makers,
    Widths,
    agreeing,
    bus_seconds,
    by_hand,
    layers_alone,
    made,
    ours,
    peak_of,
    pyg_with_matrix,
    pyg_with_messages,
    widths_of,
    with_host_rows,
)
from gnnsys.bench.gpu.inputs import GraphSize, copies, graph_sizes, num_cores, random_rows, synchronize
from gnnsys.bench.measure import clock
from gnnsys.bench.workload import Workload

LAYERS = "our layers alone"
SPARSE, SPARSE_ORDERED = "torch.sparse", "torch.sparse, our order"
PYG_MATRIX, PYG_MESSAGES = "PyG, CSR matrix", "PyG, edge_index"
GATHERED, LEAST, PRODUCTS = "bytes gathered", "least bytes", "matrix products"
BUDGET, EPOCH = "budget", "an epoch"
BUS, UP, DOWN = "its bytes copied", "to the device", "back"
NUM_SETTLING = 3  # epochs in front of one that is timed
NUM_AGGREGATIONS = 4  # in an epoch whose sums of features are there: layers 2 and 3, and back


def epoch(work: Workload) -> Iterator[Case]:
    """Beside others; and as a share of two bounds by the device's memory (ratios below 1), and of its arithmetic's."""
    _, size = graph_sizes(work)
    missing = {side: reason for side in (PYG_MATRIX, PYG_MESSAGES) for reason in peers.missing("pyg").values()}

    def sides() -> dict[str, Side]:
        makers: Makers = {
            OURS: lambda: ours(work),
            LAYERS: lambda: layers_alone(work),
            SPARSE: lambda: by_hand(work, ordered=False),
            SPARSE_ORDERED: lambda: by_hand(work, ordered=True),
            PYG_MATRIX: lambda: pyg_with_matrix(work),
        }
        found = _beside_others(makers, missing)
        least, gathered = bytes_moved(size, widths_of(work))
        found[GATHERED] = Side(partial(_copy_seconds, work, gathered))
        found[LEAST] = Side(partial(_copy_seconds, work, least))
        found[PRODUCTS] = Side(partial(clock("device"), _products(work, size)))
        return found

    def beside_messages() -> dict[str, Side]:
        makers: Makers = {OURS: lambda: ours(work), PYG_MESSAGES: lambda: pyg_with_messages(work)}
        return _beside_others(makers, missing)

    versus = (
        *(Versus((name,)) for name in (SPARSE, SPARSE_ORDERED, LAYERS)),
        Versus((PYG_MATRIX,), required=False),
        *(Versus((name,)) for name in (GATHERED, LEAST, PRODUCTS)),
    )
    yield Case("fullgraph/epoch", value("s"), sides, versus, limit=GATHERED, repeats=7, missing=missing)
    # By itself, so that PyG has the device's memory: its messages are a row per edge, 127 GB of 256 numbers each
    beside = (Versus((PYG_MESSAGES,), required=False),)
    yield Case("fullgraph/beside messages", value("s"), beside_messages, beside, repeats=2, missing=missing)


def making(work: Workload) -> Iterator[Case]:
    """What is done once: plan, bins, structures and rows on the device, a first pass without gradients. It informs."""

    def sides() -> dict[str, Side]:
        _, seconds = made(work)
        return {OURS: Side(lambda: seconds), EPOCH: Side(partial(_seconds, ours(work)))}

    yield Case("fullgraph/making", value("s"), sides, (Versus((EPOCH,)),), repeats=1)


def host_rows(work: Workload) -> Iterator[Case]:
    """Rows of all layers in host memory, and a budget of a quarter of what an epoch takes with them on the device.

    Seconds beside copies of the bytes that an epoch was counted to move, both ways at once; those bytes; the peak. An
    epoch is timed behind others of the same side: the first ones page-lock memory, which torch keeps for the next.
    """
    for size in graph_sizes(work):
        yield from _host_rows(work, size)


def _host_rows(work: Workload, size: GraphSize) -> Iterator[Case]:
    def seconds() -> dict[str, Side]:
        found = with_host_rows(work, size)
        epochs = {OURS: found.budgeted, ON_DEVICE: found.on_device}
        if found.whole is not None:
            epochs[NO_BUDGET] = found.whole
        return {**_timed(epochs, num_cores(), NUM_SETTLING), BUS: Side(lambda: bus_seconds(work, *found.moved()))}

    def moved() -> dict[str, Side]:
        found = with_host_rows(work, size)
        up, down = (max(1, each) / 1e9 for each in found.moved())  # where the device is the host nothing moves
        return {OURS: Side(lambda: up + down), UP: Side(lambda: up), DOWN: Side(lambda: down)}

    def peak() -> dict[str, Side]:
        found = with_host_rows(work, size)
        return {
            OURS: Side(lambda: peak_of(work, found.budgeted) / 1e9, num_cores()),
            BUDGET: Side(lambda: found.budget / 1e9),
            ON_DEVICE: Side(lambda: found.peak / 1e9),
        }

    name = f"fullgraph/rows on the host/{size.name}"
    informing = (ON_DEVICE,) if size.is_large else (NO_BUDGET, ON_DEVICE)
    versus = (Versus((BUS,), target=0.5), *(Versus((side,)) for side in informing))
    yield Case(f"{name}/epoch", value("s"), seconds, versus, limit=BUS, repeats=3)
    yield Case(f"{name}/bytes", value("GB"), moved, (Versus((UP,)), Versus((DOWN,))), repeats=1)
    beside = (Versus((BUDGET,)), Versus((ON_DEVICE,)))
    yield Case(f"{name}/peak", value("GB"), peak, beside, limit=BUDGET, repeats=1)


def bytes_moved(size: GraphSize, widths: Widths) -> tuple[int, int]:
    """Bytes through device memory in an epoch: the least, and with a row read for every edge.

    An epoch is four aggregations and what is dense between them. If each of these reads every input once and writes
    every result once, with d features, h hidden and c classes, float32 numbers per node are

        dense 1           2d + h    sums of features, which never change, and features; rows 1
        aggregation       2h        rows 1; sums 1
        dense 2, 3        3h + 2c   sums 1, rows 1; rows 2 and both halves of layer 3, whose rows are narrower
        aggregation       3c        both halves; the result
        loss              2c        the result; its gradient
        aggregation       2c        that; the gradient of the half that was aggregated
        back through 3, 2 5h + 2c   both, rows 2 (for its ReLU too), sums 1, rows 1; gradients of sums 1 and of rows 1
        aggregation       4h        both, rows 1 (for its ReLU); the whole gradient of rows 1
        back through 1    2d + h    that, sums of features, features

    and besides, an int64 offset per node and an int32 id per edge in each aggregation, and an int64 label per node.
    Weights and Adam's state are too small to count. Rows of all nodes are many times the cache, so that an aggregation
    reads a row per edge instead of one per node, but for what a cache holds of the hubs: the second number.
    """
    d, h, c = widths
    least = size.num_nodes * (4 * (4 * d + 16 * h + 11 * c) + 8 * NUM_AGGREGATIONS + 8)
    least += 4 * NUM_AGGREGATIONS * size.num_edges
    return least, least + 4 * (size.num_edges - size.num_nodes) * (2 * h + 2 * c)


def _copy_seconds(work: Workload, num_bytes: int) -> float:
    """How long copies on the device take that read and write as many bytes."""
    pairs = list(copies(work, num_bytes))

    def call() -> None:
        for source, target in pairs:
            target.copy_(source)

    return clock("device")(call)


def _products(work: Workload, size: GraphSize) -> Callable[[], None]:
    """All matrix products of an epoch and nothing else: two per layer there, two for its weights, two for its rows."""
    d, h, c = widths = widths_of(work)
    rows = {width: random_rows(work, size.num_nodes, width) for width in widths}
    out = {width: torch.empty_like(rows[width]) for width in widths}
    back = torch.empty_like(rows[h])
    layers = [(d, h, random_rows(work, h, d)), (h, h, random_rows(work, h, h)), (h, c, random_rows(work, c, h))]

    def call() -> None:
        for taken, given, weight in layers:
            for _ in range(2):  # of sums, and of own rows
                torch.mm(rows[taken], weight.t(), out=out[given])
                torch.mm(out[given].t(), rows[taken])
                if taken == h:  # features need no gradient
                    torch.mm(out[given], weight, out=back)

    return call


def _beside_others(makers: Makers, missing: Mapping[str, str]) -> dict[str, Side]:
    """The sides whose losses agree. Others' that cannot run say why; ours must."""
    refused = dict(missing)
    found = _timed(agreeing(makers, refused))
    reasons = {name: reason for name, reason in refused.items() if name not in missing}
    if LAYERS in reasons:
        raise RuntimeError(f"{LAYERS}: {reasons[LAYERS]}")
    theirs = {name: replace(side, foreign=name not in (OURS, LAYERS)) for name, side in found.items()}
    return theirs | {name: refusing(reason) for name, reason in reasons.items()}


def _timed(epochs: Mapping[str, Epoch], threads: int = 1, num_settling: int = 0) -> dict[str, Side]:
    return {name: Side(partial(_seconds, train, num_settling), threads) for name, train in epochs.items()}


def _seconds(train: Epoch, num_settling: int = 0) -> float:
    for _ in range(num_settling):
        train()
    synchronize()
    start = time.perf_counter()
    train()
    synchronize()
    return time.perf_counter() - start


BENCHMARKS = [epoch, making, host_rows]
