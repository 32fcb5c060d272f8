"""The static half of the schedule: for every stage its bins, what they wait for, what is sent and where it belongs.

Made once per width of the rows, by all ranks together: they tell each other where their bins end.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Peers
from gnnsys.fullgraph.keyed_dropout import KeyedRows
from gnnsys.fullgraph.offload.mover import BINS_ON_DEVICE
from gnnsys.fullgraph.offload.piecewise_sums import PieceCosts, PiecewiseSums, SourcePiece, make_pieces
from gnnsys.fullgraph.offload.source_sweeps import NodeGroup, SourceSweeps, StructurePlaces, make_groups
from gnnsys.fullgraph.plan.bin_memory import measure_stage
from gnnsys.fullgraph.plan.bins import (
    Bin,
    BudgetError,
    Chunk,
    Costs,
    Packing,
    bin_bounds,
    halo_chunks,
    make_bins,
    sent_rows,
    waits_for,
)
from gnnsys.fullgraph.plan.edge_data import alike
from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.fullgraph.plan.model_stages import ModelStage, taken
from gnnsys.fullgraph.plan.module_layout import is_lazy
from gnnsys.fullgraph.plan.neighbor_sums import NeighborSums, scratch_per_edge
from gnnsys.fullgraph.plan.stage_halves import SumStage
from gnnsys.fullgraph.plan.sweep_choice import (
    SweepChoice,
    SweepLimits,
    choose_sweeps,
    groups_of,
    left_for_bins,
    sweep_bounds,
)
from gnnsys.fullgraph.run.typed_layer import TypedConv
from gnnsys.ops import CSC, WEIGHT, EdgeData, WholeDegrees

_SOURCE_BYTES = 24  # of a source in a piece besides its row: two weights, and where its edges begin
MAX_BINS = 1 << 20  # of a layer: messages are numbered by them
Sends = list[list[tuple[int, Tensor]]]
Shapes = list[tuple[int, torch.dtype]]


@dataclass(frozen=True)
class BinLimits:
    """What a budget of device memory leaves for a bin, for the nodes of one whose sources come in pieces, and for each
    piece; of those there are three at most, the last that was summed up and two on the way back."""

    bin: int
    nodes: int
    piece: int

    @classmethod
    def of(cls, budget: int, moves: bool) -> BinLimits:
        if not moves:
            return cls(budget, budget, budget)
        each = budget // BINS_ON_DEVICE
        return cls(max(1, each), max(1, each // 2), each // 6)


@dataclass(frozen=True, eq=False)
class Step:
    """A stage and everything about its bins that does not change from epoch to epoch."""

    stage: ModelStage
    width: int  # of its results
    dtype: torch.dtype
    bounds: list[int]
    bins: list[Bin]
    before: list[Bin]  # of the step before
    chunks: list[Chunk]  # of its inputs' halo
    sends: Sends  # per bin of the step before: which of its rows go where
    needs: list[tuple[list[Bin], list[Chunk]]]  # per bin: those of the bins before, and of the chunks, that it reads
    neighbor_sums: NeighborSums | None  # of a stage in its halves whose rows lie where they are summed
    piecewise_sums: PiecewiseSums | None  # of one whose rows move, bin by bin
    source_sweeps: SourceSweeps | None  # of one whose rows move, in sweeps over all of them

    @property
    def has_halo(self) -> bool:
        return self.stage.conv is not None


def make_steps(
    stages: Sequence[ModelStage], plan: HaloPlan, whole: WholeDegrees, peers: Peers, packing: Packing,
    budget: int | None, shapes: Shapes, measured: Sequence[Costs], rows_device: torch.device, device: torch.device,
    moves: bool, features_stay: bool = False, views_made: MutableMapping[Any, NeighborSums] | None = None,
) -> list[Step]:  # fmt: skip
    """Every rank calls it with the same stages.

    With a `budget` bins take no more bytes on the device, by what was `measured`; with `moves` there are two of them at
    a time. Structures are put where bins are computed (`device`), unless there is a budget, and what picks rows where
    those are (`rows_device`). With `features_stay` the first input needs no gradient. `views_made` are those of other
    plans of this halo, which share them.
    """
    views = _views(stages, plan, whole, rows_device if moves else device, {} if views_made is None else views_made)
    bounds, choices = _bounds(stages, plan, packing, budget, shapes, measured, moves, views, features_stay)
    if max(map(len, bounds)) > MAX_BINS:
        raise ValueError(
            f"a layer of {max(map(len, bounds)):,} bins has too many to number their messages: use larger ones"
        )
    told = _tell(bounds, peers)
    limits, resides = None if budget is None else BinLimits.of(budget, moves), device if budget is None else rows_device
    steps: list[Step] = []
    made: dict[Any, list[Bin]] = {}
    made_pieces: dict[Any, list[list[SourcePiece]]] = {}
    made_groups: dict[Any, list[NodeGroup]] = {}
    places = StructurePlaces(resides, pinned=resides != device and device.type == "cuda")
    for index, stage in enumerate(stages):
        # A step before the first would have had one bin, the input
        before = [[0, int(end)] for end in _cores(told)] if index == 0 else [ranks[index - 1] for ranks in told]
        view, choice = views[index], choices[index]
        passes, sweeps = None, None
        if view is not None:
            bins = make_bins(None, bounds[index], None, index)
            if choice is not None:
                sweeps = _sweeps(view, choice, bounds[index], made_groups, places)
            elif moves:
                passes = _passes(view, bounds[index], *shapes[index], limits, made_pieces, resides)
            view = None if moves else view
        else:
            bins = _bins_of(stage, index, plan.csc, bounds[index], whole, made, rows_device, resides)
        chunks = halo_chunks(plan, before, index) if stage.conv is not None else []
        sends = sent_rows(plan, before[plan.rank]) if stage.conv is not None else [[] for _ in before[plan.rank][1:]]
        sends = [[(peer, rows.to(rows_device)) for peer, rows in each] for each in sends]
        bins_before = steps[-1].bins if steps else [Bin(0, plan.num_core, step=-1)]
        if sweeps is not None:  # reads all rows before its first bin
            needs = [(bins_before, chunks) for _ in bins]
        else:
            sources = [_sources(each, plan.csc if isinstance(stage, SumStage) else None) for each in bins]
            needs = waits_for(sources, plan.num_core, bins_before, chunks)
        steps.append(
            Step(
                stage, *shapes[index + 1], bounds[index], bins, bins_before, chunks, sends, needs, view, passes, sweeps
            )
        )  # fmt: skip
    return steps


def _views(
    stages: Sequence[ModelStage], plan: HaloPlan, whole: WholeDegrees, at: torch.device,
    made: MutableMapping[Any, NeighborSums],
) -> list[NeighborSums | None]:  # fmt: skip
    """How stages in halves sum up, each kind once, where rows lie."""
    found: list[NeighborSums | None] = []
    for stage in stages:
        if not isinstance(stage, SumStage):
            found.append(None)
            continue
        kind = (stage.kind, stage.weighted, at)
        view = made.get(kind)
        if view is None:
            data = plan.csc.edge_data.only([WEIGHT]) if stage.weighted and plan.csc.edge_data is not None else None
            csc = replace(plan.csc, edge_data=data).to(at)
            view = NeighborSums(stage.kind, csc, WholeDegrees(*(each.to(at) for each in whole)))
            made[kind] = view
        found.append(view)
    return found


def _bounds(
    stages: Sequence[ModelStage], plan: HaloPlan, packing: Packing, budget: int | None, shapes: Shapes,
    measured: Sequence[Costs], moves: bool, views: Sequence[NeighborSums | None], features_stay: bool,
) -> tuple[list[list[int]], list[SweepChoice | None]]:  # fmt: skip
    """Where the bins of every stage begin, and which stages are in sweeps."""
    none: list[SweepChoice | None] = [None] * len(stages)
    if plan.num_core == 0:  # of a normalisation the sums are the other ranks' too
        return [[0, 0] if stage.norm is not None else [0] for stage in stages], none
    limits = None if budget is None else BinLimits.of(budget, moves)
    costs: list[Costs] = []
    bounds: list[list[int]] = []
    for index, stage in enumerate(stages):
        (w_in, t_in), (w_out, t_out) = shapes[index], shapes[index + 1]
        here, gathers = Costs(w_in * t_in.itemsize, w_out * t_out.itemsize), stage.conv is not None
        if limits is not None:
            here, is_linear = measured[index], isinstance(stage, SumStage)
            if moves:  # gradients of rows that others look back to come beside those of the next stage
                num_joins = _num_joins(stages, index + 1)
                here = replace(here, node=here.node + num_joins * w_out * t_out.itemsize)
            packing = Packing(bin_bytes=limits.nodes if is_linear else limits.bin)
            gathers = gathers and not is_linear
        costs.append(here)
        bounds.append(bin_bounds(plan, packing, here, gathers))
    if not moves:
        return bounds, none
    choices = choose_sweeps(stages, views, plan, shapes, bounds, budget, features_stay)
    found = list(bounds)
    try:
        for index in range(len(stages)):
            choice, after = choices[index], choices[index + 1] if index + 1 < len(stages) else None
            if choice is None and (after is None or not after.stays):
                continue
            if budget is not None:
                packing = Packing(bin_bytes=SweepLimits.of(left_for_bins(choices, index, budget, features_stay)).bin)
            if choice is not None:
                found[index] = sweep_bounds(plan, choice, packing, costs[index])
            elif budget is not None:
                found[index] = bin_bounds(plan, packing, costs[index], False)
    except BudgetError:  # so small that sums of nodes leave no room for bins
        return bounds, none
    return found, choices


def _num_joins(stages: Sequence[ModelStage], index: int) -> int:
    """How many stages look back to what a stage reads."""
    names = set(stages[index].keep_as) if index < len(stages) else set()
    return sum(name in names for stage in stages for name in stage.joins)


def _sweeps(
    view: NeighborSums, choice: SweepChoice, bounds: list[int], made: dict[Any, list[NodeGroup]],
    places: StructurePlaces,
) -> SourceSweeps:  # fmt: skip
    """Groups are made once for layers that share them."""
    brings = choice.costs.limit is not None
    key = (view.kind == "gcn", view.weight is not None, tuple(choice.groups), tuple(choice.cuts))
    if key not in made:
        groups = make_groups(view, choice.groups, choice.cuts)
        made[key] = [group.to(places) for group in groups]
    return SourceSweeps(
        view, made[key], groups_of(bounds, choice.groups), choice.costs, brings, choice.stays, choice.swept_bytes,
        choice.binned_bytes,
    )  # fmt: skip


def shapes_of(stages: Sequence[ModelStage], plan: HaloPlan, x: Tensor, device: torch.device) -> Shapes:
    """The width and dtype of every stage's input, and of the last one's result."""
    shapes = [(x.shape[1], x.dtype)]
    for stage in stages:
        shapes.append(probe(stage, *shapes[-1], shapes_of_joins(stages, stage, shapes), device, plan.csc.edge_data))
    return shapes


def costs_of(
    stages: Sequence[ModelStage], plan: HaloPlan, whole: WholeDegrees, ids: Tensor, shapes: Shapes,
    device: torch.device, moves: bool,
) -> list[Costs]:  # fmt: skip
    """What bins of every stage take of the device, by measurement; `ids` are the nodes' by place."""
    found = []
    for index, stage in enumerate(stages):
        joined = shapes_of_joins(stages, stage, shapes[: index + 1])
        csc = _read_by(stage, plan.csc)
        found.append(measure_stage(stage, csc, whole, ids, *shapes[index], joined, device, moves))
    return found


