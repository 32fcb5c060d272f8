"""Whether layers can be computed bin by bin: each is tried on a small graph, whole and in pieces, before it runs.

A layer fits where a node's row depends on its own row and those of its in-neighbours alone. Some look further, divide
by degrees of what they happen to see, normalise over rows, draw random numbers or remember what they saw last. They
would run, and give other numbers than one process does: they are refused, with the reason. Gradients are compared as
rows are, since hooks may change them. What is tried is a copy, with parameters shaken so that one which begins at zero
hides nothing; the user's modules stay as they are. Hooks are the user's own, and see the small graph.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from gnnsys.comm import Peers
from gnnsys.fullgraph.keyed_dropout import Dropout, KeyedRows, working_on
from gnnsys.fullgraph.modules import JoinKept
from gnnsys.fullgraph.plan.bins import Bin, make_bins
from gnnsys.fullgraph.plan.default_device import on_host
from gnnsys.fullgraph.plan.edge_data import drawn
from gnnsys.fullgraph.plan.graph_types import EDGE_TYPE, GraphTypes
from gnnsys.fullgraph.plan.model_stages import ModelStage, taken
from gnnsys.fullgraph.plan.module_layout import is_lazy
from gnnsys.fullgraph.plan.present_types import PresentTypes
from gnnsys.fullgraph.run.call_layer import arguments, call
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer, layer_name
from gnnsys.graph import NodeType
from gnnsys.nn import HOOKS, has_hooks, why_whole
from gnnsys.ops import CSC, EdgeData, WholeDegrees

_NODES, _EDGES = 60, 500
_BOUNDS = (0, 3, 4, 60)  # of the pieces
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest value
_OF_GRADS = 10.0  # times as much for gradients, which add up more
_COARSE = 0.05  # in other types, and where autocast computes in them


def check_layers(
    stages: Sequence[ModelStage], width: int, dtype: torch.dtype, device: torch.device, data: EdgeData | None = None,
    given: Collection[NodeType] | None = None,
) -> None:  # fmt: skip
    """Raises ValueError at the first module of `stages` that gives other rows on pieces, or other gradients where those
    are on; the input has `width` columns, and edges have what `data` has. On a typed graph it has rows of the types
    `given`, and a layer that reads rows which nobody makes is refused too.

    Nothing is drawn from torch's own generator: other threads may.
    """
    draws, has_grads = torch.Generator("cpu").manual_seed(0), torch.is_grad_enabled()
    lazy = is_lazy(module for stage in stages for module in stage.modules)  # copies of them are drawn
    seeded = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=lazy)
    with without_modes(), torch.no_grad(), seeded:  # a trace of memory computes no rows, and these are compared
        rows = torch.randn(_NODES, width, generator=draws, device="cpu").to(device, dtype)
        _check_layers(stages, rows, draws, data, given, has_grads)


def _check_layers(
    stages: Sequence[ModelStage], rows: Tensor, draws: torch.Generator, data: EdgeData | None,
    given: Collection[NodeType] | None, has_grads: bool,
) -> None:  # fmt: skip
    types = next(
        (m.types for stage in stages for m in stage.modules if isinstance(m, (TypedConv, TypedRowLayer))), None
    )
    with on_host():
        csc, ids = (_sample(draws, data), torch.arange(_NODES)) if types is None else _typed_sample(types, draws)
        num_loops = torch.bincount(csc.dst()[csc.indices == csc.dst()], minlength=_NODES)
        pieces = make_bins(csc, _BOUNDS, WholeDegrees(csc.in_degrees(), num_loops))
    device, alone = rows.device, make_bins(None, _BOUNDS, None)
    csc, ids, bins = csc.to(device), ids.to(device), [each.to(device, device) for each in pieces]
    kept: dict[str, Tensor] = {}
    present = None if types is None else PresentTypes(types, ids, given)
    rows = rows if present is None else present.zeroed(rows)
    for stage in stages:
        kept |= dict.fromkeys(stage.keep_as, rows)
        if present is not None:
            present.keep(stage.keep_as)
        if stage.conv is not None:
            rows = _tried(_Trial(stage.conv, rows, ids, csc, bins), draws, has_grads, present)
        for module in stage.then:
            if isinstance(module, Dropout) and not has_hooks(module) and "forward" not in vars(module):
                continue  # ours is keyed by node
            marked = kept[module.name] if isinstance(module, JoinKept) else None
            if isinstance(module, JoinKept) and present is not None:
                present.join(module.name, rows, kept[module.name])
            trial = _Trial(module, rows, ids, None, alone, marked)
            rows = _tried(trial, draws, has_grads, present)
            stage.in_place |= trial.writes


@dataclass
class _Trial:
    """A module, the rows it is tried on, and how those are cut; of a `JoinKept` also the rows at its mark."""

    module: nn.Module
    rows: Tensor
    ids: Tensor
    csc: CSC | None
    bins: Sequence[Bin]
    marked: Tensor | None = None
    writes: bool = False  # whether it was seen to write what it was given

    @property
    def name(self) -> str:
        return layer_name(self.module)

    def apply(self, rows: Tensor | None = None, here: Bin | None = None, csc: CSC | None = None) -> Any:
        """What it makes of the nodes of a bin, or of all; `rows` are those of the bin's sources."""
        here = here or Bin(0, _NODES, None, csc or self.csc)
        given = (here.inputs(self.rows) if rows is None else rows).clone()
        before = _version(given)
        with working_on(KeyedRows(self.ids[here.first : here.end], 0)):
            if here.csc is not None:
                out = call(self.module, given, here.csc)
            elif self.marked is not None:
                out = self.module(given, self.marked[here.first : here.end])
            else:
                out = self.module(given)
        self.writes |= _version(given) != before
        return out

    def grads(self, bins: Sequence[Bin], weight: Tensor) -> list[Tensor]:
        """Those of the rows and of all parameters, of the sum of weight * out, added up over bins."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        totals = [torch.zeros_like(each) for each in (self.rows, *trained)]
        for here in bins:
            rows = here.inputs(self.rows).detach().clone().requires_grad_()
            with torch.enable_grad():
                out = self.apply(rows, here)
            if not out.requires_grad:
                continue
            found = torch.autograd.grad(out, [rows, *trained], weight[here.first : here.end], allow_unused=True)
            for total, grad in zip(totals[1:], found[1:], strict=True):
                total += 0 if grad is None else grad
            if found[0] is not None:
                own = torch.arange(here.first, here.end, device=rows.device)
                src = own if here.csc is None else torch.arange(_NODES, device=rows.device)
                totals[0].index_add_(0, src if here.src is None else here.src.long(), found[0])
        return totals


def _version(rows: Tensor) -> int:
    """How often they were written, which torch does not count of inference tensors."""
    return 0 if rows.is_inference() else rows._version


def _tried(trial: _Trial, draws: torch.Generator, has_grads: bool, present: PresentTypes | None) -> Tensor:
    """What a module makes of the whole, if pieces add up to it."""
    module = trial.module
    if present is None:
        return _whole(trial, draws, has_grads)
    present.take(module)
    rows = _whole(trial, draws, has_grads)
    present.make(module, trial.module)
    return rows


def _whole(trial: _Trial, draws: torch.Generator, has_grads: bool) -> Tensor:
    name, csc, rows, module = trial.name, trial.csc, trial.rows, trial.module
    try:
        trial.module = _copied(module)
    except Exception as error:
        warnings.warn(f"{name} cannot be copied, and so not be tried on pieces of a graph: {error}", stacklevel=2)
        return trial.apply().contiguous()
    _shake(trial.module, draws)
    before = [buffer.clone() for buffer in trial.module.buffers()]
    try:
        whole, again = trial.apply(), trial.apply()
    except Exception as error:
        takes, reason = "rows" if csc is None else "rows and a structure", str(error) or type(error).__name__
        reason += "" if csc is None else _about_edges(module, csc, str(error))
        text = f"{name} cannot be applied to {takes}, {list(rows.shape)} {rows.dtype}: {reason}"
        raise ValueError(text + _whole_since(module)) from error
    if not isinstance(whole, Tensor) or whole.dim() != 2 or len(whole) != len(rows):
        got = list(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ValueError(f"{name} must give one row per node, [{len(rows)}, width], it gave {got}")
    if any(
        now.shape != was.shape or not torch.equal(now, was)
        for now, was in zip(trial.module.buffers(), before, strict=True)
    ):
        raise ValueError(
            f"{name} changes its buffers whenever it is called, which it is for every bin: put batch normalisation "
            "into the list of layers itself, and switch others (spectral_norm) to eval() or remove them"
        )
    if not _close(again, whole):
        raise ValueError(
            f"{name} gives other rows every time while it trains, and would on other numbers of ranks: set its dropout "
            "to 0, and drop its output with nn.Dropout in the list of layers, whose mask is keyed by node"
        )
    if trial.writes and csc is not None:
        raise ValueError(f"{name} writes the rows it is given, which other bins read too: let it work on a copy")
    try:
        pieces = torch.cat([trial.apply(here=each) for each in trial.bins])
    except Exception as error:
        raise ValueError(f"{_differs(module, csc)} ({type(error).__name__}: {error})") from error
    if pieces.dtype != whole.dtype:
        raise ValueError(
            f"{name} gives {whole.dtype} on the whole graph and {pieces.dtype} on a piece: give edge data the dtype of "
            f"the rows, {rows.dtype}"
        )
    if pieces.shape != whole.shape or not _close(pieces, whole):
        raise ValueError(_differs(module, csc))
    if has_grads:
        _try_back(trial, module, whole, draws)
    if csc is not None:
        _warn_if_deaf(trial, csc, whole, draws)
    return whole.contiguous()


def _try_back(trial: _Trial, module: nn.Module, whole: Tensor, draws: torch.Generator) -> None:
    weight = torch.randn(whole.shape, generator=draws, device="cpu").to(whole)
    try:
        want = trial.grads([Bin(0, _NODES, None, trial.csc)], weight)
    except RuntimeError:  # what cannot be differentiated says so to who calls backward
        return
    found = trial.grads(trial.bins, weight)
    scale = torch.stack([each.detach().nan_to_num().abs().max().to(whole) for each in want if each.numel()]).max()
    if not all(_close(a, b, scale, _OF_GRADS) for a, b in zip(found, want, strict=True) if b.numel()):
        raise ValueError(
            f"{trial.name} gives other gradients on pieces of a graph than on the whole: its backward, or a hook on "
            f"it, looks at all rows at once. Let it treat every row by itself{_whole_since(module)}"
        )


def _copied(module: nn.Module) -> nn.Module:
    """A copy whose hooks are the module's own; what they made of parameters (weight_norm, prune) they make again."""
    inside = {id(inner) for inner in module.modules()}
    memo: dict[int, Any] = {}
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        for name in HOOKS:
            for hook in vars(inner)[name].values():
                if id(getattr(hook, "__self__", None)) not in inside:  # else it is bound to the copy
                    memo[id(hook)] = hook
    return copy.deepcopy(module, memo)


