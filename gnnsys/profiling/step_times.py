"""How long a training step takes on a batch: timed on some batches, fitted to their sizes, or from a machine's costs.

A step is forward, loss, backward and Adam, of GraphSAGE and its like, as the model shape says. Short timings are of one
thread, so that they are core-seconds; a GPU's are what its operators cost by the profile of execution planning.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gnnsys.loader import Batch
from gnnsys.nn import GAT, GCN, GIN, GraphSAGE
from gnnsys.planning import KINDS, BatchSizes, MachineProfile, ModelShape, step_seconds

_MODELS: dict[str, Any] = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT, "gin": GIN}
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

    @property
    def gradient_bytes(self) -> int:
        """Of all parameters, as they are summed over trainers."""
        return sum(4 * parameter.numel() for parameter in self.make().parameters())


class StepTimes:
    """Seconds of a step on batches. The first `num_timed` are timed; those of others follow from their nodes and edges,
    by least squares over what was timed. With `machine`, all follow from its costs."""

    def __init__(self, model: StepModel, *, machine: MachineProfile | None = None, num_timed: int = 6) -> None:
        self.model, self._machine, self._num_timed = model, machine, num_timed
        self._module: torch.nn.Module | None = None
        self._sizes: list[list[float]] = []
        self._timed: list[float] = []

    @property
    def computes_on(self) -> str:
        return "cpu" if self._machine is None else self._machine.machine.gpu or "gpu"

    def seconds(self, batch: Batch) -> float:
        if self._machine is not None:
            sizes = BatchSizes.of_hops(list(batch.num_sampled_nodes), list(batch.num_sampled_edges))
            return step_seconds(self._machine, self.model.shape, sizes)
        size = [float(sum(batch.num_sampled_nodes)), float(sum(batch.num_sampled_edges)), 1.0]
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
        out = self._module(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        labels = torch.zeros(batch.batch_size, dtype=torch.int64, device="cpu")
        loss = F.cross_entropy(out[: batch.batch_size], labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
