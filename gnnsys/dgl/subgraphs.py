"""DGL's samplers of subgraphs on our kernels: Cluster-GCN, GraphSAINT, shaDow.

Each is a `dgl.dataloading.Sampler`: DGL's own DataLoader takes it. With our DataLoader subgraphs are made ahead in
threads, and an epoch can be resumed. They sample DGL graphs; for parts there are the samplers of `gnnsys.sampling`.
"""

from __future__ import annotations

import pickle
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import dgl
import torch
from dgl.dataloading.base import set_edge_lazy_features, set_node_lazy_features
from torch import Tensor

from gnnsys.dgl.feature_names import Names, Prefetched
from gnnsys.dgl.sampler import check_fanouts, draw_key
from gnnsys.dgl.structure import DglStructure, LoadedArrays
from gnnsys.graph import EDGE, NODE, Graph, as_ids
from gnnsys.loader import Batch, NeighborLoader, SubgraphLoader, knows_words
from gnnsys.ops import CSC
from gnnsys.partition import Clustering
from gnnsys.sampling import (
    ClusterSampler,
    DistGraph,
    SaintEdgeSampler,
    SaintNodeSampler,
    SaintSampler,
    SaintWalkSampler,
    Sample,
    SampleKey,
    ShadowSampler,
    cluster,
)
from gnnsys.seeds import Share

SharedOut: TypeAlias = Callable[[Tensor], Tensor] | None  # a rank's share of ids, where there are several ranks


class InducedSampler(dgl.dataloading.Sampler):
    """What the three have in common: our view of a DGL graph, and DGL graphs of our samples."""

    on_parts: ClassVar[str]  # what to use on a graph in parts

    def __init__(self, output_device: Any) -> None:
        super().__init__()
        self.output_device = output_device
        self._structures: weakref.WeakKeyDictionary[Any, DglStructure] = weakref.WeakKeyDictionary()

    @property
    @abstractmethod
    def prefetched(self) -> Prefetched:
        """The features to prefetch."""

    def structure(self, g: Any, is_for_loader: bool = False) -> DglStructure:
        """Our view of a graph. Made again if its edges, their probabilities or the sampler's options changed."""
        if isinstance(g, DistGraph):
            raise ValueError(f"{type(self).__name__} samples DGL graphs: on parts use {self.on_parts}")
        self._structures[g] = self._view(g, self._structures.get(g), is_for_loader)
        return self._structures[g]

    def _view(self, g: Any, known: DglStructure | None, is_for_loader: bool) -> DglStructure:
        return DglStructure.of(g, [], False, None, None, known, is_for_loader)

    @abstractmethod
    def make_loader(
        self, structure: DglStructure, indices: Any, options: dict[str, Any], share: SharedOut
    ) -> tuple[NeighborLoader | SubgraphLoader, LoadedArrays]:
        """A loader whose batches are what `sample` returns, with features."""

    def _to_dgl(self, structure: DglStructure, sample: Sample) -> Any:
        """A subgraph whose features are read when a DataLoader of DGL's asks for them, or on access."""
        ends = {t: (sample.row[t], sample.col[t]) for t in sample.row}
        made = structure.to_subgraph(sample.node, ends, sample.edge)
        structure.attach(made)
        set_node_lazy_features(made, self.prefetched.node_feats)
        set_edge_lazy_features(made, self.prefetched.edge_feats)
        return made if self.output_device is None else made.to(self.output_device)


class _Filled:
    """The last stage of our loader: turns a batch into DGL's graph, with the features to prefetch."""

    def __init__(self, structure: DglStructure, arrays: LoadedArrays, flipped: bool = False) -> None:
        self._structure, self._arrays, self._flipped = structure, arrays, flipped

    def __call__(self, batch: Batch) -> Any:
        node = {t: store["n_id"] for t, store in batch.nodes.items()}
        ends, edge = {}, {}
        for t, store in batch.edges.items():
            src, dst = store["edge_index"]
            ends[t], edge[t] = (dst, src) if self._flipped else (src, dst), store["e_id"]
        made = self._structure.to_subgraph(node, ends, edge)
        self._structure.fill_subgraph(made, {t: dict(store) for t, store in batch.nodes.items()}, self._arrays)
        return made


