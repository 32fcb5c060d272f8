"""Afterwards: after some batches of a run with a plan, one line that says what was predicted and what it takes.

A loader tells it when each batch was taken (`DistGraph.plan_watch`). `profile_drift` says which part of a profile was
wrong, from the profile that a run's traces make.
"""

from __future__ import annotations

from gnnsys.planning.profile.job_profile import JobProfile

ALLOWED = 0.15  # of the seconds of an epoch
WARM, WATCHED = 5, 50  # batches
_PARTS = {
    "bytes that parts send": lambda share: share.at_home().bytes_in.sum(1),
    "core-seconds of serving": lambda share: share.serving.sum(1),
    "core-seconds of sampling": lambda share: share.sampling,
    "core-seconds of fetching": lambda share: share.fetching,
    "seconds of computing": lambda share: share.computing,
}


class PlanWatch:
    """`seconds_per_epoch` was predicted, `binds` is what the plan says of it. The first batches are not counted."""

    def __init__(self, seconds_per_epoch: float, binds: str, *, warm: int = WARM, batches: int = WATCHED) -> None:
        if not seconds_per_epoch > 0 or batches < 1 or warm < 0:
            raise ValueError(f"a plan predicts seconds of more than 0, got {seconds_per_epoch}")
        self._said, self._binds, self._warm, self._batches = seconds_per_epoch, binds, warm, batches
        self._taken = 0
        self._began = 0.0

    def take(self, now: float, batches_per_epoch: int) -> str | None:
        """A batch was taken at `now` (seconds of any clock); the line, once, when enough were."""
        if self._taken == self._warm:
            self._began = now
        self._taken += 1
        if self._taken != self._warm + self._batches + 1:
            return None
        measured = (now - self._began) / self._batches * batches_per_epoch
        off = measured / self._said - 1
        line = f"an epoch takes {measured:.3g} s, the plan said {self._said:.3g} s ({off:+.0%}); {self._binds}"
        if abs(off) <= ALLOWED:
            return line
        return (
            f"{line}. To see which part of the profile was wrong: loader.save_trace(...) on every rank, then "
            "gnnsys profile PARTS --trace FILES --against job.json --out better.json"
        )


def profile_drift(said: JobProfile, measured: JobProfile) -> list[str]:
    """A line for each part of a profile, what is off most first. ValueError where they are of other parts."""
    if said.parts_digest != measured.parts_digest:
        raise ValueError(f"the profiles are of other parts: {said.parts_digest:08x} and {measured.parts_digest:08x}")
    trainers = len(measured.shares)
    found = []
    for name, amount in _PARTS.items():
        before = sum(float(amount(said.share(number, trainers)).mean()) for number in range(trainers)) / trainers
        after = sum(float(amount(share).mean()) for share in measured.shares) / trainers
        off = after / before - 1 if before else float(after > 0)
        found.append((abs(off), f"{name}: {after:.4g} a batch, the profile said {before:.4g} ({off:+.0%})"))
    return [line for _, line in sorted(found, key=lambda pair: -pair[0])]
