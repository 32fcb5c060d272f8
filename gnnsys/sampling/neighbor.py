"""Neighbour sampling on a graph, in memory or in parts: hop by hop, typed or not, uniform, weighted or in time.

A node's draw is keyed by (seed, epoch, batch, hop, edge type, tree, original node id) and nothing else. `expand="new"`
is PyG's rule (a hop expands the nodes that the hop before it discovered), `expand="frontier"` is DGL's (a hop expands
every node seen so far, one block per hop); under both, the same (hop, node) gets the same neighbours.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, edge_type_key, ids_of
from gnnsys.ops import CSC, BufferPool, IdTable, JoinedParts, Neighbors, expand_indptr, stream_key
from gnnsys.sampling.device_neighborhoods import DeviceNeighborhoods
from gnnsys.sampling.edge_filter import EdgeFilter, as_filter
from gnnsys.sampling.edge_sources import written_arrays
from gnnsys.sampling.fanouts import Fanouts, check_fanouts
from gnnsys.sampling.native_hops import PlainHops
from gnnsys.sampling.neighborhoods import (
    AnyGraph,
    GraphNeighborhoods,
    HopRequest,
    host_of,
    neighborhoods,
    sampling_device,
    to_device,
)
from gnnsys.sampling.rules import find_rule
from gnnsys.sampling.sample import Block, Sample
from gnnsys.sampling.sampler import SampleKey, Sampler

_FREE_BUFFERS = 4  # per hop: of samples that were just let go, and of those that threads make meanwhile


@lru_cache(maxsize=256)
def hop_key(seed: int, epoch: int, batch: int, hop: int) -> int:
    """What the keys of a hop's edge types begin with."""
    return stream_key(seed, epoch, batch, hop)


