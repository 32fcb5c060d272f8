"""The asking side of samplers elsewhere: batches of a loader made by other processes, asked for a few ahead.

A batch is a function of the loader's description and of its seeds. So a sampler that has died, that lags, or that
answers with nonsense costs time and nothing else: the trainer makes that batch itself, the same to the last bit, and
asks that sampler for nothing until it has answered what it was asked last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnsys.comm import Client, Closed, CommError, Kind, Pending
from gnnsys.loader.batch_message import Expected, WantedBatch, read_answer, row_arrays
from gnnsys.loader.batch_service import UNKNOWN
from gnnsys.loader.described_loader import DescribedLoader
from gnnsys.loader.fetch import Fetch
from gnnsys.loader.sampled import Inputs, Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.observe import BatchTrace
from gnnsys.sampling import DistGraph, Sample
from gnnsys.store import edge_table, node_table

_log = logging.getLogger(__name__)

AHEAD = 3  # batches that each sampler is asked for before the first of them is needed
LEAST_PATIENCE, MOST_PATIENCE = 1.0, 10.0  # seconds that a batch is waited for in its turn
FIRST_PATIENCE = 10.0  # for the first of all samplers to learn what a loader is, once
_LOOK_SECONDS = 0.001  # for an answer that is not waited for
RETRY_SECONDS = 5.0  # until one that has failed is asked again
_OF_THE_TRAINER = {
    "sampler": "a sampler of your own cannot be described to another process",
    "guide": "a guide steers samples by masks that only the trainer has",
    "execution": "a plan of execution says how this process makes batches",
    "pad": "padding finds its sizes in samples made here",
    "wire_dtype": "which rows it narrows depends on where a batch is made",
    "policy": "a policy cannot be described to another process",
}


@dataclass(frozen=True)
class SamplerPeers:
    """Samplers that a graph's loaders may ask: numbers of `client`'s peers, and what they must know of the graph."""

    client: Client
    peers: tuple[int, ...]
    opening: Mapping[str, Any]
    timeout: float = 60.0


class SharedSampleStage(Protocol):
    """A sample stage whose samples another process can make too."""

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled: ...

    def wanted(self, ticket: Ticket, chosen: Tensor) -> WantedBatch: ...

    def around(self, sample: Sample, chosen: Tensor) -> Sampled: ...


@dataclass
class _Peer:
    """A sampler as it is seen from here."""

    number: int
    described: Pending | None = None  # the request that tells it what the loader is
    is_ready: bool = False
    late: Pending | None = None  # what it has not answered in time
    retry_at: float = 0.0
    seconds: float | None = None  # that answers were waited for, a moving mean

    @property
    def patience(self) -> float:
        """How long an answer is waited for when its batch is needed."""
        if self.seconds is None:
            return FIRST_PATIENCE / 2
        return min(MOST_PATIENCE, max(LEAST_PATIENCE, 3 * self.seconds))

    def has_taken(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else 0.9 * self.seconds + 0.1 * seconds


class AskedBatch(NamedTuple):
    """A batch on its way through the sample stage; `pending` is None where the trainer makes it."""

    inputs: Inputs
    wanted: WantedBatch | None
    peer: _Peer | None
    pending: Pending | None

    @property
    def trace(self) -> BatchTrace | None:
        return self.inputs.trace


class BatchesElsewhere:
    """The sample and fetch stages of a loader whose batches others make. `own` is the trainer's own sample stage."""

    def __init__(
        self, peers: SamplerPeers, loader: DescribedLoader, own: SharedSampleStage, fetch: Fetch, schedule: Schedule
    ) -> None:
        self._peers, self._own, self._fetch, self._schedule = peers, own, fetch, schedule
        self._digest, self._names = loader.digest, loader.arrays
        self._description = {"graph": dict(peers.opening), "loader": loader.to_json()}
        self._samplers = [_Peer(number) for number in peers.peers]
        self._lock = threading.Lock()  # of what follows and of the samplers
        self._counts = {"from_samplers": 0, "own": 0, "late": 0, "failed": 0, "bytes_from_samplers": 0}
        self._told_until: float | None = None  # how long the first batches wait for samplers that learn what this is

    @property
    def client(self) -> Client:
        """Which asks the samplers."""
        return self._peers.client

    @property
    def num_ahead(self) -> int:
        return AHEAD * len(self._samplers)

    def counts(self) -> dict[str, int]:
        """Batches by who made them; answers that came too late, or were none; bytes."""
        with self._lock:
            return dict(self._counts)

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, inputs: Inputs) -> AskedBatch:
        """Asks the sampler whose turn it is, or the next that can be asked."""
        if inputs.ticket.epoch < 0 or inputs.chosen.numel() == 0:
            return AskedBatch(inputs, None, None, None)
        position = self._schedule.position(inputs.ticket)
        peer = self._choose(position)
        if peer is None:
            return AskedBatch(inputs, None, None, None)
        wanted = self._own.wanted(inputs.ticket, inputs.chosen)
        arrays, options = wanted.question(self._digest)
        try:
            pending = self._peers.client.request(
                peer.number, Kind.BATCH, arrays, options, batch=position, timeout=self._peers.timeout
            )
        except CommError as error:
            self._fail(peer, error)
            return AskedBatch(inputs, None, None, None)
        return AskedBatch(inputs, wanted, peer, pending)

    def _choose(self, position: int) -> _Peer | None:
        """The sampler whose turn it is, or the next that can be asked. Before the first batch all are told at once what
        the loader is, and the first to have understood is waited for."""
        with self._lock:
            if self._told_until is None:
                self._told_until = time.monotonic() + FIRST_PATIENCE
                for peer in self._samplers:
                    self._describe(peer)
            until = self._told_until
        while True:
            for turn in range(len(self._samplers)):
                peer = self._samplers[(position + turn) % len(self._samplers)]
                if self._is_askable(peer):
                    return peer
            if time.monotonic() >= until or all(peer.described is None for peer in self._samplers):
                return None

    def _describe(self, peer: _Peer) -> None:
        try:
            peer.described = self._peers.client.request(
                peer.number, Kind.LOADER, (), self._description, timeout=self._peers.timeout
            )
        except CommError as error:
            self._note_failure(peer, error)

    def _is_askable(self, peer: _Peer) -> bool:
        with self._lock:
            if peer.late is not None and peer.late.done():
                peer.has_taken(time.monotonic() - peer.late.sent_at)
                peer.late = None
            if peer.late is not None or time.monotonic() < peer.retry_at:
                return False
            if peer.is_ready:
                return True
            if peer.described is None:
                self._describe(peer)
            described = peer.described
        if described is None:
            return False
        try:
            told = described.result(_LOOK_SECONDS)
        except TimeoutError as error:
            if isinstance(error, CommError):  # the request's own deadline: it will not be answered any more
                self._fail(peer, error)
            return False
        except (CommError, ValueError) as error:
            self._fail(peer, error)
            return False
        with self._lock:
            peer.described = None
            peer.is_ready = told.options.get("loader") == self._digest
            if not peer.is_ready:
                self._note_failure(peer, ValueError("it describes the loader otherwise"))
        return peer.is_ready

    # -- taking ------------------------------------------------------------------------------------------------------

    def take(self, asked: AskedBatch) -> Sampled:
        """The batch with its rows, as a sampler made it; else its structure alone, made here."""
        made = self._receive(asked)
        with self._lock:
            self._counts["own" if made is None else "from_samplers"] += 1
        return self._own(asked.inputs.ticket, asked.inputs.chosen) if made is None else made

    def _receive(self, asked: AskedBatch) -> Sampled | None:
        peer, pending = asked.peer, asked.pending
        if peer is None or pending is None or asked.wanted is None:
            return None
        began, is_here = time.monotonic(), pending.done()
        patience = 0.0 if peer.late is not None else peer.patience
        if not is_here and patience == 0.0:
            self._note_late(peer, pending)
            return None
        try:
            chunks = pending.chunks(None if is_here else patience)
            sample, rows, num_bytes = read_answer(chunks, asked.wanted, self._expected, self._fetch.empty)
        except TimeoutError:
            self._note_late(peer, pending)
            return None
        except (CommError, ValueError) as error:
            self._fail(peer, error)
            return None
        with self._lock:
            self._counts["bytes_from_samplers"] += num_bytes
            peer.has_taken(time.monotonic() - began)
        sampled = self._own.around(sample, asked.inputs.chosen)
        sampled.rows = rows  # type: ignore[assignment]
        if asked.inputs.trace is not None:
            asked.inputs.trace.bytes["sampler"] = num_bytes
        return sampled

    def _note_late(self, peer: _Peer, pending: Pending) -> None:
        with self._lock:
            self._counts["late"] += 1
            if peer.late is None:
                peer.late = pending
                _log.warning("sampler %d is late: batches are made here until it answers", peer.number)

    def _expected(self, sample: Sample) -> Expected:
        found: Expected = []
        for key, ids in row_arrays(sample):
            for name in self._names.get(key, ()):
                source = self._fetch.source(key, name)
                if ids.numel() and int(ids.max()) >= source.shape[0]:
                    raise ValueError(f"a sampler sent an id of {key!r} that is none of its {source.shape[0]}")
                found.append((key, name, (ids.numel(), *source.shape[1:]), source.dtype))
        return found

    def _fail(self, peer: _Peer, error: Exception) -> None:
        with self._lock:
            self._note_failure(peer, error)

    def _note_failure(self, peer: _Peer, error: Exception) -> None:
        self._counts["failed"] += 1
        was_ready, peer.is_ready, peer.described = peer.is_ready, False, None
        if UNKNOWN in str(error):  # it was started anew, or has forgotten: it is told again at once
            return
        peer.retry_at = time.monotonic() + RETRY_SECONDS
        if not isinstance(error, Closed) and (was_ready or not isinstance(error, CommError)):
            _log.warning("sampler %d failed, its batches are made here: %s", peer.number, error)


