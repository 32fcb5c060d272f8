"""capture(step): a training step as CUDA graphs, one for each size of batches.

A replay launches all kernels of a step at once, so the host is never late. A graph has fixed addresses and shapes: it
is captured on buffers of its own, and a batch of the same size is copied into them before a replay. Whatever Python
sees of a batch (shapes, `batch_size`, `num_sampled_nodes`) is part of its size: a graph is only replayed for batches
that Python cannot tell apart.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.loader import Batch
from gnnsys.ops import BY_DESTINATION, IN_REPLAYS, STRUCTURES, ReplayedEdges

Step = Callable[[Batch], Any]

_SEEN = 256  # sizes that are remembered before they are captured
_PATIENCE = 64  # steps without any size twice, after which one line says so


class CaptureCounts(NamedTuple):
    """Of a captured step: graphs there are, steps that were replayed, and steps that ran as written."""

    graphs: int
    replayed: int
    eager: int


def capture(step: Step, *, max_graphs: int = 8) -> CapturedStep:
    """`step` as CUDA graphs, one for each of at most `max_graphs` sizes of batches.

    `step(batch)` is a whole training step: it zeroes gradients, runs the model, `backward` and an optimizer made with
    `capturable=True`, and returns tensors, such as the loss. The first batch of a size runs as written, which warms the
    step up; the second one is captured; from then on it is replayed. Each batch is trained on once. Further sizes run
    as written. Pad batches, so that sizes are few: `NeighborLoader(..., pad=True)`.

    In a replay only work on the device is done: Python of the step, `print` or a scheduler, does not run. What it
    returns is a copy, without gradients. A step that waits for the device (`.item()`, layers that look for self loops)
    cannot be captured: ValueError. Batches on the host are simply given to `step`.

    >>> train = gnnsys.cuda.capture(step)  # doctest: +SKIP
    >>> losses = [train(batch) for batch in loader]  # doctest: +SKIP
    """
    return CapturedStep(step, max_graphs)


class CapturedStep:
    """What `capture` returns. Call it from one thread."""

    def __init__(self, step: Step, max_graphs: int = 8) -> None:
        if not callable(step):
            raise ValueError(f"step must be a function step(batch) that trains on a batch, got {type(step).__name__}")
        if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 0:
            raise ValueError(f"max_graphs must be a whole number >= 0, got {max_graphs!r}")
        self._step = step
        self._max_graphs = max_graphs
        self._graphs: dict[Hashable, StepGraph] = {}
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._side: SideStream | None = None
        self._num_replayed = self._num_eager = 0

    def __call__(self, batch: Batch) -> Any:
        """Trains on a batch; a copy of what the step returned."""
        if not _is_capturable(batch):
            self._num_eager += 1
            return detached(self._step(batch))
        size = size_of(batch)
        graph = self._graphs.get(size)
        if graph is None:
            if not self._is_due(size):
                self._num_eager += 1
                return self._stream(batch).run(self._step, batch)
            graph = self._graphs[size] = self._stream(batch).record(self._step, batch)
        self._num_replayed += 1
        return graph(batch)

    @property
    def counts(self) -> CaptureCounts:
        return CaptureCounts(len(self._graphs), self._num_replayed, self._num_eager)

    def close(self) -> None:
        """Gives graphs and buffers back; sizes that come again are captured anew."""
        self._graphs.clear()
        self._seen.clear()
        self._side = None

    def _stream(self, batch: Batch) -> SideStream:
        if self._side is None:
            self._side = SideStream(batch.device)
        return self._side

    def _is_due(self, size: Hashable) -> bool:
        """Whether a size without a graph gets one now: it is here for the second time, and there is room."""
        if len(self._graphs) >= self._max_graphs:
            return False
        if size in self._seen:
            del self._seen[size]
            return True
        self._seen[size] = None
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        if len(self._seen) == _PATIENCE and not self._graphs:
            warnings.warn(
                f"{_PATIENCE} batches of as many sizes, so that no step was captured: load them with pad=True",
                stacklevel=3,
            )
        return False

    def __repr__(self) -> str:
        counts = self.counts
        name = getattr(self._step, "__name__", type(self._step).__name__)
        return f"CapturedStep({name}, {counts.graphs} graphs, {counts.replayed} replayed, {counts.eager} as written)"


class SideStream:
    """Where steps run that are no replays.

    Warming up and capturing happen on one stream that is not the default one: what autograd remembers of the stream of
    a parameter is then the capture's own. All graphs share a pool of memory, as no two of them run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step: Step, batch: Batch) -> Any:
        """The step as written."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True")  # of torch, about steps that are no replays
            out = detached(step(batch))
        current.wait_stream(self._stream)
        return out

    def record(self, step: Step, batch: Batch) -> StepGraph:
        """The step as a graph; nothing of it is run."""
        buffers = batch.apply(Tensor.clone)
        tensors, promises = list(buffers.tensors()), promise_for_replays(batch, buffers)
        recorded: Any = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._stream.device)
        options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            # Where a capture fails, torch may leave its stream the current one: the outer block puts ours back.
            with torch.cuda.stream(here), torch.cuda.graph(recorded, **options):
                out = detached(step(buffers))
        except RuntimeError as error:
            raise ValueError(
                f"this step cannot be captured: {error}. It must not wait for the device (.item(), .cpu(), layers that "
                "look for self loops or group edges) and needs an optimizer made with capturable=True; or call the "
                "step itself"
            ) from error
        finally:
            for promise in promises:
                promise.forget()
        return StepGraph(tensors, out, recorded.replay)


class StepGraph:
    """A recorded step: buffers that a batch's tensors are copied into, what it returns, and what does it again."""

    def __init__(self, buffers: list[Tensor], out: Any, replay: Callable[[], None]) -> None:
        self._buffers = buffers
        self._out = out
        self._replay = replay

    def __call__(self, batch: Batch) -> Any:
        torch._foreach_copy_(self._buffers, list(batch.tensors()), non_blocking=True)
        self._replay()
        return _through(self._out, Tensor.clone)  # the next replay writes over it


