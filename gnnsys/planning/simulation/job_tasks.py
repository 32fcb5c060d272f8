"""Writes down the tasks and edges of a job, kind by kind, for `TrainingTasks.of_job`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gnnsys.planning.simulation import tasks as kinds
from gnnsys.planning.simulation.machines import Ints
from gnnsys.planning.simulation.tasks import AFTER_END, AFTER_START, DATA, TrainingTasks


@dataclass
class JobTasks:
    """Blocks of tasks and edges as they are added. Blocks are regular, so everything here is arrays."""

    parts: int
    workers: int
    samplers_per_worker: int
    sync: str
    servers: int
    ahead: int | None
    own_samplers: bool = False
    serve_each: bool = False
    sparse: bool = False
    _tasks: list[tuple[str, Ints]] = field(default_factory=list)
    _edges: list[tuple[str, Ints, Ints, int, int]] = field(default_factory=list)
    _tasks_of: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _edges_of: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("parts", "workers", "samplers_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"tasks: {name} is {getattr(self, name)}; at least 1 is needed")
        if self.sync not in kinds.SYNCS:
            raise ValueError(f"tasks: sync is {self.sync!r}; it is one of {', '.join(kinds.SYNCS)}")
        if self.sync == "ps" and self.servers < 1:
            raise ValueError(f"tasks: servers is {self.servers}; sync 'ps' needs at least 1")
        if self.ahead is not None and self.ahead < 1:
            raise ValueError(f"tasks: ahead is {self.ahead}; at least 1 batch, or None for no limit")

    def build(self) -> TrainingTasks:
        worker_of_sampler = np.repeat(np.arange(self.workers, dtype=np.int64), self.samplers_per_worker)
        num_samplers = len(worker_of_sampler)
        store = self._add_tasks(kinds.STORE, (self.parts,))
        if not self.own_samplers:
            sampler = self._add_tasks(kinds.SAMPLER, (num_samplers,))
        worker = self._add_tasks(kinds.WORKER, (self.workers,))
        server = self._add_tasks(kinds.SERVER, (self.servers if self.sync == "ps" else 0,))
        if self.own_samplers:
            sampler = self._add_tasks(kinds.SAMPLER, (num_samplers,), worker[worker_of_sampler])
        self._add_sampling(store, sampler, worker, worker_of_sampler)
        if self.sync == "ps":
            self._add_edges(kinds.GRADIENT, worker[:, None], server[None, :])
            self._add_edges(kinds.PARAMETER, server[:, None], worker[None, :], lag=1)
        elif self.sync in ("ring", "ring-whole") and self.workers > 1:
            self._add_ring(worker, 2 * self.workers - 2 if self.sync == "ring" else 1)
        if self.sparse:
            owner = self._add_tasks(kinds.OWNER, (self.parts,), store)
            self._add_edges(kinds.PUSH, worker[:, None], owner[None, :])
            self._add_edges(kinds.PULL, owner[:, None], worker[None, :], lag=1)
        return self._tasks_and_edges(worker_of_sampler)

    def _add_sampling(self, store: Ints, sampler: Ints, worker: Ints, worker_of_sampler: Ints) -> None:
        """Stores send to samplers and samplers to their worker; `ahead` holds back what works for a worker."""
        if self.serve_each:
            hosts = np.repeat(store, len(sampler)).reshape(len(store), len(sampler))
            serving = self._add_tasks(kinds.SERVING, hosts.shape, hosts)
            self._add_edges(kinds.GRAPH, serving, np.broadcast_to(sampler, serving.shape))
        else:
            self._add_edges(kinds.GRAPH, store[:, None], sampler[None, :])
        self._add_edges(kinds.BATCH, sampler, worker[worker_of_sampler])
        if self.ahead is None:
            return
        if self.serve_each:
            self._add_signals(worker[worker_of_sampler][None, :], serving, lag=self.ahead, mode=AFTER_START)
        else:
            self._add_signals(worker[:, None], store[None, :], lag=self.ahead, mode=AFTER_START)
        self._add_signals(worker[worker_of_sampler], sampler, lag=self.ahead, mode=AFTER_START)

    def _add_ring(self, worker: Ints, steps: int) -> None:
        """Dependencies (iv) and (v). Task [k, j] adds up, or keeps, the chunk that worker j got in step k.

        A flow of step 0 leaves when its worker is done; no task of the ring starts before all workers are.
        """
        ring = self._add_tasks(kinds.RING, (steps, self.workers), np.broadcast_to(worker, (steps, self.workers)))
        barrier = self._add_tasks(kinds.BARRIER, (1,), worker[:1])
        senders = np.concatenate([worker[None, :], ring[:-1]])
        self._add_edges(kinds.CHUNK, np.roll(senders, 1, axis=1), ring)
        self._add_signals(worker, np.broadcast_to(barrier, worker.shape))
        self._add_signals(np.broadcast_to(barrier, worker.shape), ring[0])
        self._add_signals(ring[:-1], ring[1:])
        self._add_signals(ring[-1], worker, lag=1)

    def _add_tasks(self, kind: str, shape: tuple[int, ...], hosts: npt.NDArray[np.int64] | None = None) -> Ints:
        first = sum(host.size for _, host in self._tasks)
        ids = first + np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        if ids.size:
            self._tasks.append((kind, np.array(ids if hosts is None else hosts).reshape(-1)))
            self._tasks_of[kind] = (first, shape)
        return ids

    def _add_edges(self, kind: str, source: Ints, target: Ints, lag: int = 0) -> None:
        self._edges_of[kind] = (
            sum(edge[1].size for edge in self._edges),
            np.broadcast_shapes(source.shape, target.shape),
        )
        self._append(kind, source, target, lag, DATA)

    def _add_signals(self, source: Ints, target: Ints, lag: int = 0, mode: int = AFTER_END) -> None:
        self._append(kinds.SIGNAL, source, target, lag, mode)

    def _append(self, kind: str, source: Ints, target: Ints, lag: int, mode: int) -> None:
        source, target = np.broadcast_arrays(source, target)
        self._edges.append((kind, source.reshape(-1), target.reshape(-1), lag, mode))

    def _tasks_and_edges(self, worker_of_sampler: Ints) -> TrainingTasks:
        def each(values: list[int], sizes: list[int]) -> Ints:
            return np.repeat(np.array(values, dtype=np.int64), sizes)

        task_sizes = [host.size for _, host in self._tasks]
        edge_sizes = [source.size for _, source, _, _, _ in self._edges]
        return TrainingTasks(
            kind=each([kinds.TASK_KINDS.index(kind) for kind, _ in self._tasks], task_sizes),
            host=np.concatenate([host for _, host in self._tasks]),
            source=np.concatenate([edge[1] for edge in self._edges]),
            target=np.concatenate([edge[2] for edge in self._edges]),
            lag=each([edge[3] for edge in self._edges], edge_sizes),
            mode=each([edge[4] for edge in self._edges], edge_sizes),
            edge_kind=each([kinds.EDGE_KINDS.index(edge[0]) for edge in self._edges], edge_sizes),
            tasks_of=self._tasks_of,
            edges_of=self._edges_of,
            worker_of_sampler=worker_of_sampler,
            sync=self.sync,
            ahead=self.ahead,
            options=dict(own_samplers=self.own_samplers, serve_each=self.serve_each, sparse=self.sparse),
        )
