"""gnnsys.pyg on graphs in parts, over real connections: the batches of the whole graph in memory, id for id."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

tg = pytest.importorskip("torch_geometric")

from torch_geometric.data import Data  # noqa: E402

from gnnsys.graph import EDGE, NODE, Graph  # noqa: E402
from gnnsys.partition import Placement, write_parts  # noqa: E402
from gnnsys.pyg import LinkNeighborLoader, NeighborLoader  # noqa: E402
from gnnsys.sampling import DistGraph  # noqa: E402
from gnnsys.seeds import IdRange, Seeds, split  # noqa: E402
from tests.loader.sources import Source  # noqa: E402
from tests.sampling.machines import CITES, WRITES, assign, homogeneous, machines  # noqa: E402
from tests.support.processes import run_ranks  # noqa: E402
from tests.support.pyg_parts import SEEDS, hetero_parts, messages, plain_parts  # noqa: E402

PAPERS = torch.randperm(90, generator=torch.Generator().manual_seed(6))[:40]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with plain_parts(tmp_path_factory.mktemp("pyg") / "parts") as both:
        yield both


@pytest.fixture(scope="module")
def hetero(tmp_path_factory):
    with hetero_parts(tmp_path_factory.mktemp("pyg") / "parts") as both:
        yield both


def assert_same(mine: Any, whole: Any, graph: DistGraph) -> None:
    """`mine` was loaded from parts; in original ids it is `whole`, key by key."""
    assert type(mine) is type(whole)
    if isinstance(whole, Data):
        keys: list[Any] = [None]
    else:
        assert mine.node_types == whole.node_types and mine.edge_types == whole.edge_types
        keys = [*whole.node_types, *whole.edge_types]
    for key in keys:
        a, b = (mine, whole) if key is None else (mine[key], whole[key])
        assert set(a.keys()) - {"num_nodes"} == set(b.keys()) - {"num_nodes"}, key
        assert isinstance(key, tuple) or a.num_nodes == b.num_nodes
        for name in set(b.keys()) - {"num_nodes"}:
            value = a[name]
            if name == "n_id":
                value = graph.original_ids(value, key or NODE)
            elif name == "e_id":
                value = graph.original_edge_ids(value, key or EDGE)
            same = torch.equal(value, b[name]) if isinstance(b[name], Tensor) else value == b[name]
            assert same and (not isinstance(value, Tensor) or value.dtype == b[name].dtype), (key, name)


def assert_same_epochs(mine: Any, whole: Any, graph: DistGraph) -> None:
    assert len(mine) == len(whole) > 1
    count = 0
    for _ in range(2):
        for a, b in zip(mine, whole, strict=True):
            assert_same(a, b, graph)
            count += 1
    assert count == 2 * len(whole)


# -- nodes -----------------------------------------------------------------------------------------------------------

KINDS = {
    "uniform": {},
    "with replacement": {"replace": True},
    "weighted": {"weight_attr": "w"},
    "disjoint": {"disjoint": True},
    "node times": {"time_attr": "t"},
    "last by given times": {"time_attr": "t", "input_time": torch.arange(50) % 29, "temporal_strategy": "last"},
    "edge times": {"time_attr": "et", "input_time": torch.arange(50) % 29},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_whole_graph(plain, kind: str) -> None:
    data, graphs = plain
    options: Any = {"batch_size": 16, "seed": 7, **KINDS[kind]}
    mine = graphs[list(KINDS).index(kind) % 3]
    loader = NeighborLoader(mine, [4, 3], input_nodes=mine.from_original(SEEDS), **options)
    assert_same_epochs(loader, NeighborLoader(data, [4, 3], input_nodes=SEEDS, **options), mine)


HETERO_KINDS = ["uniform", "with replacement", "node times", "disjoint", "induced"]


@pytest.mark.parametrize("kind", HETERO_KINDS)
def test_hetero_batches_are_those_of_the_whole_graph(hetero, kind: str) -> None:
    data, graphs = hetero
    options: Any = {"batch_size": 16, "seed": 7, **KINDS[kind]}
    for mine in graphs if kind == "uniform" else [graphs[HETERO_KINDS.index(kind) % len(graphs)]]:
        loader = NeighborLoader(mine, [4, 3], input_nodes=mine.from_original(PAPERS, "paper"), **options)
        assert_same_epochs(loader, NeighborLoader(data, [4, 3], input_nodes=("paper", PAPERS), **options), mine)


def test_workers_shuffling_and_state_are_as_in_memory(plain) -> None:
    data, graphs = plain
    mine = graphs[1]
    options: Any = {"batch_size": 10, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    ours = NeighborLoader(mine, [4, 3], input_nodes=mine.from_original(SEEDS), **options)
    whole = NeighborLoader(data, [4, 3], input_nodes=SEEDS, **options)
    torch.manual_seed(3)
    expected = list(whole)
    torch.manual_seed(3)
    iterator = iter(ours)
    head = [next(iterator) for _ in range(2)]
    again = NeighborLoader(mine, [4, 3], input_nodes=mine.from_original(SEEDS), batch_size=10, shuffle=True)
    again.load_state_dict(ours.state_dict())
    batches = [*head, *again]
    assert len(batches) == len(expected) == 5
    for a, b in zip(batches, expected, strict=True):
        assert_same(a, b, mine)


def test_masks_are_named_and_types_too(plain, hetero) -> None:
    _, (mine, *_) = plain
    ids = torch.cat([b.n_id[: b.batch_size] for b in NeighborLoader(mine, [2], input_nodes="train", batch_size=9)])
    assert torch.equal(mine.original_ids(ids).sort().values, torch.arange(0, 120, 3))
    batch = next(iter(NeighborLoader(mine, [2], input_nodes="train_mask", batch_size=9)))
    assert torch.equal(batch.input_id, batch.n_id[:9])  # of a mask, node ids: PyG's rule
    _, (mine, *_) = hetero
    for given in (("paper", "train"), ["paper", mine.from_global(mine.node_data["paper"]["train_mask"][:], "paper")]):
        loader = NeighborLoader(mine, [2], input_nodes=given, batch_size=100)
        (batch,) = loader
        seeds = mine.original_ids(batch["paper"].n_id[: batch["paper"].batch_size], "paper")
        assert torch.equal(seeds.sort().values, torch.arange(0, 90, 3))
    (batch,) = NeighborLoader(mine, [2], input_nodes="author", batch_size=40)
    assert batch["author"].batch_size == 40 and batch["venue"].num_nodes == 0


def test_shares_have_equal_steps_and_cover_everything_once(plain) -> None:
    _, graphs = plain
    ranks = [Placement(rank, (0, 1, 2, 2), (0, 1, 2)) for rank in range(4)]
    for shuffle in (False, True):
        seen, sizes = [], []
        for placement in ranks:
            mine = graphs[placement.machine]
            seeds = split(mine, mine.from_global(SEEDS), placement=placement)
            loader = NeighborLoader(mine, [3], input_nodes=seeds, batch_size=4, shuffle=shuffle)
            assert len(loader) == -(-seeds.largest // 4)
            batches = list(loader)
            assert len(batches) == len(loader)
            sizes += [b.batch_size for b in batches]
            seen += [b.n_id[: b.batch_size] for b in batches]
            order = torch.cat([b.input_id for b in batches])
            assert torch.equal(order.sort().values, torch.arange(len(seeds)))
            assert torch.equal(order, torch.arange(len(seeds))) is not shuffle
        assert torch.equal(torch.cat(seen).sort().values, SEEDS.sort().values) and max(sizes) - min(sizes) <= 1


def test_a_rank_without_seeds_has_as_many_batches_all_empty(hetero) -> None:
    _, (mine, *_) = hetero
    nobody = Seeds(torch.empty(0, dtype=torch.int64), "paper", 5, 10, numbering=mine.numbering)
    batches = list(NeighborLoader(mine, [3, 2], input_nodes=nobody, batch_size=2, shuffle=True))
    assert len(batches) == 3
    for batch in batches:
        assert batch["paper"].batch_size == 0 and all(batch[t].num_nodes == 0 for t in batch.node_types)
        assert batch["paper"].x.shape == (0, 3) and batch[CITES].edge_index.shape == (2, 0)
    for neg_sampling in (None, "binary", "triplet"):
        no_links = Seeds(IdRange(5, 5), CITES, 3, 9, numbering=mine.numbering)
        loader = LinkNeighborLoader(
            mine, [2], edge_label_index=no_links, neg_sampling=neg_sampling, batch_size=2, shuffle=True
        )
        assert [batch[CITES].input_id.numel() for batch in loader] == [0, 0]
    ranged = Seeds(IdRange(10, 15), "paper", 6, 11, numbering=mine.numbering)
    assert [b["paper"].batch_size for b in NeighborLoader(mine, [1], input_nodes=ranged, batch_size=2)] == [1, 2, 2]
    for option in ({"sampler": range(5)}, {"batch_sampler": [[0]]}):
        with pytest.raises(ValueError, match="does not go with a rank's share"):
            NeighborLoader(mine, [1], input_nodes=ranged, **option)


def test_shares_of_graphs_in_memory_have_equal_steps_too(plain, hetero) -> None:
    for data, share in ((plain[0], Seeds(IdRange(2, 9), NODE, 8, 15)), (hetero[0], Seeds(PAPERS[:7], "paper", 8, 15))):
        nodes = [b if isinstance(b, Data) else b["paper"] for b in NeighborLoader(data, [2], share, batch_size=2)]
        assert [b.batch_size for b in nodes] == [1, 2, 2, 2]
        assert torch.equal(torch.cat([b.n_id[: b.batch_size] for b in nodes]), share.ids[:])
    for data, share in ((plain[0], Seeds(IdRange(2, 9), EDGE, 8, 15)), (hetero[0], Seeds(PAPERS[:7], CITES, 8, 15))):
        links = [b if isinstance(b, Data) else b[CITES] for b in LinkNeighborLoader(data, [2], share, batch_size=2)]
        assert [b.edge_label_index.shape[1] for b in links] == [1, 2, 2, 2]


def test_all_nodes_are_refused_among_several_ranks(plain, hetero, monkeypatch) -> None:
    for (_, (mine, *_)), names in ((plain, [None]), (hetero, ["paper", ("paper", None)])):
        sizes = [mine.num_nodes(None if mine.is_homogeneous else "paper")]
        for given in names:
            loader = NeighborLoader(mine, [2], input_nodes=given, batch_size=1000)
            assert len(loader.input_data.node) == sizes[0]
        monkeypatch.setattr(mine, "placement", Placement(0, (0, 0), (0,) * mine.parts.num_parts))
        for given in names:
            with pytest.raises(ValueError, match=r"2 ranks.*write gnnsys.split\(graph, None"):
                NeighborLoader(mine, [2], input_nodes=given)
        with pytest.raises(ValueError, match=r'2 ranks.*write gnnsys.split\(graph, "train"'):
            NeighborLoader(mine, [2], input_nodes="train" if mine.is_homogeneous else ("paper", "train_mask"))
        with pytest.raises(ValueError, match=r"write gnnsys.split\(graph, None, type="):
            LinkNeighborLoader(mine, [2], edge_label_index=None if mine.is_homogeneous else CITES)


def test_sources_and_tables_of_ones_own_are_joined_and_what_trains_is_not(plain) -> None:
    _, (mine, *_) = plain
    table = mine.store.create("scores", 120, (2,), init=1.0)
    own = Source(torch.arange(120.0)[:, None], mutable=False)
    mine.set_node_data("own", own)
    mine.set_node_data("ram", torch.arange(120), order="global")
    mine.set_node_data("scores", table)
    try:
        for batch in NeighborLoader(mine, [3, 3], input_nodes=mine.from_global(range(60)), batch_size=20):
            assert torch.equal(batch.own[:, 0], batch.n_id.float()) and torch.equal(batch.ram, batch.n_id)
            assert "scores" not in batch
    finally:
        for name in ("own", "ram", "scores"):
            del mine.node_data[NODE][name]
        mine.store.drop("scores")


def test_one_batch_is_one_pull_per_machine(plain) -> None:
    _, (mine, *_) = plain
    loader = NeighborLoader(mine, [-1], input_nodes=mine.from_global(range(120)), batch_size=120, num_workers=0)
    out = loader.sample(torch.arange(120))
    before = messages(mine)
    batch = loader.join_step(out)
    assert [now - then for now, then in zip(messages(mine), before, strict=True)] == [1, 1]
    assert batch.x.shape == (120, 4) and batch.w.shape == (900,) and batch.number.shape == (900,)


def test_batches_have_the_arrays_that_are_named_and_floats_travel_as_told(plain, hetero) -> None:
    _, (mine, *_) = plain
    options: Any = {"input_nodes": mine.from_global(range(60)), "batch_size": 20, "seed": 1}
    exact = list(NeighborLoader(mine, [3], **options))
    for batch, whole in zip(
        NeighborLoader(mine, [3], fetch=["x"], wire_dtype=torch.bfloat16, **options), exact, strict=True
    ):
        assert "x" in batch and "t" not in batch and "w" not in batch and "number" not in batch
        own = mine.book.part_range(0, NODE)
        here = (batch.n_id >= own.start) & (batch.n_id < own.stop)
        assert torch.equal(batch.n_id, whole.n_id) and torch.equal(batch.x[here], whole.x[here])
        assert torch.equal(batch.x[~here], whole.x[~here].bfloat16().float()) and not torch.equal(batch.x, whole.x)
    _, (mine, *_) = hetero
    links = torch.stack(mine.edge_ends(torch.arange(30), CITES))
    loader = LinkNeighborLoader(
        mine, [2], edge_label_index=mine.from_global(links, CITES), batch_size=10, fetch={"paper": ["t"]}
    )
    for batch in loader:
        assert "t" in batch["paper"] and "x" not in batch["paper"] and "t" not in batch["author"]
    with pytest.raises(ValueError, match="no node or edge type has an array 'z'"):
        NeighborLoader(plain[1][0], [2], input_nodes=plain[1][0].from_global([0, 1, 2]), fetch=["z"])
    for option in ({"fetch": ["x"]}, {"wire_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match="fetch and wire_dtype are for what"):
            NeighborLoader(plain[0], [2], **option)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_nodes": [120]}, r"must be in \[0, 120\)"),
        ({"input_nodes": "nothing"}, "no mask 'nothing'"),
        ({"input_nodes": [True] * 7}, "120 entries"),
        ({"weight_attr": "nothing"}, "no attribute 'nothing'"),
        ({"time_attr": "nothing"}, "neither a node-level or edge-level"),
        ({"time_attr": "x"}, "must hold integers"),
        ({"time_attr": "et"}, "input_time must be given"),
        ({"num_neighbors": {CITES: [2]}}, "num_neighbors"),
    ],
)
def test_bad_arguments_are_refused(plain, arguments: dict, message: str) -> None:
    _, (mine, *_) = plain
    with pytest.raises(ValueError, match=message):
        if isinstance(given := arguments.get("input_nodes", [0, 1, 2]), list):
            given = mine.from_original(given)
        list(NeighborLoader(mine, **{"num_neighbors": [2], **arguments, "input_nodes": given}))


def test_names_that_nodes_and_edges_share_are_refused(tmp_path) -> None:
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2, {"x": torch.ones(2)}, {"x": torch.ones(2)})
    with machines(graph, tmp_path / "p", 1) as (mine,), pytest.raises(ValueError, match=r"both have \['x'\]"):
        NeighborLoader(mine, [1])


RANK = """
import json, sys, torch, gnnsys
from gnnsys.pyg import LinkNeighborLoader, NeighborLoader, stores
with gnnsys.init(timeout=120):
    graph = gnnsys.open(sys.argv[1])
    nodes, links, right = [], [], True
    loader = NeighborLoader(graph, [4, 3], input_nodes=gnnsys.split(graph, "train"), batch_size=4, shuffle=True)
    for batch in loader:
        nodes += graph.original_ids(batch.n_id[: batch.batch_size]).tolist()
        right &= torch.equal(batch.number, graph.original_edge_ids(batch.e_id))
        right &= torch.equal(batch.x, stores(graph)[0].get_tensor(None, "x", batch.n_id))
    share = gnnsys.split(graph, None, type=("node", "to", "node"))
    for batch in LinkNeighborLoader(graph, [2], edge_label_index=share, neg_sampling="binary", batch_size=100):
        links += graph.original_edge_ids(share.ids[batch.input_id]).tolist()
    refused = ""
    try:
        NeighborLoader(graph, [2])
    except ValueError as error:
        refused = str(error)
    print(json.dumps([nodes, links, len(loader), right, refused]))
