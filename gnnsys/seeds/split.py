"""split: every rank's share of the seeds, local first, shares equal to one, nothing left out and nothing twice.

The chosen ids in ascending order are cut into world_size contiguous ranges; a range goes to the machine that owns most
of it (DistDGLv2, 5.6.1), and on a machine the ranges go to its ranks in order, as its subparts do. No rank reads more
of a mask than its own parts: counts and the ids of other parts are asked where they live.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnnsys.comm import Kind, Pending
from gnnsys.graph import (
    EdgeType,
    Graph,
    GraphIds,
    IdsLike,
    NodeType,
    as_integers,
    check_ours,
    chosen_ids,
    numbered_ids,
    some,
)
from gnnsys.partition import Placement
from gnnsys.sampling import (
    EdgeFilter,
    KeptEdges,
    Mask,
    PartMasks,
    count_true,
    kept_edge_ids,
    mask_column,
    select_true,
)
from gnnsys.seeds.shares import assign_shares, owners
from gnnsys.store import edge_table, node_table

if TYPE_CHECKING:
    from gnnsys.sampling import DistGraph

What: TypeAlias = "str | GraphIds | IdsLike | EdgeFilter | None"
_ALIASES = {"val": ("val", "valid"), "valid": ("valid", "val")}


class IdRange:
    """Consecutive ids that nobody has written down: what all edges of a billion are, until a batch is picked.

    >>> ids = IdRange(10, 15)
    >>> len(ids), ids[torch.tensor([0, 4])], ids[1:3]
    (5, tensor([10, 14]), tensor([11, 12]))
    """

    dtype = torch.int64

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, max(first, end)

    def __len__(self) -> int:
        return self.end - self.first

    def numel(self) -> int:
        return len(self)

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        if isinstance(index, Tensor):
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(self):
                raise IndexError(f"positions must be in [0, {len(self)}), got {int(index.min())} to {int(index.max())}")
            return index.long() + self.first
        picked = range(self.first, self.end)[index]
        return as_integers(picked, "ids") if isinstance(picked, range) else torch.tensor(picked, device="cpu")

    def to_tensor(self) -> Tensor:
        """All of them, int64."""
        return torch.arange(self.first, self.end, device="cpu")

    def __repr__(self) -> str:
        return f"IdRange({self.first}, {self.end})"


@dataclass(eq=False)
class Seeds:
    """One rank's share. `largest` is the largest share of any rank: steps derived from it are equal on all of them.

    `recipe` is how it was made, by which loaders take over what other ranks had left when their number changes.
    `numbering` says which graph's ids they are. A share that you make yourself for parts is made of `GraphIds`:
    `Seeds(graph.from_original(ids), "node", len(ids), len(ids))`.
    """

    ids: Tensor | IdRange
    type: NodeType | EdgeType
    largest: int
    total: int
    recipe: SplitRecipe | None = None
    numbering: str | None = None

    def __post_init__(self) -> None:
        given: Any = self.ids
        if isinstance(given, GraphIds):
            if given.type != self.type:
                raise ValueError(f"Seeds: ids must be of {self.type!r}, got {given!r}")
            self.ids, self.numbering = given.ids, given.numbering
        if isinstance(self.ids, IdRange):
            return
        ids = as_integers(self.ids, "Seeds: ids (gnnsys.split takes masks)")
        if ids.dtype == torch.bool or ids.dim() != 1:
            raise ValueError(f"Seeds: ids must be ids, got {list(ids.shape)} {ids.dtype}: give gnnsys.split a mask")
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Seeds({len(self)} of {self.total} {self.type!r}, largest share {self.largest})"


@dataclass(eq=False)
class SplitRecipe:
    """How a share was made: what was split, where it lies, among whom. Chosen ids are numbered in ascending order.

    It refers to what the user gave and holds no ids of its own.
    """

    graph: Graph | DistGraph
    what: What
    type: NodeType | EdgeType
    column: int | None
    placement: Placement
    counts: Sequence[int]  # of chosen ids, by subpart
    shares: Sequence[range]  # the numbers of each rank
    content: str = ""  # of what was chosen, beyond its counts
    digest: str = ""

    def __post_init__(self) -> None:
        self.digest = _digest(self.graph, self.type, self.counts, self.content)

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def machine_of_rank(self) -> Sequence[int]:
        return self.placement.machine_of_rank

    def share(self, placement: Placement) -> Seeds:
        """The share of another rank, or among other ranks."""
        return split(self.graph, self.what, type=self.type, column=self.column, placement=placement)

    def chosen(self) -> _Chosen:
        """The chosen ids by their numbers, `ids(first, end)`."""
        chosen = _choose(self.graph, self.what, self.type, self.column, _offsets(self.graph, self.type))
        if list(chosen.counts()) != list(self.counts):
            raise ValueError(
                f"what was split among the ranks has changed: {sum(self.counts)} ids of {self.type!r} then"
            )
        return chosen

    def owners(self, numbers: range) -> list[tuple[int, range]]:
        """These numbers by the machine that owns their ids; empty where nobody serves parts."""
        return owners(self.counts, self.placement, _trainers(self.graph), numbers)


@overload
def split(
    graph: Graph | DistGraph,
    what: What = "train",
    *,
    type: NodeType | EdgeType | None = None,
    column: int | None = None,
    placement: Placement | None = None,
) -> Seeds: ...
@overload
def split(
    graph: Graph | DistGraph,
    what: Mapping[NodeType | EdgeType, What],
    *,
    column: int | None = None,
    placement: Placement | None = None,
) -> dict[NodeType | EdgeType, Seeds]: ...


def split(
    graph: Graph | DistGraph,
    what: What | Mapping[NodeType | EdgeType, What] = "train",
    *,
    type: NodeType | EdgeType | None = None,
    column: int | None = None,
    placement: Placement | None = None,
) -> Seeds | dict[NodeType | EdgeType, Seeds]:
    """This rank's share of `what`; every rank calls it with the same arguments.

    `what`: "train", "val" or "test" (the mask `train_mask`, or `train`), the name of any mask, a mask with a row for
    every node or edge, ids, or None for all. `type` is a node type, or an edge type for edges; it may be left away
    where one node type has the mask. `column` picks one of several masks kept in one array. On parts, ids and masks
    that are not named carry their numbering: `graph.from_original(ids)`, of nodes or of edges. The ids of a share are
    the graph's own, global ids on parts. All edges, or all nodes, are a range that is never written out.

    Of several types, `what` is a dict by type, {"paper": "train", "author": None}, and so is the result, which a loader
    takes as it is.

    >>> seeds = gnnsys.split(graph, "train")
    >>> loader = gnnsys.NeighborLoader(graph, [15, 10], input_nodes=seeds, batch_size=1024)
    """
    if isinstance(what, Mapping):
        if type is not None:
            raise ValueError("what is a dict by type: leave type away")
        return {t: split(graph, of, type=t, column=column, placement=placement) for t, of in what.items()}
    check_ours(graph)
    type = _resolve_type(graph, what, type)
    placement = placement or _placement_of(graph)
    chosen = _choose(graph, what, type, column, _offsets(graph, type))
    counts = chosen.counts()
    shares = assign_shares(counts, placement, _trainers(graph))
    mine = shares[placement.rank]
    recipe = SplitRecipe(graph, what, type, column, placement, counts, shares, _content(chosen))
    return Seeds(chosen.ids(mine.start, mine.stop), type, max(map(len, shares)), sum(counts), recipe, graph.numbering)


def _digest(graph: Graph | DistGraph, type: NodeType | EdgeType, counts: Sequence[int], content: str) -> str:
    """The same wherever the same was split: numbers then mean the same ids."""
    known = [type, list(counts), content]
    if not isinstance(graph, Graph):
        known.append(graph.numbering)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _content(chosen: _Chosen) -> str:
    """Listed ids and masks by their values; a mask in parts, which do not change, by its name and column."""
    if isinstance(chosen, KeptEdges):
        return chosen.told
    if isinstance(chosen, _InParts):
        return json.dumps(chosen.mask.to_json())
    values = chosen.sorted_ids if isinstance(chosen, _Listed) else chosen.mask if isinstance(chosen, _Masked) else None
    return "" if values is None else hashlib.sha256(values.contiguous().numpy().data).hexdigest()


# -- what may be chosen ------------------------------------------------------------------------------------------------


class _Chosen(Protocol):
    def counts(self) -> Sequence[int]:
        """How many are chosen in each subpart."""

    def ids(self, first: int, end: int) -> Tensor | IdRange:
        """The first-th to the (end - 1)-th chosen id."""


@dataclass
class _AllIds:
    offsets: Sequence[int]

    def counts(self) -> Sequence[int]:
        return [end - first for first, end in pairwise(self.offsets)]

    def ids(self, first: int, end: int) -> IdRange:
        return IdRange(first, end)


@dataclass
class _Listed:
    sorted_ids: Tensor
    offsets: Sequence[int]

    def counts(self) -> Sequence[int]:
        at = torch.searchsorted(self.sorted_ids, torch.tensor(self.offsets, device="cpu"))
        return at.diff().tolist()

    def ids(self, first: int, end: int) -> Tensor:
        return self.sorted_ids[first:end].clone()


@dataclass
class _Masked:
    mask: Tensor
    offsets: Sequence[int]
    name: str = "the mask"

    def counts(self) -> Sequence[int]:
        return count_true(self.mask, self.offsets, self.name)

    def ids(self, first: int, end: int) -> Tensor:
        return select_true(self.mask, first, end)


class _InParts:
    """A mask that lies in the parts: own parts are read here, the others asked for."""

    def __init__(self, graph: DistGraph, mask: Mask) -> None:
        self._graph, self.mask = graph, mask
        self._here = PartMasks(graph.parts, graph.parts_here)
        self._counts: list[int] = []

    def counts(self) -> Sequence[int]:
        graph = self._graph
        away: dict[int, list[int]] = {}
        for part, machine in enumerate(graph.machine_of_part):
            if part not in graph.parts_here:
                away.setdefault(machine, []).append(part)
        asked = {machine: self._ask(machine, {"count": parts}) for machine, parts in away.items()}
        by_part = {part: self._here.counts(self.mask, part) for part in graph.parts_here}
        for machine, pending in asked.items():
            rows = pending.result().arrays[0].view(len(away[machine]), -1).tolist()
            by_part.update(zip(away[machine], rows, strict=True))
        self._counts = [count for part in range(len(graph.machine_of_part)) for count in by_part[part]]
        return self._counts

    def ids(self, first: int, end: int) -> Tensor:
        graph = self._graph
        ends = [0, *accumulate(self._counts)][:: graph.book.trainers_per_part]
        pieces: list[Tensor | Pending] = []
        for part, (begin, stop) in enumerate(pairwise(ends)):
            low, high = max(first, begin) - begin, min(end, stop) - begin
            if low >= high:
                continue
            if part in graph.parts_here:
                pieces.append(self._here.ids(self.mask, part, low, high))
            else:
                pieces.append(self._ask(graph.machine_of_part[part], {"ids": [part, low, high]}))
        found = [piece if isinstance(piece, Tensor) else piece.result().arrays[0] for piece in pieces]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")

    def _ask(self, machine: int, wish: dict[str, Any]) -> Pending:
        assert self._graph.client is not None  # alone, every part is here
        return self._graph.client.request(machine, Kind.SELECT, (), self.mask.to_json() | wish)


def _choose(
    graph: Graph | DistGraph, what: What, type: NodeType | EdgeType, column: int | None, offsets: Sequence[int]
) -> _Chosen:
    if what is None:
        return _AllIds(offsets)
    if isinstance(what, EdgeFilter):
        if isinstance(type, str):
            raise ValueError(f"a side of gnnsys.split_links is of edges, and {type!r} are nodes: give the edge type")
        if isinstance(graph, Graph):
            return _Listed(kept_edge_ids(graph, what, type), offsets)
        return KeptEdges(graph, what, type)
    if isinstance(what, str):
        name = _mask_name(graph, what, type)
        rows = _data_of(graph, type)[name]
        label = f"{name!r} of {type!r}"
        if isinstance(rows, Tensor):
            return _Masked(mask_column(rows, column, label).cpu(), offsets, label)
        if not isinstance(graph, Graph) and _is_stored(graph, type, name, rows):
            return _InParts(graph, Mask(type, name, column))
        return _Masked(mask_column(_read_all(rows), column, label), offsets, label)
    if isinstance(what, GraphIds) and column is not None:
        raise ValueError("column is for masks in columns, and these are ids: leave column away")
    what = numbered_ids(graph, what, type, "what to split")
    is_bytes = getattr(what, "dtype", None) in (torch.uint8, np.uint8)  # how some files keep masks
    given = torch.as_tensor(what, device="cpu") if is_bytes else as_integers(what, "what to split")
    if given.dtype in (torch.bool, torch.uint8):
        mask = mask_column(given, column, "the mask")
        if mask.numel() != offsets[-1]:
            raise ValueError(f"the mask must have a row for each of {offsets[-1]} {type!r}, got {mask.numel()}")
        return _Masked(mask.cpu(), offsets)
    what_they_are = "node" if isinstance(type, str) else "edge"
    return _Listed(chosen_ids(given, offsets[-1], "ids", what_they_are).cpu().long().sort().values, offsets)


def _is_stored(graph: DistGraph, type: NodeType | EdgeType, name: str, rows: Any) -> bool:
    """Whether `rows` are what the parts hold under this name, not something that was put in its place."""
    schema = graph.parts.schema
    stored = schema.node_data[type] if isinstance(type, str) else schema.edge_data[type]
    table = node_table(type, name) if isinstance(type, str) else edge_table(type, name)
    return name in stored and getattr(rows, "name", None) == table


def _read_all(source: Any) -> Tensor:
    """A mask from a source of rows: read once, in blocks."""
    num_rows, block = int(source.shape[0]), 1 << 20
    reads = [source.read(torch.arange(at, min(at + block, num_rows), device="cpu")) for at in range(0, num_rows, block)]
    return torch.cat(reads) if reads else torch.empty(0, dtype=torch.bool, device="cpu")


def _mask_name(graph: Graph | DistGraph, what: str, type: NodeType | EdgeType) -> str:
    data = _data_of(graph, type)
    for word in _ALIASES.get(what, (what,)):
        for name in (f"{word}_mask", word):
            if name in data:
                return name
    raise ValueError(f"{type!r} has neither {what + '_mask'!r} nor {what!r}: it has {some(sorted(data), near=what)}")


def _resolve_type(graph: Graph | DistGraph, what: What, type: NodeType | EdgeType | None) -> NodeType | EdgeType:
    known = [*graph.node_types, *graph.edge_types]
    if isinstance(what, GraphIds) and type is None:
        type = what.type
    if type is not None:
        if type not in known:
            raise ValueError(f"type must be one of {some(known, near=type)}, got {type!r}")
        return type
    if len(graph.node_types) == 1:
        return graph.node_types[0]
    if isinstance(what, str):
        words = [name for word in _ALIASES.get(what, (what,)) for name in (f"{word}_mask", word)]
        having = [t for t in graph.node_types if any(name in graph.node_data[t] for name in words)]
        if len(having) == 1:
            return having[0]
        who, types = some(having) if having else "no node type", some(graph.node_types)
        raise ValueError(f"type must be given: {who} has {what!r}; node types {types}")
    raise ValueError(f"type must be given, one of {some(known)}")


def _data_of(graph: Graph | DistGraph, type: NodeType | EdgeType) -> Any:
    return graph.node_data[type] if isinstance(type, str) else graph.edge_data[type]


def _offsets(graph: Graph | DistGraph, type: NodeType | EdgeType) -> list[int]:
    """Where each subpart's ids begin and end; a graph in memory is one."""
    if isinstance(graph, Graph):
        return [0, graph.num_nodes(type) if isinstance(type, str) else graph.num_edges(type)]
    book = graph.book
    return [0, *(book.subpart_range(s, type).stop for s in range(book.num_subparts))]


def _trainers(graph: Graph | DistGraph) -> int:
    return 1 if isinstance(graph, Graph) else graph.book.trainers_per_part


def _placement_of(graph: Graph | DistGraph) -> Placement:
    """Where this rank stands: as the graph was opened, else as torch.distributed says, else alone."""
    placement = getattr(graph, "placement", None)
    if placement is not None:
        return placement
    if dist.is_available() and dist.is_initialized():
        return Placement(dist.get_rank(), (0,) * dist.get_world_size(), ())
    return Placement(0, (0,), ())
