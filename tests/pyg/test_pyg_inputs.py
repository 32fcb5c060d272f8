"""Ids, masks and links in the faces for PyG and DGL: the same meaning whatever holds them, floats refused."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gnnsys.pyg
from tests.loader.test_inputs import HOLDERS, LINK_HOLDERS, mask_of

NUM_NODES = 40
EDGES = torch.randint(0, NUM_NODES, (2, 300), generator=torch.Generator().manual_seed(0))


def plain() -> Data:
    return Data(x=torch.arange(NUM_NODES).float()[:, None], edge_index=EDGES)


def typed() -> HeteroData:
    data = HeteroData()
    data["a"].x = torch.arange(NUM_NODES).float()[:, None]
    data["a", "to", "a"].edge_index = EDGES
    return data


def test_pyg_loaders_take_masks_whatever_holds_them() -> None:
    mask = mask_of(NUM_NODES)
    expected = mask.nonzero().view(-1)
    for name, hold in HOLDERS.items():
        for data, given, store in (
            (plain(), hold(mask), lambda batch: batch),
            (typed(), ("a", hold(mask)), lambda batch: batch["a"]),
        ):
            loader = gnnsys.pyg.NeighborLoader(data, [2], input_nodes=given, batch_size=7)
            stores = [store(batch) for batch in loader]
            assert torch.equal(torch.cat([s.n_id[: s.batch_size] for s in stores]), expected), name
            assert torch.equal(torch.cat([s.input_id for s in stores]), expected), name  # of a mask PyG gives node ids
            few = loader(hold(torch.tensor([3, 1])))
            assert store(few).n_id[:2].tolist() == [expected[3], expected[1]], name
            chosen = store(loader(hold(mask_of(expected.numel()))))
            assert torch.equal(chosen.n_id[: chosen.batch_size], expected[mask_of(expected.numel())]), name


def test_pyg_loaders_take_a_column_of_ids() -> None:
    """`mask.nonzero()` and `numpy.argwhere(mask)` have the shape [n, 1]."""
    mask = mask_of(NUM_NODES)
    column, expected = mask.nonzero(), mask.nonzero().view(-1)
    for given in (column, column.int(), np.argwhere(mask.numpy()), column.tolist()):
        for data, nodes, store in (
            (plain(), given, lambda batch: batch),
            (typed(), ("a", given), lambda batch: batch["a"]),
        ):
            loader = gnnsys.pyg.NeighborLoader(data, [2], input_nodes=nodes, batch_size=7)
            stores = [store(batch) for batch in loader]
            assert torch.equal(torch.cat([s.n_id[: s.batch_size] for s in stores]).long(), expected)
            assert torch.equal(torch.cat([s.input_id for s in stores]), torch.arange(expected.numel()))
        assert torch.equal(gnnsys.pyg.ShaDowKHopSampler(plain(), 2, 3, node_idx=given).node_idx, expected)
    for wrong in (column.t(), mask[:, None]):  # PyG crashes on the one, and reads the other as the wrong nodes
        with pytest.raises(ValueError, match="input_nodes must be one-dimensional"):
            gnnsys.pyg.NeighborLoader(plain(), [2], input_nodes=wrong)


def test_pyg_loaders_refuse_floats_and_masks_of_another_length() -> None:
    loader = gnnsys.pyg.NeighborLoader(plain(), [2], batch_size=5)
    for wrong in ([0.0, 3.0], np.array([1.5]), torch.tensor([2.0]), [True] * 3, np.ones(41, bool), [True, 5]):
        calls: list[Callable[[], Any]] = [
            lambda wrong=wrong: gnnsys.pyg.NeighborLoader(plain(), [2], input_nodes=wrong),
            lambda wrong=wrong: gnnsys.pyg.NeighborLoader(typed(), [2], input_nodes=("a", wrong)),
            lambda wrong=wrong: loader(wrong),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(ValueError):
                call()
                raise AssertionError(f"call {number} took {wrong!r}")


def test_pyg_loaders_refuse_a_mask_given_as_integers_when_they_are_made() -> None:
    mask = mask_of(NUM_NODES)
    for given in (mask.long(), mask.int(), mask.long().numpy(), mask.long().tolist()):
        for data, nodes in ((plain(), given), (typed(), ("a", given))):
            with pytest.raises(ValueError, match=r"input_nodes holds 40 .* all 0 or 1.*write mask.bool\(\)"):
                gnnsys.pyg.NeighborLoader(data, [2], input_nodes=nodes)
    for few in ([0, 1, 0], [1] * (NUM_NODES - 1), [0, 1] * NUM_NODES):
        loader = gnnsys.pyg.NeighborLoader(plain(), [2], input_nodes=few, batch_size=100)
        assert next(iter(loader)).input_id.numel() == len(few)


def test_pyg_links_mean_the_same_whatever_holds_them() -> None:
    links = torch.tensor([[3, 1, 4], [1, 5, 9]])
    for name, hold in LINK_HOLDERS.items():
        batch = next(iter(gnnsys.pyg.LinkNeighborLoader(plain(), [2], edge_label_index=hold(links), batch_size=3)))
        assert torch.equal(batch.n_id[batch.edge_label_index], links), name
        given = (("a", "to", "a"), hold(links))
        batch = next(iter(gnnsys.pyg.LinkNeighborLoader(typed(), [2], edge_label_index=given, batch_size=3)))
        assert torch.equal(batch["a"].n_id[batch["a", "to", "a"].edge_label_index], links), name
    for wrong in (links.double(), links.numpy() * 0.5, [[0.5], [1.0]], links > 2, links[:1]):
        with pytest.raises(ValueError, match="edge_label_index"):
            gnnsys.pyg.LinkNeighborLoader(plain(), [2], edge_label_index=wrong)
        with pytest.raises(ValueError, match="edge_label_index"):
            gnnsys.pyg.LinkNeighborLoader(typed(), [2], edge_label_index=(("a", "to", "a"), wrong))


class Passing(gnnsys.pyg.NeighborSampler):
    """A user's subclass with PyG's own signatures."""

    calls = 0

    def sample_from_nodes(self, inputs: Any) -> Any:
        type(self).calls += 1
        return super().sample_from_nodes(inputs)

    def sample_from_edges(self, inputs: Any, neg_sampling: Any = None) -> Any:
        type(self).calls += 1
        return super().sample_from_edges(inputs, neg_sampling)


def test_a_subclass_of_our_sampler_may_have_pygs_signature() -> None:
    data = plain()
    for workers in (0, 2):
        for kind, options in (
            (gnnsys.pyg.NeighborLoader, {"input_nodes": torch.arange(20)}),
            (gnnsys.pyg.LinkNeighborLoader, {"edge_label_index": EDGES[:, :20], "neg_sampling": "binary"}),
        ):
            made = {"batch_size": 5, "num_workers": workers, "seed": 7, **options}
            Passing.calls = 0
            loader = kind(data, [3, 2], neighbor_sampler=Passing(data, [3, 2]), **made)
            expected = list(kind(data, [3, 2], **made))
            for a, b in zip(loader, expected, strict=True):  # the loader's own key reaches it: the same batches
                assert torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index)
            assert Passing.calls == len(expected)
            batches = iter(loader)
            next(batches)
            resumed = kind(data, [3, 2], neighbor_sampler=Passing(data, [3, 2]), **made)
            resumed.load_state_dict(loader.state_dict())
            assert torch.equal(next(iter(resumed)).n_id, next(batches).n_id)


def test_an_override_runs_where_user_code_runs() -> None:
    threads = []

    class Telling(gnnsys.pyg.NeighborSampler):
        def sample_from_nodes(self, inputs: Any) -> Any:
            threads.append(threading.current_thread())
            return super().sample_from_nodes(inputs)

    next(iter(gnnsys.pyg.NeighborLoader(plain(), [2], neighbor_sampler=Telling(plain(), [2]), batch_size=8)))
    assert set(threads) == {threading.main_thread()}


def test_stores_whose_only_type_has_a_name_take_it(tmp_path: Any) -> None:
    features, edges = MyFeatureStore(), MyGraphStore()
    x = torch.rand(NUM_NODES, 3)
    features.put_tensor(x, group_name="default", attr_name="x", index=None)
    by_dst = EDGES[:, EDGES[1].sort().indices]
    edges.put_edge_index(tuple(by_dst), edge_type=None, layout="coo", is_sorted=True, size=(NUM_NODES, NUM_NODES))
    for given in (("default", torch.arange(5)), ["default", [0, 1, 2, 3, 4]], "default", torch.arange(5)):
        loader = gnnsys.pyg.NeighborLoader((features, edges), [2], input_nodes=given, batch_size=5)
        batch = next(iter(loader))
        assert batch.n_id[:5].tolist() == [0, 1, 2, 3, 4] and torch.equal(batch.x, x[batch.n_id])
    with pytest.raises(ValueError, match=r"'other' does not exist, the features have \['default'\]"):
        gnnsys.pyg.NeighborLoader((features, edges), [2], input_nodes=("other", torch.arange(5)))


@pytest.mark.parametrize("level", ["node", "edge"])
def test_stores_whose_only_type_has_a_name_may_have_times(level: str) -> None:
    features, edges = MyFeatureStore(), MyGraphStore()
    data = plain()
    data.time = torch.arange(NUM_NODES if level == "node" else EDGES.shape[1]) % 37
    features.put_tensor(data.time, group_name="default", attr_name="time", index=None)
    features.put_tensor(data.x, group_name="default", attr_name="x", index=None)
    edges.put_edge_index(tuple(EDGES), edge_type=None, layout="coo", size=(NUM_NODES, NUM_NODES))
    options: dict[str, Any] = {"time_attr": "time", "input_time": torch.full((NUM_NODES,), 20), "seed": 1}
    nodes, sizes = torch.arange(NUM_NODES), {"batch_size": 10}
    far = list(gnnsys.pyg.NeighborLoader((features, edges), [3, 2], nodes, **options, **sizes))
    for a, b in zip(far, gnnsys.pyg.NeighborLoader(data, [3, 2], nodes, **options, **sizes), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("n_id", "e_id", "edge_index", "time", "x"))
    assert sum(batch.num_edges for batch in far) > 0
    features.put_tensor(data.time, group_name="other", attr_name="time", index=None)
    with pytest.raises(ValueError, match=r"the groups \['default', 'other'\] all have 'time'"):
        gnnsys.pyg.NeighborLoader((features, edges), [3], nodes, **options)


@pytest.mark.parametrize("given", [("a", "b"), ("a", "to", "b")])
def test_links_may_be_of_two_names_without_edges(given: tuple[str, ...]) -> None:
    data, links = typed(), torch.tensor([[3, 1, 4], [1, 5, 9]])
    data["b"].x = torch.arange(12.0)[:, None]
    batch = next(iter(gnnsys.pyg.LinkNeighborLoader(data, [2], edge_label_index=(given, links), batch_size=3)))
    src, dst = batch["a", "to", "b"].edge_label_index
    assert torch.equal(torch.stack([batch["a"].n_id[src], batch["b"].n_id[dst]]), links)
    with pytest.raises(ValueError, match="there is no edge type"):
        gnnsys.pyg.LinkNeighborLoader(data, [2], edge_label_index=given)  # whose edges would be the links


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (
            lambda: gnnsys.pyg.NeighborSampler(EDGES, [2, 2]),
            ValueError,
            "got edges: .*deprecated, write .*NeighborLoader",
        ),
        (lambda: gnnsys.pyg.NeighborSampler(EDGES, sizes=[2]), TypeError, "takes no 'sizes': .*loader.NeighborSampler"),
        (
            lambda: gnnsys.pyg.NeighborSampler(edge_index=EDGES, sizes=[2], batch_size=4),
            TypeError,
            "takes no 'edge_index': .*num_neighbors=sizes, input_nodes=node_idx",
        ),
        (
            lambda: gnnsys.pyg.NeighborSampler(plain(), [2], shuffle=True),
            TypeError,
            "no 'shuffle': give it to the loader",
        ),
        (lambda: gnnsys.pyg.NeighborSampler(plain(), [2], replacing=True), TypeError, "did you mean 'replace'"),
        (
            lambda: gnnsys.pyg.NeighborSampler(plain(), [2], sample_direction="backward"),
            NotImplementedError,
            r"edge_index\.flip\(0\)",
        ),
        (
            lambda: gnnsys.pyg.NeighborSampler(plain(), [2], sample_direction="up"),
            ValueError,
            "'forward' or 'backward'",
        ),
    ],
)
def test_the_sampler_says_what_it_is_not(make: Callable[[], Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def test_an_adjacency_beside_the_edges_is_refused_with_what_to_delete() -> None:
    data, several = plain(), typed()
    both = torch.eye(NUM_NODES).to_sparse_coo()
    data.adj_t, several["a", "to", "a"].adj = both, both
    for make in (gnnsys.pyg.NeighborLoader, gnnsys.pyg.NeighborSampler, gnnsys.pyg.LinkNeighborLoader):
        with pytest.raises(ValueError, match=r"^data has adj_t beside edge_index.*write `del data\.adj_t` to sample"):
            make(data, [2])
    for make in (gnnsys.pyg.GraphSAINTNodeSampler, gnnsys.pyg.ClusterData):
        with pytest.raises(ValueError, match=r"write `del data\.adj_t`"):
            make(data, 2)
    with pytest.raises(ValueError, match=r"write `del data\[\('a', 'to', 'a'\)\]\.adj` to sample"):
        gnnsys.pyg.NeighborLoader(several, [2], input_nodes="a")
    del data.adj_t
    assert next(iter(gnnsys.pyg.NeighborLoader(data, [2], batch_size=5))).batch_size == 5
    data = Data(x=data.x, adj_t=both)
    for make in (gnnsys.pyg.NeighborLoader, gnnsys.pyg.GraphSAINTNodeSampler):
        with pytest.raises(ValueError, match=r"stores its edges as adj_t, .* store edge_index instead"):
            make(data, [2] if make is gnnsys.pyg.NeighborLoader else 2)


def test_links_in_time_need_their_times() -> None:
    data = plain()
    data.time = torch.arange(NUM_NODES)
    for given, match in (
        ({"time_attr": "time"}, "'edge_label_time' is not set"),
        ({"edge_label_time": torch.arange(300)}, "'time_attr' is not set"),
    ):
        with pytest.raises(ValueError, match=match):
            gnnsys.pyg.LinkNeighborLoader(data, [2], **given)


def test_no_hops_are_needed_where_there_are_no_edges() -> None:
    data = Data(x=torch.arange(5.0)[:, None], edge_index=torch.empty(2, 0, dtype=torch.int64))
    batch = next(iter(gnnsys.pyg.NeighborLoader(data, [], batch_size=5)))
    assert torch.equal(batch.x, data.x) and batch.edge_index.shape == (2, 0)


def test_pyg_loaders_say_that_they_cannot_be_sent_to_another_process() -> None:
    for loader in (gnnsys.pyg.NeighborLoader(plain(), [2]), gnnsys.pyg.LinkNeighborLoader(plain(), [2])):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            pickle.dumps(loader)
        assert type(copy.copy(loader)) is type(loader)


def test_names_in_the_users_data_that_batches_set_are_treated_as_pyg_does() -> None:
    data = plain()
    data.n_id, data.batch_size = torch.arange(NUM_NODES) + 1000, 3
    batch = next(iter(gnnsys.pyg.NeighborLoader(data, [2], batch_size=5)))
    assert torch.equal(batch.n_id[:5], torch.arange(1000, 1005))  # kept, as PyG keeps it: joined by node
    assert batch.batch_size == 5  # PyG's own


@pytest.mark.parametrize(("neg_sampling", "negatives"), [(None, 0), ("binary", 1), (("binary", 2), 2), ("triplet", 0)])
def test_a_batch_of_pygs_has_the_weights_of_its_links_and_ones_for_negatives(neg_sampling: Any, negatives: int) -> None:
    links = EDGES[:, ::9]
    weights = torch.rand(links.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options: dict[str, Any] = {"neg_sampling": neg_sampling, "batch_size": 8, "shuffle": True}
    for data, given, store in (
        (plain(), links, lambda batch: batch),
        (typed(), (("a", "to", "a"), links), lambda batch: batch["a", "to", "a"]),
    ):
        loader = gnnsys.pyg.LinkNeighborLoader(data, [2], given, edge_label_weight=weights, **options)
        seen = []
        for batch in map(store, loader):
            ones = torch.ones(negatives * batch.input_id.numel(), dtype=torch.float64)
            assert torch.equal(batch.edge_label_weight, torch.cat([weights[batch.input_id], ones]))
            if neg_sampling != "triplet":
                assert batch.edge_label_index.shape[1] == batch.edge_label_weight.numel()
            seen.append(batch.input_id)
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(links.shape[1]))
        other = gnnsys.pyg.LinkNeighborLoader(data, [2], given, edge_label_weight=weights + 1, **options)
        with pytest.raises(ValueError, match="inputs, but not these"):
            other.load_state_dict(loader.state_dict())
        without = gnnsys.pyg.LinkNeighborLoader(data, [2], given, **options)
        assert "edge_label_weight" not in store(next(iter(without)))


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (torch.rand(5), r"one entry per link, 300, got torch.float32 \[5\]"),
        (torch.ones(300, dtype=torch.int64), r"floating point tensor .* got torch.int64 \[300\]"),
        ("times_seen", "got 'times_seen'"),
        (torch.full((300,), -1.0), "must be finite and >= 0, got -1.0 at link 0"),
    ],
)
def test_weights_that_are_none_are_refused_when_the_loader_is_made(weight: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"edge_label_weight must .*{problem}|edge_label_weight {problem}"):
        gnnsys.pyg.LinkNeighborLoader(plain(), [2], EDGES, edge_label_weight=weight)


def test_weights_beside_ids_of_ones_own_are_refused() -> None:
    """Batches have such ids, and weights are by position."""
    weights, ids = torch.rand(300), torch.arange(299, -1, -1)
    with pytest.raises(ValueError, match="edge_label_weight is by position among the links: leave input_id away"):
        gnnsys.pyg.LinkNeighborLoader(plain(), [2], EDGES, edge_label_weight=weights, input_id=ids)


@pytest.mark.parametrize("name", ["guide", "execution"])
def test_options_of_our_own_loaders_are_refused_with_their_name(name: str) -> None:
    for make in (gnnsys.pyg.NeighborLoader, gnnsys.pyg.LinkNeighborLoader):
        with pytest.raises(ValueError, match=rf"take no {name}: use gnnsys\.NeighborLoader"):
            make(plain(), [2], **{name: "auto"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_neighbor": [2]}, r"takes no 'num_neighbor': did you mean 'num_neighbors'\?"),
        ({"num_neighbors": [2], "batchsize": 2}, r"takes no 'batchsize': did you mean 'batch_size'\?"),
        ({"num_neighbors": [2], "device": "cuda"}, r"takes no 'device': .* write batch\.to\(device\)"),
        ({"num_neighbors": [2], "num_threads": 2}, "takes no 'num_threads': write num_workers"),
        ({"num_neighbors": [2], "across_epochs": False}, r"takes no 'across_epochs': .*gnnsys\.NeighborLoader"),
    ],
)
def test_words_that_no_loader_of_pygs_knows_are_refused_with_what_was_meant(given: dict[str, Any], told: str) -> None:
    for make in (gnnsys.pyg.NeighborLoader, gnnsys.pyg.LinkNeighborLoader):
        with pytest.raises(TypeError, match=f"^{make.__name__} {told}"):
            make(plain(), **given)


def test_words_of_torchs_and_of_pygs_go_through() -> None:
    torchs = {"pin_memory_device": "", "in_order": True, "timeout": 0, "multiprocessing_context": None}
    pygs = {"dataset": None, "collate_fn": None, "custom_cls": None, "input_id": torch.arange(5)}
    loader = gnnsys.pyg.NeighborLoader(plain(), [2], torch.arange(5), batch_size=5, **torchs, **pygs)
    assert next(iter(loader)).input_id.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", ["a", 1.5])
def test_a_seed_that_is_no_whole_number_is_refused_when_the_loader_is_made(seed: Any) -> None:
    data = plain()
    for make in (
        lambda: gnnsys.pyg.NeighborLoader(data, [2], seed=seed),
        lambda: gnnsys.pyg.LinkNeighborLoader(data, [2], seed=seed),
        lambda: gnnsys.pyg.ShaDowKHopSampler(data, 2, 3, seed=seed),
        lambda: gnnsys.pyg.GraphSAINTNodeSampler(data, 10, seed=seed),
        lambda: gnnsys.pyg.ClusterData(data, 2, seed=seed),
    ):
        with pytest.raises(ValueError, match=f"^seed must be a whole number, got {seed!r}$"):
            make()


def test_a_mask_as_integers_is_refused_by_shadow_as_by_the_other_loaders() -> None:
    data = plain()
    mask = torch.arange(data.num_nodes) % 3 == 0
    with pytest.raises(ValueError, match=r"^node_idx holds .* this looks like a mask: write mask\.bool\(\)"):
        gnnsys.pyg.ShaDowKHopSampler(data, 2, 3, node_idx=mask.long())
    assert gnnsys.pyg.ShaDowKHopSampler(data, 2, 3, node_idx=mask).node_idx.tolist() == mask.nonzero().view(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int16])
def test_rows_keep_their_type_as_in_pyg(dtype: torch.dtype) -> None:
    data = plain()
    rows, of_edges = torch.randn(data.num_nodes, 3) * 9, torch.randn(data.num_edges, 2) * 9
    data.x, data.edge_attr = rows.to(dtype), of_edges.to(dtype)
    for workers in (0, 1):
        for batch in gnnsys.pyg.NeighborLoader(data, [3, 2], batch_size=50, num_workers=workers):
            assert batch.x.dtype == dtype and torch.equal(batch.x, data.x[batch.n_id])
            assert batch.edge_attr.dtype == dtype and torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
def test_values_of_inputs_may_be_held_by_anything(make: Any) -> None:
    data, options = plain(), {"time_attr": "time", "batch_size": 2}
    data.time = torch.zeros(data.num_nodes, dtype=torch.int64)
    batch = next(iter(gnnsys.pyg.NeighborLoader(data, [2], [4, 5], input_time=make([7, 8]), **options)))
    assert batch.seed_time.tolist() == [7, 8]
    given = {"edge_label": make([3, 4]), "edge_label_time": make([7, 8]), **options}
    batch = next(iter(gnnsys.pyg.LinkNeighborLoader(data, [2], data.edge_index[:, :2], **given)))
    assert batch.edge_label.tolist() == [3, 4] and batch.edge_label_time.tolist() == [7, 8]


@pytest.mark.parametrize("given", ["train", {"a": 1}, ["a", "b"], 3])
def test_values_of_inputs_that_are_none_are_refused_when_the_loader_is_made(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^edge_label must be a tensor with one entry per input, got "):
        gnnsys.pyg.LinkNeighborLoader(plain(), [2], edge_label=given)


def test_an_array_of_which_no_rows_can_be_picked_is_named() -> None:
    data = plain()
    num_nodes = data.num_nodes
    for value, kind in ((["a"] * num_nodes, "list"), (torch.eye(num_nodes).to_sparse_csr(), r"tensor of layout .*csr")):
        data.names = value
        with pytest.raises(ValueError, match=f"'names' is a {kind}, of which no rows can be picked"):
            next(iter(gnnsys.pyg.NeighborLoader(data, [2])))


def test_a_store_of_edges_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the GraphStore's edges have no size: put_edge_index\(\.\.\., size="):
        gnnsys.pyg.NeighborLoader((plain(), plain()), [2], torch.arange(3))
