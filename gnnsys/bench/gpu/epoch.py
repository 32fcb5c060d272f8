"""Training epochs of GraphSAGE on the device, beside the same batches made before, and beside PyG's layers.

An epoch's time is that of some of its steps behind a few that fill the pipeline, times the steps of an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Side, Versus, of_peer, value
from gnnsys.bench.gpu.inputs import (
    FANOUTS,
    NUM_CLASSES,
    NUM_FEATURES,
    batches_of_seeds,
    device,
    device_graph,
    graph_sizes,
    is_gpu,
    large_graph,
    num_cores,
    pinned_graph,
    structure_on,
    synchronize,
)
from gnnsys.bench.workload import FULL, Workload
from gnnsys.cuda import capture
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import Batch, NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.ops import BY_DESTINATION, STRUCTURES
from gnnsys.sampling import expected_visits
from gnnsys.store import DeviceCache

NUM_LAYERS = 3
WITHIN = 1.15  # an epoch may take this much longer than compute alone
PRE_MADE = "batches pre-made"
CACHED = 0.2  # of the rows, on the device
UNCACHED = "no rows cached"
BUS = "its rows copied"  # to the device, in one piece per batch
KERNELS = "its kernels"  # the sum of what they take, those of loading too
STEP_KERNELS = "kernels of its steps"  # without those of loading
EAGER = "steps as written"
GATHERING = "captured steps that gather rows"  # themselves, instead of a copy of rows that were gathered
BEYOND_KERNELS, CAPTURED_BEYOND_KERNELS = 1.10, 1.05  # an epoch may take this much longer than its kernels
PYG, PYG_TRIMMED = "PyG, CPU batches", "PyG trimmed, CPU batches"
Step = Callable[[Batch], None]


class Steps(NamedTuple):
    """Of an epoch: all, those that fill the pipeline, those that are timed; and those of a peer that is slower."""

    all: int = 192  # 196,608 seeds, as many as ogbn-products has
    first: int = 8
    timed: int = 120  # against at most three that wait, loaded before
    peer: int = 40


def epoch(work: Workload) -> Iterator[Case]:
    steps, widths = steps_of(work), widths_of(work)
    for where in ("device memory", "pinned host memory"):

        def sides(where: str = where) -> dict[str, Side]:
            graph = pinned_graph(work) if where.startswith("pinned") else device_graph(work)
            ours = DeviceModel(work, GraphSAGE(*widths))
            loader = _loader(work, graph, steps, **_on_device(work))
            found: dict[str, Callable[[], float]] = {
                OURS: lambda: epoch_seconds(first_epoch(loader), ours.step, steps, steps.timed),
                PRE_MADE: _pre_made(loader, ours.step, steps),
            }
            if where.startswith("pinned"):
                found[BUS] = copied_bytes(work, row_bytes_of(loader), steps)
            sides = {name: Side(call) for name, call in found.items()}
            if "pyg" not in peers.missing("pyg"):
                on_host = _loader(work, large_graph(work), steps, num_threads=num_cores())
                for name in (PYG, PYG_TRIMMED):
                    sides[name] = of_peer(partial(_pyg, work, widths, on_host, steps, trimmed=name == PYG_TRIMMED))
            return sides

        reasons = peers.missing("pyg").values()
        yield Case(
            f"epoch/{where}",
            value("s"),
            sides,
            (Versus((PRE_MADE,), 1 / WITHIN), Versus((PYG,), 5.0), Versus((PYG_TRIMMED,))),
            limit=BUS if where.startswith("pinned") else None,
            repeats=3,
            missing={side: reason for side in (PYG, PYG_TRIMMED) for reason in reasons},
        )


def epoch_with_cache(work: Workload) -> Iterator[Case]:
    """A fifth of the rows on the device, those that batches are expected to visit most. It informs."""
    steps, widths = steps_of(work), widths_of(work)

    def sides() -> dict[str, Side]:
        ours = DeviceModel(work, GraphSAGE(*widths))
        graph = _cached(work, steps)
        plain, cached = (_loader(work, g, steps, **_on_device(work)) for g in (pinned_graph(work), graph))
        calls: dict[str, Callable[[], float]] = {
            OURS: lambda: epoch_seconds(first_epoch(cached), ours.step, steps, steps.timed),
            UNCACHED: lambda: epoch_seconds(first_epoch(plain), ours.step, steps, steps.timed),
            PRE_MADE: _pre_made(cached, ours.step, steps),
        }
        missed = 1 - graph.node_data[NODE]["x"].counters().hit_rate  # type: ignore[attr-defined]
        calls[BUS] = copied_bytes(work, missed * row_bytes_of(cached), steps)
        return {name: Side(call) for name, call in calls.items()}

    versus = (Versus((PRE_MADE,)), Versus((UNCACHED,)))
    yield Case("epoch/pinned host memory, 20% cached", value("s"), sides, versus, limit=BUS, repeats=3)


def epoch_beside_kernels(work: Workload) -> Iterator[Case]:
    """How late the host is: epochs beside what their kernels take, steps as written and captured in CUDA graphs.

    Kernels are those of steps as written on batches without padding, in both cases.
    """
    steps, widths = steps_of(work), widths_of(work)

    def sides(captured: bool) -> dict[str, Side]:
        graph = device_graph(work)
        written = DeviceModel(work, GraphSAGE(*widths))
        loader = _loader(work, graph, steps, **_on_device(work))
        run = partial(_one_epoch, loader, written.step, steps)
        pre_made = _pre_made(loader, written.step, steps)
        calls: dict[str, Callable[[], float]] = {
            KERNELS: cache(partial(_kernel_seconds, run, steps)),
            STEP_KERNELS: cache(partial(_kernel_seconds, pre_made, steps)),
        }
        if captured:
            padded = _loader(work, graph, steps, pad=True, **_on_device(work))
            train = capture(DeviceModel(work, GraphSAGE(*widths), capturable=is_gpu(work)).step)
            calls |= {OURS: partial(_one_epoch, padded, train, steps), EAGER: run}
            without_rows = _loader(work, graph, steps, pad=True, fetch=["y"], **_on_device(work))
            model = DeviceModel(work, GraphSAGE(*widths), is_gpu(work), rows=graph.node_data[NODE]["x"])
            calls[GATHERING] = partial(_one_epoch, without_rows, capture(model.step), steps)
        else:
            calls[OURS] = run
        return {name: Side(call) for name, call in calls.items()}

    told = (Versus((STEP_KERNELS,)),)
    yield Case(
        "epoch/device memory, kernels",
        value("s"),
        partial(sides, captured=False),
        (Versus((KERNELS,), 1 / BEYOND_KERNELS), *told),
        repeats=3,
    )
    yield Case(
        "epoch/device memory, captured",
        value("s"),
        partial(sides, captured=True),
        (Versus((KERNELS,), 1 / CAPTURED_BEYOND_KERNELS), *told, Versus((EAGER,)), Versus((GATHERING,))),
        repeats=3,
    )


def _one_epoch(loader: NeighborLoader, step: Step, steps: Steps) -> float:
    return epoch_seconds(first_epoch(loader), step, steps, steps.timed)


def _kernel_seconds(run: Callable[[], float], steps: Steps) -> float:
    """Of an epoch, what its kernels and copies take on the device one after the other; without a GPU, its time."""
    run()  # warm
    if not torch.cuda.is_available():
        return run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    on_device = [e for e in profiled.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    microseconds = sum(event.time_range.elapsed_us() for event in on_device)
    return microseconds / 1e6 / (steps.first + steps.timed) * steps.all


def _cached(work: Workload, steps: Steps) -> Graph:
    graph, seeds = pinned_graph(work), torch.cat(batches_of_seeds(work, steps.all))
    rows, csc = graph.node_data[NODE], structure_on(work, graph_sizes(work)[1])
    visits = expected_visits(csc, FANOUTS, seeds.to(device(work)), batch_size=work.sizes.num_seeds)
    num_bytes = round(CACHED * rows["x"].nbytes) + 4 * graph.num_nodes()
    cache = DeviceCache.from_scores(rows["x"], visits, bytes=num_bytes, device=device(work))
    return Graph({NODE: graph.num_nodes()}, {EDGE: graph.csc()}, {NODE: {"x": cache, "y": rows["y"]}})  # type: ignore[dict-item]


def steps_of(work: Workload) -> Steps:
    return Steps() if work.sizes is FULL else Steps(all=8, first=1, timed=3, peer=2)


def widths_of(work: Workload) -> tuple[int, int, int, int]:
    return NUM_FEATURES, 256 if work.sizes is FULL else 32, NUM_LAYERS, NUM_CLASSES


def _on_device(work: Workload) -> dict[str, Any]:
    return {"device": device(work)} if is_gpu(work) else {}


class DeviceModel:
    """A model with its optimizer on the device; a step per batch, on our layers or PyG's."""

    def __init__(
        self, work: Workload, model: nn.Module, capturable: bool = False, rows: Tensor | None = None,
        on: torch.device | None = None,
    ) -> None:  # fmt: skip
        self._device = device(work) if on is None else on
        self._rows = rows  # of all nodes, where batches have none
        self._model = model.to(self._device)
        fused = self._device.type == "cuda"  # as our examples have it, for all sides
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=capturable, fused=fused)

    def step(self, batch: Batch) -> None:
        x = batch.x if self._rows is None else self._rows.index_select(0, batch.n_id)
        self._finish(self._model(x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes), batch)

    def pyg_step(self, batch: Batch) -> None:
        batch = batch.to(self._device)
        self._finish(self._model(batch.x, batch.edge_index), batch)

    def pyg_trimmed_step(self, batch: Batch) -> None:
        batch = batch.to(self._device)
        out = self._model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )
        self._finish(out, batch)

    def _finish(self, out: Tensor, batch: Batch) -> None:
        loss = F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def _loader(work: Workload, graph: Graph, steps: Steps, **options: Any) -> NeighborLoader:
    return NeighborLoader(
        graph,
        FANOUTS,
        input_nodes=torch.cat(batches_of_seeds(work, steps.all)),
        batch_size=work.sizes.num_seeds,
        shuffle=True,
        across_epochs=False,  # nothing is prepared while other sides are timed
        **options,
    )


