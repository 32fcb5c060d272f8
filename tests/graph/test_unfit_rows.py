"""Features with NaN or infinite values are counted and named when a graph is made, partitioned, opened and checked."""

from __future__ import annotations

import logging

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import gnnsys
import gnnsys.pyg
from gnnsys.doctor import ADVICE, judge_parts, read_parts
from gnnsys.graph import Graph, unfit_rows
from gnnsys.graph.row_checks import _LOOKED_AT
from gnnsys.partition import partition_graph
from tests.support.grid import grid

NAN, INF = float("nan"), float("inf")
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


@pytest.fixture
def warned():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("gnnsys").addHandler(handler)
    yield lambda: [records.pop(0).getMessage() for _ in list(records)]
    logging.getLogger("gnnsys").removeHandler(handler)


@grid(
    dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64],
    shape=[(50, 3), (50, 2, 2)],
    value=[NAN, INF, -INF],
    rows=[[0], [49], [3, 4, 7, 20]],
    whole=[True, False],
)
def test_rows_are_those_that_torch_finds(dtype, shape, value, rows, whole):
    x = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    assert unfit_rows(x).count == 0
    x[rows, 1] = value
    x = x if whole else torch.cat([x, x], -1)[..., : shape[-1]]
    found = unfit_rows(x)
    expected = (~torch.isfinite(x)).flatten(1).any(1).nonzero().view(-1).tolist()
    assert expected == rows and (found.count, list(found.first)) == (len(rows), rows[:3])
    assert list(unfit_rows(x, 100 - torch.arange(50)).first) == sorted(100 - row for row in rows)[:3]


def test_a_graph_names_the_array_and_the_first_rows(warned):
    edges, x = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.rand(4, 3)
    x[1:, 2] = NAN
    Graph.from_edge_index(edges, 4, {"x": x})
    said = "of 4 rows 3 have NaN or infinite values (1, 2, 3). A model that reads them computes NaN"
    assert warned() == [f"node_data['node']['x']: {said}"]
    Graph.from_edge_index(edges, 4, None, {"e": x})
    (line,) = warned()
    assert line.startswith("edge_data[('node', 'to', 'node')]['e']: of 4 rows 3 have NaN")
    labels = torch.tensor([1.0, NAN, NAN, 0.0])
    Graph.from_edge_index(edges, 4, {"y": labels, "column": labels[:, None], "ids": edges.t()})
    assert warned() == [], "of labels NaN says that there is none"


@grid(
    make=[
        lambda data: gnnsys.pyg.NeighborLoader(data, [2]),
        lambda data: gnnsys.pyg.LinkNeighborLoader(data, [2], exclude_supervision=True),
        lambda data: gnnsys.pyg.ClusterLoader(gnnsys.pyg.ClusterData(data, 2, log=False)),
        lambda data: gnnsys.pyg.GraphSAINTNodeSampler(data, 2),
        lambda data: gnnsys.pyg.ShaDowKHopSampler(data, 1, 2),
    ]
)
def test_the_first_pyg_loader_of_an_array_names_it(make, warned):
    data = Data(x=torch.rand(4, 3), y=torch.tensor([1.0, NAN, NAN, 0.0]), edge_index=EDGES, edge_attr=torch.rand(4, 2))
    data.x[1, 2], data.edge_attr[3, 0] = NAN, INF
    make(data)
    make(data)
    assert warned() == [
        "data.x: of 4 rows 1 has NaN or infinite values (1). A model that reads them computes NaN",
        "data.edge_attr: of 4 rows 1 has NaN or infinite values (3). A model that reads them computes NaN",
    ]
    data.x = data.x.clone()
    make(data)
    (line,) = warned()
    assert line.startswith("data.x: ")


def test_a_pyg_loader_of_several_types_names_the_type(warned):
    data = HeteroData()
    data["a"].x, data["a", "to", "a"].edge_index = torch.full((4, 2), NAN), EDGES
    gnnsys.pyg.NeighborLoader(data, [2], "a")
    (line,) = warned()
    assert line.startswith("data['a'].x: of 4 rows 4 have NaN")


def test_of_a_large_array_some_pieces_are_looked_at(warned):
    x = torch.zeros(3 * _LOOKED_AT // (256 * 4), 256)
    x[::5] = INF
    Graph({"a": len(x)}, {}, {"a": {"x": x}})
    (line,) = warned()
    assert f"of the {len(x) // 3:,} looked at rows 6" in line


def test_parts_say_which_rows_when_they_are_made_opened_and_checked(tmp_path, warned):
    x = torch.rand(30, 4)
    x[[5, 21, 22, 29], 0] = NAN
    edges = torch.stack([torch.arange(30), (torch.arange(30) + 1) % 30])
    graph = Graph.from_edge_index(edges, 30, {"x": x, "fine": torch.rand(30, 2)})
    warned()
    partition_graph(graph, 2, tmp_path / "parts")
    words = "node_data['node']['x']: of its rows 4 have NaN or infinite values (5, 21, 22, ...)"
    (line,) = warned()
    assert line.startswith(words)
    with gnnsys.init(process_group=False):
        gnnsys.open(tmp_path / "parts")
        gnnsys.open(tmp_path / "parts")
    (line,) = warned()
    assert words in line
    (found,) = (each for each in judge_parts(read_parts(str(tmp_path / "parts")), None) if each.subject == "features")
    assert found.state == ADVICE and "4 have NaN or infinite values (5, 21, 22, ...)" in found.found


def test_parts_without_a_node_are_counted(tmp_path, warned):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    partition_graph(graph, 2, tmp_path / "parts", trainers_per_part=2)
    assert warned() == ["2 of 4 subparts have no node: use fewer"]
    partition_graph(graph, 2, tmp_path / "well")
    assert warned() == []
