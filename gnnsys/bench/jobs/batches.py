"""Of `gnnsys bench jobs`, the memory of jobs with a sampling loader: estimated before, and ten epochs on a GPU.

GraphSAGE on a generated graph of the size of ogbn-products, fanouts 15/10/5, 1024 seeds, with the graph on the device
and in pinned memory. An estimate has a likely size of the largest batch, and a bound on it; so has the peak.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import gnnsys.nn
from gnnsys.bench.case import OURS, Benchmark, Case, NotHere, Side, Versus, value
from gnnsys.bench.jobs.settings import settings_of
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import Graph, rmat
from gnnsys.loader import NeighborLoader
from gnnsys.planning import (
    JobMemory,
    TrainingJob,
    estimate_memory,
    fit_argument,
    make_job,
    run_on_device,
    run_steps,
)

PLACES, FANOUTS, EPOCHS = ("device", "pinned"), [15, 10, 5], 10
MEASURED, BOUND, LIMIT = "measured", "bound", "found by bisection"
OFF_BY, LEAST = 5.0, 0.01  # percent
FIT_BYTES = 5 << 30  # the largest batch has a part of the seeds, and a step is still one of a sampled batch


class LoaderSizes(NamedTuple):
    nodes: int
    edges: int
    width: int
    classes: int
    seeds: int
    batch_size: int


PRODUCTS = LoaderSizes(2_449_029, 123_718_280, 100, 47, 196_608, 1024)
SMALL = LoaderSizes(20_000, 400_000, 32, 7, 4_096, 128)


class LoaderPeaks(NamedTuple):
    """Bytes of ten epochs on a GPU: allocated and reserved, and those of the largest batch."""

    allocated: int
    reserved: int
    largest: int


def loader_job(graph: Graph, sizes: LoaderSizes) -> Callable[..., TrainingJob]:
    """A job's function over one graph: place, batch_size and device are its arguments."""

    def job(place: str, batch_size: int, device: str = "cpu") -> TrainingJob:
        placed = graph.to(device) if place == "device" else graph.pin_memory()
        loader = NeighborLoader(
            placed, FANOUTS, input_nodes=torch.arange(sizes.seeds), batch_size=batch_size, shuffle=True, seed=SEED,
            device=device,
        )  # fmt: skip
        model = gnnsys.nn.GraphSAGE(sizes.width, 256, len(FANOUTS), sizes.classes).to(device)

        def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

        return TrainingJob(model=model, optimizer=torch.optim.Adam(model.parameters()), loss=loss, loader=loader)

    return job


def products_graph(sizes: LoaderSizes) -> Graph:
    """RMAT with rows; their values decide nothing."""
    graph = rmat(sizes.nodes, sizes.edges, seed=SEED)
    graph.set_node_data("x", torch.zeros(sizes.nodes, sizes.width))
    graph.set_node_data("y", torch.zeros(sizes.nodes, dtype=torch.int64))
    return graph


