"""How fast jobs are, alone and together, and who is to pause by what a judge says of that."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gnnsys.jobs.running_job import JobPace
from gnnsys.jobs.sharing_hook import SharingJudge

_JUDGE_SECONDS = 1.0


class PaceKeeper:
    """Without a judge nobody pauses; speeds alone are remembered all the same."""

    def __init__(self, judge: SharingJudge | None) -> None:
        self._judge = judge
        self._alone: dict[str, float] = {}  # steps per second of a kind of jobs, with nobody beside
        self._next = 0.0

    def begin(self, number: int, kind: str) -> JobPace:
        return JobPace(number, kind, self._alone.get(kind))

    def change(self, paces: Sequence[JobPace]) -> list[JobPace]:
        """Those that are to pause or to go on from now on: `is_paused` says which. About once a second."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + _JUDGE_SECONDS
        working = [pace for pace in paces if not pace.is_paused]
        if len(working) == 1 and working[0].rate is not None:
            self._alone[working[0].kind] = working[0].rate
        for pace in paces:
            pace.alone = self._alone.get(pace.kind)
        if self._judge is None:
            return []
        paused = set(self._judge.judge(paces, now))
        changed = [pace for pace in paces if (pace.number in paused) != pace.is_paused]
        for pace in changed:
            pace.is_paused = not pace.is_paused
        return changed
