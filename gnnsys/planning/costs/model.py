"""Seconds of an operator from its sizes: sums of physical quantities, fitted to what was measured.

Fits minimise relative errors, so that a batch of a thousand rows counts as much as one of a million. Coefficients are
not negative, so no prediction is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from gnnsys.planning.costs.nonnegative import Array, nonnegative_least_squares
from gnnsys.planning.costs.operators import CostContext, Operator, find_operator

_VERSION = 1
_ROUNDS = 2  # in which points far from all others come to count less
_WORTH = 0.95  # of a simpler sum's leave-one-out error, for a longer one to be taken
_CLOSE = 0.05  # relative error, up to which points count alike
_ENOUGH = 8  # points, to choose by


@dataclass(frozen=True)
class Observation:
    """What an operator took once."""

    operator: str
    sizes: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class OperatorCost:
    """One fitted sum: seconds per unit of each quantity.

    `widths` has factors for rows of some widths that were measured by themselves: kernels have code of their own for
    some. `error` and `worst` are relative and leave-one-out: the mean and the largest over the points that it was
    fitted to; None where it was not fitted.
    """

    terms: Mapping[str, float]
    error: float | None = None
    worst: float | None = None
    points: int = 0
    widths: Mapping[str, float] = field(default_factory=dict)

    def times(self, factor: float) -> OperatorCost:
        """Everything but the cost of a call taking so many times as long."""
        terms = {name: value if name == "call" else factor * value for name, value in self.terms.items()}
        return replace(self, terms=terms)


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
        cost, checked = self.operators[operator], known.checked(sizes)
        given = known.quantities(checked, self.context)
        total = math.fsum(value * given[name] for name, value in cost.terms.items())
        return total * cost.widths.get(_width_name(known, checked), 1.0)

    @classmethod
    def fit(cls, observations: Iterable[Observation], context: CostContext | None = None) -> CostModel:
        """A sum for each operator that was observed, of the quantities that leave-one-out errors choose; of its basic
        ones where it was observed a few times only."""
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
        costs = {name: asdict(cost) for name, cost in self.operators.items()}
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
    operator = find_operator(name)
    terms, widths = ({str(of): float(number) for of, number in value[key].items()} for key in ("terms", "widths"))
    known = operator.quantities(dict.fromkeys((*operator.sizes, *operator.optional), 1.0), CostContext())
    for term, seconds in (*terms.items(), *widths.items()):
        if term in terms and term not in known:
            raise ValueError(f"{name!r} has no quantity {term!r}: it has {', '.join(known)}")
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds per {term!r} of {name!r} must be a number that is not negative, got {seconds!r}")
    return OperatorCost(terms, value["error"], value["worst"], int(value["points"]), widths)


def _width_name(operator: Operator, sizes: Mapping[str, float]) -> str:
    """By which a width's factor is found: JSON has names alone."""
    return "" if operator.by_width is None else f"{sizes[operator.by_width]:g}"


def _fit(operator: Operator, seen: Sequence[Observation], context: CostContext) -> OperatorCost:
    for each in seen:
        if not (each.seconds > 0 and math.isfinite(each.seconds)):
            raise ValueError(f"{operator.name!r} was observed to take {each.seconds!r} seconds")
    sizes = [operator.checked(each.sizes) for each in seen]
    found = [operator.quantities(each, context) for each in sizes]
    widths = [_width_name(operator, each) for each in sizes]
    seconds = np.array([each.seconds for each in seen])
    names = list(found[0])
    columns = np.array([[quantities[name] for name in names] for quantities in found]) / seconds[:, None]
    has_enough, by_width = len(seen) >= _ENOUGH, list[str]()
    basic = [names.index(name) for name in operator.basic]
    chosen = _choose(columns, basic) if has_enough else basic
    errors = _left_out(columns[:, chosen], by_width)
    if operator.by_width is not None and has_enough:
        of_widths = _left_out(columns[:, chosen], widths)
        if of_widths.mean() < _WORTH * errors.mean():
            errors, by_width = of_widths, widths
    columns = columns[:, chosen]
    solution, factors = _solve(columns, by_width)
    terms = {names[at]: float(value) for at, value in zip(chosen, solution, strict=True) if value > 0}
    return OperatorCost(terms, float(errors.mean()), float(errors.max()), len(seen), factors)


def _choose(columns: Array, basic: Sequence[int]) -> list[int]:
    """Which quantities to sum: all of them, or the basic ones where that tells points that were left out better.

    No search among the sums in between. Coefficients that may not be negative are few of themselves, as least squares
    leaves most of them at zero; and a search over a dozen quantities finds one that fits what noise there is.
    """
    whole = list(range(columns.shape[1]))
    errors = [_left_out(columns[:, some], []).mean() for some in (whole, basic)]
    chosen = whole if errors[0] < _WORTH * errors[1] else list(basic)
    solution = _robust(columns[:, chosen])
    return [at for at, value in zip(chosen, solution, strict=True) if value > 0] or list(basic)


def _solve(columns: Array, widths: Sequence[str]) -> tuple[Array, dict[str, float]]:
    """Coefficients for relative errors; and where widths are told, by how much each is off, on average.

    The coefficients are those without such factors: they are what is known of all other widths.
    """
    solution = _robust(columns)
    logs: dict[str, list[float]] = {}
    for width, predicted in zip(widths, columns @ solution, strict=bool(widths)):
        logs.setdefault(width, []).append(-math.log(max(predicted, 1e-9)))
    return solution, {width: math.exp(statistics.fmean(some)) for width, some in logs.items()}


def _robust(columns: Array) -> Array:
    """Least squares, in which points far from all others come to count less: a moment of noise is no quantity."""
    weight = np.ones(len(columns))
    for _ in range(_ROUNDS if len(columns) >= _ENOUGH - 1 else 0):
        solution = nonnegative_least_squares(columns * weight[:, None], weight)
        weight = 1.0 / np.sqrt(np.maximum(np.abs(columns @ solution - 1.0), _CLOSE) / _CLOSE)
    return nonnegative_least_squares(columns * weight[:, None], weight)


def _left_out(columns: Array, widths: Sequence[str]) -> Array:
    """Of every point the relative error of a fit to the others. A single point is fitted by itself."""
    count = len(columns)
    errors = np.empty(count)
    for at in range(count):
        others = [other for other in range(count) if other != at or count == 1]
        solution, factors = _solve(columns[others], [widths[other] for other in others] if widths else [])
        factor = factors.get(widths[at], 1.0) if widths else 1.0
        errors[at] = abs(factor * (columns[at] @ solution) - 1.0)
    return errors
