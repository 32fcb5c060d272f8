"""What the makespan was spent on: the chain of Lemma 2, walked back from the last task.

Each task and flow of a run has a cause: what ended at the very moment it started. Following causes back from the task
that ended last gives tasks and flows that cover [0, T] without a gap. A flow's seconds go to the link that limited it,
a task's to the task, or to its machine's cores while they had more threads to run than there are cores.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gnnsys.planning.simulation.machines import Ints
from gnnsys.planning.simulation.tasks import EDGE_KINDS, RING, TASK_KINDS

if TYPE_CHECKING:
    from gnnsys.planning.simulation.simulate import SimulatedRun

_WORST = 3  # how many are named in words


@dataclass(frozen=True)
class ChainPart:
    """A task or flow of the chain; `index` is its task or edge."""

    is_flow: bool
    index: int
    iteration: int
    start: float
    end: float


@dataclass(frozen=True)
class RunBinding:
    """`chain` from time 0 on, and `seconds` of the makespan by what they were spent on, most first.

    Keys of `seconds`: ("link", number), ("cores", machine), ("threads", machine) for those of its graph server, or
    (kind of task, machine).
    """

    chain: tuple[ChainPart, ...]
    seconds: dict[tuple[str, int], float]
    names: dict[tuple[str, int], str]
    waits_for_batches: int  # how often the chain went through a limit on batches ahead

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def first(self) -> tuple[str, int]:
        """What most of the makespan was spent on."""
        return next(iter(self.seconds))

    def percent(self, key: tuple[str, int]) -> float:
        return 100 * self.seconds.get(key, 0.0) / self.total if self.total else 0.0

    def lines(self) -> list[str]:
        """In words: `61% on the link into host 3, 30% ...`."""
        worst = [f"{self.percent(key):.0f}% on {self.names[key]}" for key in list(self.seconds)[:_WORST]]
        lines = [f"what binds: {', '.join(worst)}" if worst else "what binds: nothing takes time"]
        if self.waits_for_batches:
            lines.append(f"the limit on batches ahead held work back {self.waits_for_batches} times on this chain")
        return lines

    @classmethod
    def of(cls, run: SimulatedRun) -> RunBinding:
        if not len(run.times.limited):
            raise ValueError("binding: the run was simulated with explain=False; simulate it again with explain=True")
        chain, held = _walk(run)
        links = run.given.edge_links()
        seconds: dict[tuple[str, int], float] = defaultdict(float)
        waits = [_waited(run, part) for part in chain]
        for part, follower_waited in zip(chain, [*waits[1:], False], strict=True):
            for key, value in _spent(run, part, links, follower_waited):
                if value > 0:
                    seconds[key] += value
        ordered = dict(sorted(seconds.items(), key=lambda pair: -pair[1]))
        return cls(tuple(chain), ordered, {key: _words(run, key) for key in ordered}, held)


def _walk(run: SimulatedRun) -> tuple[list[ChainPart], int]:
    times, num_tasks, num_edges = run.times, run.given.num_tasks, run.given.num_edges
    first_flow = num_tasks * run.given.iterations
    item = (run.given.iterations - 1) * num_tasks + int(np.argmax(times.task_end[-1]))
    chain: list[ChainPart] = []
    held, by_start = 0, False
    while True:
        if item < first_flow:
            n, index = divmod(item, num_tasks)
            part = ChainPart(False, index, n, float(times.task_start[n, index]), float(times.task_end[n, index]))
            cause = int(times.task_cause[n, index])
        else:
            n, index = divmod(item - first_flow, num_edges)
            part = ChainPart(True, index, n, float(times.flow_start[n, index]), float(times.flow_end[n, index]))
            cause = int(times.flow_cause[n, index])
        if by_start:
            held += 1
        else:
            chain.append(part)
        if cause < 0:
            return chain[::-1], held
        item, by_start = cause // 2, bool(cause % 2)


def _waited(run: SimulatedRun, part: ChainPart) -> bool:
    """Whether a task was ready and had to wait for a thread of its server."""
    return not part.is_flow and bool(run.times.task_ready[part.iteration, part.index] < part.start)


def _spent(run: SimulatedRun, part: ChainPart, links: Ints, held_thread: bool) -> list[tuple[tuple[str, int], float]]:
    """What its seconds were spent on. `held_thread`: what follows it on the chain waited for its server's thread."""
    if part.is_flow:
        passed = links[part.index]
        limited = run.times.limited[part.iteration, part.index]
        return [(("link", int(k)), float(s)) for k, s in zip(passed, limited, strict=True) if k >= 0]
    machine = int(run.given.machine[part.index])
    slowed = float(run.times.slowed[part.iteration, part.index])
    kind = "threads" if held_thread or _waited(run, part) else TASK_KINDS[run.tasks.kind[part.index]]
    return [(("cores", machine), slowed), ((kind, machine), part.end - part.start - slowed)]


def _words(run: SimulatedRun, key: tuple[str, int]) -> str:
    what, number = key
    assert run.machines.names is not None
    if what == "link":
        return f"the {run.machines.link_names()[number]}"
    where = run.machines.names[number]
    if what == "cores":
        return f"the cores of {where}"
    if what == "threads":
        return f"the threads of the graph server on {where}"
    if what == RING:
        return f"messages of the all-reduce to {where}"
    return f"work of {what}s on {where}"


def flow_words(run: SimulatedRun, edge: int) -> str:
    """`graph from store 1 to sampler 0 of worker 0`."""
    tasks = run.tasks
    kind = EDGE_KINDS[tasks.edge_kind[edge]]
    return f"{kind} from {tasks.name(int(tasks.source[edge]))} to {tasks.name(int(tasks.target[edge]))}"
