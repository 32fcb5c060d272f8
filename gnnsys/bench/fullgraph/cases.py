"""The rows of `gnnsys bench fullgraph`: an epoch's seconds and bytes, beside bounds and other ways to do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gnnsys.bench.case import OURS as OURS_SIDE
from gnnsys.bench.case import Case, Unit, Versus, value
from gnnsys.bench.fullgraph.jobs import FullGraphJobs, megabits
from gnnsys.bench.fullgraph.variant import FULL, INTER, INTRA, ONE_BIN, OURS, PARTITIONERS, REPLICATED, SEQUENTIAL
from gnnsys.bench.lab_jobs import NOTHING, SideFigures, job_case
from gnnsys.bench.workload import Workload

LINK, UNLIMITED = "busiest link", "unlimited links"
SECONDS, MEGABYTES, SHARE, MEGABITS = value("s"), value("MB"), value("% of epoch"), value("Mbit/s")
EDGES, QUOTA = value("edges"), value("% of quota")
ITEM = 4  # bytes of a float32


def schedule(workload: Workload) -> Iterator[Case]:
    """The paper's variants (G3, 4.6.7) where communication takes as long as computing, each with its bound.

    Sequential is the better of two, in as many bins as the others and in one. The limit is the larger of the same
    variant on unlimited links and what the busiest link carries over its rate.
    """
    jobs = _jobs(workload)
    yield job_case("schedule/rate of links", MEGABITS, {OURS_SIDE: lambda: megabits(jobs.rate)}, NOTHING)
    yield job_case("schedule/communication, sequential", SHARE, {OURS_SIDE: lambda: _communication(jobs)}, NOTHING)
    yield job_case("schedule/quota used, full", QUOTA, {OURS_SIDE: lambda: _quota(jobs)}, NOTHING)
    for name in (ONE_BIN, SEQUENTIAL, INTER, INTRA, FULL):
        targets = (1.6, 1 / 1.25) if name == FULL else (None, None)
        yield from _variant(jobs, name, *targets)
    for limited in (True, False):
        for number in jobs.settings.sweep:
            yield _bins(jobs, number, limited)


def _variant(jobs: FullGraphJobs, name: str, over_sequential: float | None, of_bound: float | None) -> Iterator[Case]:
    plain, one_bin = f"{SEQUENTIAL}.", f"{ONE_BIN}."  # sides, one of which is this variant itself
    figures: SideFigures = {
        OURS_SIDE: lambda: jobs.schedule(name, limited=True).seconds,
        plain: lambda: jobs.schedule(SEQUENTIAL, limited=True).seconds,
        one_bin: lambda: jobs.schedule(ONE_BIN, limited=True).seconds,
        UNLIMITED: lambda: jobs.schedule(name, limited=False).seconds,
        LINK: lambda: jobs.schedule(name, limited=True).link_seconds(jobs.rate),
        "bound": lambda: max(
            jobs.schedule(name, limited=False).seconds, jobs.schedule(name, limited=True).link_seconds(jobs.rate)
        ),
    }
    sequential = Versus((plain, one_bin), over_sequential)
    bound = Versus((UNLIMITED, LINK), of_bound, pick="worst")
    yield job_case(f"schedule/{name}", SECONDS, figures, sequential, bound, limit="bound")


def _bins(jobs: FullGraphJobs, number: int, limited: bool) -> Case:
    """How many bins are best, on limited links and on others."""
    first = f"{jobs.settings.sweep[0]} bins"
    figures: SideFigures = {
        OURS_SIDE: lambda: jobs.bins(number, limited=limited).seconds,
        first: lambda: jobs.bins(jobs.settings.sweep[0], limited=limited).seconds,
    }
    suffix = "" if limited else ", unlimited links"
    return job_case(f"schedule/bins {number}{suffix}", SECONDS, figures, Versus((first,)))


def _quota(jobs: FullGraphJobs) -> float:
    """How much of their quota hosts used where nothing else held them up: well below 100, others used this machine."""
    return 100 * jobs.schedule(FULL, limited=False).cores / jobs.settings.cpu


def _communication(jobs: FullGraphJobs) -> float:
    """The share of a sequential epoch that links add."""
    slow, fast = (jobs.schedule(ONE_BIN, limited=limited).seconds for limited in (True, False))
    return 100 * (slow - fast) / slow


def partitioners(workload: Workload) -> Iterator[Case]:
    """Ours beside the others of the paper's microbenchmark, in the full schedule, at the same rate of links."""
    jobs = _jobs(workload)
    others = [name for name in PARTITIONERS if name != OURS]
    kinds: dict[str, tuple[Unit, Callable[[str], float], float | None]] = {
        "epoch": (SECONDS, lambda name: jobs.partitioner(name).seconds, 1.0),
        "busiest link": (MEGABYTES, lambda name: jobs.partitioner(name).busiest_bytes / 1e6, None),
        "rows per exchange": (value("rows"), lambda name: float(jobs.cut_and_rows(name)[1]), None),
        "edges cut": (EDGES, lambda name: float(jobs.cut_and_rows(name)[0]), None),
    }
    for what, (unit, read, target) in kinds.items():
        figures = {OURS_SIDE if name == OURS else name: partial(read, name) for name in PARTITIONERS}
        versus = [Versus((name,), target) for name in others]
        yield job_case(f"partitioners/{what}", unit, figures, *versus)


