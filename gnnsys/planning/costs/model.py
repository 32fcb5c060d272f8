"""Seconds of an operator from its sizes: sums of physical quantities, fitted to what was measured.

Fits minimise relative errors, so that a batch of a thousand rows counts as much as one of a million. Coefficients are
not negative, so no prediction is.
"""

from __future__ import annotations

import math
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
_OF_A_CALL = frozenset({"call", "sorts"})  # quantities that nobody shares
_ENOUGH = 8  # points, to choose by
_UNBELIEVED = 0.5  # points that are not off, beside those of a width


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
        """Everything but the cost of a call, and of the sort before it, taking so many times as long."""
        terms = {name: value if name in _OF_A_CALL else factor * value for name, value in self.terms.items()}
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
    """A sum of all quantities, or of the basic ones where these tell points that were left out as well; and the same
    question about factors for widths.

    No search among the sums in between: coefficients that may not be negative are few of themselves, as least squares
    leaves most of them at zero, and a search over a dozen quantities finds those that fit what noise there is.
    """
    for each in seen:
        if not (each.seconds > 0 and math.isfinite(each.seconds)):
            raise ValueError(f"{operator.name!r} was observed to take {each.seconds!r} seconds")
    sizes = [operator.checked(each.sizes) for each in seen]
    found = [operator.quantities(each, context) for each in sizes]
    widths = [_width_name(operator, each) for each in sizes]
    seconds = np.array([each.seconds for each in seen])
    names = list(found[0])
    columns = np.array([[quantities[name] for name in names] for quantities in found]) / seconds[:, None]
    whole, basic = list(range(len(names))), [names.index(name) for name in operator.basic]
    chosen, (errors, of_widths) = basic, _left_out(columns[:, basic], widths)
    has_factors = False
    if len(seen) >= _ENOUGH:
        of_whole = _left_out(columns, widths)
        if of_whole[0].mean() < _WORTH * errors.mean():
            chosen, (errors, of_widths) = whole, of_whole
        has_factors = operator.by_width is not None and of_widths.mean() < _WORTH * errors.mean()
    solution = _robust(columns[:, chosen])
    factors = _factors(columns[:, chosen] @ solution, widths) if has_factors else {}
    errors = of_widths if has_factors else errors
    terms = {names[at]: float(value) for at, value in zip(chosen, solution, strict=True) if value > 0}
    return OperatorCost(terms, float(errors.mean()), float(errors.max()), len(seen), factors)


def _factors(predicted: Array, widths: Sequence[str]) -> dict[str, float]:
    """By how much each width is off where `predicted` shares of the seconds are predicted, on average.

    A width is measured two or three times, each with its noise: beside them counts half a point that is not off.
    """
    logs: dict[str, list[float]] = {}
    for width, share in zip(widths, predicted, strict=True):
        logs.setdefault(width, []).append(-math.log(max(share, 1e-9)))
    return {width: math.exp(sum(some) / (len(some) + _UNBELIEVED)) for width, some in logs.items()}


def _robust(columns: Array, like: Array | None = None) -> Array:
    """Least squares, in which points far from all others come to count less: a moment of noise is no quantity.

    `like` is the solution of almost the same points, if there is one: it saves time."""
    weight = np.ones(len(columns))
    for _ in range(_ROUNDS if len(columns) >= _ENOUGH - 1 else 0):
        like = nonnegative_least_squares(columns * weight[:, None], weight, like)
        weight = 1.0 / np.sqrt(np.maximum(np.abs(columns @ like - 1.0), _CLOSE) / _CLOSE)
    return nonnegative_least_squares(columns * weight[:, None], weight, like)


def _left_out(columns: Array, widths: Sequence[str]) -> tuple[Array, Array]:
    """Of every point the relative error of a fit to the others; and the same with factors for widths, which leave the
    coefficients alone: these are what is known of all other widths. A single point is fitted by itself."""
    count = len(columns)
    plain, with_factors, whole = np.empty(count), np.empty(count), _robust(columns)
    for at in range(count):
        others = [other for other in range(count) if other != at or count == 1]
        solution = _robust(columns[others], whole)
        predicted = columns @ solution
        factors = _factors(predicted[others], [widths[other] for other in others])
        plain[at] = abs(predicted[at] - 1.0)
        with_factors[at] = abs(factors.get(widths[at], 1.0) * predicted[at] - 1.0)
    return plain, with_factors
