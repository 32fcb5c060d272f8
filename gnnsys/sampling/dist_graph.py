"""DistGraph: a graph in parts, on this machine and others, with the face of a graph in memory.

Methods and samplers take global ids; `original_ids` and `global_ids` lead to the user's own and back. Loaders take
`GraphIds`, which carry their numbering: `from_original(ids)` and `from_global(ids)`. Rows are tables of the store,
structure is mapped where it lies and asked for where it does not: no process holds the whole.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gnnsys.comm import Consumer, Kind, RequestContext, user_priority
from gnnsys.graph import EDGE, MANIFEST, NODE, EdgeType, Graph, NodeType, check_data, make_graph_ids, some
from gnnsys.ops import CSC, InnerEdges
from gnnsys.partition import PartitionBook, Parts
from gnnsys.sampling.device_neighborhoods import DeviceNeighborhoods
from gnnsys.sampling.device_structure import DeviceStructure
from gnnsys.sampling.dist_neighborhoods import DistNeighborhoods
from gnnsys.sampling.edge_filter import EdgeFilter
from gnnsys.sampling.edges_within import WithinRequest, inner_edges_of_parts
from gnnsys.sampling.find_ids import global_ids_of, rows_by_global_id
from gnnsys.sampling.lookups import DEGREES, EDGE_IDS, ENDS, Asked, Lookups
from gnnsys.sampling.node_scores import MOST_VERSIONS, NodeScores
from gnnsys.sampling.owners import Owners
from gnnsys.sampling.part_view import UNIFORM, PartView, ViewSpec, draws_by
from gnnsys.sampling.place import HOST, Placed, place_parts_on
from gnnsys.sampling.prepared_views import PreparedViews
from gnnsys.sampling.rules import find_rule
from gnnsys.sampling.tables import TablesByName, graph_tables, part_rows
from gnnsys.store import (
    DeviceTable,
    DistTensor,
    ExpectedReads,
    ReadContext,
    RegisteredFiles,
    Source,
    edge_table,
    node_table,
)

if TYPE_CHECKING:
    from gnnsys.comm import Client, Pending
    from gnnsys.store import Store

_PREPARE_SECONDS = 600.0  # to sort a part's edges by time


class DistGraph:
    """What `gnnsys.open` returns. `node_data[type][name]` and `edge_data[type][name]` are tables: `rows = table[ids]`.

    Part p is served by machine `machine_of_part[p]`; those of `machine` itself are read from their files, the others
    through `client`. Without a client every part must be here.
    """

    def __init__(
        self, parts: Parts, store: Store, client: Client | None, machine: int, machine_of_part: Sequence[int]
    ) -> None:
        self.parts, self.store, self.client, self.machine = parts, store, client, machine
        self.machine_of_part = list(machine_of_part)
        self.parts_here = [p for p, owner in enumerate(self.machine_of_part) if owner == machine]
        if client is None and len(self.parts_here) != parts.num_parts:
            raise ValueError(f"parts {self.parts_here} of {parts.num_parts} are here: the others need a client")
        self.loader_numbers = itertools.count(1)  # the session's, where one has opened the graph
        self.placement: Any = None  # where ranks and parts are, set by the session that opened the graph
        self.plan_watch: Any = None  # a `gnnsys.planning.PlanWatch`, where a plan predicted how long an epoch takes
        self.info: dict[str, Any] = dict(parts.graph_info)
        self.device = torch.device("cpu")  # where batches go unless a loader says otherwise
        self.structure: DeviceStructure | None = None  # what `device` samples from by itself
        self.place = "auto"  # where a device is to find the parts
        self.placed: Placed | None = None
        self.registered: RegisteredFiles | None = None
        self.cache: int | Literal["auto"] | None = None  # bytes of a cache of rows, which the first loader fills
        self.cache_plan: dict[NodeType, ExpectedReads] | None = None  # what is expected of it, once it is filled
        self.cache_keeper: Any = None  # who fills the cache, and fills it anew
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()  # of this graph: closed before a device lets go of it
        self.samplers: Any = None  # processes that make batches for this rank, set by the session that opened the graph
        self.guide_numbers = itertools.count(1)
        self.guides: weakref.WeakSet[Any] = weakref.WeakSet()  # what explains models beside training on this graph
        self._tables: dict[str, DeviceTable] = {}
        self._placing, self.filling = threading.Lock(), threading.Lock()  # held while that is done, once
        self._owners = Owners(parts.book, self.machine_of_part, self.parts_here)
        self._views = PreparedViews(parts, self.parts_here)
        self._look_up = Lookups(parts, self._owners, client)
        self._prepared: dict[ViewSpec, DistNeighborhoods] = {}
        self._on_device: dict[ViewSpec, DeviceNeighborhoods] = {}
        self._scores: dict[tuple[int, int], NodeScores] = {}  # by requester and version, to be sent again
        self._lock = threading.Lock()  # never held while somebody else is waited for
        self._preparing: dict[ViewSpec, threading.Lock] = {}  # held while all machines prepare a view
        specs = graph_tables(parts)
        for spec in specs.values():
            store.register(spec)
        for part in self.parts_here:
            for name, rows in part_rows(parts, part).items():
                store.add_local(specs[name], part, rows)
        self.node_data: dict[NodeType, TablesByName] = {}
        self.edge_data: dict[EdgeType, TablesByName] = {}
        for t, names in parts.schema.node_data.items():
            tables = {name: store.tensor(node_table(t, name)) for name in names}
            self.node_data[t] = TablesByName(tables, f"node_data[{t!r}]", "set_node_data")
        for e, names in parts.schema.edge_data.items():
            tables = {name: store.tensor(edge_table(e, name)) for name in names}
            self.edge_data[e] = TablesByName(tables, f"edge_data[{e!r}]", "set_edge_data")

    # -- schema ------------------------------------------------------------------------------------------------------

    @property
    def book(self) -> PartitionBook:
        return self.parts.book

    @property
    def node_types(self) -> list[NodeType]:
        return self.parts.schema.node_types

    @property
    def edge_types(self) -> list[EdgeType]:
        return self.parts.schema.edge_types

    @property
    def is_remote(self) -> bool:
        """Whether some part is on another machine."""
        return bool(self._owners.away)

    @property
    def is_homogeneous(self) -> bool:
        return self.node_types == [NODE] and self.edge_types == [EDGE]

    def num_nodes(self, node_type: NodeType | None = None) -> int:
        return self.book.num_ids(self._node_type(node_type))

    def num_edges(self, edge_type: EdgeType | None = None) -> int:
        return self.book.num_ids(self._edge_type(edge_type))

    def csc(self, edge_type: EdgeType | None = None) -> CSC:
        """A graph in memory has this; here no process holds the whole."""
        self._edge_type(edge_type)
        raise ValueError(
            "a graph in parts has no CSC of the whole: use sample_neighbors, edge_ends or in_degrees, a part's own "
            "graph.parts.part(p).csc(), or graph.parts.merge() where it fits in memory"
        )

    # -- rows --------------------------------------------------------------------------------------------------------

    def set_node_data(
        self, name: str, rows: Any, node_type: NodeType | None = None, *, order: str | None = None
    ) -> None:
        """Adds or replaces one array of rows for this process: a table, any source of features by global id, or a
        tensor of all rows, by the user's ids with `order="original"` or by global ids with `order="global"`."""
        node_type = self._node_type(node_type)
        where = f"node_data[{node_type!r}][{name!r}]"
        check_data(rows, self.num_nodes(node_type), where, "node")
        self.node_data[node_type].put(name, rows_by_global_id(self, rows, node_type, order, where))

    def set_edge_data(
        self, name: str, rows: Any, edge_type: EdgeType | None = None, *, order: str | None = None
    ) -> None:
        """`set_node_data` for edges."""
        edge_type = self._edge_type(edge_type)
        where = f"edge_data[{edge_type!r}][{name!r}]"
        check_data(rows, self.num_edges(edge_type), where, "edge")
        self.edge_data[edge_type].put(name, rows_by_global_id(self, rows, edge_type, order, where))

    # -- ids ---------------------------------------------------------------------------------------------------------

    @cached_property
    def numbering(self) -> str:
        """What global ids belong to: the digest of the parts' manifest."""
        return hashlib.sha256((self.parts.path / MANIFEST).read_bytes()).hexdigest()

    def from_original(self, ids: Any, type: NodeType | EdgeType | None = None) -> Any:
        """`GraphIds` of the user's ids, or of a mask over them: loaders, `split` and faces take these on parts.

        Nodes: ids or a mask of node type `type`. Edges: the same of an edge type. Links: [2, n] ids of both ends. By
        type: a dict, and so is the result. Batches are those of a loader in memory that is given the same ids.

        >>> loader = gnnsys.NeighborLoader(graph, [15, 10], input_nodes=graph.from_original(train_ids))
        """
        return make_graph_ids(self, ids, type, "from_original", partial(global_ids_of, self))

    def from_global(self, ids: Any, type: NodeType | EdgeType | None = None) -> Any:
        """`GraphIds` of ids that parts and batches have, such as `batch.n_id`; otherwise like `from_original`."""
        return make_graph_ids(self, ids, type, "from_global")

    def original_ids(self, ids: Tensor, node_type: NodeType | None = None) -> Tensor:
        """The user's ids of global ids, int64."""
        return self.store.tensor(f"global/{self._node_type(node_type)}")[ids.cpu()].long().to(ids.device)

    def global_ids(self, original: Tensor, node_type: NodeType | None = None) -> Tensor:
        """Converts the user's node ids into global ids, int64. For loaders use `from_original`."""
        if not self.parts.has_global_ids:
            raise ValueError(
                f"{self.parts.path} was written without the global ids of original ids: partition the graph again"
            )
        return self.store.tensor(f"original/{self._node_type(node_type)}")[original.cpu()].long().to(original.device)

    def original_edge_ids(self, edge_ids: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """The user's ids of global edge ids, int64; ValueError where the parts were written without them."""
        return self._look_up(self._edge_type(edge_type), edge_ids.cpu(), EDGE_IDS)[0].to(edge_ids.device)

    def edge_ends(self, edge_ids: Tensor, edge_type: EdgeType | None = None) -> tuple[Tensor, Tensor]:
        """Source and destination of global edge ids, as global ids, int64."""
        src, dst = self._look_up(self._edge_type(edge_type), edge_ids.cpu(), ENDS)
        return src.to(edge_ids.device), dst.to(edge_ids.device)

    def begin_edge_ends(self, edge_ids: Tensor, edge_type: EdgeType | None = None) -> Asked[tuple[Tensor, Tensor]]:
        """`edge_ends` of ids on the host in two halves: other machines are asked now."""
        asked = self._look_up.begin(self._edge_type(edge_type), edge_ids, ENDS)

        def ends() -> tuple[Tensor, Tensor]:
            src, dst = asked.result()
            return src, dst

        return Asked(ends, asked.waits)

    def begin_names(
        self, originals: Sequence[tuple[NodeType, Tensor]], globals: Sequence[tuple[NodeType, Tensor]]
    ) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        """Global ids of `originals` and original ids of `globals`, in two halves: one message per machine for all."""
        if originals and not self.parts.has_global_ids:
            self.global_ids(originals[0][1], originals[0][0])  # ValueError
        context = ReadContext()
        wanted = [(f"original/{t}", ids) for t, ids in originals] + [(f"global/{t}", ids) for t, ids in globals]
        reads = [self.store.tensor(name).begin(ids, None, context) for name, ids in wanted]
        context.send()

        def names() -> tuple[list[Tensor], list[Tensor]]:
            rows = [read.result().long() for read in reads]
            return rows[: len(originals)], rows[len(originals) :]

        return names

    def in_degrees(self, nodes: Tensor, edge_type: EdgeType | None = None) -> Tensor:
        """How many edges of a type lead to each of the nodes, int64."""
        return self._look_up(self._edge_type(edge_type), nodes.cpu(), DEGREES)[0].to(nodes.device)

    def begin_in_degrees(self, nodes: Tensor, edge_type: EdgeType | None = None) -> Callable[[], Tensor]:
        """`in_degrees` of nodes on the host in two halves: other machines are asked now."""
        asked = self._look_up.begin(self._edge_type(edge_type), nodes, DEGREES)
        return lambda: asked.result()[0]

    # -- neighbours --------------------------------------------------------------------------------------------------

    def sample_neighbors(self, nodes: Any, fanout: Any, **options: Any) -> Any:
        """See `gnnsys.sampling.sample_neighbors`."""
        from gnnsys.sampling.blocks import sample_neighbors

        return sample_neighbors(self, nodes, fanout, **options)

    def inner_edges(self, requests: Sequence[WithinRequest]) -> list[InnerEdges]:
        """Edges among chosen nodes, an answer per request: see `gnnsys.sampling.edges_within`."""
        return inner_edges_of_parts(self.parts, self._owners, self.client, requests)

    @property
    def sampled_on(self) -> torch.device:
        """Where in-edges are drawn unless somebody says otherwise."""
        return torch.device("cpu") if self.structure is None else self.structure.device

    def neighborhoods(
        self,
        *,
        weight: str | None = None,
        time: str | None = None,
        rule: str | None = None,
        edges: EdgeFilter | None = None,
        device: torch.device | None = None,
    ) -> DistNeighborhoods | DeviceNeighborhoods:
        """In-edges to be drawn uniformly, by weight, up to a time or by a rule, prepared everywhere the first time.

        On `device`, by default where the structure is. Rules that do not draw on devices draw on the host, and so does
        whoever has a filter of `edges`.
        """
        drawn_by = None if rule is None else find_rule(rule)
        spec = ViewSpec(
            weight, time, None if drawn_by is None else drawn_by.text, None if edges is None else edges.text
        )
        host = self.host_neighborhoods(spec)
        with self._lock:
            structure = self.structure
            draws_there = edges is None and (drawn_by is None or drawn_by.draws_on_devices)
            if structure is None or not draws_there or (device is not None and device != structure.device):
                return host
            if spec not in self._on_device:
                self._on_device[spec] = DeviceNeighborhoods(structure, host)
            return self._on_device[spec]

    def host_neighborhoods(self, spec: ViewSpec) -> DistNeighborhoods:
        """Neighbourhoods of the host. One thread prepares them; those that need other ones do not wait for it."""
        with self._lock:
            found, preparing = self._prepared.get(spec), self._preparing.setdefault(spec, threading.Lock())
        if found is not None:
            return found
        with preparing:
            if spec not in self._prepared:
                if spec != UNIFORM:
                    self._prepare(spec)
                prepare = partial(self._prepare_again, spec)
                self._prepared[spec] = DistNeighborhoods(self._views, self._owners, self.client, spec, prepare)
            return self._prepared[spec]

    def _prepare(self, spec: ViewSpec) -> None:
        draws_by(self.parts, spec)  # ValueError where no type has such rows, before anybody is asked
        options = spec._asdict()
        pending = {}
        for machine in self._owners.away:
            assert self.client is not None
            pending[machine] = self.client.request(machine, Kind.PREPARE, options=options, timeout=_PREPARE_SECONDS)
        wanted = self._views.wanted(spec)
        self._views.prepare(spec, {where: self._halo_rows(where[1], ids, spec) for where, ids in wanted.items()})
        given = []
        for machine, sent in pending.items():
            reply = sent.result()
            if not reply.options.get("ready"):
                assert self.client is not None
                asked = zip(reply.options["wanted"], reply.arrays, strict=True)
                rows = [self._halo_rows(node_type, ids, spec) for (_, node_type), ids in asked]
                given.append(
                    self.client.request(machine, Kind.PREPARE, rows, options=options, timeout=_PREPARE_SECONDS)
                )
        for sent in given:
            sent.result()

    def _prepare_again(self, spec: ViewSpec) -> None:
        """For machines whose server has been started again since."""
        self._prepare(spec)
        for scores in list(self._scores.values()):
            self._send_scores(scores)

    def add_scores(self, scores: NodeScores) -> None:
        """Gives every machine a version of the scores by which guided draws are steered; waits until all have it."""
        for pending in self.begin_scores(scores):
            pending.result()

    def begin_scores(self, scores: NodeScores) -> list[Pending]:
        """The same without waiting: all have the version when every reply has come."""
        self._views.scores.add(scores)
        sent = self._begin_send(scores)
        with self._lock:
            self._scores.pop((scores.requester, scores.version), None)
            self._scores[scores.requester, scores.version] = scores  # the last one is the newest
            for old in [v for r, v in self._scores if r == scores.requester][:-MOST_VERSIONS]:
                del self._scores[scores.requester, old]
        return sent

    def _send_scores(self, scores: NodeScores) -> None:
        for pending in self._begin_send(scores):
            pending.result()

    def _begin_send(self, scores: NodeScores) -> list[Pending]:
        if not self._owners.away:
            return []
        assert self.client is not None
        arrays = scores.to_arrays()
        return [self.client.request(machine, Kind.GUIDE, arrays) for machine in self._owners.away]

    def _halo_rows(self, node_type: NodeType, ids: Tensor, spec: ViewSpec) -> Tensor:
        """What a view needs to know of nodes that other parts own."""
        if spec.needs_sources:
            return self.original_ids(ids, node_type)
        rows = self.store.tensor(node_table(node_type, str(spec.time)))[ids]
        return rows.reshape(-1).to(torch.int64)

    def own_view(self, part: int) -> PartView:
        """A part that is here, as it is drawn from uniformly."""
        return self._views.view(UNIFORM.key, part)

    # -- on a device -------------------------------------------------------------------------------------------------

    def place_on(self, device: torch.device, place: str | None = None) -> Placed:
        """Has `device` sample and read the parts of this machine by itself, as far as it can (`PLACES`).

        Done once for a graph: asked again it tells what was chosen, and a device that is another one reads nothing by
        itself. Loaders ask for it when their batches are to go to a GPU.
        """
        with self._placing:
            if self.placed is None:
                self.placed = place_parts_on(self, device, self.place if place is None else place)
            return self.placed

    def use_device(
        self, device: torch.device, structure: DeviceStructure | None, tables: Mapping[str, DeviceTable]
    ) -> None:
        """From here on `device` samples from `structure`, and reads `tables`, given by their names in the store."""
        assert structure is None or structure.device == device
        with self._lock:
            self.structure, self._tables = structure, dict(tables)
            self._on_device.clear()

    def read_by(self, device: torch.device | None, source: Source) -> Source:
        """A source of this graph's rows as a device reads it; the same source where it does not."""
        if not isinstance(source, DistTensor) or source.store is not self.store:
            return source
        table = self._tables.get(source.name)
        return source if table is None or table.device != device else table

    def end_guides(self) -> None:
        """Ends what explains models beside training."""
        for guide in list(self.guides):
            guide.close()

    def release_device(self) -> None:
        """Gives back what the device had of the graph: copies, caches, and files that were locked for it."""
        files, structure, self.registered = self.registered, self.structure, None
        if files is None and structure is None and not self._tables:
            return
        for loader in list(self.loaders):
            loader.close()
        if structure is not None and structure.device.type == "cuda":
            torch.cuda.synchronize(structure.device)  # samplers may be used without loaders
        self.placed = Placed(HOST, "the device was let go of")
        self.use_device(torch.device("cpu"), None, {})
        if files is not None:
            files.close()

    # -- checks ------------------------------------------------------------------------------------------------------

    def _node_type(self, node_type: NodeType | None) -> NodeType:
        return _one_of(node_type, self.node_types, "node type")

    def _edge_type(self, edge_type: EdgeType | None) -> EdgeType:
        return _one_of(edge_type, self.edge_types, "edge type")

    def __repr__(self) -> str:
        nodes = ", ".join(f"{t}: {self.num_nodes(t):,}" for t in self.node_types)
        edges = ", ".join(f"{'|'.join(t)}: {self.num_edges(t):,}" for t in self.edge_types)
        where = f"parts {self.parts_here} of {self.parts.num_parts} here"
        if self.structure is not None and self.placed is not None:
            where += f", {self.structure.device} samples them, place={self.placed.place!r}"
        return f"DistGraph(nodes {{{nodes}}}, edges {{{edges}}}, {where})"


def loader_context(
    graph: Graph | DistGraph, priority: int | str | None = None, path: int | None = None
) -> RequestContext:
    """What the messages of a new loader say. A loader of a graph in memory has no number: it asks nobody for it."""
    number = 0 if isinstance(graph, Graph) else next(graph.loader_numbers)
    return RequestContext(loader=number, priority=user_priority(priority), path=path, consumer=Consumer())


def _one_of(given: Any, known: list[Any], what: str) -> Any:
    if given is None:
        if len(known) != 1:
            raise ValueError(f"the {what} must be named, one of {some(known)}")
        return known[0]
    if given not in known:
        raise ValueError(f"{what} {given!r} does not exist, the graph has {some(known, near=given)}")
    return given
