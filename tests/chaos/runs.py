"""The runs of chaos: what is killed in each, and when, follows from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from gnnsys.checkpoint import STAGES
from tests.chaos.job import NUM_HOSTS, Ended, Place, Plan, judge
from tests.support.faults import TARGETS, Fault

NUM_RUNS = 30
NUM_EPOCHS, NUM_STEPS = 4, 28  # of the job
_WHEN = ("step", "step", "step", "save", "save", "open", "resume")


@dataclass(frozen=True)
class Run:
    """One job and what happens to it. With an embedding a dead shard costs the job its rows; without one, nothing."""

    seed: int
    faults: tuple[Fault, ...]
    trains_rows: bool
    own_disks: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"trains_rows": self.trains_rows, "own_disks": self.own_disks}

    @property
    def costs_nothing(self) -> bool:
        """Whether ranks go on: what was stopped runs again, and a shard of immutable tables is rejoined."""
        return all(f.what == "stop" or (f.target == "shard" and not self.trains_rows) for f in self.faults)

    def __str__(self) -> str:
        job = " ".join(name for name, value in self.options.items() if value) or "immutable tables alone"
        return f"{job}; " + "; ".join(str(fault).partition(" ")[2] for fault in self.faults)


def draw(seed: int) -> Run:
    """Of every three seeds one kills a shard, one a trainer and one a leader; some kill once more while it resumes.

    From seed `NUM_RUNS` on they are stopped for a few seconds instead, which nobody may mind.
    """
    chance, target = random.Random(f"chaos {seed}"), TARGETS[seed % len(TARGETS)]
    first = Fault(seed, "kill" if seed < NUM_RUNS else "stop", target, chance.randrange(NUM_HOSTS), "", 0)
    if first.what == "stop":
        moment = f"step:{chance.randrange(1, NUM_STEPS)}"
        return Run(seed, (replace(first, moment=moment, delay=chance.randrange(30)),), True, False)
    when, every = chance.choice(_WHEN), Plan("", "").every
    if when == "step":
        faults = [replace(first, moment=f"step:{chance.randrange(1, NUM_STEPS)}", delay=chance.randrange(30))]
    elif when == "save":
        step = every * chance.randrange(1, NUM_STEPS // every + 1)
        stage = chance.choice(STAGES).replace(" ", "-")
        faults = [replace(first, moment=f"{stage}:{step}", delay=chance.choice([0, 0, 1, 5]))]
    elif when == "open":
        faults = [replace(first, moment="open", delay=chance.randrange(300))]
    else:
        faults = [replace(first, target="trainer", moment=f"step:{chance.randrange(6, NUM_STEPS)}")]
        faults.append(replace(first, moment="resume-again", delay=chance.randrange(100)))
    trains_rows = target != "shard" or chance.random() < 0.6
    return Run(seed, tuple(faults), trains_rows, chance.random() < 0.5)


def perform(place: Place, run: Run, epochs: int = NUM_EPOCHS) -> tuple[Ended, list[str]]:
    """Runs it; what it left, and what is wrong with that."""
    unbroken = place.unbroken(trains_rows=run.trains_rows, epochs=epochs)
    ended = place.run(f"seed-{run.seed}-{epochs}", run.faults, **run.options, epochs=epochs)
    problems = judge(ended, unbroken)
    return ended, problems + check_lives(run, ended)


def check_lives(run: Run, ended: Ended) -> list[str]:
    """What is wrong with how often ranks and shards began again: too often for what it cost, or never."""
    problems = []
    if run.costs_nothing and ended.restarts > 0:
        problems.append(f"ranks began again, {ended.restarts} times, where they could have gone on")
    for fault in run.faults:  # a shard that dies before it has rows is rejoined, whatever the job trains
        is_rejoined = fault.target == "shard" and ended.shard_lives[fault.machine] >= 1
        if fault.what == "kill" and ended.restarts < 1 and not is_rejoined:
            problems.append(f"nobody began again: the {fault.target} that was to be killed lived on")
    return problems
