"""Gradients of parameters: what bins say of them, and its sums over the ranks, begun layer by layer.

What bins say is added in the bins' order, whatever order they ran in, so sums are the same on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm.peers import Peers
from gnnsys.fullgraph.steps import Step

_ALL = -1  # the bin under which sums are kept of bins that run in a fixed order


class ParameterGrads:
    """Those of all steps of one pass; every rank begins the sums of its steps in the same order."""

    def __init__(self, steps: Sequence[Step], peers: Peers) -> None:
        self._steps, self._peers = steps, peers
        self._by_bin: list[dict[int, list[Tensor | None]]] = [{} for _ in steps]
        self._reducing: list[tuple[int, Tensor, Any]] = []

    def put(self, s: int, b: int, grads: Sequence[Tensor | None]) -> None:
        """What a bin says of its stage's parameters, kept apart: bins come in any order."""
        self._by_bin[s][b] = list(grads)

    def add(self, s: int, grads: Sequence[Tensor | None]) -> None:
        """The same of bins that come in a fixed order: one sum is kept."""
        before = self._by_bin[s].get(_ALL)
        self._by_bin[s][_ALL] = list(grads) if before is None else list(map(_added, before, grads))

    def begin(self, s: int) -> None:
        """Begins the sum over ranks of a step that is done here."""
        parameters = self._steps[s].stage.parameters()
        if parameters:
            flat = _flat(parameters, self._by_bin[s])
            self._reducing.append((s, flat, self._peers.all_reduce(flat)))

    def wait(self) -> dict[int, Tensor]:
        """The sums by the parameter's id, when they are there; one of several layers gets the sum of theirs."""
        found: dict[int, Tensor] = {}
        for s, flat, work in self._reducing:
            work.wait()
            parameters = self._steps[s].stage.parameters()
            *parts, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
            for p, part, count in zip(parameters, parts, counts.tolist()):
                if count:  # what no rank's bins used has no gradient, as elsewhere
                    part = part.view_as(p).to(p.device, p.dtype)
                    found[id(p)] = found[id(p)] + part if id(p) in found else part
        return found


def _flat(parameters: Sequence[Tensor], by_bin: dict[int, list[Tensor | None]]) -> Tensor:
    """One row of numbers: the bins' gradients added in their order, and how many bins had one, per parameter."""
    dtype = max((p.dtype for p in parameters), key=lambda t: t.itemsize)
    flat = torch.zeros(sum(p.numel() for p in parameters) + len(parameters), dtype=dtype)
    parts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for _, grads in sorted(by_bin.items(), reverse=True):
        for number, grad in enumerate(grads):
            if grad is not None:
                parts[number].add_(grad.reshape(-1).to("cpu", dtype))
                parts[-1][number] += 1
    return flat


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
