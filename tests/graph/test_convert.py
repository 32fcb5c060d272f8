"""PyG, DGL and OGB in, PyG out."""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import pytest
import torch

from gnnsys.graph import EDGE, NODE, from_dgl, from_ogb, from_ogb_dict, from_pyg, sbm, to_pyg, typed_graph

os.environ.setdefault("DGLBACKEND", "pytorch")

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def pyg_data():
    data = pytest.importorskip("torch_geometric.data").Data(
        edge_index=torch.randint(30, (2, 200)),
        x=torch.rand(30, 4),
        y=torch.randint(3, (30,)),
        train_mask=torch.rand(30) > 0.5,
        edge_attr=torch.rand(200, 2),
        edge_weight=torch.rand(200),
        name="a whole graph's attribute",
    )
    data.num_nodes = 30
    return data


def pyg_hetero():
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    data["paper"].x = torch.rand(20, 3)
    data["paper"].time = torch.arange(20)
    data["author"].num_nodes = 7
    data[CITES].edge_index = torch.randint(20, (2, 90))
    data[WRITES].edge_index = torch.stack([torch.randint(7, (40,)), torch.randint(20, (40,))])
    data[WRITES].edge_time = torch.arange(40)
    return data


def test_pyg_data_goes_through_a_graph_and_back_unchanged():
    data = pyg_data()
    graph = from_pyg(data)
    assert graph.is_homogeneous
    assert set(graph.node_data[NODE]) == {"x", "y", "train_mask"}
    assert set(graph.edge_data[EDGE]) == {"edge_attr", "edge_weight"}
    assert graph.node_data[NODE]["x"].data_ptr() == data.x.data_ptr()  # taken over, not copied
    back = to_pyg(graph)
    assert back.num_nodes == 30
    for name in ("edge_index", "x", "y", "train_mask", "edge_attr", "edge_weight"):
        assert torch.equal(back[name], data[name]), name


def test_arrays_of_numpy_and_lists_of_numbers_in_pyg_data_become_rows():
    data, wanted = pyg_data(), pyg_data()
    for name in ("x", "edge_attr", "train_mask", "edge_index"):
        wanted[name] = data[name]
        data[name] = data[name].numpy()
    data.y, wanted.y = wanted.y.tolist(), wanted.y
    data.names = [f"node {i}" for i in range(30)]
    data.pairs = [[1], [2, 3]] * 15  # rows of several lengths
    graph = from_pyg(data)
    assert set(graph.node_data[NODE]) == {"x", "y", "train_mask"}
    for name in ("x", "y", "train_mask"):
        assert torch.equal(graph.node_data[NODE][name], wanted[name]), name
    assert torch.equal(graph.edge_data[EDGE]["edge_attr"], wanted.edge_attr)
    assert torch.equal(graph.edge_index(), wanted.edge_index)


