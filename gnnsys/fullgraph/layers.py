"""What a user's list of layers means: stages, each a graph layer (or none) and what follows it row by row.

A graph layer takes rows of a bin's sources and their structure, and gives rows of the bin's nodes, which are the first
of the sources. Ours do; PyG's do, called with a pair of rows; so does any module whose forward takes (rows, structure).
What there is of edges besides, weights or features, it is given by the names of its arguments.
What takes one tensor works row by row. Batch normalisation, whose statistics are the whole graph's, is a stage of its
own and a barrier.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnsys.nn import GATConv
from gnnsys.nn.gcn import whole_scales
from gnnsys.nn.models import Stack
from gnnsys.nn.structure import resolve
from gnnsys.ops import CSC, WEIGHT, EdgeData, dropout_rows, edge_softmax, spmm, stream_key
from gnnsys.ops.memo import STRUCTURES


class Rows(NamedTuple):
    """Which rows a stage works on now: the nodes' original ids, and what their random numbers depend on besides."""

    ids: Tensor
    key: int


@dataclass
class _Turn:
    """A stage at work on rows of some nodes; each use of dropout in it has a number."""

    rows: Rows
    num_drops: int = 0


_MAX_PLACES = 1 << 24  # of a node's in-edges: further ones have the masks of another node's
MAX_STAGES = 100  # a stage in its halves is two, and messages of 256 are told apart

_NOW: ContextVar[_Turn | None] = ContextVar("gnnsys_rows", default=None)


@contextmanager
def working_on(rows: Rows) -> Iterator[None]:
    """Inside it modules are given rows of these nodes."""
    before = _NOW.set(_Turn(rows))
    try:
        yield
    finally:
        _NOW.reset(before)


class Dropout(nn.Dropout):
    """Dropout whose mask depends on seed, step, layer, node and column alone: the same on any number of ranks.

    `HybridParallel` makes every `nn.Dropout` of its list one of these. Elsewhere it is torch's own.
    """

    def forward(self, rows: Tensor) -> Tensor:
        now = _NOW.get()
        if now is None or not self.training or self.p == 0:
            return super().forward(rows)
        if rows.shape[0] != now.rows.ids.numel():
            raise ValueError(
                f"dropout of {rows.shape[0]} rows where the bin has {now.rows.ids.numel()} nodes: drop its output"
            )
        now.num_drops += 1
        if self.p == 1:
            return rows * 0
        return dropout_rows(rows, now.rows.ids, self.p, stream_key(now.rows.key, now.num_drops))


class _OfStack(Dropout):
    """What a reference model drops between two layers: its rate, and only while it trains."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack.dropout)
        self._stack = (stack,)  # in a tuple it is no child

    def forward(self, rows: Tensor) -> Tensor:
        self.p, self.training = self._stack[0].dropout, self._stack[0].training
        return super().forward(rows)


class Keep(nn.Identity):
    """Marks the rows at this point of the list by a name, for a `Join` further on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Join(nn.Module):
    """Adds each node's rows at `Keep(name)` to those it has here, or sets them beside ("cat"): a skip connection."""

    def __init__(self, name: str, how: str = "add") -> None:
        super().__init__()
        if how not in ("add", "cat"):
            raise ValueError(f'how must be "add" or "cat", got {how!r}')
        self.name, self.how = name, how

    def forward(self, rows: Tensor, kept: Tensor) -> Tensor:
        return rows + kept if self.how == "add" else torch.cat([rows, kept], dim=-1)


