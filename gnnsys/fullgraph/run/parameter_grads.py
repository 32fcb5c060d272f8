"""Gradients of parameters: what bins say of them, and its sums over the ranks, begun layer by layer.

What bins say is added in the bins' order, whatever order they ran in, so sums are the same on every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Peers
from gnnsys.fullgraph.plan.bins import Bin

_ALL = -1  # the bin under which sums are kept of bins that run in a fixed order


class ParameterGrads:
    """Those of all steps of one pass, by step; every rank begins the sums of its steps in the same order."""

    def __init__(self, parameters: Sequence[Sequence[Tensor]], peers: Peers) -> None:
        self._parameters, self._peers = parameters, peers
        self._by_bin: list[dict[int, list[Tensor | None]]] = [{} for _ in parameters]
        self._reducing: list[tuple[int, Any, Any]] = []  # step; sums, or what travels; work, where it travels

    def put(self, here: Bin, grads: Sequence[Tensor | None]) -> None:
        """What a bin says of its stage's parameters, kept apart: bins come in any order."""
        self._by_bin[here.step][here.number] = list(grads)

    def add(self, s: int, grads: Sequence[Tensor | None]) -> None:
        """The same of bins that come in a fixed order: one sum is kept."""
        before = self._by_bin[s].get(_ALL)
        self._by_bin[s][_ALL] = list(grads) if before is None else list(map(_added, before, grads))

    def begin(self, s: int) -> None:
        """Begins the sum over ranks of a step that is done here; of one rank, there is nothing to be added."""
        parameters = self._parameters[s]
        if parameters:
            sums, counts = _sums(parameters, self._by_bin[s])
            flat = _flat(parameters, sums, counts) if self._peers.world_size > 1 else None
            work = None if flat is None else self._peers.all_reduce(flat)
            self._reducing.append((s, sums if flat is None else flat, work))

    def wait(self) -> dict[int, Tensor]:
        """The sums by the parameter's id, when they are there; one of several layers gets the sum of theirs."""
        found: dict[int, Tensor] = {}
        for s, sums, work in self._reducing:
            parameters = self._parameters[s]
            if work is not None:
                work.wait()
                sums = _split(parameters, sums)
            for p, grad in zip(parameters, sums, strict=True):
                if grad is not None:  # what no rank's bins used has no gradient, as elsewhere
                    grad = grad.to(p.device, p.dtype)
                    found[id(p)] = found[id(p)] + grad if id(p) in found else grad
        return found


@contextlib.contextmanager
def unhooked(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside it hooks on these tensors do not run: they are for the whole gradient, and a bin has a part of it."""
    hooks = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    try:
        for p, _ in hooks:
            p._backward_hooks = None
        yield
    finally:
        for p, own in hooks:
            p._backward_hooks = own


def _sums(
    parameters: Sequence[Tensor], by_bin: dict[int, list[Tensor | None]]
) -> tuple[list[Tensor | None], list[int]]:
    """The bins' gradients added in their order, and how many bins had one, per parameter."""
    dtype = _widest(parameters)
    sums: list[Tensor | None] = [None] * len(parameters)
    counts = [0] * len(parameters)
    for _, grads in sorted(by_bin.items(), reverse=True):
        sums = [
            _added(total, None if grad is None else grad.to(dtype)) for total, grad in zip(sums, grads, strict=True)
        ]
        counts = [count + (grad is not None) for count, grad in zip(counts, grads, strict=True)]
    return sums, counts


def _flat(parameters: Sequence[Tensor], sums: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor:
    """One row of numbers in host memory, as it travels: sums, then counts."""
    dtype = _widest(parameters)
    parts = [p.new_zeros(p.shape) if grad is None else grad for p, grad in zip(parameters, sums, strict=True)]
    counted = torch.tensor(counts, dtype=dtype, device="cpu")
    return torch.cat([*(part.reshape(-1).to("cpu", dtype) for part in parts), counted])


def _split(parameters: Sequence[Tensor], flat: Tensor) -> list[Tensor | None]:
    *parts, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    return [
        part.view_as(p) if count else None for p, part, count in zip(parameters, parts, counts.tolist(), strict=True)
    ]


def _widest(parameters: Sequence[Tensor]) -> torch.dtype:
    return max((p.dtype for p in parameters), key=lambda t: t.itemsize)


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
