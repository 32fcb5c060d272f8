"""gnnsys.pyg's loaders of subgraphs beside PyG's: the same user code, and what must be equal is equal.

Neither torch-sparse nor pyg-lib is needed: PyG's own classes are given our clusters, and a plain adjacency.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.loader
import torch_geometric.loader.graph_saint
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import subgraph

import gnnsys.pyg
from tests.pyg.sparse_adjacency import PlainAdjacency

NUM_NODES, NUM_EDGES = 120, 900


def make_data(num_nodes: int = NUM_NODES, num_edges: int = NUM_EDGES, both_ways: bool = False) -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    if both_ways:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    num_edges = edge_index.shape[1]
    return Data(
        x=torch.rand(num_nodes, 3, generator=generator),
        y=torch.randint(0, 4, (num_nodes,), generator=generator),
        edge_index=edge_index,
        edge_attr=torch.rand(num_edges, 2, generator=generator),
        node=torch.arange(num_nodes),
        edge_number=torch.arange(num_edges),
        name="a graph",
    )


def assert_same(a: Data, b: Data) -> None:
    """All of two batches is equal, in the same order."""
    assert set(a.keys()) == set(b.keys())
    for name, value in a:
        assert torch.equal(value, b[name]) if isinstance(value, Tensor) else value == b[name], name


def assert_induced(data: Data, batch: Data) -> None:
    """Every edge of the graph among the nodes of the batch, once, with its rows."""
    nodes, edges = batch.node, batch.edge_number
    assert torch.equal(nodes[batch.edge_index], data.edge_index[:, edges])
    expected = subgraph(nodes, data.edge_index, torch.arange(data.num_edges), num_nodes=data.num_nodes)[1]
    assert sorted(edges.tolist()) == sorted(expected.tolist())
    assert torch.equal(batch.x, data.x[nodes]) and torch.equal(batch.edge_attr, data.edge_attr[edges])
    assert batch.name == data.name


# -- clusters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pyg_with_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG's own ClusterData with our METIS, which it would take from pyg-lib or torch-sparse."""

    def metis(self: Any, edge_index: Tensor, num_nodes: int) -> Tensor:
        ours = gnnsys.pyg.ClusterData.__new__(gnnsys.pyg.ClusterData)
        ours.num_parts, ours.recursive, ours.seed = self.num_parts, self.recursive, 0
        return ours._metis(edge_index, num_nodes)

    monkeypatch.setattr(torch_geometric.loader.ClusterData, "_metis", metis)


