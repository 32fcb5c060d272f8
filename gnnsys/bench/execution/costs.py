"""`gnnsys bench execution --only costs`: how long a machine's profile takes, and how far its predictions are off.

Predictions are asked about what was not profiled: other rows, half of them of other widths, and batches of two graphs
that nobody has seen. Beside them stands Eq. 2 of DAHA as written, which knows no widths: it is fitted to ten blocks of
one width, and asked about the others of this width alone. And beside each error stands the noise: how far the same
shapes are apart when they are measured once more, in other memory. No model is nearer than that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.gpu.inputs import device, is_gpu
from gnnsys.bench.lab_jobs import say
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import EDGE, NODE, Graph, rmat, sbm
from gnnsys.observe import num_usable_cores
from gnnsys.ops import CSC, HAS_CUDA_KERNELS
from gnnsys.planning import (
    CostModel,
    CostProbe,
    CubicCost,
    DeviceProbes,
    HostProbes,
    MachineProfile,
    Observation,
    ProbeTimer,
    compute_threads,
    profile_machine,
    random_block,
    sampling_threads,
    time_probes,
)
from gnnsys.sampling import NeighborSampler, SampleKey

LIMIT, EQUATION, TWICE = "limit", "Eq. 2, ten points", "measured twice"
PROFILE_SECONDS, FIT_SECONDS, MEAN_PERCENT, WORST_PERCENT = 20.0, 1.0, 6.0, 20.0
HOST = ("sample/host", "gather/host", "spmm/host", "product/host", "backward/host", "optimizer/host")
ON_GPU = (
    "sample/device", "sample/pinned", "gather/device", "gather/bus", "gather/cached", "copy/up", "copy/down",
    "copy/pageable", "compact/device", "spmm/device", "product/device", "backward/device", "optimizer/device",
    "launch/device",
)  # fmt: skip
BY_EQUATION = ("spmm/host", "spmm/device")
_FIRST, _POINTS = 100, 10  # of the sequence of shapes: far from those of a profile
_WIDTH, _TEN, _ASKED = 128, 10, 6
_WIDTHS = (100, 256, 64, 172)  # of rows of four batches
_BATCHES = (((10, 10), 512), ((15, 10, 5), 200), ((25, 10), 128))
_JUDGED = (("mean", statistics.fmean, MEAN_PERCENT), ("worst", max, WORST_PERCENT))
_CHECK_SECONDS, _QUICK_SECONDS = 20.0, 0.3


@dataclass(frozen=True)
class Checked:
    """Of every operator the relative errors of all predictions, and by how much the same shapes differ when they are
    measured again; and errors of those of one width, beside Eq. 2's."""

    profile: MachineProfile
    fit_seconds: float
    errors: dict[str, list[float]]
    noise: dict[str, list[float]]
    of_one_width: dict[str, list[float]]
    by_equation: dict[str, list[float]]


def costs(work: Workload) -> Iterator[Case]:
    def figure(name: str, of: Callable[[Checked], float], limit: float, unit: str) -> Case:
        def sides() -> dict[str, Side]:
            checked = _checked(work)
            return {OURS: Side(lambda: of(checked)), LIMIT: Side(lambda: limit)}

        return Case(f"execution/costs/{name}", value(unit), sides, (Versus((LIMIT,), 1.0),), repeats=1)

    yield figure("profile", lambda checked: checked.profile.seconds_taken, PROFILE_SECONDS, "s")
    yield figure("fit", lambda checked: checked.fit_seconds, FIT_SECONDS, "s")
    for operator in (*HOST, *(ON_GPU if _gpu(work) is not None else ())):
        for name, of, most in _JUDGED:
            yield _error(work, operator, name, of, most)
            if operator in BY_EQUATION:
                yield _beside_equation(work, operator, name, of)


