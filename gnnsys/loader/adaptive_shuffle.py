"""When a loader shuffles: always, never, or (`shuffle="adaptive"`) once the curve of validation scores has bent.

Inputs that are in the order of parts share neighbours with those beside them, so that batches in order read less.
Shuffled batches give the better model. So a model is first trained in order, and shuffled batches finish it (DAHA,
3.2.1).

Ranks tell each other their scores whenever an epoch begins, which all of them do, not when they observe, which perhaps
one of them does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from gnnsys.loader.elbow import elbow_of
from gnnsys.loader.schedule import ADAPTIVE, Schedule, ShuffleStart
from gnnsys.seeds import Ranks

NAME = "shuffling"  # where it is in a loader's state


class SeenScores(NamedTuple):
    """What is known of the curve: `scores`, one for each epoch that had one, are the same on all ranks.

    `observed` is this rank's since the last epoch began, `start` the first epoch that is shuffled, where it is known.
    """

    scores: list[float]
    observed: float | None
    start: int | None

    def shuffles(self, epoch: int) -> bool:
        return self.start is not None and epoch >= self.start


class AdaptiveShuffle:
    """Decides for a loader and its ranks when shuffling begins, where the schedule is adaptive, and tells the schedule.

    Of another schedule there is nothing to decide, nor to remember.
    """

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule, self._ranks = schedule, ranks
        self._scores: list[float] = []
        self._observed: float | None = None

    @property
    def is_adaptive(self) -> bool:
        return self._schedule.shuffle == ADAPTIVE

    @property
    def _start(self) -> ShuffleStart:
        return self._schedule.shuffle_start

    def observe(self, score: Any) -> None:
        """Of several scores in an epoch the last one counts. One that is not finite is none."""
        if not self.is_adaptive:
            raise ValueError(f'observe is for loaders with shuffle="{ADAPTIVE}", not shuffle={self._schedule.shuffle}')
        found = _as_score(score)
        self._observed = found if math.isfinite(found) else None

    def agree(self, epoch: int, *, goes_on: bool) -> bool:
        """Whether shuffling begins, with the first epoch that none of the ranks has begun; `epoch` is that of this one.

        All ranks call this whenever they begin to iterate, and are told the same. `goes_on`: with the rest of an epoch,
        in which more may be observed.
        """
        if not self.is_adaptive or self._start.epoch is not None:
            return False
        told = self._exchange((None if goes_on else self._observed, epoch))
        self._observed = self._observed if goes_on else None
        score = _mean([score for score, _ in told])
        if score is None:
            return False
        self._scores.append(score)
        if elbow_of(self._scores) is None:
            return False
        self._start.epoch = max(epoch for _, epoch in told)
        return True

    def _exchange(self, mine: tuple[float | None, int]) -> list[tuple[float | None, int]]:
        """What every rank has to say. The process group is that of all ranks."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if world_size == 1:
            return [mine]
        has_group = dist.is_available() and dist.is_initialized()
        if not has_group or dist.get_world_size() != world_size:
            raise RuntimeError(
                f"rank {rank} of {world_size} has no process group of all ranks to agree in when to shuffle: leave "
                "gnnsys.init(process_group=...) as it is, or make one before the loader"
            )
        told: list[Any] = [None] * world_size
        try:
            dist.all_gather_object(told, mine)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} has begun epoch {mine[1]}, and other ranks have not come to agree whether to shuffle it: "
                f"all ranks must iterate over a loader with shuffle='adaptive' equally often ({error})"
            ) from error
        return told

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a loader's state has of it."""
        told = {"scores": list(self._scores), "observed": self._observed, "start": self._start.epoch}
        return {NAME: told} if self.is_adaptive else {}

    def read(self, states: Sequence[Mapping[str, Any]]) -> SeenScores:
        """What loaders with these states, of one rank or of all, have seen; ValueError where they do not agree."""
        if not self.is_adaptive:
            return SeenScores([], None, self._start.epoch)
        seen = [_from_state(state.get(NAME)) for state in states]
        if any((each.scores, each.start) != (seen[0].scores, seen[0].start) for each in seen):
            raise ValueError("these states are not of one moment: ranks have seen different scores")
        return seen[0]._replace(observed=_mean([each.observed for each in seen]))

    def go_on_with(self, seen: SeenScores) -> bool:
        """Whether other epochs are shuffled than before."""
        before = self._start.epoch
        self._scores, self._observed, self._start.epoch = list(seen.scores), seen.observed, seen.start
        return self._start.epoch != before


def _from_state(state: Any) -> SeenScores:
    if state is None:  # of a loader that was not adaptive
        return SeenScores([], None, None)
    try:
        observed, start = state["observed"], state["start"]
        return SeenScores(
            [float(score) for score in state["scores"]],
            None if observed is None else float(observed),
            None if start is None else int(start),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the state of a loader: when it shuffles is {state!r}") from error


def _as_score(score: Any) -> float:
    try:
        if not isinstance(score, (str, bytes, bool)):
            return float(score)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's, of several numbers
        pass
    raise ValueError(f"observe takes one number, a validation score of which more is better, got {score!r}")


def _mean(scores: Sequence[float | None]) -> float | None:
    """Exact before it is rounded: of equal scores it is that score, however many ranks have it."""
    given = [score for score in scores if score is not None]
    return statistics.mean(given) if given else None
