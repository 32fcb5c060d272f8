"""Rows of the graph that are exchanged or written while a plan is carried out: every way gives the same batches."""

import pytest
import torch

from gnnsys import NeighborLoader
from gnnsys.graph import NODE, Graph, sbm
from gnnsys.loader.planned import GraphPlaces
from gnnsys.planning import DEVICE, ExecutionPlan, Way

NUM_EPOCHS = 2


def graph_of_its_own() -> Graph:
    return sbm(300, avg_degree=6, num_features=5, seed=1)


def loader_of(graph, ways=None, chosen=None):
    options = {"input_nodes": torch.arange(200), "batch_size": 16, "shuffle": True, "seed": 3}
    if ways is None:
        return NeighborLoader(graph, [4, 3], **options)
    made_for = NeighborLoader(graph, [4, 3], execution="auto", **options).plan.made_for
    return NeighborLoader(graph, [4, 3], execution=ExecutionPlan(ways, made_for=made_for, chosen=chosen), **options)


def rows_of(loader):
    return [(batch.n_id, batch.x) for batch in loader]


def are_same(found, expected):
    return all(
        torch.equal(ids, other_ids) and torch.equal(x, other)
        for (ids, x), (other_ids, other) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("chosen", [None, 0, 1])
def test_ways_that_are_made_later_have_the_rows_that_the_loader_was_made_with(chosen):
    graph = graph_of_its_own()
    expected = [rows_of(loader) for loader in [loader_of(graph)] for _ in range(NUM_EPOCHS)]
    loader = loader_of(graph, [Way(), Way(loading_threads=2)], chosen)
    if chosen is None:
        loader.plan.trial.warm, loader.plan.trial.measured, loader.plan.trial.rounds = 1, 2, 1
    graph.set_node_data("x", graph.node_data[NODE]["x"] + 1)
    for epoch in range(NUM_EPOCHS):
        assert are_same(rows_of(loader), expected[epoch])


def test_copies_of_rows_follow_what_is_written_between_epochs(monkeypatch):
    """A copy in this memory stands for one on a device."""
    made = []

    def copied(places, way):
        made.append(places._graph._moved(lambda csc: csc, torch.clone))
        return made[-1]

    monkeypatch.setattr(GraphPlaces, "_make", copied)
    graph = graph_of_its_own()
    loader = loader_of(graph, [Way(), Way(place=DEVICE, device_bytes=1)], chosen=1)
    plain = loader_of(graph)
    assert are_same(rows_of(loader), rows_of(plain))
    plain.close()  # what it has loaded ahead has the rows of before
    graph.node_data[NODE]["x"].mul_(2)
    assert are_same(rows_of(loader), rows_of(plain)) and len(made) == 2
    assert are_same(rows_of(loader), rows_of(plain)) and len(made) == 2, "nothing was written"


def test_a_copy_of_a_graph_shares_rows_and_not_what_it_is_given():
    graph = graph_of_its_own()
    other = graph.copy()
    assert other.csc() is graph.csc() and other.node_data[NODE]["x"] is graph.node_data[NODE]["x"]
    before = graph.node_data[NODE]["x"]
    graph.set_node_data("x", before + 1)
    assert other.node_data[NODE]["x"] is before