def _error(work: Workload, operator: str, name: str, of: Callable[[list[float]], float], most: float) -> Case:
    def sides() -> dict[str, Side]:
        checked = _checked(work)
        return {
            OURS: Side(lambda: 100 * of(checked.errors[operator])),
            LIMIT: Side(lambda: most),
            TWICE: Side(lambda: 100 * of(checked.noise[operator])),
        }

    title = f"execution/costs/{operator}/{name} error"
    return Case(title, value("%"), sides, (Versus((LIMIT,), 1.0),), limit=TWICE, repeats=1)


def _beside_equation(work: Workload, operator: str, name: str, of: Callable[[list[float]], float]) -> Case:
    def sides() -> dict[str, Side]:
        checked = _checked(work)
        return {
            OURS: Side(lambda: 100 * of(checked.of_one_width[operator])),
            EQUATION: Side(lambda: 100 * of(checked.by_equation[operator])),
        }

    title = f"execution/costs/{operator}/{name} error, one width"
    return Case(title, value("%"), sides, (Versus((EQUATION,)),), repeats=1)


def _gpu(work: Workload) -> torch.device | None:
    return device(work) if is_gpu(work) and torch.cuda.is_available() and HAS_CUDA_KERNELS else None


def _checked(work: Workload) -> Checked:
    return work.once("execution/costs", lambda: _check(work))


def _check(work: Workload) -> Checked:
    gpu, threads, is_full = _gpu(work), num_usable_cores(), work.sizes is FULL
    profile = profile_machine(gpu, threads, PROFILE_SECONDS - 1 if is_full else _QUICK_SECONDS)
    say(profile.report())
    scale, seconds = (1.0, _CHECK_SECONDS) if is_full else (_QUICK_SECONDS / 10, _QUICK_SECONDS)
    context, timer = profile.costs.context, ProbeTimer(gpu)
    with compute_threads(threads), sampling_threads(threads) as pool, torch.no_grad():
        blocks, graphs = _blocks(work)

        def probes() -> tuple[HostProbes, DeviceProbes | None]:
            host = HostProbes(context, pool, first=_FIRST, seed=SEED, scale=scale)
            return host, None if gpu is None else DeviceProbes(gpu, context, first=_FIRST, seed=SEED, scale=scale)

        def measured(some: Sequence[CostProbe], share: float) -> list[Observation]:
            return time_probes(some, time.perf_counter() + share * seconds, timer)

        seen = measured(_unseen(*probes(), blocks, graphs), 1.0)
        again = measured(_unseen(*probes(), blocks, graphs), 1.0)  # the same shapes, in memory of their own
        ten, asked = (measured(some, 0.25) for some in _of_equation(*probes()))
    noise = _differences(seen, again)
    for one in seen:
        predicted = profile.seconds(one.operator, **one.sizes)
        sizes = ", ".join(f"{name} {size:,.6g}" for name, size in one.sizes.items())
        say(f"  {one.operator} {sizes}: {1e3 * one.seconds:.3f} ms, predicted {1e3 * predicted:.3f}")
    began = time.perf_counter()
    CostModel.fit([*seen, *seen], context)  # no fewer points than a profile has
    took = time.perf_counter() - began
    return Checked(profile, took, _errors(profile, seen), noise, _errors(profile, asked), _equation_errors(ten, asked))


def _differences(seen: list[Observation], again: list[Observation]) -> dict[str, list[float]]:
    """By how much each shape differs between two measurements; 0 for an operator of which none was measured twice."""
    found: dict[str, list[float]] = {}
    first = {(one.operator, *sorted(one.sizes.items())): one.seconds for one in seen}
    for one in again:
        before = first.get((one.operator, *sorted(one.sizes.items())))
        if before is not None:
            found.setdefault(one.operator, []).append(abs(one.seconds / before - 1))
    return {one.operator: found.get(one.operator, [0.0]) for one in seen}


