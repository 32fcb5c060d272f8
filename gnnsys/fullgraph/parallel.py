"""HybridParallel: a list of layers trained on the whole graph by all ranks, each computing its own nodes (G3, 4.2)."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gnnsys.comm import Peers
from gnnsys.fullgraph.offload.mover import Depot, lanes_between
from gnnsys.fullgraph.plan.bins import BudgetError, Costs, Packing
from gnnsys.fullgraph.plan.edge_arguments import edge_data_of
from gnnsys.fullgraph.plan.halo import HaloPlan, make_plan
from gnnsys.fullgraph.plan.halves import with_halves
from gnnsys.fullgraph.plan.layer_trial import check_layers, check_parameters
from gnnsys.fullgraph.plan.module_layout import Layout, numbers_of
from gnnsys.fullgraph.plan.rank_share import Share, share_of
from gnnsys.fullgraph.plan.stages import Stage, make_stages
from gnnsys.fullgraph.plan.step_plan import Schedule, Shapes, Step, bytes_at_once, costs_of, make_steps, shapes_of
from gnnsys.fullgraph.run.backward import Backward
from gnnsys.fullgraph.run.forward import Forward
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.pass_state import Ground, Pass, Times
from gnnsys.observe import PassTrace
from gnnsys.ops import WEIGHT, WholeDegrees, stream_key
from gnnsys.store import free_device_memory

if TYPE_CHECKING:
    from gnnsys.fullgraph.run.approximate import Policy
    from gnnsys.graph import Graph
    from gnnsys.sampling import DistGraph

_BINS = 6  # per layer, where there is something to overlap with: the best of 1 to 8 in docs/benchmarks.md
_BIN_NODES = 1500  # of a bin between ranks, on average: many smaller ones cost more than what they overlap
# What modules of all ranks have in common besides what plans are made from
_AGREED = ("p", "dropout", "negative_slope", "eps", "momentum", "track_running_stats")


class Seen(NamedTuple):
    """Features that need no gradient: the user's tensor, its rows by place and halo, and sums of them, by bin."""

    x: Any
    version: tuple[int, int, torch.dtype]
    rows: Tensor
    sums: dict[tuple[int, int], Tensor]