class NeighborSampler(Sampler):
    """Samples batches from a `Graph` or a `DistGraph`, bit-equal. Safe to call from several threads at once.

    `num_neighbors` is a fanout per hop (-1: all), for all edge types or per edge type. `weight` and `time` name rows of
    the graph; sampling in time makes the trees of different seeds disjoint, as each has a time of its own.

    `device` is where samples are made: by default where the graph's structure is, a GPU also for a graph in pinned host
    memory. There all work of a sample goes to the current stream, and the host waits for sizes alone: once per hop
    where draws are uniform, or by LABOR-0, which is one native call for all edge types; else twice per hop and edge
    type. Seeds may be given on the host.

    `edges` says which edges there are: the name of a mask of edges, or messages of `gnnsys.split_links`. A batch is the
    one that the graph with these edges alone would give. Of parts it is made on the host.

    A subclass may draw by a rule of its own (`rule`, see `draw_rule.py`) where nothing of the above is asked for. Rules
    that do not draw on devices draw on the host, wherever parts were placed.
    """

    unbiased_for: ClassVar[str] = "in each layer the mean over a node's in-neighbours, where draws are uniform"

    def __init__(
        self,
        graph: AnyGraph,
        num_neighbors: Fanouts,
        *,
        replace: bool = False,
        disjoint: bool = False,
        weight: str | None = None,
        time: str | None = None,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        expand: Literal["new", "frontier"] = "new",
        device: torch.device | str | None = None,
        rule: str | None = None,
        edges: str | EdgeFilter | None = None,
    ) -> None:
        if temporal_strategy not in ("uniform", "last"):
            raise ValueError(f"temporal_strategy must be 'uniform' or 'last', got {temporal_strategy!r}")
        if expand not in ("new", "frontier"):
            raise ValueError(f"expand must be 'new' or 'frontier', got {expand!r}")
        if weight is not None and time is not None:
            raise ValueError("weight and time cannot be combined: sample by one of them")
        self.graph = graph
        self.replace = replace
        self.disjoint = disjoint or time is not None
        self.time = time
        self.last = temporal_strategy == "last" and time is not None
        self.expand = expand
        if self.disjoint and expand == "frontier":
            raise ValueError("expand='frontier' shares nodes between seeds: use expand='new' with disjoint or time")
        self._fanouts = check_fanouts(graph, num_neighbors)
        self._type_keys = {t: edge_type_key(t) for t in self._fanouts}
        self.num_hops = len(next(iter(self._fanouts.values()), ()))
        drawn_by = None if rule is None else find_rule(rule)
        kept = as_filter(edges)
        if kept is not None and not isinstance(graph, Graph):
            self.device = torch.device("cpu")
        elif drawn_by is None or drawn_by.draws_on_devices:
            self.device = sampling_device(graph, device)
        else:
            self.device = host_of(graph, f"{type(self).__name__}, by the rule {drawn_by.name!r},")
        self._neighborhoods = neighborhoods(graph, weight=weight, time=time, rule=rule, edges=kept, device=self.device)
        self._array_names = (weight, time, None if kept is None else kept.array)
        self._arrays = written_arrays(graph, self._array_names) if isinstance(graph, Graph) else []
        self.weighs = drawn_by is not None and drawn_by.weighs
        self._options = {"weight_attr": weight, "time_attr": time, "temporal_strategy": temporal_strategy}
        if kept is not None:
            self._options["edge_mask"] = kept.text
        self._free_tables: dict[int, deque[dict[NodeType, IdTable]]] = defaultdict(deque)
        is_plain = weight is None and (drawn_by is None or drawn_by.drawn_in_hops)
        hoods = self._neighborhoods
        self._buffers = BufferPool(_FREE_BUFFERS * self.num_hops)
        self._is_numbered_while_drawn = isinstance(hoods, GraphNeighborhoods) and hoods.is_plain and not self.disjoint
        self._plain = self._plain_hops(labor=drawn_by is not None) if is_plain else None

    def _plain_hops(self, labor: bool) -> PlainHops | None:
        """All hops in one native call, where they are plain enough for it."""
        graph = self.graph
        if self.device.type != "cuda" or self.disjoint or self.expand != "new" or self.num_hops == 0:
            return None
        hoods = self._neighborhoods
        assert isinstance(hoods, (GraphNeighborhoods, DeviceNeighborhoods))
        structures: dict[EdgeType, CSC | JoinedParts] = {}
        fanouts: list[int] = []
        for edge_type, of_hops in self._fanouts.items():
            csc = hoods.csc(edge_type) if isinstance(hoods, GraphNeighborhoods) else hoods.joined(edge_type)
            if csc is None:
                return None
            structures[edge_type] = csc
            fanouts += of_hops if self.replace else [hoods.bounded(edge_type, fanout) for fanout in of_hops]
        original = [] if isinstance(hoods, GraphNeighborhoods) else [hoods.original(t) for t in graph.node_types]
        num_nodes = {t: graph.num_nodes(t) for t in graph.node_types}
        return PlainHops(
            structures, num_nodes, fanouts, replace=self.replace, labor=labor, device=self.device, original=original
        )

    @property
    def fanouts(self) -> dict[EdgeType, tuple[int, ...]]:
        """Per edge type and hop."""
        return self._fanouts

    @property
    def plain_fanouts(self) -> dict[EdgeType, tuple[int, ...]] | None:
        """Per hop, where a device would sample all hops in one native call; None where not."""
        is_weighted = self._options["weight_attr"] is not None or self.time is not None
        return None if is_weighted or self.weighs or self.disjoint or self.expand != "new" else dict(self._fanouts)

    def options(self) -> dict[str, Any]:
        """What decides a sample besides the graph, the seeds and the key, by the names that users give it."""
        lists = set(self._fanouts.values())
        fanouts = list(lists.pop()) if len(lists) == 1 else dict(self._fanouts)
        plain = {"num_neighbors": fanouts, "replace": self.replace, "disjoint": self.disjoint, "expand": self.expand}
        return plain | self._options

    def check_current(self) -> None:
        if not isinstance(self.graph, Graph):
            return
        now = written_arrays(self.graph, self._array_names)
        is_same = all(a is b and m == n for (a, m), (b, n) in zip(now, self._arrays, strict=False))
        if not is_same or len(now) != len(self._arrays):
            names = " or ".join(repr(name) for name in self._array_names if name is not None)
            kind = type(self).__name__
            raise ValueError(f"{names} changed after the {kind} was made, which draws by it: make the sampler again")

    def draw_key(self, key: SampleKey, hop: int, edge_type: EdgeType) -> int:
        """What the draws of a hop are keyed by, beside original ids and trees."""
        return stream_key(self._type_keys[edge_type], after=hop_key(key.seed, key.epoch, key.batch, hop))

    def csc(self, edge_type: EdgeType) -> CSC:
        """What is sampled from, of a graph in memory: its CSC, but in order of time if any."""
        return self._neighborhoods.csc(edge_type)

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        """All edges src[i] -> dst[i] (parallel ones included), ascending, each once: what `exclude` takes."""
        return self._neighborhoods.find_edges(edge_type, src, dst)

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        if type(self).find_edges is not NeighborSampler.find_edges:  # a user's own
            return partial(self.find_edges, edge_type, src, dst)
        return self._neighborhoods.begin_find_edges(edge_type, src, dst)

    def sample(
        self,
        seeds: Mapping[NodeType, Tensor],
        *,
        key: SampleKey,
        seed_time: Mapping[NodeType, Tensor] | None = None,
        tree: Mapping[NodeType, Tensor] | None = None,
        exclude: Mapping[EdgeType, Tensor] | None = None,
    ) -> Sample:
        """The sampled structure around `seeds`, given per node type.

        `seed_time` is the time of each seed (node times name it themselves when it is left out); `tree` says which
        tree each seed starts, by default one each; `exclude` are edges, as `find_edges` names them, never to be taken.
        """
        seeds = {t: ids_of(ids, self.graph.num_nodes(t), f"seeds of {t!r}") for t, ids in seeds.items()}
        if self._plain is not None and not exclude:
            keys = [self.draw_key(key, hop, edge_type) for edge_type in self._fanouts for hop in range(self.num_hops)]
            return self._plain.sample(seeds, keys)
        with self._tables() as tables:
            walk = _DisjointWalk(self, seeds, seed_time, tree, tables) if self.disjoint else _Walk(self, seeds, tables)
            for hop in range(self.num_hops):
                walk.step(hop, key, exclude or {})
            return walk.finish()

    def steering(self, key: SampleKey) -> tuple[int | None, int]:
        """Whom a batch is for (a part; None: nobody in particular), and the version of the scores that steer it."""
        return None, 0

    @contextmanager
    def _tables(self) -> Iterator[dict[NodeType, IdTable]]:
        """One set of tables per sample in flight, reused by later ones: on a device by those of the same stream, so
        that what the last one has queued is done with them."""
        on_device = self.device.type == "cuda"
        free = self._free_tables[torch.cuda.current_stream(self.device).cuda_stream if on_device else 0]
        try:
            tables = free.pop()
        except IndexError:
            bound = 1 << 40 if self.disjoint else 0  # (tree, id) pairs need wide slots
            tables = {
                t: IdTable(max(bound, self.graph.num_nodes(t)), device=self.device) for t in self.graph.node_types
            }
        for table in tables.values():
            table.clear()
        yield tables
        free.append(tables)


