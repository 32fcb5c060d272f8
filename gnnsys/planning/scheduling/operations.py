"""What a batch does: a small graph of operations, each on one resource, and the operations it has to wait for.

DAHA calls it an execution plan graph (section 3.2.2). A resource serves one operation at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

CORES, UP, DOWN, GPU = "cores", "bus up", "bus down", "gpu"
RESOURCES = (CORES, UP, DOWN, GPU)


class OperatorCosts(Protocol):
    """What an operator takes on a machine, measured or described."""

    def seconds(self, operator: str, **sizes: float) -> float: ...


@dataclass(frozen=True)
class Operation:
    """`after` are the numbers of operations of the same batch that end before this one begins.

    An operation that `needs_weights` reads what the step of the batch before has written.
    """

    operator: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    needs_weights: bool = False

    def __post_init__(self) -> None:
        if self.resource not in RESOURCES:
            raise ValueError(f"a resource is one of {', '.join(RESOURCES)}, got {self.resource!r}")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"{self.operator} takes {self.seconds} seconds; a number of 0 or more is meant")

    @property
    def device(self) -> str:
        return {CORES: "host", GPU: "device"}.get(self.resource, "bus")


class PlanGraph:
    """Operations in an order in which each comes after those it waits for. The step is done when all of them are."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.operations = tuple(operations)
        if not self.operations:
            raise ValueError("a batch has an operation, at least")
        for number, operation in enumerate(self.operations):
            if any(not 0 <= before < number for before in operation.after):
                raise ValueError(f"operation {number} waits for {operation.after}; those before it are meant")

    def __len__(self) -> int:
        return len(self.operations)

    def busy(self) -> dict[str, float]:
        """Seconds on each resource."""
        seconds = dict.fromkeys(RESOURCES, 0.0)
        for operation in self.operations:
            seconds[operation.resource] += operation.seconds
        return seconds

    def tails(self) -> list[float]:
        """From the beginning of each operation to the end of the batch, if it never waits for a resource."""
        tails = [operation.seconds for operation in self.operations]
        for number in range(len(tails) - 1, -1, -1):
            for before in self.operations[number].after:
                tails[before] = max(tails[before], self.operations[before].seconds + tails[number])
        return tails

    def chain(self) -> float:
        """Seconds of the longest chain: what the batch takes alone, if its resources are free."""
        return max(self.tails())

    def merged(self, *, in_order: bool = True) -> PlanGraph:
        """With chains on one resource as one operation each: fewer to schedule.

        A schedule of it is one of the whole graph. An operation joins the one before it where it waits for nothing
        else, and nothing else waits for that one. Where steps are not `in_order`, no operation waits for weights.
        """
        return self._merge(in_order)[0]

    def split_starts(self, starts: Sequence[float], *, in_order: bool = True) -> tuple[float, ...]:
        """When these operations begin, by when those of the `merged` graph do: one after the other."""
        begins = list(starts)
        found = []
        for one, place in zip(self.operations, self._merge(in_order)[1], strict=True):
            found.append(begins[place])
            begins[place] += one.seconds
        return tuple(found)

    def _merge(self, in_order: bool) -> tuple[PlanGraph, list[int]]:
        """And in which of its operations each of these is."""
        followers: dict[int, list[int]] = {}
        for number, operation in enumerate(self.operations):
            for before in operation.after:
                followers.setdefault(before, []).append(number)
        place: dict[int, int] = {}
        made: list[Operation] = []
        for number, one in enumerate(self.operations):
            alone = len(one.after) == 1 and followers[one.after[0]] == [number]
            alone = alone and not (in_order and one.needs_weights)
            joined = made[place[one.after[0]]] if alone else None
            if joined is not None and joined.resource == one.resource:
                into = place[number] = place[one.after[0]]
                name, seconds = f"{joined.operator}, {one.operator}", joined.seconds + one.seconds
                made[into] = Operation(name, one.resource, seconds, joined.after, joined.needs_weights)
            else:
                place[number] = len(made)
                after = tuple(sorted({place[other] for other in one.after}))
                made.append(Operation(one.operator, one.resource, one.seconds, after, in_order and one.needs_weights))
        return PlanGraph(made), [place[number] for number in range(len(self.operations))]

    def __repr__(self) -> str:
        return f"PlanGraph({', '.join(f'{one.operator} {one.seconds:.3g} s' for one in self.operations)})"
