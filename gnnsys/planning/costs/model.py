"""Seconds of an operator from its sizes: sums of physical quantities, fitted to what was measured.

Fits minimise relative errors, so that a batch of a thousand rows counts as much as one of a million. Coefficients are
not negative, so no prediction is, and none falls where sizes grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gnnsys.planning.costs.nonnegative import Array, nonnegative_least_squares
from gnnsys.planning.costs.operators import CostContext, Operator, find_operator

_VERSION = 1
_WORTH = 0.9  # of a simpler sum's leave-one-out error, for a longer sum to be taken


@dataclass(frozen=True)
class Observation:
    """What an operator took once."""

    operator: str
    sizes: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class OperatorCost:
    """One fitted sum: seconds per unit of each quantity. `error` and `worst` are relative and leave-one-out: the mean
    and the largest over the points it was fitted to; None where it was not fitted."""

    terms: Mapping[str, float]
    error: float | None = None
    worst: float | None = None
    points: int = 0

    def times(self, factor: float) -> OperatorCost:
        """Everything but the cost of a call taking so many times as long."""
        terms = {name: value if name == "call" else factor * value for name, value in self.terms.items()}
        return OperatorCost(terms, self.error, self.worst, self.points)


@dataclass(frozen=True)
class CostModel:
    """Costs of some operators, on one machine.

    >>> model = CostModel({"copy/up": OperatorCost({"call": 1e-5, "bytes": 2e-11})})
    >>> round(model.seconds("copy/up", bytes=1e9), 5)
    0.02001
    """

    operators: Mapping[str, OperatorCost]
    context: CostContext = field(default_factory=CostContext)

    def seconds(self, operator: str, **sizes: float) -> float:
        """What one call takes; never negative. ValueError for an operator that was not measured."""
        known = find_operator(operator)
        if operator not in self.operators:
            has = ", ".join(self.operators) or "nothing"
            raise ValueError(f"there is no cost of {operator!r} in this profile: it has {has}")
        given = known.quantities(known.checked(sizes), self.context)
        return math.fsum(value * given[name] for name, value in self.operators[operator].terms.items())

    @classmethod
    def fit(cls, observations: Iterable[Observation], context: CostContext | None = None) -> CostModel:
        """A sum for each operator that was observed, the best of its `term_sets` by leave-one-out error."""
        at = CostContext() if context is None else context
        by_operator: dict[str, list[Observation]] = {}
        for seen in observations:
            by_operator.setdefault(seen.operator, []).append(seen)
        return cls({name: _fit(find_operator(name), seen, at) for name, seen in by_operator.items()}, at)

    def replace(self, others: Mapping[str, OperatorCost]) -> CostModel:
        """The same with other costs for some operators, or with some more."""
        return CostModel({**self.operators, **others}, self.context)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        costs = {name: {**asdict(cost), "terms": dict(cost.terms)} for name, cost in self.operators.items()}
        return {"version": _VERSION, "context": asdict(self.context), "operators": costs}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CostModel:
        """ValueError for what is no cost model, or one of another version."""
        if not isinstance(value, Mapping) or value.get("version") != _VERSION:
            raise ValueError(f"this is no cost model of version {_VERSION}")
        try:
            context = CostContext(**value["context"])
            return cls({name: _read_cost(name, cost) for name, cost in value["operators"].items()}, context)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no cost model: {error!r}") from error


def _read_cost(name: str, value: Mapping[str, Any]) -> OperatorCost:
    terms = {term: float(seconds) for term, seconds in value["terms"].items()}
    operator = find_operator(name)
    ones = dict.fromkeys((*operator.sizes, *operator.optional), 1.0)
    known = operator.quantities(ones, CostContext())
    for term, seconds in terms.items():
        if term not in known:
            raise ValueError(f"{name!r} has no quantity {term!r}: it has {', '.join(known)}")
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds per {term!r} of {name!r} must not be negative, got {seconds!r}")
    return OperatorCost(terms, value.get("error"), value.get("worst"), int(value.get("points", 0)))


def _fit(operator: Operator, seen: Sequence[Observation], context: CostContext) -> OperatorCost:
    for each in seen:
        if not (each.seconds > 0 and math.isfinite(each.seconds)):
            raise ValueError(f"{operator.name!r} was observed to take {each.seconds!r} seconds")
    found = [operator.quantities(operator.checked(each.sizes), context) for each in seen]
    seconds = np.array([each.seconds for each in seen])
    best: OperatorCost | None = None
    for names in operator.term_sets:
        if best is not None and len(names) >= len(seen):
            break  # as many coefficients as points: that interpolates
        columns = np.array([[quantities[name] for name in names] for quantities in found]) / seconds[:, None]
        errors = _left_out(columns)
        if best is None or errors.mean() < _WORTH * (best.error or 0.0):
            solution = nonnegative_least_squares(columns, np.ones(len(seen)))
            terms = {name: float(value) for name, value in zip(names, solution, strict=True) if value > 0}
            best = OperatorCost(terms, float(errors.mean()), float(errors.max()), len(seen))
    assert best is not None
    return best


def _left_out(columns: Array) -> Array:
    """Of every point the relative error of a fit to the others. A single point is fitted by itself."""
    count = len(columns)
    errors = np.empty(count)
    for at in range(count):
        others = np.delete(columns, at, axis=0) if count > 1 else columns
        errors[at] = abs(columns[at] @ nonnegative_least_squares(others, np.ones(len(others))) - 1.0)
    return errors