def _about_edges(module: nn.Module, csc: CSC, reason: str) -> str:
    """What a graph layer was given of edges when it failed, or might have missed."""
    if isinstance(module, TypedConv):
        return ""
    rows = csc.edge_data.rows if csc.edge_data is not None else {}
    given = [f"{name} {list(rows[name].shape)}" for name in taken(module, rows)]
    if given:
        return f" (it was given {', '.join(given)}: gnnsys.fullgraph.EdgeArguments says otherwise for one layer)"
    untold = [name for name in arguments(module) if name.startswith("edge_") and name != "edge_index"]
    misses = not reason or "None" in reason or any(name in reason for name in untold)
    return f" (edge_data= gives layers their {' and '.join(untold)})" if untold and misses else ""


def _warn_if_deaf(trial: _Trial, csc: CSC, whole: Tensor, draws: torch.Generator) -> None:
    """Warns of a layer whose rows are the same whatever it is given of edges."""
    module, data = trial.module, csc.edge_data
    names = [] if data is None or isinstance(module, TypedConv) else taken(module, data.rows)
    if data is None or not names:
        return
    other = drawn(data, csc.to("cpu"), draws)
    other = other.with_tensors([each.to(csc.device) for each in other.tensors()])
    differ = any(not torch.equal(data.rows[name], other.rows[name]) for name in names)
    if differ and torch.equal(trial.apply(csc=replace(csc, edge_data=other)), whole):
        warnings.warn(
            f"{type(module).__name__} gives the same rows whatever {' and '.join(names)} is: it may need edge_dim, or "
            "does not pass on what it is given (gnnsys.fullgraph.call does); EdgeArguments(layer) gives it nothing",
            stacklevel=2,
        )