def _pre_made(loader: NeighborLoader, step: Step, steps: Steps) -> Callable[[], float]:
    """Compute alone. Batches are seen as if for the first time: what layers remember of a tensor is not there, and what
    the loader knows about it is."""
    with closing(first_epoch(loader)) as batches:
        wanted = islice(batches, steps.first + steps.timed)
        held = [(batch, STRUCTURES.find(batch.edge_index, key=BY_DESTINATION)) for batch in wanted]

    def again() -> Generator[Batch, None, None]:
        for batch, known in held:
            fresh = batch.apply(Tensor.detach)
            if known is not None:
                STRUCTURES.put(known, fresh.edge_index, key=BY_DESTINATION)
            yield fresh

    return lambda: epoch_seconds(again(), step, steps, steps.timed)


def row_bytes_of(loader: NeighborLoader) -> float:
    """Of the features of a batch, on average over a few."""
    with closing(first_epoch(loader)) as batches:
        sizes = [batch.x.nbytes for batch in islice(batches, 8)]
    return sum(sizes) / len(sizes)


def copied_bytes(work: Workload, num_bytes: float, steps: Steps) -> Callable[[], float]:
    """So many bytes of host memory for each batch of an epoch, at the speed of a copy."""
    on_host = torch.empty(max(round(num_bytes), 1), dtype=torch.uint8, pin_memory=is_gpu(work))
    there = torch.empty_like(on_host, device=device(work))

    def batches() -> Generator[Tensor, None, None]:
        for _ in range(steps.first + steps.timed):
            yield on_host

    def copy(rows: Any) -> None:
        there.copy_(rows, non_blocking=True)

    return lambda: epoch_seconds(batches(), copy, steps, steps.timed)  # type: ignore[arg-type]


def first_epoch(loader: NeighborLoader) -> Generator[Batch, None, None]:
    """Its first epoch again: the same batches every time."""
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batch": 0})
    yield from loader


def _pyg(
    work: Workload, widths: tuple[int, ...], loader: NeighborLoader, steps: Steps, *, trimmed: bool
) -> Callable[[], float]:
    """PyG's own model, its batches sampled and gathered by all cores of the host and copied when they are needed."""
    from torch_geometric.nn import GraphSAGE as PygSAGE

    model = DeviceModel(work, PygSAGE(*widths))
    step = model.pyg_trimmed_step if trimmed else model.pyg_step
    return lambda: epoch_seconds(first_epoch(loader), step, steps, steps.peer)


def epoch_seconds(batches: Generator[Batch, None, None], step: Step, steps: Steps, num_timed: int) -> float:
    """Of an epoch, from `num_timed` of its steps."""
    with closing(batches):
        for batch in islice(batches, steps.first):
            step(batch)
        synchronize()
        start = time.perf_counter()
        for batch in islice(batches, num_timed):
            step(batch)
        synchronize()
        elapsed = time.perf_counter() - start
    return elapsed / num_timed * steps.all


BENCHMARKS = [epoch, epoch_beside_kernels, epoch_with_cache]
