"""One record per batch: nodes and edges per hop, bytes per flow, start and end of each stage, device; and one per pass
over a whole graph: what was computed, sent and waited for, when.

Stages write into the record of the batch they work on, from any thread; the last `size` records are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class BatchFlow:
    """What a batch asked one machine for, of one kind ("PULL", "SAMPLE"): messages as this process counts them.

    `bytes_out` are those of requests, `bytes_in` those of replies. `queued_us`: requests waited for a worker there.
    `served_us`: they were worked on. `waited_us`: from sending to the last byte of the reply, summed over requests.
    """

    kind: str
    machine: int
    requests: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    queued_us: int = 0
    served_us: int = 0
    waited_us: int = 0


@dataclass(slots=True)
class BatchTrace:
    """What is known of one batch; times are seconds of `time.perf_counter` in this process."""

    epoch: int
    batch: int  # the batch number, counted across epochs, as in the messages of the batch
    device: str = "cpu"
    num_seeds: int = 0
    nodes: dict[str, list[int]] = field(default_factory=dict)  # per node type, per hop, entry 0 the seeds
    edges: dict[str, list[int]] = field(default_factory=dict)  # per edge type, "src|relation|dst", per hop
    bytes: dict[str, int] = field(default_factory=dict)  # per flow: local, remote, shared, left_out, device
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)  # start and end
    flows: list[BatchFlow] = field(default_factory=list)  # one for each kind and machine that was asked
    cpu: dict[str, float] = field(default_factory=dict)  # core-seconds of the threads that ran a stage; "use": trained

    def add_cpu(self, stage: str, seconds: float) -> None:
        """One thread at a time has the batch."""
        self.cpu[stage] = self.cpu.get(stage, 0.0) + seconds

    def flow(self, kind: str, machine: int) -> BatchFlow:
        """The one of a kind to a machine, made where there is none yet."""
        for found in self.flows:
            if found.kind == kind and found.machine == machine:
                return found
        self.flows.append(BatchFlow(kind, machine))
        return self.flows[-1]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> BatchTrace:
        """What `as_dict` gave; ValueError where it is no such thing."""
        try:
            stages = {name: (float(began), float(ended)) for name, (began, ended) in value["stages"].items()}
            return cls(**{**value, "stages": stages, "flows": [BatchFlow(**flow) for flow in value["flows"]]})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no record of a batch: {error!r}") from None


@dataclass(slots=True)
class Span:
    """Something that a rank did in a pass over the whole graph; times as in `BatchTrace`."""

    what: str  # "forward" and "backward" of a bin, "send", "wait"; "reduce": a sum of gradients over ranks begins
    step: int  # as `HybridParallel.describe` counts them; -1: of no single one
    number: int  # the bin, or the piece of the halo whose gradient was sent; -1: of none
    began: float
    ended: float
    num_bytes: int = 0  # that were sent


@dataclass(slots=True)
class PassTrace:
    """One pass over the whole graph, there and, where it was differentiated, back."""

    step: int  # of the model: training passes so far
    spans: list[Span] = field(default_factory=list)  # in the order in which they ended

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class Trace:
    """The records of the last `size` batches, by position (batches counted across epochs)."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"a trace keeps size >= 0 batches, got {size}")
        self._size = size
        self._records: OrderedDict[int, BatchTrace] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, position: int, record: BatchTrace) -> None:
        """`record` is that of the batch at `position` from now on, also where that batch was loaded before."""
        with self._lock:
            if position in self._records:
                del self._records[position]  # so that it becomes the newest
            self._records[position] = record
            while len(self._records) > self._size:
                self._records.popitem(last=False)

    def add_time(self, position: int, stage: str, began: float, ended: float) -> None:
        """A stage may work on a batch more than once: from the first start to the last end."""
        record = self._records.get(position)  # no lock: a look-up is one step, and one thread at a time has the batch
        if record is not None:
            before = record.stages.get(stage)
            record.stages[stage] = (began, ended) if before is None else (min(before[0], began), max(before[1], ended))

    def add_answer(
        self, position: int, kind: str, machine: int, bytes_out: int, bytes_in: int, queued_us: int, served_us: int,
        seconds: float,
    ) -> None:  # fmt: skip
        """A request of a batch has its whole reply. From any thread; of a batch that is not kept, nothing."""
        with self._lock:
            record = self._records.get(position)
            if record is None:
                return
            flow = record.flow(kind, machine)
            flow.requests += 1
            flow.bytes_out += bytes_out
            flow.bytes_in += bytes_in
            flow.queued_us += queued_us
            flow.served_us += served_us
            flow.waited_us += int(seconds * 1e6)

    def record(self, position: int) -> BatchTrace | None:
        """Of one batch, where it is kept."""
        return self._records.get(position)

    def records(self) -> list[BatchTrace]:
        """By position; of batches still in flight as far as they are known."""
        with self._lock:
            return [self._records[position] for position in sorted(self._records)]
