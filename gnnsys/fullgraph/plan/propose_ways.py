"""Which ways passes over a graph could go: by what the layers are, by what fits into which memory, by what is idle.

Every rank proposes what it could do, and what all could is tried by all.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gnnsys.comm import Peers
from gnnsys.fullgraph.keyed_dropout import Dropout
from gnnsys.fullgraph.plan.full_graph_plan import ALL, APART, NONE, FullGraphPlan, WayContest
from gnnsys.fullgraph.plan.full_graph_way import ANEW, AS_GIVEN, KEPT, NARROW, FullGraphWay
from gnnsys.fullgraph.plan.halo import HaloPlan
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.pass_planner import NUM_BINS, PassPlanner
from gnnsys.fullgraph.plan.stage_halves import stated_halves
from gnnsys.fullgraph.run.pass_times import PassClock
from gnnsys.fullgraph.run.typed_layer import layer_name
from gnnsys.nn import GraphLayer, why_whole
from gnnsys.observe import num_local_ranks, num_usable_cores
from gnnsys.ops import CSC, spmm
from gnnsys.planning import DEVICE
from gnnsys.store import MemoryBudget

_SHARE = 2  # a way may take one part in so many of the memory that is left
_SAMPLE = 32  # one node in so many tells what sums take
_SOON = 100  # epochs, as many as a training has: sums that pay within them are kept from the first one on
_FEW_BINS, _MANY_BINS = 2, 2 * NUM_BINS
_APPROXIMATE = "training is approximate, and goes as it is told"
_ROWS, _BINS, _CORES = "rows on the device", "other numbers of bins", "all cores"


@dataclass(frozen=True, kw_only=True)
class WayLimits:
    """What the user has said already: `has_bins` of their own, `approximate` training, a `typed` graph."""

    has_bins: bool
    is_approximate: bool
    is_typed: bool


@dataclass(frozen=True)
class FirstLayer:
    """What is known of the first graph layer. `why_not`: its sums cannot be kept; "" where they can.

    `narrow` is the width that it could make rows before it sums them, None where it makes none narrower. `is_pyg`: it
    is called without a plan. `has_apart`: there are layers of PyG's that could be taken in halves.
    """

    why_not: str
    narrow: int | None = None
    is_pyg: bool = False
    has_apart: bool = False


def propose(planner: PassPlanner, x: Tensor, halo: HaloPlan, peers: Peers, limits: WayLimits) -> FullGraphPlan:
    """The plan of passes over rows like x, to be tried. Every rank calls it, and has the same words in it."""
    first, device = first_layer(planner, x, limits), planner.device_of(x)
    could = _could(planner, x, halo, limits, first).of_all(peers)
    if not could.is_alike:
        first = FirstLayer("ranks differ in where rows are and where layers are")
    passed_over: dict[str, str] = {}
    contests: list[WayContest] = []
    if could.moves and limits.is_approximate:
        passed_over[_ROWS] = _APPROXIMATE
    elif could.moves and not could.on_device.fits:
        passed_over[_ROWS] = could.on_device.why_not(device)
    elif could.moves:
        contests.append(WayContest({"place": DEVICE}))
    base, others, late = _of_first(x, first, could.kept, passed_over)
    contests += others
    if late and halo.world_size == 1 and not could.moves:
        late[0].cost = _sums_seconds(x, halo)
    if could.is_idle:
        contests.append(WayContest({"all_cores": True}))
    else:
        passed_over[_CORES] = "they are used already" if device.type == "cpu" else "a GPU computes"
    is_packed = torch.tensor([int(planner.plan_for(x, base).brings_structure)], dtype=torch.int64, device="cpu")
    peers.all_reduce(is_packed, dist.ReduceOp.MAX).wait()
    if is_packed and not limits.has_bins:
        passed_over[_BINS] = "bins are as large as memory allows"
    else:
        contests += _bins(limits, could.moves, halo.world_size == 1, could.worth, passed_over)
    facts = _facts(x, device, planner.reader.stages, could.kept, first)
    sums = NONE if first.why_not else APART if first.is_pyg else ALL
    return FullGraphPlan(base, contests + late, passed_over=passed_over, facts=facts, sums=sums)


@dataclass(frozen=True)
class _ByteRoom:
    """Bytes that something takes of a rank's memory, and what that may give."""

    bytes: int
    left: int
    fits: bool

    @classmethod
    def of(cls, device: torch.device, num_bytes: int) -> _ByteRoom:
        left = MemoryBudget.of(device).share() // _SHARE
        return cls(num_bytes, left, num_bytes <= left)

    def why_not(self, device: torch.device) -> str:
        return f"they take {self.bytes:,} bytes, and half of what {device} has left is {self.left:,}"


