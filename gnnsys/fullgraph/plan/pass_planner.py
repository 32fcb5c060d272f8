"""Plans of a model's passes, by the kind of rows they are over: made by all ranks together, when first asked for.

People change modules at any time, so a pass reads the layers as they are, and plans anew where they are other ones.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnnsys.comm import Peers
from gnnsys.fullgraph.offload.copy_streams import streams_between
from gnnsys.fullgraph.offload.mover import StagingBuffers
from gnnsys.fullgraph.plan.bin_schedule import BinSchedule
from gnnsys.fullgraph.plan.bins import BudgetError, Costs, Packing
from gnnsys.fullgraph.plan.default_device import on_host
from gnnsys.fullgraph.plan.full_graph_way import AS_GIVEN, FullGraphWay
from gnnsys.fullgraph.plan.graph_types import GraphTypes
from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.fullgraph.plan.layer_trial import check_layers, check_parameters
from gnnsys.fullgraph.plan.model_stages import ModelStage, make_stages
from gnnsys.fullgraph.plan.module_layout import ModuleLayout, numbers_of
from gnnsys.fullgraph.plan.neighbor_sums import NeighborSums
from gnnsys.fullgraph.plan.stage_halves import with_halves
from gnnsys.fullgraph.plan.step_plan import Shapes, Step, bytes_at_once, costs_of, make_steps, shapes_of
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer
from gnnsys.graph import NodeType
from gnnsys.ops import STRUCTURES, WEIGHT, WholeDegrees
from gnnsys.planning import DEVICE
from gnnsys.store import MemoryBudget, MemoryPromise

NUM_BINS = 6  # per layer, where there is something to overlap with: the best of 1 to 8 in docs/benchmarks.md
_BIN_NODES = 1500  # of a bin between ranks, on average: many smaller ones cost more than what they overlap
_DERIVED = 4  # structures that a typed layer derives from that of a bin, besides one per edge type
# What modules of all ranks have in common besides what plans are made from
_AGREED = ("p", "dropout", "negative_slope", "eps", "momentum", "track_running_stats")


@dataclass(frozen=True, eq=False)
class PassPlan:
    """What all passes over rows of one width share. Bins are computed on `device`; rows live on `rows_device`, where x
    is unless a plan says otherwise.

    With `buffers` bins move between the two; `brings_structure` says that their structures do too.
    """

    halo: HaloPlan
    peers: Peers
    schedule: BinSchedule
    steps: list[Step]
    ids: Tensor  # original ids by place
    device: torch.device
    rows_device: torch.device
    wire_dtype: torch.dtype | None
    recompute: bool
    buffers: StagingBuffers | None = None
    brings_structure: bool = False


class LayerReader:
    """The stages of a list of layers, as the layers are now. `version` counts how often they became other ones."""

    def __init__(self, layers: nn.Module, edge_names: Sequence[str], types: GraphTypes | None = None) -> None:
        self.layers, self._edge_names, self.types = layers, edge_names, types
        self.layout: ModuleLayout | None = None  # what the stages are made of
        self.stages: list[ModelStage] = []
        self.input_widths: dict[NodeType, int] | None = None  # of a typed graph, the types that x has rows of
        self.version = self.digest = 0
        self.look()

    def look(self) -> tuple[bool, ...]:
        """Reads the layers; which of their modules train."""
        now = ModuleLayout.of(self.layers)
        if self.layout is None or now.what != self.layout.what:
            self.stages = make_stages(self.layers, self._edge_names, self.types)
            self.version += 1
            self.layout = ModuleLayout.of(self.layers)  # dropouts became ours
            self.digest = self.layout.digest()
        return now.modes


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user says of how passes are to be computed; see `HybridParallel`."""

    schedule: BinSchedule
    recompute: bool
    memory_budget: int | None
    wire_dtype: torch.dtype | None


class Agreed(NamedTuple):
    """What all ranks know when a pass begins: whether x `is_known` to all, and the most `seconds` that one of them took
    for an earlier pass, None where not all have told."""

    is_known: bool
    seconds: float | None


