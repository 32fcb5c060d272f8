"""Ways to train GraphSAGE on the whole graph, each a function that trains one epoch and gives its loss.

All begin with the same weights. Ours is `HybridParallel`; the others are our layers alone, PyG's model, and
torch.sparse by hand, at its best.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.bench.case import OURS
from gnnsys.bench.gpu.inputs import (
    NUM_CLASSES,
    NUM_FEATURES,
    GraphSize,
    device,
    graph_sizes,
    is_gpu,
    large_graph,
    structure_of,
    structure_on,
    synchronize,
)
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.fullgraph import HybridParallel, peak_bytes
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.nn import GraphSAGE, SAGEConv
from gnnsys.ops import CSC

NUM_LAYERS = 3
LEARNING_RATE = 1e-2  # large enough for the first losses to differ by ten times what they may be apart
NUM_CHECKED, AGREE = 3, 1e-3  # so many losses of every side, so far from ours at most
BUDGET_SHARE = 4  # a budget is one over this of what an epoch takes with all rows on the device
_COPIED_BYTES = 1 << 28  # at a time, to measure the bus
NO_BUDGET, ON_DEVICE = "no budget", "rows on the device"
Epoch = Callable[[], Tensor]  # trains one, and gives its loss
Makers = Mapping[str, Callable[[], Epoch]]


class Widths(NamedTuple):
    features: int
    hidden: int
    classes: int


class HostRows(NamedTuple):
    """Training with rows of all layers on the host, and what it takes on the device."""

    budgeted: Epoch
    whole: Epoch | None  # without a budget, of the small graph: of the large one the host has no memory for both
    on_device: Epoch  # with all rows there
    budget: int
    peak: int  # of an epoch with all rows there
    moved: Callable[[], tuple[int, int]]  # bytes to the device and back in the last epoch with the budget


def widths_of(work: Workload) -> Widths:
    return Widths(NUM_FEATURES, 256 if work.sizes is FULL else 64, NUM_CLASSES)


def agreeing(makers: Makers, refused: dict[str, str]) -> dict[str, Epoch]:
    """The sides that run here, trained for the same few epochs; RuntimeError where a loss is not that of the first.

    The first must run. Another that does not, for want of memory or of an operation, is noted among the `refused`; one
    that is there already is left out.
    """
    found: dict[str, Epoch] = {}
    expected: list[float] = []
    for name, make in makers.items():
        if name in refused:
            continue
        try:
            train, losses = _begun(make)
        except RuntimeError as error:  # torch's own errors are, and its lack of memory is
            if not found:
                raise
            refused[name] = _reason(error)
        _release()  # what the error no longer holds
        if name in refused:
            continue
        expected = expected or losses
        if not all(abs(loss - want) <= AGREE * abs(want) for loss, want in zip(losses, expected, strict=True)):
            raise RuntimeError(f"losses of {name} and {next(iter(makers))} do not agree: {losses} and {expected}")
        found[name] = train
    return found


def _begun(make: Callable[[], Epoch]) -> tuple[Epoch, list[float]]:
    train = make()
    return train, [float(train()) for _ in range(NUM_CHECKED)]


def _reason(error: RuntimeError) -> str:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return f"out of memory: {first}" if isinstance(error, torch.OutOfMemoryError) else f"does not run: {first}"


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(work: Workload) -> Epoch:
    model, _ = made(work)
    return _from_the_start(work, model, *_rows(work))


def made(work: Workload) -> tuple[HybridParallel, float]:
    """The model, made once for all cases, and how many seconds that took, with a first pass.

    The graph is planned on the host, and its structure then put on the device.
    """

    def make() -> tuple[HybridParallel, float]:
        x, _ = _rows(work)
        synchronize()
        start = time.perf_counter()
        model = HybridParallel(_layers(work), large_graph(work))
        with torch.no_grad():
            model(x)
        synchronize()
        return model, time.perf_counter() - start

    return work.once("gpu/full graph, ours", make)


def with_host_rows(work: Workload, size: GraphSize) -> HostRows:
    """Features and rows of all layers on the host; the loss is computed on the device, as labels are there."""

    def make() -> HostRows:
        target = device(work)
        graph = Graph({NODE: size.num_nodes}, {EDGE: structure_of(work, size)})
        x = work.rows(size.num_nodes, NUM_FEATURES)
        y = (work.ids(size.num_nodes, size.num_nodes) % NUM_CLASSES).to(target)
        there = x.to(target)

        def hybrid(**options: Any) -> HybridParallel:
            return HybridParallel(_layers(work), graph, output_device=target, **options)

        on_device = hybrid()
        train = _from_the_start(work, on_device, there, y)
        train()  # what is made once is no epoch's
        peak = peak_of(work, train)
        # Of the small graph a quarter is less than the gradients of the parameters alone.
        budget = peak // BUDGET_SHARE if work.sizes is FULL else peak
        budgeted = hybrid(memory_budget=budget)
        makers: dict[str, Callable[[], Epoch]] = {
            ON_DEVICE: lambda: _from_the_start(work, on_device, there, y),
            OURS: lambda: _from_the_start(work, budgeted, x, y),
        }
        if not size.is_large:
            makers[NO_BUDGET] = lambda: _from_the_start(work, hybrid(), x, y)
        found = _all_of(makers)

        def moved() -> tuple[int, int]:
            return budgeted.times.bytes_up, budgeted.times.bytes_down

        return HostRows(found[OURS], found.get(NO_BUDGET), found[ON_DEVICE], budget, peak, moved)

    return work.once(f"gpu/full graph, rows on the host, {size.name}", make)


def bus_seconds(work: Workload, num_up: int, num_down: int) -> float:
    """How long copies of so many bytes take, to the device and back at the same time, from and to pinned memory."""
    target, on_gpu = device(work), is_gpu(work)
    host = [torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    there = [torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=target) for _ in range(2)]
    streams = [torch.cuda.Stream(target) for _ in range(2)] if on_gpu else [None, None]

    def copied(number: int, into: Tensor, source: Tensor, num_bytes: int) -> None:
        with torch.cuda.stream(streams[number]) if on_gpu else nullcontext():
            for first in range(0, num_bytes, _COPIED_BYTES):
                size = min(_COPIED_BYTES, num_bytes - first)
                into[:size].copy_(source[:size], non_blocking=True)

    seconds = []
    for _ in range(2):  # the second counts
        synchronize()
        start = time.perf_counter()
        copied(0, there[0], host[0], num_up)
        copied(1, host[1], there[1], num_down)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[-1]


def _all_of(makers: Makers) -> dict[str, Epoch]:
    """Sides that are all ours: what does not run is an error."""
    refused: dict[str, str] = {}
    found = agreeing(makers, refused)
    if refused:
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    return found


def layers_alone(work: Workload) -> Epoch:
    """What a user writes first: our model on the whole structure."""
    x, y = _rows(work)
    model, csc = _model(work), structure_on(work, graph_sizes(work)[1])
    return _training(model, lambda: model(x, csc), y)


def peak_of(work: Workload, train: Epoch) -> int:
    """The most bytes on the device during an epoch, besides what is there before it."""
    synchronize()
    return peak_bytes(device(work), train)


def _from_the_start(work: Workload, model: HybridParallel, x: Tensor, y: Tensor) -> Epoch:
    """With the weights that all sides begin with, whatever another case trained it to."""
    model.layers.load_state_dict(nn.ModuleList(_layers(work)).state_dict())
    return _training(model, lambda: model(x), y)


# -- peers -------------------------------------------------------------------------------------------------------------


def pyg_with_matrix(work: Workload) -> Epoch:
    """PyG given a CSR matrix: it multiplies instead of making messages."""
    return _pyg(work, _csr(structure_on(work, graph_sizes(work)[1]), torch.int64))


def pyg_with_messages(work: Workload) -> Epoch:
    """PyG given edge_index: a row per edge is made in every layer."""
    csc = structure_on(work, graph_sizes(work)[1])
    return _pyg(work, torch.stack([csc.indices.long(), csc.dst()]))


def _pyg(work: Workload, edges: Tensor) -> Epoch:
    from torch_geometric.nn import GraphSAGE as PygSAGE

    widths, (x, y) = widths_of(work), _rows(work)
    model = PygSAGE(widths.features, widths.hidden, NUM_LAYERS, widths.classes).to(device(work))
    model.load_state_dict(_model(work).state_dict())
    return _training(model, lambda: model(x, edges), y)


def by_hand(work: Workload, *, ordered: bool) -> Epoch:
    """torch.sparse, with the matrix of means and its transpose both kept.

    `ordered` does what ours does besides: sums of features are made once, and the last layer's dense half goes first.
    """
    (x, y), model = _rows(work), _model(work)
    convs = cast("list[SAGEConv]", list(model.convs))
    there, back = _means(structure_on(work, graph_sizes(work)[1]))
    sums = there @ x if ordered else None

    def forward() -> Tensor:
        rows = x
        for index, conv in enumerate(convs):
            linear = conv.lin_l
            if index == 0 and sums is not None:
                out = linear(sums)
            elif ordered and linear.out_features < linear.in_features:
                out = _Mean.apply(conv.transform(rows), there, back) + linear.bias
            else:
                out = linear(_Mean.apply(rows, there, back))
            out = torch.addmm(out, rows, conv.lin_r.weight.t())
            rows = out.relu() if index < NUM_LAYERS - 1 else out
        return rows

    return _training(model, forward, y)


class _Mean(torch.autograd.Function):
    """A sparse matrix times rows; the gradient takes the transpose that was made before."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.transposed @ grads[0] if ctx.needs_input_grad[0] else None, None, None