class HybridParallel(nn.Module):
    """Runs `layers` over the whole graph; a rank gives and gets rows of its own nodes, in the order of `nodes`.

    `layers` is a list of graph layers (ours, PyG's, or any module whose forward takes rows and a structure) and of
    modules that work row by row, or one of our reference models. `graph` is what `gnnsys.open` returned, or a graph in
    memory, which several ranks share by `ranks`, the rank of every node. Every rank makes the model with the same
    parameters, calls it, and calls backward.

    Gradients of parameters are sums over all ranks: let each rank's loss be its share of the whole's, for instance the
    sum over its labelled nodes divided by the number of labelled nodes of all ranks (`total`).

    >>> model = HybridParallel([SAGEConv(100, 256), nn.ReLU(), nn.Dropout(0.5), SAGEConv(256, 47)], graph)
    >>> x, y, train = (model.share.rows(name) for name in ("x", "y", "train_mask"))
    >>> count = model.total(train.sum())
    >>> loss = F.cross_entropy(model(x)[train], y[train], reduction="sum") / count
    >>> loss.backward()

    `edge_data` is what layers are told of edges: by the name of an argument of theirs the name of an array of edge
    data, or for a graph in memory a tensor, {"edge_weight": "w"}. Every graph layer of the list that has such an
    argument is given it, as it is now; `Told` says otherwise for one of them.
    `schedule` says how computing and sending overlap. `recompute` keeps layers' inputs alone and computes bins again on
    the way back. `memory_budget` is how many bytes a bin may take on the device it is computed on, by measurement, or
    two of them where x is on the host and bins move there; besides the rows of layers, which live where x does. Unless
    all fit into it at once, bins are as large as it lets them be, and computed again on the way back. Where they move
    and there is none, it is half of what the device has free. `wire_dtype` is what rows and gradients
    travel as (their own type, or torch.bfloat16). `seed` decides dropout, together with the number of the step, which
    is part of the model's state. Features that need no gradient travel once, when a tensor is first seen; all ranks
    must give a new one at the same time. `approximate` trades exactness of training passes for less or later
    communication: see `BoundarySampling` and `Staleness`. `trace` is of how many passes `trace()` keeps records.
    """

    step: Tensor

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.Module,
        graph: Graph | DistGraph | Share,
        *,
        ranks: Tensor | None = None,
        edge_data: Mapping[str, str | Tensor] | None = None,
        schedule: Schedule | None = None,
        recompute: bool = False,
        memory_budget: int | None = None,
        wire_dtype: torch.dtype | None = None,
        seed: int = 0,
        approximate: Policy | None = None,
        group: Any = None,
        timeout: float = 1800.0,
        trace: int = 0,
    ) -> None:
        super().__init__()
        if edge_data is not None and not isinstance(edge_data, Mapping):
            raise ValueError(f"edge_data must say what arguments are, like {{'edge_weight': 'w'}}, got {edge_data!r}")
        if trace < 0:
            raise ValueError(f"trace is a number of passes, got {trace}")
        if wire_dtype is not None and not wire_dtype.is_floating_point:
            raise ValueError(f"wire_dtype must be a floating-point dtype, got {wire_dtype}")
        if memory_budget is not None and memory_budget < 1:
            raise ValueError(f"memory_budget must be a positive number of bytes, got {memory_budget}")
        if memory_budget is not None and schedule is not None and schedule.packing is not None:
            raise ValueError("memory_budget sizes the bins: leave the schedule's packing away")
        if approximate is not None and not hasattr(approximate, "begin"):
            raise ValueError(f"approximate must be a policy, such as BoundarySampling(0.1), got {approximate!r}")
        self.layers = _as_module(layers)
        self._edge_names = tuple(edge_data or ())
        self._grounds: dict[Any, Ground] = {}
        self._checked: set[Any] = set()
        self._is_checked = False  # whether all ranks were found to have the same parameters
        self._seen: Seen | None = None  # features whose halo is here
        self._layout: Layout | None = None  # what the stages are made of
        self._stages: list[Stage] = []
        self._look()
        self._peers = Peers(group, timeout=timeout)
        self.schedule = schedule or Schedule()
        with torch.device("cpu"):  # where plans are made, whatever torch's default device is
            self.share = share_of(graph, self._peers.rank, self._peers.world_size, ranks)
            self.plan: HaloPlan = make_plan(self.share, self._peers, self.schedule.order)
            data = edge_data_of(self.share, self.plan, edge_data or {}, self._peers)
            self.plan = replace(self.plan, csc=replace(self.plan.csc, edge_data=data))
            self._whole = _whole_degrees(self.plan, self._peers)
        self.recompute, self.wire_dtype, self.seed = recompute, wire_dtype, seed
        self.memory_budget = memory_budget
        self.times = Times()  # of the last pass
        self._passes: deque[PassTrace] = deque(maxlen=trace)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device="cpu"))
        self._failure = ""  # what ended a pass in the middle
        with torch.device("cpu"):
            self._train_exchange = Exchange if approximate is None else approximate.begin(self)

    @property
    def nodes(self) -> Tensor:
        """Original ids of this rank's nodes, which rows go by."""
        return self.share.original_ids

    def total(self, value: Tensor | float) -> float:
        """The sum of a number over all ranks."""
        here = torch.tensor([float(value)], dtype=torch.float64, device="cpu")
        self._peers.all_reduce(here).wait()
        return float(here)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of this rank's nodes, [num_core, width of the last layer], from theirs."""
        if self._failure:
            raise RuntimeError(
                f"an earlier pass failed ({self._failure}) and left messages under way between the ranks: start again "
                "from the last checkpoint"
            )
        is_known = self._agree(x)
        ground = self._ground(x)
        wants_grad = torch.is_grad_enabled()
        trains = [p for p in self.parameters() if p.requires_grad]
        if self.training:
            self.step += 1
        state = Pass(ground, stream_key(self.seed, int(self.step)), wants_grad)
        state.is_known = is_known
        if self._passes.maxlen:
            self._passes.append(PassTrace(int(self.step)))
            state.times.spans = self._passes[-1].spans
        out: Tensor = _Whole.apply(self, state, x, *trains)
        return out

    def least_bytes(self, x: Tensor) -> tuple[int, int]:
        """Payload that this rank sends: once for the features, and in each training pass, for inputs like `x`.

        Rows that others need, times the width in which they travel, and gradients of what it needs of others. The first
        call for a kind of input is one that every rank makes.
        """
        ground, num_sent, num_halo = self._ground(x), sum(self.plan.rows_to()), self.plan.num_halo
        once = each = 0
        width, dtype, trains = x.shape[1], x.dtype, x.requires_grad
        for number, step in enumerate(ground.steps):
            size = width * (self.wire_dtype or dtype).itemsize if step.has_halo else 0
            if number == 0 and not trains:
                once = size * num_sent
            else:
                each += size * num_sent + (size * num_halo if trains else 0)
            width, dtype, trains = step.width, step.dtype, trains or bool(step.stage.parameters())
        return once, each

    def describe(self, x: Tensor) -> str:
        """What this rank does in a pass over inputs like `x`, a line per step. Every rank calls it."""
        plan, ground = self.plan, self._ground(x)
        lines = [
            f"rank {plan.rank} of {plan.world_size}: {plan.num_core:,} nodes, {plan.num_boundary:,} that others need, "
            f"{plan.csc.num_edges:,} in-edges, {plan.num_halo:,} nodes in the halo"
        ]
        width = x.shape[1]
        for number, step in enumerate(ground.steps):
            names = " + ".join(type(module).__name__.lstrip("_") for module in step.stage.modules)
            line = f"step {number}: {names}, {width} -> {step.width}, {len(step.bins)} bins"
            if step.has_halo:
                num_sent = sum(len(rows) for sent in step.sends for _, rows in sent)
                line += f", sends {num_sent:,} rows and receives {plan.num_halo:,} in {len(step.chunks)} messages"
            if step.passes is not None:
                line += f", inputs of a bin in {max(map(len, step.passes.pieces), default=0)} pieces at most"
            lines.append(line + (", gathers nothing" if step.view is not None else ""))
            width = step.width
        once, each = self.least_bytes(x)
        lines.append(f"payload sent: {once:,} bytes once, {each:,} bytes in each training pass")
        return "\n".join(lines)

    def trace(self) -> list[PassTrace]:
        """Records of the last passes, as many as `trace` said: which bins ran, what was sent and waited for, when."""
        return list(self._passes)

    def byte_matrix(self, width: int, itemsize: int = 4) -> Tensor:
        """Bytes per exchange of rows of `width`, [world_size, world_size]: line r is what rank r sends."""
        rows = torch.zeros(self.plan.world_size, self.plan.world_size, dtype=torch.int64, device="cpu")
        rows[self.plan.rank] = torch.tensor(self.plan.rows_to(), device="cpu")
        self._peers.all_reduce(rows).wait()
        return rows * width * itemsize

    def _look(self) -> tuple[bool, ...]:
        """Reads the layers as they are now, and drops what was planned for others; which of their modules train."""
        now = Layout.of(self.layers)
        if self._layout is None or now.what != self._layout.what:
            self._stages = make_stages(self.layers, self._edge_names)
            self._grounds, self._checked, self._seen = {}, set(), None
            self._is_checked = False
            self._layout = Layout.of(self.layers)  # dropouts became ours
            self._digest = self._layout.digest()
        return now.modes

    def _agree(self, x: Tensor) -> bool:
        """Whether all ranks have seen x before. What one of them refuses, of x or of the layers, all refuse."""
        refusal, digest, is_known, is_planned = None, 0, False, False
        try:
            if x.dim() != 2 or x.shape[0] != self.plan.num_core or not x.is_floating_point():
                raise ValueError(
                    f"x must be float [{self.plan.num_core}, width], a row for each of this rank's nodes, got "
                    f"{x.dtype} {list(x.shape)}"
                )
            modes = self._look()
            self._check(x, modes)
            key, seen = self._key(x), self._seen
            is_known = seen is not None and seen.x() is x and seen.version == _version(x)
            is_planned = key in self._grounds
            if self._peers.world_size > 1:
                digest = self._digest_of(key, modes)
        except Exception as error:  # whatever it is, the others wait to hear of it
            refusal = error
        told = torch.tensor([is_known, digest, -digest, is_planned, self._is_checked], dtype=torch.int64, device="cpu")
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
            self._grounds.pop(key, None)
        self._is_checked = bool(told[4])
        return bool(told[0])

    def _digest_of(self, key: tuple[Any, ...], modes: tuple[bool, ...]) -> int:
        """A number that is the same on ranks that will send and await the same in this pass."""
        width, dtype, x_trains, _, _, cast = key  # devices are each rank's own
        trains = [p.requires_grad for p in self.parameters()]
        settings = numbers_of(self.layers.modules(), _AGREED)
        here = (self._digest, width, dtype, x_trains, cast, modes, self.training, trains, settings)
        return zlib.crc32(repr((*here, torch.is_grad_enabled())).encode())

    def _check(self, x: Tensor, modes: tuple[bool, ...]) -> None:
        """Once for each kind of rows, and for training and not: whether the layers can be computed in bins."""
        device = next((p.device for p in self.parameters()), x.device)
        key = (x.shape[1], x.dtype, device, modes, torch.is_grad_enabled())
        if key not in self._checked:
            check_layers(self._stages, x.shape[1], x.dtype, device, self.plan.csc.edge_data)
            self._checked.add(key)

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        """What passes must have in common to share a plan."""
        device = next((p.device for p in self.parameters()), x.device)
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return x.shape[1], x.dtype, x.requires_grad, x.device, device, cast

    @torch.inference_mode(False)
    def _ground(self, x: Tensor) -> Ground:
        """What passes over rows of this width share, made the first time they are seen."""
        self._look()
        key = self._key(x)
        device = key[4]
        if key not in self._grounds:
            lanes = lanes_between(x.device, device)
            in_halves = device == x.device or lanes is not None  # sums are made where rows lie, or come
            stages = self._stages
            if in_halves:
                data = self.plan.csc.edge_data
                weighted = data is not None and WEIGHT in data.rows
                stages = with_halves(stages, x.requires_grad, weighted)
            shapes = shapes_of(stages, self.plan, x, device)
            budget, costs = self._budget(stages, shapes, device, lanes is not None)
            with self._explained(budget), torch.device("cpu"):
                steps = make_steps(
                    stages, self.plan, self._whole, self._peers, self._packing(lanes is not None),
                    budget, shapes, costs, x.device, device, lanes is not None,
                )  # fmt: skip
            ids = self.share.original_ids[self.plan.order].to(device)
            self._grounds[key] = Ground(
                self.plan, self._peers, self.schedule, steps, ids, device, self.wire_dtype,
                self.recompute or budget is not None, None if lanes is None else Depot(lanes), budget is not None,
            )  # fmt: skip
            if not self._is_checked:  # lazy parameters are there only now
                check_parameters(self.named_parameters(), self._peers)
                self._is_checked = True
        return self._grounds[key]

    def _budget(
        self, stages: list[Stage], shapes: Shapes, device: torch.device, moves: bool
    ) -> tuple[int | None, list[Costs]]:
        """What bins must be packed into: as given, or, where they move and nobody said how large they are, half of what
        the device has free; None if all of them fit into that at once, and can be kept. And what they cost."""
        room = self.memory_budget
        if self.plan.num_core == 0 or (room is None and (self.schedule.packing is not None or not moves)):
            return room, []
        room = max(1, free_device_memory(device) // 2) if room is None else room
        costs = costs_of(stages, self.plan, self._whole, shapes, device, moves)
        needed = bytes_at_once(stages, self.plan, _BINS, shapes, costs)
        return None if needed <= room else room, costs

    @contextlib.contextmanager
    def _explained(self, budget: int | None) -> Iterator[None]:
        """Adds to what a budget is refused for that nobody gave it."""
        try:
            yield
        except BudgetError as error:
            if budget is None or self.memory_budget is not None:
                raise
            raise BudgetError(
                f"{error}. No memory_budget was given, so it is half of what the device has free, {budget:,} bytes"
            ) from error

    def _packing(self, moves: bool) -> Packing:
        if self.schedule.packing is not None:
            return self.schedule.packing
        if moves:
            return Packing(num_bins=_BINS)
        worth = min(_BINS, max(1, self.plan.num_core // _BIN_NODES))
        return Packing(num_bins=worth, least_nodes=_BIN_NODES // 3) if self.plan.world_size > 1 else Packing()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _input(self, x: Tensor, steps: list[Step], is_known: bool) -> tuple[Tensor, bool]:
        """The first step's input by place, with room for the halo, and whether the halo is there already."""
        if is_known:
            assert self._seen is not None
            return self._seen.rows, True
        num_rows = self.plan.num_local if steps[0].has_halo else self.plan.num_core
        rows = x.new_empty((num_rows, x.shape[1]))
        rows[: self.plan.num_core] = x.detach()[self.plan.order_on(x.device)]
        version = _version(x)
        self._seen = None if version is None else Seen(weakref.ref(x), version, rows, {})
        return rows.requires_grad_(x.requires_grad), not steps[0].has_halo

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Remembers what a pass failed of: its messages would be met by another pass."""
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def __getstate__(self) -> Any:
        raise TypeError(
            "HybridParallel has connections and cannot be copied or pickled: copy model.layers and make another one on "
            "every rank, or save model.state_dict()"
        )

    def extra_repr(self) -> str:
        plan = self.plan
        return f"rank {plan.rank} of {plan.world_size}, {plan.num_core:,} nodes, {plan.num_halo:,} in the halo"


def _as_module(layers: Sequence[nn.Module] | nn.Module) -> nn.Module:
    if isinstance(layers, nn.Module):
        return layers
    for each in layers:
        if not isinstance(each, nn.Module):
            raise ValueError(f"layers must be modules, got {type(each).__name__}")
    return nn.ModuleList(layers)


def _version(x: Tensor) -> tuple[int, int, torch.dtype] | None:
    """What tells that a tensor is still what it was, None where nothing does.

    Writes that torch does not count, through `x.data` and numpy, leave no trace.
    """
    return None if x.requires_grad or x.is_inference() else (x._version, x.data_ptr(), x.dtype)


class _Whole(torch.autograd.Function):
    """A whole pass as one operation for autograd: backward runs the bins in reverse."""

    @staticmethod
    def forward(ctx: Any, model: HybridParallel, state: Pass, x: Tensor, *parameters: Tensor) -> Tensor:
        rows, is_here = model._input(x, state.ground.steps, state.is_known)
        state.constant = None if model._seen is None else model._seen.sums
        state.wants_grad = state.wants_grad and any(t.requires_grad for t in (x, *parameters))
        ctx.model, ctx.state, ctx.parameters, ctx.is_done = model, state, parameters, False
        trains = model.training and state.wants_grad
        ctx.exchange = model._train_exchange(state) if trains else Exchange(state)
        with torch.set_grad_enabled(state.wants_grad), model._failing():
            out = Forward(state, ctx.exchange).run(rows, is_here)
        model.times = state.times
        return out.detach()[model.plan.places_on(out.device)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.is_done:
            raise RuntimeError("a pass over the graph is differentiated once, and nothing of it is kept: run it again")
        ctx.is_done = True
        state, exchange = ctx.state, ctx.exchange
        ctx.state = ctx.exchange = None
        plan = exchange.plan
        with ctx.model._failing():
            x_grad, found = Backward(state, exchange).run(grads[0][plan.order_on(grads[0].device)])
        if x_grad is not None:
            x_grad = x_grad[plan.places_on(x_grad.device)]
        return None, None, x_grad, *(found.get(id(p)) for p in ctx.parameters)


def _whole_degrees(plan: HaloPlan, peers: Peers) -> WholeDegrees:
    """In-degrees and numbers of self loops of all local rows; those of the halo are asked of their owners, once."""
    csc = plan.csc
    degrees = csc.in_degrees()
    dst = csc.dst()
    loops = torch.bincount(dst[csc.indices == dst], minlength=plan.num_core)
    found = []
    for own in (degrees, loops):
        told = peers.swap([own[places] for places in plan.send_places])
        found.append(torch.cat([own, *told]))
    return WholeDegrees(*found)
