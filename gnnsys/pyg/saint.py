"""PyG's GraphSAINT samplers, without torch-sparse: subgraphs by our draws, `node_norm` and `edge_norm` by our counts.

PyG's adjacency has sources as rows: walks follow edges from source to destination, and nodes are drawn by out-degree.
Our samplers go along in-edges, so they are given the graph with its edges flipped.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import checksum, knows_words
from gnnsys.ops import CSC, induced_coo
from gnnsys.pyg.arguments import INSTEAD, TORCH_WORDS
from gnnsys.pyg.subgraph_loader import InducedLoader, check_data, edges_of
from gnnsys.sampling import SaintEdgeSampler, SaintNodeSampler, SaintSampler, SaintWalkSampler, SampleKey

_ON_PARTS = "gnnsys.SubgraphLoader(graph, gnnsys.sampling.SaintWalkSampler(graph, ...))"
_MOST = 1e4  # PyG's bound of edge_norm
_UNSEEN = 0.1  # PyG's norm of an edge, and count of a node, that was never drawn


class _GraphSAINT(InducedLoader):
    """What the three have in common."""

    _kind: ClassVar[Callable[..., SaintSampler]]

    @knows_words(TORCH_WORDS, instead=INSTEAD)
    def __init__(
        self,
        data: Any,
        batch_size: int,
        num_steps: int = 1,
        sample_coverage: int = 0,
        save_dir: str | None = None,
        log: bool = True,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        check_data(data, name, _ON_PARTS)
        if "node_norm" in data or "edge_norm" in data:
            raise ValueError(f"data has a node_norm or edge_norm, which {name} gives: rename yours")
        if num_steps < 1 or sample_coverage < 0:
            raise ValueError(f"num_steps must be >= 1 and sample_coverage >= 0, got {num_steps} and {sample_coverage}")
        self.num_steps = num_steps
        self._batch_size = batch_size
        self.sample_coverage = sample_coverage
        self.save_dir = save_dir
        self.log = log  # PyG's argument: nothing is printed
        self.N, self.E = int(data.num_nodes), int(data.num_edges)
        self._csc = _by_source(edges_of(data), self.N)
        graph = Graph({NODE: self.N}, {EDGE: self._csc})
        options = {"num_subgraphs": num_steps, "coverage": sample_coverage, "ascending": True, **self._walks()}
        self._saint = type(self)._kind(graph, batch_size, **options)
        self._open(data, torch.arange(num_steps, device="cpu"), seed, {"batch_size": 1, **kwargs})
        if sample_coverage:
            self.node_norm, self.edge_norm = self._norms(data)

    def _walks(self) -> dict[str, Any]:
        """What the sampler is told besides its size."""
        return {}

    def make_batch(self, index: Tensor, key: SampleKey) -> Data:
        if index.numel() != 1:
            raise ValueError(f"a batch is one subgraph, got {index.numel()} numbers: batch_size says how large it is")
        node = self._saint.nodes(int(index), key=key)
        col, row, edge = induced_coo(self._csc, node, node)
        batch = self._joined(node, row, col, edge)
        batch.num_nodes = node.numel()
        if self.sample_coverage:
            batch.node_norm, batch.edge_norm = self.node_norm[node], self.edge_norm[edge]
        return batch

    # -- norms ---------------------------------------------------------------------------------------------------------

    @property
    def _filename(self) -> str:
        """Not PyG's: its edges are normed by their sources."""
        told = "_".join(str(value) for value in self._sampling().values())
        return f"gnnsys_{type(self).__name__.lower()}_{told}.pt"

    def _norms(self, data: Data) -> tuple[Tensor, Tensor]:
        path = None if self.save_dir is None else Path(self.save_dir, self._filename)
        if path is not None and path.exists():
            return self._load(path, data)
        number, nodes, edges = self._saint.counts()
        of_node, of_edge = nodes.float(), edges.float()
        edge_norm = (of_node[edges_of(data)[1]] / of_edge).clamp_(0, _MOST).nan_to_num_(nan=_UNSEEN)
        of_node[of_node == 0] = _UNSEEN
        norms = number / of_node / self.N, edge_norm
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save((*norms, checksum(edges_of(data))), path)
        return norms

    def _load(self, path: Path, data: Data) -> tuple[Tensor, Tensor]:
        try:
            node_norm, edge_norm, edges = torch.load(path, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
            raise ValueError(f"{path} does not hold norms that can be read: remove it") from error
        sizes = list(node_norm.shape), list(edge_norm.shape)
        if sizes != ([self.N], [self.E]) or edges != checksum(edges_of(data)):
            raise ValueError(f"{path} holds norms of another graph: remove it, or give another save_dir")
        return node_norm, edge_norm

    def _sampling(self) -> dict[str, Any]:
        return {"size": self._batch_size, "sample_coverage": self.sample_coverage}


class GraphSAINTNodeSampler(_GraphSAINT, torch_geometric.loader.GraphSAINTNodeSampler):
    """`torch_geometric.loader.GraphSAINTNodeSampler`: `batch_size` draws of nodes, in proportion to out-degrees.

    We deviate from PyG in `edge_norm`: C(v) / C(u, v) of an edge u -> v, by its destination, where messages are summed
    (GraphSAINT, section 3.2). PyG divides by the source's count. `seed` fixes what is drawn; by default torch's
    generator does.
    """

    _kind = SaintNodeSampler


class GraphSAINTEdgeSampler(_GraphSAINT, torch_geometric.loader.GraphSAINTEdgeSampler):
    """`torch_geometric.loader.GraphSAINTEdgeSampler`: both ends of `batch_size` draws of edges.

    We deviate from PyG: an edge is an out-edge of a uniform node, which in graphs with both directions of every edge
    draws {u, v} in proportion to 1/degree(u) + 1/degree(v), as the paper says. PyG draws in proportion to the sum of
    the degrees. `edge_norm` and `seed` as in `GraphSAINTNodeSampler`.
    """

    _kind = SaintEdgeSampler


class GraphSAINTRandomWalkSampler(_GraphSAINT, torch_geometric.loader.GraphSAINTRandomWalkSampler):
    """`torch_geometric.loader.GraphSAINTRandomWalkSampler`: the nodes of `batch_size` walks of `walk_length` steps.

    `edge_norm` and `seed` as in `GraphSAINTNodeSampler`.
    """

    _kind = SaintWalkSampler

    @knows_words(TORCH_WORDS, instead=INSTEAD)
    def __init__(
        self,
        data: Any,
        batch_size: int,
        walk_length: int,
        num_steps: int = 1,
        sample_coverage: int = 0,
        save_dir: str | None = None,
        log: bool = True,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.walk_length = walk_length
        super().__init__(data, batch_size, num_steps, sample_coverage, save_dir, log, seed=seed, **kwargs)

    def _walks(self) -> dict[str, Any]:
        return {"length": self.walk_length}

    def _sampling(self) -> dict[str, Any]:
        return {**super()._sampling(), "walk_length": self.walk_length}


def _by_source(edge_index: Tensor, num_nodes: int) -> CSC:
    """Out-edges by source, sorted by destination, as rows of PyG's adjacency are: columns of the flipped graph."""
    by_dst = CSC.from_edge_index(edge_index, num_nodes)
    flipped = CSC.from_edge_index(torch.stack([by_dst.dst(), by_dst.indices.long()]), num_nodes, narrow=True)
    order, again = by_dst.edge_ids, flipped.edge_ids
    edge_ids = again if order is None else order if again is None else order[again.long()]
    return CSC(flipped.indptr, flipped.indices, num_nodes, edge_ids)
