"""spmm beside DGL's copy_u, torch.sparse.mm and gather-then-scatter, forward and backward, and its peak memory.

The limit beside a figure is reading: a word of every line of the row of every edge, in the order of the edges, and
nothing done with it. Who reads rows as the structure has them cannot be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, megabytes, milliseconds, of_peer
from gnnsys.bench.ops.peer_graphs import dgl_graph, torch_csr
from gnnsys.bench.workload import Workload
from gnnsys.ops import CSC, read_rows
from gnnsys.ops import spmm as our_spmm

Aggregate = Callable[[Tensor], Tensor]
Makers = Mapping[str, Callable[[], Aggregate]]
Bind = Callable[[Aggregate, Tensor], Callable[[], Tensor]]
TORCH_INT32, TORCH_INT64 = "torch.sparse.mm int32", "torch.sparse.mm int64"
LIMIT = "reading alone"
LEAST_MEASURED = 16 << 20  # bytes of output; less drowns in what the allocator keeps


def forward(work: Workload) -> Iterator[Case]:
    for reduce in ("sum", "mean"):
        for threads in (1, 2):

            def sides(reduce: str = reduce, threads: int = threads) -> dict[str, Side]:
                x = work.rows(work.csc.num_src, work.sizes.dim)
                found = _sides(_bind, _ours(work.csc, reduce), _others(work.csc, reduce), x, threads)
                return found | {LIMIT: Side(partial(read_rows, x, work.csc.indices), threads)}

            yield Case(
                f"spmm/{reduce}/forward/{threads}t",
                milliseconds(),
                sides,
                (Versus(("dgl", TORCH_INT32), 1.2), Versus((TORCH_INT64,))),
                limit=LIMIT,
                repeats=3,
                missing=peers.missing("dgl"),
            )


def backward(work: Workload) -> Iterator[Case]:
    for reduce in ("sum", "mean"):
        for threads in (1, 2):

            def sides(reduce: str = reduce, threads: int = threads) -> dict[str, Side]:
                x = work.rows(work.csc.num_src, work.sizes.dim)
                others = _others(work.csc, reduce)
                del others[TORCH_INT64]  # always behind int32, and seconds per call
                found = _sides(_gradient, _ours(work.csc, reduce), others, x, threads)
                return found | {LIMIT: Side(partial(read_rows, x, work.csc.transpose().indices), threads)}

            yield Case(
                f"spmm/{reduce}/backward/{threads}t",
                milliseconds(),
                sides,
                (Versus(("dgl",), 1.2), Versus((TORCH_INT32,), 3.0)),
                limit=LIMIT,
                repeats=3,
                missing=peers.missing("dgl"),
            )


def widths(work: Workload) -> Iterator[Case]:
    """Rows of other widths, and of bfloat16."""
    shapes = [(width, torch.float32) for width in (32, 100, 256)]
    shapes += [(width, torch.bfloat16) for width in (32, 100, 128, 256)]
    for width, dtype in shapes:
        for direction, threads in (("forward", 1), ("forward", 2), ("backward", 1), ("backward", 2)):

            def sides(
                width: int = width, dtype: torch.dtype = dtype, direction: str = direction, threads: int = threads
            ) -> dict[str, Side]:
                x = work.rows(work.csc.num_src, width).to(dtype)
                others = _others(work.csc, "sum")
                del others[TORCH_INT64]
                if dtype != torch.float32:
                    del others[TORCH_INT32]  # torch multiplies no matrix of bfloat16 in this layout
                bind, csc = (_bind, work.csc) if direction == "forward" else (_gradient, work.csc.transpose())
                found = _sides(bind, _ours(work.csc, "sum"), others, x, threads)
                return found | {LIMIT: Side(partial(read_rows, x, csc.indices), threads)}

            name = f"spmm/{width} x {str(dtype)[6:]}/{direction}/{threads}t"
            beside = ("dgl", TORCH_INT32) if dtype == torch.float32 else ("dgl",)
            missing = peers.missing("dgl")
            yield Case(name, milliseconds(), sides, (Versus(beside, 1.2),), limit=LIMIT, repeats=3, missing=missing)


def beside_scatter(work: Workload) -> Iterator[Case]:
    """Gather-then-scatter makes an E x d tensor, so this one runs on an eighth of the graph."""
    for direction in ("forward", "backward"):
        for threads in (1, 2):

            def sides(direction: str = direction, threads: int = threads) -> dict[str, Side]:
                csc = work.small_graph.csc()
                x = work.rows(csc.num_src, work.sizes.dim)
                bind = _bind if direction == "forward" else _gradient
                return _sides(bind, _ours(csc, "sum"), _scatters(csc) | _torch_sparse(csc), x, threads)

            yield Case(
                f"spmm/scatter/{direction}/{threads}t",
                milliseconds(),
                sides,
                (Versus(("index_add_",), 5.0), Versus(("pyg",), 5.0), Versus(("torch-sparse",), required=False)),
                repeats=3,
                missing=peers.missing("pyg", "torch-sparse"),
            )


def memory(work: Workload) -> Iterator[Case]:
    """Peak extra memory is that of the output (at most twice it): no message per edge is ever made."""
    for direction in ("forward", "backward"):

        def sides(direction: str = direction) -> dict[str, Side]:
            csc = work.small_graph.csc()
            x = work.rows(csc.num_src, max(work.sizes.dim, LEAST_MEASURED // (4 * csc.num_src)))
            bind = _bind if direction == "forward" else _gradient
            found = _sides(bind, _ours(csc, "sum"), {"index_add_": _scatters(csc)["index_add_"]}, x)
            return found | {"the output alone": Side(lambda: torch.zeros_like(x).add_(1))}

        yield Case(
            f"spmm/memory/{direction}",
            megabytes(),
            sides,
            (Versus(("the output alone",), 0.5), Versus(("index_add_",))),
            limit="the output alone",
            repeats=3,
        )


def _sides(bind: Bind, ours: Aggregate, others: Makers, x: Tensor, threads: int = 1) -> dict[str, Side]:
    """Ours and others', each bound to the same rows; theirs are made at the warm-up."""
    found = {OURS: Side(bind(ours, x), threads)}
    for name, make in others.items():
        found[name] = of_peer(lambda make=make: bind(make(), x), threads)  # type: ignore[misc]
    return found


