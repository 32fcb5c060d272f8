"""Cluster-GCN (Chiang et al. 2019): batches are whole clusters, with every edge among their nodes.

Clusters of parts lie inside parts (`gnnsys partition --clusters N`): a batch of one part's clusters asks nobody for
structure or rows. What that costs: edges between clusters that are in no batch together are never seen.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType
from gnnsys.ops import CSC, as_bytes, in_subgraph
from gnnsys.partition import Assignment, Clustering, cut_clusters
from gnnsys.sampling.induced import induced_edges
from gnnsys.sampling.neighborhoods import AnyGraph, sampling_device, to_device
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey
from gnnsys.sampling.subgraph_sampler import SubgraphSampler, check_inputs


def cluster(graph: Graph, num_clusters: int, *, seed: int = 0, recursive: bool = False) -> Clustering:
    """Cuts a graph in memory into clusters of about equal size, with few edges between them, by METIS.

    `recursive`: by bisection of bisections instead of into all clusters at once.

    >>> clusters = cluster(graph, 100)  # doctest: +SKIP
    """
    if not isinstance(graph, Graph):
        raise ValueError("parts are cut into clusters when they are made: gnnsys partition ... --clusters N")
    nodes = {t: torch.zeros(graph.num_nodes(t), dtype=torch.int32, device="cpu") for t in graph.node_types}
    return cut_clusters(graph, Assignment(1, 1, nodes), num_clusters, seed=seed, recursive=recursive)


class ClusterSampler(SubgraphSampler):
    """Subgraphs of clusters: an input is a cluster, a batch the nodes of its clusters and all edges among them.

    `clusters` are those of `cluster(graph, N)`; parts have their own. Nodes come cluster by cluster, in each ascending
    by original id. Nothing is drawn: what changes from epoch to epoch is which clusters meet in a batch.

    >>> sampler = ClusterSampler(graph, cluster(graph, 100))  # doctest: +SKIP
    """

    def __init__(
        self, graph: AnyGraph, clusters: Clustering | None = None, *, device: torch.device | str | None = None
    ) -> None:
        self.graph = graph
        self.device = sampling_device(graph, device)
        self._nodes: dict[NodeType, Tensor | None] = {}
        self._offsets: dict[NodeType, Tensor] = {}
        if isinstance(graph, Graph):
            if clusters is None:
                raise ValueError("clusters must be given: gnnsys.sampling.cluster(graph, N) makes them")
            self._bounds, self._num_inputs = clusters.bounds, clusters.num_clusters
            for node_type in graph.node_types:
                of = clusters.cluster.get(node_type)
                if of is None or of.shape != (graph.num_nodes(node_type),):
                    raise ValueError(f"clusters must have one for each of {graph.num_nodes(node_type)} {node_type!r}")
                self._nodes[node_type] = torch.argsort(of, stable=True)
                counts = torch.bincount(of, minlength=self._num_inputs)
                self._offsets[node_type] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        else:
            book = graph.parts.clusters
            if clusters is not None:
                raise ValueError("clusters of parts are those that they were cut into: leave clusters away")
            if book is None:
                raise ValueError(
                    f"{graph.parts.path} has no clusters: make the parts again with gnnsys partition ... --clusters N"
                )
            self._bounds, self._num_inputs = book.bounds, book.num_clusters
            self._nodes = dict.fromkeys(graph.node_types)
            self._offsets = dict(book.node_offsets)
        told = hashlib.sha256()
        for rows in (*self._offsets.values(), *(nodes for nodes in self._nodes.values() if nodes is not None)):
            told.update(as_bytes(rows.contiguous()).numpy().data)
        self._digest = told.hexdigest()[:16]

    @property
    def num_inputs(self) -> int:
        return self._num_inputs

    def inputs_by_subpart(self) -> list[int]:
        return self._bounds.diff().tolist()

    def options(self) -> dict[str, Any]:
        return {"num_clusters": self._num_inputs, "clusters": self._digest}

    def sample(self, inputs: Tensor, *, key: SampleKey) -> Sample:
        inputs = check_inputs(inputs, self._num_inputs)
        node = {t: to_device(self._of(t, inputs), self.device) for t in self.graph.node_types}
        row, col, edge = induced_edges(self.graph, node, self.graph.edge_types)
        return Sample(node, row, col, edge, {}, {})

    def _of(self, node_type: NodeType, inputs: Tensor) -> Tensor:
        """The nodes of these clusters, cluster by cluster."""
        offsets, nodes = self._offsets[node_type], self._nodes[node_type]
        if nodes is not None:
            return in_subgraph(CSC(offsets, nodes, nodes.numel()), inputs).indices
        first, end = offsets[inputs], offsets[inputs + 1]
        sizes = end - first
        before = sizes.cumsum(0) - sizes
        return torch.arange(int(sizes.sum()), device="cpu") + torch.repeat_interleave(first - before, sizes)
