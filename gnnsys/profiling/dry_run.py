"""Counting what a job's batches ask every part for, in one process and before there is a cluster.

A batch is a function of (seed, epoch, batch) alone, so the batches of every rank can be made here. Each part is behind
a graph server of its own, on the loopback; the loader, its window of rows shared and kept, and the messages are those
of a run. So bytes are not estimated: they are counted where a run counts them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.comm import Client
from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader import Batch, KeptSamples, NeighborLoader, PipelineOptions, in_turn
from gnnsys.observe import BatchTrace
from gnnsys.partition import Parts, Placement, open_parts
from gnnsys.planning import FLOWS, HOME_SHARE, PULLED, WORK, ShareProfile
from gnnsys.profiling.step_times import StepTimes
from gnnsys.sampling import DistGraph
from gnnsys.seeds import Seeds, split
from gnnsys.session import GraphServer
from gnnsys.store import Store

_WAYS, _WAYS_LATE = 2, 4  # in which a share is counted
_WARM = 3  # batches before those that are timed
AWAY = -1  # the number of a machine that has no part
_KINDS = {"SAMPLE": "sample", "PULL": "pull"}  # others, of which there are few, count as what a batch samples


@dataclass(frozen=True, kw_only=True)
class DryJob:
    """What a training script would give its loader. `num_threads`: of the loader; None is what it would choose.
    `sample_depth`: `PipelineOptions.depths["sample"]`."""

    fanouts: tuple[int, ...]
    batch_size: int
    what: str = "train"
    fetch: tuple[str, ...] | None = None
    shuffle: bool = True
    seed: int = 0
    num_threads: int | None = None
    prefetch: int = 2
    sample_depth: int | None = None
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not self.fanouts or any(fanout == 0 or fanout < -1 for fanout in self.fanouts):
            raise ValueError(f"fanouts must be whole numbers of more than 0, or -1 for all, got {list(self.fanouts)}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    def make_loader(self, graph: DistGraph, seeds: Seeds, num_batches: int) -> NeighborLoader:
        depths = {} if self.sample_depth is None else {"sample": self.sample_depth}
        return NeighborLoader(
            graph, list(self.fanouts), input_nodes=seeds, batch_size=self.batch_size, shuffle=self.shuffle,
            seed=self.seed, fetch=self.fetch, num_threads=self.num_threads, prefetch=self.prefetch,
            wire_dtype=self.wire_dtype, pipeline=PipelineOptions(depths=depths, trace=num_batches + 64),
        )  # fmt: skip


@dataclass(frozen=True)
class CountedShares:
    """What `count_shares` found. `carry`: core-seconds of a byte in sockets, at each end."""

    shares: tuple[ShareProfile, ...]
    subpart_seeds: tuple[int, ...]
    ahead: int
    in_flight: int
    carry: float


@contextmanager
def part_servers(path: str | os.PathLike[str], num_parts: int) -> Iterator[dict[int, str]]:
    """A server for each part, in this process; their endpoints."""
    with ExitStack() as stack:
        endpoints = {}
        for part in range(num_parts):
            server = GraphServer(part, alone=True, threads=1, io_threads=1)
            stack.callback(server.close)
            endpoints[part] = server.start()[0]
            server.open(str(path), [part], verify=False)
        yield endpoints


@contextmanager
def graph_of_rank(
    parts: Parts, endpoints: dict[int, str], home: Sequence[int], rank: int, world_size: int
) -> Iterator[DistGraph]:
    """The graph as a rank sees it that is on a machine with the parts `home`; every other part has its own."""
    machine = home[0] if home else AWAY
    machine_of_part = [machine if part in home else part for part in range(parts.num_parts)]
    client = Client(endpoints, sender=rank, incarnation=1, timeout=600.0, name=f"profile-{rank}")
    try:
        store = Store(
            machine_of_part=machine_of_part, machine=machine, client=client, rank=rank, world_size=world_size,
            timeout=600.0,
        )  # fmt: skip
        graph = DistGraph(parts, store, client, machine, machine_of_part)
        yield graph
        store.close()
    finally:
        client.close()


def count_shares(
    path: str | os.PathLike[str],
    job: DryJob,
    *,
    trainers: int | None = None,
    num_batches: int = 50,
    steps: StepTimes | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CountedShares:
    """Flows and times of the first `num_batches` batches of each of `trainers` shares (default: one per subpart).

    `steps` times training on batches. `progress` is called with how many batches are counted and how many will be: a
    share is counted two or four times.
    """
    folder = Path(path)
    parts = open_parts(folder, verify=False)
    trainers = parts.num_parts * parts.trainers_per_part if trainers is None else trainers
    if trainers < 1 or num_batches < 1:
        raise ValueError(f"trainers and num_batches must be at least 1, got {trainers} and {num_batches}")
    shares: list[ShareProfile] = []
    carried: list[float] = []
    with part_servers(folder, parts.num_parts) as endpoints:
        first = _Counting(parts, endpoints, job, trainers, _WARM)
        first.count(0, (), None, None)  # what is read for the first time
        counting = _Counting(parts, endpoints, job, trainers, num_batches, progress, first.may_differ)
        for number in range(trainers):
            samples = KeptSamples()
            away, carry = counting.count(number, (), steps, samples)
            home = counting.homes[number]
            at_home, _ = counting.count(number, home, None, None)  # sampled again: its time is wanted
            late, late_at_home = away, at_home
            if counting.may_differ:
                late, _ = counting.count(number, (), None, samples, is_late=True)
                late_at_home, _ = counting.count(number, home, None, samples, is_late=True)
            pulled = {
                f"{prefix}{name}": getattr(seen, name)
                for prefix, seen in (("home_", at_home), ("late_", late), ("home_late_", late_at_home))
                for name in PULLED
            }
            shares.append(replace(away, **pulled, home=home, local_cost=_local_cost(away, at_home, home)))
            carried.append(carry)
    return CountedShares(
        tuple(shares), counting.subpart_seeds, counting.ahead, counting.in_flight, float(np.median(carried))
    )


class _Counting:
    """Counts shares one after the other; what all of them have in common is known after the first."""

    def __init__(
        self, parts: Parts, endpoints: dict[int, str], job: DryJob, trainers: int, num_batches: int,
        progress: Callable[[int, int], None] | None = None, may_differ: bool = False,
    ) -> None:  # fmt: skip
        self._parts, self._endpoints, self._job = parts, endpoints, job
        self._trainers, self._num_batches = trainers, num_batches
        self._progress, self._done = progress, -1
        self._total = trainers * num_batches * (_WAYS_LATE if may_differ else _WAYS)
        self._tell()
        self.subpart_seeds: tuple[int, ...] = ()
        self.homes: list[tuple[int, ...]] = []
        self.ahead = self.in_flight = 0
        self.may_differ = may_differ

    def _tell(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)

    def count(
        self, number: int, home: Sequence[int], steps: StepTimes | None, samples: KeptSamples | None, *,
        is_late: bool = False,
    ) -> tuple[ShareProfile, float]:  # fmt: skip
        """A share's profile where its trainer has the parts `home`, and core-seconds of a byte in sockets. `samples`:
        those of other counts of this share. `is_late`: rows always come late, so that more batches are under way when
        one asks for its own."""
        parts, trainers = self._parts, self._trainers
        with graph_of_rank(parts, self._endpoints, home, number, trainers) as graph:
            # All ranks on one machine that serves everything: rank i has the i-th range of the seeds.
            placement = Placement(number, (0,) * trainers, (0,) * parts.num_parts)
            seeds = split(graph, self._job.what, placement=placement)
            if not self.homes:
                assert seeds.recipe is not None
                self.subpart_seeds = tuple(seeds.recipe.counts)
                self.homes = [
                    home_parts(share, self.subpart_seeds, parts.trainers_per_part) for share in seeds.recipe.shares
                ]
            loader = self._job.make_loader(graph, seeds, self._num_batches)
            self.ahead, self.in_flight = loader.num_under_way, loader.num_ahead
            self.may_differ = loader.num_ahead_when_late != loader.num_ahead
            try:
                return _count(loader, graph, self._num_batches, steps, samples, is_late=is_late, tell=self._tell)
            finally:
                loader.close()


def _local_cost(away: ShareProfile, at_home: ShareProfile, home: Sequence[int]) -> float:
    """What the trainer's threads do more where parts are on its machine, beside what servers did for these parts."""
    more = (at_home.sampling + at_home.fetching - away.sampling - away.fetching).mean()
    served = away.serving[:, list(home)].sum(1).mean()
    return float(np.clip(more / served, 0.0, 1.0)) if served else 1.0


