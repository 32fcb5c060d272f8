"""How much memory a bin takes while it is computed, measured on a few, so that bins can be packed into a budget.

What a layer holds besides its rows (messages, what autograd keeps, gradients) is its own affair, so it is not guessed:
some bins of different sizes run there and back on zeros, and bytes = source * num_src + node * num_dst + edge *
num_edges + fixed is fitted to their peaks and raised until it covers each of them.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnnsys.fullgraph.keyed_dropout import KeyedRows
from gnnsys.fullgraph.plan.bins import Bin, Costs, make_bins
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.stage_halves import SumStage
from gnnsys.fullgraph.run.batch_norm import NormPass
from gnnsys.fullgraph.run.parameter_grads import unhooked
from gnnsys.ops import CSC, WholeDegrees

_SIZES = (64, 32, 16)  # a sample is the share of all nodes one over this
_MARGIN = 1.02
_MEASURING = threading.Lock()  # torch's dispatch modes are not for several threads at once
_NODE_BYTES = 32  # of a node whose sources come in pieces, of which three may be there


class Peak(TorchDispatchMode):
    """The most bytes of tensors on one device that were made under it and lived at once.

    >>> with Peak(torch.device("cpu")) as peak:
    ...     x = torch.zeros(100)
    >>> peak.num_bytes
    400
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.num_bytes = 0
        self._device, self._live = device, 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device == self._device:
                self._note(tensor.untyped_storage(), given)
        return out

    def _note(self, storage: Any, given: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in given:  # what was there before is not ours
            return
        num_bytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))
        self._live += num_bytes
        self.num_bytes = max(self.num_bytes, self._live)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._live -= num_bytes
        self._known.pop(key, None)


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most memory that `work` has at once on a device beyond what is there already."""
    if device.type != "cuda":
        with _MEASURING, Peak(device) as peak:
            work()
        return peak.num_bytes
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class MeasuredBin:
    """One bin that was measured."""

    num_src: int
    num_dst: int
    num_edges: int
    num_bytes: int


def measure_stage(
    stage: ModelStage, csc: CSC, whole: WholeDegrees, width: int, dtype: torch.dtype,
    joined: Sequence[tuple[int, torch.dtype]], device: torch.device, moves: bool,
) -> Costs:  # fmt: skip
    """What a stage's bins cost. With `moves` their structure is brought to the device each time, and counts, and so
    does what is derived from it there. Of a stage in halves a bin is its nodes and their sums."""
    num_nodes = csc.num_dst
    bounds = []
    for size in _SIZES:
        each = max(1, num_nodes // size)
        bounds += [(first, min(first + each, num_nodes)) for first in (0, (num_nodes - each) // 2, num_nodes - each)]
    samples = []
    for first, end in dict.fromkeys(bounds):
        if stage.conv is None or isinstance(stage, SumStage):
            here = Bin(first, end, None, None)
        else:
            with torch.device("cpu"):  # whatever torch's default is
                (here,) = make_bins(csc, [first, end], whole)
            assert here.csc is not None
            if not moves:
                here.csc.transpose()
        samples.append(_measured(stage, here, width, dtype, joined, device, moves))
    return fit_costs(samples)


def _measured(
    stage: ModelStage, here: Bin, width: int, dtype: torch.dtype, joined: Sequence[tuple[int, torch.dtype]],
    device: torch.device, moves: bool,
) -> MeasuredBin:  # fmt: skip
    num_src = len(here) if here.csc is None else here.csc.num_src
    resident = None if here.csc is None or moves else here.csc.to(device)
    is_linear = isinstance(stage, SumStage)
    lying = None if moves or not is_linear else torch.zeros(num_src, width, dtype=dtype, device=device)

    def there_and_back() -> None:
        if stage.norm is not None:
            _normalise(stage.norm, len(here), width, dtype, device)
            return
        csc = here.csc.to(device) if moves and here.csc is not None else resident
        rows = torch.zeros(num_src, width, dtype=dtype, device=device).requires_grad_()
        marked = [torch.zeros(len(here), w, dtype=t, device=device).requires_grad_() for w, t in joined]
        ids = torch.zeros(len(here), dtype=torch.int64, device=device)
        sources = [rows, *marked, *stage.parameters()]
        if isinstance(stage, SumStage):
            own = (torch.zeros_like(rows) if lying is None else lying).detach().requires_grad_(stage.takes_own)
            out = stage.run_sums(rows, own, marked, KeyedRows(ids, 0))
            sources += [own] if stage.takes_own else []
        else:
            read = rows.clone() if stage.conv is None and stage.writes else rows  # as a pass does
            out = stage.run(read, csc, marked, KeyedRows(ids, 0))
        with unhooked(stage.parameters()):
            torch.autograd.grad(out, sources, torch.ones_like(out), allow_unused=True)

    cuda = [device] if device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(cuda):
        there_and_back()  # what is made once, and kept
        num_bytes = peak_bytes(device, there_and_back)
    if is_linear:  # where its pieces begin, and what its sums are multiplied by
        return MeasuredBin(0, len(here), 0, num_bytes + (_NODE_BYTES * len(here) if moves else 0))
    return MeasuredBin(num_src, len(here), 0 if here.csc is None else here.csc.num_edges, num_bytes)


def _normalise(norm: Any, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """A bin of batch normalisation, there and back, with nothing left behind."""
    rows, grad = (torch.zeros(num_rows, width, dtype=dtype, device=device) for _ in range(2))
    alone = NormPass(copy.deepcopy(norm), None)
    alone.begin(rows, [0, num_rows], device)
    out = alone.forward(rows)
    del out
    alone.begin_back(rows, grad, [0, num_rows])
    alone.backward(rows, grad)


def fit_costs(samples: Sequence[MeasuredBin]) -> Costs:
    """Least squares with no negative cost, then as much more as covers every sample."""
    sizes = np.array([[s.num_src, s.num_dst, s.num_edges, 1] for s in samples], dtype=np.float64)
    bytes_ = np.array([s.num_bytes for s in samples], dtype=np.float64)
    used = [0, 1, 2, 3]
    found = np.zeros(4)
    while used:
        scale = np.maximum(1.0, np.abs(sizes[:, used]).max(axis=0))
        solved, *_ = np.linalg.lstsq(sizes[:, used] / scale, bytes_, rcond=None)
        if (solved >= 0).all():
            found[used] = solved / scale
            break
        used.pop(int(np.argmin(solved)))
    fitted = sizes @ found
    raised = float(np.max(bytes_ / np.maximum(fitted, 1.0), initial=1.0)) * _MARGIN
    return Costs(*(found * max(1.0, raised)).tolist())