@pytest.mark.usefixtures("pyg_with_metis")
@pytest.mark.parametrize("sparse_format", ["csr", "csc"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_clusters_and_their_batches_are_pygs_edge_by_edge(sparse_format: str, num_workers: int) -> None:
    def user_code(module: Any, workers: int) -> tuple[Any, list[Data]]:
        torch.manual_seed(3)
        clusters = module.ClusterData(make_data(), num_parts=8, log=False, sparse_format=sparse_format)
        loader = module.ClusterLoader(clusters, batch_size=3, shuffle=True, num_workers=workers)
        assert len(loader) == 3
        return clusters, [batch for _ in range(2) for batch in loader]

    ours, our_batches = user_code(gnnsys.pyg, num_workers)
    theirs, their_batches = user_code(torch_geometric.loader, 0)
    assert len(ours) == len(theirs) == 8 and str(ours) == str(theirs)
    for name in ("indptr", "index", "partptr", "node_perm", "edge_perm"):
        assert torch.equal(getattr(ours.partition, name), getattr(theirs.partition, name)), name
    for number in range(8):
        assert_same(ours[number], theirs[number])
    for a, b in zip(our_batches, their_batches, strict=True):
        assert_same(a, b)
        assert_induced(make_data(), a)


def test_clusters_are_few_edges_apart_and_about_equal() -> None:
    blocks = [
        torch.randint(20 * i, 20 * i + 20, (2, 200), generator=torch.Generator().manual_seed(i)) for i in range(5)
    ]
    data = Data(edge_index=torch.cat([*blocks, torch.tensor([[0, 20, 40, 60], [20, 40, 60, 80]])], 1), num_nodes=100)
    for recursive in (False, True):
        clusters = gnnsys.pyg.ClusterData(data, 5, recursive=recursive, log=False)
        assert sorted(clusters.partition.partptr.diff().tolist()) == [20] * 5
        assert sum(clusters[i].num_edges for i in range(5)) == 1000


def test_saved_clusters_are_used_again_and_only_for_their_graph(tmp_path: Path) -> None:
    data = make_data()
    first = gnnsys.pyg.ClusterData(data, 6, save_dir=str(tmp_path), log=False)
    again = gnnsys.pyg.ClusterData(data, 6, save_dir=str(tmp_path), log=False, seed=99)
    assert torch.equal(first.partition.node_perm, again.partition.node_perm)
    with pytest.raises(ValueError, match="remove it, or give another save_dir"):
        gnnsys.pyg.ClusterData(make_data(100), 6, save_dir=str(tmp_path), log=False)
    (tmp_path / "part_6" / "metis.pt").write_bytes(b"no partition")
    with pytest.raises(ValueError, match="remove it"):
        gnnsys.pyg.ClusterData(data, 6, save_dir=str(tmp_path), log=False)


# -- GraphSAINT --------------------------------------------------------------------------------------------------------

SAINT: dict[str, dict[str, Any]] = {
    "GraphSAINTNodeSampler": {"batch_size": 20},
    "GraphSAINTEdgeSampler": {"batch_size": 12},
    "GraphSAINTRandomWalkSampler": {"batch_size": 8, "walk_length": 3},
}


@pytest.fixture
def pyg_with_adjacency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_geometric.loader.graph_saint, "SparseTensor", PlainAdjacency)


def read_subgraphs(module: Any, name: str, data: Data, **options: Any) -> tuple[Any, list[Data]]:
    """The user's code: one import decides whose loader it is."""
    torch.manual_seed(0)
    loader = getattr(module, name)(data, num_steps=5, log=False, **SAINT[name], **options)
    return loader, list(loader)


@pytest.mark.usefixtures("pyg_with_adjacency")
@pytest.mark.parametrize("name", SAINT)
def test_graphsaint_batches_carry_what_pygs_do(name: str) -> None:
    data = make_data()
    ours, our_batches = read_subgraphs(gnnsys.pyg, name, data, sample_coverage=5)
    theirs, their_batches = read_subgraphs(torch_geometric.loader, name, data, sample_coverage=5)
    assert isinstance(ours, type(theirs)) and len(ours) == len(theirs) == 5
    for a, b in zip(our_batches, their_batches, strict=True):
        assert set(a.keys()) == set(b.keys())
        for key in b.keys():  # noqa: SIM118 - a Data is no dict
            if isinstance(b[key], Tensor):
                assert a[key].dtype == b[key].dtype and a[key].dim() == b[key].dim(), key
        assert torch.equal(a.node, a.node.sort().values), "PyG's nodes ascend"
        assert_induced(data, a)
        assert_induced(data, b)
        # Edges come in PyG's order: by source, then by destination.
        place = a.edge_index[0] * a.num_nodes + a.edge_index[1]
        assert torch.equal(place, place.sort().values)
        assert torch.equal(a.node_norm, ours.node_norm[a.node])
        assert torch.equal(a.edge_norm, ours.edge_norm[a.edge_number])


@pytest.mark.usefixtures("pyg_with_adjacency")
@pytest.mark.parametrize("name", ["GraphSAINTNodeSampler", "GraphSAINTRandomWalkSampler"])
def test_graphsaint_norms_are_pygs_in_expectation_with_edges_by_destination(name: str) -> None:
    data = make_data(30, 200)
    ours, _ = read_subgraphs(gnnsys.pyg, name, data, sample_coverage=700)
    theirs, _ = read_subgraphs(torch_geometric.loader, name, data, sample_coverage=300)
    drawn = theirs.node_norm < 1  # 0.1 of a node stands for one that was never drawn
    assert torch.equal(drawn, ours.node_norm < 1)
    torch.testing.assert_close(ours.node_norm[drawn], theirs.node_norm[drawn], rtol=0.15, atol=0)
    row, col = data.edge_index
    of_destination = theirs.edge_norm * theirs.node_norm[row] / theirs.node_norm[col]
    seen = (theirs.edge_norm < 50) & (ours.edge_norm < 50) & drawn[row] & drawn[col]
    assert seen.float().mean() > 0.8
    torch.testing.assert_close(ours.edge_norm[seen], of_destination[seen], rtol=0.5, atol=0)
    assert float((ours.edge_norm[seen] / of_destination[seen]).mean()) == pytest.approx(1.0, abs=0.05)


def test_norms_make_sums_over_a_subgraph_those_of_the_graph_in_expectation() -> None:
    data = make_data(40, 300, both_ways=True)
    loader = gnnsys.pyg.GraphSAINTNodeSampler(data, 25, num_steps=150, sample_coverage=250, seed=1)
    sums = []
    for batch in loader:
        row, col = batch.edge_index
        messages = torch.zeros(batch.num_nodes).index_add_(0, col, batch.edge_norm * batch.x[row, 0])
        sums.append(float((batch.node_norm * messages).sum()))
    found = torch.tensor(sums, dtype=torch.float64)
    exact = float(data.x[data.edge_index[0], 0].sum()) / data.num_nodes
    assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / len(sums) ** 0.5 + 0.01 * exact


def test_saved_norms_are_read_again_and_only_for_their_graph(tmp_path: Path) -> None:
    options: dict[str, Any] = {"walk_length": 2, "sample_coverage": 3, "save_dir": str(tmp_path), "log": False}
    first = gnnsys.pyg.GraphSAINTRandomWalkSampler(make_data(), 8, **options)
    again = gnnsys.pyg.GraphSAINTRandomWalkSampler(make_data(), 8, **options)
    assert torch.equal(first.edge_norm, again.edge_norm)
    with pytest.raises(ValueError, match="another graph"):
        gnnsys.pyg.GraphSAINTRandomWalkSampler(make_data(99), 8, **options)


# -- shaDow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [False, True])
def test_shadow_subgraphs_are_induced_root_by_root(replace: bool) -> None:
    data = make_data()
    mask = torch.zeros(NUM_NODES, dtype=torch.bool)
    mask[::3] = True
    loader = gnnsys.pyg.ShaDowKHopSampler(data, 2, 3, node_idx=mask, replace=replace, batch_size=7)
    assert isinstance(loader, torch_geometric.loader.ShaDowKHopSampler) and len(loader) == 6
    roots = []
    for batch in loader:
        roots.append(batch.node[batch.root_n_id])
        assert torch.equal(batch.y, data.y[roots[-1]])  # of roots alone, as PyG has it
        assert batch.batch.numel() == batch.x.shape[0] == int(batch.ptr[-1])
        assert torch.equal(batch.batch[batch.root_n_id], torch.arange(roots[-1].numel()))
        source, destination = batch.batch[batch.edge_index]
        assert torch.equal(source, destination)
        for tree in range(roots[-1].numel()):
            first, end = batch.ptr[tree : tree + 2].tolist()
            nodes, edges = batch.node[first:end], batch.edge_number[source == tree]
            assert nodes.unique().numel() == nodes.numel() <= 1 + 3 + 9
            expected = subgraph(nodes, data.edge_index, torch.arange(NUM_EDGES), num_nodes=NUM_NODES)[1]
            assert sorted(edges.tolist()) == sorted(expected.tolist())
        assert torch.equal(batch.node[batch.edge_index], data.edge_index[:, batch.edge_number])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.edge_number])
    assert torch.equal(torch.cat(roots), mask.nonzero().view(-1))


