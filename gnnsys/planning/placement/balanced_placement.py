"""Placements whose busiest link and cores have as little to do as can be: Algorithm 2 of DGTP with a limit on time.

Tasks of a kind are nearly alike. So what a machine's links and cores have to do follows from how many samplers, workers
and servers it has (`machine_seconds`). With a limit of T seconds a machine can hold some of these triples and not
others, and whether they add up to the job is the question that Algorithm 2 answers. The least T that can be kept is one
of the entries of that table, and halving finds it: about 0.1 s for 16 machines and 101 tasks. A random walk of 10,000
steps stays up to 40% above it there, because a move pays only if it relieves the busiest link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gnnsys.planning.placement.first_placement import NoPlacement, what_lacks, with_identities
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import SAMPLER, SERVER, WORKER, Floats, Ints
from gnnsys.planning.simulation.tasks import DATA, TASK_KINDS

APART = (1.0, 2.0, 4.0, 8.0)  # weights of a batch that crosses machines
_KINDS = (SAMPLER, WORKER, SERVER)
_TIE = 1e-3  # what a machine has to do, beside a sampler that is away


def balanced_placements(problem: PlacementProblem, apart: Sequence[float] = APART) -> list[Ints]:
    """A placement for each weight in `apart` that fits and has the least busiest link, different ones. Stores stay.

    A batch from a sampler elsewhere counts `apart` times its bytes. Under `oes` a flow of many bytes has the rate of a
    small one that shares its link, and takes longer than its bytes say. `NoPlacement` where nothing fits.
    """
    traffic = TaskTraffic.of(problem, certain=False)
    found: dict[bytes, Ints] = {}
    for weight in apart if traffic.batch else apart[:1]:
        seconds = machine_seconds(problem, traffic, weight)
        _, triples = _least_limit(problem, seconds)
        placed = with_identities(triples, problem.counts, problem.store_machine)
        found.setdefault(placed.tobytes(), placed)
    return list(found.values())


def placement_floor(problem: PlacementProblem) -> float:
    """Seconds that the busiest link or cores need under every placement with stores where they are: no search finds a
    faster one. Every task counts as the least of its kind, so it is a bound also where they differ."""
    traffic = TaskTraffic.of(problem, certain=True)
    return _least_limit(problem, machine_seconds(problem, traffic, 1.0))[0]


@dataclass(frozen=True)
class TaskTraffic:
    """Bytes and core-seconds of all iterations, by kind of task (rows SAMPLER, WORKER, SERVER).

    `into`, `out`   [3, M]: of one task on machine m, from and to stores elsewhere.
    `given`, `kept` [3, M]: `given` all tasks of a kind take from the stores of m; `kept` is one task's part of it.
    `taken`, `own`  [3, M]: the same of what tasks send to the stores of m.
    """

    into: Floats
    out: Floats
    given: Floats
    kept: Floats
    taken: Floats
    own: Floats
    batch: float  # from a sampler to its worker
    gradient: float  # from a worker to a server
    parameter: float  # and back
    work: Floats  # [3, M], on its machine
    store_work: Floats  # [M]

    @classmethod
    def of(cls, problem: PlacementProblem, *, certain: bool) -> TaskTraffic:
        """Means over the tasks of a kind; with `certain`, what every one of them has at least, or at most where it is
        subtracted."""
        tasks, demands, counts = problem.tasks, problem.demands, problem.counts
        num_machines, num_placed = problem.machines.num_machines, counts.num_placed
        sums = _volumes(problem)
        at = np.zeros((counts.num_stores, num_machines))
        at[np.arange(counts.num_stores), problem.store_machine] = 1.0
        from_machine = sums[: counts.num_stores].T @ at  # [placed, M]: into a task, from the stores of m
        to_machine = sums[:, : counts.num_stores] @ at
        kinds = counts.kind()
        least, most = (np.min, np.max) if certain else (np.mean, np.mean)

        def each(values: Floats, pick: object) -> Floats:
            rows = [values[kinds == kind] for kind in _KINDS]
            return np.stack([pick(row, axis=0) if len(row) else np.zeros(values.shape[1]) for row in rows])  # type: ignore[operator]

        def total(values: Floats) -> Floats:
            return np.stack([values[kinds == kind].sum(axis=0) for kind in _KINDS])

        samplers, workers, servers = (np.flatnonzero(kinds == kind) for kind in _KINDS)
        batches = sums[samplers[:, None], workers[None, :]].sum(axis=1)
        seconds = demands.seconds.sum(axis=0) * demands.threads
        speeds = np.stack([problem.machines.speed(kind) for kind in TASK_KINDS])[tasks.kind]  # [tasks, M]
        work = np.zeros((num_placed, num_machines))
        np.add.at(work, tasks.host, seconds[:, None] / speeds)
        stores = work[: counts.num_stores]
        return cls(
            into=each(from_machine.sum(axis=1, keepdims=True) - from_machine, least),
            out=each(to_machine.sum(axis=1, keepdims=True) - to_machine, least),
            given=total(from_machine),
            kept=each(from_machine, most),
            taken=total(to_machine),
            own=each(to_machine, most),
            batch=float(least(batches)) if len(batches) else 0.0,
            gradient=float(least(sums[workers[:, None], servers])) if len(servers) and len(workers) else 0.0,
            parameter=float(least(sums[servers[:, None], workers])) if len(servers) and len(workers) else 0.0,
            work=each(work, least),
            store_work=(stores * at).sum(axis=0),
        )


def _volumes(problem: PlacementProblem) -> Floats:
    """[placed, placed]: bytes of all iterations between tasks that are placed, with those that sit with them."""
    tasks, demands = problem.tasks, problem.demands
    arrives = np.arange(demands.iterations)[:, None] + tasks.lag[None, :] < demands.iterations
    volume = (demands.volume * arrives).sum(axis=0) * (tasks.mode == DATA)
    sums = np.zeros((problem.counts.num_placed,) * 2)
    np.add.at(sums, (tasks.host[tasks.source], tasks.host[tasks.target]), volume)
    return sums


def machine_seconds(problem: PlacementProblem, traffic: TaskTraffic, apart: float) -> Floats:
    """[M, samplers + 1, workers + 1, servers + 1]: seconds that the links or cores of a machine need where it has so
    many tasks of each kind; infinite where they do not fit. Chunks of a ring and uplinks are left out."""
    counts, machines, resources = problem.counts, problem.machines, problem.resources
    left = resources.behind_stores(problem.store_machine)
    most = [_most(left, resources.demand[kind], number) for kind, number in zip(_KINDS, counts.by_kind, strict=True)]
    here = np.stack(np.meshgrid(*[np.arange(number + 1) for number in most], indexing="ij"))  # [3, s, w, p]
    samplers, workers, servers = here
    all_workers, all_servers = counts.num_workers, counts.num_servers
    beside = counts.samplers_per_worker * workers
    batches_out = apart * traffic.batch * np.maximum(0, samplers - beside)
    batches_in = apart * traffic.batch * np.maximum(0, beside - samplers)
    to_servers = traffic.gradient * workers * (all_servers - servers) + traffic.parameter * servers * (
        all_workers - workers
    )
    from_servers = traffic.parameter * workers * (all_servers - servers) + traffic.gradient * servers * (
        all_workers - workers
    )
    cores = np.full(machines.num_machines, np.inf) if machines.cores is None else machines.cores
    found = []
    for m in range(machines.num_machines):

        def of_tasks(by_kind: Floats, here: Ints = here, m: int = m) -> Floats:
            return np.tensordot(by_kind[:, m], here, axes=1)

        into = of_tasks(traffic.into) + traffic.taken[:, m].sum() - of_tasks(traffic.own) + batches_in + from_servers
        out = of_tasks(traffic.out) + traffic.given[:, m].sum() - of_tasks(traffic.kept) + batches_out + to_servers
        work = of_tasks(traffic.work) + traffic.store_work[m]
        links = np.maximum(into / machines.rate_in[m], out / machines.rate_out[m])
        takes = np.tensordot(resources.demand.T, here, axes=1)  # [resources, s, w, p]
        fits = (takes <= left[m][:, None, None, None]).all(axis=0)
        found.append(np.where(fits, np.maximum(links, work / cores[m]), np.inf))
    return np.stack(found)


def _most(left: Floats, demand: Floats, number: int) -> int:
    """How many tasks of a kind one machine can hold at most."""
    takes = demand > 0
    if not takes.any() or not number:
        return number
    return int(np.clip(np.floor(left[:, takes] / demand[takes]).min(axis=1).max(), 0, number))


def _least_limit(problem: PlacementProblem, seconds: Floats) -> tuple[float, Ints]:
    """The least limit under which machines hold all tasks, and how many of each kind each has, [M, 3]."""
    limits = np.unique(seconds[np.isfinite(seconds)])
    packing = _Packing(problem, seconds)
    if not len(limits) or not packing.reaches(limits[-1]):
        raise NoPlacement(what_lacks(problem.resources, problem.counts, problem.store_machine))
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if packing.reaches(limits[middle]):
            high = middle
        else:
            low = middle + 1
    return float(limits[high]), _fewest_apart(problem, seconds, limits[high])


class _Packing:
    """Which totals (samplers, workers, servers) the first i machines can have, as bits of one number: a triple that the
    next machine may hold shifts all of them at once. Between two rows there is room for what is beyond the total, and
    it is masked away."""

    def __init__(self, problem: PlacementProblem, seconds: Floats) -> None:
        counts = problem.counts
        self._seconds, self._total = seconds, counts.by_kind
        most = [size - 1 for size in seconds.shape[1:]]
        widths = [total + extra + 1 for total, extra in zip(self._total, most, strict=True)]
        self._strides = (1, widths[0] * widths[2], widths[0])  # of a sampler, a worker, a server
        rows = [
            (workers * self._strides[1] + servers * self._strides[2])
            for workers in range(self._total[1] + 1)
            for servers in range(self._total[2] + 1)
        ]
        line = (1 << (self._total[0] + 1)) - 1
        self._mask = 0
        for row in rows:
            self._mask |= line << row
        self._goal = self._bit(self._total)

    def _bit(self, triple: Iterable[int]) -> int:
        return sum(int(number) * stride for number, stride in zip(triple, self._strides, strict=True))

    def reaches(self, limit: float) -> bool:
        """Whether machines hold all tasks under a limit."""
        reached = 1
        for table in self._seconds:
            bits = 0
            for triple in np.argwhere(table <= limit):
                bits |= reached << self._bit(triple)
            reached = bits & self._mask
        return bool(reached >> self._goal & 1)


def _fewest_apart(problem: PlacementProblem, seconds: Floats, limit: float) -> Ints:
    """[M, 3]: of all that keep a limit, those with the fewest samplers away from their workers, and of these the ones
    with the least to do. The same table as Algorithm 2's, with what is lost so far in the place of what is held."""
    total, per_worker = problem.counts.by_kind, problem.counts.samplers_per_worker
    lost = np.full([number + 1 for number in total], np.inf)
    lost[0, 0, 0] = 0.0
    options, choices = [], []
    for table in seconds:
        triples = np.argwhere(table <= limit)
        triples = triples[(triples <= total).all(axis=1)]
        best, choice = np.full_like(lost, np.inf), np.full(lost.shape, -1, dtype=np.int64)
        for number, (samplers, workers, servers) in enumerate(triples):
            apart = abs(samplers - per_worker * workers) + _TIE * table[samplers, workers, servers] / max(limit, 1e-300)
            to = (slice(samplers, None), slice(workers, None), slice(servers, None))
            given = lost[: total[0] + 1 - samplers, : total[1] + 1 - workers, : total[2] + 1 - servers] + apart
            better = given < best[to]
            best[to][better] = given[better]
            choice[to][better] = number
        lost = best
        options.append(triples)
        choices.append(choice)
    found, at = [], np.array(total)
    for triples, choice in zip(reversed(options), reversed(choices), strict=True):
        triple = triples[choice[tuple(at)]]
        found.append(triple)
        at = at - triple
    return np.array(found[::-1], dtype=np.int64)
