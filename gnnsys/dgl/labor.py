"""DGL's LaborSampler on our kernels."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gnnsys.dgl.feature_names import Names
from gnnsys.dgl.parts import PartsStructure
from gnnsys.dgl.sampler import NeighborSampler
from gnnsys.dgl.structure import DglStructure
from gnnsys.graph import NodeType
from gnnsys.loader import knows_words
from gnnsys.sampling import Block, SampleKey
from gnnsys.sampling import LaborSampler as Labor


class LaborSampler(NeighborSampler):
    """`dgl.dataloading.LaborSampler`, argument by argument; `fanouts[i]` is the expected number of neighbours.

    With `importance_sampling=i` (LABOR-i, a DGL graph alone) blocks have `edata["edge_weights"]`, whose mean is
    one at every node, as that of DGL's is. Without it all in-edges of a node weigh the same.
    """

    @knows_words()
    def __init__(
        self,
        fanouts: Sequence[int | Mapping[Any, int]],
        edge_dir: str = "in",
        prob: str | None = None,
        importance_sampling: int = 0,
        layer_dependency: bool = False,
        batch_dependency: int = 1,
        prefetch_node_feats: Names = None,
        prefetch_labels: Names = None,
        prefetch_edge_feats: Names = None,
        output_device: Any = None,
    ) -> None:
        if prob is not None:
            raise ValueError(f"prob={prob!r}: LABOR draws by degrees alone here, use NeighborSampler for probabilities")
        if batch_dependency != 1:
            raise ValueError(
                f"batch_dependency must be 1, batches that do not depend on others, got {batch_dependency}"
            )
        super().__init__(
            fanouts,
            edge_dir,
            prefetch_node_feats=prefetch_node_feats,
            prefetch_labels=prefetch_labels,
            prefetch_edge_feats=prefetch_edge_feats,
            output_device=output_device,
        )
        self.importance_sampling = importance_sampling
        self.layer_dependency = layer_dependency
        # Each with the options that it was made with, which a user may change
        self._labor: weakref.WeakKeyDictionary[Any, tuple[Any, Labor]] = weakref.WeakKeyDictionary()
        self._seed: int | None = None
        self._count = 0

    def set_seed(self, random_seed: int | None = None) -> None:
        """Fixes what the next calls of `sample` draw; None: torch's generator decides, as without it.

        In our DataLoader its `seed` decides, so that batches do not depend on threads and a run can be resumed.
        """
        self._seed, self._count = random_seed, 0

    def _fresh_key(self) -> SampleKey:
        if self._seed is None:
            return super()._fresh_key()
        self._count += 1
        return SampleKey(self._seed, 0, self._count - 1)

    def native(self, structure: DglStructure | PartsStructure) -> Labor:
        known, options = self._labor.get(structure), (self.importance_sampling, self.layer_dependency)
        if known is None or known[0] != options:
            known = self._labor[structure] = options, self._make(structure, structure.graph)
        return known[1]

    def drawn_by(self, structure: DglStructure | PartsStructure, graph: Any) -> dict[str, Any]:
        return {"sampler": self._make(structure, graph)}

    def _make(self, structure: DglStructure | PartsStructure, graph: Any) -> Labor:
        return Labor(
            graph,
            structure.num_neighbors,
            importance_sampling=self.importance_sampling,
            layer_dependency=self.layer_dependency,
            normalize=True,
            expand="frontier",
        )

    def to_dgl(
        self, structure: DglStructure | PartsStructure, blocks: list[Block], nodes: dict[NodeType, Tensor]
    ) -> list[Any]:
        made = super().to_dgl(structure, blocks, nodes)
        if self.importance_sampling:
            for block, ours in zip(made, blocks, strict=True):
                structure.weigh(block, ours)
        return made
