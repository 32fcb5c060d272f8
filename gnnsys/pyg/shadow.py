"""PyG's ShaDowKHopSampler, without torch-sparse: a subgraph around each root, cut off from the others."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Batch

from gnnsys.graph import EDGE, NODE, Graph, chosen_ids
from gnnsys.loader import knows_words
from gnnsys.ops import CSC, induced_coo
from gnnsys.pyg.arguments import INSTEAD, TORCH_WORDS, check_seeds, flat_ids
from gnnsys.pyg.subgraph_loader import InducedLoader, check_data, edges_of
from gnnsys.sampling import NeighborSampler as Sampler
from gnnsys.sampling import SampleKey

_ON_PARTS = "gnnsys.NeighborLoader(graph, sampler=gnnsys.sampling.ShadowSampler(graph, [10, 5]))"
_OF_BATCH = ("batch", "ptr", "num_nodes")  # names that a batch has for itself


class ShaDowKHopSampler(InducedLoader, torch_geometric.loader.ShaDowKHopSampler):
    """`torch_geometric.loader.ShaDowKHopSampler`; its documentation holds. Workers are threads.

    Subgraph i has the nodes `ptr[i]` to `ptr[i + 1]`. We deviate from PyG in their order: the root comes first,
    `root_n_id[i] == ptr[i]`, where PyG sorts them by id. As in PyG, `y` has the labels of roots alone. `seed` fixes
    what is drawn; by default torch's generator does.
    """

    @knows_words(TORCH_WORDS, instead=INSTEAD)
    def __init__(
        self,
        data: Any,
        depth: int,
        num_neighbors: int,
        node_idx: Tensor | None = None,
        replace: bool = False,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_data(data, "ShaDowKHopSampler", _ON_PARTS)
        if depth < 1 or num_neighbors < -1:
            raise ValueError(f"depth must be >= 1 and num_neighbors >= -1 (all), got {depth} and {num_neighbors}")
        self.depth = depth
        self.num_neighbors = num_neighbors
        self.replace = replace
        self.is_sparse_tensor = False
        num_nodes = int(data.num_nodes)
        if node_idx is None:
            self.node_idx = torch.arange(num_nodes, device="cpu")
        else:
            self.node_idx = chosen_ids(flat_ids(node_idx, "node_idx"), num_nodes, "node_idx").long().cpu()
        check_seeds("node_idx", self.node_idx, num_nodes)
        self._csc = CSC.from_edge_index(edges_of(data), num_nodes, narrow=True)
        graph = Graph({NODE: num_nodes}, {EDGE: self._csc})
        self._nodes = Sampler(graph, [num_neighbors] * depth, disjoint=True, replace=replace)
        self._open(data, self.node_idx, seed, kwargs)

    def make_batch(self, index: Tensor, key: SampleKey) -> Batch:
        found = self._nodes.sample({NODE: self.node_idx[index]}, key=key)
        assert found.tree is not None
        tree, order = found.tree[NODE].sort(stable=True)  # roots come first in a sample, so each leads its tree
        node = found.node[NODE][order]
        row, col, edge = induced_coo(self._csc, node, node, dst_tree=tree, src_tree=tree)
        joined = self._joined(node, row, col, edge)
        ptr = torch.zeros(index.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(torch.bincount(tree, minlength=index.numel()), 0, out=ptr[1:])
        batch = Batch(batch=tree, ptr=ptr)
        batch.root_n_id = ptr[:-1].clone()
        for name, value in joined:
            if name not in _OF_BATCH:
                of_roots = name == "y" and self.data.is_node_attr(name)
                batch[name] = value[batch.root_n_id] if of_roots else value
        return batch

    def _sampling(self) -> dict[str, Any]:
        return {"depth": self.depth, "num_neighbors": self.num_neighbors, "replace": self.replace}
