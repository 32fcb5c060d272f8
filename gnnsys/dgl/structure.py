"""From a DGL graph to the Graph that we sample from, and from our blocks back to DGL's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import dgl
import torch
from dgl.utils import (
    extract_edge_subframes,
    extract_node_subframes,
    extract_node_subframes_for_block,
    set_new_frames,
)
from torch import Tensor

from gnnsys.dgl.feature_names import Prefetched, check_names, names_of
from gnnsys.graph import EDGE, NODE, EdgeType, Graph, NodeType, as_ids, did_you_mean, from_dgl, ids_of, some
from gnnsys.sampling import Block
from gnnsys.sampling import NeighborSampler as Sampler

WEIGHTS = "edge_weights"  # what DGL's LaborSampler calls them
_MASK = "__mask_weight__"


def mean_weights(block: Block, edge_type: EdgeType) -> Tensor:
    """Weights of a block's edges that add up to a node's in-degree, as DGL's do: messages times them have the weighted
    mean as their mean. Ours add up to one."""
    assert block.edge_weight is not None
    degree = block.csc[edge_type].in_degrees()
    return block.edge_weight[edge_type] * torch.repeat_interleave(degree, degree)


class DglStructure:
    """A DGL graph as our sampler sees it. Refers to the DGL graph weakly."""

    def __init__(self, g: Any, fanouts: list[Any], replace: bool, prob: str | None, mask: str | None) -> None:
        whole = from_dgl(g)
        self._g = weakref.ref(g)
        self.is_plain = whole.is_homogeneous
        self._whole = whole
        self._drawn_by = prob or mask
        self._made_from = self._origin(g)
        self.weight = prob
        self.mask: str | None = None  # of edges; here it is a weight of 0 and 1
        for option, name in (("prob", prob), ("mask", mask)):
            known = {known for rows in whole.edge_data.values() for known in rows}
            if name is not None and name not in known:
                there = f"{some(sorted(known), near=name)}{did_you_mean(name, known)}"
                raise ValueError(f"{option}: no edges have {name!r}, only {there}")
        weights: dict[EdgeType, dict[str, Tensor]] = {}
        if mask is not None:
            self.weight = _MASK
            weights = {t: {_MASK: rows[mask].float()} for t, rows in whole.edge_data.items() if mask in rows}
        elif prob is not None:
            weights = {t: {prob: rows[prob]} for t, rows in whole.edge_data.items() if prob in rows}
        self.graph = Graph(self._num_nodes, {t: whole.csc(t) for t in whole.edge_types}, None, weights)
        self.num_neighbors = self._hops(fanouts)
        self._replace = replace
        self._position_of: dict[EdgeType, Tensor] = {}

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.graph, self.num_neighbors, replace=self._replace, weight=self.weight, expand="frontier")

    def _origin(self, g: Any) -> list[Any]:
        """The objects that this view was made from. DGL replaces its graph index when edges are added or removed."""
        weights = [g.edges[t].data.get(self._drawn_by) for t in g.canonical_etypes] if self._drawn_by else []
        return [g._graph, *weights]

    def is_current(self, g: Any) -> bool:
        now = self._origin(g)
        return len(now) == len(self._made_from) and all(a is b for a, b in zip(now, self._made_from, strict=True))

    @property
    def _num_nodes(self) -> dict[NodeType, int]:
        return {t: self._whole.num_nodes(t) for t in self._whole.node_types}

    def _hops(self, fanouts: list[Any]) -> dict[EdgeType, list[int]]:
        """Fanouts per hop, from the seeds outwards. DGL lists them per layer, the outermost hop first."""
        g = self._g()
        assert g is not None
        hops: dict[EdgeType, list[int]] = {t: [] for t in self._whole.edge_types}
        for fanout in reversed(fanouts):
            if isinstance(fanout, Mapping):
                named = {EDGE if self.is_plain else g.to_canonical_etype(t): int(k) for t, k in fanout.items()}
                for t in hops:
                    hops[t].append(named.get(t, 0))
            else:
                for t in hops:
                    hops[t].append(int(fanout))
        return hops

    def by_type(self, nodes: Any) -> dict[NodeType, Tensor]:
        if isinstance(nodes, Mapping):
            named = {NODE if self.is_plain else t: ids for t, ids in nodes.items()}
            return {t: self._ids(ids, t) for t, ids in named.items()}
        if len(self._whole.node_types) != 1:
            raise ValueError(f"seed nodes must be a dict by node type, the graph has {some(self._whole.node_types)}")
        return {self._whole.node_types[0]: self._ids(nodes, self._whole.node_types[0])}

    def _ids(self, nodes: Any, node_type: NodeType) -> Tensor:
        return ids_of(nodes, self._whole.num_nodes(node_type), "indices")

    def to_load(self, prefetched: Prefetched) -> tuple[Graph, None]:
        """The graph for the loader, with only the features to prefetch: the loader fetches all that it has."""
        self._check(prefetched)
        names = prefetched.node_feats
        rows = {
            t: {n: self._whole.node_data[t][n] for n in names_of(names, "_N" if self.is_plain else t)}
            for t in self._whole.node_types
        }
        csc = {t: self.graph.csc(t) for t in self.graph.edge_types}
        return Graph(self._num_nodes, csc, rows, self.graph.edge_data), None

    def _check(self, prefetched: Prefetched) -> None:
        """ValueError, when the DataLoader is made, for features that do not exist."""
        g = self._g()
        assert g is not None
        for t in g.ntypes:
            check_names("prefetch_node_feats", t, names_of(prefetched.node_feats, t), g.nodes[t].data)
            check_names("prefetch_labels", t, names_of(prefetched.labels, t), g.nodes[t].data)
        for edge_type in g.canonical_etypes:
            named = names_of(prefetched.edge_feats, edge_type)
            check_names("prefetch_edge_feats", edge_type, named, g.edges[edge_type].data)

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
        """DGL's blocks, with ids, and with the graph's features, which DGL slices on access."""
        g = self._alive()
        return [self._to_dgl(g, block, nodes) for block in blocks]

    def to_subgraph(
        self,
        node: Mapping[NodeType, Tensor],
        edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
        edge: Mapping[Any, Tensor],
    ) -> Any:
        """A DGL graph of these nodes and edges, with ids, and with features as `to_dgl` has them.

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
        set_new_frames(
            made,
            node_frames=extract_node_subframes(g, [node[ours].to(g.idtype) for ours in names.values()]),
            edge_frames=extract_edge_subframes(g, [edge[ours].to(g.idtype) for ours in named.values()]),
        )
        return made

    def _to_dgl(self, g: Any, block: Block, nodes: dict[NodeType, Tensor]) -> Any:
        edges = {}
        for t in g.canonical_etypes:
            csc = block.csc[EDGE if self.is_plain else t]
            edges[t] = (
                "csc",
                (csc.indptr.to(g.idtype), csc.indices.to(g.idtype), torch.empty(0, dtype=g.idtype, device="cpu")),
            )
        names = {t: NODE if self.is_plain else t for t in g.ntypes}
        made = dgl.create_block(
            edges,
            num_src_nodes={t: block.num_src[n] for t, n in names.items()},
            num_dst_nodes={t: block.num_dst[n] for t, n in names.items()},
        )
        src = [nodes[names[t]][: block.num_src[names[t]]].to(g.idtype) for t in g.ntypes]
        dst = [nodes[names[t]][: block.num_dst[names[t]]].to(g.idtype) for t in g.ntypes]
        edge_ids = []
        for t in g.canonical_etypes:
            ids = block.csc[EDGE if self.is_plain else t].edge_ids
            assert ids is not None
            edge_ids.append(ids.to(g.idtype))
        set_new_frames(
            made,
            node_frames=extract_node_subframes_for_block(g, src, dst),
            edge_frames=extract_edge_subframes(g, edge_ids),
        )
        return made

    def fill_subgraph(self, made: Any, nodes: Mapping[NodeType, Mapping[str, Any]], prefetched: Prefetched) -> None:
        """Puts features into a subgraph, as `fill` does into blocks."""
        for t in made.ntypes:
            for name in names_of(prefetched.node_feats, t):
                made.nodes[t].data[name] = nodes[NODE if self.is_plain else t][name]
        for edge_type in made.canonical_etypes:
            for name in names_of(prefetched.edge_feats, edge_type):
                made.edges[edge_type].data[name] = made.edges[edge_type].data[name]

    def weigh(self, made: Any, block: Block) -> None:
        """Gives a DGL block the weights of our block's edges, by DGL's name."""
        for t in made.canonical_etypes:
            made.edges[t].data[WEIGHTS] = mean_weights(block, EDGE if self.is_plain else t)

    def fill(self, blocks: list[Any], nodes: dict[NodeType, dict[str, Any]], prefetched: Prefetched) -> None:
        """Puts features into blocks: those of nodes from the loader; labels and edge features are sliced here."""
        for t in blocks[0].srctypes:
            for name in names_of(prefetched.node_feats, t):
                blocks[0].srcnodes[t].data[name] = nodes[NODE if self.is_plain else t][name]
        for t in blocks[-1].dsttypes:
            for name in names_of(prefetched.labels, t):
                blocks[-1].dstnodes[t].data[name] = blocks[-1].dstnodes[t].data[name]
        for block in blocks:
            for edge_type in block.canonical_etypes:
                for name in names_of(prefetched.edge_feats, edge_type):
                    block.edges[edge_type].data[name] = block.edges[edge_type].data[name]