def undescribable(
    graph: Any, device: torch.device | None, is_on_device: bool, given: Mapping[str, Any], stages: Sequence[Any]
) -> str | None:
    """Why batches of a loader cannot be made elsewhere, in one line; None where they can.

    `given` are options of the loader; `is_on_device`: whether `device` samples.
    """
    for name, why in _OF_THE_TRAINER.items():
        if given.get(name) not in (None, False):
            return f"{name} is given, and {why}"
    if not isinstance(given.get("edge_mask"), str | None):
        return "edge_mask is no name of a mask, and a sampler knows those of the parts alone"
    if is_on_device:
        return f"{device} samples by itself"
    if wrong := [stage.name for stage in stages if stage.after in ("schedule", "sample")]:
        return f"your stage {wrong[0]!r} comes before the rows, which a sampler sends with the structure"
    if not isinstance(graph, DistGraph):
        return "the graph is in this process's memory alone: open parts with gnnsys.open"
    return None


def unreadable(graph: DistGraph, fetch: Fetch, time_attr: str | None = None) -> str | None:
    """Which array of a loader a sampler cannot read, in one line; None where it can read all."""
    schema = graph.parts.schema
    for node_type in graph.node_types if time_attr is not None else ():
        times = graph.node_data[node_type].get(str(time_attr))
        if times is not None and getattr(times, "name", None) != node_table(node_type, str(time_attr)):
            return f"{time_attr!r} of {node_type!r} was replaced here, and a sampler reads that of the parts"
    for key, names in fetch.all_names().items():
        stored = schema.edge_data[key] if isinstance(key, tuple) else schema.node_data[key]
        for name in names:
            table = edge_table(key, name) if isinstance(key, tuple) else node_table(key, name)
            if name not in stored or getattr(fetch.source(key, name), "name", None) != table:
                return f"{name!r} of {key!r} is not in the parts: name the arrays that are by fetch=[...]"
    return None
