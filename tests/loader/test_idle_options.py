"""What a loader would take and not use is refused when it is made; what is odd but has a meaning is said once."""

from __future__ import annotations

import logging

import dgl
import pytest
import torch
from torch_geometric.data import Data

import gnnsys
import gnnsys.dgl
import gnnsys.pyg
from gnnsys.nn import GraphSAGE
from gnnsys.pyg.sampler import _warn_once as warned_once
from tests.support.grid import grid

EDGES = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
GRAPH = gnnsys.Graph.from_edge_index(EDGES, 6, {"x": torch.rand(6, 4)})
EDGE = GRAPH.edge_types[0]


@grid(
    case={
        "text": ("15,10", r"got '15,10': write \[15, 10\]"),
        "a number": (5, r"got 5: write \[5\]"),
        "of a type": ({EDGE: 5}, r"got 5: write \[5\]"),
        "a word": ("all", "must be a list, a fanout per hop, got 'all'$"),
        "numbers as text": (["15", "10"], r"whole numbers >= 0, got \['15', '10'\]"),
        "not a number": ([float("nan")], r"whole numbers >= 0, got \[nan\]"),
        "endless": ([float("inf")], r"whole numbers >= 0, got \[inf\]"),
        "lists": ([[3]], r"whole numbers >= 0, got \[\[3\]\]"),
        "a truth": ([True], r"whole numbers >= 0, got \[True\]"),
        "nothing at the second hop": ([10, 0], r"hop 2 of num_neighbors=\[10, 0\] takes no neighbours"),
        "nothing at the first hop": ({EDGE: [0, 10]}, r"hop 1 of num_neighbors=\[0, 10\] takes no neighbours"),
    },
    make=[
        lambda given: gnnsys.NeighborLoader(GRAPH, given),
        lambda given: gnnsys.LinkNeighborLoader(GRAPH, given, edge_label_index=EDGES),
    ],
)
def test_fanouts_that_are_none_are_refused_with_what_to_write(case, make):
    given, words = case
    with pytest.raises(ValueError, match=words):
        make(given)


@grid(
    make=[
        lambda given: gnnsys.pyg.NeighborLoader(Data(edge_index=EDGES, num_nodes=6), given),
        lambda given: gnnsys.pyg.NeighborSampler(Data(edge_index=EDGES, num_nodes=6), given),
        lambda given: gnnsys.pyg.ShaDowKHopSampler(Data(edge_index=EDGES, num_nodes=6), 1, given[0]),
        gnnsys.dgl.NeighborSampler,
        gnnsys.dgl.LaborSampler,
        gnnsys.dgl.ShaDowKHopSampler,
        lambda given: gnnsys.dgl.NeighborSampler([{EDGE: given[0]}]),
        lambda given: gnnsys.sampling.sample_neighbors(GRAPH, torch.arange(2), given[0]),
        lambda given: gnnsys.sampling.PinSAGESampler(GRAPH, given, num_walks=3, length=2),
    ]
)
def test_no_face_takes_true_or_a_fraction_as_a_fanout(make):
    for given in ([True], [2.5]):
        with pytest.raises(ValueError, match=r"whole numbers >= 0, got|a whole number >= 0, got|at least 1, got"):
            make(given)


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(ValueError, match='give execution="auto" as well, or leave model away'):
        gnnsys.NeighborLoader(GRAPH, [2], model=GraphSAGE(4, 8, 1, 2))
    gnnsys.NeighborLoader(GRAPH, [2], model=GraphSAGE(4, 8, 1, 2), execution="auto").close()


def test_batches_of_seeds_alone_are_said_and_types_may_be_left_out(caplog_of_gnnsys):
    batch = next(iter(gnnsys.NeighborLoader(GRAPH, [0], batch_size=4)))
    assert batch.n_id.numel() == 4 and batch.edge_index.shape == (2, 0)
    (record,) = caplog_of_gnnsys
    assert "num_neighbors=[0] takes no neighbours" in record.getMessage()
    typed = gnnsys.Graph.from_edge_indices({("a", "to", "a"): EDGES, ("a", "by", "a"): EDGES}, {"a": 6})
    gnnsys.NeighborLoader(typed, {("a", "to", "a"): [2, 0], ("a", "by", "a"): [0, 2]}, input_nodes=("a", None)).close()
    gnnsys.LinkNeighborLoader(GRAPH, [0], edge_label_index=EDGES).close()
    assert len(caplog_of_gnnsys) == 1


def test_faces_take_hops_without_neighbours_as_their_libraries_do(caplog_of_gnnsys):
    data = Data(edge_index=EDGES, num_nodes=6)
    warned_once.cache_clear()
    batch = next(iter(gnnsys.pyg.NeighborLoader(data, [2, 0], batch_size=2, input_nodes=torch.arange(2))))
    assert len(batch.num_sampled_nodes) <= 3 and batch.edge_index.shape[1] == 2
    said = [record.getMessage() for record in caplog_of_gnnsys]
    assert len(said) == 1 and said[0].startswith("hop 2 of num_neighbors=[2, 0] takes no neighbours of any node")
    gnnsys.pyg.NeighborLoader(data, [2, 0], batch_size=2)
    gnnsys.pyg.LinkNeighborLoader(data, [0], exclude_supervision=True)
    gnnsys.pyg.NeighborLoader(data, [2, 1], batch_size=2)
    assert [record.getMessage() for record in caplog_of_gnnsys[1:]] == [
        "num_neighbors=[0] takes no neighbours, batches have their seeds alone: -1 takes all"
    ]
    caplog_of_gnnsys.clear()
    graph = dgl.graph((EDGES[0], EDGES[1]))
    for face in (dgl.dataloading, gnnsys.dgl):
        loader = face.DataLoader(graph, torch.arange(6), face.NeighborSampler([0, 2]), batch_size=2)
        _, _, (outer, inner) = next(iter(loader))
        assert (outer.num_edges(), inner.num_edges()) == (0, 2)
    assert not caplog_of_gnnsys


@pytest.fixture
def caplog_of_gnnsys():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("gnnsys").addHandler(handler)
    yield records
    logging.getLogger("gnnsys").removeHandler(handler)