def _means(csc: CSC) -> tuple[Tensor, Tensor]:
    """The matrix whose product with rows is the mean over in-neighbours, and its transpose, ids in int32."""
    turned, shares = csc.transpose(), csc.in_degrees().clamp(min=1).float().reciprocal()
    there = _csr(csc, torch.int32, shares.repeat_interleave(csc.in_degrees(), output_size=csc.num_edges))
    return there, _csr(turned, torch.int32, shares[turned.indices.long()])


def _csr(csc: CSC, idtype: torch.dtype, values: Tensor | None = None) -> Tensor:
    """Destinations as rows of a torch CSR matrix, of ones where nothing else is said."""
    values = torch.ones(csc.num_edges, device=csc.device) if values is None else values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR a beta
        return torch.sparse_csr_tensor(
            csc.indptr.to(idtype), csc.indices.to(idtype), values, (csc.num_dst, csc.num_src), check_invariants=False
        )


# -- what they share ---------------------------------------------------------------------------------------------------


def _training(model: nn.Module, forward: Callable[[], Tensor], y: Tensor) -> Epoch:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def epoch() -> Tensor:
        loss = F.cross_entropy(forward(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return epoch


def _model(work: Workload) -> GraphSAGE:
    """On the device, with the same weights every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        widths = widths_of(work)
        return GraphSAGE(widths.features, widths.hidden, NUM_LAYERS, widths.classes).to(device(work))


def _layers(work: Workload) -> list[nn.Module]:
    first, *others = _model(work).convs
    return [first, *(layer for conv in others for layer in (nn.ReLU(), conv))]


def _rows(work: Workload) -> tuple[Tensor, Tensor]:
    """Features and labels on the device, the same tensors for all."""

    def make() -> tuple[Tensor, Tensor]:
        rows = large_graph(work).node_data[NODE]
        return torch.as_tensor(rows["x"]).to(device(work)), torch.as_tensor(rows["y"]).to(device(work))

    return work.once("gpu/full graph, rows", make)
