"""Plain sampling on a device in one native call per batch.

What `NeighborSampler` does hop by hop takes some seventy small calls, and a loading thread that makes them from Python
and a training thread take the interpreter from each other. Where a graph has one type of nodes and edges, and they are
drawn uniformly or by LABOR-0, the native core walks all hops by itself, and the sample is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import CSC, DeviceReads, JoinedParts, sample_hops
from gnnsys.sampling.sample import Sample


class PlainHops:
    """Samples of one edge type on `device`, from structure that is there or in host memory that it reads.

    `original` are the original ids of all nodes, where they were relabelled.
    """

    def __init__(
        self,
        csc: CSC | JoinedParts,
        edge_type: EdgeType,
        fanouts: Sequence[int],
        *,
        replace: bool,
        labor: bool,
        device: torch.device,
        original: Tensor | None = None,
    ) -> None:
        self._csc, self._original = csc, original
        self._read = [csc.indptr, original]
        self._read += [csc.indices, csc.edge_ids] if isinstance(csc, CSC) else csc.halo
        self._node_type, self._edge_type = edge_type[0], edge_type
        self._fanouts = list(fanouts)
        self._replace, self._labor = replace, labor
        self._on = torch.empty(0, device=device)
        self._reads = DeviceReads()

    def sample(self, seeds: Mapping[NodeType, Tensor], keys: Sequence[int]) -> Sample:
        """As `NeighborSampler.sample`, with a key per hop. Seeds that are on the device are read back first."""
        num_hops = len(self._fanouts)
        self._reads(self._on.device, *self._read)
        nodes, edge_index, edge_ids, counts, weight = sample_hops(
            self._csc, self._seeds(seeds), self._fanouts, keys=keys, replace=self._replace, labor=self._labor,
            on=self._on, original=self._original,
        )  # fmt: skip
        row, col = edge_index.unbind()
        node_type, edge_type = self._node_type, self._edge_type
        return Sample(
            {node_type: nodes},
            {edge_type: row},
            {edge_type: col},
            {edge_type: edge_ids},
            {node_type: counts[: num_hops + 1]},
            {edge_type: counts[num_hops + 1 :]},
            by_destination=True,
            edge_weight=None if weight is None else {edge_type: weight},
        )

    def _seeds(self, seeds: Mapping[NodeType, Tensor]) -> Tensor:
        ids = seeds.get(self._node_type)
        if ids is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if ids.dtype != torch.int64 or not ids.is_cpu:
            ids = ids.to("cpu", torch.int64)
        return ids if ids.is_contiguous() else ids.contiguous()
