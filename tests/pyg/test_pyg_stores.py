"""PyG's pair of stores over graphs in parts: what stock code, and samplers and classes of the user's own, get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

tg = pytest.importorskip("torch_geometric")

from torch_geometric.data import HeteroData  # noqa: E402

from gnnsys.graph import EDGE, NODE  # noqa: E402
from gnnsys.pyg import NeighborLoader, NeighborSampler, stores  # noqa: E402
from tests.sampling.machines import CITES, REV_WRITES, WRITES, homogeneous, typed  # noqa: E402
from tests.support.pyg_parts import SEEDS, hetero_parts, messages, plain_parts  # noqa: E402


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with plain_parts(tmp_path_factory.mktemp("pyg") / "parts") as both:
        yield both


@pytest.fixture(scope="module")
def hetero(tmp_path_factory):
    with hetero_parts(tmp_path_factory.mktemp("pyg") / "parts") as both:
        yield both


def test_the_feature_store_reads_nodes_and_edges_by_their_ids(hetero, plain) -> None:
    _, graphs = hetero
    graph = typed()
    for mine in graphs:
        features, _ = stores(mine)
        listed = {(a.group_name, a.attr_name) for a in features.get_all_tensor_attrs()}
        assert listed >= {("paper", "x"), ("author", "t"), (CITES, "w"), (WRITES, "et")}
        ids = torch.tensor([3, 80, 3])
        papers, cites = mine.original_ids(ids, "paper"), mine.original_edge_ids(ids, CITES)
        assert torch.equal(features.get_tensor("paper", "x", ids), graph.node_data["paper"]["x"][papers])
        assert torch.equal(features["paper", "x", ids], features["paper"].x[ids])
        assert torch.equal(features.get_tensor(CITES, "w", ids), graph.edge_data[CITES]["w"][cites])
        before = messages(mine)
        everything = [tg.data.TensorAttr(t, name, torch.arange(40)) for t, name in sorted(listed, key=str)]
        rows = features.multi_get_tensor(everything)
        assert [now - then for now, then in zip(messages(mine), before, strict=True)] == [1]
        for attr, values in zip(everything, rows, strict=True):
            assert torch.equal(values, features.get_tensor(attr))
        whole = features.get_tensor("paper", "x", None)
        assert torch.equal(whole, graph.node_data["paper"]["x"][mine.original_ids(torch.arange(90), "paper")])
        assert torch.equal(features.get_tensor("paper", "x", slice(2, 5)), whole[2:5])
        assert torch.equal(features.get_tensor("paper", "x", 7), whole[7:8])
        assert torch.equal(features.get_tensor("paper", "x", torch.arange(90) == 4), whole[4:5])
        assert features.get_tensor_size("paper", "x") == (90, 3) and features.get_tensor_size("paper", "no") is None
        with pytest.raises(KeyError, match="there is no 'no' of 'paper'"):
            features.get_tensor("paper", "no", ids)
    features, _ = stores(plain[1][0])
    assert {a.attr_name for a in features.get_all_tensor_attrs()} == {"x", "t", "train_mask"}
    assert torch.equal(features.get_tensor(None, "w", SEEDS), features.get_tensor(EDGE, "w", SEEDS))


def test_only_tables_that_train_are_written(plain) -> None:
    _, (mine, other, _) = plain
    features, _ = stores(mine)
    with pytest.raises(ValueError, match="'x' of None never changes"):
        features.put_tensor(torch.ones(1, 4), None, "x", torch.tensor([0]))
    with pytest.raises(ValueError, match="cannot be removed"):
        features.remove_tensor(None, "x", None)
    mine.set_node_data("memory", mine.store.create("memory", 120, (2,)))
    try:
        ids = torch.tensor([0, 50, 119])
        assert features.put_tensor(torch.ones(3, 2), None, "memory", ids)
        assert torch.equal(features.get_tensor(None, "memory", ids), torch.ones(3, 2))
        assert float(other.store.tensor("memory")[:].sum()) == 6.0
    finally:
        del mine.node_data[NODE]["memory"]
        mine.store.drop("memory")


def test_the_graph_store_gives_all_edges_or_a_parts(hetero, plain) -> None:
    for _, graphs in (hetero, plain):
        mine = graphs[0]
        _, edges = stores(mine)
        for attr in edges.get_all_edge_attrs():
            edge_type = attr.edge_type or EDGE
            expected = torch.stack(mine.edge_ends(torch.arange(mine.num_edges(edge_type)), edge_type))
            with pytest.warns(UserWarning, match="is read into this process"):
                row, col = edges.get_edge_index(attr.edge_type, "coo")
            assert torch.equal(torch.stack([row, col]), expected)
            with pytest.warns(UserWarning, match="is read into this process"):
                row, colptr = edges.get_edge_index(attr)
            assert colptr.numel() == attr.size[1] + 1 and torch.equal(row, expected[0])
            assert torch.equal(torch.repeat_interleave(colptr.diff()), expected[1])
            parted = [edges.get_edge_index(attr.edge_type, "coo", part=p) for p in range(mine.parts.num_parts)]
            assert torch.equal(torch.cat([torch.stack(p) for p in parted], dim=1), expected)
            pointers = [edges.get_edge_index(attr.edge_type, "csc", part=p)[1] for p in range(mine.parts.num_parts)]
            assert torch.equal(torch.cat([p.diff() for p in pointers]), colptr.diff())
        with pytest.raises(KeyError):
            edges.get_edge_index(("no", "such", "type"), "csc")
        with pytest.raises(ValueError, match="by destination"):
            edges.get_edge_index(edges.get_all_edge_attrs()[0].edge_type, "csr")
        with pytest.raises(ValueError, match="never change"):
            edges.put_edge_index((row, col), edge_type=None, layout="coo", size=(1, 1))
    with pytest.raises(ValueError, match="different graphs"):
        NeighborSampler((stores(hetero[1][0])[0], stores(plain[1][0])[1]), [2])
    with pytest.raises(ValueError, match=r"what gnnsys.open returns"):
        stores(homogeneous())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error::UserWarning")
def test_stock_pyg_loaders_read_our_stores(plain, hetero) -> None:
    for (_, (mine, *_)), nodes in ((plain, torch.arange(30)), (hetero, ("paper", torch.arange(30)))):
        pair = stores(mine)
        sampler = NeighborSampler(pair, [4, 3])
        stock = tg.loader.NeighborLoader(
            pair, [4, 3], input_nodes=nodes, batch_size=10, neighbor_sampler=sampler, transform=pair[0].add_edge_data
        )
        torch.manual_seed(1)
        theirs = list(stock)
        for batch in theirs:
            for t in mine.edge_types:
                store = batch if mine.is_homogeneous else batch[t]
                for name, table in mine.edge_data[t].items():
                    assert torch.equal(store[name], table[store.e_id])
            for t in mine.node_types:
                store = batch if mine.is_homogeneous else batch[t]
                for name, table in mine.node_data[t].items():
                    assert torch.equal(store[name], table[store.n_id])
        assert len(theirs) == 3
        ids = mine.from_global(range(30), None if mine.is_homogeneous else "paper")
        ours = list(NeighborLoader(pair, [4, 3], input_nodes=ids, batch_size=10))
        for a, b in zip(ours, theirs, strict=True):
            mine_keys, stock_keys = (set(map(str, batch.to_dict())) for batch in (a, b))
            assert mine_keys == stock_keys and type(a) is type(b)


def test_stock_link_loaders_read_our_stores(hetero) -> None:
    _, (mine, *_) = hetero
    pair = stores(mine)
    sampler = NeighborSampler(mine, {t: [3] for t in mine.edge_types}, exclude_supervision=True)
    links = torch.stack(mine.edge_ends(torch.arange(0, 300, 10), WRITES))
    stock = tg.loader.LinkNeighborLoader(
        pair, [3], edge_label_index=(WRITES, links), batch_size=10, neighbor_sampler=sampler, neg_sampling="binary"
    )
    for batch in stock:
        src, dst = batch[WRITES].edge_label_index[:, :10]
        ends = torch.stack([batch["author"].n_id[src], batch["paper"].n_id[dst]])
        assert torch.equal(ends, links[:, batch[WRITES].input_id])
        banned = set(map(tuple, ends.t().tolist()))
        taken = [batch["author"].n_id[batch[WRITES].edge_index[0]], batch["paper"].n_id[batch[WRITES].edge_index[1]]]
        assert not banned & set(zip(*(end.tolist() for end in taken), strict=True))
    assert REV_WRITES in mine.edge_types


def test_a_sampler_of_the_users_own_is_joined_with_parts(plain) -> None:
    _, (mine, *_) = plain

    class Whole(tg.sampler.BaseSampler):
        def sample_from_nodes(self, index: Any, **kwargs: Any) -> Any:
            edges = torch.arange(3)
            return tg.sampler.SamplerOutput(index.node, edges, edges, edges, metadata=(index.input_id, index.time))

        def sample_from_edges(self, index: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    loader = NeighborLoader(mine, [2], input_nodes=mine.from_global(range(20)), batch_size=5, neighbor_sampler=Whole())
    for batch in loader:
        assert torch.equal(batch.x, mine.node_data[NODE]["x"][batch.n_id])
        assert torch.equal(batch.number, mine.edge_data[EDGE]["number"][torch.arange(3)])


def test_custom_classes_are_built(plain, hetero) -> None:
    class Mine(HeteroData):
        pass

    _, (mine, *_) = hetero
    loader = NeighborLoader(mine, [2], input_nodes="paper", batch_size=50, custom_cls=Mine)
    assert all(type(batch) is Mine for batch in loader)
