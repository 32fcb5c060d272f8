"""spmm on the device beside cuSPARSE (torch's CSR matrix, with values of ones), and gather-then-add.

Figures are TB/s gathered, num_edges * width * itemsize over the time, so that sizes can be compared; the limit is a
device-to-device copy that reads and writes as many bytes. A graph's hubs are read from the cache, so ours may pass it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Unit, Versus, of_peer, rate
from gnnsys.bench.gpu.inputs import GraphSize, copies, graph_sizes, random_rows, structure_on
from gnnsys.bench.workload import Workload
from gnnsys.ops import CSC
from gnnsys.ops import spmm as our_spmm

WIDTHS = (32, 100, 128, 256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = {"fp32": {32: 1.7, 100: 1.25, 128: 1.0, 256: 1.0}, "bf16": dict.fromkeys(WIDTHS, 1.5)}
AGREE = {"fp32": 1e-4, "bf16": 5e-2}  # hubs add up 100,000 numbers, and cuSPARSE does so in less than float32
WITHIN = 1.15  # backward may take this much longer than forward
CUSPARSE = ("cuSPARSE int32", "cuSPARSE int64")
COPY, FORWARD, SCATTER = "device copy", "forward", "index_select + index_add"
Call = Callable[[], Tensor]


def forward(work: Workload) -> Iterator[Case]:
    for size in graph_sizes(work):
        for dtype in DTYPES:
            for width in WIDTHS:

                def sides(size: GraphSize = size, dtype: str = dtype, width: int = width) -> dict[str, Side]:
                    csc, x = _inputs(work, size, dtype, width)
                    values = torch.ones(csc.num_edges, dtype=x.dtype, device=x.device)
                    ours, copy = _on_device({OURS: lambda: our_spmm(csc, x)}), _copy(work, size, dtype, width)
                    return ours | _cusparse(csc, x, values) | _on_device({COPY: copy})

                yield Case(
                    f"spmm/forward/{size.name}/{dtype}/{width}",
                    _gathered(size, dtype, width),
                    sides,
                    (Versus(CUSPARSE, TARGETS[dtype][width]),),
                    limit=COPY,
                    agree=AGREE[dtype],
                    repeats=11,
                )


def backward(work: Workload) -> Iterator[Case]:
    """Gradient of the features, over a transpose made once, beside forward."""
    for size in graph_sizes(work):
        for dtype in DTYPES:
            for width in WIDTHS:

                def sides(size: GraphSize = size, dtype: str = dtype, width: int = width) -> dict[str, Side]:
                    csc, x = _inputs(work, size, dtype, width)
                    csc.transpose()
                    leaf = x.requires_grad_()
                    out = our_spmm(csc, leaf)
                    grad = random_rows(work, csc.num_dst, width, DTYPES[dtype])
                    calls: dict[str, Call] = {
                        OURS: lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0],
                        FORWARD: lambda: our_spmm(csc, leaf.detach()),
                    }
                    return _on_device(calls)

                yield Case(
                    f"spmm/backward/{size.name}/{dtype}/{width}",
                    _gathered(size, dtype, width),
                    sides,
                    (Versus((FORWARD,), 1 / WITHIN),),
                    repeats=11,
                )


def beside_scatter(work: Workload) -> Iterator[Case]:
    """What one writes in torch: a message per edge, added at its destination. Its messages take up to 50 GB here."""
    small, large = graph_sizes(work)
    for size, width in ((small, 32), (small, 128), (small, 256), (large, 100)):

        def sides(size: GraphSize = size, width: int = width) -> dict[str, Side]:
            csc, x = _inputs(work, size, "fp32", width)
            src, dst = csc.indices.long(), _destinations(csc)

            def scatter() -> Tensor:
                return x.new_zeros(csc.num_dst, width).index_add_(0, dst, x.index_select(0, src))

            return _on_device({OURS: lambda: our_spmm(csc, x)}) | {SCATTER: of_peer(lambda: scatter, clock="device")}

        unit = _gathered(size, "fp32", width)
        name = f"spmm/scatter/{size.name}/fp32/{width}"
        yield Case(name, unit, sides, (Versus((SCATTER,), 10.0),), agree=AGREE["fp32"], repeats=5)


def variants(work: Workload) -> Iterator[Case]:
    """Mean and weights beside cuSPARSE with the values that do the same, max beside our own sum. They inform."""
    width = 128
    for size in graph_sizes(work):
        for variant in ("mean", "weighted", "max"):

            def sides(size: GraphSize = size, variant: str = variant) -> dict[str, Side]:
                csc, x = _inputs(work, size, "fp32", width)
                if variant == "max":
                    return _on_device({OURS: lambda: our_spmm(csc, x, reduce="max"), "sum": lambda: our_spmm(csc, x)})
                if variant == "mean":
                    values = csc.in_degrees().clamp(min=1).float().reciprocal()[_destinations(csc)]
                    ours = _on_device({OURS: lambda: our_spmm(csc, x, reduce="mean")})
                    return ours | _cusparse(csc, x, values)
                values = random_rows(work, csc.num_edges, 1).view(-1)
                return _on_device({OURS: lambda: our_spmm(csc, x, values)}) | _cusparse(csc, x, values)

            yield Case(
                f"spmm/{variant}/{size.name}/fp32/{width}",
                _gathered(size, "fp32", width),
                sides,
                (Versus(("sum",) if variant == "max" else CUSPARSE),),
                agree=None if variant == "max" else AGREE["fp32"],
                repeats=7,
            )


def _inputs(work: Workload, size: GraphSize, dtype: str, width: int) -> tuple[CSC, Tensor]:
    return structure_on(work, size), random_rows(work, size.num_nodes, width, DTYPES[dtype])


def _num_bytes(size: GraphSize, dtype: str, width: int) -> int:
    return size.num_edges * width * DTYPES[dtype].itemsize


def _gathered(size: GraphSize, dtype: str, width: int) -> Unit:
    return rate("TB/s", 1e-12 * _num_bytes(size, dtype, width))


def _on_device(calls: dict[str, Call]) -> dict[str, Side]:
    return {name: Side(call, clock="device") for name, call in calls.items()}


def _cusparse(csc: CSC, x: Tensor, values: Tensor) -> dict[str, Side]:
    """Destinations as rows of a torch CSR matrix, with both index types: torch keeps what it is given."""

    def make(idtype: torch.dtype) -> Call:
        indptr, indices = csc.indptr.to(idtype), csc.indices.to(idtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR a beta
            shape = (csc.num_dst, csc.num_src)
            matrix = torch.sparse_csr_tensor(indptr, indices, values, shape, check_invariants=False)
        return lambda: matrix @ x

    idtypes = zip(CUSPARSE, (torch.int32, torch.int64), strict=True)
    return {name: of_peer(partial(make, idtype), clock="device") for name, idtype in idtypes}


def _copy(work: Workload, size: GraphSize, dtype: str, width: int) -> Call:
    pairs = list(copies(work, _num_bytes(size, dtype, width)))

    def call() -> None:  # not a result to be compared
        for source, target in pairs:
            target.copy_(source)

    return call  # type: ignore[return-value]


def _destinations(csc: CSC) -> Tensor:
    ids = torch.arange(csc.num_dst, device=csc.indptr.device)
    return ids.repeat_interleave(csc.in_degrees(), output_size=csc.num_edges)


BENCHMARKS = [forward, backward, beside_scatter, variants]