class Residual(nn.Module):
    """A graph layer and what follows it, with the nodes' own rows added to the result (projected where widths differ).

    >>> layers = [SAGEConv(16, 64), nn.ReLU(), Residual(SAGEConv(64, 64), nn.LayerNorm(64), nn.ReLU())]
    """

    def __init__(self, conv: nn.Module, *then: nn.Module, project: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.then, self.project = conv, nn.ModuleList(map(keyed, then)), project

    def forward(self, rows: Tensor, csc: CSC) -> Tensor:
        out = call(self.conv, rows, csc)
        for module in self.then:
            out = module(out)
        own = rows[: csc.num_dst]
        return out + (own if self.project is None else self.project(own))


class Told(nn.Module):
    """A graph layer that is given this of edges and nothing else: an argument, and its name in the model's `edge_data`.

    >>> layers = [Told(GATConv(16, 32, edge_dim=4), edge_attr="bond"), nn.ReLU(), Told(GATConv(32, 8))]
    >>> model = HybridParallel(layers, graph, edge_data={"bond": "e"})
    """

    def __init__(self, conv: nn.Module, **names: str) -> None:
        super().__init__()
        self.conv, self.names = conv, names

    def forward(self, rows: Tensor, csc: CSC) -> Tensor:
        data = csc.edge_data
        if data is not None:
            csc = STRUCTURES.get(lambda: self._told(csc, data), csc, key=("told", *self.names.items()))
        return call(self.conv, rows, csc)

    def _told(self, csc: CSC, data: EdgeData) -> CSC:
        given = {argument: data.rows[name] for argument, name in self.names.items()}
        whole = data.whole if self.names.get(WEIGHT) == WEIGHT else None
        return replace(csc, edge_data=EdgeData(given, whole) if given else None)


@dataclass
class Stage:
    """One step of the schedule. `keep_as` names its input rows; `joins` are names its modules look back to."""

    conv: nn.Module | None = None  # None: works row by row
    then: list[nn.Module] = field(default_factory=list)
    norm: nn.Module | None = None  # batch normalisation, alone
    keep_as: list[str] = field(default_factory=list)
    number: int = 0  # among the stages of a model

    @property
    def joins(self) -> list[str]:
        return [module.name for module in self.then if isinstance(module, Join)]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module in (self.conv, self.norm, *self.then) if module is not None]

    @functools.cached_property
    def writes(self) -> bool:
        """Whether something in it works in place."""
        return any(getattr(inner, "inplace", False) for module in self.modules for inner in module.modules())

    def parameters(self) -> list[nn.Parameter]:
        found = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(found.values())

    def run(self, rows: Tensor, csc: CSC | None, joined: Sequence[Tensor], now: Rows) -> Tensor:
        """Rows of the bin's nodes from rows of its sources; `joined` are their rows at the marks of `joins`."""
        with self.at_work(now):
            if self.conv is not None:
                assert csc is not None
                rows = call(self.conv, rows, csc)
            return self.finish(rows, joined)

    def finish(self, rows: Tensor, joined: Sequence[Tensor]) -> Tensor:
        """What follows the graph layer, row by row."""
        given = iter(joined)
        for module in self.then:
            rows = module(rows, next(given)) if isinstance(module, Join) else module(rows)
        return rows

    def at_work(self, now: Rows) -> AbstractContextManager[None]:
        """Inside it modules are given rows of these nodes, in this stage."""
        return working_on(Rows(now.ids, stream_key(now.key, self.number)))


def make_stages(layers: Sequence[nn.Module] | nn.Module, edges: Collection[str] = ()) -> list[Stage]:
    """The stages of a model, which is a list of modules or one of our reference models.

    `edges` are names of arguments that graph layers are given besides rows and structure.
    """
    stages, at = [Stage()], Stage()
    kept: set[str] = set()
    for module in _flat(layers):
        _check(module)
        if isinstance(module, Keep):
            if module.name in kept:
                raise ValueError(f"two layers keep rows as {module.name!r}")
            kept.add(module.name)
            at = Stage(keep_as=[module.name])
            stages.append(at)
        elif isinstance(module, Join) and module.name not in kept:
            raise ValueError(f"Join({module.name!r}) looks back to a Keep({module.name!r}), and none comes before it")
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            stages += [Stage(norm=module), Stage()]
        elif takes_structure(module, edges):
            if stages[-1].modules:
                stages.append(Stage())
            stages[-1].conv = module
        else:
            stages[-1].then.append(module)
    named: list[str] = []
    out: list[Stage] = []
    for stage in stages:  # a mark on a stage that does nothing belongs to the next
        if not stage.modules:
            named += stage.keep_as
            continue
        stage.keep_as, named, stage.number = named + stage.keep_as, [], len(out)
        out.append(stage)
    if len(out) > MAX_STAGES:
        raise ValueError(f"{len(out)} stages are too many to number their messages: at most {MAX_STAGES}")
    if not any(stage.conv is not None for stage in out):
        raise ValueError("layers must hold at least one graph layer: a module whose forward takes rows and a structure")
    asked = {name for stage in out if stage.conv is not None for name in taken(stage.conv, edges)}
    for name in edges:
        if name not in asked:
            raise ValueError(f"no graph layer takes an argument {name!r}, which edge_data says they are given")
    return out


