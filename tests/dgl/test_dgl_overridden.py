"""Samplers with a `sample_blocks` of a user's own: our DataLoader calls it, as DGL's does, or refuses the sampler."""

from __future__ import annotations

import functools
import os
import threading
from types import MethodType
from typing import Any

import pytest
import torch

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip("dgl", reason="dgl is not installed")

import gnnsys.dgl as ours  # noqa: E402
from gnnsys.seeds import split  # noqa: E402
from tests.dgl.test_dgl import edge_set, plain_graph, typed_graph  # noqa: E402
from tests.sampling.machines import homogeneous, machines  # noqa: E402
from tests.support.grid import grid  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FEATURES: Any = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"], "prefetch_edge_feats": ["w"]}


def with_marks(base: Any) -> Any:
    """A sampler that draws as its base does and says on every block that it was there."""

    class Marking(base):  # type: ignore[misc]
        def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
            self.__dict__.setdefault("threads", set()).add(threading.get_ident())
            input_nodes, output_nodes, blocks = super().sample_blocks(g, seed_nodes, exclude_eids)
            for block in blocks:
                for edge_type in block.canonical_etypes:
                    block.edges[edge_type].data["marked"] = torch.ones(block.num_edges(edge_type))
            return input_nodes, output_nodes, blocks

    return Marking


MAKERS: dict[str, Any] = {
    "NeighborSampler": lambda wrap, **options: wrap(ours.NeighborSampler)([4, 3], **options),
    "full": lambda wrap, **options: wrap(ours.MultiLayerFullNeighborSampler)(2, **options),
    "LABOR": lambda wrap, **options: wrap(ours.LaborSampler)([4, 3], importance_sampling=1, **options),
}


def plain(base: Any) -> Any:
    return base


