"""Schedules: feasible ones by lists, the shortest by search, and none that beats the linear program."""

import itertools

import numpy as np
import pytest

from gnnsys.planning.scheduling.operations import CORES, GPU, RESOURCES, UP, Operation, PlanGraph
from gnnsys.planning.scheduling.shares import bound, round_shares
from gnnsys.planning.scheduling.simulate import (
    BatchSchedule,
    best_schedule,
    least_seconds,
    list_schedule,
    steady_seconds,
)
from tests.planning.plan_graphs import check, random_graph, shortest_by_trying_all


def _longest_chain(graph):
    """Over all paths."""
    followers = {k: [n for n, one in enumerate(graph.operations) if k in one.after] for k in range(len(graph))}

    def from_here(k):
        return graph.operations[k].seconds + max([0.0, *map(from_here, followers[k])])

    return max(map(from_here, range(len(graph))))


def test_a_graph_knows_what_it_uses_and_its_longest_chain():
    generator = np.random.default_rng(0)
    for number in range(1, 8):
        graph = random_graph(generator, number)
        for of in (graph, graph.merged(), graph.merged(in_order=False)):
            for resource in RESOURCES:
                used = sum(one.seconds for one in graph.operations if one.resource == resource)
                assert of.busy()[resource] == pytest.approx(used)
            assert of.chain() == pytest.approx(_longest_chain(graph)), "merging keeps it"
        for in_order in (False, True):  # a schedule of the merged graph is one of the graph
            alone = list_schedule([graph.merged(in_order=in_order)])
            starts = graph.split_starts(alone.starts[0], in_order=in_order)
            check([graph], BatchSchedule(alone.seconds, (starts,)))
        assert len(graph.merged(in_order=False)) <= len(graph.merged()) <= len(graph)


def test_graphs_that_are_none_are_refused():
    with pytest.raises(ValueError, match="cores, bus up, bus down, gpu"):
        Operation("spmm", "tpu", 1.0)
    with pytest.raises(ValueError, match="nan seconds"):
        Operation("spmm", GPU, float("nan"))
    with pytest.raises(ValueError, match="those before it"):
        PlanGraph([Operation("spmm", GPU, 1.0, after=(0,))])
    with pytest.raises(ValueError, match="at least"):
        PlanGraph([])


def test_lists_give_schedules_in_which_nothing_overlaps():
    generator = np.random.default_rng(1)
    for _ in range(40):
        graphs = [random_graph(generator, int(generator.integers(1, 6))) for _ in range(int(generator.integers(1, 7)))]
        for in_order, longest_first in itertools.product([False, True], repeat=2):
            schedule = list_schedule(graphs, in_order=in_order, longest_first=longest_first)
            check(graphs, schedule, in_order=in_order)
            assert schedule.seconds >= least_seconds(graphs) - 1e-9


def test_few_batches_have_the_shortest_of_all_schedules():
    generator = np.random.default_rng(2)
    beaten = 0
    for shape in [(2, 2), (2, 3), (2, 4), (3, 2), (3, 2), (3, 3), (4, 2)] * 2:
        graphs = [random_graph(generator, shape[1]) for _ in range(shape[0])]
        if generator.random() < 0.5:
            graphs[-1] = graphs[0]  # two that are alike
        found = best_schedule(graphs)
        check(graphs, found)
        assert found.is_exact and found.seconds == pytest.approx(shortest_by_trying_all(graphs))
        assert found.seconds >= least_seconds(graphs) - 1e-9
        beaten += found.seconds < min(list_schedule(graphs, longest_first=b).seconds for b in (False, True)) - 1e-9
    assert beaten > 0, "lists alone are not enough"


def test_a_search_that_was_cut_short_does_not_call_itself_exact():
    generator, num_cut = np.random.default_rng(4), 0
    for _ in range(8):
        graphs = [random_graph(generator, 4) for _ in range(4)]
        cut, whole = best_schedule(graphs, most_nodes=1), best_schedule(graphs)
        check(graphs, cut)
        assert whole.is_exact and whole.seconds <= cut.seconds
        assert not cut.is_exact or cut.seconds == pytest.approx(whole.seconds)
        num_cut += not cut.is_exact
    assert num_cut > 0


def test_no_schedule_beats_the_linear_program():
    """Whatever the rules of batches, their order, and who schedules."""
    generator = np.random.default_rng(3)
    for _ in range(30):
        rules = {str(n): random_graph(generator, int(generator.integers(1, 6))) for n in range(3)}
        least = bound({name: graph.busy() for name, graph in rules.items()})
        chosen = generator.choice(list(rules), size=int(generator.integers(1, 9))).tolist()
        for pattern in (chosen, list(round_shares(least.shares))):
            graphs = [rules[name] for name in pattern]
            schedules = [list_schedule(graphs), list_schedule(graphs, in_order=True), list_schedule(graphs[::-1])]
            if len(graphs) <= 3:
                schedules.append(best_schedule(graphs))
            assert min(one.seconds for one in schedules) >= least.seconds * len(graphs) - 1e-9
            assert steady_seconds(graphs, rounds=2, in_order=False) >= least.seconds - 1e-9


def test_batches_overlap_unless_one_needs_the_weights_of_the_other():
    ahead = PlanGraph([Operation("sums", CORES, 4.0), Operation("copy/up", UP, 1.0, (0,)),
                       Operation("step", GPU, 3.0, (1,), needs_weights=True)])  # fmt: skip
    assert steady_seconds([ahead]) == pytest.approx(4.0), "the cores bind"
    behind = PlanGraph([Operation("product", CORES, 4.0, needs_weights=True), Operation("copy/up", UP, 1.0, (0,)),
                        Operation("step", GPU, 3.0, (1,))])  # fmt: skip
    assert steady_seconds([behind]) == pytest.approx(8.0), "one after the other"
    assert steady_seconds([behind], in_order=False) == pytest.approx(4.0)
    assert 4.0 <= steady_seconds([ahead, behind]) < (4.0 + 8.0) / 2, "sums are made while the other's step runs"