def takes_structure(module: nn.Module, edges: Collection[str] = ()) -> bool:
    """Whether a module is a graph layer: its forward asks for more than rows, and what it is told of edges."""
    if isinstance(module, (Join, Keep)):
        return False
    asked = [
        p for p in arguments(module).values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in edges
    ]  # fmt: skip
    if len(asked) not in (1, 2):
        raise ValueError(
            f"{type(module).__name__}.forward must take rows, or rows and a structure, and what edge_data= gives it, "
            f"by name: it asks for {[p.name for p in asked]}"
        )
    return len(asked) == 2


def taken(conv: nn.Module, edges: Collection[str]) -> list[str]:
    """What of `edges` a graph layer, or one inside it, is given: arguments of its forward, or what `Told` says."""
    if isinstance(conv, Told):
        for name in conv.names.values():
            if name not in edges:
                raise ValueError(f"Told names {name!r}, and edge_data has {list(edges)}")
        return list(conv.names.values())
    found = {name for child in conv.children() for name in taken(child, edges)} | set(arguments(conv))
    return [name for name in edges if name in found]


def arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a module's forward takes, by name."""
    return inspect.signature(getattr(module, "_orig_mod", module).forward).parameters  # also if it is compiled


def keyed(module: nn.Module) -> nn.Module:
    """The module; torch's dropout becomes ours, in its place, so that whoever has it can still switch it."""
    if type(module) is nn.Dropout:
        module.__class__ = Dropout
    return module


def call(conv: nn.Module, rows: Tensor, csc: CSC) -> Tensor:
    """A graph layer, ours, PyG's or a user's own, on a bin: the nodes' rows are the first of the sources'."""
    told = {}
    if csc.edge_data is not None:
        told = {name: given for name, given in csc.edge_data.rows.items() if name in arguments(conv)}
    if not _is_pyg(conv):
        now = _NOW.get()
        if type(conv) is GATConv and conv.training and conv.dropout > 0 and now is not None:
            return _keyed_attention(conv, rows, csc, now, **told)
        return conv(rows, csc, **told)
    edge_index = STRUCTURES.get(lambda: torch.stack([csc.indices.long(), csc.dst()]), csc, key="edge_index")
    if csc.whole is None and csc.num_src == csc.num_dst:  # no piece
        return conv(rows, edge_index, **told)
    if _is_gcn(conv) and csc.whole is not None:
        return _pyg_gcn(conv, rows, csc, edge_index, **told)
    if not _takes_pair(type(conv).forward):  # a square graph, in which the other sources have no in-edges
        out = conv(rows, edge_index, **told)
        return out[: csc.num_dst] if isinstance(out, Tensor) else out
    size = {"size": (csc.num_src, csc.num_dst)} if "size" in arguments(conv) else {}
    return conv((rows, rows[: csc.num_dst]), edge_index, **told, **size)


def _keyed_attention(conv: GATConv, rows: Tensor, csc: CSC, now: _Turn, edge_attr: Tensor | None = None) -> Tensor:
    """Our GATConv with a dropout of attention whose mask depends on seed, step, layer, node, in-edge and head alone.

    An in-edge goes by its place among the node's, which keep their order on any number of ranks; the self loop is the
    last.
    """
    now.num_drops += 1
    node = conv.transform(rows, rows[: csc.num_dst], csc.num_dst)
    edges, edge_score = conv.scored_edges(resolve(rows, csc), edge_attr)
    dst = edges.dst()
    score = node.score_src.index_select(0, edges.indices) + node.score_dst.index_select(0, dst)
    score = score if edge_score is None else score + edge_score.to(score.dtype)
    alpha = edge_softmax(edges, nn.functional.leaky_relu(score, conv.negative_slope))
    place = torch.arange(edges.num_edges, device=dst.device) - edges.indptr.index_select(0, dst)
    ids = now.rows.ids.index_select(0, dst).long() * _MAX_PLACES + place
    alpha = dropout_rows(alpha, ids, conv.dropout, stream_key(now.rows.key, now.num_drops))
    out = spmm(edges, node.rows, weight=alpha)
    out = out.flatten(1) if conv.concat else out.mean(1)
    out = out if conv.res is None else out + conv.res(rows[: csc.num_dst])
    return out if conv.bias is None else out + conv.bias


