"""Passes by a plan: which way the next one goes, what the last one took, and what is given back when a way is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.fullgraph.plan.full_graph_plan import FullGraphPlan, Turn
from gnnsys.fullgraph.plan.full_graph_way import AS_GIVEN, FullGraphWay
from gnnsys.fullgraph.plan.propose_ways import cores_of_rank
from gnnsys.fullgraph.run.pass_times import PassClock
from gnnsys.planning import ComputeThreads

AUTO = "auto"
_NEW = 3  # training passes over new rows, one after the other, until sums of them are not kept


class PlannedPasses:
    """Carries out a plan. What a pass took is told to the other ranks when the next one begins, and counts from the one
    after that on: so all ranks know which way a pass goes before they speak of it.

    `given` is a plan that the user has: its way is gone from the first pass on, and nothing is tried. One that does not
    say what it was made for suits everything.
    """

    def __init__(self, given: FullGraphPlan | None) -> None:
        self.plan: FullGraphPlan | None = None
        self._given, self._is_told = given, given is not None
        self._kind: Any = None  # of the rows that the plan is for
        self._layers_version = -1
        self._turn: Turn | None = None  # of the last pass that was measured
        self._seconds: float | None = None  # what it took here
        self._threads = ComputeThreads()
        self._num_new = 0  # training passes in a row over rows that were new
        self._leaves = False  # whether what a way has taken is to be given back

    def way(self, kind: Any, epoch: int) -> FullGraphWay:
        """How a pass over rows of a kind goes; those of another kind than planned for go as without a plan."""
        if self.plan is None or kind != self._kind:
            return AS_GIVEN
        return self.plan.way_of(self.plan.turn(epoch))

    def needs_plan(self, layers_version: int) -> bool:
        """Whether there is none for the layers as they are."""
        return self.plan is None or self._layers_version != layers_version

    def make(
        self, kind: Any, layers_version: int, made_for: Mapping[str, Any], propose: Callable[[], FullGraphPlan]
    ) -> None:
        """Begins with a plan for rows of a kind: one that was given, saved, or the one that `propose` makes."""
        known = self._given if self.plan is None else None
        if known is not None and self._is_told and known.made_for:
            _check(known, made_for)
        if known is not None and (known.made_for == made_for or self._is_told):
            plan = known
        else:
            plan = propose()
            plan.made_for = dict(made_for)
        if self._is_told:
            plan.contests = []
        self.plan, self._kind, self._layers_version = plan, kind, layers_version
        self._turn = self._seconds = None

    @property
    def last(self) -> tuple[Turn | None, float | None]:
        """Whose turn the last pass was, and what it took here, where it was measured."""
        return self._turn, self._seconds

    def begin(
        self, kind: Any, epoch: int, trains: bool, device: torch.device, is_known: bool = True
    ) -> PassClock | None:
        """A pass begins, by `way`; what measures it, if something does. `trains`: a backward may follow; `is_known`:
        over rows that were given before."""
        self._turn = self._seconds = None
        if trains and kind == self._kind:
            self._num_new = 0 if is_known else self._num_new + 1
        way = self.way(kind, epoch)
        self._threads.use(cores_of_rank()) if way.all_cores else self._threads.release()
        turn = self.plan.turn(epoch) if self.plan is not None and kind == self._kind and trains else None
        if turn is None or self.plan is None:
            return None
        self.plan.began(turn)
        self._turn = turn

        def done(seconds: float) -> None:
            if self._turn is turn:
                self._seconds = seconds

        return PassClock(device, done)

    def add(self, turn: Turn | None, seconds: float | None) -> None:
        """What the slowest rank took for an earlier pass."""
        if turn is not None and self.plan is not None:
            before = self.plan.num_over
            self.plan.add(turn, seconds)
            self._leaves = self._leaves or self.plan.num_over != before

    def leave_sums(self) -> None:
        """Has rows that are another tensor in every epoch, though none of them trains, summed up behind the dense half:
        nothing that is kept of them would be read again."""
        if self._num_new >= _NEW and self.plan is not None and not self._is_told:
            self._leaves = self.plan.leave_sums("x is another tensor in every epoch") or self._leaves

    def ways_left(self, now: FullGraphWay) -> list[FullGraphWay] | None:
        """The ways that are still gone, the one of the pass that begins `now` among them, where others were left since
        this was last asked; else None."""
        if not self._leaves or self.plan is None:
            return None
        ways = [self.plan.way, *filter(None, [self.plan.other()])]
        self._leaves = now not in ways  # then it is left after this pass
        return [now, *ways]

    def refuse(self, way: FullGraphWay, error: BaseException) -> bool:
        """A pass by a way had no memory; whether another one can be gone instead."""
        if self.plan is None or way == self.plan.way or way != self.plan.other():
            return False
        self.plan.refuse((str(error) or repr(error)).splitlines()[0])
        self._turn, self._leaves = None, True
        return True

    def release(self) -> None:
        """Gives torch back the threads that it had."""
        self._threads.release()

    def saved(self) -> Tensor | None:
        """The plan as bytes, for a state_dict."""
        plan = self._given if self.plan is None else self.plan
        if plan is None:
            return None
        return torch.frombuffer(bytearray(json.dumps(plan.to_json()).encode()), dtype=torch.uint8).clone()

    def load(self, saved: Tensor) -> None:
        """Goes on with a plan that was saved, unless the user has given one. One of other ranks, layers or hardware is
        left aside when the next pass begins, and ways are tried anew."""
        if not self._is_told:
            self._given = FullGraphPlan.from_json(json.loads(saved.cpu().numpy().tobytes()))
            self.plan = None


def _check(given: FullGraphPlan, made_for: Mapping[str, Any]) -> None:
    """ValueError where a plan was made for something else."""
    for what, value in made_for.items():
        if given.made_for.get(what) != value:
            raise ValueError(
                f"this plan was made for other {what}: {given.made_for.get(what)!r}, here it is {value!r}. "
                'execution="auto" makes one'
            )
