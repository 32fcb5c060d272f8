"""From a DGL graph to the Graph that we sample from, and from our blocks back to DGL's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import dgl
import torch
from dgl.utils import set_new_frames
from torch import Tensor

from gnnsys.dgl.feature_names import Prefetched, check_names, names_of
from gnnsys.graph import EDGE, NODE, EdgeType, Graph, NodeType, as_ids, did_you_mean, from_dgl, ids_of, some
from gnnsys.sampling import Block
from gnnsys.sampling import NeighborSampler as Sampler
from gnnsys.seeds import Share

WEIGHTS = "edge_weights"  # what DGL's LaborSampler calls them
_MASK = "__mask_weight__"


def mean_weights(block: Block, edge_type: EdgeType) -> Tensor:
    """Weights of a block's edges that add up to a node's in-degree, as DGL's do: messages times them have the weighted
    mean as their mean. Ours add up to one."""
    assert block.edge_weight is not None
    degree = block.csc[edge_type].in_degrees()
    return block.edge_weight[edge_type] * torch.repeat_interleave(degree, degree)


def edges_of(block: Block, edge_type: EdgeType, idtype: torch.dtype) -> tuple[str, tuple[Tensor, Tensor, Tensor]]:
    """A block's edges as `dgl.create_block` takes them. DGL 1.1.3 reads their numbers on x86-64 without asking whether
    there are any, so they are written out."""
    csc = block.csc[edge_type]
    numbers = torch.arange(csc.num_edges, dtype=idtype, device="cpu")
    return "csc", (csc.indptr.to(idtype), csc.indices.to(idtype), numbers)


class DglStructure:
    """The edges of a DGL graph, and how they are drawn, as our sampler sees them. Refers to the DGL graph weakly.

    It keeps no features: a loader reads them from the graph when it is made (`LoadedArrays`).
    """

    def __init__(
        self,
        g: Any,
        fanouts: list[Any],
        replace: bool,
        prob: str | None,
        mask: str | None,
        known: DglStructure | None = None,
    ) -> None:
        """`known` is an earlier view of the same graph: its edges are taken over where the graph still has them."""
        self._g = weakref.ref(g)
        self._index = g._graph  # DGL replaces it when edges are added or removed
        self._edges: Graph
        if known is not None and known._index is g._graph:
            self._edges = known._edges
        else:
            self._edges = from_dgl(g)
            for rows in (*self._edges.node_data.values(), *self._edges.edge_data.values()):
                rows.clear()
        self.is_plain = self._edges.is_homogeneous
        self.weight = prob if mask is None else _MASK
        self.mask: str | None = None  # of edges; here it is a weight of 0 and 1
        self._drawn_by = prob or mask
        self._weights = self._weights_of(g)
        self.graph = self._edges.copy()
        for t in g.canonical_etypes:
            drawn_by = g.edges[t].data.get(self._drawn_by) if self._drawn_by else None
            if drawn_by is not None:
                ours = EDGE if self.is_plain else t
                self.graph.set_edge_data(str(self.weight), drawn_by if mask is None else drawn_by.float(), ours)
        if self._drawn_by is not None and not any(self.graph.edge_data.values()):
            known_names = sorted({name for t in g.canonical_etypes for name in g.edges[t].data})
            there = f"{some(known_names, near=self._drawn_by)}{did_you_mean(self._drawn_by, known_names)}"
            raise ValueError(f"{'prob' if mask is None else 'mask'}: no edges have {self._drawn_by!r}, only {there}")
        self.num_neighbors = self._hops(fanouts)
        self._replace = replace
        self._options = repr((fanouts, replace, prob, mask))
        self._position_of: dict[EdgeType, Tensor] = {}

    @classmethod
    def of(
        cls,
        g: Any,
        fanouts: list[Any],
        replace: bool,
        prob: str | None,
        mask: str | None,
        known: DglStructure | None,
        is_for_loader: bool,
    ) -> DglStructure:
        """`known`, unless what it was made from has changed. A loader reads weights in any case: a write through numpy
        leaves no trace."""
        is_like = known is not None and known._options == repr((fanouts, replace, prob, mask))
        if known is not None and is_like and not (is_for_loader and known._drawn_by) and known.is_current(g):
            return known
        return cls(g, fanouts, replace, prob, mask, known)

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.graph, self.num_neighbors, replace=self._replace, weight=self.weight, expand="frontier")

    def _weights_of(self, g: Any) -> list[tuple[Any, int]]:
        """The tensors that edges are drawn by, and how often torch has written into each."""
        if self._drawn_by is None:
            return []
        found = [g.edges[t].data.get(self._drawn_by) for t in g.canonical_etypes]
        return [(w, 0 if w is None or w.is_inference() else w._version) for w in found]

    def check_current(self, g: Any) -> None:
        """ValueError where a loader would go on with edges or weights that the graph no longer has."""
        if not self.is_current(g):
            what = "edges" if g._graph is not self._index else f"{self._drawn_by!r}, by which edges are drawn,"
            raise ValueError(f"{what} changed after this DataLoader was made: make a new DataLoader")

    def is_current(self, g: Any) -> bool:
        """Whether the graph has the edges and the weights that this was made from."""
        now = self._weights_of(g)
        return (
            g._graph is self._index
            and len(now) == len(self._weights)
            and all(a is b and m == n for (a, m), (b, n) in zip(now, self._weights, strict=True))
        )

    def _hops(self, fanouts: list[Any]) -> dict[EdgeType, list[int]]:
        """Fanouts per hop, from the seeds outwards. DGL lists them per layer, the outermost hop first."""
        g = self._g()
        assert g is not None
        hops: dict[EdgeType, list[int]] = {t: [] for t in self._edges.edge_types}
        for fanout in reversed(fanouts):
            if isinstance(fanout, Mapping):
                named = {EDGE if self.is_plain else g.to_canonical_etype(t): int(k) for t, k in fanout.items()}
                for t in hops:
                    hops[t].append(named.get(t, 0))
            else:
                for t in hops:
                    hops[t].append(int(fanout))
        return hops

    def by_type(self, nodes: Any) -> dict[NodeType, Any]:
        """Ids, or a rank's share of them, by the graph's node types."""
        if isinstance(nodes, Share):
            return {nodes.type: nodes}
        if isinstance(nodes, Mapping):
            named = {NODE if self.is_plain else t: ids for t, ids in nodes.items()}
            return {t: self._ids(ids, t) for t, ids in named.items()}
        if len(self._edges.node_types) != 1:
            raise ValueError(f"seed nodes must be a dict by node type, the graph has {some(self._edges.node_types)}")
        return {self._edges.node_types[0]: self._ids(nodes, self._edges.node_types[0])}

    def _ids(self, nodes: Any, node_type: NodeType) -> Any:
        return nodes if isinstance(nodes, Share) else ids_of(nodes, self._edges.num_nodes(node_type), "indices")

    def to_load(self, prefetched: Prefetched) -> tuple[Graph, None, LoadedArrays]:
        """The graph for a loader, with only the features to prefetch: the loader fetches all that it has."""
        arrays = LoadedArrays(self._alive(), prefetched)
        graph = self.graph.copy()
        for (kind, t, name), rows in arrays.rows.items():
            if kind == "node":
                graph.set_node_data(name, rows, NODE if self.is_plain else t)
        return graph, None, arrays

    def positions(self, exclude_eids: Any) -> dict[EdgeType, Tensor] | None:
        """CSC positions of the edges with these DGL edge ids."""
        if exclude_eids is None:
            return None
        g = self._g()
        assert g is not None
        if not isinstance(exclude_eids, Mapping):
            exclude_eids = {g.canonical_etypes[0]: exclude_eids}
        out = {}
        for t, ids in exclude_eids.items():
            ours = EDGE if self.is_plain else g.to_canonical_etype(t)
            if ours not in self._position_of:
                edge_ids = self.graph.csc(ours).edge_ids
                size = self.graph.num_edges(ours)
                order = torch.arange(size, device="cpu") if edge_ids is None else edge_ids.long()
                self._position_of[ours] = torch.empty(size, dtype=torch.int64, device="cpu").scatter_(
                    0, order, torch.arange(size, device="cpu")
                )
            ids = as_ids(ids, self._position_of[ours].numel(), "exclude_eids", "edge")
            out[ours] = self._position_of[ours][ids.long()].unique()
        return out

    def _alive(self) -> Any:
        g = self._g()
        if g is None:
            raise ValueError("the DGL graph that this loader samples from no longer exists: keep a reference to it")
        return g

    def to_dgl(self, blocks: list[Block], nodes: dict[NodeType, Tensor]) -> list[Any]:
        """DGL's blocks, with ids."""
        g = self._alive()
        return [self._to_dgl(g, block, nodes) for block in blocks]

    def _to_dgl(self, g: Any, block: Block, nodes: dict[NodeType, Tensor]) -> Any:
        names = {t: NODE if self.is_plain else t for t in g.ntypes}
        named = {t: EDGE if self.is_plain else t for t in g.canonical_etypes}
        made = dgl.create_block(
            {t: edges_of(block, ours, g.idtype) for t, ours in named.items()},
            num_src_nodes={t: block.num_src[ours] for t, ours in names.items()},
            num_dst_nodes={t: block.num_dst[ours] for t, ours in names.items()},
        )
        for t, ours in names.items():
            made.srcnodes[t].data[dgl.NID] = nodes[ours][: block.num_src[ours]].to(g.idtype)
            made.dstnodes[t].data[dgl.NID] = nodes[ours][: block.num_dst[ours]].to(g.idtype)
        for t, ours in named.items():
            ids = block.csc[ours].edge_ids
            assert ids is not None
            made.edges[t].data[dgl.EID] = ids.to(g.idtype)
        return made

    def to_subgraph(
        self,
        node: Mapping[NodeType, Tensor],
        edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
        edge: Mapping[Any, Tensor],
    ) -> Any:
        """A DGL graph of these nodes and edges, with ids.

        `edges` are (source, destination) by local id, `edge` their ids in the whole graph.
        """
        g = self._alive()
        names = {t: NODE if self.is_plain else t for t in g.ntypes}
        named = {t: EDGE if self.is_plain else t for t in g.canonical_etypes}
        made = dgl.heterograph(
            {t: tuple(ends.to(g.idtype) for ends in edges[ours]) for t, ours in named.items()},
            {t: node[ours].numel() for t, ours in names.items()},
            idtype=g.idtype,
        )
        for t, ours in names.items():
            made.nodes[t].data[dgl.NID] = node[ours].to(g.idtype)
        for t, ours in named.items():
            made.edges[t].data[dgl.EID] = edge[ours].to(g.idtype)
        return made

    def attach(self, made: Any) -> None:
        """Gives a block or subgraph the features of the graph that it lacks. DGL slices them on access."""
        g = self._alive()
        of_nodes = dict(zip(g.ntypes, g._node_frames, strict=True))
        of_edges = dict(zip(g.canonical_etypes, g._edge_frames, strict=True))
        set_new_frames(
            made,
            node_frames=[
                _sliced(of_nodes[t], own, dgl.NID) for t, own in zip(made.ntypes, made._node_frames, strict=True)
            ],
            edge_frames=[
                _sliced(of_edges[t], own, dgl.EID)
                for t, own in zip(made.canonical_etypes, made._edge_frames, strict=True)
            ],
        )

    def weigh(self, made: Any, block: Block) -> None:
        """Gives a DGL block the weights of our block's edges, by DGL's name."""
        for t in made.canonical_etypes:
            made.edges[t].data[WEIGHTS] = mean_weights(block, EDGE if self.is_plain else t)

    def fill(
        self,
        blocks: list[Any],
        nodes: dict[NodeType, dict[str, Any]],
        prefetched: Prefetched,
        arrays: LoadedArrays | None,
    ) -> None:
        """Puts prefetched features into blocks: those of nodes from the loader, the others are gathered here."""
        assert arrays is not None
        for kind, t, name in arrays.rows:
            if kind == "node":
                blocks[0].srcnodes[t].data[name] = nodes[NODE if self.is_plain else t][name]
            elif kind == "label":
                arrays.put(blocks[-1].dstnodes[t].data, dgl.NID, kind, t, name)
            else:
                for block in blocks:
                    arrays.put(block.edges[t].data, dgl.EID, kind, t, name)

    def fill_subgraph(self, made: Any, nodes: Mapping[NodeType, Mapping[str, Any]], arrays: LoadedArrays) -> None:
        """Puts prefetched features into a subgraph, as `fill` does into blocks."""
        for kind, t, name in arrays.rows:
            if kind == "node":
                made.nodes[t].data[name] = nodes[NODE if self.is_plain else t][name]
            else:
                arrays.put(made.edges[t].data, dgl.EID, kind, t, name)


