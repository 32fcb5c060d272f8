"""Plain sampling on a device in one native call per batch.

What `NeighborSampler` does hop by hop takes some seventy small calls per edge type, and a loading thread that makes
them from Python and a training thread take the interpreter from each other. Where edges are drawn uniformly or by
LABOR-0, the native core walks all hops of all edge types by itself, and the sample is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import CSC, DeviceReads, HopRelation, HopStructure, JoinedParts, sample_hops
from gnnsys.sampling.sample import Sample


class PlainHops:
    """Samples on `device`, from structure that is there or in host memory that it reads.

    `fanouts` has an entry per edge type and hop, hops side by side. `original` are the original ids of all nodes, an
    entry per node type, where they were relabelled.
    """

    def __init__(
        self,
        structures: Mapping[EdgeType, CSC | JoinedParts],
        num_nodes: Mapping[NodeType, int],
        fanouts: Sequence[int],
        *,
        replace: bool,
        labor: bool,
        device: torch.device,
        original: Sequence[Tensor] = (),
    ) -> None:
        self._node_types, self._edge_types = list(num_nodes), list(structures)
        number = {t: i for i, t in enumerate(self._node_types)}
        relations = [HopRelation(each, number[src], number[dst]) for (src, _, dst), each in structures.items()]
        self._structure = HopStructure(relations, list(num_nodes.values()), original)
        self._fanouts = list(fanouts)
        self._replace, self._labor = replace, labor
        self._on = torch.empty(0, device=device)
        self._no_seeds = torch.empty(0, dtype=torch.int64, device="cpu")
        self._reads = DeviceReads()

    def sample(self, seeds: Mapping[NodeType, Tensor], keys: Sequence[int]) -> Sample:
        """As `NeighborSampler.sample`, with keys as fanouts. Seeds that are on the device are read back first."""
        self._reads(self._on.device, *self._structure.tensors)
        found = sample_hops(
            self._structure, [self._seeds(seeds.get(t)) for t in self._node_types], self._fanouts,
            keys=keys, replace=self._replace, labor=self._labor, on=self._on,
        )  # fmt: skip
        ends = {t: each.unbind() for t, each in zip(self._edge_types, found.edge_index, strict=True)}
        return Sample(
            dict(zip(self._node_types, found.nodes, strict=True)),
            {t: row for t, (row, _) in ends.items()},
            {t: col for t, (_, col) in ends.items()},
            dict(zip(self._edge_types, found.edge_ids, strict=True)),
            dict(zip(self._node_types, found.num_nodes, strict=True)),
            dict(zip(self._edge_types, found.num_edges, strict=True)),
            by_destination=True,
            edge_weight=None if found.weight is None else dict(zip(self._edge_types, found.weight, strict=True)),
        )

    def _seeds(self, ids: Tensor | None) -> Tensor:
        if ids is None:
            return self._no_seeds
        if ids.dtype != torch.int64 or not ids.is_cpu:
            ids = ids.to("cpu", torch.int64)
        return ids if ids.is_contiguous() else ids.contiguous()
