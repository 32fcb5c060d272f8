"""Where a service asks whether jobs that run together are worth it. Who answers is a policy of its own: see
`gnnsys.jobs.policies`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gnnsys.jobs.running_job import JobPace


class SharingJudge(Protocol):
    """Told the paces of all jobs that run, about once a second."""

    def judge(self, running: Sequence[JobPace], now: float) -> Sequence[int]:
        """The jobs that are to be paused from now on; all others go on. A paused job keeps its memory."""
        ...