def _errors(profile: MachineProfile, seen: list[Observation]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in seen:
        found.setdefault(one.operator, []).append(abs(profile.seconds(one.operator, **one.sizes) / one.seconds - 1))
    return found


def _graphs(work: Workload) -> list[Graph]:
    """Power-law ones, of kinds that no profile has: degrees without a bound, and communities."""
    num_nodes = work.sizes.num_nodes // 2
    return [
        rmat(num_nodes, 10 * num_nodes, seed=SEED),
        sbm(num_nodes // 2, avg_degree=30, num_features=1, seed=SEED),
    ]


def _blocks(work: Workload) -> tuple[list[CSC], list[CSC]]:
    """Whole batches as structures, and the graphs that they are of."""
    blocks, structures = [], []
    for graph in _graphs(work):
        csc = graph.csc()
        bare = Graph({NODE: csc.num_dst}, {EDGE: CSC(csc.indptr, csc.indices, csc.num_src)})
        structures.append(bare.csc())
        for count, fanouts in ((work.sizes.num_seeds // 4, [15, 10]), (work.sizes.num_seeds, [10, 5])):
            seeds = torch.randperm(csc.num_dst, generator=torch.Generator("cpu").manual_seed(SEED))[:count]
            found = NeighborSampler(bare, fanouts).sample({NODE: seeds}, key=SampleKey())
            num_nodes, num_dst = found.node[NODE].numel(), int(found.col[EDGE].max()) + 1
            blocks.append(CSC.from_sorted(torch.stack([found.row[EDGE], found.col[EDGE]]), num_nodes, num_dst))
    return blocks, structures


def _unseen(host: HostProbes, there: DeviceProbes | None, blocks: list[CSC], graphs: list[CSC]) -> list[CostProbe]:
    """Batches of real graphs first, in case that time is short; then other shapes of every operator but samples."""
    fits = [(b, w) for b, w in zip(blocks, _WIDTHS, strict=True) if b.num_src * w <= host.rows.numel()]
    batches = [(csc, fanouts, seeds) for csc in graphs for fanouts, seeds in _BATCHES]
    probes = [host.spmm_of(block, width) for block, width in fits]
    probes += [host.sample_of(csc, fanouts, seeds) for csc, fanouts, seeds in batches]
    others = host.all(_POINTS, _POINTS // 2)
    if there is not None:
        probes += [there.spmm_of(block, width) for block, width in fits]
        for is_pinned in (False, True):
            probes += [there.sample_of(csc, fanouts, 4 * seeds, is_pinned) for csc, fanouts, seeds in batches]
        others += there.all(_POINTS, _POINTS // 2)
    return probes + [probe for probe in others if not probe.operator.startswith("sample/")]


def _of_equation(host: HostProbes, there: DeviceProbes | None) -> tuple[list[CostProbe], list[CostProbe]]:
    """Ten blocks of one width for Eq. 2, as the paper draws ten subgraphs, and some more to ask about."""
    most = min(200_000, host.rows.numel() // _WIDTH)
    draw = torch.Generator("cpu").manual_seed(SEED)
    probes = []
    for place in (host, there):
        for _ in range(_TEN + _ASKED):
            num_src = int(1000 * (most / 1000) ** float(torch.rand(1, generator=draw)))
            num_edges = int(num_src * (1 + 4 * float(torch.rand(1, generator=draw))))
            block = random_block(num_edges, max(1, num_src // 4), num_src, draw)
            if place is not None:
                probes.append(place.spmm_of(block, _WIDTH))
    parts = [probes[at : at + _TEN + _ASKED] for at in range(0, len(probes), _TEN + _ASKED)]
    return [p for part in parts for p in part[:_TEN]], [p for part in parts for p in part[_TEN:]]


def _equation_errors(ten: list[Observation], asked: list[Observation]) -> dict[str, list[float]]:
    found = {}
    for operator in {one.operator for one in ten}:
        fitted_to = [one for one in ten if one.operator == operator]
        model = CubicCost.fit(
            [one.sizes["sources"] for one in fitted_to],
            [one.sizes["edges"] for one in fitted_to],
            [one.seconds for one in fitted_to],
        )
        found[operator] = [
            abs(model.seconds(one.sizes["sources"], one.sizes["edges"]) / one.seconds - 1)
            for one in asked
            if one.operator == operator
        ]
    return found


BENCHMARKS: list[Benchmark] = [costs]