def home_parts(share: range, subpart_seeds: Sequence[int], trainers_per_part: int) -> tuple[int, ...]:
    """The parts that a fair share of these seeds is in, at least one.

    >>> home_parts(range(5, 15), [10, 10, 10], 1), home_parts(range(1, 10), [10, 10, 10], 1)
    ((0, 1), (0,))
    """
    ends = [0, *accumulate(subpart_seeds)]
    found: dict[int, int] = {}
    for subpart, (first, end) in enumerate(pairwise(ends)):
        common = min(share.stop, end) - max(share.start, first)
        if common > 0:
            part = subpart // trainers_per_part
            found[part] = found.get(part, 0) + common
    most = max(found, key=lambda part: found[part]) if found else 0
    return tuple(sorted({most, *(part for part, count in found.items() if count >= HOME_SHARE * len(share))}))


def _count(
    loader: NeighborLoader, graph: DistGraph, num_batches: int, steps: StepTimes | None, samples: KeptSamples | None, *,
    is_late: bool, tell: Callable[[], None],
) -> tuple[ShareProfile, float]:  # fmt: skip
    """The profile of a loader's share, and core-seconds per byte that neither end's own work accounts for."""
    if not len(loader):
        raise ValueError("there are no seeds to train on: the mask is empty")
    num_parts = graph.parts.num_parts
    flows = {name: np.zeros((num_batches, num_parts)) for name in FLOWS}
    work = {name: np.zeros(num_batches) for name in WORK}
    stepping = 0.0
    began_all, began_own = time.process_time(), time.thread_time()
    ahead = loader.num_ahead_when_late if is_late else loader.num_ahead
    for made in in_turn(loader, num_batches, ahead=ahead, samples=samples):
        at = made.position
        work["sampling"][at] = sum(made.seconds.get(stage, 0.0) for stage in ("schedule", "sample", "compact"))
        work["fetching"][at] = made.seconds["fetch"]
        before = time.process_time()
        _describe(made.batch, graph, flows, work, at)
        if steps is not None:
            work["computing"][at] = steps.seconds(made.batch)
        tell()
        stepping += time.process_time() - before
    own = time.thread_time() - began_own
    others = max(0.0, time.process_time() - began_all - stepping - max(0.0, own - stepping))
    for record in loader.trace():
        if record.batch < num_batches:
            _add_flows(record, flows)
    return _settle(flows, work, others)