def _sliced(parent: Any, own: Any, ids: str) -> Any:
    """A frame's columns by the ids of another frame, which keeps its own columns."""
    found = parent.subframe(own[ids])
    for name in own:
        found[name] = own._columns[name]
    return found


class LoadedArrays:
    """The arrays that a DataLoader prefetches, as the DGL graph had them when the loader was made.

    `rows` are by (kind, type, name); kinds are "node", "label" and "edge".
    """

    def __init__(self, g: Any, prefetched: Prefetched) -> None:
        self.rows: dict[tuple[str, Any, str], Tensor] = {}
        for kind, option, names, types, frames in (
            ("node", "prefetch_node_feats", prefetched.node_feats, g.ntypes, g.nodes),
            ("label", "prefetch_labels", prefetched.labels, g.ntypes, g.nodes),
            ("edge", "prefetch_edge_feats", prefetched.edge_feats, g.canonical_etypes, g.edges),
        ):
            for t in types:
                named = names_of(names, t)
                check_names(option, t, named, frames[t].data)
                self.rows |= {(kind, t, name): frames[t].data[name] for name in named}

    def put(self, frame: Any, ids: str, kind: str, of: Any, name: str) -> None:
        """Gathers rows into a frame, by the ids that it has."""
        frame[name] = self.rows[kind, of, name][frame[ids].long()]

    def check_current(self, g: Any) -> None:
        """ValueError where the graph has another array by now."""
        for (kind, t, name), rows in self.rows.items():
            frames = g.edges if kind == "edge" else g.nodes
            if frames[t].data.get(name) is not rows:
                raise ValueError(
                    f"{name!r} of {t!r} was replaced after this DataLoader was made, which prefetches it: make a new "
                    "DataLoader after assigning features"
                )