def bytes_at_once(
    stages: Sequence[ModelStage], plan: HaloPlan, num_bins: int, shapes: Shapes, measured: Sequence[Costs]
) -> float:
    """The most that bins take of the device if all are kept until the way back, and their structure stays: as if each
    of a layer's bins read all rows, and three of them were on their way beside those."""
    num_edges, total, on_the_way = plan.csc.num_edges, 0.0, 0.0
    for stage, (w_in, t_in), costs in zip(stages, shapes[:-1], measured, strict=True):
        num_sources = min(num_bins * plan.num_local, num_edges + plan.num_core)
        total += costs.fixed * num_bins + costs.node * plan.num_core + costs.edge * num_edges
        total += costs.source * (plan.num_core if stage.conv is None else num_sources)
        on_the_way = max(on_the_way, 3.0 * plan.num_local * (w_in * t_in.itemsize + _SOURCE_BYTES))
    data = plan.csc.edge_data
    edge = plan.csc.indices.itemsize + (data.rows[WEIGHT].itemsize if data is not None and WEIGHT in data.rows else 0)
    structure = 2 * (num_edges * edge + num_bins * plan.num_local * plan.csc.indptr.itemsize)
    return total + on_the_way + structure


def _passes(
    view: NeighborSums, bounds: list[int], width: int, dtype: torch.dtype, limits: BinLimits | None,
    made: dict[Any, list[list[SourcePiece]]], device: torch.device,
) -> PiecewiseSums:  # fmt: skip
    """The pieces of a step's bins; their structures stay on `device` where there is no limit."""
    limit = None if limits is None else limits.piece
    weighted = view.weight is not None
    key = (view.kind == "gcn", weighted, tuple(bounds), width * dtype.itemsize if limit is not None else None)
    if key not in made:
        row = width * dtype.itemsize
        edge = view.csc.indices.dtype.itemsize + scratch_per_edge(width, dtype)
        if view.weight is not None:  # as it comes, and as rows are
            edge += view.weight.dtype.itemsize + dtype.itemsize
        costs = PieceCosts(row + _SOURCE_BYTES, edge, limit)
        made[key] = [
            [piece.to(device) for piece in make_pieces(view.csc, first, end, costs, view.weight)]
            for first, end in pairwise(bounds)
        ]
    return PiecewiseSums(view, made[key], limits is not None)


