"""Which ways are tried: by what fits, and never what cannot be better than another."""

import pytest

from gnnsys.planning.execution.propose import BatchLoad, Memory, propose_places, propose_splits
from gnnsys.planning.execution.rates import Rates
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED

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


@pytest.mark.parametrize("num_cores", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("computing", [1, 2, 64])
def test_splits_use_all_cores_and_none_twice(num_cores, computing):
    ways = propose_splits(num_cores, 1, computing)
    splits = [(way.loading_threads, way.compute_threads) for way in ways[1:]]
    assert ways[0].name == GIVEN and len(set(splits)) == len(splits) <= 3
    assert (1, computing) not in splits, "that is what is done without"
    assert all(loading + compute == num_cores and compute >= 1 for loading, compute in splits)