def _others(csc: CSC, reduce: str) -> dict[str, Callable[[], Aggregate]]:
    """DGL's where it imports, and torch's with both index types."""
    found: dict[str, Callable[[], Aggregate]] = {}
    for name, idtype in ((TORCH_INT32, torch.int32), (TORCH_INT64, torch.int64)):
        found[name] = lambda idtype=idtype: partial(torch.sparse.mm, torch_csr(csc, idtype, reduce))  # type: ignore[misc]
    if "dgl" not in peers.missing("dgl"):
        found["dgl"] = lambda: _dgl_copy(csc, reduce)
    return found


def _dgl_copy(csc: CSC, reduce: str) -> Aggregate:
    dgl, graph = peers.find("dgl"), dgl_graph(csc)
    copy_u = getattr(dgl.ops, f"copy_u_{reduce}")  # type: ignore[union-attr]
    return lambda x: copy_u(graph, x)


def _ours(csc: CSC, reduce: str) -> Aggregate:
    csc.transpose()  # as peers: the reverse structure is made once, not in every call
    return lambda x: our_spmm(csc, x, reduce=reduce)


def _scatters(csc: CSC) -> dict[str, Callable[[], Aggregate]]:
    src, dst = csc.indices.long(), csc.dst()

    def pyg() -> Aggregate:
        from torch_geometric.utils import scatter

        return lambda x: scatter(x.index_select(0, src), dst, dim=0, dim_size=csc.num_dst, reduce="sum")

    found: dict[str, Callable[[], Aggregate]] = {
        "index_add_": lambda: lambda x: x.new_zeros(csc.num_dst, x.shape[1]).index_add(0, dst, x.index_select(0, src))
    }
    return found if "pyg" in peers.missing("pyg") else found | {"pyg": pyg}


def _torch_sparse(csc: CSC) -> dict[str, Callable[[], Aggregate]]:
    module = peers.find("torch-sparse")
    if isinstance(module, str):
        return {}

    def make() -> Aggregate:
        matrix = module.SparseTensor(
            rowptr=csc.indptr, col=csc.indices.long(), sparse_sizes=(csc.num_dst, csc.num_src), is_sorted=True
        )
        return lambda x: module.matmul(matrix, x, reduce="sum")

    return {"torch-sparse": make}


def _bind(aggregate: Aggregate, x: Tensor) -> Callable[[], Tensor]:
    return lambda: aggregate(x)


def _gradient(aggregate: Aggregate, x: Tensor) -> Callable[[], Tensor]:
    """The backward pass alone, on a forward pass done once."""
    leaf = x.detach().clone().requires_grad_()
    out = aggregate(leaf)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)[0]


BENCHMARKS = [forward, backward, widths, beside_scatter, memory]