@dataclass(frozen=True)
class _Could:
    """What a rank could do: rows `on_device`, sums `kept`; whether its bins move and some of its cores are idle, and
    how many bins its nodes are worth. `digest` is of what it knows of the first layer: others know the same where they
    are `is_alike`."""

    on_device: _ByteRoom
    kept: _ByteRoom
    moves: bool
    is_idle: bool
    worth: int
    digest: int
    is_alike: bool = True

    def of_all(self, peers: Peers) -> _Could:
        """What all ranks could do, and the most that one of them needs."""
        rooms = [value for room in (self.on_device, self.kept) for value in (int(room.fits), room.left, -room.bytes)]
        flags = [*rooms, -int(self.moves), -int(self.is_idle), -self.worth, self.digest, -self.digest]
        told = torch.tensor(flags, dtype=torch.int64, device="cpu")
        peers.all_reduce(told, dist.ReduceOp.MIN).wait()
        least = told.tolist()
        on_device, kept = (_ByteRoom(-most, left, bool(fits)) for fits, left, most in (least[:3], least[3:6]))
        is_alike = least[9] == -least[10]
        return _Could(on_device, kept, bool(least[6]), bool(least[7]), -least[8], self.digest, is_alike)


def _could(planner: PassPlanner, x: Tensor, halo: HaloPlan, limits: WayLimits, first: FirstLayer) -> _Could:
    device, moves = planner.device_of(x), planner.moves(x)
    on_device = kept = _ByteRoom(0, 0, True)
    if moves and not limits.is_approximate:
        on_device = _ByteRoom.of(device, planner.bytes_on_device(x, AS_GIVEN))
    if not first.why_not:
        num_rows = halo.num_core if first.narrow is None else halo.num_local  # narrow rows need no wide halo
        num_bytes = num_rows * x.shape[1] * x.dtype.itemsize
        kept = _ByteRoom.of(x.device, num_bytes)
    is_idle = device.type == "cpu" and cores_of_rank() > torch.get_num_threads()
    return _Could(on_device, kept, moves, is_idle, planner.bins_worth(), zlib.crc32(repr(first).encode()))


def _of_first(
    x: Tensor, first: FirstLayer, kept: _ByteRoom, passed_over: dict[str, str]
) -> tuple[FullGraphWay, list[WayContest], list[WayContest]]:
    """The way to begin with, contests of how layers are computed, and that of sums which pay late."""
    apart = {"takes_apart": True} if first.has_apart else {}
    if first.why_not:
        passed_over[KEPT] = first.why_not
        return AS_GIVEN, [WayContest(apart)] if apart else [], []
    pays = 1 if first.narrow is None else math.ceil(x.shape[1] / (2 * first.narrow))
    late = []
    if not kept.fits:
        passed_over[KEPT] = kept.why_not(x.device)
        how = ANEW if first.narrow is None else NARROW
    elif pays > _SOON:
        how = NARROW
        why = (
            f"when what they save is what they cost: {x.shape[1]} columns once, or {first.narrow} twice in every epoch"
        )
        late = [WayContest({"first": KEPT}, cost=None, pays=pays, why=why)]
    else:
        how = KEPT
        if first.narrow is not None:
            passed_over[NARROW] = f"sums that are kept have paid after {pays} epoch{'s' if pays > 1 else ''}"
    if first.is_pyg:  # which is called without a plan
        return AS_GIVEN, [WayContest({**apart, "first": how})], late
    return FullGraphWay(first=how), [WayContest(apart)] if apart else [], late