class ClusterGCNSampler(InducedSampler):
    """`dgl.dataloading.ClusterGCNSampler`, argument by argument: the subgraph of some of `k` clusters.

    Clusters are kept in `cache_path` (None: nowhere), as numbers: a file that DGL wrote, a pickle, is not read.
    """

    on_parts = "gnnsys.SubgraphLoader(graph, gnnsys.sampling.ClusterSampler(graph))"

    @knows_words()
    def __init__(
        self,
        g: Any,
        k: int,
        cache_path: str | None = "cluster_gcn.pt",
        balance_ntypes: Any = None,
        balance_edges: bool = False,
        mode: str = "k-way",
        prefetch_ndata: list[str] | None = None,
        prefetch_edata: list[str] | None = None,
        output_device: Any = None,
    ) -> None:
        super().__init__(output_device)
        self.prefetch_ndata, self.prefetch_edata = prefetch_ndata or [], prefetch_edata or []
        if balance_ntypes is not None or balance_edges:
            raise ValueError("clusters are balanced by nodes alone: leave balance_ntypes and balance_edges away")
        if mode not in ("k-way", "recursive"):
            raise ValueError(f"mode must be 'k-way' or 'recursive', got {mode!r}")
        structure = self.structure(g)
        if not structure.is_plain:
            raise ValueError("ClusterGCNSampler is for graphs with one node and edge type: pass dgl.to_homogeneous(g)")
        if not 1 <= k <= g.num_nodes():
            raise ValueError(f"k must be in [1, {g.num_nodes()}], the number of nodes, got {k}")
        path = None if cache_path is None else Path(cache_path)
        if path is not None and path.exists():
            of = _load_clusters(path, k, g.num_nodes())
        else:
            of = cluster(structure.graph, k, recursive=mode == "recursive").cluster[NODE]
            if path is not None:
                torch.save({"cluster": of, "num_clusters": k}, path)
        self._clusters = Clustering({NODE: of}, torch.tensor([0, k], device="cpu"))
        self.partition_node_ids = torch.argsort(of, stable=True)
        sizes = torch.bincount(of, minlength=k)
        self.partition_offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        self._native: weakref.WeakKeyDictionary[Any, ClusterSampler] = weakref.WeakKeyDictionary()

    @property
    def prefetched(self) -> Prefetched:
        return Prefetched(self.prefetch_ndata, None, self.prefetch_edata)

    def sample(self, g: Any, partition_ids: Any) -> Any:
        """The subgraph of these clusters."""
        structure = self.structure(g)
        if structure not in self._native:
            self._native[structure] = ClusterSampler(structure.graph, self._clusters)
        sample = self._native[structure].sample(torch.as_tensor(partition_ids, device="cpu"), key=SampleKey())
        return self._to_dgl(structure, sample)

    def make_loader(
        self, structure: DglStructure, indices: Any, options: dict[str, Any], share: SharedOut
    ) -> tuple[NeighborLoader | SubgraphLoader, LoadedArrays]:
        graph, _, arrays = structure.to_load(self.prefetched)
        filled: Any = _Filled(structure, arrays)
        numbers = as_ids(indices, self._clusters.num_clusters, "indices", "cluster").long().cpu()
        numbers = numbers if share is None else share(numbers)
        sampler = ClusterSampler(graph, self._clusters)
        return SubgraphLoader(graph, sampler, inputs=numbers, transform=filled, **options), arrays


