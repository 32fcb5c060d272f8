"""The driver of bins: each runs once, behind all that it waits for; of those that may run the first in order does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from gnnsys.fullgraph.plan.bins import Bin
from gnnsys.fullgraph.run.bin_scheduler import BinScheduler
from gnnsys.fullgraph.run.pass_times import Times


class Work:
    """Bins that wait for each other and for messages; notes in which order what happens."""

    is_back = False

    def __init__(self, opens: dict[Any, list[Bin]]) -> None:
        self.opens, self.ran, self.came = opens, [], []

    def order(self, here: Bin) -> tuple[int, ...]:
        return here.step, here.number

    def bring(self, here: Bin) -> None:
        pass

    def compute(self, here: Bin, done: Any) -> None:
        self.ran.append(here)

    def done(self, here: Bin) -> list[Bin]:
        return self.opens.get(here, [])

    def receive(self, token: Any) -> list[Bin]:
        self.came.append((token, len(self.ran)))
        return self.opens[token]


class Exchange:
    """Messages, of which one comes each time that somebody asks and is ready to wait, and some before."""

    def __init__(self, tokens: list[str], draws: random.Random) -> None:
        self._tokens, self._draws = tokens, draws

    def arrival(self, wait: bool) -> str | None:
        return self._tokens.pop() if self._tokens and (wait or self._draws.random() < 0.3) else None


def scheduler(steps: list[list[Bin]], exchange: Exchange, first_step: int = 0) -> BinScheduler:
    plan = SimpleNamespace(steps=[SimpleNamespace(bins=bins) for bins in steps])
    return BinScheduler(SimpleNamespace(plan=plan, mover=None, times=Times()), exchange, first_step)


def bins(*sizes: int) -> list[list[Bin]]:
    return [[Bin(n, n + 1, step=s, number=n) for n in range(size)] for s, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(20))
def test_bins_run_once_and_behind_all_that_they_wait_for(seed: int):
    draws = random.Random(seed)
    steps = bins(*(draws.randrange(1, 6) for _ in range(4)))
    messages = [f"message {n}" for n in range(5)]
    opens: dict[Any, list[Bin]] = {}
    work, exchange = Work(opens), Exchange(list(messages), draws)
    driver = scheduler(steps, exchange)
    driver.expect(len(messages))
    for s, step in enumerate(steps):
        for each in [*(steps[s - 1] if s else []), *messages]:
            opens.setdefault(each, [])
            some = [here for here in step if draws.random() < 0.4]
            opens[each] += some
            driver.wait(some)
    driver.run(work)
    assert sorted(work.ran, key=work.order) == [here for step in steps for here in step] and driver.num_left == [0] * 4
    when = {here: n for n, here in enumerate(work.ran)}
    assert all(when[here] < when[after] for here in when for after in opens.get(here, []))
    assert len(work.came) == len(messages)
    assert all(num_ran <= when[after] for token, num_ran in work.came for after in opens[token])


def test_of_the_bins_that_may_run_the_first_in_order_does():
    steps = bins(3, 2)
    work = Work({steps[0][2]: [steps[1][0]]})
    driver = scheduler(steps, Exchange([], random.Random(0)))
    driver.wait([steps[1][0]])
    driver.run(work)
    assert work.ran == [*steps[0], *steps[1]]


def test_bins_in_turn_keep_it_and_steps_before_the_first_have_none():
    steps = bins(2, 4)
    work = Work({"late": [steps[1][3]]})
    driver = scheduler(steps, Exchange(["late"], random.Random(0)), first_step=1)
    driver.in_turn(steps[1][::-1])
    driver.wait([steps[1][3]])
    driver.expect(1)
    driver.run(work)
    assert work.ran == steps[1][::-1]