def promise_for_replays(batch: Batch, buffers: Batch) -> list[ReplayedEdges]:
    """Tells layers what they may rely on in every replay: what is known of the edges of all batches of this size."""
    promises = []
    for edge_type, store in batch.edges.items():
        known = _known_of(store)
        if known is None:
            continue
        promises.append(ReplayedEdges(*known))
        STRUCTURES.put(promises[-1], buffers.edges[edge_type]["edge_index"], key=IN_REPLAYS)
    return promises


def size_of(batch: Batch) -> Hashable:
    """All that Python can see of a batch, and what is known of its edges."""
    stores = [*batch.nodes.items(), *batch.edges.items(), (None, batch.extra)]
    known = [_frozen(_known_of(store)) for store in batch.edges.values()]
    blocks = [(b.num_src, b.num_dst, [(t, c.num_src) for t, c in b.csc.items()]) for b in batch.blocks]
    shapes = [(t.shape, t.dtype, t.device) for block in batch.blocks for t in _block_tensors(block)]
    return (*((key, _frozen(store)) for key, store in stores), tuple(known), _frozen(blocks), _frozen(shapes))


def _is_capturable(batch: Batch) -> bool:
    return batch.device.type == "cuda"


def _known_of(store: Mapping[str, Any]) -> tuple[int, int, Mapping[int, int]] | None:
    edge_index = store.get("edge_index")
    return None if edge_index is None else STRUCTURES.find(edge_index, key=BY_DESTINATION)


def _block_tensors(block: Any) -> list[Tensor]:
    return [t for csc in block.csc.values() for t in (csc.indptr, csc.indices, csc.edge_ids) if t is not None]


def _frozen(value: Any) -> Hashable:
    """A value as part of a key; of a tensor its shape, dtype and device."""
    if isinstance(value, Tensor):
        return (Tensor, tuple(value.shape), value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((key, _frozen(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return value if isinstance(value, Hashable) else id(value)


def detached(out: Any) -> Any:
    """What a step returned, without gradients: those of a step end with it, and so does what they hold."""
    return _through(out, Tensor.detach)


def _through(out: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(out, Tensor):
        return function(out)
    if isinstance(out, (list, tuple)):
        values = [_through(each, function) for each in out]
        return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)
    return {k: _through(v, function) for k, v in out.items()} if isinstance(out, Mapping) else out
