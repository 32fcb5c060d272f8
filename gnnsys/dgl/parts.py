"""A graph in parts for DGL users: turns samples into DGL's blocks, with the features to prefetch.

Ids are global ids. A graph of one type has DGL's types "_N" and ("_N", "_E", "_N") in its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import dgl
import torch
from torch import Tensor

from gnnsys.dgl.feature_names import Names, Prefetched, check_names, names_of
from gnnsys.dgl.structure import WEIGHTS, LoadedArrays, edges_of, mean_weights
from gnnsys.graph import EDGE, NODE, EdgeType, GraphIds, NodeType, as_ids, ids_of, numbered_ids, some
from gnnsys.sampling import Block, DistGraph
from gnnsys.sampling import NeighborSampler as Sampler
from gnnsys.seeds import Share, check_node_ids
from gnnsys.store import read_rows

PLAIN_NODE, PLAIN_EDGE = "_N", ("_N", "_E", "_N")


class PartsStructure:
    """A graph in parts, as `DglStructure` is for a DGL graph: what the sampler and the DataLoader need.

    The sampler takes global ids; the DataLoader takes `GraphIds`, which carry their numbering.
    """

    def __init__(self, graph: DistGraph, fanouts: list[Any], replace: bool, prob: str | None, mask: str | None) -> None:
        self.graph = graph
        self.is_plain = graph.is_homogeneous
        self.weight, self.mask = prob, mask
        self.num_neighbors = self._hops(fanouts)
        self._replace = replace
        self._options = repr((fanouts, replace, prob, mask))

    @classmethod
    def of(
        cls,
        graph: DistGraph,
        fanouts: list[Any],
        replace: bool,
        prob: str | None,
        mask: str | None,
        known: PartsStructure | None,
    ) -> PartsStructure:
        """`known`, unless it was made with other options."""
        if known is not None and known._options == repr((fanouts, replace, prob, mask)):
            return known
        return cls(graph, fanouts, replace, prob, mask)

    @cached_property
    def sampler(self) -> Sampler:
        options: dict[str, Any] = {"replace": self._replace, "weight": self.weight, "device": "cpu"}
        options["edges"] = self.mask
        return Sampler(self.graph, self.num_neighbors, expand="frontier", **options)

    def check_current(self, g: Any) -> None:
        """Parts never change."""

    def _hops(self, fanouts: list[Any]) -> dict[EdgeType, list[int]]:
        """Fanouts per hop, from the seeds outwards. DGL lists them per layer, the outermost hop first."""
        hops: dict[EdgeType, list[int]] = {t: [] for t in self.graph.edge_types}
        for fanout in reversed(fanouts):
            named = {self.edge_type(t): int(k) for t, k in fanout.items()} if isinstance(fanout, Mapping) else None
            for t in hops:
                hops[t].append(int(fanout) if named is None else named.get(t, 0))
        return hops

    def edge_type(self, name: Any) -> EdgeType:
        """The edge type that a DGL user names: by all three names, or by the middle one if only one type has it."""
        known = self.graph.edge_types
        if name in known:
            return name
        if self.is_plain and name in (PLAIN_EDGE, PLAIN_EDGE[1]):
            return EDGE
        found = [t for t in known if t[1] == name]
        if len(found) != 1:
            raise ValueError(
                f"edge type {name!r} must be one of {some(known, near=name)}, or the middle name of one alone"
            )
        return found[0]

    def by_type(self, nodes: Any) -> dict[NodeType, Any]:
        """Global ids, the name of a mask, or a rank's share, by the graph's node types."""
        return {
            t: ids if isinstance(ids, (str, Share)) else ids_of(ids, self.graph.num_nodes(t), "indices")
            for t, ids in self._by_type(nodes).items()
        }

    def seeds(self, indices: Any) -> dict[NodeType, Any]:
        """What a user gave the DataLoader, as `by_type` has it; ValueError for plain ids, which are ambiguous here."""
        if isinstance(indices, GraphIds):
            indices = {check_node_ids(self.graph, indices, "indices"): indices}
        named = self._by_type(indices)
        numbered = {
            t: i if isinstance(i, (str, Share)) else numbered_ids(self.graph, i, t, "indices") for t, i in named.items()
        }
        return self.by_type(numbered)

    def _by_type(self, nodes: Any) -> dict[NodeType, Any]:
        if not isinstance(nodes, Mapping):
            if len(self.graph.node_types) != 1:
                raise ValueError(f"seed nodes must be a dict by node type, the graph has {some(self.graph.node_types)}")
            nodes = {self.graph.node_types[0]: nodes}
        names = {PLAIN_NODE: NODE} if self.is_plain else {}
        return {names.get(t, t): ids for t, ids in nodes.items()}

    def positions(self, exclude_eids: Any) -> dict[EdgeType, Tensor] | None:
        """Edges to exclude, as the sampler takes them: ascending global edge ids."""
        if exclude_eids is None:
            return None
        given = exclude_eids if isinstance(exclude_eids, Mapping) else {self.graph.edge_types[0]: exclude_eids}
        out = {}
        for name, ids in given.items():
            edge_type = self.edge_type(name)
            out[edge_type] = as_ids(ids, self.graph.num_edges(edge_type), "exclude_eids", "edge").long().unique()
        return out

    def to_load(self, prefetched: Prefetched) -> tuple[DistGraph, dict[Any, list[str]], None]:
        """The graph for the loader, and the features and labels that it fetches."""
        self._check(prefetched)
        fetch: dict[Any, list[str]] = {}
        for node_type in self.graph.node_types:
            shown = PLAIN_NODE if self.is_plain else node_type
            wanted = [*self._named(prefetched.node_feats, shown), *self._named(prefetched.labels, shown)]
            fetch[node_type] = list(dict.fromkeys(wanted))
        return self.graph, fetch, None

    def to_dgl(self, blocks: list[Block], nodes: dict[NodeType, Tensor]) -> list[Any]:
        """DGL's blocks, with ids."""
        return [self._to_dgl(block, nodes) for block in blocks]

    def _to_dgl(self, block: Block, nodes: dict[NodeType, Tensor]) -> Any:
        shown = {t: PLAIN_NODE if self.is_plain else t for t in self.graph.node_types}
        shown_edges = {t: PLAIN_EDGE if self.is_plain else t for t in self.graph.edge_types}
        made = dgl.create_block(
            {name: edges_of(block, t, torch.int64) for t, name in shown_edges.items()},
            num_src_nodes={shown[t]: block.num_src[t] for t in shown},
            num_dst_nodes={shown[t]: block.num_dst[t] for t in shown},
        )
        for t, name in shown.items():
            made.srcnodes[name].data[dgl.NID] = nodes[t][: block.num_src[t]].long()
            made.dstnodes[name].data[dgl.NID] = nodes[t][: block.num_dst[t]].long()
        for edge_type, edge_name in shown_edges.items():
            ids = block.csc[edge_type].edge_ids
            assert ids is not None
            made.edges[edge_name].data[dgl.EID] = ids.long()
        return made

    def weigh(self, made: Any, block: Block) -> None:
        """As `DglStructure.weigh`."""
        for edge_type in block.csc:
            made.edges[PLAIN_EDGE if self.is_plain else edge_type].data[WEIGHTS] = mean_weights(block, edge_type)

    def attach(self, made: Any) -> None:
        """Blocks of parts have only the features that are prefetched."""

    def fill(
        self,
        blocks: list[Any],
        nodes: dict[NodeType, dict[str, Any]],
        prefetched: Prefetched,
        arrays: LoadedArrays | None,
    ) -> None:
        """Puts features into blocks. Reads here what no loader has fetched: edge features, or all without a loader."""
        wanted: list[tuple[Any, Any, Tensor]] = []  # (frame, name), source, ids
        for t in self.graph.node_types:
            shown = PLAIN_NODE if self.is_plain else t
            for frame, names in (
                (blocks[0].srcnodes[shown].data, self._named(prefetched.node_feats, shown)),
                (blocks[-1].dstnodes[shown].data, self._named(prefetched.labels, shown)),
            ):
                ids = frame[dgl.NID]
                for name in names:
                    if name in nodes.get(t, {}):
                        frame[name] = nodes[t][name][: ids.numel()]
                    else:
                        wanted.append(((frame, name), self.graph.node_data[t][name], ids))
        for block in blocks:
            for edge_type in self.graph.edge_types:
                edges = block.edges[PLAIN_EDGE if self.is_plain else edge_type].data
                for name in self._named_edges(prefetched.edge_feats, edge_type):
                    wanted.append(((edges, name), self.graph.edge_data[edge_type][name], edges[dgl.EID]))
        for ((frame, name), _, _), rows in zip(
            wanted, read_rows((source, ids) for _, source, ids in wanted), strict=True
        ):
            frame[name] = rows

    def _named(self, names: Names, shown: str) -> list[str]:
        """Names for a node type. In a graph of one type, users may use DGL's name of it or ours."""
        return names_of(names, shown) or (names_of(names, NODE) if self.is_plain else [])

    def _named_edges(self, names: Names, edge_type: EdgeType) -> list[str]:
        return names_of(names, edge_type) or (names_of(names, PLAIN_EDGE) if self.is_plain else [])

    def _check(self, prefetched: Prefetched) -> None:
        """ValueError, when the DataLoader is made, for features that do not exist."""
        for node_type, arrays in self.graph.node_data.items():
            shown = PLAIN_NODE if self.is_plain else node_type
            check_names("prefetch_node_feats", node_type, self._named(prefetched.node_feats, shown), arrays)
            check_names("prefetch_labels", node_type, self._named(prefetched.labels, shown), arrays)
        for edge_type in self.graph.edge_types:
            named = self._named_edges(prefetched.edge_feats, edge_type)
            check_names("prefetch_edge_feats", edge_type, named, self.graph.edge_data[edge_type])
