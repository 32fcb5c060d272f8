"""gnnsys.pyg on HeteroData and on (FeatureStore, GraphStore), node and link loaders."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

tg = pytest.importorskip("torch_geometric")

from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.testing import MyFeatureStore, MyGraphStore  # noqa: E402

from gnnsys.pyg import LinkNeighborLoader, NeighborLoader, NeighborSampler  # noqa: E402
from gnnsys.pyg.arguments import suggest_exclusion  # noqa: E402

WRITES, WRITTEN, CITES = ("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper")
LINKS = torch.tensor([[0, 1], [5, 6]])
SIZES = {"paper": 120, "author": 50, "venue": 4}


@pytest.fixture
def data() -> HeteroData:
    stream = torch.Generator().manual_seed(0)
    data = HeteroData()
    for node_type, size in SIZES.items():
        data[node_type].x = torch.arange(size).float()[:, None]
    pairs = torch.randperm(50 * 120, generator=stream)[:400]
    data[WRITES].edge_index = torch.stack([pairs // 120, pairs % 120])
    data[WRITTEN].edge_index = data[WRITES].edge_index.flip(0)
    data[CITES].edge_index = torch.randint(120, (2, 500), generator=stream)
    data[CITES].edge_attr = torch.arange(500).float()[:, None]
    data.name = "typed"
    return data


def check(batch: HeteroData, data: HeteroData) -> None:
    assert batch.node_types == data.node_types and batch.edge_types == data.edge_types
    for t in data.node_types:
        assert torch.equal(batch[t].x, data[t].x[batch[t].n_id])
    for t in data.edge_types:
        ends = torch.stack([batch[t[0]].n_id[batch[t].edge_index[0]], batch[t[2]].n_id[batch[t].edge_index[1]]])
        assert torch.equal(ends, data[t].edge_index[:, batch[t].e_id])
        assert bool((batch[t].edge_index[1].diff() >= 0).all())
    assert torch.equal(batch[CITES].edge_attr, data[CITES].edge_attr[batch[CITES].e_id])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hetero_batches_hold_what_pygs_hold(data: HeteroData, num_workers: int) -> None:
    loader = NeighborLoader(data, [3, 2], input_nodes="paper", batch_size=32, shuffle=True, num_workers=num_workers)
    for batch in loader:
        assert type(batch) is HeteroData
        check(batch, data)
        assert batch.name == "typed"
        papers = batch["paper"]
        assert papers.batch_size == papers.input_id.numel() == papers.num_sampled_nodes[0]
        assert torch.equal(papers.n_id[: papers.batch_size], papers.input_id)
        assert batch["venue"].num_nodes == 0 and batch["venue"].num_sampled_nodes == [0, 0, 0]
        assert all(len(batch[t].num_sampled_edges) == 2 for t in data.edge_types)
        assert "batch" not in papers and "seed_time" not in papers


def test_the_hetero_sampler_serves_pygs_own_loader_with_the_same_keys(data: HeteroData) -> None:
    sampler = NeighborSampler(data, {WRITES: [2, 2], WRITTEN: [2, 2], CITES: [2, 2]})
    stock = tg.loader.NeighborLoader(data, [2, 2], input_nodes=("paper", torch.arange(9)), neighbor_sampler=sampler)
    ours = NeighborLoader(data, [2, 2], input_nodes=("paper", torch.arange(9)), neighbor_sampler=sampler)
    for mine, theirs in zip(ours, stock, strict=True):
        check(mine, data)
        check(theirs, data)
        for a, b in zip(mine.stores, theirs.stores, strict=True):
            assert set(a.keys()) == set(b.keys())


def test_bidirectional_drops_edge_ids_between_types(data: HeteroData) -> None:
    batch = next(iter(NeighborLoader(data, [3, 2], input_nodes="paper", batch_size=9, subgraph_type="bidirectional")))
    assert "e_id" not in batch[WRITES] and "e_id" not in batch[WRITTEN]
    assert "edge_attr" not in batch[CITES]
    forward = set(map(tuple, batch[WRITES].edge_index.t().tolist()))
    assert forward == set(map(tuple, batch[WRITTEN].edge_index.flip(0).t().tolist()))
    cites = set(map(tuple, batch[CITES].edge_index.t().tolist()))
    assert cites == {(b, a) for a, b in cites}


def test_induced_hetero_batches_have_every_edge_among_their_nodes(data: HeteroData) -> None:
    batch = next(iter(NeighborLoader(data, [3, 2], input_nodes="author", batch_size=9, subgraph_type="induced")))
    check(batch, data)
    for t in data.edge_types:
        inside = torch.isin(data[t].edge_index[0], batch[t[0]].n_id) & torch.isin(
            data[t].edge_index[1], batch[t[2]].n_id
        )
        assert torch.equal(batch[t].e_id.sort().values, inside.nonzero().view(-1))


def test_temporal_hetero_batches_look_only_back(data: HeteroData) -> None:
    data["paper"].time = torch.arange(120) * 7 % 120
    data["author"].time = torch.zeros(50, dtype=torch.int64)
    for batch in NeighborLoader(data, [4, 4], input_nodes="paper", batch_size=20, time_attr="time"):
        seed_time = batch["paper"].time[: batch["paper"].batch_size]
        for t in ("paper", "author"):
            assert bool((batch[t].time <= seed_time[batch[t].batch]).all())
    data[CITES].time = torch.arange(500)
    with pytest.raises(ValueError, match="both node-level and edge-level"):
        NeighborLoader(data, [4], input_nodes="paper", time_attr="time")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_nodes": None}, "node type"),
        ({"input_nodes": "journal"}, "journal"),
        ({"input_nodes": ("paper", [120])}, "input_nodes"),
        ({"num_neighbors": {WRITES: [2]}}, "Missing number of neighbors"),
        ({"num_neighbors": {("a", "b", "c"): [2]}}, "num_neighbors"),
        ({"num_neighbors": {WRITES: [2], WRITTEN: [2], CITES: [2, 2]}}, "hops must be the same across all"),
    ],
)
def test_bad_hetero_arguments_are_refused_when_the_loader_is_made(
    data: HeteroData, arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborLoader(data, **{"num_neighbors": [2], "input_nodes": "paper", **arguments})


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def homogeneous() -> Data:
    stream = torch.Generator().manual_seed(2)
    pairs = torch.randperm(100 * 100, generator=stream)[:600]
    edge_index = torch.stack([pairs // 100, pairs % 100])
    return Data(x=torch.arange(100).float()[:, None], edge_index=edge_index, edge_attr=torch.arange(600))


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("neg_sampling", [None, "binary", {"mode": "binary", "amount": 1.5}])
def test_link_batches_hold_what_pygs_hold(homogeneous: Data, neg_sampling, disjoint: bool) -> None:  # type: ignore[no-untyped-def]
    data = homogeneous
    loader = LinkNeighborLoader(data, [3, 2], neg_sampling=neg_sampling, batch_size=40, shuffle=True, disjoint=disjoint)
    assert str(loader) == "LinkNeighborLoader()" and len(loader) == 15
    stock = tg.loader.LinkNeighborLoader(
        data,
        [3, 2],
        neg_sampling=neg_sampling,
        batch_size=40,
        neighbor_sampler=NeighborSampler(data, [3, 2], disjoint=disjoint),
    )
    assert set(next(iter(loader)).keys()) == set(next(iter(stock)).keys())
    for batch in loader:
        num = batch.input_id.numel()
        positive = batch.n_id[batch.edge_label_index[:, :num]]
        assert torch.equal(positive, data.edge_index[:, batch.input_id])
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr, batch.e_id)
        assert "batch_size" not in batch
        if neg_sampling is None:
            assert "edge_label" not in batch
        else:
            assert batch.edge_label.dtype == torch.float32
            assert torch.equal(batch.edge_label, (torch.arange(batch.edge_label.numel()) < num).float())
        if disjoint:
            assert torch.equal(batch.batch[batch.edge_label_index[0]], batch.batch[batch.edge_label_index[1]])
            assert int(batch.batch.max()) == num - 1
        else:
            seeds = batch.n_id[: batch.num_sampled_nodes[0]]
            assert torch.equal(seeds, batch.n_id[batch.edge_label_index].unique())


def test_messages_pass_over_a_batchs_own_links_as_in_pyg_and_by_default(homogeneous: Data, data: HeteroData) -> None:
    """With all neighbours a batch has every in-edge of its links' ends, as PyG's batches have."""
    for options in ({}, {"exclude_supervision": False}, {"neighbor_sampler": NeighborSampler(homogeneous, [-1])}):
        for batch in LinkNeighborLoader(homogeneous, [-1], batch_size=50, neg_sampling="binary", **options):
            ends = batch.n_id[batch.edge_label_index].unique()
            into = torch.isin(homogeneous.edge_index[1], ends).nonzero().view(-1)
            assert torch.equal(batch.e_id.sort().values, into)
            assert set(batch.input_id.tolist()) <= set(into.tolist())
    for batch in LinkNeighborLoader(data, [-1], edge_label_index=WRITES, batch_size=50):
        links = set(batch[WRITES].input_id.tolist())
        assert links <= set(batch[WRITES].e_id.tolist()) and links <= set(batch[WRITTEN].e_id.tolist())


def test_leaving_links_out_is_suggested_once_and_only_to_who_did_not_decide(
    homogeneous: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("gnnsys.pyg"), "handlers", [handler])
    suggest_exclusion.cache_clear()
    sampler = NeighborSampler(homogeneous, [2])
    for options in ({"exclude_supervision": True}, {"exclude_supervision": False}, {"neighbor_sampler": sampler}):
        list(LinkNeighborLoader(homogeneous, [2], batch_size=300, **options))
    assert not lines
    for _ in range(2):
        list(LinkNeighborLoader(homogeneous, [2], batch_size=300))
    assert len(lines) == 1 and "exclude_supervision=True leaves them" in lines[0]


@pytest.mark.parametrize(
    ("value", "with_sampler", "message"),
    [
        ("self", False, "must be True or False, got 'self': gnnsys.LinkNeighborLoader takes"),
        (1.5, False, "must be True or False"),
        (True, True, r"write NeighborSampler\(data, num_neighbors, exclude_supervision=True\)"),
        (False, True, "an option of the sampler, and you gave one"),
    ],
)
def test_excluding_is_not_accepted_where_it_would_be_ignored(
    homogeneous: Data, value: object, with_sampler: bool, message: str
) -> None:
    sampler = NeighborSampler(homogeneous, [2]) if with_sampler else None
    with pytest.raises(ValueError, match=message):
        LinkNeighborLoader(homogeneous, [2], exclude_supervision=value, neighbor_sampler=sampler)


def test_supervision_does_not_leak_where_it_is_excluded(homogeneous: Data) -> None:
    for batch in LinkNeighborLoader(homogeneous, [-1, -1], batch_size=50, exclude_supervision=True):
        links = homogeneous.edge_index[:, batch.input_id]
        banned = set(map(tuple, torch.cat([links, links.flip(0)], dim=1).t().tolist()))
        assert not banned & set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))


def test_hetero_supervision_does_not_leak_through_the_reverse_type(data: HeteroData) -> None:
    options = {"edge_label_index": WRITES, "neg_sampling": "binary", "exclude_supervision": True}
    for batch in LinkNeighborLoader(data, [-1, -1], batch_size=50, **options):
        check(batch, data)
        links = set(batch[WRITES].input_id.tolist())
        assert not links & set(batch[WRITES].e_id.tolist())
        assert not links & set(batch[WRITTEN].e_id.tolist())  # the i-th edge is the reverse of the i-th


@pytest.mark.parametrize("amount", [1, 3])
def test_hetero_triplets_are_pygs(data: HeteroData, amount: int) -> None:
    links = (WRITES, data[WRITES].edge_index[:, :90])
    negatives = tg.sampler.NegativeSampling("triplet", amount)
    for batch in LinkNeighborLoader(data, [2], edge_label_index=links, neg_sampling=negatives, batch_size=30):
        src, dst = links[1][:, batch[WRITES].input_id]
        assert torch.equal(batch["author"].n_id[batch["author"].src_index], src)
        assert torch.equal(batch["paper"].n_id[batch["paper"].dst_pos_index], dst)
        assert batch["paper"].dst_neg_index.shape == ((30,) if amount == 1 else (30, amount))
        assert "edge_label_index" not in batch[WRITES]


def test_link_labels_weights_and_times_follow_pyg(homogeneous: Data) -> None:
    data = homogeneous
    labels = torch.arange(600) % 4
    batch = next(iter(LinkNeighborLoader(data, [2], edge_label=labels, neg_sampling="binary", batch_size=10)))
    assert torch.equal(batch.edge_label, torch.cat([labels[:10] + 1, torch.zeros(10, dtype=torch.int64)]))
    only = torch.zeros(100)
    only[42] = 1.0
    negatives = {"mode": "triplet", "dst_weight": only}
    batch = next(iter(LinkNeighborLoader(data, [2], neg_sampling=negatives, batch_size=10)))
    assert set(batch.n_id[batch.dst_neg_index].tolist()) == {42}
    data.time = torch.arange(100)
    when = torch.randint(50, 100, (600,))
    options = {"time_attr": "time", "edge_label_time": when, "batch_size": 20}
    batch = next(iter(LinkNeighborLoader(data, [2, 2], neg_sampling="binary", **options)))
    assert torch.equal(batch.edge_label_time, when[:20].repeat(2))
    hop = batch.num_sampled_nodes[0]
    assert bool((batch.time[hop:] <= when[batch.batch[hop:]]).all())
    batch = next(iter(LinkNeighborLoader(data, [2, 2], neg_sampling="triplet", **options)))
    assert torch.equal(batch.seed_time, when[:20])


def test_links_and_negatives_follow_torchs_seed_and_resume(homogeneous: Data) -> None:
    loader = LinkNeighborLoader(homogeneous, [3, 2], neg_sampling="binary", batch_size=50, shuffle=True)
    torch.manual_seed(1)
    first = [b.n_id[b.edge_label_index] for b in loader]
    torch.manual_seed(1)
    iterator = iter(loader)
    head = [next(iterator) for _ in range(4)]
    state = loader.state_dict()
    other = LinkNeighborLoader(homogeneous, [3, 2], neg_sampling="binary", batch_size=50, shuffle=True, num_workers=2)
    other.load_state_dict(state)
    rest = [b.n_id[b.edge_label_index] for b in [*head, *other]]
    assert len(rest) == len(first) and all(torch.equal(a, b) for a, b in zip(first, rest, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edge_label_time": torch.zeros(600)}, "time_attr"),
        ({"edge_label_index": torch.tensor([[0], [100]])}, "edge_label_index"),
        ({"edge_label_index": torch.empty(2, 0, dtype=torch.int64)}, "edge_label_index is empty"),
        ({"edge_label": torch.zeros(3)}, "edge_label"),
        ({"neg_sampling": "triplet", "edge_label": torch.zeros(600)}, "edge_label"),
        ({"neg_sampling": "ternary"}, "ternary"),
    ],
)
def test_bad_link_arguments_are_refused_when_the_loader_is_made(
    homogeneous: Data, arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LinkNeighborLoader(homogeneous, [2], **arguments)


# -- remote stores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
def test_remote_homogeneous_batches_index_edge_features_by_edge(layout: str) -> None:
    edge_index = torch.randint(60, (2, 300), generator=torch.Generator().manual_seed(0))
    features, edges = MyFeatureStore(), MyGraphStore()
    order = torch.arange(300)
    if layout != "coo":
        order = edge_index[1 if layout == "csc" else 0].sort(stable=True).indices
    row, col = edge_index[:, order]
    stored = [row, col]
    if layout != "coo":
        at = 1 if layout == "csc" else 0
        stored[at] = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(stored[at], minlength=60).cumsum(0)])
    edges.put_edge_index(tuple(stored), edge_type=None, layout=layout, size=(60, 60))
    features.put_tensor(torch.arange(60).float()[:, None], group_name=None, attr_name="x", index=None)
    features.put_tensor(torch.arange(300).float()[:, None], group_name=None, attr_name="edge_attr", index=None)
    for batch in NeighborLoader((features, edges), [3, 2], input_nodes=None, batch_size=16):
        assert torch.equal(batch.x[:, 0], batch.n_id.float())
        assert batch.edge_attr.shape[0] == batch.num_edges and torch.equal(batch.edge_attr[:, 0], batch.e_id.float())
        assert torch.equal(batch.n_id[batch.edge_index], torch.stack([row, col])[:, batch.e_id])
        assert batch.num_nodes == batch.n_id.numel()
    links = torch.stack([row, col])[:, :20]
    for batch in LinkNeighborLoader((features, edges), [3], edge_label_index=links, batch_size=5):
        assert torch.equal(batch.n_id[batch.edge_label_index], links[:, batch.input_id])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_hetero_batches_equal_local_ones(data: HeteroData, num_workers: int) -> None:
    features, edges = MyFeatureStore(), MyGraphStore()
    for t in SIZES:
        features.put_tensor(data[t].x, group_name=t, attr_name="x", index=None)
    features.put_tensor(data[CITES].edge_attr, group_name=CITES, attr_name="edge_attr", index=None)
    for t in data.edge_types:
        edges.put_edge_index(data[t].edge_index, edge_type=t, layout="coo", size=(SIZES[t[0]], SIZES[t[2]]))
    options = {"batch_size": 20, "seed": 3}
    remote = NeighborLoader((features, edges), [3, 2], input_nodes=("paper", None), num_workers=num_workers, **options)
    local = NeighborLoader(data, [3, 2], input_nodes="paper", **options)
    for far, near in zip(remote, local, strict=True):
        for t in SIZES:
            assert torch.equal(far[t].x, near[t].x) and torch.equal(far[t].n_id, near[t].n_id)
        for t in data.edge_types:
            assert torch.equal(far[t].edge_index, near[t].edge_index) and torch.equal(far[t].e_id, near[t].e_id)
        assert torch.equal(far[CITES].edge_attr, near[CITES].edge_attr)
        assert far["paper"].batch_size == near["paper"].batch_size


def test_custom_classes_are_built_for_remote_batches(data: HeteroData) -> None:
    class Mine(HeteroData):
        pass

    features, edges = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data["paper"].x, group_name="paper", attr_name="x", index=None)
    edges.put_edge_index(data[CITES].edge_index, edge_type=CITES, layout="coo", size=(120, 120))
    loader = NeighborLoader((features, edges), [3], input_nodes="paper", batch_size=60, custom_cls=Mine)
    assert all(type(batch) is Mine for batch in loader)
    with pytest.raises(NotImplementedError, match="weight_attr"):
        NeighborLoader((features, edges), [3], input_nodes="paper", weight_attr="w")


def test_remote_times_are_respected(data: HeteroData) -> None:
    features, edges = MyFeatureStore(), MyGraphStore()
    time = torch.arange(120) * 7 % 120
    features.put_tensor(data["paper"].x, group_name="paper", attr_name="x", index=None)
    features.put_tensor(time, group_name="paper", attr_name="time", index=None)
    edges.put_edge_index(data[CITES].edge_index, edge_type=CITES, layout="coo", size=(120, 120))
    loader = NeighborLoader((features, edges), [3, 3], input_nodes="paper", batch_size=40, time_attr="time")
    for batch in loader:
        papers = batch["paper"]
        assert bool((papers.time <= papers.time[papers.batch]).all())
        assert isinstance(papers.time, Tensor)


def test_an_edge_type_that_does_not_exist_is_refused_with_those_that_do(data: HeteroData) -> None:
    wrong = ("author", "writs", "paper")
    for given in (wrong, (wrong, None), (("autor", "writes", "paper"), LINKS)):
        with pytest.raises(ValueError, match=r"edge_label_index: there is no edge type .* only \[\('author', 'writes'"):
            LinkNeighborLoader(data, [2], edge_label_index=given)
    assert data.edge_types == [WRITES, WRITTEN, CITES] and data.node_types == list(SIZES)


@pytest.mark.parametrize("given", [("author", "paper"), (("author", "paper"), None), (WRITES, None)])
def test_an_edge_type_may_be_named_as_in_pyg(data: HeteroData, given: tuple[object, ...]) -> None:
    batch = next(iter(LinkNeighborLoader(data, [2], edge_label_index=given, batch_size=3)))
    assert batch[WRITES].input_id.tolist() == [0, 1, 2]


def test_links_may_be_of_a_type_that_has_no_edges(data: HeteroData) -> None:
    likes = ("author", "likes", "paper")
    loader = LinkNeighborLoader(data, [2], edge_label_index=(likes, LINKS), neg_sampling="binary", batch_size=2)
    batch = next(iter(loader))
    src, dst = batch[likes].edge_label_index[:, :2]
    assert batch["author"].n_id[src].tolist() == [0, 1] and batch["paper"].n_id[dst].tolist() == [5, 6]
    assert batch[likes].edge_label.tolist() == [1, 1, 0, 0]


def test_a_type_that_was_only_looked_at_is_an_empty_one(data: HeteroData) -> None:
    expected = next(iter(NeighborLoader(data, [-1], input_nodes="paper", batch_size=4)))
    assert len(data["papre"]) == 0 and "papre" in data.node_types
    batch = next(iter(NeighborLoader(data, [-1], input_nodes="paper", batch_size=4)))
    assert batch["papre"].n_id.numel() == 0
    assert torch.equal(batch["paper"].n_id, expected["paper"].n_id)


def test_edges_of_nodes_that_are_not_there_are_refused(data: HeteroData) -> None:
    data["paper", "about", "topic"].edge_index = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"has edges of nodes 'topic', .* set data\['topic'\]\.num_nodes"):
        NeighborLoader(data, [2], input_nodes="paper")