_Found: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor | None]"  # indptr, local ids, positions, weight


class _HopEdges(NamedTuple):
    """Edges of one hop: those of column c, indptr[c] to indptr[c + 1], go to local node first + c."""

    indptr: Tensor
    first: int
    local: Tensor  # local ids of the sources
    positions: Tensor
    weight: Tensor | None


class _Walk:
    """One sample in the making: what is known of each node type, hop by hop."""

    def __init__(
        self, sampler: NeighborSampler, seeds: Mapping[NodeType, Tensor], tables: dict[NodeType, IdTable]
    ) -> None:
        graph = sampler.graph
        if sampler.disjoint or sampler.device.type != "cpu":
            _check_seeds(graph, seeds)
        self.sampler = sampler
        self.neighborhoods = sampler._neighborhoods
        self.tables = tables
        self.nodes: dict[NodeType, list[Tensor]] = {t: [] for t in graph.node_types}
        self.num_nodes: dict[NodeType, list[int]] = {t: [] for t in graph.node_types}
        self.edges: dict[EdgeType, list[_HopEdges]] = {t: [] for t in graph.edge_types}
        self.num_edges: dict[EdgeType, list[int]] = {t: [] for t in graph.edge_types}
        self.blocks: list[Block] = []
        for t in graph.node_types:
            ids = seeds[t].to(torch.int64) if t in seeds else torch.empty(0, dtype=torch.int64, device="cpu")
            self._start(t, to_device(ids.contiguous(), sampler.device))
            self.num_nodes[t].append(ids.numel())

    def _start(self, node_type: NodeType, ids: Tensor) -> None:
        self.tables[node_type].insert_seeds(ids)
        self._add(node_type, ids)

    def _add(self, node_type: NodeType, ids: Tensor) -> None:
        """Ids are kept as the graph keeps them, so that a hop need not convert what the last one found."""
        self.nodes[node_type].append(ids.to(self.neighborhoods.id_dtypes[node_type]))

    def step(self, hop: int, key: SampleKey, exclude: Mapping[EdgeType, Tensor]) -> None:
        before = {t: sum(n) for t, n in self.num_nodes.items()}
        first = {t: before[t] - self.num_nodes[t][-1] for t in before}
        if self.sampler.expand == "frontier":
            first = dict.fromkeys(first, 0)
        frontier = {t: self._frontier(t, first[t], before[t]) for t in before}
        num_chunks = {t: len(n) for t, n in self.nodes.items()}
        structure: dict[EdgeType, _Found] = {}
        requests = self._requests(hop, key, frontier, exclude)
        for edge_type, found in self._find(requests, hop):
            structure[edge_type] = found
            self.num_edges[edge_type].append(found[1].numel())
        for t in before:
            self.num_nodes[t].append(sum(chunk.numel() for chunk in self.nodes[t][num_chunks[t] :]))
        if self.sampler.expand == "frontier":
            self._add_block(structure, before)
        else:
            for edge_type, (indptr, local, positions, weight) in structure.items():
                self.edges[edge_type].append(_HopEdges(indptr, first[edge_type[2]], local, positions, weight))

    def _frontier(self, node_type: NodeType, begin: int, end: int) -> Tensor:
        """Ids of the local nodes begin..end, the last chunks of what was found."""
        chunks: list[Tensor] = []
        left = end - begin
        for chunk in reversed(self.nodes[node_type]):
            if left <= 0:
                break
            chunks.append(chunk)
            left -= chunk.numel()
        return torch.cat(chunks[::-1]) if chunks else self.nodes[node_type][0][:0]

    def _requests(
        self, hop: int, key: SampleKey, frontier: dict[NodeType, Tensor], exclude: Mapping[EdgeType, Tensor]
    ) -> list[HopRequest]:
        """What this hop asks for: every edge type's in-edges of the frontier."""
        requester, version = self.sampler.steering(key)
        return [
            HopRequest(
                edge_type,
                frontier[edge_type[2]],
                fanouts[hop],
                self.sampler.draw_key(key, hop, edge_type),
                exclude.get(edge_type),
                requester=requester,
                version=version,
            )
            for edge_type, fanouts in self.sampler._fanouts.items()
        ]

    def _find(self, requests: Sequence[HopRequest], hop: int) -> Iterator[tuple[EdgeType, _Found]]:
        """What each request asks for. Neighbours that are new are added to their node type."""
        sampler, hoods = self.sampler, self.neighborhoods
        if sampler._is_numbered_while_drawn and all(request.exclude is None for request in requests):
            for request in requests:
                csc, src_type = hoods.csc(request.edge_type), request.edge_type[0]
                seeds = request.seeds.to(csc.indices.dtype)
                table = self.tables[src_type]
                found = table.insert_sampled(
                    csc, seeds, request.fanout, key=request.key, replace=sampler.replace, buffers=sampler._buffers
                )
                if found.fresh.numel():
                    self._add(src_type, found.fresh)
                yield request.edge_type, (found.indptr, found.local, found.positions, None)
            return
        drawn = hoods.sample(requests, replace=sampler.replace, last=sampler.last, hop=hop)
        for request, neighbors in zip(requests, drawn, strict=True):
            local = self._discover(request, neighbors)
            yield request.edge_type, (neighbors.indptr, local, neighbors.positions, neighbors.weight)

    def _discover(self, request: HopRequest, neighbors: Neighbors) -> Tensor:
        """Local ids of the sampled neighbours; new ones are added to their node type."""
        src_type = request.edge_type[0]
        local, fresh = self.tables[src_type].insert(neighbors.ids)
        if fresh.numel():
            self._add(src_type, fresh)
        return local

    def _add_block(self, structure: dict[EdgeType, _Found], num_dst: dict[NodeType, int]) -> None:
        num_src = {t: sum(n) for t, n in self.num_nodes.items()}
        csc = {
            t: CSC(indptr, local, num_src[t[0]], partial(self.neighborhoods.edge_ids, t, positions))
            for t, (indptr, local, positions, _) in structure.items()
        }
        weights = {t: _joined_weights([weight], self.sampler.device) for t, (_, _, _, weight) in structure.items()}
        self.blocks.insert(0, Block(csc, num_src, num_dst, weights if self.sampler.weighs else None))

    def finish(self) -> Sample:
        row, col, edge, weights = {}, {}, {}, {}
        for edge_type, hops in self.edges.items():
            weights[edge_type] = _joined_weights([h.weight for h in hops], self.sampler.device)
            row[edge_type], col[edge_type] = _join_edges(hops, self.sampler.device)
            positions = [h.positions for h in hops]
            if not positions:
                positions = [torch.empty(0, dtype=torch.int64, device=self.sampler.device)]
            edge[edge_type] = self.neighborhoods.edge_ids(edge_type, torch.cat(positions))
        if self.blocks:
            row, col, edge = {}, {}, {}  # every edge is in a block
        node = {t: self._join_ids(chunks) for t, chunks in self.nodes.items()}
        counts = (self.num_nodes, self.num_edges)
        sample = Sample(node, row, col, edge, *counts, blocks=self.blocks, by_destination=True)
        sample.edge_weight = weights if self.sampler.weighs and not self.blocks else None
        return sample

    def _join_ids(self, chunks: list[Tensor]) -> Tensor:
        """Of all hops, int64."""
        if self.sampler.device.type != "cpu":
            return torch.cat(chunks).to(torch.int64)
        out = self.sampler._buffers.empty((sum(ids.numel() for ids in chunks),), torch.int64)
        return torch.cat(chunks, out=out)