def _sums_seconds(x: Tensor, halo: HaloPlan) -> float:
    """What sums of all rows would take, by those of a few nodes; on one rank, where rows lie."""
    csc, end = halo.csc, -(-halo.num_core // _SAMPLE)
    num_edges = int(csc.indptr[end])
    few = CSC(csc.indptr[: end + 1].to(x.device), csc.indices[:num_edges].to(x.device), csc.num_src)
    seconds: list[float] = []
    for _ in range(4):  # the first one also loads kernels, and others may hold one up
        with PassClock(x.device, seconds.append).running(is_back=True), torch.no_grad():
            spmm(few, x.detach())
    return min(seconds[1:]) * csc.num_edges / max(1, num_edges)


def _facts(
    x: Tensor, device: torch.device, stages: Sequence[ModelStage], kept: _ByteRoom, first: FirstLayer
) -> list[str]:
    place = f"rows on {x.device}, computed on {device}"
    if x.device == device:
        place += ": pure GPU, nothing crosses the bus" if device.type == "cuda" else ""
    lines = [place]
    if not first.why_not:
        conv = next(stage.conv for stage in stages if stage.conv is not None)
        lines.append(f"sums of {_name(conv)} that are kept take {kept.bytes:,} bytes of {x.device}")
    return lines


def _bins(limits: WayLimits, moves: bool, is_alone: bool, worth: int, passed_over: dict[str, str]) -> list[WayContest]:
    if limits.has_bins:
        passed_over[_BINS] = "bins are as you say"
    elif limits.is_approximate:
        passed_over[_BINS] = _APPROXIMATE
    elif moves:
        return [WayContest({"num_bins": NUM_BINS // 2}), WayContest({"num_bins": _MANY_BINS})]
    elif is_alone:
        passed_over[_BINS] = "one rank has nothing to send while it computes"
    elif worth <= _FEW_BINS:
        passed_over[_BINS] = "no rank has nodes for more than two"
    else:
        many = [WayContest({"num_bins": _MANY_BINS})] if worth >= _MANY_BINS else []
        return [WayContest({"num_bins": _FEW_BINS}), *many]
    return []


def first_layer(planner: PassPlanner, x: Tensor, limits: WayLimits) -> FirstLayer:
    """What the layers say of the first of them that is a graph layer."""
    if limits.is_typed:
        return FirstLayer("layers of typed graphs are called")
    if limits.is_approximate:
        return FirstLayer(_APPROXIMATE)
    if x.device != planner.device_of(x) and not planner.moves(x):
        return FirstLayer(f"rows on {x.device} are not summed for layers on {planner.device_of(x)}")
    stages = planner.reader.stages
    number = next(index for index, stage in enumerate(stages) if stage.conv is not None)
    conv = stages[number].conv
    assert conv is not None
    called = [stage.conv for stage in stages if stage.conv is not None and not isinstance(stage.conv, GraphLayer)]
    apart = [each for each in called if stated_halves(each, True) is not None]
    is_pyg, has_apart = any(each is conv for each in apart), bool(apart)
    why_not, halves = _why_not(stages, number, conv, x), stated_halves(conv, True)
    if why_not or halves is None or halves.narrow_first is None:
        return FirstLayer(why_not, None, is_pyg, has_apart)
    way = FullGraphWay(first=NARROW, takes_apart=has_apart)
    return FirstLayer("", planner.shapes_by(x, way)[1][0], is_pyg, has_apart)


def _why_not(stages: Sequence[ModelStage], number: int, conv: nn.Module, x: Tensor) -> str:
    """Why sums of the first graph layer are other ones in every epoch, or are none."""
    before = [module for stage in stages[:number] for module in stage.modules]
    if x.requires_grad:
        return "rows train: their sums are other ones in every epoch"
    dropout = next((module for module in before if isinstance(module, Dropout)), None)
    if dropout is not None:
        return f"Dropout comes before {_name(conv)}: its rows are scaled otherwise in every epoch"
    if before:
        return f"{_name(before[0])} comes before {_name(conv)}, so its rows are other ones in every epoch"
    if stated_halves(conv, True) is None:
        return f"{_name(conv)} {why_whole(conv) or 'is not linear in sums over neighbours'}"
    return ""


def cores_of_rank() -> int:
    """Cores of this machine for each of its ranks."""
    return max(1, num_usable_cores() // num_local_ranks(os.environ))


def hardware(device: torch.device, rows_device: torch.device, peers: Peers) -> str:
    """What a plan depends on beside layers and graph; the same words on every rank. All ranks call it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    here = f"{name}, rows on {rows_device.type}, {cores_of_rank()} cores"
    digest = zlib.crc32(here.encode())
    told = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    peers.all_reduce(told, dist.ReduceOp.MIN).wait()
    return here if told[0] == -told[1] else f"of several kinds, {int(told[0])} to {int(-told[1])}"


def _name(module: nn.Module) -> str:
    return layer_name(module).lstrip("_")