def _sample(draws: torch.Generator, data: EdgeData | None) -> CSC:
    """A directed graph with loops, repeated edges and isolated nodes.

    No node has several loops: which of them PyG keeps the weight of is undefined on a device.
    """
    edges = torch.randint(_NODES - 4, (2, _EDGES), generator=draws, device="cpu")
    edges[1, :6] = edges[0, :6]
    is_loop = edges[0] == edges[1]
    loops = edges[0, is_loop].unique()
    edges = torch.cat([edges[:, ~is_loop], loops.expand(2, -1)], dim=1)
    edges = edges[:, torch.randperm(edges.shape[1], generator=draws, device="cpu")]
    csc = CSC.from_edge_index(edges, _NODES)
    csc = CSC(csc.indptr, csc.indices.to(torch.int32), _NODES)
    csc.edge_data = None if data is None else drawn(data, csc, draws)
    return csc


def _typed_sample(types: GraphTypes, draws: torch.Generator) -> tuple[CSC, Tensor]:
    """The same with edges of every type that can have some, and ids of its nodes, whose types take turns."""
    sizes = [end - first for first, end in pairwise(types.offsets)]
    there = [number for number, size in enumerate(sizes) if size] or [0]
    of_nodes = torch.tensor([there[node % len(there)] for node in range(_NODES)])
    turns = torch.arange(_NODES) // len(there)
    ids = torch.tensor(types.offsets)[of_nodes] + turns % torch.tensor(sizes).clamp(min=1)[of_nodes]
    nodes = [(of_nodes[: _NODES - 4] == number).nonzero().view(-1) for number in range(len(sizes))]
    ends = [(types.node_types.index(t[0]), types.node_types.index(t[2])) for t in types.edge_types]
    edges, of_edges = [torch.zeros(2, 0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int16)]
    for number, pair in enumerate(ends):
        if all(nodes[t].numel() for t in pair):
            picks = [torch.randint(nodes[t].numel(), (max(4, _EDGES // len(ends)),), generator=draws) for t in pair]
            edges.append(torch.stack([nodes[t][pick] for t, pick in zip(pair, picks, strict=True)]))
            of_edges.append(torch.full((edges[-1].shape[1],), number, dtype=torch.int16))
    csc, kinds = CSC.from_edge_index(torch.cat(edges, dim=1), _NODES), torch.cat(of_edges)
    kinds = kinds if csc.edge_ids is None else kinds[csc.edge_ids.long()]
    return CSC(csc.indptr, csc.indices.to(torch.int32), _NODES, edge_data=EdgeData({EDGE_TYPE: kinds})), ids


def _shake(module: nn.Module, draws: torch.Generator) -> None:
    for p in module.parameters():
        if p.is_floating_point() and not isinstance(p, UninitializedParameter):
            p.add_(torch.randn(p.shape, generator=draws, device="cpu").to(p), alpha=0.1)


def _close(got: Tensor, want: Tensor, scale: Tensor | None = None, times: float = 1.0) -> bool:
    """Whether two are the same but for rounding, as a part of `scale`, by default the largest that is wanted."""
    scale = (want.nan_to_num().abs().max() if scale is None else scale).clamp(min=1e-30)
    is_tf32 = want.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    is_coarse = is_tf32 or torch.is_autocast_enabled(want.device.type)
    limit = _COARSE if is_coarse else _TOLERANCE.get(want.dtype, _COARSE)
    return torch.allclose(got / scale, want / scale, rtol=0, atol=limit * times, equal_nan=True)


def _differs(module: nn.Module, csc: CSC | None) -> str:
    name = layer_name(module)
    if csc is None:
        return (
            f"{name} makes a node's row depend on which others it is given, so its bins would not add up to the whole "
            f"graph: use what works row by row (nn.LayerNorm), or batch normalisation as a layer of the list"
            f"{_whole_since(module)}"
        )
    return (
        f"{name} gives other rows on a piece of a graph than on the whole: it looks further than one hop, divides by "
        "degrees of what it is given, normalises over it or remembers it. Use a layer whose rows depend on a node and "
        "its in-neighbours alone (SAGEConv, GATConv, GINConv, GraphConv, ...), or GCNConv, which is told of degrees"
        f"{_whole_since(module)}"
    )


def _whole_since(module: nn.Module) -> str:
    """What to do about a module that cannot be computed in bins because it was changed."""
    module = module.conv if isinstance(module, TypedConv) else module
    reason = why_whole(module)
    if not reason:
        return ""
    return (
        f". {type(module).__name__} {reason}, so it is called as a whole and not taken apart: give its parts as the "
        "list of layers, with what was added as a module of its own"
    )


def check_parameters(parameters: Iterable[tuple[str, Tensor]], peers: Peers) -> None:
    """Every rank calls it: raises ValueError on all of them where a parameter is not the same everywhere."""
    names, sums = [], []
    for name, p in parameters:
        flat = p.detach().reshape(-1).to("cpu", torch.float64)
        names.append(name)
        sums.append(torch.stack([flat.sum(), flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64, device="cpu")]))
    if peers.world_size == 1 or not names:
        return
    low, high = torch.stack(sums), torch.stack(sums)
    peers.all_reduce(low, dist.ReduceOp.MIN).wait()
    peers.all_reduce(high, dist.ReduceOp.MAX).wait()
    differ = [
        name
        for name, same in zip(names, ((low == high) | (low.isnan() & high.isnan())).all(dim=1).tolist(), strict=True)
        if not same
    ]
    if differ:
        raise ValueError(
            f"{len(differ)} of {len(names)} parameters are not the same on all ranks, {differ[0]} is the first: call "
            "torch.manual_seed with one number on every rank before the layers are made, or load one state into all"
        )