def _settle(flows: dict[str, np.ndarray], work: dict[str, np.ndarray], others: float) -> tuple[ShareProfile, float]:
    """Servers say how long they served by the clock on the wall. Where that is more than all threads but the caller's
    have used of the processors, this machine was busy with something else, and it is scaled down."""
    served = float(flows["sample_seconds"].sum() + flows["pull_seconds"].sum())
    if served > others > 0:
        for name in ("sample_seconds", "pull_seconds"):
            flows[name] *= others / served
    carried = sum(float(flows[name].sum()) for name in ("sample_in", "sample_out", "pull_in", "pull_out"))
    carry = max(0.0, others - served) / carried / 2 if carried else 0.0
    found: dict[str, Any] = {**flows, **work}
    found |= {f"{prefix}{name}": flows[name] for prefix in ("home_", "late_", "home_late_") for name in PULLED}
    return ShareProfile(**found), carry


def flow_kind(kind: str) -> str:
    """The name of a message's flow in a profile."""
    return _KINDS.get(kind, "sample")


def _add_flows(record: BatchTrace, flows: dict[str, np.ndarray]) -> None:
    for flow in record.flows:
        kind = flow_kind(flow.kind)
        flows[f"{kind}_out"][record.batch, flow.machine] += flow.bytes_out
        flows[f"{kind}_in"][record.batch, flow.machine] += flow.bytes_in
        flows[f"{kind}_seconds"][record.batch, flow.machine] += flow.served_us * 1e-6
        flows["requests"][record.batch, flow.machine] += flow.requests


def _describe(
    batch: Batch, graph: DistGraph, flows: dict[str, np.ndarray], work: dict[str, np.ndarray], at: int
) -> None:
    """Rows and edges of a batch by owner part: a node's owner has its row, and the edges into it."""
    num_parts = graph.parts.num_parts
    for node_type, nodes in batch.nodes.items():
        owners = graph.book.part_of(nodes.n_id, node_type)
        flows["rows"][at] += torch.bincount(owners, minlength=num_parts).numpy()
        work["nodes"][at] += nodes.n_id.numel()
        work["batch_bytes"][at] += sum(rows.nbytes for rows in nodes.values() if isinstance(rows, Tensor))
    for edge_type, edges in batch.edges.items():
        flows["edges"][at] += _edges_by_owner(batch, graph, edge_type, edges, num_parts)
        work["batch_bytes"][at] += sum(rows.nbytes for rows in edges.values() if isinstance(rows, Tensor))
    work["seeds"][at] = _num_seeds(batch)


def _edges_by_owner(batch: Batch, graph: DistGraph, edge_type: EdgeType, edges: Any, num_parts: int) -> np.ndarray:
    target: NodeType = edge_type[2]
    ids = batch.nodes[target].n_id[edges.edge_index[1]]
    return torch.bincount(graph.book.part_of(ids, target), minlength=num_parts).numpy()


def _num_seeds(batch: Batch) -> int:
    sizes = [nodes["batch_size"] for nodes in batch.nodes.values() if "batch_size" in nodes]
    return int(sum(sizes))
