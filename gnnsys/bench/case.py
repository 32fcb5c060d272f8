"""What a benchmark is made of: cases, each with sides that do the same work, and the comparisons that become rows.

A benchmark is a function from a `Workload` to cases. A case's sides are built only when the case is about to run, so
listing and filtering cost nothing and memory is given back between cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gnnsys.bench.workload import Workload

OURS = "gnnsys"
Clock = Literal["host", "device", "synced"]


@dataclass(frozen=True)
class Side:
    """One way to do the case's work: called without arguments, on so many threads; what it returns can be compared.

    `clock` says whose time a call takes: "host", the processor's until the call returns; "device", the GPU's alone,
    between two events; "synced", the processor's until the GPU is done, for calls that wait for it in between.

    `foreign` is somebody else's code (see `of_peer`): what it raises is the reason why its row has no figure. What a
    side of ours raises is a failure.
    """

    call: Callable[[], Any]
    threads: int = 1
    clock: Clock = "host"
    foreign: bool = False


class Refused(Exception):
    """Raised by a foreign side that knows already that it cannot do the work; the text is the reason."""


class NotHere(RuntimeError):
    """Raised by a case that this machine cannot run at all, as it has no lab: it is missing, and has not failed."""


def of_peer(make: Callable[[], Callable[[], Any]], threads: int = 1, clock: Clock = "host") -> Side:
    """A foreign side. `make` builds its call at the warm-up, so that a peer that cannot even be built is a reason."""
    made = cache(make)
    return Side(lambda: made()(), threads, clock, foreign=True)


def refusing(reason: str) -> Side:
    """A foreign side that is known not to run."""

    def call() -> None:
        raise Refused(reason)

    return Side(call, foreign=True)


@dataclass(frozen=True)
class Unit:
    """How a figure is read. Of a rate (`work` divided by the time) and a score more is better, of anything else less.

    A "value" or a "score" is what a side returns, such as the cut of a partition or samples per second of a job that
    timed itself; the others are measured around the call.
    """

    name: str
    work: float | None = None
    kind: Literal["time", "rate", "memory", "value", "score"] = "time"

    @property
    def more_is_better(self) -> bool:
        return self.kind in ("rate", "score")

    def figure(self, measured: float) -> float:
        """From what was measured (seconds, or bytes of memory) to the figure shown."""
        if self.kind == "rate":
            assert self.work is not None
            return self.work / measured
        return {"time": measured * 1e3, "memory": measured / 1e6}.get(self.kind, measured)

    def ratio(self, ours: float, peer: float) -> float:
        """How many times better ours is: bigger is always better for us."""
        better, worse = (ours, peer) if self.more_is_better else (peer, ours)
        return better / worse if worse else float("inf")


def milliseconds() -> Unit:
    return Unit("ms")


def megabytes() -> Unit:
    return Unit("MB", kind="memory")


def value(name: str) -> Unit:
    """What the sides return, less being better."""
    return Unit(name, kind="value")


def score(name: str) -> Unit:
    """What the sides return, more being better."""
    return Unit(name, kind="score")


def rate(name: str, work: float) -> Unit:
    """Units of work per second: `rate("GB/s", 1e-9 * num_bytes)`."""
    return Unit(name, work, "rate")


@dataclass(frozen=True)
class Versus:
    """A comparison, which becomes a row: ours beside the best (or, for a bound made of parts, the worst) of `peers`.

    `target` is the least ratio we promise; without one the row informs. A required row must have run for `--check`;
    that of a peer nobody is expected to have is not required. A peer that is installed and cannot do the work leaves no
    verdict: neither a miss nor a win.
    """

    peers: tuple[str, ...]
    target: float | None = None
    pick: Literal["best", "worst"] = "best"
    required: bool = True
    label: str | None = None


@dataclass(frozen=True)
class Case:
    """The same work done by several sides.

    `sides()` builds them by name; `ours` names the one that is us. `missing` maps a peer that could not be had to the
    reason. `limit` names the side whose figure is the physical limit of this machine (a memcpy of the same bytes).
    `agree`, where given, is how far every result may be from ours before anything is timed, as a share of its norm.
    """

    name: str
    unit: Unit
    sides: Callable[[], Mapping[str, Side]]
    versus: tuple[Versus, ...]
    ours: str = OURS
    limit: str | None = None
    agree: float | None = None
    repeats: int | None = None
    missing: Mapping[str, str] | None = None


Benchmark = Callable[["Workload"], Iterator[Case]]
