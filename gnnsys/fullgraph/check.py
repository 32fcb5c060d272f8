"""Whether layers can be computed bin by bin: each is tried on a small graph, whole and in pieces, before it runs.

A layer fits where a node's row depends on its own row and those of its in-neighbours alone. Some look further, divide
by degrees of what they happen to see, normalise over rows, draw random numbers or remember what they saw last. They
would run, and give other numbers than one process does: they are refused, with the reason. What is tried is a copy,
with parameters shaken so that one which begins at zero hides nothing; the user's modules stay as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gnnsys.comm.peers import Peers
from gnnsys.fullgraph.bins import Bin, make_bins
from gnnsys.fullgraph.edges import drawn
from gnnsys.fullgraph.layers import Dropout, Join, Rows, Stage, arguments, call, taken, working_on
from gnnsys.ops import CSC, EdgeData, WholeDegrees

_NODES, _EDGES = 60, 500
_BOUNDS = (0, 3, 4, 60)  # of the pieces
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest value
_COARSE = 0.05  # in other types, and where autocast computes in them


def check_layers(
    stages: Sequence[Stage], width: int, dtype: torch.dtype, device: torch.device, data: EdgeData | None = None
) -> None:
    """Raises ValueError at the first module of `stages` that gives other rows on pieces; the input has `width` columns,
    and edges have what `data` has.

    Nothing is drawn from torch's own generator: other threads may.
    """
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        _check_layers(stages, torch.randn(_NODES, width, generator=draws).to(device, dtype), draws, data)


def _check_layers(stages: Sequence[Stage], rows: Tensor, draws: torch.Generator, data: EdgeData | None) -> None:
    csc, bins = _sample(rows.device, draws, data)
    alone = make_bins(None, _BOUNDS, None)
    kept: dict[str, Tensor] = {}
    for stage in stages:
        kept |= dict.fromkeys(stage.keep_as, rows)
        if stage.conv is not None:
            rows = _tried(stage.conv, rows, csc, bins, draws)
        for module in stage.then:
            if isinstance(module, Join):
                rows = module(rows, kept[module.name])
            elif not isinstance(module, Dropout):  # ours is keyed by node
                rows = _tried(module, rows, None, alone, draws)


def _tried(module: nn.Module, rows: Tensor, csc: CSC | None, bins: Sequence[Bin], draws: torch.Generator) -> Tensor:
    """What a module makes of the whole, if pieces add up to it."""
    name = type(module).__name__
    try:
        tried = copy.deepcopy(module)
    except Exception as error:
        warnings.warn(f"{name} cannot be copied, and so not be tried on pieces of a graph: {error}", stacklevel=2)
        return _apply(module, rows, csc).contiguous()
    _shake(tried, draws)
    before = [buffer.clone() for buffer in tried.buffers()]
    try:
        whole, again = _apply(tried, rows, csc), _apply(tried, rows, csc)
    except Exception as error:
        takes, reason = "rows" if csc is None else "rows and a structure", str(error) or type(error).__name__
        reason += "" if csc is None else _about_edges(module, csc, str(error))
        raise ValueError(f"{name} cannot be applied to {takes}, {list(rows.shape)} {rows.dtype}: {reason}") from error
    if not isinstance(whole, Tensor) or whole.dim() != 2 or len(whole) != len(rows):
        got = list(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ValueError(f"{name} must give one row per node, [{len(rows)}, width], it gave {got}")
    if any(now.shape != was.shape or not torch.equal(now, was) for now, was in zip(tried.buffers(), before)):
        raise ValueError(
            f"{name} changes its buffers by the rows it sees, a bin's instead of the whole graph's: put what does "
            "(batch normalisation) into the list of layers itself, or switch it to eval()"
        )
    if not _close(again, whole):
        raise ValueError(
            f"{name} gives other rows every time while it trains, and would on other numbers of ranks: set its dropout "
            "to 0, and drop its output with nn.Dropout in the list of layers, whose mask is keyed by node"
        )
    try:
        pieces = torch.cat([_apply(tried, each.inputs(rows), each.csc, each.first, each.end) for each in bins])
    except Exception as error:
        raise ValueError(f"{_differs(name, csc)} ({type(error).__name__}: {error})") from error
    if pieces.dtype != whole.dtype:
        raise ValueError(
            f"{name} gives {whole.dtype} on the whole graph and {pieces.dtype} on a piece: give edge data the dtype of "
            f"the rows, {rows.dtype}"
        )
    if pieces.shape != whole.shape or not _close(pieces, whole):
        raise ValueError(_differs(name, csc))
    if csc is not None:
        _warn_if_deaf(tried, rows, csc, whole, draws)
    return whole.contiguous()


def _about_edges(module: nn.Module, csc: CSC, reason: str) -> str:
    """What a graph layer was given of edges when it failed, or might have missed."""
    rows = csc.edge_data.rows if csc.edge_data is not None else {}
    given = [f"{name} {list(rows[name].shape)}" for name in taken(module, rows)]
    if given:
        return f" (it was given {', '.join(given)}: gnnsys.fullgraph.Told says otherwise for one layer)"
    untold = [name for name in arguments(module) if name.startswith("edge_") and name != "edge_index"]
    misses = not reason or "None" in reason or any(name in reason for name in untold)
    return f" (edge_data= gives layers their {' and '.join(untold)})" if untold and misses else ""


def _warn_if_deaf(module: nn.Module, rows: Tensor, csc: CSC, whole: Tensor, draws: torch.Generator) -> None:
    """Warns of a layer whose rows are the same whatever it is given of edges."""
    data = csc.edge_data
    names = [] if data is None else taken(module, data.rows)
    if data is None or not names:
        return
    other = drawn(data, csc.to("cpu"), draws)
    other = other.with_tensors([each.to(csc.device) for each in other.tensors()])
    differ = any(not torch.equal(data.rows[name], other.rows[name]) for name in names)
    if differ and torch.equal(_apply(module, rows, replace(csc, edge_data=other)), whole):
        warnings.warn(
            f"{type(module).__name__} gives the same rows whatever {' and '.join(names)} is: it may need edge_dim, or "
            "does not pass on what it is given (gnnsys.fullgraph.call does); Told(layer) gives it nothing",
            stacklevel=2,
        )


def _apply(module: nn.Module, rows: Tensor, csc: CSC | None, first: int = 0, end: int = _NODES) -> Tensor:
    """A module on the nodes first to end."""
    with working_on(Rows(torch.arange(first, end, device=rows.device), 0)):
        out: Tensor = module(rows) if csc is None else call(module, rows, csc)
        return out


def _sample(device: torch.device, draws: torch.Generator, data: EdgeData | None) -> tuple[CSC, list[Bin]]:
    """A directed graph with loops, repeated edges and isolated nodes, and its pieces."""
    edges = torch.randint(_NODES - 4, (2, _EDGES), generator=draws)
    edges[1, :6] = edges[0, :6]
    csc = CSC.from_edge_index(edges, _NODES)
    csc = CSC(csc.indptr, csc.indices.to(torch.int32), _NODES)
    num_loops = torch.bincount(csc.dst()[csc.indices == csc.dst()], minlength=_NODES)
    csc.edge_data = None if data is None else drawn(data, csc, draws)
    csc, whole = csc.to(device), WholeDegrees(csc.in_degrees().to(device), num_loops.to(device))
    return csc, make_bins(csc, _BOUNDS, whole)


def _shake(module: nn.Module, draws: torch.Generator) -> None:
    for p in module.parameters():
        if p.is_floating_point() and not isinstance(p, UninitializedParameter):
            p.add_(torch.randn(p.shape, generator=draws).to(p), alpha=0.1)


def _close(got: Tensor, want: Tensor) -> bool:
    scale = want.nan_to_num().abs().max().clamp(min=1e-30)
    is_tf32 = want.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    is_coarse = is_tf32 or torch.is_autocast_enabled(want.device.type)
    limit = _COARSE if is_coarse else _TOLERANCE.get(want.dtype, _COARSE)
    return torch.allclose(got / scale, want / scale, rtol=0, atol=limit, equal_nan=True)


def _differs(name: str, csc: CSC | None) -> str:
    if csc is None:
        return (
            f"{name} makes a node's row depend on which others it is given, so its bins would not add up to the whole "
            "graph: use what works row by row (nn.LayerNorm), or batch normalisation as a layer of the list"
        )
    return (
        f"{name} gives other rows on a piece of a graph than on the whole: it looks further than one hop, divides by "
        "degrees of what it is given, normalises over it or remembers it. Use a layer whose rows depend on a node and "
        "its in-neighbours alone (SAGEConv, GATConv, GINConv, GraphConv, ...), or GCNConv, which is told of degrees"
    )


def check_parameters(parameters: Iterable[tuple[str, Tensor]], peers: Peers) -> None:
    """Every rank calls it: raises ValueError on all of them where a parameter is not the same everywhere."""
    names, sums = [], []
    for name, p in parameters:
        flat = p.detach().reshape(-1).to("cpu", torch.float64)
        names.append(name)
        sums.append(torch.stack([flat.sum(), flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64)]))
    if peers.world_size == 1 or not names:
        return
    low, high = torch.stack(sums), torch.stack(sums)
    peers.all_reduce(low, dist.ReduceOp.MIN).wait()
    peers.all_reduce(high, dist.ReduceOp.MAX).wait()
    differ = [
        name
        for name, same in zip(names, ((low == high) | (low.isnan() & high.isnan())).all(dim=1).tolist())
        if not same
    ]
    if differ:
        raise ValueError(
            f"{len(differ)} of {len(names)} parameters are not the same on all ranks, {differ[0]} is the first: call "
            "torch.manual_seed with one number on every rank before the layers are made, or load one state into all"
        )
