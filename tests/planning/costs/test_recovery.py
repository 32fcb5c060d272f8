"""Machines whose costs are known, with the noise that machines have: timed, fitted and asked about other sizes.

The clock is theirs: a call takes what its machine says, some percent more or less, and now and then three times as
long, because somebody else was there. The targets are those of a real machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from gnnsys.planning import CostContext, CostModel, CostProbe, OperatorCost, ProbeTimer, time_probes
from gnnsys.planning.costs.operators import OPERATORS
from gnnsys.planning.costs.shapes import halton, listed_width, spread, width_at

CONTEXT = CostContext(16, 2 << 20, 64 << 20, 50 << 20, 132, 64)
MEAN, WORST = 0.06, 0.20
Shape = Callable[[int], Mapping[str, float]]


def gathered(number: int) -> dict[str, float]:
    row_bytes = 4 * listed_width(number)
    return {
        "rows": float(int(spread(number, 0, 1e3, 1e6))),
        "row_bytes": row_bytes,
        "table_rows": (1 << 30) // row_bytes,
    }


def over_bus(number: int) -> dict[str, float]:
    return {name: value for name, value in gathered(number).items() if name != "table_rows"}


def summed(number: int) -> dict[str, float]:
    edges = spread(number, 0, 2e3, 2e6)
    sources = (1 << 28) // listed_width(number) if halton(number, 3) < 1 / 3 else edges / spread(number, 2, 1.0, 8.0)
    destinations = edges / spread(number, 3, 2.0, 20.0)
    sizes = {"edges": edges, "destinations": destinations, "sources": sources, "width": listed_width(number)}
    return {name: float(int(value)) for name, value in sizes.items()}


def multiplied(number: int) -> dict[str, float]:
    sizes = {
        "rows": float(int(spread(number, 0, 1e3, 4e5))),
        "inner": width_at(number, 1),
        "width": width_at(number, 2),
    }
    return {**sizes, "input_gradient": float(halton(number, 3) >= 0.5)}


def compacted(number: int) -> dict[str, float]:
    edges = int(spread(number, 0, 1e3, 4e6))
    return {"edges": edges, "nodes": int(edges * spread(number, 2, 0.2, 1.0))}


MACHINES: dict[str, tuple[Shape, int, dict[str, float]]] = {
    # Rows far away, and one or two loops that wake threads.
    "gather/host": (gathered, 24, {"call": 5e-6, "loops": 2e-5, "rows": 1e-9, "far lines": 6e-10}),
    "gather/bus": (over_bus, 24, {"call": 7e-6, "sorts": 6e-5, "bytes": 1.8e-11, "unsorted rows": 3e-10}),
    "spmm/host": (summed, 36, {
        "call": 1e-5, "loops": 4e-5, "elements": 1e-11, "stored lines": 8e-11, "strewn lines, each": 2e-10,
        "written": 2e-11, "page lines": 6e-9,
    }),
    "copy/pageable": (lambda number: {"bytes": spread(number, 0, 4e3, 2e8)}, 14, {
        "call": 1.2e-5, "bytes": 8e-11, "near bytes": 5e-11,
    }),
    # Constant from 131,072 parameters to 2,097,152: sixteen threads come one after the other.
    "optimizer/host": (lambda number: {"parameters": float(int(spread(number, 0, 1e3, 4e6)))}, 14, {
        "call": 2.4e-4, "loops": 4e-4, "parameters": 1.5e-10, "far": 1e-10,
    }),
    "compact/device": (compacted, 14, {"call": 5e-5, "passes": 4e-6, "sorted": 2e-11}),
    "backward/host": (multiplied, 20, {
        "call": 1e-5, "macs": 8e-13, "read": 3e-11, "asked macs": 6e-13, "fresh": 4e-11,
    }),
}  # fmt: skip


class PlantedMachine:
    """Its clock runs while it is called, and at no other time."""

    def __init__(self, operator: str, terms: Mapping[str, float], noise: float) -> None:
        self.costs, self._draw = CostModel({operator: OperatorCost(terms)}, CONTEXT), random.Random(operator)
        self._operator, self._noise, self._now = operator, noise, 0.0

    def clock(self) -> float:
        return self._now

    def truth(self, sizes: Mapping[str, float]) -> float:
        return self.costs.seconds(self._operator, **sizes)

    def probe(self, sizes: Mapping[str, float]) -> CostProbe:
        def call() -> None:
            disturbed = 3.0 if self._draw.random() < 0.05 else 1.0
            self._now += disturbed * self.truth(sizes) * self._draw.lognormvariate(0.0, self._noise)

        return CostProbe(self._operator, sizes, call)


def apart(operator: str, noise: float) -> list[float]:
    """Relative errors at sizes that lie between those of the profile."""
    shape, count, terms = MACHINES[operator]
    machine = PlantedMachine(operator, terms, noise)
    probes = [machine.probe(shape(number)) for number in range(count)]
    model = CostModel.fit(time_probes(probes, float("inf"), ProbeTimer(clock=machine.clock)), CONTEXT)
    asked = [shape(number) for number in range(100, 140)]
    return [abs(model.seconds(operator, **sizes) / machine.truth(sizes) - 1) for sizes in asked]


@pytest.mark.parametrize("operator", MACHINES)
def test_a_machine_is_known_from_what_was_timed_through_its_noise(operator: str):
    errors = apart(operator, noise=0.08)
    assert sum(errors) / len(errors) <= MEAN and max(errors) <= WORST


@pytest.mark.parametrize("operator", MACHINES)
def test_without_noise_next_to_nothing_is_left(operator: str):
    errors = apart(operator, noise=0.0)
    assert sum(errors) / len(errors) <= 0.02


def test_a_loop_that_is_worth_several_threads_wakes_all_of_them():
    """Of 200,000 rows three threads look at the ids, and then sixteen move the rows; of 100,000 one and sixteen."""
    quantities = OPERATORS["gather/host"].quantities
    few, many = (quantities({"rows": rows, "row_bytes": 64, "table_rows": 1e7}, CONTEXT) for rows in (1e5, 2e5))
    assert (few["loops"], many["loops"]) == (1, 2)


def test_the_busiest_thread_has_as_many_chunks_as_are_left_to_it():
    """Of spmm a chunk is 16,384 rows and edges: up to sixteen of them take as long as one."""
    quantities = OPERATORS["spmm/host"].quantities

    def of_one(chunks: float) -> float:
        sizes = {"edges": chunks * 16_384, "destinations": 0, "width": 64, "itemsize": 4, "sources": 0}
        return quantities(sizes, CONTEXT)["edges"] / 16 / 16_384

    assert [of_one(chunks) for chunks in (0.5, 1, 2, 16)] == pytest.approx([0.5, 1, 1, 1])
    assert [of_one(chunks) for chunks in (16.25, 17, 24, 32, 48.5)] == pytest.approx([1.25, 2, 2, 2, 3.5])
