"""Costs of operators: what is fitted, what is predicted, what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gnnsys.planning import CostContext, CostModel, Observation, OperatorCost
from gnnsys.planning.costs.operators import OPERATORS
from gnnsys.planning.costs.shapes import WIDTHS, halton, listed_width, spread

CONTEXT = CostContext(threads=4, multiprocessors=100)
PLANTED = {  # seconds per unit of quantities, as a machine might have them
    "spmm/host": {"call": 2e-5, "elements": 2e-10, "far lines": 5e-9, "written": 1e-10},
    "product/device": {"call": 1e-5, "padded 128x64": 3e-14, "read": 5e-13},
    "gather/bus": {"call": 2e-5, "sectors": 6e-10},
    "gather/cached": {"call": 1e-5, "hit bytes": 1e-12, "missed sectors": 6e-10},
    "sample/host": {"hops": 1e-4, "edges": 2e-8, "nodes": 3e-8},
    "copy/up": {"call": 1e-5, "bytes": 2e-11},
    "optimizer/device": {"call": 1e-4, "parameters": 1e-11},
}
SIZES = {  # how each is drawn
    "rows": (1e3, 1e6), "edges": (1e3, 1e6), "destinations": (1e2, 1e5), "nodes": (1e3, 1e6), "bytes": (1e4, 1e9),
    "parameters": (1e3, 1e7), "inner": (16, 1024), "width": (16, 1024), "row_bytes": (64, 4096), "hops": (1, 4),
    "hit_rate": (0.01, 1.0), "calls": (1, 1000), "sources": (1e3, 1e6), "table_rows": (1e3, 1e7),
    "graph_bytes": (1e6, 1e9), "itemsize": (4, 4), "input_gradient": (1, 1),
}  # fmt: skip


def drawn(operator: str, draw: np.random.Generator) -> dict[str, float]:
    known = OPERATORS[operator]
    names = [*known.sizes, *known.optional]
    return {n: float(round(math.exp(draw.uniform(*np.log(SIZES[n]))), 2 if n == "hit_rate" else 0)) for n in names}


def observed(operator: str, count: int, noise: float, seed: int = 0) -> list[Observation]:
    draw, truth = np.random.default_rng(seed), CostModel({operator: OperatorCost(PLANTED[operator])}, CONTEXT)
    sizes = [drawn(operator, draw) for _ in range(count)]
    return [Observation(operator, s, truth.seconds(operator, **s) * draw.normal(1.0, noise)) for s in sizes]


@pytest.mark.parametrize("operator", PLANTED)
def test_other_sizes_are_predicted_from_as_many_noisy_ones_as_a_profile_has(operator: str):
    model = CostModel.fit(observed(operator, 36 if OPERATORS[operator].by_width else 16, noise=0.02), CONTEXT)
    apart = [
        abs(model.seconds(operator, **seen.sizes) / seen.seconds - 1)
        for seen in observed(operator, 100, noise=0.0, seed=1)
    ]
    assert np.mean(apart) <= 0.06 and max(apart) <= 0.3


def test_leaving_one_out_tells_the_error_of_points_that_were_not_fitted():
    asked, told, apart = observed("spmm/host", 50, noise=0.1), [], []
    for seed in range(1, 6):
        model = CostModel.fit(observed("spmm/host", 36, noise=0.1, seed=seed), CONTEXT)
        cost = model.operators["spmm/host"]
        assert cost.points == 36 and cost.error is not None and cost.worst is not None and cost.worst > cost.error
        told.append(cost.error)
        apart += [abs(model.seconds(one.operator, **one.sizes) / one.seconds - 1) for one in asked]
    assert np.mean(told) == pytest.approx(np.mean(apart), rel=0.25)


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_prediction_is_negative_whatever_was_observed(operator: str):
    draw = np.random.default_rng(0)
    for count in (1, 3, 10):
        seen = [Observation(operator, drawn(operator, draw), float(draw.uniform(1e-6, 1.0))) for _ in range(count)]
        model = CostModel.fit(seen, CONTEXT)
        assert all(model.seconds(operator, **drawn(operator, draw)) >= 0 for _ in range(20))
        nothing = dict.fromkeys(OPERATORS[operator].sizes, 0.0)
        assert model.seconds(operator, **nothing) >= 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_more_of_anything_never_takes_less(operator: str):
    """A larger table, of which caches have less, and more of the rest. More hits are less, and have their own test."""
    draw, known = np.random.default_rng(0), OPERATORS[operator]
    for _ in range(20):
        sizes = drawn(operator, draw) | ({"sources": 0.0} if "sources" in known.optional else {})
        for name in (*known.sizes, *known.optional):
            if name in ("hit_rate", "width", "row_bytes", "itemsize", "sources"):
                continue
            before = known.quantities(sizes, CostContext())
            after = known.quantities({**sizes, name: 2 * sizes[name]}, CostContext())
            assert all(after[quantity] >= before[quantity] * (1 - 1e-9) for quantity in before), name


def test_a_row_that_the_device_has_does_not_cross_the_bus():
    model = CostModel({"gather/cached": OperatorCost(PLANTED["gather/cached"])}, CONTEXT)
    seconds = [model.seconds("gather/cached", rows=1e5, row_bytes=512, hit_rate=share) for share in (0.0, 0.5, 1.0)]
    assert seconds[0] > seconds[1] > seconds[2]
    assert seconds[0] == pytest.approx(1e-5 + 1e5 * 16 * 6e-10)
    assert seconds[2] == pytest.approx(1e-5 + 1e5 * 512e-12)


def test_a_width_that_kernels_have_code_for_has_a_factor_of_its_own():
    """Two of twelve take half as long: asked about between the counts of rows that each was measured at."""

    def truth(rows: float, width: int) -> float:
        return (0.5 if width in (36, 128) else 1.0) * (1e-5 + rows * (1e-8 + 4e-10 * width))

    rows_of: dict[int, list[float]] = {}
    for number in range(3 * len(WIDTHS)):
        rows_of.setdefault(listed_width(number), []).append(spread(number, 0, 1e3, 1e6))
    model = CostModel.fit(
        Observation("gather/host", {"rows": rows, "row_bytes": 4.0 * width}, truth(rows, width))
        for width, some in rows_of.items()
        for rows in some
    )
    for width, some in rows_of.items():
        rows = math.sqrt(min(some) * max(some))
        assert model.seconds("gather/host", rows=rows, row_bytes=4 * width) == pytest.approx(
            truth(rows, width), rel=0.15
        ), width
    assert set(model.operators["gather/host"].widths) == {f"{4 * width}" for width in WIDTHS}


def test_a_model_is_the_same_from_its_json():
    model = CostModel.fit([seen for operator in PLANTED for seen in observed(operator, 12, 0.05)], CONTEXT)
    again = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    assert again == model and again.context == CONTEXT


def spoiled(**change: object) -> dict[str, object]:
    cost = {"terms": {"bytes": 1e-9}, "error": None, "worst": None, "points": 0, "widths": {}}
    operators = {"copy/up": {**cost, **change}}
    return {"version": 1, "context": {}, "operators": operators}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "version"),
        ([], "version"),
        ({"version": 2}, "version"),
        ({"version": 1, "operators": {}}, "context"),
        (spoiled(terms={"bytes": -1e-9}), "not negative"),
        (spoiled(terms={"bytes": math.nan}), "not negative"),
        (spoiled(terms={"miles": 1.0}), "no quantity 'miles'"),
        (spoiled(terms=None), "no cost model"),
        (spoiled(widths={"64": -1.0}), "not negative"),
        ({"version": 1, "context": {}, "operators": {"fly/host": {}}}, "no operator 'fly/host'"),
        ({"version": 1, "context": {"cores": 3}, "operators": {}}, "no cost model"),
    ],
)
def test_what_is_no_model_is_refused(value: object, said: str):
    with pytest.raises(ValueError, match=said):
        CostModel.from_json(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operator", "sizes", "said"),
    [
        ("copy/up", {"bytes": 1}, "there is no cost of 'copy/up' in this profile: it has optimizer/host"),
        ("fly/host", {}, "there is no operator 'fly/host': there are sample/host, "),
        ("optimizer/host", {}, "'optimizer/host' needs 'parameters': its sizes are parameters"),
        ("optimizer/host", {"parameters": 1, "rows": 2}, "'optimizer/host' has no size 'rows'"),
        ("optimizer/host", {"parameters": -1}, "parameters of 'optimizer/host' must be a number that is not negative"),
        ("optimizer/host", {"parameters": math.nan}, "parameters of 'optimizer/host' must be a number"),
        ("optimizer/host", {"parameters": math.inf}, "parameters of 'optimizer/host' must be a number"),
    ],
)
def test_bad_questions_are_told_in_one_line(operator: str, sizes: dict[str, float], said: str):
    model = CostModel({"optimizer/host": OperatorCost({"parameters": 1e-9})})
    with pytest.raises(ValueError) as told:
        model.seconds(operator, **sizes)
    assert str(told.value).startswith(said) and "\n" not in str(told.value)


def test_seconds_that_are_none_are_not_fitted():
    for seconds in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="copy/up"):
            CostModel.fit([Observation("copy/up", {"bytes": 1e6}, seconds)])


def test_shapes_fill_their_box_evenly():
    """Every fourth of it, in each direction, has its share of points, however few there are."""
    for count in (8, 16, 24):
        for dimension in range(4):
            found = np.histogram([halton(number, dimension) for number in range(count)], bins=4, range=(0, 1))[0]
            assert found.min() >= count // 8 and found.sum() == count
    assert sorted(listed_width(number) for number in range(24)) == sorted(2 * WIDTHS)