def _sources(here: Bin, csc: CSC | None) -> Tensor:
    """The local rows that a bin reads; `csc` is that of a view."""
    own = torch.arange(here.first, here.end)
    if csc is not None:
        return torch.cat([own, csc.indices[int(csc.indptr[here.first]) : int(csc.indptr[here.end])].long()])
    if here.csc is None:
        return own
    return torch.arange(here.csc.num_src) if here.src is None else here.src.long().cpu()


def _read_by(stage: ModelStage, csc: CSC) -> CSC:
    """The structure, with no other data of the edges than a stage takes."""
    data, conv = csc.edge_data, stage.conv
    if data is None or conv is None:
        return csc
    return replace(csc, edge_data=data.only(taken(conv, data.rows)))


def _bins_of(
    stage: ModelStage, step: int, csc: CSC, bounds: list[int], whole: WholeDegrees, made: dict[Any, list[Bin]],
    rows_device: torch.device, device: torch.device,
) -> list[Bin]:  # fmt: skip
    if stage.conv is None:
        return make_bins(None, bounds, None, step)
    csc = _read_by(stage, csc)
    key = (*(() if csc.edge_data is None else csc.edge_data.rows), *bounds)
    if key not in made:  # layers of one size share the structure
        made[key] = [each.to(rows_device, device) for each in make_bins(csc, bounds, whole)]
    return [replace(each, step=step) for each in made[key]]