def test_shadow_with_all_neighbours_is_the_k_hop_subgraph() -> None:
    data = make_data(60, 90)
    (batch,) = gnnsys.pyg.ShaDowKHopSampler(data, 2, -1, node_idx=torch.tensor([4, 11]), batch_size=2)
    for tree, root in enumerate((4, 11)):
        expected = torch_geometric.utils.k_hop_subgraph(root, 2, data.edge_index)[0]
        assert sorted(batch.node[batch.batch == tree].tolist()) == expected.tolist()


# -- all of them -------------------------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[..., Any]] = {
    "clusters": lambda **kwargs: gnnsys.pyg.ClusterLoader(
        gnnsys.pyg.ClusterData(make_data(), 8, log=False), batch_size=2, shuffle=True, **kwargs
    ),
    "saint": lambda **kwargs: gnnsys.pyg.GraphSAINTRandomWalkSampler(
        make_data(), 5, walk_length=2, num_steps=4, sample_coverage=2, **kwargs
    ),
    "shadow": lambda **kwargs: gnnsys.pyg.ShaDowKHopSampler(make_data(), 2, 3, batch_size=32, shuffle=True, **kwargs),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_repeat_with_torchs_seed_whatever_the_number_of_threads(kind: str) -> None:
    found = []
    for num_workers in (0, 3, 1):
        torch.manual_seed(7)
        loader = LOADERS[kind](num_workers=num_workers)
        found.append([batch for _ in range(2) for batch in loader])
    for batches in found[1:]:
        for a, b in zip(found[0], batches, strict=True):
            assert_same(a, b)
    if kind != "clusters":  # nothing is drawn there
        assert not torch.equal(found[0][0].node, found[0][len(found[0]) // 2].node), "another epoch"


@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_epoch_has_the_batches_of_an_unbroken_one(kind: str) -> None:
    torch.manual_seed(7)
    whole = list(LOADERS[kind]())
    torch.manual_seed(7)
    loader = LOADERS[kind]()
    batches = iter(loader)
    next(batches)
    state = copy.deepcopy(loader.state_dict())
    torch.manual_seed(1234)
    resumed = LOADERS[kind]()
    resumed.load_state_dict(state)
    for a, b in zip(whole[1:], resumed, strict=True):
        assert_same(a, b)


def test_a_state_of_other_options_is_refused() -> None:
    state = gnnsys.pyg.ShaDowKHopSampler(make_data(), 2, 3, batch_size=32).state_dict()
    with pytest.raises(ValueError, match="depth"):
        gnnsys.pyg.ShaDowKHopSampler(make_data(), 1, 3, batch_size=32).load_state_dict(state)


def test_bad_arguments_say_what_to_write_instead() -> None:
    data, hetero = make_data(), HeteroData()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("num_parts must be in", lambda: gnnsys.pyg.ClusterData(data, 0)),
        ("'csr' or 'csc'", lambda: gnnsys.pyg.ClusterData(data, 2, sparse_format="coo")),  # type: ignore[arg-type]
        ("must be a ClusterData", lambda: gnnsys.pyg.ClusterLoader(data)),
        ("takes a torch_geometric Data", lambda: gnnsys.pyg.ClusterData(hetero, 2)),
        ("needs data.edge_index", lambda: gnnsys.pyg.GraphSAINTNodeSampler(Data(num_nodes=3), 2)),
        ("rename yours", lambda: gnnsys.pyg.GraphSAINTNodeSampler(Data(edge_index=EDGE, node_norm=EDGE), 2)),
        ("num_steps must be", lambda: gnnsys.pyg.GraphSAINTEdgeSampler(data, 2, num_steps=0)),
        ("length must be at least 1", lambda: gnnsys.pyg.GraphSAINTRandomWalkSampler(data, 2, walk_length=0)),
        ("depth must be >= 1", lambda: gnnsys.pyg.ShaDowKHopSampler(data, 0, 3)),
        ("node_idx", lambda: gnnsys.pyg.ShaDowKHopSampler(data, 1, 3, node_idx=torch.tensor([500]))),
        ("no seeds", lambda: gnnsys.pyg.ShaDowKHopSampler(data, 1, 3, node_idx=torch.empty(0, dtype=torch.int64))),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


EDGE = torch.tensor([[0], [1]])
