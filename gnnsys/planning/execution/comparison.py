"""Plans beside each other: what each takes and what binds it, the bound of the linear program, the choice and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gnnsys.planning.scheduling.contention import SlowDown, slowed
from gnnsys.planning.scheduling.operations import RESOURCES, PlanGraph
from gnnsys.planning.scheduling.shares import RuleShares, bound, round_shares
from gnnsys.planning.scheduling.simulate import steady_seconds

MIX_IS_WORTH = 0.98  # of the best rule's time: a mix has more that can go wrong
_BINDS = 0.95  # of a plan's time that its busiest resource is busy, to say that it binds


@dataclass(frozen=True)
class PlanEstimate:
    """`seconds` of a batch or an epoch in the long run; `busy` of them on each resource; `chain`, alone and from its
    first operation to its last. A mix has a `pattern` of names. `once` are seconds before the first epoch, of which
    `once_share` is in `seconds`."""

    name: str
    seconds: float
    busy: dict[str, float]
    chain: float
    pattern: tuple[str, ...] = ()
    once: float = 0.0
    once_share: float = 0.0

    @property
    def binds(self) -> str:
        """The busiest resource, or that operations wait for each other, or what is done once."""
        busiest = max(self.busy, key=lambda resource: self.busy[resource])
        if self.once_share > self.busy[busiest]:
            return "once"
        return busiest if self.busy[busiest] >= _BINDS * (self.seconds - self.once_share) else "order"

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.name, "seconds": self.seconds, "busy": self.busy, "chain": self.chain}
        more = {"pattern": list(self.pattern)} if self.pattern else {}
        return found | more | ({"once": self.once} if self.once else {}) | {"binds": self.binds}


@dataclass(frozen=True)
class PlanComparison:
    """`estimates`, the fastest first. `refused` plans have a reason. `remarks` are lines below the table."""

    what: str
    estimates: tuple[PlanEstimate, ...]
    chosen: PlanEstimate
    reason: str
    shares: RuleShares | str
    refused: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def report(self) -> str:
        """A table that a person can check, in milliseconds."""
        width = max(len(one.name) for one in self.estimates) + 2
        heads = (*RESOURCES, self.what)
        lines = [" " * width + "".join(f"{head:>10}" for head in heads) + "  binds"]
        for one in self.estimates:
            mark = "*" if one is self.chosen else " "
            figures = [*(one.busy[resource] for resource in RESOURCES), one.seconds]
            cells = "".join(f"{_milliseconds(seconds):>10}" for seconds in figures)
            lines.append(f"{mark} {one.name:<{width - 2}}{cells}  {one.binds}")
        lines += [f"  {name}: not possible, {why}" for name, why in self.refused.items()]
        lines += [_told(one.pattern) for one in self.estimates if one.pattern]
        lines.append(self._bound())
        lines += list(self.remarks)
        lines.append(f"chosen: {self.chosen.name}; {self.reason}")
        return "\n".join(lines)

    def _bound(self) -> str:
        if isinstance(self.shares, str):
            return f"bound: not known, {self.shares}"
        shares = ", ".join(f"{share:.0%} {name}" for name, share in self.shares.shares.items() if share >= 0.005)
        by = " and ".join(self.shares.binding)
        return f"bound: no mix of these takes less than {_milliseconds(self.shares.seconds)} ms, by {by}: {shares}"

    def to_json(self) -> dict[str, Any]:
        shares: Any = {"why": self.shares}
        if not isinstance(self.shares, str):
            found = self.shares
            shares = {"seconds": found.seconds, "shares": found.shares, "binding": list(found.binding)}
        return {
            "what": self.what,
            "plans": [one.to_json() for one in self.estimates],
            "refused": dict(self.refused),
            "bound": shares,
            "remarks": list(self.remarks),
            "chosen": self.chosen.name,
            "reason": self.reason,
        }


def compare_batches(
    graphs: Mapping[str, PlanGraph],
    *,
    default: str | None = None,
    refused: Mapping[str, str] | None = None,
    mixes: bool = True,
    slow_down: SlowDown | None = None,
) -> PlanComparison:
    """Plans of batches that follow each other without end, by name, and the best mix of them where it `mixes`.

    `default` is what is done without a plan. With `slow_down`, operations are slower beside each other; the bound is
    of what they take alone.
    """
    estimates = [_estimate(name, [graph], slow_down) for name, graph in graphs.items()]
    shares = bound({name: graph.busy() for name, graph in graphs.items()})
    best = min(estimates, key=lambda one: one.seconds)
    chosen = best
    if mixes and not isinstance(shares, str) and len(pattern := round_shares(shares.shares)) > 1:
        mix = replace(_estimate("mix", [graphs[name] for name in pattern], slow_down), pattern=pattern)
        estimates.append(mix)
        if mix.seconds < MIX_IS_WORTH * best.seconds:
            chosen = mix
    ordered = tuple(sorted(estimates, key=lambda one: one.seconds))
    return PlanComparison("batch", ordered, chosen, _reason(chosen, ordered, default), shares, dict(refused or {}))


def _estimate(name: str, graphs: Sequence[PlanGraph], slow_down: SlowDown | None) -> PlanEstimate:
    if slow_down is not None:
        graphs = slowed(graphs, slow_down)
    busy = [graph.busy() for graph in graphs]
    mean = {resource: sum(one[resource] for one in busy) / len(busy) for resource in RESOURCES}
    return PlanEstimate(name, steady_seconds(graphs), mean, max(graph.chain() for graph in graphs))


def _told(pattern: tuple[str, ...]) -> str:
    counts = "; ".join(f"{pattern.count(name)} by {name}" for name in dict.fromkeys(pattern))
    return f"mix: of {len(pattern)} batches {counts}"


def _reason(chosen: PlanEstimate, estimates: Sequence[PlanEstimate], default: str | None) -> str:
    binds = "its operations wait for each other" if chosen.binds == "order" else f"{chosen.binds} binds"
    without = next((one for one in estimates if one.name == default), None)
    if without is None:
        return binds
    if without is chosen:
        return f"what is done without a plan; {binds}"
    return f"{without.seconds / chosen.seconds:.2f} times as fast as without a plan ({without.name}); {binds}"


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value else "-"