def probe(
    stage: ModelStage, width: int, dtype: torch.dtype, joined: Sequence[tuple[int, torch.dtype]], device: torch.device,
    data: EdgeData | None = None,
) -> tuple[int, torch.dtype]:  # fmt: skip
    """The width and dtype of what a stage makes of rows of `width`, found by giving it one node, with a self loop.

    Torch's generator stays as it was, unless parameters get their size here, and are drawn: as in a first call.
    """
    if stage.norm is not None:
        return width, dtype
    one = torch.ones(1, dtype=torch.int64, device=device)
    csc = CSC(torch.tensor([0, 1], device=device), one.to(torch.int32) - 1, 1, whole=WholeDegrees(one, one))
    if isinstance(stage.conv, TypedConv):
        csc = stage.conv.one_node(device)
    else:
        csc.edge_data = None if data is None else alike(data, 1, 1, device)
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda, enabled=not is_lazy(stage.modules)):
        rows = torch.zeros(1, width, dtype=dtype, device=device)
        marked = [torch.zeros(1, w, dtype=t, device=device) for w, t in joined]
        now = KeyedRows(one - 1, 0)
        if isinstance(stage, SumStage):
            out = stage.run_sums(rows, rows, marked, now)
        else:
            out = stage.run(rows, csc, marked, now)
    if out.dim() != 2 or out.shape[0] != 1:
        names = ", ".join(type(module).__name__ for module in stage.modules)
        raise ValueError(f"{names} gave {list(out.shape)} for one node, expected one row: [1, width]")
    return out.shape[1], out.dtype


def shapes_of_joins(
    stages: Sequence[ModelStage], stage: ModelStage, shapes: Sequence[tuple[int, torch.dtype]]
) -> list[tuple[int, torch.dtype]]:
    marks = {name: shapes[index] for index, each in enumerate(stages[: len(shapes)]) for name in each.keep_as}
    return [marks[name] for name in stage.joins]


def _tell(bounds: list[list[int]], peers: Peers) -> list[list[list[int]]]:
    """The bounds of every rank, by rank and stage."""
    flat = torch.tensor([number for each in bounds for number in (len(each), *each)], dtype=torch.int64)
    told = []
    for got in peers.swap([flat] * peers.world_size):
        numbers, each = got.tolist(), []
        while numbers:
            size = numbers.pop(0)
            each.append(numbers[:size])
            numbers = numbers[size:]
        told.append(each)
    if any(len(each) != len(bounds) for each in told):
        raise ValueError(
            f"ranks have models of {sorted({len(each) for each in told})} stages: give all the same layers"
        )
    return told


def _cores(told: list[list[list[int]]]) -> list[int]:
    """How many nodes each rank has."""
    return [ranks[0][-1] for ranks in told]