def measured_epochs(job: Callable[..., TrainingJob], place: str, sizes: LoaderSizes) -> LoaderPeaks:
    """Ten epochs for real; the largest batch by the same count as the estimate's."""
    largest = [0]

    def watched(**arguments: Any) -> TrainingJob:
        made = job(**arguments)
        loss, row_bytes = made.loss, made.loader.row_bytes()  # type: ignore[union-attr]

        def noted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            nodes, edges = batch.n_id.numel(), batch.edge_index.shape[1]
            largest[0] = max(largest[0], nodes * (row_bytes + 8) + edges * 24)
            return loss(model, batch)

        return TrainingJob(model=made.model, optimizer=made.optimizer, loss=noted, loader=made.loader)

    arguments = {"place": place, "batch_size": sizes.batch_size, "device": "cuda"}
    steps = EPOCHS * -(-sizes.seeds // sizes.batch_size)
    run = run_on_device(watched, arguments, steps)
    return LoaderPeaks(run.allocated, run.reserved, largest[0])


def loader_batches(work: Workload) -> Iterator[Case]:
    """The largest batch and the peak of ten epochs: how far off, and whether below what was promised."""
    sizes = PRODUCTS if work.sizes is FULL else SMALL

    def function() -> Callable[..., TrainingJob]:
        if not torch.cuda.is_available():
            raise NotHere("ten epochs on a GPU are measured, and torch finds none")
        return work.once("jobs/batches/job", lambda: loader_job(products_graph(sizes), sizes))

    for place in PLACES:
        arguments = {"place": place, "batch_size": sizes.batch_size}

        def estimated(place: str = place, arguments: dict[str, Any] = arguments) -> JobMemory:
            job = function()
            return work.once(f"jobs/batches/{place}/estimated", lambda: estimate_memory(job, arguments, "h200"))

        def measured(place: str = place) -> LoaderPeaks:
            job = function()
            return work.once(f"jobs/batches/{place}/measured", lambda: measured_epochs(job, place, sizes))

        yield from _rows(place, estimated, measured)


def _rows(place: str, estimated: Callable[[], JobMemory], measured: Callable[[], LoaderPeaks]) -> Iterator[Case]:
    def likely_peak() -> float:
        found = estimated()
        assert found.allocated_bytes is not None
        return float(found.allocated_bytes)

    def most_peak() -> float:
        return likely_peak() + estimated().more_bytes

    def likely_batch() -> float:
        found = estimated().batches
        assert found is not None
        return float(found.likely_bytes)

    def most_batch() -> float:
        found = estimated().batches
        assert found is not None
        return float(found.bound_bytes)

    told = {
        "largest batch": (likely_batch, most_batch, lambda: float(measured().largest)),
        "allocated": (likely_peak, most_peak, lambda: float(measured().allocated)),
    }
    for what, (likely, most, real) in told.items():
        yield from _judged(place, what, likely, most, real)

    def reserved() -> float:
        return (estimated().reserved_bytes or 0) / 1e6

    yield _case(place, "reserved", "MB", reserved, lambda: measured().reserved / 1e6, MEASURED)


def _judged(
    place: str, what: str, likely: Callable[[], float], most: Callable[[], float], real: Callable[[], float]
) -> Iterator[Case]:
    def off() -> float:
        return max(100 * abs(likely() - real()) / real(), LEAST)

    yield _case(place, what, "MB", lambda: likely() / 1e6, lambda: real() / 1e6, MEASURED)
    yield _case(place, f"{what} off by", "%", off, lambda: OFF_BY, BOUND, 1.0)
    yield _case(place, f"{what} over its bound", "of 1", lambda: real() / most(), lambda: 1.0, BOUND, 1.0)


def fitted_batches(work: Workload) -> Iterator[Case]:
    """The largest number of seeds that fits a part of the GPU: estimated, and found by running."""
    sizes = PRODUCTS if work.sizes is FULL else SMALL
    limit = FIT_BYTES if work.sizes is FULL else 256 << 20

    def values() -> tuple[float, float]:
        if not torch.cuda.is_available():
            raise NotHere("jobs run on a GPU until they do not fit, and torch finds none")
        job = work.once("jobs/batches/job", lambda: loader_job(products_graph(sizes), sizes))

        def both() -> tuple[float, float]:
            given = {"place": "device", "batch_size": sizes.batch_size}
            fitted = fit_argument(job, "batch_size", given, "h200", limit).value
            steps = settings_of(work).fit_steps
            return float(fitted), float(bisect_on_device(job, fitted, limit, sizes.seeds, steps))

        return work.once("jobs/fit", both)

    def off() -> float:
        fitted, found = values()
        return max(100 * abs(fitted - found) / found, LEAST)

    yield _case("fit", "batch_size", "seeds", lambda: values()[0], lambda: values()[1], LIMIT)
    yield _case("fit", "batch_size off by", "%", off, lambda: OFF_BY, BOUND, 1.0)


def bisect_on_device(job: Callable[..., TrainingJob], start: int, limit: int, most: int, num_steps: int) -> int:
    """The largest batch size up to `most`, within 1%, with which the job runs in `limit` bytes of the GPU."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def runs(batch_size: int) -> bool:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((limit + held) / total)
        torch.cuda.reset_peak_memory_stats()
        made, done = None, 0

        def count(phase: Any, step: int, batch: Any) -> None:
            nonlocal done
            done = step

        try:
            made = make_job(job, {"place": "device", "batch_size": batch_size}, device="cuda")
            run_steps(made, num_steps, count)
            torch.cuda.synchronize()
            done = num_steps
        except torch.OutOfMemoryError:
            pass
        finally:
            peaks = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - held
            told = f"{done} of {num_steps} steps, {peaks[0] / 1e9:.2f} GB allocated, {peaks[1] / 1e9:.2f} reserved"
            print(f"jobs/batches/fit: {batch_size} seeds: {told}", file=sys.stderr, flush=True)
            if made is not None and made.loader is not None:
                made.loader.close()  # type: ignore[attr-defined]
            torch.cuda.set_per_process_memory_fraction(1.0)
        return done == num_steps

    low, high = start, start
    while not runs(low):
        low, high = low * 9 // 10, low
        if low == 0:
            return 0
    while high == low or runs(high):
        if high >= most:  # a batch has all input nodes: a larger value takes no more
            return most
        low, high = high, min(max(high * 11 // 10, high + 1), most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def _case(
    group: str, what: str, unit: str, ours: Callable[[], float], peer: Callable[[], float], name: str,
    target: float | None = None,
) -> Case:  # fmt: skip
    def sides() -> dict[str, Side]:
        return {OURS: Side(ours), name: Side(peer)}

    return Case(f"jobs/batches/{group}, {what}", value(unit), sides, (Versus((name,), target),), repeats=1)


BENCHMARKS: list[Benchmark] = [loader_batches, fitted_batches]