def payload(workload: Workload) -> Iterator[Case]:
    """Bytes of rows and their gradients beside the least that must travel, and what the kernel counted beside those.

    The least: per exchange every node's row once to every other rank that needs it, forward and back for each layer
    but the first, whose rows travel once per run; as wide as they are, or as the layer makes them if that is less.
    """
    jobs = _jobs(workload)
    s = jobs.settings

    def rows() -> int:
        return jobs.cut_and_rows(OURS)[1]

    def width() -> int:
        """Of all exchanges of an epoch's way there together: what the layers after the first read."""
        return s.hidden * (s.layers - 2) + min(s.hidden, s.num_classes)

    def first() -> float:
        epoch = jobs.schedule(FULL, limited=True).first
        return sum(rank["num_bytes"] for rank in epoch["ranks"])

    each: SideFigures = {
        OURS_SIDE: lambda: jobs.schedule(FULL, limited=True).payload / 1e6,
        "least": lambda: 2 * rows() * width() * ITEM / 1e6,
    }
    yield job_case("bytes/an epoch", MEGABYTES, each, Versus(("least",), 1 / 1.02), limit="least")
    once: SideFigures = {
        OURS_SIDE: lambda: first() / 1e6,
        "least": lambda: rows() * (2 * width() + s.num_features) * ITEM / 1e6,
    }
    yield job_case("bytes/the first epoch", MEGABYTES, once, Versus(("least",), 1 / 1.02), limit="least")
    wire: SideFigures = {
        OURS_SIDE: lambda: jobs.schedule(FULL, limited=True).wire_bytes / 1e6,
        "payload": lambda: jobs.schedule(FULL, limited=True).payload / 1e6,
    }
    yield job_case("bytes/on the wire", MEGABYTES, wire, Versus(("payload",)), limit="payload")


def replication(workload: Workload) -> Iterator[Case]:
    """The full schedule beside every rank computing what its nodes depend on, over layers and widths (4.6.5, 4.6.6).

    Replication needs no links, so it is judged where links cost neither side anything; it can be no more times slower
    than the edges it computes are more.
    """
    jobs = _jobs(workload)
    shapes = {f"{depth} layers": depth for depth in jobs.settings.depths}
    shapes |= {f"width {width}": jobs.settings.layers for width in jobs.settings.widths}
    for name, depth in shapes.items():
        target = 2.0 if name.endswith("layers") and depth >= 3 else None
        yield _replicated(jobs, name, False, target)
        yield _replicated(jobs, name, True, None)
        edges: SideFigures = {
            OURS_SIDE: partial(_edges, jobs, name, FULL, depth),
            REPLICATED: partial(_edges, jobs, name, REPLICATED, 1),
        }
        yield job_case(f"replication/{name}/edges", value("M edges"), edges, Versus((REPLICATED,)))


def _replicated(jobs: FullGraphJobs, name: str, limited: bool, target: float | None) -> Case:
    figures: SideFigures = {
        OURS_SIDE: lambda: jobs.shape(name, FULL, limited=limited).seconds,
        REPLICATED: lambda: jobs.shape(name, REPLICATED, limited=limited).seconds,
    }
    suffix = "limited links" if limited else "epoch"
    return job_case(f"replication/{name}/{suffix}", SECONDS, figures, Versus((REPLICATED,), target))


def _edges(jobs: FullGraphJobs, name: str, variant: str, times: int) -> float:
    """That all ranks aggregate over in an epoch's forward pass."""
    return times * sum(rank["edges"] for rank in jobs.shape(name, variant, limited=False).facts) / 1e6


BENCHMARKS = [schedule, partitioners, payload, replication]


def _jobs(workload: Workload) -> FullGraphJobs:
    return workload.once("fullgraph/jobs", lambda: FullGraphJobs(workload))
