"""For samplers that a user writes: neighbours of any nodes of any graph, and blocks made of them (DistDGLv2, Fig. 8).

The same calls serve a graph in memory and one in parts on many machines. What comes out for a node depends on the key,
the hop and the node alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, overload

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType, as_ids, edge_type_key, some
from gnnsys.ops import CSC, compact, stream_key
from gnnsys.sampling.fanouts import is_fanout
from gnnsys.sampling.neighbor import SampleKey
from gnnsys.sampling.neighborhoods import AnyGraph, HopRequest, neighborhoods, sampling_device, to_device
from gnnsys.sampling.sample import Block, Sample

Fanout: TypeAlias = int | Mapping[EdgeType, int]


@dataclass(frozen=True)
class InEdges:
    """In-edges chosen for `nodes`, node after node: those of nodes[i] are indptr[i] .. indptr[i + 1]."""

    edge_type: EdgeType
    nodes: Tensor  # int64
    indptr: Tensor  # int64 [num_nodes + 1]
    ids: Tensor  # int64, where the edges come from
    edge_ids: Tensor  # int64

    def edges(self) -> tuple[Tensor, Tensor]:
        """Source and destination of each, int64."""
        return self.ids, torch.repeat_interleave(self.nodes, self.indptr.diff(), output_size=self.ids.numel())


@overload
def sample_neighbors(
    graph: AnyGraph,
    nodes: Tensor,
    fanout: int,
    *,
    key: SampleKey = ...,
    hop: int = ...,
    edge_type: EdgeType | None = ...,
    replace: bool = ...,
    weight: str | None = ...,
) -> InEdges: ...


@overload
def sample_neighbors(
    graph: AnyGraph,
    nodes: Mapping[NodeType, Tensor],
    fanout: Fanout,
    *,
    key: SampleKey = ...,
    hop: int = ...,
    edge_type: None = ...,
    replace: bool = ...,
    weight: str | None = ...,
) -> dict[EdgeType, InEdges]: ...


def sample_neighbors(
    graph: AnyGraph,
    nodes: Tensor | Mapping[NodeType, Tensor],
    fanout: Fanout,
    *,
    key: SampleKey = SampleKey(),  # noqa: B008  # a tuple
    hop: int = 0,
    edge_type: EdgeType | None = None,
    replace: bool = False,
    weight: str | None = None,
) -> InEdges | dict[EdgeType, InEdges]:
    """Up to `fanout` in-edges (-1: all) of each node, of one edge type, or of all where nodes are given by type.

    `hop` tells the hops of a batch from each other: a hop of its own draws on its own. In-edges are drawn uniformly, or
    by the edges' `weight`. `NeighborSampler` draws the same for the same (key, hop, node). Nodes and what is found are
    the graph's own ids, global ids on parts. Of a graph on a GPU, or for nodes on a GPU of a graph in pinned memory,
    the work and what comes out are there.

    >>> found = sample_neighbors(graph, seeds, 10, key=SampleKey(seed=1))
    >>> block, nodes = to_block(found)
    """
    if isinstance(nodes, Mapping):
        wanted = {t: nodes[t[2]] for t in graph.edge_types if t[2] in nodes}
    else:
        if edge_type is None and len(graph.edge_types) != 1:
            raise ValueError(f"edge_type must be named, one of {some(graph.edge_types)}, or nodes given by node type")
        edge_type = graph.edge_types[0] if edge_type is None else edge_type
        graph.num_edges(edge_type)  # ValueError where there is no such type
        wanted = {edge_type: nodes}
    wanted = {t: as_ids(ids, graph.num_nodes(t[2]), f"nodes of type {t[2]!r}") for t, ids in wanted.items()}
    on_host = None if isinstance(graph, Graph) else torch.device("cpu")  # which reads parts as well as a device does
    device = sampling_device(graph, next((ids.device for ids in wanted.values() if ids.is_cuda), on_host))
    wanted = {t: to_device(ids, device) for t, ids in wanted.items()}
    hoods = neighborhoods(graph, weight=weight, device=device)
    as_stored = {dst: wanted[t].to(hoods.id_dtypes[dst]) for dst, t in {t[2]: t for t in wanted}.items()}
    requests = [
        HopRequest(t, as_stored[t[2]], _fanout_of(fanout, t), stream_key(*key, hop, edge_type_key(t))) for t in wanted
    ]
    found = hoods.sample(requests, replace=replace, hop=hop)
    out = {
        t: InEdges(t, wanted[t].long(), chosen.indptr, chosen.ids.long(), hoods.edge_ids(t, chosen.positions))
        for t, chosen in zip(wanted, found, strict=True)
    }
    return out if isinstance(nodes, Mapping) else next(iter(out.values()))


def to_block(
    found: InEdges | Mapping[EdgeType, InEdges], seeds: Mapping[NodeType, Tensor] | None = None
) -> tuple[Block, dict[NodeType, Tensor]]:
    """The block that leads from the neighbours to the nodes they were found for, and its source nodes per type.

    The block's sources are its destinations, then the other neighbours in first-seen order. `seeds` are the
    destinations of each node type; they may be left away where every type that has some was asked about.
    """
    edges = {found.edge_type: found} if isinstance(found, InEdges) else dict(found)
    where = next((chosen.nodes.device for chosen in edges.values()), None)
    given = {t: ids.long() if where is None else to_device(ids.long(), where) for t, ids in (seeds or {}).items()}
    for (_, _, dst), chosen in edges.items():
        if not torch.equal(given.setdefault(dst, chosen.nodes), chosen.nodes):
            raise ValueError(f"all in-edges of type {dst!r} must be of the same nodes, the seeds, in the same order")
    types = list(dict.fromkeys([*given, *(t[0] for t in edges)]))
    none = next((ids[:0] for ids in given.values()), torch.empty(0, dtype=torch.int64, device="cpu"))
    nodes, local = compact(
        [given.get(t, none).contiguous() for t in types],
        [chosen.ids.contiguous() for chosen in edges.values()],
        [types.index(t[0]) for t in edges],
    )
    source = dict(zip(types, nodes, strict=True))
    num_src = {t: ids.numel() for t, ids in source.items()}
    csc = {
        t: CSC(chosen.indptr, places, num_src[t[0]], chosen.edge_ids)
        for (t, chosen), places in zip(edges.items(), local, strict=True)
    }
    return Block(csc, num_src, {t: given.get(t, none).numel() for t in types}), source


def sample_from_blocks(
    graph: AnyGraph, blocks: Sequence[Block], nodes: Mapping[NodeType, Tensor], seeds: Mapping[NodeType, Tensor]
) -> Sample:
    """What a loader takes of a user's sampler: blocks, outermost first, and the outermost one's source nodes."""
    none = next((ids[:0] for ids in nodes.values()), torch.empty(0, dtype=torch.int64, device="cpu"))
    num_nodes: dict[NodeType, list[int]] = {}
    num_edges: dict[EdgeType, list[int]] = {}
    for t in graph.node_types:
        sizes = [seeds.get(t, none).numel(), *(block.num_src.get(t, 0) for block in reversed(blocks))]
        num_nodes[t] = [sizes[0], *(b - a for a, b in pairwise(sizes))]
        if num_nodes[t] and min(num_nodes[t]) < 0:
            raise ValueError(f"blocks must grow from the seeds outwards, of type {t!r} they have {sizes} nodes")
    for edge_type in graph.edge_types:
        found = [block.csc.get(edge_type) for block in reversed(blocks)]
        num_edges[edge_type] = [0 if csc is None else csc.num_edges for csc in found]
    node = {t: nodes.get(t, none).long() for t in graph.node_types}
    return Sample(node, {}, {}, {}, num_nodes, num_edges, blocks=list(blocks))


def _fanout_of(fanout: Fanout, edge_type: EdgeType) -> int:
    value = fanout.get(edge_type, 0) if isinstance(fanout, Mapping) else fanout
    if not is_fanout(value):
        raise ValueError(f"fanout must be -1 (all) or a whole number >= 0, got {value} for {edge_type}")
    return int(value)