def _pyg_gcn(conv: Any, rows: Tensor, csc: CSC, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    """PyG's GCNConv takes no pair of rows and counts degrees in what it is given: its halves, with the whole's.

    Without edge weights every loop weighs 1: PyG takes no notice of `improved` then.
    """
    weight = edge_weight
    if conv.normalize:

        def normalised() -> tuple[Tensor, Tensor]:
            is_weighted, has_loops = edge_weight is not None, conv.add_self_loops
            fill = 2.0 if conv.improved and is_weighted else 1.0
            src, dst, loop_weight = whole_scales(csc, has_loops, fill, rows.dtype, is_weighted)
            kept = edge_index[0] != edge_index[1] if has_loops else slice(None)
            edges = edge_index[:, kept]
            weight = src.new_ones(edges.shape[1]) if edge_weight is None else edge_weight.to(src.dtype)[kept]
            if has_loops:
                loops = torch.arange(csc.num_dst, device=edges.device)
                edges, weight = torch.cat([edges, loops.expand(2, -1)], dim=1), torch.cat([weight, loop_weight])
            return edges, src[edges[0]] * weight * dst[edges[1]]

        key = ("gcn", conv.add_self_loops, conv.improved, rows.dtype)
        edge_index, weight = STRUCTURES.get(normalised, csc, key=key)
    out = conv.propagate(edge_index, x=conv.lin(rows), edge_weight=weight, size=(csc.num_src, csc.num_src))
    out = out[: csc.num_dst]
    return out if conv.bias is None else out + conv.bias


def _is_pyg(module: nn.Module) -> bool:
    return any(base.__module__.startswith("torch_geometric.") for base in type(module).__mro__)


def _is_gcn(module: nn.Module) -> bool:
    """PyG's GCNConv, or what inherits its forward."""
    forward = type(module).forward
    return (forward.__module__, forward.__qualname__) == ("torch_geometric.nn.conv.gcn_conv", "GCNConv.forward")


@functools.lru_cache
def _takes_pair(forward: Callable[..., Any]) -> bool:
    """Whether a PyG layer says that it takes rows of sources and of destinations: a tuple in the type of its rows."""
    rows = list(inspect.signature(forward, eval_str=True).parameters.values())[1]
    return any(typing.get_origin(each) is tuple for each in (rows.annotation, *typing.get_args(rows.annotation)))


def _flat(layers: Sequence[nn.Module] | nn.Module) -> Iterator[nn.Module]:
    """Lists within lists, reference models taken apart, torch's dropouts made ours."""
    if isinstance(layers, Stack):
        for index, conv in enumerate(layers.convs):
            yield conv
            if index < len(layers.convs) - 1:
                yield from _flat([layers.norms[index], nn.ReLU(), _OfStack(layers)])
    elif isinstance(layers, (nn.Sequential, nn.ModuleList, list, tuple)):
        for module in layers:
            yield from _flat(module)
    elif isinstance(layers, nn.Module):
        inner = getattr(layers, "module", None)  # PyG's BatchNorm is a hull around torch's
        yield inner if _is_pyg(layers) and isinstance(inner, nn.BatchNorm1d) else keyed(layers)
    else:
        raise ValueError(f"layers must be modules, got {type(layers).__name__}")


def _check(module: nn.Module) -> None:
    """What inside a module would make other numbers than one process does."""
    for name, inner in module.named_modules():
        if inner is module or not inner.training:
            continue
        if isinstance(inner, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{type(module).__name__}.{name} normalises over rows, and would see a bin's instead of the whole "
                "graph's: put the batch normalisation into the list of layers itself"
            )
        if type(inner) is nn.Dropout and inner.p > 0:
            raise ValueError(
                f"{type(module).__name__}.{name} draws other masks on other numbers of ranks: use "
                "gnnsys.fullgraph.Dropout in its place"
            )
