"""A short reply that somebody waits for, behind bulk that nobody does: to the same process, or to four others.

One host of the lab serves, with the order that is usual and with fifo, in one process; clients on other hosts ask both
in turns. `goal` is twice the time that the reply takes alone, and 25 ms.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

from gnnsys.bench.case import OURS, Case, Versus, value
from gnnsys.bench.flows.urgent_peer import ALONE, AUTO, BULK, BULK_ALONE, FIFO, FIGURES, OTHERS, SAME, UrgentTask
from gnnsys.bench.lab_jobs import check_lab, job_case, say, trainer_environment
from gnnsys.bench.parse_settings import from_texts
from gnnsys.bench.workload import FULL, Workload
from gnnsys.lab import Command, Lab, parse_rate

PROGRAM = "gnnsys.bench.flows.urgent_peer"
GOAL, SUM = "goal", "both alone"
WAYS = {"with a key": True, "in the clear": False}
MORE = 1.03  # times what both take alone that they may take together
_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class UrgentSettings:
    """`bulk` and `urgent` are bytes of replies, `others` processes that ask for bulk."""

    rates: tuple[str, ...] = ("100mbit", "1gbit")
    bulk: int = 20_000_000
    urgent: int = 1 << 18
    others: int = 4
    turns: int = 7

    def __post_init__(self) -> None:
        for rate in self.rates:
            parse_rate(rate)

    def task(self, encrypts: bool) -> UrgentTask:
        return UrgentTask(self.bulk, self.urgent, self.turns, encrypts)


QUICK = {"rates": ("100mbit",), "bulk": 2_000_000, "turns": 2, "others": 1}


class UrgentJobs:
    """A job for each rate and way, run when a row first needs it."""

    def __init__(self, workload: Workload) -> None:
        base = {} if workload.sizes.num_nodes >= FULL.num_nodes else QUICK
        self.settings = from_texts(UrgentSettings, workload.settings, base)
        self._workload = workload

    def milliseconds(self, rate: str, way: str, order: str, what: str) -> float:
        found = self._workload.once(f"flows/urgent {rate}, {way}", lambda: self._run(rate, way))
        return 1e3 * median(found[order][what])

    def goal(self, rate: str, way: str) -> float:
        return 2 * self.milliseconds(rate, way, AUTO, ALONE) + 25

    def both(self, rate: str, way: str) -> float:
        """Milliseconds that bulk takes alone, and the link's for the urgent bytes."""
        return self.milliseconds(rate, way, AUTO, BULK_ALONE) + 8e3 * self.settings.urgent / parse_rate(rate)

    def _run(self, rate: str, way: str) -> dict[str, dict[str, list[float]]]:
        check_lab()
        folder, heard = Path(mkdtemp(dir=self._workload.folder)), list[str]()
        self.settings.task(WAYS[way]).save(folder)
        with Lab(3, rate=rate) as lab:
            started: list[Command] = []
            environment = trainer_environment()

            def begin(host: int, *words: str) -> Command:
                command = [sys.executable, "-m", PROGRAM, str(folder), *words]
                return lab.start(host, command, env=environment, heard=heard.append, known=started)

            try:
                begin(1, "serve", lab.address(1))
                for number in range(self.settings.others):
                    begin(2 + number % 2, "bulk", str(10 + number))
                result = begin(2, "ask").wait(_SECONDS)
            finally:
                for command in started:
                    command.kill()
        lines = [line for line in heard if line.startswith(FIGURES)]
        if not result.ok or not lines:
            raise RuntimeError(result.describe())
        figures: dict[str, dict[str, list[float]]] = json.loads(lines[0].removeprefix(FIGURES))
        for order, found in figures.items():
            said = ", ".join(f"{what} {1e3 * median(seconds):.0f} ms" for what, seconds in found.items())
            say(f"  {rate}, {way}, {order}: {said}")
        return figures


def urgent_behind_bulk(workload: Workload) -> Iterator[Case]:
    """How long the short reply takes, and both together."""
    jobs = UrgentJobs(workload)
    for rate in jobs.settings.rates:
        for way in WAYS:
            of = f"urgent behind bulk at {rate}, {way}"

            of_order = partial(jobs.milliseconds, rate, way)
            for name, what in (("to the same process", SAME), (f"to {jobs.settings.others} others", OTHERS)):
                sides: dict[str, Callable[[], float]] = {
                    OURS: partial(of_order, AUTO, what),
                    FIFO: partial(of_order, FIFO, what),
                    "alone": partial(of_order, AUTO, ALONE),
                    GOAL: partial(jobs.goal, rate, way),
                }
                beside = Versus((FIFO,), required=False), Versus((GOAL,), 1.0, required=False)
                yield job_case(f"{of}/{name}", value("ms"), sides, *beside, limit="alone")
            both: dict[str, Callable[[], float]] = {
                OURS: partial(of_order, AUTO, BULK),
                FIFO: partial(of_order, FIFO, BULK),
                SUM: partial(jobs.both, rate, way),
            }
            beside = Versus((FIFO,), required=False), Versus((SUM,), 1 / MORE, required=False)
            yield job_case(f"{of}/bulk and urgent", value("ms"), both, *beside, limit=SUM)