def _load_clusters(path: Path, k: int, num_nodes: int) -> Tensor:
    try:
        found = torch.load(path, weights_only=True)
        of, there = found["cluster"], int(found["num_clusters"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no clusters that can be read (files that DGL wrote are not): remove it, or give another "
            "cache_path"
        ) from error
    if there != k or of.shape != (num_nodes,):
        raise ValueError(
            f"{path} has {there} clusters of {of.numel()} nodes, not {k} of {num_nodes}: remove it, or give another "
            "cache_path"
        )
    return of


class SAINTSampler(InducedSampler):
    """`dgl.dataloading.SAINTSampler`, argument by argument. Nodes of a subgraph ascend, as DGL's do.

    `mode="edge"` takes out-edges of uniform nodes: where every edge has its reverse, {u, v} is drawn in proportion to
    1/degree(u) + 1/degree(v), as DGL draws it. A batch is one subgraph, whatever `batch_size` is. `cache` is DGL's:
    views of graphs are always kept, one for each graph.
    """

    on_parts = "gnnsys.SubgraphLoader(graph, gnnsys.sampling.SaintWalkSampler(graph, ...))"

    @knows_words()
    def __init__(
        self,
        mode: str,
        budget: int | tuple[int, int],
        cache: bool = True,
        prefetch_ndata: list[str] | None = None,
        prefetch_edata: list[str] | None = None,
        output_device: Any = "cpu",
    ) -> None:
        super().__init__(output_device)
        self.prefetch_ndata, self.prefetch_edata = prefetch_ndata or [], prefetch_edata or []
        self.mode, self.budget, self.cache = mode, budget, cache
        self._check_options()
        # Each with the options that it was made with, which a user may change
        self._native: weakref.WeakKeyDictionary[Any, tuple[str, SaintSampler]] = weakref.WeakKeyDictionary()

    @property
    def prefetched(self) -> Prefetched:
        return Prefetched(self.prefetch_ndata, None, self.prefetch_edata)

    def _check_options(self) -> None:
        if self.mode not in ("node", "edge", "walk"):
            raise ValueError(f"mode must be 'node', 'edge' or 'walk', got {self.mode!r}")
        if isinstance(self.budget, int) == (self.mode == "walk"):
            wanted = "(number of roots, length)" if self.mode == "walk" else "a number"
            raise ValueError(f"budget must be {wanted} for mode={self.mode!r}, got {self.budget!r}")

    def _make(self, graph: Graph, num_subgraphs: int) -> SaintSampler:
        self._check_options()
        options: dict[str, Any] = {"num_subgraphs": num_subgraphs, "coverage": 0, "ascending": True}
        if not isinstance(self.budget, int):
            return SaintWalkSampler(graph, *self.budget, **options)
        kind = SaintNodeSampler if self.mode == "node" else SaintEdgeSampler
        return kind(graph, self.budget, **options)

    def _view(self, g: Any, known: DglStructure | None, is_for_loader: bool) -> DglStructure:
        structure = super()._view(g, known, is_for_loader)
        if not structure.is_plain:
            raise ValueError("SAINTSampler is for graphs with one node and edge type: pass dgl.to_homogeneous(g)")
        return structure

    def sample(self, g: Any, indices: Any) -> Any:
        """A subgraph, by torch's generator; `indices` says nothing, as in DGL."""
        structure = self.structure(g)
        known, options = self._native.get(structure), repr((self.mode, self.budget))
        if known is None or known[0] != options:
            known = self._native[structure] = options, self._make(_flipped(structure.graph), 1)
        sample = known[1].sample(torch.zeros(1, dtype=torch.int64, device="cpu"), key=draw_key())
        return self._to_dgl(structure, replace(sample, row=sample.col, col=sample.row))

    def make_loader(
        self, structure: DglStructure, indices: Any, options: dict[str, Any], share: SharedOut
    ) -> tuple[NeighborLoader | SubgraphLoader, LoadedArrays]:
        graph, _, arrays = structure.to_load(self.prefetched)
        # Which of the indices does not matter; a subgraph has a number, and ranks must not have the same.
        positions = torch.arange(len(indices), device="cpu")
        mine = positions if share is None else share(positions)
        inputs = mine[:: options["batch_size"]]
        inputs = inputs[: mine.numel() // options["batch_size"]] if options["drop_last"] else inputs
        flipped = _flipped(graph)
        sampler = self._make(flipped, max(1, len(indices)))
        filled: Any = _Filled(structure, arrays, flipped=True)
        options = {**options, "batch_size": 1}
        return SubgraphLoader(flipped, sampler, inputs=inputs, transform=filled, **options), arrays


def _flipped(graph: Graph) -> Graph:
    """The graph with its edges turned round, edges by their ids: our walks go along in-edges, DGL's along out-edges."""
    edge_index = graph.edge_index().flip(0)
    csc = CSC.from_edge_index(edge_index, graph.num_nodes(), narrow=True)
    return Graph({NODE: graph.num_nodes()}, {EDGE: csc}, graph.node_data)


class ShaDowKHopSampler(InducedSampler):
    """`dgl.dataloading.ShaDowKHopSampler`, argument by argument: seeds and what `fanouts` find, with all edges among
    them. Seeds come first."""

    on_parts = "gnnsys.NeighborLoader(graph, sampler=gnnsys.sampling.ShadowSampler(graph, [10, 5]))"

    @knows_words()
    def __init__(
        self,
        fanouts: Sequence[int | Mapping[Any, int]],
        replace: bool = False,
        prob: str | None = None,
        prefetch_node_feats: Names = None,
        prefetch_edge_feats: Names = None,
        output_device: Any = None,
    ) -> None:
        super().__init__(output_device)
        self.prefetch_node_feats, self.prefetch_edge_feats = prefetch_node_feats, prefetch_edge_feats
        check_fanouts(fanouts)
        self.fanouts, self.replace, self.prob = list(fanouts), replace, prob
        self._native: weakref.WeakKeyDictionary[Any, ShadowSampler] = weakref.WeakKeyDictionary()

    @property
    def prefetched(self) -> Prefetched:
        return Prefetched(self.prefetch_node_feats, None, self.prefetch_edge_feats)

    def _view(self, g: Any, known: DglStructure | None, is_for_loader: bool) -> DglStructure:
        return DglStructure.of(g, self.fanouts, self.replace, self.prob, None, known, is_for_loader)

    def _make(self, structure: DglStructure, graph: Graph) -> ShadowSampler:
        options: dict[str, Any] = {"replace": self.replace, "weight": structure.weight}
        return ShadowSampler(graph, structure.num_neighbors, disjoint=False, expand="frontier", **options)

    def sample(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> tuple[Any, Any, Any]:
        """(input nodes, output nodes, subgraph)."""
        structure = self.structure(g)
        if structure not in self._native:
            self._native[structure] = self._make(structure, structure.graph)
        exclude = structure.positions(exclude_eids)
        sample = self._native[structure].sample(structure.by_type(seed_nodes), key=draw_key(), exclude=exclude)
        made = self._to_dgl(structure, sample)
        return made.ndata[dgl.NID], seed_nodes, made

    def make_loader(
        self, structure: DglStructure, indices: Any, options: dict[str, Any], share: SharedOut
    ) -> tuple[NeighborLoader | SubgraphLoader, LoadedArrays]:
        graph, _, arrays = structure.to_load(self.prefetched)
        chosen = structure.by_type(indices)
        if len(chosen) != 1:
            raise ValueError(f"indices must be of one node type, got {list(chosen)}: use one DataLoader for each")
        filled: Any = _Rooted(_Filled(structure, arrays))
        sampler = self._make(structure, graph)
        node_type, nodes = next(iter(chosen.items()))
        if isinstance(nodes, Share) and share is not None:
            raise ValueError("use_ddp shares indices out, and these are a rank's share already: leave use_ddp away")
        seeds = nodes if isinstance(nodes, Share) else (node_type, nodes if share is None else share(nodes))
        return NeighborLoader(graph, sampler=sampler, input_nodes=seeds, transform=filled, **options), arrays


class _Rooted:
    """The last stage of shaDow's loader: the ids of inputs and outputs beside the graph."""

    def __init__(self, filled: _Filled) -> None:
        self._filled = filled

    def __call__(self, batch: Batch) -> tuple[Any, Any, Any]:
        made = self._filled(batch)
        input_nodes = made.ndata[dgl.NID]
        of_seeds = input_nodes[batch.input_type] if isinstance(input_nodes, Mapping) else input_nodes
        output_nodes = of_seeds[: batch.batch_size]
        if isinstance(input_nodes, Mapping):
            output_nodes = {batch.input_type: output_nodes}
        return input_nodes, output_nodes, made