class _DisjointWalk(_Walk):
    """The same with a tree per seed: a node is known by (tree, id), so two trees never share one."""

    def __init__(
        self,
        sampler: NeighborSampler,
        seeds: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
        tree: Mapping[NodeType, Tensor] | None,
        tables: dict[NodeType, IdTable],
    ) -> None:
        trees = _seed_trees(seeds, tree)
        self._seed_tree = {t: to_device(of, sampler.device) for t, of in trees.items()}
        self.trees: dict[NodeType, list[Tensor]] = {t: [] for t in sampler.graph.node_types}
        super().__init__(sampler, seeds, tables)
        self._tree_time: Tensor | None = None
        if sampler.time is not None:
            self._tree_time = to_device(self._times(seeds, trees, seed_time), sampler.device)

    def _times(
        self,
        seeds: Mapping[NodeType, Tensor],
        trees: Mapping[NodeType, Tensor],
        seed_time: Mapping[NodeType, Tensor] | None,
    ) -> Tensor:
        """The time of each tree, int64 [num_trees], made on the host; of several seeds in one tree the last one's."""
        of = {t: ids.cpu() for t, ids in trees.items()}
        num_trees = 1 + max((int(t.max()) for t in of.values() if t.numel()), default=-1)
        times = torch.zeros(num_trees, dtype=torch.int64, device="cpu")
        for node_type, ids in seeds.items():
            times[of[node_type]] = self._time_of(node_type, ids, seed_time).cpu()
        return times

    def _time_of(self, node_type: NodeType, ids: Tensor, seed_time: Mapping[NodeType, Tensor] | None) -> Tensor:
        if seed_time is not None and node_type in seed_time:
            if seed_time[node_type].numel() != ids.numel():
                raise ValueError(f"seed_time has {seed_time[node_type].numel()} entries for {ids.numel()} seeds")
            return seed_time[node_type].to(torch.int64)
        rows = self.sampler.graph.node_data[node_type].get(str(self.sampler.time))
        if rows is None:
            raise ValueError(
                f"seed_time is needed: nodes of type {node_type!r} have no {self.sampler.time!r} of their own"
            )
        return rows[ids.to(rows.device) if isinstance(rows, Tensor) else ids].to(torch.int64)

    def _start(self, node_type: NodeType, ids: Tensor) -> None:
        tree = self._seed_tree.get(node_type, ids[:0])
        self.tables[node_type].insert_seeds(tree * self.sampler.graph.num_nodes(node_type) + ids)
        self._add(node_type, ids)
        self.trees[node_type].append(tree)

    def _requests(
        self, hop: int, key: SampleKey, frontier: dict[NodeType, Tensor], exclude: Mapping[EdgeType, Tensor]
    ) -> list[HopRequest]:
        tree = {
            t: torch.cat(self.trees[t])[-ids.numel() :] if ids.numel() else ids.long() for t, ids in frontier.items()
        }
        time = dict.fromkeys(tree) if self._tree_time is None else {t: self._tree_time[of] for t, of in tree.items()}
        return [
            request._replace(tree=tree[request.edge_type[2]], seed_time=time[request.edge_type[2]])
            for request in super()._requests(hop, key, frontier, exclude)
        ]

    def _discover(self, request: HopRequest, neighbors: Neighbors) -> Tensor:
        src_type = request.edge_type[0]
        assert request.tree is not None
        tree = torch.repeat_interleave(request.tree, neighbors.indptr.diff(), output_size=neighbors.ids.numel())
        num_nodes = self.sampler.graph.num_nodes(src_type)
        local, fresh = self.tables[src_type].insert(tree * num_nodes + neighbors.ids)
        if fresh.numel():
            self._add(src_type, fresh % num_nodes)
            self.trees[src_type].append(torch.div(fresh, num_nodes, rounding_mode="floor"))
        return local

    def finish(self) -> Sample:
        sample = super().finish()
        sample.tree = {t: torch.cat(chunks) for t, chunks in self.trees.items()}
        return sample