def test_rows_of_another_length_in_pyg_data_are_left_out_with_a_warning_and_graph_level_ones_without():
    data = pyg_data()
    data.level, data.scale, data.edge_label, data.split_idx = torch.rand(1, 5), torch.tensor(2.0), torch.ones(9), [1, 2]
    data.edge_label_index = torch.zeros(2, 9, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(from_pyg(data).node_data[NODE]) == {"x", "y", "train_mask"}
        from_pyg(pyg_hetero())
    data.y, data.train_mask = data.y[:-1], data.train_mask[:4].numpy()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert set(from_pyg(data).node_data[NODE]) == {"x"}
    assert sorted(str(each.message).partition(":")[0] for each in said) == [
        "data.train_mask has 4 rows and there are 30 nodes",
        "data.y has 29 rows and there are 30 nodes",
    ]
    typed = pyg_hetero()
    typed["paper"].y = torch.ones(19)
    with pytest.warns(UserWarning, match=r"data\['paper'\].y has 19 rows and there are 20 nodes: it is left out"):
        from_pyg(typed)


def test_pyg_hetero_data_goes_through_a_graph_and_back_unchanged():
    data = pyg_hetero()
    graph = from_pyg(data)
    assert graph.node_types == ["paper", "author"] and graph.edge_types == [CITES, WRITES]
    assert graph.num_nodes("author") == 7
    back = to_pyg(graph)
    assert back.metadata() == data.metadata() and back["author"].num_nodes == 7
    for edge_type in (CITES, WRITES):
        assert torch.equal(back[edge_type].edge_index, data[edge_type].edge_index)
    assert torch.equal(back[WRITES].edge_time, data[WRITES].edge_time)
    assert torch.equal(back["paper"].x, data["paper"].x) and torch.equal(back["paper"].time, data["paper"].time)


def test_pygs_own_edge_index_class_is_understood():
    edge_index = pytest.importorskip("torch_geometric").EdgeIndex([[0, 1, 2], [1, 2, 2]], sort_order="col")
    data = pyg_data()
    data.edge_index, data.edge_attr, data.edge_weight = edge_index, torch.rand(3), torch.rand(3)
    graph = from_pyg(data)
    assert type(graph.csc().indices) is torch.Tensor and graph.csc().edge_ids is None
    assert graph.edge_index().tolist() == [[0, 1, 2], [1, 2, 2]]


def test_pyg_data_without_edge_index_is_refused_with_the_remedy():
    data = pyg_data()
    data.adj_t, data.edge_index = torch.eye(30).to_sparse(), None
    with pytest.raises(ValueError, match=r"found 'adj_t': convert a sparse adjacency"):
        from_pyg(data)
    with pytest.raises(ValueError, match="must be a torch_geometric Data or HeteroData, got dict"):
        from_pyg({})


@pytest.mark.parametrize("make", [lambda: sbm(500, num_features=3), lambda: typed_graph(200, num_features=3)])
def test_generated_graphs_survive_pyg(make):
    graph = make()
    back = from_pyg(to_pyg(graph))
    assert back.node_types == graph.node_types and back.edge_types == graph.edge_types
    for edge_type in graph.edge_types:
        assert torch.equal(back.edge_index(edge_type), graph.edge_index(edge_type))
    for node_type in graph.node_types:
        assert back.node_data[node_type].keys() == graph.node_data[node_type].keys()


def test_a_dgl_graph_keeps_edges_by_its_edge_ids():
    dgl = pytest.importorskip("dgl")
    src, dst = torch.randint(25, (2, 150))
    g = dgl.graph((src, dst), num_nodes=25)
    g.ndata["x"], g.edata["w"] = torch.rand(25, 3), torch.rand(150)
    graph = from_dgl(g)
    assert graph.is_homogeneous
    assert torch.equal(graph.edge_index(), torch.stack([src, dst]))
    assert torch.equal(graph.edge_data[EDGE]["w"], g.edata["w"]) and torch.equal(
        graph.node_data[NODE]["x"], g.ndata["x"]
    )


def test_a_typed_dgl_graph_keeps_its_names():
    dgl = pytest.importorskip("dgl")
    edges = {
        CITES: (torch.randint(20, (60,)), torch.randint(20, (60,))),
        WRITES: (torch.randint(7, (30,)), torch.randint(20, (30,))),
    }
    g = dgl.heterograph(edges, num_nodes_dict={"paper": 20, "author": 7})
    g.nodes["paper"].data["y"] = torch.arange(20)
    g.edges[WRITES].data["when"] = torch.arange(30)
    graph = from_dgl(g)
    assert sorted(graph.edge_types) == sorted(edges)
    for edge_type, (src, dst) in edges.items():
        assert torch.equal(graph.edge_index(edge_type), torch.stack([src, dst]))
    assert torch.equal(graph.node_data["paper"]["y"], torch.arange(20))
    assert torch.equal(graph.edge_data[WRITES]["when"], torch.arange(30))
    with pytest.raises(ValueError, match="is a block"):
        from_dgl(dgl.to_block(g, {"paper": torch.arange(5)}))
    with pytest.raises(ValueError, match="must be a DGLGraph"):
        from_dgl(None)


class OgbNodes:
    """The interface of ogb's NodePropPredDataset, with ogbn-arxiv's layout."""

    name = "ogbn-arxiv"
    graph = {  # noqa: RUF012
        "edge_index": np.array([[0, 1, 2, 3], [3, 3, 0, 1]]),
        "edge_feat": None,
        "node_feat": np.random.default_rng(0).random((5, 8), dtype=np.float32),
        "node_year": np.array([[2013], [2014], [2015], [2016], [2017]]),
        "num_nodes": 5,
    }

    def __getitem__(self, index):
        assert index == 0
        return self.graph, np.array([[4], [0], [1], [2], [3]])

    def get_idx_split(self):
        return {"train": np.array([0, 3]), "valid": np.array([1]), "test": np.array([2, 4])}


def test_an_ogb_node_dataset_brings_labels_and_masks():
    graph = from_ogb(OgbNodes())
    data = graph.node_data[NODE]
    assert graph.edge_index().tolist() == OgbNodes.graph["edge_index"].tolist()
    assert np.array_equal(data["x"].numpy(), OgbNodes.graph["node_feat"])
    assert data["y"].tolist() == [4, 0, 1, 2, 3] and data["year"].tolist() == [2013, 2014, 2015, 2016, 2017]
    assert data["train_mask"].nonzero().flatten().tolist() == [0, 3]
    assert data["val_mask"].nonzero().flatten().tolist() == [1]
    assert data["test_mask"].nonzero().flatten().tolist() == [2, 4]
    assert graph.info == {"source": "ogb", "name": "ogbn-arxiv"}


def test_ogb_labels_that_are_missing_become_minus_one_and_tasks_stay_columns():
    graph = {"edge_index": np.array([[0], [1]]), "edge_feat": None, "node_feat": None, "num_nodes": 2}
    assert from_ogb_dict(graph, np.array([[np.nan], [3.0]])).node_data[NODE]["y"].tolist() == [-1, 3]
    assert from_ogb_dict(graph, np.ones((2, 112), dtype=np.int64)).node_data[NODE]["y"].shape == (2, 112)


def test_an_ogb_link_dataset_is_a_graph_with_edge_rows():
    class Links:
        name = "ogbl-collab"

        def __getitem__(self, index):
            edges = np.array([[0, 1, 1], [1, 0, 2]])
            return {
                "edge_index": edges,
                "edge_feat": None,
                "edge_weight": np.array([[1], [2], [3]]),
                "edge_year": np.array([[2001], [2002], [2003]]),
                "node_feat": np.zeros((3, 2), dtype=np.float32),
                "num_nodes": 3,
            }

    graph = from_ogb(Links())
    assert graph.edge_data[EDGE]["weight"].tolist() == [1, 2, 3]
    assert graph.edge_data[EDGE]["year"].tolist() == [2001, 2002, 2003]


def test_ogbn_mags_typed_layout_is_read():
    rng = np.random.default_rng(1)
    topic = ("paper", "has_topic", "field_of_study")
    graph = {
        "edge_index_dict": {WRITES: np.array([[0, 2], [1, 3]]), topic: np.array([[0, 1, 2], [0, 1, 1]])},
        "edge_feat_dict": {},
        "node_feat_dict": {"paper": rng.random((4, 6), dtype=np.float32)},
        "num_nodes_dict": {"author": 3, "field_of_study": 2, "paper": 4},
        "node_year": {"paper": np.array([[2010], [2011], [2012], [2013]])},
        "edge_reltype": {WRITES: np.array([[2], [2]]), topic: np.array([[3], [3], [3]])},
    }
    labels = {"paper": np.array([[7], [8], [9], [7]])}
    split = {"train": {"paper": np.array([0])}, "valid": {"paper": np.array([1])}, "test": {"paper": np.array([2, 3])}}
    ours = from_ogb_dict(graph, labels, split)
    assert ours.num_nodes("author") == 3 and ours.edge_types == [WRITES, topic]
    assert ours.node_data["paper"]["y"].tolist() == [7, 8, 9, 7]
    assert ours.node_data["paper"]["year"].tolist() == [2010, 2011, 2012, 2013]
    assert ours.node_data["paper"]["test_mask"].tolist() == [False, False, True, True]
    assert ours.edge_data[topic]["reltype"].tolist() == [3, 3, 3]
    assert ours.edge_index(topic).tolist() == [[0, 1, 2], [0, 1, 1]]


def test_ogb_by_name_says_what_to_install_and_which_names_there_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match="pip install ogb"):
        from_ogb("ogbn-products")
    with pytest.raises(ValueError, match=r"ogbn-\* or ogbl-\* name, got 'cora'"):
        from_ogb("cora")


def test_an_ogb_split_that_does_not_fit_the_graph_is_refused():
    graph = {"edge_index": np.array([[0], [1]]), "edge_feat": None, "node_feat": None, "num_nodes": 2}
    with pytest.raises(ValueError, match=r"split\['train'\] must be in \[0, 2\), got 1 to 2"):
        from_ogb_dict(graph, split={"train": np.array([1, 2])})


@pytest.mark.parametrize(
    "graph,message",
    [
        ({"num_nodes": 3}, "must have 'edge_index' or 'edge_index_dict'"),
        ({"edge_index": np.array([[0], [3]]), "num_nodes": 3}, "dst must be in"),
        ({"edge_index": np.array([[0], [1]]), "num_nodes": 3, "node_feat": np.zeros((2, 1))}, "expected 3 rows"),
        ({"edge_index": np.array([[0], [1]]), "num_nodes": 3, "graph_year": 3}, "'graph_year'.*neither"),
    ],
)
def test_malformed_ogb_dictionaries_are_refused(graph, message):
    with pytest.raises(ValueError, match=message):
        from_ogb_dict(graph)
