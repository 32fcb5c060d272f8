"""Settings of `gnnsys bench jobs`, for `--set`."""

from __future__ import annotations

from dataclasses import dataclass

from gnnsys.bench.jobs.queue_runs import QueueSide
from gnnsys.bench.parse_settings import from_texts
from gnnsys.bench.workload import FULL, Workload
from gnnsys.planning import FIT_STEPS

CHOSEN_WORKERS = 8
SIDES = {
    "cold": QueueSide(is_warm=False, uses_estimates=False, sharing="slices"),
    "warm": QueueSide(uses_estimates=False, sharing="slices"),
    "slices": QueueSide(workers=2, uses_estimates=False, sharing="slices"),
    "mps": QueueSide(workers=2, uses_estimates=False, sharing="mps"),
    "mps4": QueueSide(workers=4, uses_estimates=False, sharing="mps"),
    "streams": QueueSide(workers=2, uses_estimates=False, sharing="streams"),
    "base": QueueSide(policy="base", workers=2),
    "lmcf": QueueSide(policy="lmcf", workers=2),
    "bmc": QueueSide(policy="bmc", workers=2),
    "continuous2": QueueSide(policy="continuous", workers=2),
    "untold2": QueueSide(policy="continuous", workers=2, is_told=False),
    "continuous4": QueueSide(policy="continuous", workers=4),
    "continuous": QueueSide(policy="continuous", workers=CHOSEN_WORKERS),
}


@dataclass(frozen=True, kw_only=True)
class JobsSettings:
    """`epochs` of every job of a queue, on all sides; `sides` of `jobs/queues` that are run, by their names in `SIDES`;
    `orders` random ones beside the published, on `random_sides`; of the sweep the number of jobs, and batches of each;
    `fit_steps` that are run with each batch size to see whether it fits: as many as `--fit` replays."""

    epochs: int = 50
    sides: tuple[str, ...] = tuple(SIDES)
    orders: int = 1
    random_sides: tuple[str, ...] = ("warm", "lmcf")
    jobs: int = 24
    batches: int = 200
    workers: int = CHOSEN_WORKERS
    fit_steps: int = FIT_STEPS

    def __post_init__(self) -> None:
        for name in ("sides", "random_sides"):
            for side in getattr(self, name):
                if side not in SIDES:
                    raise ValueError(f"{name}={side}: choose of {', '.join(SIDES)}")
        if min(self.epochs, self.jobs, self.batches, self.workers, self.fit_steps) < 1 or self.orders < 0:
            raise ValueError("epochs, jobs, batches, workers and fit_steps must be at least 1, orders at least 0")


def settings_of(work: Workload) -> JobsSettings:
    quick = {} if work.sizes is FULL else {"epochs": 2, "orders": 0, "jobs": 3, "batches": 2, "workers": 2}
    return from_texts(JobsSettings, work.settings, quick)
