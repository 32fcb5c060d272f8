"""Which ways are tried: by what fits, and never what cannot be better than another."""

import pytest

from gnnsys.planning.execution.propose import (
    PRODUCTS,
    BatchLoad,
    Memory,
    ProductLoad,
    SumLoad,
    propose_loading_threads,
    propose_places,
)
from gnnsys.planning.execution.rates import Rates
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED, Way
from tests.support.grid import grid

GB = 1 << 30
RATES = Rates(bus=50e9, device=2000e9, host=10e9, threads=4)


@pytest.mark.parametrize(
    ("graph", "device", "host", "is_pinned", "tried"),
    [
        (10 * GB, 100 * GB, 100 * GB, False, [GIVEN, DEVICE]),
        (10 * GB, 20 * GB, 100 * GB, True, [GIVEN, DEVICE]),
        (60 * GB, 100 * GB, 200 * GB, False, [GIVEN, PINNED, CACHED]),
        (60 * GB, 100 * GB, 10 * GB, True, [GIVEN, CACHED]),
        (60 * GB, 100 * GB, 100 * GB, False, [GIVEN]),
        (60 * GB, 0, 200 * GB, False, [GIVEN, PINNED, CACHED]),
    ],
)
def test_places_that_fit_are_tried_and_the_others_have_a_reason(graph, device, host, is_pinned, tried):
    ways, passed_over = propose_places(graph, is_pinned=is_pinned, memory=Memory(device, host))
    assert [way.place for way in ways] == tried
    left_out = {DEVICE, PINNED, CACHED} - set(tried)
    assert left_out - ({PINNED} if is_pinned else set()) <= set(passed_over) and all(passed_over.values())
    assert all(way.device_bytes <= device / 2 and way.host_bytes <= host / 2 for way in ways)


def test_predictions_follow_what_binds():
    load = BatchLoad(row_bytes=500_000_000, hit_rate=lambda num_bytes: 0.8)
    ways, _ = propose_places(60 * GB, is_pinned=False, memory=Memory(100 * GB, 200 * GB), load=load, rates=RATES)
    assert [way.predicted for way in ways] == pytest.approx([0.05, 0.01, 0.002])
    ways, _ = propose_places(GB, is_pinned=True, memory=Memory(100 * GB, 200 * GB), load=load, rates=RATES)
    assert [way.predicted for way in ways] == pytest.approx([0.01, 0.00025])


@grid(
    case=[(1, 1, [0]), (1, 0, []), (2, 1, [0]), (2, 0, [1]), (4, 1, [2]), (16, 6, [1, 8]), (16, 8, [1])],
)
def test_on_the_host_numbers_of_loading_threads_are_tried_and_torchs_own_threads_left_alone(case):
    num_cores, loading, tried = case
    ways = propose_loading_threads(num_cores, loading)
    assert ways == [Way(), *(Way(loading_threads=count) for count in tried)]
    assert all(way.compute_threads is None for way in ways)


def proposed(products, row_bytes, sums=None, device=0, is_pinned=True):
    load = BatchLoad(row_bytes, hit_rate=lambda num_bytes: 0.0, sums=sums, products=products)
    return propose_places(60 * GB, is_pinned=is_pinned, memory=Memory(device, 200 * GB), load=load, rates=RATES)


WIDE = 34_493 * 8_415 * 4  # bytes of a batch's rows


def test_products_are_tried_where_bus_and_cores_together_take_less_than_the_bus():
    ways, passed_over = proposed(ProductLoad(34_493 * 16 * 4, seconds=0.034), WIDE)
    tried = [way for way in ways if any(way.products)]
    assert {way.products for way in tried} == {
        (False, True),
        (False, False, False, True),
    } and PRODUCTS not in passed_over
    rows, made = WIDE / RATES.bus, 34_493 * 16 * 4 / RATES.bus
    for way in tried:
        share = sum(way.products) / len(way.products)
        assert way.predicted == pytest.approx(max((1 - share) * rows + share * made, share * 0.034))
        assert way.predicted < 0.9 * rows


def test_fast_cores_multiply_all_batches():
    ways, _ = proposed(ProductLoad(34_493 * 16 * 4, seconds=0.001), WIDE)
    assert (True,) in {way.products for way in ways}


@pytest.mark.parametrize(
    ("products", "options", "why"),
    [
        (ProductLoad(640_000 * 256 * 4, seconds=0.144), {}, "take the cores 144.0 ms"),
        (ProductLoad(34_493 * 16 * 4, seconds=2.0), {}, "take the cores 2000.0 ms"),
        (ProductLoad(34_493 * 16 * 4, seconds=0.01), {"sums": SumLoad(1_000_000, 0.001)}, "take the cores 10.0 ms"),
        (ProductLoad(34_493 * 16 * 4, seconds=0.01), {"device": 200 * GB}, "fits the device"),
        ("the first layer makes 256 values of the 100 of a row", {}, "256 values of the 100"),
    ],
)
def test_products_that_do_not_pay_are_not_tried_and_the_reason_is_told(products, options, why):
    ways, passed_over = proposed(products, WIDE, **options)
    assert not any(any(way.products) for way in ways) and why in passed_over[PRODUCTS]


def test_rows_in_plain_memory_are_multiplied_where_there_is_no_room_to_pin_them():
    load = BatchLoad(WIDE, hit_rate=lambda num_bytes: 0.0, products=ProductLoad(34_493 * 16 * 4, seconds=0.034))
    ways, _ = propose_places(60 * GB, is_pinned=False, memory=Memory(0, GB), load=load, rates=RATES)
    assert {way.place for way in ways} == {GIVEN} and any(any(way.products) for way in ways)
