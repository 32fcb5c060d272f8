"""Of `gnnsys bench jobs`, CoGNN's five queues run for real: jobs with PyG's layers and with ours, on random graphs of
the sizes of Table IV, under every policy and without any.

As in the paper 26 of 32 GB are for jobs (V-G.1); on a larger device another process holds the rest. Where the largest
job needs more it is that much, and where the largest two need less it is a byte less than they do, so that memory is
always scarce. Epochs are fewer than the paper's 200 and the same on all sides (`--set epochs=50`). Sides, which
`--set sides=warm,lmcf` chooses from, and for random orders `--set random_sides=warm`:

    cold         one after the other, a process per job: what a loop in a shell does
    warm         one after the other in a warm worker
    slices, mps  two at a time as they come, whatever memory they take, without and with MPS
    mps4         as mps, four at a time
    streams      two threads of one process, likewise; a job that is out of memory has failed, and so has the side
    base, lmcf, bmc                 the paper's groups, two workers, MPS
    continuous2, 4, continuous      no barrier; two, four and eight workers, MPS
    continuous2, again              the same queue once more: lengths and who disturbs whom are known
    untold2                         as continuous2, and the service estimates the jobs while it runs others
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, value
from gnnsys.bench.jobs.cognn_queues import KINDS, PUBLISHED_ORDERS, TABLE_FIVE, QueuedTask, published, random_orders
from gnnsys.bench.jobs.device_watch import only_left
from gnnsys.bench.jobs.queue_jobs import QUEUE_JOB
from gnnsys.bench.jobs.queue_runs import (
    QueuedCall,
    QueueEstimators,
    QueueRun,
    QueueService,
    TimedEstimates,
    log_to_stderr,
    make_warm,
)
from gnnsys.bench.jobs.settings import SIDES, JobsSettings, settings_of
from gnnsys.bench.jobs.stream_runs import run_streams
from gnnsys.bench.jobs.table_four import GraphSize
from gnnsys.bench.workload import FULL, Workload
from gnnsys.observe import num_usable_cores

CAPACITY, RESERVED = 26 * 2**30, 6 * 2**30
FASTER_THAN_COLD, FASTER_THAN_WARM, NEAR_ORACLE = 2.5, 1.5, 1 / 1.15
PUBLISHED = "published order"
SHORTER = {PUBLISHED: 4.0, "random order": 2.5}  # completion beside that of `warm`
AGAIN = "continuous2, again"
PAPER = {"warm": "PipeSwitch", "cold": "Default", "mps": "MPS", "base": "Base", "lmcf": "LMCF", "bmc": "BMC"}
OUT_OF_MEMORY = "runs out of memory"
_LEAST_CAPACITY = 4 * 2**30
_SMALL = GraphSize(300, 1_200, 50, 7)
_OURS = "continuous2"
_WARM_UP_BYTES = 256 << 20  # of a small job, and eight of them fit
_FIGURES: dict[str, tuple[str, Callable[[QueueRun], float]]] = {
    "makespan": ("s", lambda run: run.makespan),
    "completion": ("s", lambda run: run.completion),
    "queueing": ("s", lambda run: run.queueing),
    "device idle": ("%", lambda run: 100.0 - run.known_busy()),
    OUT_OF_MEMORY: ("runs", lambda run: float(run.num_out_of_memory)),
}


def calls_of(tasks: Sequence[QueuedTask], library: str, epochs: int, is_full: bool) -> list[QueuedCall]:
    """The jobs of a queue; on small graphs where it is only to be seen that they run."""
    calls = []
    for task in tasks:
        size = task.size if is_full else _SMALL
        arguments = {"library": library, "kind": KINDS[task.kind], "layers": task.layers, **size._asdict()}
        calls.append(QueuedCall(target=QUEUE_JOB, arguments={**arguments, "epochs": epochs}))
    return calls


def capacity_for(memory: Sequence[int]) -> int:
    """26 GB; less, so that the largest two do not fit together; more, so that the largest does. Never so little that no
    process has room for its context."""
    *_, second, largest = sorted(memory)
    return max(largest, min(CAPACITY, largest + second - 1), _LEAST_CAPACITY)


class QueueBench:
    """One queue in one order with the layers of one library; each side runs once, when first asked for."""

    def __init__(
        self, work: Workload, library: str, queue: str, order: str, tasks: Sequence[QueuedTask], ahead: SidesAhead
    ) -> None:
        self._work, self._settings, self._library, self._ahead = work, settings_of(work), library, ahead
        self.name, self.is_published = f"{library}/{queue}, {order}", order == PUBLISHED
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        is_full = work.sizes is FULL
        tasks = tasks if is_full else tasks[2:5]
        self._names = [task.name for task in tasks]
        self._calls = calls_of(tasks, library, self._settings.epochs, is_full)
        warm_up = {**self._calls[0].arguments, **_SMALL._asdict(), "epochs": 2}
        self._warm_up = QueuedCall(target=QUEUE_JOB, arguments=warm_up, memory=_WARM_UP_BYTES)

    def estimates(self) -> TimedEstimates:
        estimators = self._work.once(
            f"jobs/queues/{self._library}/estimators",
            lambda: QueueEstimators(self._work, self._warm_up, self._device),
        )
        return self._work.once(f"jobs/queues/{self.name}/estimates", lambda: estimators.find(self._calls))

    def runs(self, side: str) -> list[QueueRun]:
        """Of `side`, and of the same queue once more where it is ours."""
        return self._work.once(f"jobs/queues/{self.name}/{side}", lambda: self._runs(side))

    def _runs(self, side: str) -> list[QueueRun]:
        queues = [self._calls_for(side)]
        if side == _OURS and self.is_published:
            queues *= 2
        if SIDES[side].sharing == "streams":
            with only_left(None if self.capacity is None else self.capacity + RESERVED):
                runs = [run_streams(queues[0], self._warm_up, SIDES[side].workers, self._device)]
        else:
            with self._ahead.taken(self, side) as ready, only_left(ready.left_for(self.capacity)):
                runs = [ready.service.run(calls) for calls in queues]
        for run, again in zip(runs, ("", ", again"), strict=False):
            told = f"makespan {run.makespan:.2f} s, completion {run.completion:.2f} s, queueing {run.queueing:.2f} s"
            print(f"{self.name}, {side}{again}: {told}", file=sys.stderr, flush=True)
            print(f"    {run.told(self._names)}", file=sys.stderr, flush=True)
        return runs

    def _calls_for(self, side: str) -> list[QueuedCall]:
        if not (SIDES[side].uses_estimates and SIDES[side].is_told):
            return self._calls
        found = self.estimates().found
        return [replace(call, estimate=estimate) for call, estimate in zip(self._calls, found, strict=True)]

    @property
    def capacity(self) -> int | None:
        return capacity_for(self.estimates().memory) if self._device != "cpu" else None

    def service(self, side: str) -> QueueService:
        """Not started."""
        return QueueService(SIDES[side], self._warm_up, device=self._device, capacity=self.capacity)

    def run(self, side: str) -> QueueRun:
        return self.runs(_OURS)[1] if side == AGAIN else self.runs(_OURS if side == OURS else side)[0]


class SidesAhead:
    """The services of all sides of a queue, in the order in which they run. As many as there are cores for their
    workers are started at a time, and wait then until it is their turn: most of a start is imports."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._waiting: list[tuple[QueueBench, str]] = []
        self._ready: dict[tuple[str, str], _ReadySide] = {}
        self._failed: dict[tuple[str, str], Exception] = {}

    def add(self, bench: QueueBench, sides: Sequence[str]) -> None:
        self._waiting += [(bench, side) for side in sides if SIDES[side].sharing != "streams"]

    @contextmanager
    def taken(self, bench: QueueBench, side: str) -> Iterator[_ReadySide]:
        """It ends with the block. What kept it from starting is raised here, and no other side knows of it."""
        key = bench.name, side
        if key not in self._ready and key not in self._failed:
            self._start(bench, side)
        if key in self._failed:
            raise self._failed[key]
        ready = self._ready.pop(key)
        with closing(ready.service):
            yield ready

    def _start(self, bench: QueueBench, side: str) -> None:
        chosen = [(bench, side)]
        self._waiting = [each for each in self._waiting if each != (bench, side)]
        while self._waiting and self._num_workers([*chosen, self._waiting[0]]) <= num_usable_cores():
            chosen.append(self._waiting.pop(0))
        self._work.once("jobs/queues/log", lambda: self._work.enter(log_to_stderr()))
        services = {(each.name, name): each.service(name) for each, name in chosen}
        for service in services.values():
            self._work.enter(closing(service))
        free = _free_bytes()
        for key, service in services.items():
            try:
                service.start()
            except Exception as error:
                self._failed[key] = error
        errors = make_warm([service for key, service in services.items() if key not in self._failed])
        self._failed |= {key: errors[service] for key, service in services.items() if service in errors}
        count = sum(service.side.workers for service in services.values() if service.side.is_warm)
        each_bytes = max(free - _free_bytes(), 0) // max(count, 1)
        for key, service in services.items():
            if key in self._failed:
                service.close()
            else:
                held = service.side.workers * each_bytes if service.side.is_warm else 0
                self._ready[key] = _ReadySide(service, held)

    def _num_workers(self, sides: Sequence[tuple[QueueBench, str]]) -> int:
        return sum(SIDES[name].workers for _, name in sides if SIDES[name].is_warm)


