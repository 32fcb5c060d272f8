"""Which plans are possible for a model, a graph and so much memory, beside each other: what `gnnsys plan` shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnnsys.planning.execution.comparison import PlanComparison, PlanEstimate, compare_batches
from gnnsys.planning.execution.epoch_rules import (
    AGGREGATE_FIRST,
    COPIED,
    EPOCH_RULES,
    KEPT,
    PAPER_RULES,
    STREAMED,
    TRANSFORM_FIRST,
    EpochPlan,
    plan_epoch,
    why_not_epoch,
)
from gnnsys.planning.execution.model_shape import AGGREGATE, PURE, SPLIT, TRANSFORM, LayerSize, ModelShape
from gnnsys.planning.execution.rules import BatchRule, BatchSizes, plan_batch
from gnnsys.planning.scheduling.operations import OperatorCosts
from gnnsys.planning.scheduling.shares import bound
from gnnsys.planning.scheduling.simulate import list_schedule
from gnnsys.planning.scheduling.turn_groups import SamplingStage, predict_groups, without_sampling

MEMORY_SHARE = 0.5  # of the device's memory, for graph and cache: the rest is for batches and the model
WITHOUT_A_PLAN = BatchRule(PURE, "host", "host")
_MOST_IN_TURN = 256  # batches of a group
_FITS = "all of the graph fits the device, and nothing crosses the bus then"


@dataclass(frozen=True)
class GraphBytes:
    """What a graph takes: structure, and rows of features."""

    structure: float
    rows: float

    def room_for_cache(self, device_bytes: float) -> float:
        """Bytes for rows on the device where not all of them fit: structure comes first, if it fits."""
        left = MEMORY_SHARE * device_bytes
        return left - self.structure if self.structure <= left else left


def choose_for_batches(
    costs: OperatorCosts, model: ModelShape, batch: BatchSizes, graph: GraphBytes, device_bytes: float
) -> PlanComparison:
    """All plans of mini-batches on a device with so much memory that can be taken.

    Costs that have a `slow_down`, as a `MachineProfile` does, say what operators take beside each other.
    """
    rules, refused = possible_rules(model, batch, graph, device_bytes)
    plans = {how.name: plan_batch(costs, model, batch, how) for how in rules}
    is_there = any(how.rows == "device" for how in rules)
    compared = compare_batches(
        plans, default=WITHOUT_A_PLAN.name, refused=refused, mixes=not is_there,
        slow_down=getattr(costs, "slow_down", None),
    )  # fmt: skip
    best = next(one.name for one in compared.estimates if not one.pattern)
    how = next(how for how in rules if how.name == best)
    room = max(0.0, MEMORY_SHARE * device_bytes)
    turns = _turns(costs, model, batch, how, overlapped=compared.chosen.seconds, budget=room)
    return replace(compared, remarks=(*compared.remarks, turns))


def _turns(
    costs: OperatorCosts, model: ModelShape, batch: BatchSizes, how: BatchRule, *, overlapped: float, budget: float
) -> str:
    """What groups of batches would take that host and device sample together, before any of them trains."""
    edges, nodes, hops = max(1.0, batch.sampled_edges), batch.layers[0].sources, len(batch.layers)
    by_device = how.sampling if how.sampling != "host" else "pinned"
    host, device = (
        costs.seconds(f"sample/{who}", edges=edges, nodes=nodes, hops=hops) for who in ("host", by_device)
    )  # fmt: skip
    training = without_sampling(plan_batch(costs, model, batch, replace(how, sampling="host")))
    stage = SamplingStage(host, device, batch.structure_bytes)
    best, groups = predict_groups(
        training, stage, overlapped=overlapped, budget=budget, num_batches=_MOST_IN_TURN
    )  # fmt: skip
    in_turn = min(groups[1:], key=lambda group: group.seconds, default=None)
    if in_turn is None:
        return "in turn: no room for the structure of a batch that waits"
    told = (
        f"groups of {in_turn.size} batches that both sample, then train, take {1000 * in_turn.seconds:.3g} ms a batch"
    )
    return f"in turn: {told}; " + ("they pay" if best.size else f"without groups {1000 * overlapped:.3g}")


def possible_rules(
    model: ModelShape, batch: BatchSizes, graph: GraphBytes, device_bytes: float
) -> tuple[list[BatchRule], dict[str, str]]:
    """By what fits and what is legal; and what is not, with the reason. The first is what is done without a plan."""
    room = MEMORY_SHARE * device_bytes
    rules = [WITHOUT_A_PLAN, BatchRule(PURE, "pinned", "bus")]
    if graph.structure + graph.rows <= room:
        return [*rules, BatchRule(PURE, "device", "device")], dict.fromkeys((TRANSFORM, AGGREGATE, SPLIT), _FITS)
    takes = f"half of the device's memory is {room:,.0f} bytes"
    refused = {"rows on the device": f"the graph takes {graph.structure + graph.rows:,.0f} bytes, {takes}"}
    who = ["host", "pinned"]
    if graph.structure <= room:
        who.append("device")
    else:
        refused["device samples"] = f"structure takes {graph.structure:,.0f} bytes, {takes}"
    for sampling in who:
        rules += [BatchRule(PURE, sampling, rows) for rows in ("host", "bus")]
        if batch.hit_rate > 0:
            rules.append(BatchRule(PURE, sampling, "cached"))
        rules += [BatchRule(rule, sampling, "host") for rule in (TRANSFORM, AGGREGATE) if model.why_not(rule) is None]
        if batch.hit_rate > 0 and model.why_not(SPLIT) is None:
            rules.append(BatchRule(SPLIT, sampling, "cached"))
    refused |= {rule: why for rule in (TRANSFORM, AGGREGATE, SPLIT) if (why := model.why_not(rule)) is not None}
    if batch.hit_rate <= 0:
        refused["rows from the cache"] = "no room is left for one"
    return list(dict.fromkeys(rules)), refused


def choose_for_epochs(
    costs: OperatorCosts, model: ModelShape, size: LayerSize, graph: GraphBytes, device_bytes: float, *,
    trains: bool = True, epochs: int = 100,
) -> PlanComparison:  # fmt: skip
    """All plans of full-graph training; what is done once is divided by the number of epochs.

    Where rows fit the device, plans that copy them every epoch are those of DAHA's measurements. They are shown, with
    its choice among them.
    """
    fits = graph.structure + graph.rows <= MEMORY_SHARE * device_bytes
    refused = {rule: why for rule in EPOCH_RULES[STREAMED] if (why := why_not_epoch(model, rule)) is not None}
    plans: dict[tuple[str, str], PlanEstimate] = {}
    for rows in (KEPT, COPIED) if fits else (STREAMED,):
        for rule in EPOCH_RULES[rows]:
            if rule not in refused:
                plan = plan_epoch(costs, model, size, rule, rows, trains=trains)
                plans[rule, rows] = _estimate(plan, epochs)
    if fits:
        lacks = "the host would work on rows that it does not have"
        refused |= {f"{rule}, {KEPT}": lacks for rule in PAPER_RULES[1:] if rule not in refused}
    ours = {key: one for key, one in plans.items() if key[1] != COPIED}
    chosen = min(ours.values(), key=lambda one: one.seconds)
    honest = next((plans[key] for key in ((TRANSFORM_FIRST, KEPT), (TRANSFORM_FIRST, STREAMED)) if key in plans), None)
    beside = "" if honest is None or honest is chosen else (
        f", {honest.seconds / chosen.seconds:.2f} times as fast as {honest.name}"
    )  # fmt: skip
    why = "pure GPU: rows fit the device, and nothing crosses the bus" if fits else "rows do not fit the device"
    remarks = _paper_remarks(plans) if fits else ()
    ordered = tuple(sorted(plans.values(), key=lambda one: one.seconds))
    shares = bound({one.name: one.busy for one in ours.values()})
    return PlanComparison("epoch", ordered, chosen, why + beside, shares, refused, remarks)


def _estimate(plan: EpochPlan, epochs: int) -> PlanEstimate:
    """Epochs follow each other, as weights do."""
    share = plan.once / epochs
    seconds = list_schedule([plan.graph]).seconds + share
    return PlanEstimate(plan.name, seconds, plan.graph.busy(), plan.graph.chain(), once=plan.once, once_share=share)


def _paper_remarks(plans: dict[tuple[str, str], PlanEstimate]) -> tuple[str, ...]:
    """DAHA's choice, beside its own baseline and beside the order that gnnsys takes anyway."""
    of_paper = {rule: plans[rule, COPIED] for rule in PAPER_RULES if (rule, COPIED) in plans}
    if len(of_paper) < 2 or AGGREGATE_FIRST not in of_paper:
        return ()
    best = min(of_paper, key=lambda rule: of_paper[rule].seconds)
    share = of_paper[best].seconds / of_paper[AGGREGATE_FIRST].seconds
    lines = [
        f"of DAHA's plans, which copy rows every epoch, {best} is the fastest: {share:.2f} of the time of its "
        f"baseline, {AGGREGATE_FIRST}"
    ]
    if (TRANSFORM_FIRST, COPIED) in plans:
        order = plans[TRANSFORM_FIRST, COPIED].seconds
        lines.append(
            f"order alone, {TRANSFORM_FIRST} with the same copies: {order / of_paper[AGGREGATE_FIRST].seconds:.2f} of "
            f"that baseline; {best} takes {of_paper[best].seconds / order:.2f} of its time"
        )
    return tuple(lines)
