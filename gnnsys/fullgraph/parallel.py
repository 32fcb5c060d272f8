"""HybridParallel: a list of layers trained on the whole graph by all ranks, each computing its own nodes (G3, 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnsys.comm import Peers
from gnnsys.fullgraph.plan.bin_schedule import BinSchedule
from gnnsys.fullgraph.plan.bins import BudgetError
from gnnsys.fullgraph.plan.default_device import on_host
from gnnsys.fullgraph.plan.edge_data import edge_data_of
from gnnsys.fullgraph.plan.full_graph_plan import FullGraphPlan
from gnnsys.fullgraph.plan.full_graph_way import AS_GIVEN, KEPT, FullGraphWay
from gnnsys.fullgraph.plan.graph_types import EDGE_TYPE, GraphTypes
from gnnsys.fullgraph.plan.halo import HaloPlan, make_plan
from gnnsys.fullgraph.plan.pass_planner import LayerReader, PassPlanner, PlanOptions, whole_degrees
from gnnsys.fullgraph.plan.propose_ways import WayLimits, hardware, propose
from gnnsys.fullgraph.plan.rank_share import Ranks, RankShare, share_of
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.fullgraph.run.pass_times import PassClock, Times
from gnnsys.fullgraph.run.planned_passes import AUTO, PlannedPasses
from gnnsys.fullgraph.run.typed_layer import layer_name
from gnnsys.fullgraph.run.whole_pass import PassRunner
from gnnsys.fullgraph.typed_rows import join_rows, split_rows
from gnnsys.graph import check_ours
from gnnsys.observe import PassTrace
from gnnsys.ops import check_device, stream_key

if TYPE_CHECKING:
    from gnnsys.fullgraph.run.approximate import Policy
    from gnnsys.graph import Graph, NodeType
    from gnnsys.sampling import DistGraph

    TypedRows = Mapping[NodeType, Tensor]


_SAVED = "execution"  # the plan, in a state_dict


class HybridParallel(nn.Module):
    """Runs `layers` over the whole graph; a rank gives and gets rows of its own nodes, in the order of `nodes`.

    `layers` is a list of graph layers (ours, PyG's, or any module whose forward takes rows and a structure) and of
    modules that work row by row, or one of our reference models. `graph` is what `gnnsys.open` returned, or a graph in
    memory, which several ranks share by `ranks`, the rank of every node. Every rank makes the model with the same
    parameters, calls it, and calls backward. On a typed graph rows, nodes and `ranks` are by node type, and layers are
    typed ones, or one of the typed reference models.

    Gradients of parameters are sums over all ranks: let each rank's loss be its share of the whole's, for instance the
    sum over its labelled nodes divided by the number of labelled nodes of all ranks (`total`).

    >>> model = HybridParallel([SAGEConv(100, 256), nn.ReLU(), nn.Dropout(0.5), SAGEConv(256, 47)], graph)
    >>> x, y, train = (model.share.rows(name) for name in ("x", "y", "train_mask"))
    >>> count = model.total(train.sum())
    >>> loss = F.cross_entropy(model(x)[train], y[train], reduction="sum") / count
    >>> loss.backward()

    `edge_data` is what layers are told of edges: by the name of an argument of theirs the name of an array of edge
    data, or for a graph in memory a tensor, {"edge_weight": "w"}. Every graph layer of the list that has such an
    argument is given it, as it is now; `EdgeArguments` says otherwise for one of them.
    `schedule` says how computing and sending overlap. `recompute` keeps layers' inputs alone and computes bins again on
    the way back. `memory_budget` is how many bytes a bin may take on the device it is computed on, by measurement, or
    two of them where x is on the host and bins move there; besides the rows of layers, which live where x does. Unless
    all fit into it at once, bins are as large as it lets them be, and computed again on the way back. Where they move
    and there is none, it is half of what the device has free. `wire_dtype` is what rows and gradients travel as (their
    own type, or torch.bfloat16). Results are where x is, or on the `output_device`: where rows live on the host and
    labels on a GPU, their gradients come back through page-locked memory, which `.to` does not use. `seed` decides
    dropout, together with the number of the step, which is part of the model's state. Features that need no gradient
    travel once, when a tensor is first seen; all ranks must give a new one at the same time. `approximate` trades
    exactness of training passes for less or later communication: see `BoundarySampling` and `Staleness`. `trace` is of
    how many passes `trace()` keeps records. `execution="auto"` tries, over the first epochs of training, what could be
    faster than what is done without it, and goes on with what was; `execution` is then a plan, whose `report()` tells.
    A plan that was saved may be given instead.
    """

    step: Tensor

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.Module,
        graph: Graph | DistGraph | RankShare,
        *,
        ranks: Ranks | None = None,
        edge_data: Mapping[str, str | Tensor] | None = None,
        schedule: BinSchedule | None = None,
        recompute: bool = False,
        memory_budget: int | None = None,
        wire_dtype: torch.dtype | None = None,
        output_device: torch.device | str | None = None,
        seed: int = 0,
        approximate: Policy | None = None,
        group: Any = None,
        timeout: float = 1800.0,
        trace: int = 0,
        execution: str | FullGraphPlan | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(graph, RankShare):
            check_ours(graph)
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
        if execution is not None and execution != AUTO and not isinstance(execution, FullGraphPlan):
            raise ValueError(f'execution must be "auto", a FullGraphPlan or None, got {execution!r}')
        output_device = check_device(output_device, "output_device")
        self.layers = _as_module(layers)
        types = (graph.typed.types if graph.typed else None) if isinstance(graph, RankShare) else GraphTypes.of(graph)
        reader = LayerReader(self.layers, tuple(edge_data or ()) if types is None else (EDGE_TYPE,), types)
        self._peers = Peers(group, timeout=timeout)
        self.schedule = schedule or BinSchedule()
        with on_host(), self._peers.many_swaps():
            self.share = share_of(graph, self._peers.rank, self._peers.world_size, ranks)
            self.plan: HaloPlan = make_plan(self.share, self._peers, self.schedule.order)
            data = edge_data_of(self.share, self.plan, edge_data or {}, self._peers)
            self.plan = replace(self.plan, csc=replace(self.plan.csc, edge_data=data))
            whole = whole_degrees(self.plan, self._peers)
        self.recompute, self.memory_budget, self.wire_dtype, self.seed = recompute, memory_budget, wire_dtype, seed
        options = PlanOptions(
            schedule=self.schedule, recompute=recompute, memory_budget=memory_budget, wire_dtype=wire_dtype
        )
        ids = self.share.original_ids[self.plan.order]
        self._planner = PassPlanner(reader, self.plan, whole, ids, self._peers, options)
        self._passes: deque[PassTrace] = deque(maxlen=trace)
        self._limits = WayLimits(
            has_bins=self.schedule.packing is not None or memory_budget is not None,
            is_approximate=approximate is not None,
            is_typed=types is not None,
        )
        given = execution if isinstance(execution, FullGraphPlan) else None
        self._planned = None if execution is None else PlannedPasses(given)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device="cpu"))
        with on_host():
            self._runner = PassRunner(
                self.plan, Exchange if approximate is None else approximate.begin(self), output_device
            )

    @property
    def times(self) -> Times:
        """Seconds and bytes of the last pass."""
        return self._runner.times

    @property
    def nodes(self) -> Any:
        """Original ids of this rank's nodes, which rows go by; of a typed graph by node type."""
        return self.share.original_ids if self.share.typed is None else dict(self.share.typed.original_ids)

    def total(self, value: Tensor | float) -> float:
        """The sum of a number over all ranks."""
        here = torch.tensor([float(value)], dtype=torch.float64, device="cpu")
        self._peers.all_reduce(here).wait()
        return float(here)

    def forward(self, x: Tensor | TypedRows) -> Any:
        """Rows of this rank's nodes, [num_core, width of the last layer], from theirs; of a typed graph both are by
        node type, and results are of the types that have rows behind the last layer."""
        self._runner.check()
        reader, planner, planned = self._planner.reader, self._planner, self._planned
        rows, refusal = self._one_tensor(x)
        kind = planner.kind_of(rows) if isinstance(rows, Tensor) and rows.dim() == 2 else None
        epoch = int(self.step) + 1
        way = AS_GIVEN if planned is None else planned.way(kind, epoch)
        turn, seconds = (None, None) if planned is None else planned.last
        agreed = planner.agree(
            rows, self.training, lambda: self._runner.knows(rows, reader.version), refusal, way, seconds
        )
        clock = None
        if planned is not None:
            if planned.needs_plan(reader.version):
                self._plan_execution(planned, rows)
                way, turn = planned.way(kind, epoch), None
            trains = self.training and torch.is_grad_enabled()
            clock = planned.begin(kind, epoch, trains, planner.device_of(rows), agreed.is_known)
            planned.add(turn, agreed.seconds)
            planned.leave_sums()
            self._give_back(planned, rows, way)
        if self.training:
            self.step += 1
        try:
            out = self._run(rows, way, agreed.is_known, clock)
        except (MemoryError, torch.OutOfMemoryError, BudgetError) as error:
            if planned is None or self._peers.world_size > 1 or not planned.refuse(way, error):
                raise
            self._runner.recover()
            out = self._run(rows, planned.way(kind, epoch), False, None)
        if self.share.typed is None:
            return out
        assert reader.input_widths is not None
        return split_rows(out, self.share.typed, reader.stages, reader.input_widths)

    def _run(self, rows: Tensor, way: FullGraphWay, is_known: bool, clock: PassClock | None) -> Tensor:
        """A pass by a way."""
        plan = self._planner.plan_for(rows, way)
        trains = [p for p in self.parameters() if p.requires_grad]
        state = Pass(plan, stream_key(self.seed, int(self.step)), torch.is_grad_enabled())
        state.is_known, state.keeps_sums, state.clock = is_known, way.first == KEPT, clock
        if self._passes.maxlen:
            self._passes.append(PassTrace(int(self.step)))
            state.times.spans = self._passes[-1].spans
        return self._runner.run(state, rows, trains, self.training, self._planner.reader.version)

    def _plan_execution(self, planned: PlannedPasses, rows: Tensor) -> None:
        """Every rank makes the plan, of what all of them could do."""
        planner, halo = self._planner, self.plan
        counts = torch.tensor([halo.num_core, halo.csc.num_edges], dtype=torch.int64, device="cpu")
        self._peers.all_reduce(counts).wait()
        kind = planner.kind_of(rows)
        made_for = {
            "layers": planner.reader.digest,
            "rows": [kind[0], str(kind[1]), kind[2]],
            "graph": counts.tolist(),
            "ranks": halo.world_size,
            "hardware": hardware(planner.device_of(rows), rows.device, self._peers),
        }
        planned.make(
            kind, planner.reader.version, made_for, lambda: propose(planner, rows, halo, self._peers, self._limits)
        )

    def _give_back(self, planned: PlannedPasses, rows: Tensor, way: FullGraphWay) -> None:
        """What ways have taken that were left."""
        ways = planned.ways_left(way)
        if ways is not None:
            self._planner.drop_others(rows, ways)
            devices = {self._planner.rows_device_of(rows, each) for each in ways}
            self._runner.drop(sums=all(each.first != KEPT for each in ways), devices=devices)

    @property
    def execution(self) -> FullGraphPlan | None:
        """The plan of passes, with `execution="auto"` or a plan given: made when the first one begins."""
        return None if self._planned is None else self._planned.plan

    def _one_tensor(self, x: Tensor | TypedRows) -> tuple[Tensor, Exception | None]:
        """Rows of all types as one tensor, or what is wrong with them, which the other ranks have to hear of."""
        if self.share.typed is None:
            return x, None  # type: ignore[return-value]
        try:
            reader = self._planner.reader
            reader.look()
            rows, reader.input_widths = join_rows(x, self.share.typed, reader.stages)
            return rows, None
        except Exception as error:
            return torch.empty(0, 0, device="cpu"), error

    def least_bytes(self, x: Tensor | TypedRows) -> tuple[int, int]:
        """Payload that this rank sends: once for the features, and in each training pass, for inputs like `x`.

        Rows that others need, times the width in which they travel, and gradients of what it needs of others. The first
        call for a kind of input is one that every rank makes.
        """
        x = self._checked(x)
        plan, num_sent, num_halo = self._planner.plan_for(x, self._way(x)), sum(self.plan.rows_to()), self.plan.num_halo
        once = each = 0
        width, dtype, trains = x.shape[1], x.dtype, x.requires_grad
        for number, step in enumerate(plan.steps):
            size = width * (self.wire_dtype or dtype).itemsize if step.has_halo else 0
            if number == 0 and not trains:
                once = size * num_sent
            else:
                each += size * num_sent + (size * num_halo if trains else 0)
            width, dtype, trains = step.width, step.dtype, trains or bool(step.stage.parameters())
        return once, each

    def describe(self, x: Tensor | TypedRows) -> str:
        """What this rank does in a pass over inputs like `x`, a line per step. Every rank calls it."""
        given, x = x, self._checked(x)
        halo, plan = self.plan, self._planner.plan_for(x, self._way(x))
        lines = [
            f"rank {halo.rank} of {halo.world_size}: {halo.num_core:,} nodes, {halo.num_boundary:,} that others need, "
            f"{halo.csc.num_edges:,} in-edges, {halo.num_halo:,} nodes in the halo"
        ]
        width = x.shape[1]
        for number, step in enumerate(plan.steps):
            names = " + ".join(layer_name(module).lstrip("_") for module in step.stage.modules)
            line = f"step {number}: {names}, {width} -> {step.width}, {len(step.bins)} bins"
            if step.has_halo:
                num_sent = sum(len(rows) for sent in step.sends for _, rows in sent)
                line += f", sends {num_sent:,} rows and receives {halo.num_halo:,} in {len(step.chunks)} messages"
            if step.piecewise_sums is not None:
                line += f", inputs of a bin in {max(map(len, step.piecewise_sums.pieces), default=0)} pieces at most"
            if step.source_sweeps is not None:
                line += f", {step.source_sweeps.describe()}"
            lines.append(line + (", gathers nothing" if step.neighbor_sums is not None else ""))
            width = step.width
        once, each = self.least_bytes(given)
        lines.append(f"payload sent: {once:,} bytes once, {each:,} bytes in each training pass")
        return "\n".join(lines)

    def _way(self, x: Tensor) -> FullGraphWay:
        """How the next pass over rows like x goes."""
        planned = self._planned
        return AS_GIVEN if planned is None else planned.way(self._planner.kind_of(x), int(self.step) + 1)

    def _checked(self, x: Tensor | TypedRows) -> Tensor:
        rows, refusal = self._one_tensor(x)
        if refusal is not None:
            raise refusal
        return rows

    def trace(self) -> list[PassTrace]:
        """Records of the last passes, as many as `trace` said: which bins ran, what was sent and waited for, when."""
        return list(self._passes)

    def byte_matrix(self, width: int, itemsize: int = 4) -> Tensor:
        """Bytes per exchange of rows of `width`, [world_size, world_size]: line r is what rank r sends."""
        rows = torch.zeros(self.plan.world_size, self.plan.world_size, dtype=torch.int64, device="cpu")
        rows[self.plan.rank] = torch.tensor(self.plan.rows_to(), device="cpu")
        self._peers.all_reduce(rows).wait()
        return rows * width * itemsize

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        saved = None if self._planned is None else self._planned.saved()
        if saved is not None:
            destination[prefix + _SAVED] = saved

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        saved = state_dict.pop(prefix + _SAVED, None)  # a model without a plan takes no notice of it
        super()._load_from_state_dict(state_dict, prefix, *args)
        if saved is not None and self._planned is not None:
            self._planned.load(saved)

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