class _ReadySide(NamedTuple):
    """`held` bytes of the device are its workers' before they have a job: about, for several sides began together."""

    service: QueueService
    held: int

    def left_for(self, capacity: int | None) -> int | None:
        """Of what is free now; its workers have their part of the reserve already."""
        return None if capacity is None else capacity + RESERVED - self.held


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def queues(work: Workload) -> Iterator[Case]:
    """The queues in the published order, and in random ones."""
    settings, is_full = settings_of(work), work.sizes is FULL
    for library in ("pyg", "gnnsys"):
        for queue in PUBLISHED_ORDERS if is_full else ("Mix",):
            ahead = SidesAhead(work)
            orders = {PUBLISHED: published(queue)}
            orders |= {
                f"random order {number}": each for number, each in enumerate(random_orders(queue, settings.orders))
            }
            for order, tasks in orders.items():
                bench = QueueBench(work, library, queue, order, tasks, ahead)
                cases = list(_cases(bench, queue, settings))
                wanted = {side for case, sides in cases if work.selects(case.name) for side in sides}
                ahead.add(bench, [side for side in dict.fromkeys((_OURS, *SIDES)) if side in wanted])
                yield from (case for case, _ in cases)


def _cases(bench: QueueBench, queue: str, settings: JobsSettings) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Each with the sides that run for it."""
    chosen = settings.sides if bench.is_published else settings.random_sides
    others = [side for side in chosen if side != _OURS]

    def sides(figure: str, side: str) -> dict[str, Side]:
        if bench.name.startswith("pyg/") and importlib.util.find_spec("torch_geometric") is None:
            raise NotHere("torch-geometric is not installed")
        read = _FIGURES[figure][1]

        def told(of: str) -> float:
            run = bench.run(of)
            return read(run if figure == OUT_OF_MEMORY else run.check())

        is_foreign = side != AGAIN and not SIDES[side].uses_estimates  # such jobs may run out of memory
        found = {OURS: Side(lambda: told(OURS)), side: Side(lambda: told(side), foreign=is_foreign)}
        method = PAPER.get(side)
        if method is not None and bench.is_published and figure in TABLE_FIVE[method]._fields:
            found[f"{side}, Table V"] = Side(lambda: 60 * getattr(TABLE_FIVE[method], figure)[queue])
        return found

    targets = {
        "makespan": {"warm": FASTER_THAN_WARM},
        "completion": {"warm": SHORTER[PUBLISHED if bench.is_published else "random order"], AGAIN: NEAR_ORACLE},
    }
    for side in (*others, *([AGAIN] if bench.is_published else [])):
        for figure, (unit, _) in _FIGURES.items():
            name = f"jobs/queues/{bench.name}, {figure} beside {side}"
            versus = Versus((side,), targets.get(figure, {}).get(side))
            run = (_OURS,) if side == AGAIN else (_OURS, side)
            yield Case(name, value(unit), partial(sides, figure, side), (versus,), repeats=1), run
    if {"cold", "warm"} <= set(chosen):
        case = Case(
            f"jobs/queues/{bench.name}, warm beside cold",
            value("s"),
            lambda: {side: Side(lambda side=side: bench.run(side).check().makespan) for side in ("warm", "cold")},  # type: ignore[misc]
            (Versus(("cold",), FASTER_THAN_COLD),),
            ours="warm",
            repeats=1,
        )
        yield case, ("warm", "cold")
    case = Case(
        f"jobs/queues/{bench.name}, estimating",
        value("s"),
        lambda: {OURS: Side(lambda: bench.estimates().seconds), "a makespan": Side(lambda: bench.run(OURS).makespan)},
        (Versus(("a makespan",)),),
        repeats=1,
    )
    yield case, (_OURS,)


BENCHMARKS: list[Benchmark] = [queues]
