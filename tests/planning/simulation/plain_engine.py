"""A plain engine: every flow and task has what remains of it, and every event recomputes every rate.

Slow and short: what the native engine is compared with.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from gnnsys.planning.simulation.engine import EngineInput, EngineResult
from gnnsys.planning.simulation.tasks import AFTER_START, DATA

_SAME = 1e-12  # of the time to the next event: what ends within it ends together


class PlainEngine:
    """One run over the arrays of `EngineInput`."""

    def __init__(self, given: EngineInput) -> None:
        self.given = given
        self.out_edges: list[list[int]] = [[] for _ in range(given.num_tasks)]
        for edge, source in enumerate(given.source):
            self.out_edges[source].append(edge)
        self.waiting = given.dependency_counts()
        self.result = empty_result(given)
        self.remaining: dict[int, float] = {}  # bytes by flow item
        self.order: dict[int, float] = {}  # when a flow was handed over, or how long it still needs
        self.ordered: set[int] = set()
        self.work: dict[int, float] = {}  # seconds at full speed, by task item
        self.queue: list[list[tuple[float, int]]] = [[] for _ in range(given.num_machines)]
        self.freed_by = [-1] * given.num_machines
        self.serving = [0] * given.num_machines
        self.todo: deque[tuple[str, int, int]] = deque()
        self.now = 0.0
        self.links = [tuple(passed) for passed in given.edge_links().tolist()]
        self.alone = alone_rates(given)

    def run(self) -> EngineResult:
        for item in np.flatnonzero(self.waiting.reshape(-1) == 0):
            self.todo.append(("ready", int(item), -1))
        self._settle()
        while self.remaining or self.work:
            self._advance()
        return self.result

    def _advance(self) -> None:
        flow_rates, limits = self.flow_rates()
        task_rates = self.task_rates()
        left = {item: left / flow_rates[item] for item, left in self.remaining.items() if flow_rates[item] > 0}
        left |= {item: work / task_rates[item] for item, work in self.work.items()}
        step = min(left.values())
        over = [item for item, time in left.items() if time <= step * (1 + _SAME)]
        self.now += step
        num_tasks = self.given.num_tasks * self.given.iterations
        for item in self.remaining:
            self.remaining[item] -= flow_rates[item] * step
            if limits[item] >= 0:
                self.result.limited.reshape(-1, 4)[item - num_tasks, limits[item]] += step
        for item in self.work:
            self.work[item] -= task_rates[item] * step
            self.result.slowed.reshape(-1)[item] += step * (task_rates[item] < 1)
        for item in over:
            self.todo.append(("end", item, -1))
        self._settle()

    def _settle(self) -> None:
        """Everything that follows at once from what ended now."""
        num_tasks = self.given.num_tasks * self.given.iterations
        while self.todo:
            what, item, cause = self.todo.popleft()
            if what == "ready":
                self._ready(item, cause)
            elif item < num_tasks:
                self._end_task(item)
            else:
                self._end_flow(item)
            if not self.todo:
                self._serve()

    def _serve(self) -> None:
        """Threads of servers go to the requests that came first; of those that came at once, by their number."""
        for machine, queue in enumerate(self.queue):
            while queue and self.serving[machine] < self.given.server_threads[machine]:
                came, item = min(queue)
                queue.remove((came, item))
                self.serving[machine] += 1
                if came < self.now:
                    self.result.task_cause.reshape(-1)[item] = 2 * self.freed_by[machine]
                self._start(item)

    def _release(self, task: int, iteration: int, cause: int) -> None:
        """One thing less that a task waits for."""
        if iteration < self.given.iterations:
            self.waiting[iteration, task] -= 1
            if self.waiting[iteration, task] == 0:
                self.todo.append(("ready", iteration * self.given.num_tasks + task, cause))

    def _ready(self, item: int, cause: int) -> None:
        task, result = item % self.given.num_tasks, self.result
        machine = self.given.machine[task]
        result.task_ready.reshape(-1)[item] = self.now
        result.task_cause.reshape(-1)[item] = cause
        if self.given.queued[task]:
            self.queue[machine].append((self.now, item))
        else:
            self._start(item)

    def _start(self, item: int) -> None:
        iteration, task = divmod(item, self.given.num_tasks)
        self.result.task_start[iteration, task] = self.now
        for edge in self.out_edges[task]:
            if self.given.mode[edge] == AFTER_START:
                self._release(self.given.target[edge], iteration + self.given.lag[edge], 2 * item + 1)
        if self.given.seconds[iteration, task] == 0:
            self.todo.append(("end", item, -1))
        else:
            self.work[item] = self.given.seconds[iteration, task]

    def _end_task(self, item: int) -> None:
        iteration, task = divmod(item, self.given.num_tasks)
        given, machine = self.given, self.given.machine[task]
        self.work.pop(item, None)
        self.result.task_end[iteration, task] = self.now
        self._release(task, iteration + 1, 2 * item)
        for edge in self.out_edges[task]:
            arrives = iteration + given.lag[edge]
            if given.mode[edge] == AFTER_START or arrives >= given.iterations:
                continue
            if given.mode[edge] == DATA and machine != given.machine[given.target[edge]]:
                self.result.flow_ready[iteration, edge] = self.now
                if iteration == 0 or self.result.flow_end[iteration - 1, edge] <= self.now:
                    self._start_flow(edge, iteration, 2 * item)
            else:
                self._release(given.target[edge], arrives, 2 * item)
        if given.queued[task]:
            self.serving[machine] -= 1
            self.freed_by[machine] = item

    def _start_flow(self, edge: int, iteration: int, cause: int) -> None:
        item = self.given.num_tasks * self.given.iterations + iteration * self.given.num_edges + edge
        self.result.flow_start[iteration, edge] = self.now
        self.result.flow_cause[iteration, edge] = cause
        if self.given.volume[iteration, edge] == 0:
            self.todo.append(("end", item, -1))
        else:
            self.remaining[item] = self.given.volume[iteration, edge]
            self.order[item] = self.result.flow_ready[iteration, edge]

    def _end_flow(self, item: int) -> None:
        given = self.given
        iteration, edge = divmod(item - given.num_tasks * given.iterations, given.num_edges)
        self.remaining.pop(item, None)
        self.result.flow_end[iteration, edge] = self.now
        self._release(given.target[edge], iteration + given.lag[edge], 2 * item)
        if iteration + 1 < given.iterations and self.result.flow_ready[iteration + 1, edge] <= self.now:
            self._start_flow(edge, iteration + 1, 2 * item)

    def task_rates(self) -> dict[int, float]:
        """1, or where a machine has fewer cores than threads, cores / threads."""
        threads = np.zeros(self.given.num_machines)
        for item in self.work:
            task = item % self.given.num_tasks
            threads[self.given.machine[task]] += self.given.threads[task]
        rates = {}
        for item in self.work:
            task = item % self.given.num_tasks
            machine = self.given.machine[task]
            slowed = self.given.threads[task] > 0 and threads[machine] > self.given.cores[machine]
            rates[item] = self.given.cores[machine] / threads[machine] if slowed else 1.0
        return rates

    def flow_rates(self) -> tuple[dict[int, float], dict[int, int]]:
        """Bytes per second of each active flow, and which of its links limits it."""
        first = self.given.num_tasks * self.given.iterations
        links = {item: self.links[(item - first) % self.given.num_edges] for item in self.remaining}
        name = self.given.policy
        if name == "oes":
            return self._shared(links, dict.fromkeys(links, 1.0))
        if name == "omcoflow":
            places = {item: divmod(item - first, self.given.num_edges) for item in links}
            return self._shared(
                links, {item: self.alone[e] / self.given.volume[n, e] for item, (n, e) in places.items()}
            )
        if name == "maxmin":
            return self._filled(links)
        return self._in_order(links)

    def _shared(
        self, links: dict[int, tuple[int, ...]], weights: dict[int, float]
    ) -> tuple[dict[int, float], dict[int, int]]:
        total = np.zeros(len(self.given.link_rates))
        for item, passed in links.items():
            for link in passed:
                if link >= 0:
                    total[link] += weights[item]
        rates, limits = {}, {}
        for item, passed in links.items():
            shares = [self.given.link_rates[k] / total[k] if k >= 0 else math.inf for k in passed]
            limits[item] = int(np.argmin(shares))
            rates[item] = weights[item] * min(shares)
        return rates, limits

    def _filled(self, links: dict[int, tuple[int, ...]]) -> tuple[dict[int, float], dict[int, int]]:
        rates: dict[int, float] = {}
        limits: dict[int, int] = {}
        residual = self.given.link_rates.copy()
        while len(rates) < len(links):
            count = np.zeros(len(residual))
            for item, passed in links.items():
                if item not in rates:
                    for link in passed:
                        if link >= 0:
                            count[link] += 1
            shares = np.where(count > 0, residual / np.maximum(count, 1), np.inf)
            tightest = int(np.argmin(shares))
            for item, passed in links.items():
                if item not in rates and tightest in passed:
                    rates[item], limits[item] = shares[tightest], passed.index(tightest)
                    for link in passed:
                        if link >= 0:
                            residual[link] -= shares[tightest]
        return rates, limits

    def _in_order(self, links: dict[int, tuple[int, ...]]) -> tuple[dict[int, float], dict[int, int]]:
        full = {item: min(self.given.link_rates[k] for k in passed if k >= 0) for item, passed in links.items()}
        if self.given.policy.startswith("mrtf") and set(links) != self.ordered:  # a flow has come or gone
            self.order = {item: self.remaining[item] / full[item] for item in links}
            self.ordered = set(links)
        ordered = sorted(links, key=lambda item: (self.order[item], item))
        blocking = self.given.policy.endswith("blocking")
        residual = self.given.link_rates.copy()
        rates, limits = {}, {}
        for item in ordered:
            left = [residual[k] if k >= 0 else math.inf for k in links[item]]
            limits[item] = int(np.argmin(left))
            rates[item] = max(min(left), 0.0)
            if blocking and rates[item] < full[item]:
                rates[item] = 0.0
            for link in links[item]:
                if link >= 0 and rates[item] > 0:
                    residual[link] = 0.0 if blocking else residual[link] - rates[item]
        return rates, limits


def alone_rates(given: EngineInput) -> np.ndarray:
    """[E]: the rate by `oes` of an edge's flow if only the flows to its own target were there (`omcoflow`)."""
    links, rates = given.edge_links(), np.full(given.num_edges, np.inf)
    for edge, passed in enumerate(links):
        for link in passed[passed >= 0]:
            beside = (given.target == given.target[edge]) & (links == link).any(1)
            rates[edge] = min(rates[edge], given.link_rates[link] / beside.sum())
    return rates


def empty_result(given: EngineInput) -> EngineResult:
    tasks, flows = (given.iterations, given.num_tasks), (given.iterations, given.num_edges)
    return EngineResult(
        *(np.full(tasks, np.nan) for _ in range(3)),
        np.full(tasks, -1, dtype=np.int64),
        *(np.full(flows, np.nan) for _ in range(3)),
        np.full(flows, -1, dtype=np.int64),
        np.zeros((*flows, 4)),
        np.zeros(tasks),
    )
