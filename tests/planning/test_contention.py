"""Operations beside each other: slower by what was measured, for as long as they overlap, and never faster."""

import numpy as np
import pytest

from gnnsys.planning.execution.comparison import compare_batches
from gnnsys.planning.scheduling.contention import slowed
from gnnsys.planning.scheduling.operations import CORES, GPU, UP, Operation, PlanGraph
from gnnsys.planning.scheduling.simulate import steady_seconds
from tests.planning.plan_graphs import random_graph


def _sums_and_copy(sums, copy):
    return PlanGraph([Operation("spmm/host", CORES, sums), Operation("copy/up", UP, copy, (0,)),
                      Operation("product/device", GPU, 1.0, (1,))])  # fmt: skip


def _pairs(operator, beside):
    return {("copy/up", "spmm/host"): 1.5, ("spmm/host", "copy/up"): 1.2}.get((operator, beside), 1.0)


def test_a_copy_is_slower_while_sums_are_made():
    always = _sums_and_copy(10.0, 4.0)  # the cores are busy all the time, the bus for four tenths of it
    (found,) = slowed([always], _pairs)
    assert found.busy()[UP] == pytest.approx(4.0 * 1.5)
    assert found.busy()[CORES] == pytest.approx(10.0 * (1 + 0.2 * 0.4))
    assert found.busy()[GPU] == 1.0
    alone = PlanGraph([Operation("copy/up", UP, 4.0)])
    assert slowed([alone], _pairs)[0].operations == alone.operations
    mixed = slowed([always, alone], _pairs)
    assert 4.0 < mixed[1].busy()[UP] < 4.0 * 1.5 + 1e-9, "the other batch's sums are beside it"


def test_nothing_gets_faster_and_nothing_changes_without_pairs():
    generator = np.random.default_rng(0)
    for _ in range(20):
        graphs = [random_graph(generator, 4) for _ in range(3)]
        assert [g.operations for g in slowed(graphs, lambda *_: 1.0)] == [g.operations for g in graphs]
        assert [g.operations for g in slowed(graphs, lambda *_: 0.5)] == [g.operations for g in graphs]
        slow = slowed(graphs, lambda *_: 1.7)
        for one, other in zip(graphs, slow, strict=True):
            assert all(s.seconds >= f.seconds for f, s in zip(one.operations, other.operations, strict=True))
            assert other.chain() <= one.chain() * (1 + 0.7 * 3) + 1e-9, "three resources are beside it, at most"


def test_a_comparison_takes_pairs_into_account_and_its_bound_does_not():
    plans = {"sums": _sums_and_copy(10.0, 4.0), "bus": PlanGraph([Operation("copy/up", UP, 9.0)])}
    alone, beside = compare_batches(plans), compare_batches(plans, slow_down=_pairs)
    seconds = [{one.name: one.seconds for one in compared.estimates} for compared in (alone, beside)]
    assert seconds[1]["bus"] == seconds[0]["bus"] == steady_seconds([plans["bus"]])
    assert seconds[1]["mix"] > seconds[0]["mix"] and seconds[1]["sums"] > seconds[0]["sums"]
    assert beside.shares == alone.shares
