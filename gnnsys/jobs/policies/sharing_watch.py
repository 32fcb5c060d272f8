"""Watches jobs that run together, and says who is to pause where sharing does not pay.

A job's speed alone is known from jobs of its kind. Where it is not, and the same jobs have run together for a while,
the others pause for a moment and it is measured; short jobs are never stopped for that. A pause is between two steps,
and memory stays: when somebody ends, who pauses goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gnnsys.jobs.policies.sharing import SharingRecord, relative_speeds
from gnnsys.jobs.policies.waiting_jobs import WaitingJob

_PROBE_AFTER = 10.0  # seconds: measuring each of two alone takes a tenth of that
_MOST_PROBE = 10.0  # seconds that others are paused for it


class WatchedPace(Protocol):
    """Steps per second of a job: `rate` since others came or went or paused, `alone` with nobody beside; None where not
    known."""

    @property
    def number(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def alone(self) -> float | None: ...
    @property
    def rate(self) -> float | None: ...
    @property
    def is_paused(self) -> bool: ...


class SharingWatch:
    """Made with what is remembered; `record` is what is known by now. `pays` is for `ContinuousPolicy`."""

    def __init__(self, record: SharingRecord | None = None, probe_after: float = _PROBE_AFTER) -> None:
        self.record = record or SharingRecord()
        self._probe_after = probe_after
        self._company: tuple[int, ...] = ()
        self._since = 0.0
        self._probed: tuple[int, float] | None = None  # who is measured alone, and until when at the most
        self._unmeasured: set[str] = set()  # kinds whose pace alone could not be found

    def pays(self, jobs: Sequence[WaitingJob]) -> bool:
        return self.record.pays(jobs)

    def judge(self, running: Sequence[WatchedPace], now: float) -> list[int]:
        """The numbers of the jobs that are to be paused from now on. `running` is in the order of starts."""
        company = tuple(pace.number for pace in running)
        if company != self._company:
            self._company, self._since, self._probed = company, now, None
        held = self._held(running)
        together = [pace for pace in running if pace.number not in held]
        if len(together) < 2:
            return held
        if (probed := self._still_probed(running, now)) is not None:
            return [number for number in company if number != probed]
        strangers = [pace for pace in together if pace.kind and pace.alone is None]
        if strangers:  # who has made no steps yet cannot be measured, and nobody waits for it
            ready = [pace for pace in strangers if pace.rate is not None and pace.kind not in self._unmeasured]
            if not ready or now - self._since < self._probe_after:
                return held
            self._probed = ready[0].number, now + _MOST_PROBE
            return [number for number in company if number != ready[0].number]
        if not any(pace.is_paused for pace in together) and all(pace.rate is not None for pace in together):
            self._note(together)
            held = self._held(running)
        return held

    def _still_probed(self, running: Sequence[WatchedPace], now: float) -> int | None:
        if self._probed is None:
            return None
        number, until = self._probed
        pace = next(pace for pace in running if pace.number == number)
        if pace.alone is None and now < until:
            return number
        if pace.alone is None:
            self._unmeasured.add(pace.kind)
        self._probed = None
        return None

    def _note(self, together: Sequence[WatchedPace]) -> None:
        kinds = [pace.kind for pace in together]
        if all(kinds):
            rates = {pace.number: pace.rate for pace in together if pace.rate is not None}
            alone = {pace.number: pace.alone for pace in together if pace.alone is not None}
            self.record = self.record.measured(kinds, sum(relative_speeds(rates, alone).values()))

    def _held(self, running: Sequence[WatchedPace]) -> list[int]:
        """Who must pause by what is known: whoever started first goes on, and others that may run beside."""
        going, held = list[str](), list[int]()
        for pace in running:
            if not pace.kind or self.record.pays_for([*going, pace.kind]):
                going += [pace.kind] if pace.kind else []
            else:
                held.append(pace.number)
        return held
