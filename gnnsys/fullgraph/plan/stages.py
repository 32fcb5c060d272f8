"""What a user's list of layers means: stages, each a graph layer (or none) and what follows it row by row.

A graph layer takes rows of a bin's sources and their structure, and gives rows of the bin's nodes, which are the first
of the sources. Ours do; PyG's do, called with a pair of rows; so does any module whose forward takes (rows, structure).
What there is of edges besides, weights or features, it is given by the names of its arguments.
What takes one tensor works row by row. Batch normalisation, whose statistics are the whole graph's, is a stage of its
own and a barrier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import Rows, keyed, working_on
from gnnsys.fullgraph.plan.module_layout import OfStack, flat
from gnnsys.fullgraph.run.call_layer import arguments, call
from gnnsys.nn import is_batch_norm, runs_as, why_whole
from gnnsys.ops import CSC, STRUCTURES, WEIGHT, EdgeData, stream_key

MAX_STAGES = 100  # a stage in its halves is two, and messages of 256 are told apart


class Keep(nn.Identity):
    """Marks the rows at this point of the list by a name, for a `Join` further on."""

    decides: ClassVar = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Join(nn.Module):
    """Adds each node's rows at `Keep(name)` to those it has here, or sets them beside ("cat"): a skip connection."""

    decides: ClassVar = ("name", "how")

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

    decides: ClassVar = ("names",)

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
    in_place: bool = False  # something in it was seen to write its input, though it has no `inplace` that says so
    writes: bool = field(default=False, init=False)  # whether something works in place, as of the last look

    @property
    def joins(self) -> list[str]:
        return [module.name for module in self.then if isinstance(module, Join)]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module in (self.conv, self.norm, *self.then) if module is not None]

    def look(self) -> None:
        """Reads of the modules what bins must know, once per pass."""
        for module in self.then:
            if isinstance(module, OfStack):
                module.look()
        inner = (inner for module in self.modules for inner in module.modules())
        self.writes = self.in_place or any(getattr(module, "inplace", False) for module in inner)

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


def make_stages(layers: nn.Module, edges: Collection[str] = ()) -> list[Stage]:
    """The stages of a model, which is a list of modules or one of our reference models.

    `edges` are names of arguments that graph layers are given besides rows and structure.
    """
    stages, at = [Stage()], Stage()
    kept: set[str] = set()
    for module in flat(layers):
        _check(module)
        if isinstance(module, Keep):
            if module.name in kept:
                raise ValueError(f"two layers keep rows as {module.name!r}")
            kept.add(module.name)
            at = Stage(keep_as=[module.name])
            stages.append(at)
        elif isinstance(module, Join) and module.name not in kept:
            raise ValueError(f"Join({module.name!r}) looks back to a Keep({module.name!r}), and none comes before it")
        elif is_batch_norm(module):
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
        stage.look()
        out.append(stage)
    if len(out) > MAX_STAGES:
        raise ValueError(f"{len(out)} stages are too many to number their messages: at most {MAX_STAGES}")
    if not any(stage.conv is not None for stage in out):
        reason = why_whole(layers)
        raise ValueError(
            "layers must hold at least one graph layer: a module whose forward takes rows and a structure"
            + (
                f". {type(layers).__name__} {reason}, so it is called as a whole: give its parts as a list"
                if reason
                else ""
            )
        )
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


def _check(module: nn.Module) -> None:
    """What inside a module would make other numbers than one process does."""
    if isinstance(module, Keep) and not runs_as(module, Keep):
        raise ValueError(f"{type(module).__name__} {why_whole(module)}, and a Keep is never called: put that behind it")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and not is_batch_norm(module):
        reason = why_whole(module) or "is no plain nn.BatchNorm1d"
        raise ValueError(
            f"{type(module).__name__} {reason}, and the statistics of the whole graph are computed for a plain "
            "nn.BatchNorm1d alone: use one, with what was added as a module behind it, or switch this one to eval()"
        )
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
