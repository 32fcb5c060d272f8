"""The device side of a loader: a stream of its own, and the copy stage that brings batches to the consumer's.

What is copied is structure and rows apart, before they are made a Batch, so that compacting can be the device's work;
or a Batch, where a transform of the user's ran before. Both have `apply`. What was sampled and gathered on the device
is there already, and only waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.loader.sampled import Sampled
from gnnsys.ops import ASK_DOCTOR, HAS_CUDA_KERNELS
from gnnsys.pipeline import Stage
from gnnsys.sampling import AnyGraph

_NOTHING: AbstractContextManager[Any] = nullcontext()
_TAKEN_AT_ONCE = 1 << 16  # bytes of pageable memory that CUDA takes before a copy returns, without waiting


class Copied(NamedTuple):
    """Something whose tensors are on the device once `event` has happened."""

    item: Any  # Sampled, Batch, or what a transform has made of it: has `apply`
    event: Any  # torch.Event, or torch.cuda's


class SideStreams:
    """The streams of a loader: one for all its threads, in whose order their work is safe; or one for each of them,
    where a batch is made by one thread from its seeds on, or handed over once, with an event. Then the sampling of a
    batch goes on beside the fetching of another, which both wait for the bus where the graph is in host memory; and
    who waits for a size waits for nobody else's work.

    Small kernels go before a training step's large ones (a high priority), so that loading stays ahead. A loading
    thread has its stream for good (`adopt`): to make it current and to put another back for each stage of each batch
    takes a training thread the interpreter for longer than the stages do.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_shared = True
        self._is_cuda = device.type == "cuda"
        self._streams: list[Any] = []  # all that were made, whichever thread has them
        self._threads: dict[threading.Thread, Any] = {}  # whose each is, where threads have their own
        self._lock = threading.Lock()
        self._shared = self._make()
        self._own = threading.local()  # stream, followed: of this thread; followed where the thread is adopted
        self._after: Any = None  # an event of the consumer's

    def _make(self) -> Any:
        made = torch.cuda.Stream(self.device, priority=-1) if self._is_cuda else torch.Stream(device=self.device)
        self._streams.append(made)
        return made

    @property
    def _stream(self) -> Any:
        if self.is_shared:
            return self._shared
        if not hasattr(self._own, "stream"):
            self._own.stream = self._take()
        return self._own.stream

    def _take(self) -> Any:
        """A stream for this thread: that of one which has ended, as each has a pool of memory of its own."""
        with self._lock:
            ended = next((thread for thread in self._threads if not thread.is_alive()), None)
            stream = self._make() if ended is None else self._threads.pop(ended)
            self._threads[threading.current_thread()] = stream
        return stream

    def follow(self) -> None:
        """What is queued on the current stream of this thread comes before all that loading does from here on."""
        if self._is_cuda:
            self._after = torch.cuda.current_stream(self.device).record_event()

    def adopt(self, setup: Callable[[int], None] | None) -> Callable[[int], None]:
        """What a loading thread begins with, after `setup`: our stream is its current one from then on."""

        def begin(worker: int) -> None:
            if setup is not None:
                setup(worker)
            torch.cuda.set_stream(self._stream)
            self._own.followed = None

        return begin

    def use(self, is_ours: bool = True) -> AbstractContextManager[Any]:
        """Makes it the current stream of this thread, which is where native ops and torch's own put their work. What
        code that is not `is_ours` does to the thread's current stream is undone."""
        after, own = self._after, self._own
        if is_ours and hasattr(own, "followed"):
            if after is not own.followed:
                self._stream.wait_event(after)
                own.followed = after
            return _NOTHING
        stream = self._stream
        if after is not None:
            stream.wait_event(after)
        return torch.cuda.stream(stream) if self._is_cuda else stream

    def receive(self, event: Any, item: Any) -> None:
        """The current stream of this thread goes on with what another thread's has made of an item."""
        stream = self._stream
        stream.wait_event(event)
        for tensor in item.tensors():
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def record(self) -> Any:
        """An event that happens when all that is queued now is done."""
        return self._stream.record_event()

    def wait(self) -> None:
        """Until all that is queued now is done: nothing of the host's memory is read any more."""
        for stream in list(self._streams):
            stream.synchronize()

    def hand_over(self, event: Any) -> Any:
        """The current stream of this thread, which from here on waits for `event`."""
        current = torch.cuda.current_stream if self._is_cuda else torch.accelerator.current_stream
        stream = current(self.device.index)
        stream.wait_event(event)
        return stream