@grid(name=list(MAKERS), num_workers=[0, 2])
def test_an_overridden_sample_blocks_is_called_and_draws_what_ours_draws(name: str, num_workers: int) -> None:
    g = plain_graph()
    mine = MAKERS[name](with_marks, **FEATURES)
    options: Any = {"batch_size": 32, "shuffle": True, "num_workers": num_workers, "seed": 5}
    loader = ours.DataLoader(g, torch.arange(100), mine, **options)
    usual = ours.DataLoader(g, torch.arange(100), MAKERS[name](plain, **FEATURES), **options)
    assert len(loader) == 4
    for _ in range(2):
        for a, b in zip(loader, usual, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
            for x, y in zip(a[2], b[2], strict=True):
                assert edge_set(g, x) == edge_set(g, y) and bool(x.edata["marked"].all())
                assert torch.equal(x.edata["w"], y.edata["w"])
            assert torch.equal(a[2][0].srcdata["feat"], b[2][0].srcdata["feat"])
            assert torch.equal(a[2][-1].dstdata["label"], b[2][-1].dstdata["label"])
    assert (threading.get_ident() in mine.threads) == (num_workers == 0)
    loader.close()
    usual.close()


def test_an_overridden_labor_sampler_follows_the_loaders_seed_in_spite_of_its_own() -> None:
    g = plain_graph()

    def make(wrap: Any, num_workers: int) -> Any:
        sampler = MAKERS["LABOR"](wrap)
        sampler.set_seed(5)
        return ours.DataLoader(g, torch.arange(200), sampler, batch_size=5, num_workers=num_workers, seed=3)

    def edges(batches: Any) -> list[list[int]]:
        return [blocks[0].edata[dgl.EID].tolist() for _, _, blocks in batches]

    expected = edges(make(plain, 0))
    for num_workers in (0, 4):
        assert edges(make(with_marks, num_workers)) == expected
    first, resumed = make(with_marks, 0), make(with_marks, 0)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    resumed.load_state_dict(first.state_dict())
    assert edges(resumed) == expected[3:]


@grid(name=["sample", "sample_blocks"])
def test_a_method_assigned_to_a_class_of_ours_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    usual = getattr(ours.NeighborSampler, name)

    @functools.wraps(usual)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(ours.NeighborSampler, name, patched)
    for kind in (ours.NeighborSampler, ours.LaborSampler):
        calls.clear()
        assert len(list(ours.DataLoader(plain_graph(), torch.arange(20), kind([3]), batch_size=7))) == len(calls) == 3


def test_whatever_a_user_overrides_is_called() -> None:
    g = plain_graph()

    class Sampling(ours.NeighborSampler):
        def sample(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
            first, second = super().sample(g, seed_nodes), super().sample(g, seed_nodes)
            return {"seeds": seed_nodes, "twice": [first[2][0], second[2][0]]}

    class Assigning(ours.NeighborSampler):
        def assign_lazy_features(self, result: Any) -> Any:
            result[2][0].srcdata["renamed"] = dgl.LazyFeature("feat")
            return super().assign_lazy_features(result)

    (batch,) = ours.DataLoader(g, torch.arange(300), Sampling([3]), batch_size=300)
    assert torch.equal(batch["seeds"], torch.arange(300))
    assert edge_set(g, batch["twice"][0]) != edge_set(g, batch["twice"][1])
    ((input_nodes, _, (block,)),) = ours.DataLoader(g, torch.arange(9), Assigning([3]), batch_size=9)
    assert torch.equal(block.srcdata["renamed"], g.ndata["feat"][input_nodes])
    patched = ours.NeighborSampler([3])
    patched.sample_blocks = MethodType(lambda self, g, seed_nodes, exclude_eids=None: "mine", patched)
    patched.assign_lazy_features = lambda result: result
    assert list(ours.DataLoader(g, torch.arange(9), patched, batch_size=9)) == ["mine"]


def test_an_overridden_sampler_is_given_seeds_as_dgl_gives_them() -> None:
    g, plain = typed_graph(), plain_graph().int()
    seen: list[Any] = []

    class Noting(ours.NeighborSampler):
        def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
            seen.append(seed_nodes)
            return super().sample_blocks(g, seed_nodes, exclude_eids)

    for graph, indices in (
        (g, {"p": torch.arange(7)}),
        (g, {"a": torch.arange(7), "p": torch.arange(6)}),
        (plain, torch.arange(9, dtype=torch.int32)),
        (plain, {"_N": torch.arange(9, dtype=torch.int32)}),
    ):
        found = []
        for module in (dgl.dataloading, ours):
            seen.clear()
            list(module.DataLoader(graph, indices, Noting([2]), batch_size=4))
            found.append([s if isinstance(s, dict) else {"": s} for s in seen])
        for theirs, mine in zip(*found, strict=True):
            assert list(theirs) == list(mine)
            assert all(torch.equal(theirs[t], mine[t]) and theirs[t].dtype == mine[t].dtype for t in theirs)


def test_an_overridden_epoch_is_resumed() -> None:
    def make() -> Any:
        sampler = with_marks(ours.NeighborSampler)([3])
        return ours.DataLoader(plain_graph(), torch.arange(90), sampler, batch_size=20, shuffle=True, seed=4)

    first = make()
    batches = iter(first)
    next(batches)
    state, rest = first.state_dict(), [batch[0] for batch in batches]
    second = make()
    second.load_state_dict(state)
    assert all(torch.equal(a, batch[0]) for a, batch in zip(rest, second, strict=True))


def test_an_overridden_sampler_of_parts_is_called(tmp_path) -> None:
    class Assigning(ours.NeighborSampler):
        def sample(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> Any:
            result = self.sample_blocks(g, seed_nodes)
            result[2][0].srcdata["y"] = dgl.LazyFeature("x")
            result[2][0].edata["v"] = dgl.LazyFeature("w")
            return result

    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:
        features: Any = {"prefetch_node_feats": ["x"], "prefetch_edge_feats": ["w"]}
        options: Any = {"batch_size": 16, "seed": 4}
        seeds = split(graphs[0], graphs[0].from_global(torch.arange(40)))
        mine = ours.DataLoader(graphs[0], seeds, with_marks(ours.NeighborSampler)([3, 4], **features), **options)
        usual = ours.DataLoader(graphs[0], seeds, ours.NeighborSampler([3, 4], **features), **options)
        expected = list(usual)
        for a, b in zip(mine, expected, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[2][0].srcdata["x"], b[2][0].srcdata["x"])
            assert torch.equal(a[2][1].edata["w"], b[2][1].edata["w"]) and bool(a[2][1].edata["marked"].all())
        lazy = ours.DataLoader(graphs[0], seeds, Assigning([3, 4]), **options)
        for a, b in zip(lazy, expected, strict=True):
            assert torch.equal(a[2][0].srcdata["y"], b[2][0].srcdata["x"])
            assert torch.equal(a[2][0].edata["v"], b[2][0].edata["w"])
        for loader in (mine, usual, lazy):
            loader.close()


@pytest.mark.parametrize("kind", [ours.ClusterGCNSampler, ours.SAINTSampler, ours.ShaDowKHopSampler])
def test_a_sampler_of_subgraphs_with_a_sample_of_its_own_is_refused(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc, valid-type]
        def sample(self, g: Any, indices: Any, exclude_eids: Any = None) -> Any:
            return super().sample(g, indices)

    g = plain_graph()
    made = {
        ours.ClusterGCNSampler: lambda: Mine(g, 10, cache_path=None),
        ours.SAINTSampler: lambda: Mine("node", 20),
        ours.ShaDowKHopSampler: lambda: Mine([3]),
    }[kind]()
    with pytest.raises(ValueError, match=r"Mine has a sample of its own.*use dgl.dataloading.DataLoader"):
        ours.DataLoader(g, torch.arange(9), made)