class PassPlanner:
    """The plans of one model. `whole` are degrees of all local rows, `original_ids` those of own nodes by place."""

    def __init__(
        self, reader: LayerReader, halo: HaloPlan, whole: WholeDegrees, original_ids: Tensor, peers: Peers,
        options: PlanOptions,
    ) -> None:  # fmt: skip
        self.reader, self._halo, self._whole, self._ids, self._peers = reader, halo, whole, original_ids, peers
        self._options = options
        self._version = reader.version
        self.plans: dict[Any, PassPlan] = {}
        self._checked: dict[Any, list[Any]] = {}  # types that typed layers were found to use
        self._promises: dict[torch.device, MemoryPromise] = {}  # room for bins, of the plan that needs most
        self._views: weakref.WeakValueDictionary[Any, NeighborSums] = weakref.WeakValueDictionary()  # that plans share
        self._is_checked = False  # whether all ranks were found to have the same parameters

    def agree(
        self, x: Tensor, is_training: bool, is_known: Callable[[], bool], refusal: Exception | None = None,
        way: FullGraphWay = AS_GIVEN, seconds: float | None = None,
    ) -> Agreed:  # fmt: skip
        """Whether x `is_known` on all ranks, for a pass by `way`. What one refuses, of x or of the layers, all refuse.

        `refusal` is what this rank has found wrong already, if anything; `seconds` what an earlier pass took here.
        """
        digest, known, is_planned = 0, False, False
        try:
            if refusal is not None:
                raise refusal
            if x.dim() != 2 or x.shape[0] != self._halo.num_core or not x.is_floating_point():
                raise ValueError(
                    f"x must be float [{self._halo.num_core}, width], a row for each of this rank's nodes, got "
                    f"{x.dtype} {list(x.shape)}"
                )
            modes = self._look()
            self._check(x, modes)
            key, known = self._key(x, way), is_known()
            is_planned = key in self.plans
            if self._peers.world_size > 1:
                digest = self._digest_of(x, modes, is_training)
        except Exception as error:  # whatever it is, the others wait to hear of it
            refusal = error
        suits = refusal is None and self._peers.route.suits(self.rows_device_of(x, way))
        nanoseconds = 0 if seconds is None else max(1, round(1e9 * seconds))
        flags = [known, digest, -digest, is_planned, self._is_checked, suits, seconds is not None, -nanoseconds]
        told = torch.tensor(flags, dtype=torch.int64, device="cpu")
        self._peers.all_reduce(told, dist.ReduceOp.MIN).wait()
        if refusal is not None:
            raise refusal
        if told[1] != -told[2]:
            raise ValueError(
                "the layers (their kinds, shapes and settings, which of them train and how much they drop), the width, "
                "dtype or requires_grad of x, autocast or no_grad are not the same on all ranks, or another rank "
                "refused them: change layers on every rank alike"
            )
        if not told[3]:  # plans are made by all ranks, or by none
            self.plans.pop(key, None)
        self._is_checked = bool(told[4])
        self._peers.agree_on_route(self.rows_device_of(x, way), bool(told[5]))
        return Agreed(bool(told[0]), -float(told[7]) / 1e9 if told[6] else None)

    @torch.inference_mode(False)
    def plan_for(self, x: Tensor, way: FullGraphWay = AS_GIVEN) -> PassPlan:
        """The plan of passes over rows like x, by a way."""
        self._look()
        key = self._key(x, way)
        if key not in self.plans:
            plan = self._plan(x, way)
            if not self._is_checked:  # lazy parameters are there only now
                check_parameters(self.reader.layers.named_parameters(prefix="layers"), self._peers)
                self._is_checked = True
            self.plans[key] = plan  # not before: what was refused is checked again in the next pass
        return self.plans[key]

    def _look(self) -> tuple[bool, ...]:
        """Reads the layers, and drops what was planned for others; which of their modules train."""
        modes = self.reader.look()
        if self.reader.version != self._version:
            self.plans, self._checked, self._is_checked = {}, {}, False
            self._version = self.reader.version
        return modes

    def drop_others(self, x: Tensor, ways: Sequence[FullGraphWay]) -> None:
        """Forgets plans of other ways than these, and the room that their bins were promised."""
        kept = [self._key(x, way) for way in ways]
        places = {(key[3], key[-1]) for key in kept}
        self.plans = {key: plan for key, plan in self.plans.items() if (key[3], key[-1]) in places}
        if all(plan.buffers is None for plan in self.plans.values()) and self._options.memory_budget is None:
            for promise in self._promises.values():
                promise.close()
            self._promises = {}

    def stages_of(self, x: Tensor, way: FullGraphWay) -> list[ModelStage]:
        """The stages of passes over rows like x, with layers in halves where sums can be made."""
        device, rows_device, stages = self.device_of(x), self.rows_device_of(x, way), self.reader.stages
        if device != rows_device and streams_between(rows_device, device) is None:
            return stages
        data, (narrows_first, takes_apart, _) = self._halo.csc.edge_data, way.of_plan
        weighted = data is not None and WEIGHT in data.rows
        return with_halves(stages, x.requires_grad or narrows_first, weighted, takes_apart=takes_apart)

    def shapes_by(self, x: Tensor, way: FullGraphWay) -> Shapes:
        """The width and dtype of what every stage reads, and of the last one's result."""
        return shapes_of(self.stages_of(x, way), self._halo, x, self.device_of(x))

    def bytes_on_device(self, x: Tensor, way: FullGraphWay) -> int:
        """What passes take of the device that computes if rows lie there too: rows and gradients of all layers, what is
        kept of bins, structures."""
        stages, halo, device = self.stages_of(x, way), self._halo, self.device_of(x)
        shapes = shapes_of(stages, halo, x, device)
        costs = costs_of(stages, halo, self._whole, self._ids, shapes, device, False) if halo.num_core else []
        rows = sum(2 * halo.num_local * width * dtype.itemsize for width, dtype in shapes)
        return int(rows + (bytes_at_once(stages, halo, 1, shapes, costs) if costs else 0))

    def _plan(self, x: Tensor, way: FullGraphWay) -> PassPlan:
        options, halo, stages = self._options, self._halo, self.stages_of(x, way)
        device, rows_device = self.device_of(x), self.rows_device_of(x, way)
        streams = streams_between(rows_device, device)
        moves = streams is not None
        shapes = shapes_of(stages, halo, x, device)
        budget, costs = self._budget(stages, shapes, device, moves)
        with self._explained(budget), on_host():
            steps = make_steps(
                stages, halo, self._whole, self._peers, self._packing(moves, way.num_bins), budget, shapes, costs,
                rows_device, device, moves, not x.requires_grad, self._views,
            )  # fmt: skip
        if self.reader.types is not None:
            each = _DERIVED + len(self.reader.types.edge_types)
            STRUCTURES.reserve(each * sum(len(step.bins) for step in steps))
        buffers = None if streams is None else StagingBuffers(streams)
        recompute = options.recompute or budget is not None
        return PassPlan(
            halo, self._peers, options.schedule, steps, self._ids.to(device), device, rows_device, options.wire_dtype,
            recompute, buffers, brings_structure=budget is not None,
        )  # fmt: skip

    def _digest_of(self, x: Tensor, modes: tuple[bool, ...], is_training: bool) -> int:
        """A number that is the same on ranks that will send and await the same in this pass."""
        trains = [p.requires_grad for p in self.reader.layers.parameters()]
        settings = numbers_of(self.reader.layers.modules(), _AGREED)
        here = (
            self.reader.digest,
            self.reader.input_widths,
            *self.kind_of(x),  # devices are each rank's own
            self._cast(x),
            modes,
            is_training,
            trains,
            settings,
        )
        return zlib.crc32(repr((*here, torch.is_grad_enabled())).encode())

    def _check(self, x: Tensor, modes: tuple[bool, ...]) -> None:
        """Once for each kind of rows, and for training and not: whether the layers can be computed in bins."""
        device, widths = self.device_of(x), self.reader.input_widths
        by_type = None if widths is None else tuple(widths.items())
        key = (x.shape[1], by_type, x.dtype, device, modes, torch.is_grad_enabled())
        typed = [m for stage in self.reader.stages for m in stage.modules if isinstance(m, (TypedConv, TypedRowLayer))]
        if key not in self._checked:
            check_layers(self.reader.stages, x.shape[1], x.dtype, device, self._halo.csc.edge_data, widths)
            self._checked[key] = [module.types_in_use for module in typed]
        for module, found in zip(typed, self._checked[key], strict=True):
            module.types_in_use = found

    def device_of(self, x: Tensor) -> torch.device:
        """Where bins are computed: where the parameters are."""
        return next((p.device for p in self.reader.layers.parameters()), x.device)

    def rows_device_of(self, x: Tensor, way: FullGraphWay) -> torch.device:
        """Where rows of all layers live."""
        return self.device_of(x) if way.place == DEVICE else x.device

    def _cast(self, x: Tensor) -> torch.dtype | None:
        kind = self.device_of(x).type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @staticmethod
    def kind_of(x: Tensor) -> tuple[int, torch.dtype, bool]:
        """What rows of all ranks have in common."""
        return x.shape[1], x.dtype, x.requires_grad

    def _key(self, x: Tensor, way: FullGraphWay) -> tuple[Any, ...]:
        """What passes must have in common to share a plan."""
        return *self.kind_of(x), self.rows_device_of(x, way), self.device_of(x), self._cast(x), way.of_plan

    def _budget(
        self, stages: list[ModelStage], shapes: Shapes, device: torch.device, moves: bool
    ) -> tuple[int | None, list[Costs]]:
        """What bins must be packed into: as given, or, where they move and nobody said how large they are, half of what
        the device's `MemoryBudget` has left. None if all of them fit into that at once, and can be kept. And their
        costs."""
        room, halo = self._options.memory_budget, self._halo
        if halo.num_core == 0 or (room is None and (self._options.schedule.packing is not None or not moves)):
            return room, []
        own = self._promises.get(device)
        left = MemoryBudget.of(device).left() + (0 if own is None else own.bytes)
        room = max(1, left // 2) if room is None else room
        costs = costs_of(stages, halo, self._whole, self._ids, shapes, device, moves)
        needed = bytes_at_once(stages, halo, NUM_BINS, shapes, costs)
        self._promise(device, int(min(needed, room, left)))
        return None if needed <= room else room, costs

    def _promise(self, device: torch.device, num_bytes: int) -> None:
        """Has caches and other models leave room for the bins. Passes of one model follow each other: they share it."""
        own = self._promises.get(device)
        if own is None or own.bytes < num_bytes:
            if own is not None:
                own.close()
            budget = MemoryBudget.of(device)
            self._promises[device] = budget.promise(min(num_bytes, budget.left()), "bins of full-graph training")
            self._promises[device].keep_for(self)

    def bins_worth(self) -> int:
        """How many bins this rank's nodes are worth, between ranks."""
        return max(1, self._halo.num_core // _BIN_NODES)

    def moves(self, x: Tensor) -> bool:
        """Whether bins move between where x is and where they are computed."""
        return streams_between(x.device, self.device_of(x)) is not None

    @contextlib.contextmanager
    def _explained(self, budget: int | None) -> Iterator[None]:
        """Adds to what a budget is refused for that nobody gave it."""
        try:
            yield
        except BudgetError as error:
            if budget is None or self._options.memory_budget is not None:
                raise
            raise BudgetError(
                f"{error}. No memory_budget was given, so it is half of what the device has free, {budget:,} bytes"
            ) from error

    def _packing(self, moves: bool, num_bins: int | None) -> Packing:
        if self._options.schedule.packing is not None:
            return self._options.schedule.packing
        if moves:
            return Packing(num_bins=num_bins or NUM_BINS)
        if self._halo.world_size == 1:
            return Packing() if num_bins is None else Packing(num_bins=num_bins)
        worth = min(num_bins or NUM_BINS, self.bins_worth())
        return Packing(num_bins=worth, least_nodes=_BIN_NODES // 3)


def whole_degrees(plan: HaloPlan, peers: Peers) -> WholeDegrees:
    """In-degrees and numbers of self loops of all local rows; those of the halo are asked of their owners, once."""
    csc = plan.csc
    degrees = csc.in_degrees()
    dst = csc.dst()
    loops = torch.bincount(dst[csc.indices == dst], minlength=plan.num_core)
    found = []
    for own in (degrees, loops):
        told = peers.swap([own[places] for places in plan.send_places], plan.rows_from())
        found.append(torch.cat([own, *told]))
    return WholeDegrees(*found)