class DeviceCopy:
    """`begin` starts the copy; `arrive` makes the consumer's stream wait for it when the batch is handed out."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStreams(device)
        self._hands_over = False

    def begin(self, item: Any) -> Copied:
        """What is on the host goes to the device: from pinned memory, as only then nobody waits for the copy."""
        device = self._side.device
        num_bytes = 0

        def move(tensor: Tensor) -> Tensor:
            nonlocal num_bytes
            if tensor.device == device:
                return tensor
            if tensor.is_cpu and tensor.numel():
                num_bytes += tensor.nbytes
                is_taken = tensor.nbytes <= _TAKEN_AT_ONCE or tensor.is_pinned()
                tensor = tensor if is_taken else tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        with self._side.use():
            moved = through(item, move)
        record = item.trace if isinstance(item, Sampled) else getattr(item, "_record", None)
        if record is not None:
            record.bytes["device"] = num_bytes
        return Copied(moved, self._side.record())

    def arrive(self, copied: Copied) -> Any:
        """The batch, safe to use on the consumer's stream and to drop at any time: its memory is given to later batches
        only when that stream is done with it."""
        stream = self._side.hand_over(copied.event)
        tensors = getattr(copied.item, "tensors", None)
        if tensors is not None:
            for tensor in tensors():
                tensor.record_stream(stream)
        else:  # whatever a transform has made of the batch

            def note(tensor: Tensor) -> Tensor:
                tensor.record_stream(stream)
                return tensor

            through(copied.item, note)
        return copied.item

    def wait(self) -> None:
        """Until all that loading has queued so far is done."""
        self._side.wait()

    def follow(self) -> None:
        """Rows and structure may be the work of the caller's stream: loading waits for what is queued there now."""
        self._side.follow()

    def use_own_streams(self, *, hand_over: bool) -> None:
        """From here on each thread has one: for loaders whose batches are made by one thread, or sampled by one, which
        then must `hand_over`, and finished by another."""
        self._side.is_shared, self._hands_over = False, hand_over

    def on_stream(self, stage: Stage) -> Stage:
        """The stage with its work on the loader's stream, whichever thread runs it."""
        if self._side.device.type != "cuda":
            return stage
        if not stage.is_inline:
            stage = replace(stage, setup=self._side.adopt(stage.setup))
        if stage.name in ("schedule", "copy"):
            return stage  # a schedule is made on the host, and `begin` sees to its stream itself
        is_ours = stage.name in ("sample", "aggregate", "fetch", "compact")
        run, begin = stage.run, stage.begin
        if self._hands_over and stage.name == "sample":
            run = self._handed_over(run)
        elif self._hands_over and stage.name in ("aggregate", "fetch"):  # whichever comes first
            run, begin = self._received(run), None if begin is None else self._handed_over(begin)
        begin = None if begin is None else _on(self._side, begin, is_ours)
        return replace(stage, run=_on(self._side, run, is_ours), begin=begin)

    def _handed_over(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`function`, behind which another thread may go on with the batch."""

        def run(item: Any) -> Sampled:
            sampled: Sampled = function(item)
            sampled.made = self._side.record()
            return sampled

        return run

    def _received(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`function`, the first that a thread does to a batch of another."""

        def run(sampled: Sampled) -> Any:
            event, sampled.made = sampled.made, None
            if event is not None:
                self._side.receive(event, sampled)
            return function(sampled)

        return run


def through(item: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` of every tensor in a batch, or in what a transform has made of one: tensors, things with `apply`, and
    lists, tuples and dictionaries of them."""
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, (list, tuple)):
        values = [through(value, function) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, Mapping):
        return {name: through(value, function) for name, value in item.items()}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if not callable(getattr(item, "apply", None)):
        raise ValueError(
            f"a {type(item).__name__} cannot be brought to the device: a transform must return a batch, tensors, or "
            "lists, tuples and dictionaries of them; or leave device away and move it yourself"
        )
    return item.apply(function)


def _on(side: SideStreams, function: Callable[[Any], Any], is_ours: bool) -> Callable[[Any], Any]:
    def run(item: Any) -> Any:
        with side.use(is_ours):
            return function(item)

    return run


def resolve(device: torch.device | str | None, graph: AnyGraph | None = None) -> torch.device | None:
    """The device that batches go to, None for the host; ValueError where it is not there.

    By default batches are where the graph is; of a graph on a device they can be nowhere else.
    """
    here = torch.device("cpu") if graph is None else graph.device
    if device is None:
        return None if here.type == "cpu" else here
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one of torch's, such as 'cpu' or 'cuda:0', got {device!r}") from error
    if wanted.type != "cpu":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != wanted.type:
            found = accelerator or f"no accelerator. {ASK_DOCTOR}"
            raise ValueError(f"device={str(wanted)!r} is not available here: torch finds {found}")
        if wanted.index is None:
            index = here.index if here.type == wanted.type else torch.accelerator.current_device_index()
            wanted = torch.device(wanted.type, index)
    reads_parts = graph is not None and not isinstance(graph, Graph)  # which the host can as well
    if here.type != "cpu" and wanted != here and not (reads_parts and wanted.type == "cpu"):
        remedy = f"pass graph.to({str(wanted)!r})" if isinstance(graph, Graph) else f"open it for {str(wanted)!r}"
        raise ValueError(f"the graph is on {here}, so are its batches: leave device={str(wanted)!r} away, or {remedy}")
    return None if wanted.type == "cpu" else wanted


def sampled_on(graph: AnyGraph, target: torch.device | None) -> torch.device | None:
    """The device that samples batches for `target`: where it can read the structure, itself; None is the host.

    A graph in parts is placed for the device by whoever asks first.
    """
    if target is None or target.type != "cuda":
        return None
    if not isinstance(graph, Graph):
        graph.place_on(target)
        return target if graph.sampled_on == target else None
    if graph.device == target:
        return target
    return target if HAS_CUDA_KERNELS and graph.is_pinned else None