"""


def test_ranks_on_two_machines_cover_an_epoch_between_them(tmp_path) -> None:
    graph = homogeneous()
    graph.set_node_data("train_mask", torch.arange(120) % 3 == 0)
    write_parts(graph, assign(graph, 3), tmp_path / "parts")
    told = [json.loads(rank.stdout) for rank in run_ranks(RANK, [1, 1], tmp_path / "parts")]
    assert sorted(told[0][0] + told[1][0]) == list(range(0, 120, 3)) and all(t[0] for t in told)
    assert sorted(told[0][1] + told[1][1]) == list(range(900)) and all(t[1] for t in told)
    assert [t[2:4] for t in told] == [[5, True]] * 2
    assert all("write gnnsys.split(graph, None" in t[4] for t in told)


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"neg_sampling": "binary", "exclude_supervision": False},
        {"neg_sampling": {"mode": "triplet", "amount": 2}, "disjoint": True},
        {"neg_sampling": "binary", "edge_label": torch.arange(60) % 3, "weight_attr": "w"},
        {"neg_sampling": "binary", "time_attr": "t", "edge_label_time": torch.arange(60) % 29},
    ],
    ids=["positive", "binary", "triplet", "labels", "times"],
)
def test_link_batches_are_those_of_the_whole_graph(plain, options: dict) -> None:
    data, graphs = plain
    links = data.edge_index[:, ::15]
    options = {"batch_size": 25, "seed": 2, "exclude_supervision": True, **options}
    mine = graphs[1]
    whole = LinkNeighborLoader(data, [4, 3], edge_label_index=links, **options)
    ours = LinkNeighborLoader(mine, [4, 3], edge_label_index=mine.from_original(links), **options)
    assert_same_epochs(ours, whole, mine)


@pytest.mark.parametrize("neg_sampling", [None, "binary", "triplet"])
def test_hetero_links_are_those_of_the_whole_graph(hetero, neg_sampling) -> None:
    data, (_, mine) = hetero
    links = data[WRITES].edge_index[:, ::5]
    options: Any = {"batch_size": 25, "seed": 2, "neg_sampling": neg_sampling, "exclude_supervision": True}
    whole = LinkNeighborLoader(data, [4, 3], edge_label_index=(WRITES, links), **options)
    ours = LinkNeighborLoader(mine, [4, 3], edge_label_index=mine.from_original(links, WRITES), **options)
    assert_same_epochs(ours, whole, mine)


def test_links_that_are_edges_are_looked_up_and_labels_follow_them(hetero, plain) -> None:
    _, (mine, *_) = hetero
    share = Seeds(mine.from_global(range(500), CITES), CITES, 500, 500)
    for given, labels in ((CITES, None), ((CITES, None), None), (share, torch.arange(500))):
        loader = LinkNeighborLoader(mine, [2], edge_label_index=given, edge_label=labels, batch_size=100)
        seen = []
        for batch in loader:
            src, dst = batch["paper"].n_id[batch[CITES].edge_label_index]
            ends = mine.edge_ends(batch[CITES].input_id, CITES)
            assert torch.equal(src, ends[0]) and torch.equal(dst, ends[1])
            assert labels is None or torch.equal(batch[CITES].edge_label, batch[CITES].input_id)
            seen.append(batch[CITES].input_id)
        assert torch.equal(torch.cat(seen), torch.arange(500))
    _, graphs = plain
    total = 0
    for rank in range(3):
        seeds = split(graphs[rank], None, type=EDGE, placement=Placement(rank, (0, 1, 2), (0, 1, 2)))
        loader = LinkNeighborLoader(graphs[rank], [2], edge_label_index=seeds, neg_sampling="binary", batch_size=64)
        batches = list(loader)
        assert len(batches) == -(-seeds.largest // 64)
        for batch in batches:
            positive = batch.n_id[batch.edge_label_index[:, : batch.input_id.numel()]]
            assert torch.equal(positive, torch.stack(graphs[rank].edge_ends(seeds.ids[batch.input_id])))
        total += sum(batch.input_id.numel() for batch in batches)
    assert total == 900


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edge_label_index": torch.tensor([[0], [1]])}, "must name an edge type"),
        ({"edge_label_index": None}, "must name an edge type"),
        ({"edge_label_index": ("paper", "likes", "paper")}, "does not exist"),
        ({"edge_label_index": (CITES, torch.tensor([[0], [90]]))}, r"graph.from_original\(ids\)"),
        ({"edge_label_index": CITES, "edge_label": torch.zeros(500)}, "inputs that are not listed come in the order"),
        ({"edge_label_index": ("paper", "at", "venue")}, "edge_label_index is empty"),
        (
            {"edge_label_index": SimpleNamespace(ids=torch.arange(3), type="paper", largest=3)},
            "links must be of one of",
        ),
    ],
)
def test_bad_link_arguments_are_refused(hetero, arguments: dict, message: str) -> None:
    _, (mine, *_) = hetero
    with pytest.raises(ValueError, match=message):
        LinkNeighborLoader(mine, [2], **arguments)
    share = Seeds(mine.from_global(range(500), CITES), CITES, 500, 500)
    with pytest.raises(ValueError, match="one entry per link, 500"):
        LinkNeighborLoader(mine, [2], edge_label_index=share, edge_label=torch.zeros(3))
