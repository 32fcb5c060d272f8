"""PyG's ClusterData and ClusterLoader: clusters by METIS without pyg-lib or torch-sparse, batches by our kernel."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Literal

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.cluster import Partition

from gnnsys.graph import NODE, Graph
from gnnsys.loader import check_seed, knows_words
from gnnsys.ops import CSC, induced_coo
from gnnsys.pyg.arguments import INSTEAD, TORCH_WORDS
from gnnsys.pyg.snapshot import Snapshot
from gnnsys.pyg.subgraph_loader import InducedLoader, check_data
from gnnsys.sampling import SampleKey, cluster

_ON_PARTS = "gnnsys.SubgraphLoader(graph, gnnsys.sampling.ClusterSampler(graph))"


class ClusterData(torch_geometric.loader.ClusterData):
    """`torch_geometric.loader.ClusterData`; its documentation holds. `seed` is METIS's.

    Directed edges count in both directions for METIS. A file in `save_dir` is read as numbers alone, never as code. As
    in PyG, `.data` is a copy of the data in the order of clusters: `ClusterLoader` refuses it if the data has changed.
    """

    @knows_words()
    def __init__(
        self,
        data: Any,
        num_parts: int,
        recursive: bool = False,
        save_dir: str | None = None,
        filename: str | None = None,
        log: bool = True,
        keep_inter_cluster_edges: bool = False,
        sparse_format: Literal["csr", "csc"] = "csr",
        *,
        seed: int = 0,
    ) -> None:
        check_data(data, "ClusterData", _ON_PARTS)
        if sparse_format not in ("csr", "csc"):
            raise ValueError(f"sparse_format must be 'csr' or 'csc', got {sparse_format!r}")
        if not 1 <= num_parts <= max(1, data.num_nodes):
            raise ValueError(f"num_parts must be in [1, {data.num_nodes}], the number of nodes, got {num_parts}")
        self.num_parts = num_parts
        self.recursive = recursive
        self.keep_inter_cluster_edges = keep_inter_cluster_edges
        self.sparse_format = sparse_format
        self.seed = check_seed(seed)
        path = None
        if save_dir is not None:
            folder = f"part_{num_parts}{'_recursive' if recursive else ''}"
            path = Path(save_dir, folder, filename or "metis.pt")
        if path is not None and path.exists():
            self.partition = self._load(path, data)
        else:
            edge_index = data.edge_index.as_subclass(Tensor)
            self.partition = self._partition(edge_index, self._metis(edge_index, data.num_nodes))
            if path is not None:
                os.makedirs(path.parent, exist_ok=True)
                torch.save(self.partition, path)
        self.data = self._permute_data(data, self.partition)
        self._copied = Snapshot(data)

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        graph = Graph.from_edge_index(edge_index.cpu(), num_nodes)
        found = cluster(graph, self.num_parts, seed=self.seed, recursive=self.recursive)
        return found.cluster[NODE].long().to(edge_index.device)

    def _load(self, path: Path, data: Data) -> Partition:
        """ValueError for a file that is no partition, or that of another graph."""
        try:
            with torch.serialization.safe_globals([Partition]):
                found = torch.load(path, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{path} is not a partition that can be read: remove it") from error
        if not isinstance(found, Partition):
            raise ValueError(f"{path} is not a partition: remove it, or give another filename")
        sizes = found.partptr.numel() - 1, found.node_perm.numel(), found.edge_perm.numel()
        if (*sizes, found.sparse_format) != (self.num_parts, data.num_nodes, data.num_edges, self.sparse_format):
            raise ValueError(
                f"{path} has {sizes[0]} clusters of {sizes[1]} nodes and {sizes[2]} edges as {found.sparse_format}, "
                f"the data {data.num_nodes} and {data.num_edges}: remove it, or give another save_dir"
            )
        if not _has_edges(found, data.edge_index.as_subclass(Tensor)):
            raise ValueError(f"{path} has clusters of other edges: remove it, or give another save_dir")
        return found


def _has_edges(partition: Partition, edge_index: Tensor) -> bool:
    """Whether a partition has these edges, in their order."""
    ends = partition.node_perm[torch.repeat_interleave(partition.indptr.diff())], partition.node_perm[partition.index]
    row, col = ends if partition.sparse_format == "csr" else ends[::-1]
    return torch.equal(torch.stack([row, col]), edge_index.to(row.device, torch.int64)[:, partition.edge_perm])


class ClusterLoader(InducedLoader, torch_geometric.loader.ClusterLoader):
    """`torch_geometric.loader.ClusterLoader`: the same batches, edge by edge; workers are threads.

    `cluster_data` may be ours or PyG's. `seed` changes nothing, as nothing is drawn but the order of clusters.
    """

    @knows_words(TORCH_WORDS, instead=INSTEAD)
    def __init__(self, cluster_data: torch_geometric.loader.ClusterData, **kwargs: Any) -> None:
        if not isinstance(cluster_data, torch_geometric.loader.ClusterData):
            raise ValueError(
                f"cluster_data must be a ClusterData, got {type(cluster_data).__name__}: make it of your data"
            )
        changed = cluster_data._copied.changed() if isinstance(cluster_data, ClusterData) else None
        if changed is not None:
            raise ValueError(
                f"{changed} has changed since the ClusterData was made, which has a copy of it: make a new ClusterData"
                " (a save_dir keeps its clusters), or change cluster_data.data"
            )
        self.cluster_data = cluster_data
        part = cluster_data.partition
        self._partptr = part.partptr.cpu()
        # Rows of the permuted adjacency are columns to the kernel; in 'csr' they are sources.
        self._csc = CSC(part.indptr.cpu(), part.index.cpu().contiguous(), part.node_perm.numel())
        self._open(cluster_data.data, self._partptr[1:], None, kwargs)

    def make_batch(self, index: Tensor, key: SampleKey) -> Data:
        first, end = self._partptr[index], self._partptr[index + 1]
        sizes = end - first
        before = sizes.cumsum(0) - sizes
        node = torch.arange(int(sizes.sum()), device="cpu") + torch.repeat_interleave(first - before, sizes)
        col, row, edge = induced_coo(self._csc, node, node)
        if self.cluster_data.partition.sparse_format == "csc":
            row, col = col, row
        batch = self._joined(node, row, col, edge)
        where = self.cluster_data.partition.index.device
        batch.edge_index = torch.stack([row, col]).to(where)
        return batch

    def _sampling(self) -> dict[str, Any]:
        return {"num_parts": self.cluster_data.num_parts, "sparse_format": self.cluster_data.partition.sparse_format}
