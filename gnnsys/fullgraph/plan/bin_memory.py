"""How much memory a bin takes while it is computed, measured on a few, so that bins can be packed into a budget.

What a layer holds besides its rows (messages, what autograd keeps, gradients) is its own affair, so it is not guessed:
some bins of different sizes run there and back on zeros, and bytes = source * num_src + node * num_dst + edge *
num_edges + fixed is fitted to their peaks and raised until it covers each of them.

A device's allocator counts for the whole process, so a reading has in it what other threads take or give back
meanwhile. It is taken until two readings agree.
"""

from __future__ import annotations

import copy
import statistics
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gnnsys.fullgraph.keyed_dropout import KeyedRows
from gnnsys.fullgraph.plan.bins import Bin, Costs, make_bins
from gnnsys.fullgraph.plan.default_device import on_host
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.stage_halves import SumStage
from gnnsys.fullgraph.run.batch_norm import NormPass
from gnnsys.fullgraph.run.parameter_grads import unhooked
from gnnsys.ops import CSC, WholeDegrees

_SIZES = (64, 32, 16)  # a sample is the share of all nodes one over this
_MARGIN = 1.02
_MOST_SCALED = 1.25  # by how much a fit is raised as a whole; what is missing then is added to each bin
_READINGS = 5  # of a device's peak, until two agree
_AGREE = 0.01
_MEASURING = threading.RLock()  # dispatch modes, and an allocator's peak, are for one thread at a time
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
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in (out,) if isinstance(out, Tensor) else _tensors_in((out,)):
            if tensor.device == self._device:
                storage = tensor.untyped_storage()
                if id(storage) not in self._known and not self._is_given(storage, args, kwargs):
                    self._note(storage)
        return out

    @staticmethod
    def _is_given(storage: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator was given it: what was there before is not ours."""
        return any(tensor.untyped_storage() is storage for tensor in _tensors_in((*args, *kwargs.values())))

    def _note(self, storage: Any) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))
        self._live += num_bytes
        self.num_bytes = max(self.num_bytes, self._live)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._live -= num_bytes
        self._known.pop(key, None)


class AllocatorStats(Protocol):
    """What an allocator tells of all memory that a process has from it."""

    def allocated(self) -> int: ...

    def reset_peak(self) -> None: ...

    def peak(self) -> int: ...


class CudaStats:
    """Of torch's caching allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Operators take and give tensors, and lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most memory that `work` has at once on a device beyond what is there already."""
    with _MEASURING:
        if device.type == "cuda":
            return _reading(CudaStats(device), work)
        with Peak(device) as peak:
            work()
    return peak.num_bytes


def _reading(stats: AllocatorStats, work: Callable[[], object]) -> int:
    before = stats.allocated()
    stats.reset_peak()
    work()
    return stats.peak() - before


def agreed_peak(read: Callable[[], int]) -> int:
    """What two readings of a peak agree on. Where none do, others take memory all the time: the middle one."""
    readings: list[int] = []
    while len(readings) < _READINGS:
        now = read()
        alike = [each for each in readings if abs(each - now) <= _AGREE * max(each, now)]
        if alike:
            return max(now, *alike)
        readings.append(now)
    return int(statistics.median(readings))


@dataclass(frozen=True)
class MeasuredBin:
    """One bin that was measured."""

    num_src: int
    num_dst: int
    num_edges: int
    num_bytes: int


def measure_stage(
    stage: ModelStage, csc: CSC, whole: WholeDegrees, ids: Tensor, width: int, dtype: torch.dtype,
    joined: Sequence[tuple[int, torch.dtype]], device: torch.device, moves: bool,
) -> Costs:  # fmt: skip
    """What a stage's bins cost. With `moves` their structure is brought to the device each time, and counts, and so
    does what is derived from it there. Of a stage in halves a bin is its nodes and their sums."""
    num_nodes, is_alike = csc.num_dst, stage.conv is None or isinstance(stage, SumStage)  # bins of one size are
    bounds = []
    for size in _SIZES:
        each = max(1, num_nodes // size)
        firsts = (0,) if is_alike else (0, (num_nodes - each) // 2, num_nodes - each)
        bounds += [(first, min(first + each, num_nodes)) for first in firsts]
    samples = []
    for first, end in dict.fromkeys(bounds):
        if is_alike:
            here = Bin(first, end, None, None)
        else:
            with on_host():
                (here,) = make_bins(csc, [first, end], whole)
            assert here.csc is not None
            if not moves:
                here.csc.transpose()
        samples.append(_measured(stage, here, ids[first:end], width, dtype, joined, device, moves))
    return fit_costs(samples)


def _measured(
    stage: ModelStage, here: Bin, ids: Tensor, width: int, dtype: torch.dtype,
    joined: Sequence[tuple[int, torch.dtype]], device: torch.device, moves: bool,
) -> MeasuredBin:  # fmt: skip
    num_src = len(here) if here.csc is None else here.csc.num_src
    resident = None if here.csc is None or moves else here.csc.to(device)
    is_linear, ids = isinstance(stage, SumStage), ids.to(device)
    lying = None if moves or not is_linear else torch.zeros(num_src, width, dtype=dtype, device=device)

    def there_and_back() -> None:
        if stage.norm is not None:
            _normalise(stage.norm, len(here), width, dtype, device)
            return
        csc = here.csc.to(device) if moves and here.csc is not None else resident
        rows = torch.zeros(num_src, width, dtype=dtype, device=device).requires_grad_()
        marked = [torch.zeros(len(here), w, dtype=t, device=device).requires_grad_() for w, t in joined]
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
        if device.type == "cuda":
            num_bytes = agreed_peak(lambda: peak_bytes(device, there_and_back))
        else:  # counts its own tensors alone
            num_bytes = peak_bytes(device, there_and_back)
    num_bytes = max(num_bytes, num_src * width * dtype.itemsize)  # rows are there in any case
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
    """Least squares with no negative cost, then as much more as covers every sample.

    A sample may have no edges, and a fit may be of edges alone: no factor covers what is fitted as nothing. So the fit
    is scaled by a little at most, and what is missing then is added to every bin. What a bin is said to take is never
    more than a scaled fit and the largest sample.
    """
    sizes = np.array([[s.num_src, s.num_dst, s.num_edges, 1] for s in samples], dtype=np.float64)
    bytes_ = np.array([s.num_bytes for s in samples], dtype=np.float64)
    found = _non_negative(sizes, bytes_)
    fitted = sizes @ found
    raised = float(np.max(bytes_ / np.maximum(fitted, 1.0), initial=1.0))
    found = found * min(max(1.0, raised), _MOST_SCALED)
    found[3] += float(np.max(bytes_ - sizes @ found, initial=0.0))
    return Costs(*(found * _MARGIN).tolist())


def _non_negative(sizes: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    """The least squares solution of which nothing is negative: the best of those that leave some columns away."""
    best, least = np.zeros(sizes.shape[1]), float(np.square(bytes_).sum())
    scale = np.maximum(1.0, np.abs(sizes).max(axis=0))
    for count in range(1, sizes.shape[1] + 1):
        for used in map(list, combinations(range(sizes.shape[1]), count)):
            solved, *_ = np.linalg.lstsq(sizes[:, used] / scale[used], bytes_, rcond=None)
            error = float(np.square(sizes[:, used] / scale[used] @ solved - bytes_).sum())
            if (solved >= 0).all() and error < least:
                best, least = np.zeros(sizes.shape[1]), error
                best[used] = solved / scale[used]
    return best
