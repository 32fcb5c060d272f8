"""Sizes of groups: predicted as simulated, within memory, and never in the place of what overlaps as well."""

import numpy as np
import pytest

from gnnsys.planning.scheduling.operations import CORES, GPU, UP, Operation, PlanGraph
from gnnsys.planning.scheduling.simulate import list_schedule, steady_seconds
from gnnsys.planning.scheduling.turn_groups import CacheRefill, SamplingStage, predict_groups, without_sampling


def _batch(sample, rows, train, on=CORES):
    return PlanGraph([
        Operation("sample/host", on, sample),
        Operation("gather/bus", UP, rows, (0,)),
        Operation("product/device", GPU, train, (1,), needs_weights=True),
    ])  # fmt: skip


def _stage(host, device, structure_bytes=1e6):
    return SamplingStage(host, device, structure_bytes)


def test_a_group_takes_what_its_two_stages_take_when_they_are_simulated():
    generator = np.random.default_rng(0)
    for _ in range(20):
        host, device, rows, train = generator.uniform(0.5, 5, 4).tolist()
        training = without_sampling(_batch(host, rows, train))
        assert training.busy()[CORES] == 0 and training.chain() == pytest.approx(rows + train)
        _, groups = predict_groups(training, _stage(host, device), overlapped=1e9, budget=7e6, num_batches=100)
        assert [group.size for group in groups] == [0, 1, 2, 4, 7]
        for group in groups[1:]:
            sampled = min(max(n * host, (group.size - n) * device) for n in range(group.size + 1))
            trained = list_schedule([training] * group.size, in_order=True).seconds
            assert group.seconds * group.size == pytest.approx(sampled + trained)


def test_no_turns_is_always_a_candidate_and_stays_unless_turns_are_clearly_faster():
    overlapping = _batch(2.0, 3.0, 4.0)
    best, groups = predict_groups(
        without_sampling(overlapping), _stage(2.0, 1.0), overlapped=steady_seconds([overlapping]), budget=1e9,
        num_batches=500,
    )  # fmt: skip
    assert best.size == 0 == groups[0].size and best.num_bytes == 0, "the GPU is busy anyway"
    starving = _batch(10.0, 1.0, 2.0)
    best, groups = predict_groups(
        without_sampling(starving), _stage(10.0, 2.0), overlapped=steady_seconds([starving]), budget=1e9,
        num_batches=500,
    )  # fmt: skip
    assert best.size > 0 and best.seconds < 0.98 * groups[0].seconds, "both sample, where one is too slow"


def test_larger_groups_share_a_switch_and_smaller_ones_hold_less():
    training = without_sampling(_batch(10.0, 1.0, 2.0))
    cheap, _ = predict_groups(training, _stage(10.0, 2.0), overlapped=10.0, budget=1e12, num_batches=1000)
    dear, groups = predict_groups(
        training, _stage(10.0, 2.0), overlapped=10.0, budget=1e12, num_batches=1000, switch=20.0
    )
    assert dear.size > cheap.size and dear.seconds <= 1.01 * min(group.seconds for group in groups)
    tight, groups = predict_groups(training, _stage(10.0, 2.0), overlapped=10.0, budget=9.5e6, num_batches=1000)
    assert max(group.num_bytes for group in groups) <= 9.5e6 and 0 < tight.size <= 9
    none, groups = predict_groups(training, _stage(10.0, 2.0), overlapped=10.0, budget=0, num_batches=1000)
    assert none.size == 0 and len(groups) == 1, "no room for one batch"


def test_a_cache_that_is_filled_for_the_group_counts_where_it_pays():
    training = without_sampling(_batch(1.0, 8.0, 2.0))
    refilled = CacheRefill(20.0, without_sampling(_batch(1.0, 2.0, 2.0)))
    plain, _ = predict_groups(training, _stage(1.0, 1.0), overlapped=8.0, budget=1e9, num_batches=64)
    better, groups = predict_groups(
        training, _stage(1.0, 1.0), overlapped=8.0, budget=1e9, num_batches=64, refill=refilled
    )
    assert plain.size == 0 and better.size > 8 and better.seconds < 5
    assert groups[1].seconds == pytest.approx(1.0 + 10.0), "one batch does not pay for it"


def test_what_is_no_group_is_refused():
    training = without_sampling(_batch(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="there is one"):
        predict_groups(training, _stage(1.0, 1.0), overlapped=1.0, budget=1, num_batches=0)
    late = PlanGraph([Operation("copy/up", UP, 1.0), Operation("sample/device", GPU, 1.0, (0,))])
    with pytest.raises(ValueError, match="waits for nothing"):
        without_sampling(late)
