"""How long a training step takes on a batch: timed on some batches, fitted to their sizes, or from a machine's costs.

A step is forward, loss, backward and Adam, of GraphSAGE and its like, as the model shape says. Short timings are of one
thread, so that they are core-seconds; a GPU's are what its operators cost by the profile of execution planning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader import Batch
from gnnsys.nn import GAT, GCN, GIN, RGCN, GraphSAGE, HeteroGAT, HeteroSAGE
from gnnsys.planning import KINDS, BatchSizes, MachineProfile, ModelShape, step_seconds

_MODELS: dict[str, Any] = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT, "gin": GIN}
_TYPED_MODELS: dict[str, Any] = {"sage": HeteroSAGE, "gat": HeteroGAT, "rgcn": RGCN}
_TURNS = 2  # of a step on one batch: the quicker one counts


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """`kind`: one of `KINDS`; `features` and `classes` are those of the graph."""

    kind: str = "sage"
    hidden: int = 256
    num_layers: int = 3
    features: int
    classes: int

    def __post_init__(self) -> None:
        if self.kind not in _MODELS:
            raise ValueError(f"a model is one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.hidden < 1 or self.classes < 1 or self.features < 1:
            raise ValueError(f"hidden, features and classes must be at least 1, got {self}")

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.kind, (self.features, *[self.hidden] * (self.num_layers - 1), self.classes))

    def make(self) -> torch.nn.Module:
        made: torch.nn.Module = _MODELS[self.kind](self.features, self.hidden, self.num_layers, self.classes)
        return made

    def seeds_of(self, module: torch.nn.Module, batch: Batch) -> Tensor:
        """[seeds, classes]: what the model says of a batch's seeds."""
        out = module(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        found: Tensor = out[: batch.batch_size]
        return found

    @property
    def gradient_bytes(self) -> int:
        """Of all parameters, as they are summed over trainers."""
        return sum(4 * parameter.numel() for parameter in self.make().parameters())


@dataclass(frozen=True, kw_only=True)
class TypedStepModel:
    """The same of a graph with several types: `features` by node type, edge types, and the type that is trained on."""

    kind: str = "sage"
    hidden: int = 256
    num_layers: int = 3
    features: Mapping[NodeType, int]
    edge_types: tuple[EdgeType, ...]
    target: NodeType
    classes: int

    def __post_init__(self) -> None:
        if self.kind not in _TYPED_MODELS:
            raise ValueError(f"a model of typed parts is one of {', '.join(_TYPED_MODELS)}, got {self.kind!r}")
        if self.hidden < 1 or self.classes < 1:
            raise ValueError(f"hidden and classes must be at least 1, got {self.hidden} and {self.classes}")

    def make(self) -> torch.nn.Module:
        metadata = (list(self.features), list(self.edge_types))
        made: torch.nn.Module = _TYPED_MODELS[self.kind](
            dict(self.features), self.hidden, self.num_layers, self.classes, metadata=metadata, targets=[self.target]
        )
        return made

    def seeds_of(self, module: torch.nn.Module, batch: Batch) -> Tensor:
        """[seeds, classes]: what the model says of a batch's seeds."""
        x_dict = {node_type: nodes["x"] for node_type, nodes in batch.nodes.items()}
        out = module(x_dict, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)
        found: Tensor = out[self.target][: batch[self.target].batch_size]
        return found

    @property
    def gradient_bytes(self) -> int:
        return sum(4 * parameter.numel() for parameter in self.make().parameters())


class StepTimes:
    """Seconds of a step on batches. The first `num_timed` are timed; those of others follow from their nodes and edges,
    by least squares over what was timed. With `machine`, all follow from its costs."""

    def __init__(
        self, model: StepModel | TypedStepModel, *, machine: MachineProfile | None = None, num_timed: int = 6
    ) -> None:
        if machine is not None and isinstance(model, TypedStepModel):
            raise ValueError(
                "steps of typed parts are timed on a core of this machine, costs of a GPU are those of one type: leave "
                "--machine and --device away, or profile a run by --trace FILE"
            )
        self.model, self._machine, self._num_timed = model, machine, num_timed
        self._module: torch.nn.Module | None = None
        self._sizes: list[list[float]] = []
        self._timed: list[float] = []

    @property
    def computes_on(self) -> str:
        return "cpu" if self._machine is None else self._machine.machine.gpu or "gpu"

    def seconds(self, batch: Batch) -> float:
        if self._machine is not None and isinstance(self.model, StepModel):
            sizes = BatchSizes.of_hops(list(batch.num_sampled_nodes), list(batch.num_sampled_edges))
            return step_seconds(self._machine, self.model.shape, sizes)
        size = _num_nodes_and_edges(batch)
        if len(self._timed) < self._num_timed:
            self._sizes.append(size)
            self._timed.append(self._time(batch))
            return self._timed[-1]
        return self._fitted(size)

    def _fitted(self, size: list[float]) -> float:
        """In proportion to nodes and edges. A plain ratio where batches that were timed are too alike for a fit."""
        sizes, timed = np.array(self._sizes), np.array(self._timed)
        ratio = timed.sum() / max(1.0, sizes[:, 1].sum() + sizes[:, 0].sum())
        return float(ratio * (size[0] + size[1]))

    def _time(self, batch: Batch) -> float:
        if self._module is None:
            self._module = self.model.make()
            self._optimizer = torch.optim.Adam(self._module.parameters())
            self._step(batch)  # the first one makes buffers
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            taken = []
            for _ in range(_TURNS):
                began = time.thread_time()
                self._step(batch)
                taken.append(time.thread_time() - began)
        finally:
            torch.set_num_threads(threads)
        return min(taken)

    def _step(self, batch: Batch) -> None:
        assert self._module is not None
        out = self.model.seeds_of(self._module, batch)
        loss = F.cross_entropy(out, torch.zeros(len(out), dtype=torch.int64, device="cpu"))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def _num_nodes_and_edges(batch: Batch) -> list[float]:
    nodes = sum(of.n_id.numel() for of in batch.nodes.values())
    edges = sum(of.edge_index.shape[1] for of in batch.edges.values())
    return [float(nodes), float(edges), 1.0]
