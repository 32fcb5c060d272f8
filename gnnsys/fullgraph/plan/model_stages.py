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
from dataclasses import dataclass, field

from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import KeyedRows, working_on
from gnnsys.fullgraph.modules import ByNodeType, EdgeArguments, JoinKept, Keep, called_modules
from gnnsys.fullgraph.plan.graph_types import GraphTypes
from gnnsys.fullgraph.plan.module_layout import StackDropout, flat
from gnnsys.fullgraph.run.call_layer import arguments, call
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer
from gnnsys.graph import NodeType
from gnnsys.nn import InputEncoder, is_batch_norm, module_key, runs_as, why_whole
from gnnsys.ops import CSC, stream_key
from gnnsys.store import DistEmbedding

MAX_STAGES = 100  # a stage in its halves is two, and messages of 256 are told apart


@dataclass
class ModelStage:
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
        return [module.name for module in self.then if isinstance(module, JoinKept)]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module in (self.conv, self.norm, *self.then) if module is not None]

    def look(self) -> None:
        """Reads of the modules what bins must know, once per pass."""
        for module in self.then:
            if isinstance(module, StackDropout):
                module.look()
        inner = (inner for module in self.modules for inner in module.modules())
        self.writes = self.in_place or any(getattr(module, "inplace", False) for module in inner)

    def parameters(self) -> list[nn.Parameter]:
        found = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(found.values())

    def run(self, rows: Tensor, csc: CSC | None, joined: Sequence[Tensor], now: KeyedRows) -> Tensor:
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
            rows = module(rows, next(given)) if isinstance(module, JoinKept) else module(rows)
        return rows

    def at_work(self, now: KeyedRows) -> AbstractContextManager[None]:
        """Inside it modules are given rows of these nodes, in this stage."""
        return working_on(KeyedRows(now.ids, stream_key(now.key, self.number)))


def make_stages(layers: nn.Module, edges: Collection[str] = (), types: GraphTypes | None = None) -> list[ModelStage]:
    """The stages of a model, which is a list of modules or one of our reference models.

    `edges` are names of arguments that graph layers are given besides rows and structure. With `types` the graph is a
    typed one, and graph layers are called with rows by node type and a typed block.
    """
    stages, at = [ModelStage()], ModelStage()
    kept: set[str] = set()
    for module in flat(layers, types):
        _check(module, types)
        if types is not None:
            module = _for_types(module, types, edges)
        if isinstance(module, Keep):
            if module.name in kept:
                raise ValueError(f"two layers keep rows as {module.name!r}")
            kept.add(module.name)
            at = ModelStage(keep_as=[module.name])
            stages.append(at)
        elif isinstance(module, JoinKept) and module.name not in kept:
            raise ValueError(
                f"JoinKept({module.name!r}) looks back to a Keep({module.name!r}), and none comes before it"
            )
        elif is_batch_norm(module):
            stages += [ModelStage(norm=module), ModelStage()]
        elif takes_structure(module, edges):
            if stages[-1].modules:
                stages.append(ModelStage())
            stages[-1].conv = module
        else:
            stages[-1].then.append(module)
    named: list[str] = []
    out: list[ModelStage] = []
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


def _for_types(module: nn.Module, types: GraphTypes, edges: Collection[str]) -> nn.Module:
    """A module of a list on a typed graph."""
    if is_batch_norm(module):
        raise ValueError(
            f"{type(module).__name__} would normalise over the nodes of all types at once: use nn.LayerNorm, which "
            "works row by row"
        )
    if isinstance(module, TypedConv) or not takes_structure(module, edges):
        return module
    return TypedConv(module, types)


def takes_structure(module: nn.Module, edges: Collection[str] = ()) -> bool:
    """Whether a module is a graph layer: its forward asks for more than rows, and what it is told of edges."""
    if isinstance(module, (JoinKept, Keep)):
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
    """What of `edges` a graph layer, or one inside it, is given: arguments of its forward, or `EdgeArguments`."""
    if isinstance(conv, EdgeArguments):
        for name in conv.names.values():
            if name not in edges:
                raise ValueError(f"EdgeArguments names {name!r}, and edge_data has {list(edges)}")
        return list(conv.names.values())
    found = {name for child in conv.children() for name in taken(child, edges)} | set(arguments(conv))
    return [name for name in edges if name in found]


def _check(module: nn.Module, types: GraphTypes | None) -> None:
    """What inside a module would make other numbers than one process does."""
    module = module.module if isinstance(module, TypedRowLayer) else module
    if isinstance(module, ByNodeType):
        for node_type in module.node_types:
            for inner in called_modules(module.by_type[module_key(node_type)]):
                _check_takes_rows(inner, node_type)
    else:
        _check_takes_rows(module, None if types is None else types.node_types[0])
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


def _check_takes_rows(module: nn.Module, node_type: NodeType | None) -> None:
    """That a module is neither an embedding, which takes ids, nor an `InputEncoder`, which takes a batch. One that a
    user's own module calls is given what that says."""
    if type(module).forward is InputEncoder.forward:
        raise ValueError(
            f"{type(module).__name__} takes a batch or a graph, and layers are given rows: begin the list with "
            "ByNodeType({node type: nn.Linear(...)}) for features instead, and look rows of embeddings up in front, "
            "x['author'] = embedding(model.nodes['author'])"
        )
    if type(module).forward not in (nn.Embedding.forward, DistEmbedding.forward):
        return
    at, of = ("", "") if node_type is None else (f"[{node_type!r}]", repr(node_type))
    ids = f"model.nodes{at}" if isinstance(module, nn.Embedding) else f"model.share.global_ids({of})"
    raise ValueError(
        f"{type(module).__name__} looks rows up by id, and layers are given rows, not ids: look them up in front, "
        f"x{at} = embedding({ids}), and give the model x"
    )