def _joined_weights(weights: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Of all hops; one that had nothing to draw has none."""
    known = [rows for rows in weights if rows is not None]
    return torch.cat(known) if known else torch.empty(0, dtype=torch.float32, device=device)


def _join_edges(hops: Sequence[_HopEdges], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources and destinations of all hops' edges, two rows of one tensor."""
    out = torch.empty(2, sum(h.local.numel() for h in hops), dtype=torch.int64, device=device)
    row, col = out
    end = 0
    for hop in hops:
        begin, end = end, end + hop.local.numel()
        row[begin:end] = hop.local
        expand_indptr(hop.indptr, hop.first, col[begin:end])
    return row, col


def _seed_trees(seeds: Mapping[NodeType, Tensor], tree: Mapping[NodeType, Tensor] | None) -> dict[NodeType, Tensor]:
    if tree is None:
        if len(seeds) > 1:
            raise ValueError(f"tree must be given when seeds have several node types, here {list(seeds)}")
        return {t: torch.arange(ids.numel(), device=ids.device) for t, ids in seeds.items()}
    for node_type, ids in seeds.items():
        if node_type not in tree or tree[node_type].numel() != ids.numel():
            raise ValueError(f"tree must give a tree for each of the {ids.numel()} seeds of type {node_type!r}")
    return {t: tree[t].to(torch.int64) for t in seeds}


def _check_seeds(graph: AnyGraph, seeds: Mapping[NodeType, Tensor]) -> None:
    """ValueError for seeds that are no nodes: (tree, id) pairs of theirs would be others' pairs, and a device would
    stop at them."""
    for node_type, ids in seeds.items():
        num_nodes = graph.num_nodes(node_type)
        low, high = torch.stack(ids.aminmax()).tolist() if ids.numel() else (0, 0)
        if ids.numel() and not 0 <= low <= high < num_nodes:
            raise ValueError(f"seeds must be in [0, {num_nodes}), got {low} to {high}")
