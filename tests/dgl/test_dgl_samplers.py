"""gnnsys.dgl's other samplers against DGL's: the same user code, and what must be equal is equal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip("dgl", reason="dgl is not installed")

import gnnsys.dgl as ours  # noqa: E402
from gnnsys.dgl import loader as loader_module  # noqa: E402
from tests.dgl.test_dgl import edge_set, plain_graph, typed_graph  # noqa: E402


def assert_induced(g: Any, subg: Any) -> None:
    """The subgraph is what DGL induces on the same nodes: the same edges, by their ids, with the same features."""
    nodes = subg.ndata[dgl.NID]
    expected = g.subgraph(nodes)
    assert subg.num_nodes() == nodes.numel() == expected.num_nodes() and subg.idtype == g.idtype
    edges = subg.edata[dgl.EID]
    assert sorted(edges.tolist()) == sorted(expected.edata[dgl.EID].tolist())
    src, dst = subg.edges()
    real_src, real_dst = g.find_edges(edges)
    assert torch.equal(nodes[src.long()], real_src) and torch.equal(nodes[dst.long()], real_dst)
    assert torch.equal(subg.ndata["feat"], g.ndata["feat"][nodes.long()])
    assert torch.equal(subg.edata["w"], g.edata["w"][edges.long()])


# -- Cluster-GCN -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
def test_clusters_of_an_epoch_are_every_node_once(idtype: torch.dtype, tmp_path: Path) -> None:
    g = plain_graph().astype(idtype)

    def user_code(sampler_kind: Any, loader_kind: Any, path: Path) -> list[Any]:
        sampler = sampler_kind(g, 10, cache_path=str(path), prefetch_ndata=["feat"], prefetch_edata=["w"])
        assert sampler.partition_offset.numel() == 11 and len(sampler.partition_node_ids) == g.num_nodes()
        loader = loader_kind(g, torch.arange(10), sampler, batch_size=4, shuffle=True, drop_last=False)
        assert len(loader) == 3
        return list(loader)

    theirs = dgl.dataloading
    runs = {
        "ours": user_code(ours.ClusterGCNSampler, ours.DataLoader, tmp_path / "a"),
        "our sampler in DGL's loader": user_code(ours.ClusterGCNSampler, theirs.DataLoader, tmp_path / "a"),
    }
    if idtype == torch.int64:  # DGL's METIS takes no other
        runs["DGL's"] = user_code(theirs.ClusterGCNSampler, theirs.DataLoader, tmp_path / "b")
    for name, subgraphs in runs.items():
        nodes = torch.cat([subg.ndata[dgl.NID] for subg in subgraphs])
        assert torch.equal(nodes.sort().values, torch.arange(g.num_nodes(), dtype=idtype)), name
        for subg in subgraphs:
            assert_induced(g, subg)


def test_a_subgraph_of_clusters_is_dgls_for_the_same_clusters(tmp_path: Path) -> None:
    g = plain_graph()
    mine = ours.ClusterGCNSampler(g, 10, cache_path=None)
    theirs = dgl.dataloading.ClusterGCNSampler(g, 10, cache_path=str(tmp_path / "pickle"))
    theirs.partition_offset, theirs.partition_node_ids = mine.partition_offset, mine.partition_node_ids
    a, b = mine.sample(g, torch.tensor([7, 2])), theirs.sample(g, torch.tensor([7, 2]))
    assert torch.equal(a.ndata[dgl.NID], b.ndata[dgl.NID])
    assert sorted(a.edata[dgl.EID].tolist()) == sorted(b.edata[dgl.EID].tolist())


def test_cached_clusters_are_read_again_and_never_as_a_pickle(tmp_path: Path) -> None:
    g, path = plain_graph(), str(tmp_path / "clusters")
    first = ours.ClusterGCNSampler(g, 10, cache_path=path)
    again = ours.ClusterGCNSampler(g, 10, cache_path=path, mode="recursive")
    assert torch.equal(first.partition_node_ids, again.partition_node_ids)
    with pytest.raises(ValueError, match="10 clusters of 300 nodes, not 7 of 300: remove it"):
        ours.ClusterGCNSampler(g, 7, cache_path=path)
    dgl.dataloading.ClusterGCNSampler(g, 5, cache_path=str(tmp_path / "theirs"))
    with pytest.raises(ValueError, match="files that DGL wrote are not"):
        ours.ClusterGCNSampler(g, 5, cache_path=str(tmp_path / "theirs"))


# -- GraphSAINT --------------------------------------------------------------------------------------------------------

SAINT: dict[str, Any] = {"node": 40, "edge": 25, "walk": (10, 3)}


@pytest.mark.parametrize("mode", SAINT)
def test_saint_subgraphs_are_induced_and_sized_as_dgls(mode: str) -> None:
    g = dgl.to_bidirected(plain_graph(300, 1500), copy_ndata=True)
    g.edata["w"] = torch.rand(g.num_edges())

    def user_code(module: Any, loader_kind: Any) -> list[Any]:
        sampler = module.SAINTSampler(mode=mode, budget=SAINT[mode], prefetch_ndata=["feat"], prefetch_edata=["w"])
        loader = loader_kind(g, torch.arange(80), sampler)
        assert len(loader) == 80
        return list(loader)

    runs = [
        user_code(ours, ours.DataLoader),
        user_code(ours, dgl.dataloading.DataLoader),
        user_code(dgl.dataloading, dgl.dataloading.DataLoader),
    ]
    sizes = []
    for subgraphs in runs:
        for subg in subgraphs[:10]:
            assert_induced(g, subg)
            nodes = subg.ndata[dgl.NID]
            assert torch.equal(nodes, nodes.sort().values)
        sizes.append(torch.tensor([float(subg.num_nodes()) for subg in subgraphs]))
    for mine in sizes[:2]:  # the mean of DGL's, within four standard errors
        spread = float((mine.var() + sizes[2].var()) / 80) ** 0.5
        assert abs(float(mine.mean() - sizes[2].mean())) < 4 * spread + 0.01 * float(mine.mean())


def test_saint_nodes_are_drawn_by_out_degree_as_dgl_draws_them() -> None:
    g = dgl.graph((torch.tensor([0, 0, 0, 1]), torch.tensor([1, 2, 3, 0])), num_nodes=4)
    sampler = ours.SAINTSampler("node", 1)
    torch.manual_seed(0)
    found = Counter(int(sampler.sample(g, None).ndata[dgl.NID]) for _ in range(400))
    assert set(found) == {0, 1} and 250 < found[0] < 350  # three edges of four leave node 0


def test_a_saint_epoch_has_a_subgraph_per_batch_and_resumes() -> None:
    g = plain_graph()
    loader = ours.DataLoader(g, torch.arange(7), ours.SAINTSampler("walk", (5, 2)), batch_size=2, seed=3)
    assert len(loader) == 4
    whole = [subg.ndata[dgl.NID].tolist() for subg in loader]
    assert len({tuple(nodes) for nodes in whole}) > 1
    again = ours.DataLoader(g, torch.arange(7), ours.SAINTSampler("walk", (5, 2)), batch_size=2, seed=3)
    batches = iter(again)
    assert next(batches).ndata[dgl.NID].tolist() == whole[0]
    state = again.state_dict()
    resumed = ours.DataLoader(g, torch.arange(7), ours.SAINTSampler("walk", (5, 2)), batch_size=2, seed=3)
    resumed.load_state_dict(state)
    assert [subg.ndata[dgl.NID].tolist() for subg in resumed] == whole[1:]
    for each in (loader, again, resumed):
        each.close()


# -- shaDow ------------------------------------------------------------------------------------------------------------


def test_shadow_of_all_neighbours_is_dgls_own() -> None:
    g = plain_graph(300, 600)
    seeds = torch.tensor([5, 17, 200])
    mine = ours.ShaDowKHopSampler([-1, -1]).sample(g, seeds)
    theirs = dgl.dataloading.ShaDowKHopSampler([-1, -1]).sample(g, seeds)
    assert sorted(mine[0].tolist()) == sorted(theirs[0].tolist())
    assert torch.equal(mine[0][:3], seeds) and torch.equal(mine[1], theirs[1])
    assert sorted(mine[2].edata[dgl.EID].tolist()) == sorted(theirs[2].edata[dgl.EID].tolist())
    assert_induced(g, mine[2])


def test_shadow_in_either_loader_gives_seeds_first_and_features() -> None:
    g = plain_graph()
    for loader_kind in (ours.DataLoader, dgl.dataloading.DataLoader):
        sampler = ours.ShaDowKHopSampler([4, 3], prefetch_node_feats=["feat"], prefetch_edge_feats=["w"])
        seen = []
        for input_nodes, output_nodes, subg in loader_kind(g, torch.arange(50), sampler, batch_size=20):
            assert torch.equal(input_nodes, subg.ndata[dgl.NID])
            assert torch.equal(input_nodes[: output_nodes.numel()], output_nodes)
            assert_induced(g, subg)
            seen.append(output_nodes)
        assert torch.equal(torch.cat(seen), torch.arange(50))


def test_shadow_leaves_excluded_edges_out() -> None:
    g = plain_graph()
    gone = g.in_edges(torch.tensor([3]), form="eid")[:5]
    _, _, subg = ours.ShaDowKHopSampler([-1]).sample(g, torch.tensor([3, 8]), exclude_eids=gone)
    assert not set(gone.tolist()) & set(subg.edata[dgl.EID].tolist())


def test_shadow_works_on_typed_graphs() -> None:
    g = typed_graph()
    sampler = ours.ShaDowKHopSampler([3, 3])
    loader = ours.DataLoader(g, {"p": torch.arange(10)}, sampler, batch_size=10)
    for input_nodes, output_nodes, subg in (*loader, sampler.sample(g, {"p": torch.arange(10)})):
        assert output_nodes["p"].tolist() == list(range(10))
        expected = g.subgraph(input_nodes)
        for edge_type in g.canonical_etypes:
            found, wanted = (sorted(s.edges[edge_type].data[dgl.EID].tolist()) for s in (subg, expected))
            assert found == wanted
    loader.close()


# -- LABOR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1])
def test_labor_blocks_are_what_dgls_are(rounds: int) -> None:
    g = plain_graph(300, 9000)

    def user_code(module: Any, loader_kind: Any) -> list[Any]:
        torch.manual_seed(0)
        dgl.seed(0)
        sampler = module.LaborSampler([8, 5], importance_sampling=rounds, prefetch_node_feats=["feat"])
        loader = loader_kind(g, torch.arange(300), sampler, batch_size=30)
        return [batch for _ in range(3) for batch in loader]

    runs = [
        user_code(ours, ours.DataLoader),
        user_code(ours, dgl.dataloading.DataLoader),
        user_code(dgl.dataloading, dgl.dataloading.DataLoader),
    ]
    counts = []
    for batches in runs:
        assert len(batches) == 30
        found = []
        for input_nodes, output_nodes, blocks in batches:
            assert torch.equal(blocks[-1].dstdata[dgl.NID], output_nodes)
            assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes])
            for block in blocks:
                edge_set(g, block)
                assert ("edge_weights" in block.edata) == bool(rounds)
                if rounds:  # a mean over weighted messages is the weighted mean
                    weights = torch.zeros(block.num_dst_nodes())
                    weights.index_add_(0, block.edges()[1].long(), block.edata["edge_weights"].float())
                    torch.testing.assert_close(weights, block.in_degrees().float())
            found.append([input_nodes.numel(), *(block.num_edges() for block in blocks)])
        counts.append(torch.tensor(found, dtype=torch.float64))
    for mine in counts[:2]:  # nodes, and edges of each layer, as DGL's: within four standard errors
        error = ((mine.var(0) + counts[2].var(0)) / 30).sqrt()
        assert bool(((mine.mean(0) - counts[2].mean(0)).abs() < 4 * error).all())


def test_labor_with_a_fanout_of_all_is_dgls_own() -> None:
    g, seeds = plain_graph(), torch.tensor([5, 17, 200])
    _, _, mine = ours.LaborSampler([-1, -1]).sample_blocks(g, seeds)
    _, _, theirs = dgl.dataloading.MultiLayerFullNeighborSampler(2).sample_blocks(g, seeds)
    for a, b in zip(mine, theirs, strict=True):
        assert edge_set(g, a) == edge_set(g, b)


def test_options_that_are_changed_count_for_the_next_sample() -> None:
    g, saint = plain_graph(), ours.SAINTSampler("node", 10)
    for mode, budget, most in (("node", 10, 10), ("node", 40, 40), ("walk", (20, 1), 40)):
        saint.mode, saint.budget = mode, budget
        assert most / 2 < saint.sample(g, None).num_nodes() <= most
    saint.budget = 10
    with pytest.raises(ValueError, match=r"budget must be \(number of roots"):
        saint.sample(g, None)
    labor = ours.LaborSampler([4])
    for labor.importance_sampling in (0, 1):
        (block,) = labor.sample_blocks(g, torch.arange(20))[2]
        assert ("edge_weights" in block.edata) == bool(labor.importance_sampling)


def test_labors_seed_repeats_what_is_drawn() -> None:
    g, seeds, sampler = plain_graph(), torch.arange(20), ours.LaborSampler([4])
    found = []
    for _ in range(2):
        sampler.set_seed(11)
        found.append([edge_set(g, sampler.sample_blocks(g, seeds)[2][0]) for _ in range(2)])
    assert found[0] == found[1] and found[0][0] != found[0][1]


# -- PinSAGE -----------------------------------------------------------------------------------------------------------


def bipartite() -> Any:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randint(0, 40, (300,), generator=generator), torch.randint(0, 60, (300,), generator=generator)
    return dgl.heterograph({("A", "AB", "B"): (a, b), ("B", "BA", "A"): (b, a)}, num_nodes_dict={"A": 40, "B": 60})


def test_pinsage_neighbours_are_dgls_in_expectation() -> None:
    g, seeds = bipartite(), torch.arange(40)
    found = {}
    for name, module in (("ours", ours), ("theirs", dgl.sampling)):
        torch.manual_seed(0)
        dgl.seed(0)
        sampler = module.PinSAGESampler(g, "A", "B", 3, 0.5, 400, 40)
        frontier = sampler(seeds)
        assert frontier.canonical_etypes == [("A", "_E", "A")] and frontier.num_nodes() == 40
        visits = torch.zeros(40, 40)
        src, dst = frontier.edges()
        visits[dst, src] = frontier.edata["weights"].float()
        found[name] = visits
        for seed in range(40):  # the most visited first
            counts = frontier.edata["weights"][dst == seed]
            assert torch.equal(counts, counts.sort(descending=True).values)
    total = found["theirs"].sum(1)
    torch.testing.assert_close(found["ours"].sum(1), total, rtol=0, atol=120)  # five deviations of 400 walks each
    shares = {name: visits / visits.sum(1, keepdim=True).clamp(min=1) for name, visits in found.items()}
    assert float((shares["ours"] - shares["theirs"]).abs().max()) < 0.1


def test_pinsage_takes_the_number_of_neighbours_that_was_asked_for() -> None:
    g = bipartite()
    frontier = ours.PinSAGESampler(g, "A", "B", 2, 0.3, 50, 5, weight_column="visits")(torch.tensor([7, 3]))
    assert set(frontier.edges()[1].tolist()) <= {3, 7} and int(frontier.in_degrees().max()) <= 5
    assert int(frontier.edata["visits"].min()) >= 1
    whole = plain_graph()
    frontier = ours.RandomWalkNeighborSampler(whole, 2, 0.5, 20, 4)(torch.arange(10))
    assert frontier.num_nodes() == whole.num_nodes() and int(frontier.in_degrees().max()) == 4


def test_walks_go_along_edges_that_were_added() -> None:
    g = dgl.heterograph({("A", "AB", "B"): ([0], [0]), ("B", "BA", "A"): ([0], [1])}, {"A": 3, "B": 1})
    plain = dgl.graph(([0], [1]), num_nodes=3)
    pinsage = ours.PinSAGESampler(g, "A", "B", 1, 0.0, 60, 3)
    walks = ours.RandomWalkNeighborSampler(plain, 1, 0.0, 60, 3)
    for visited, reach in (({1}, {1}), ({1, 2}, {1, 2})):
        assert set(pinsage(torch.tensor([0])).edges()[0].tolist()) == visited
        assert set(walks(torch.tensor([0])).edges()[0].tolist()) == reach
        g.add_edges(torch.tensor([0]), torch.tensor([2]), etype="BA")
        plain.add_edges(torch.tensor([0]), torch.tensor([2]))


# -- bad use -----------------------------------------------------------------------------------------------------------


def test_bad_arguments_say_what_to_write_instead(tmp_path: Path) -> None:
    g, typed = plain_graph(), typed_graph()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("prob='w'", lambda: ours.LaborSampler([3], prob="w")),
        ("batch_dependency must be 1", lambda: ours.LaborSampler([3], batch_dependency=4)),
        ("mode must be", lambda: ours.SAINTSampler("forest", 3)),
        ("budget must be a number", lambda: ours.SAINTSampler("node", (3, 4))),
        ("budget must be .number of roots", lambda: ours.SAINTSampler("walk", 3)),
        ("to_homogeneous", lambda: ours.SAINTSampler("node", 3).sample(typed, None)),
        ("k must be in", lambda: ours.ClusterGCNSampler(g, 0, cache_path=None)),
        ("leave balance_ntypes", lambda: ours.ClusterGCNSampler(g, 3, cache_path=None, balance_edges=True)),
        ("'k-way' or 'recursive'", lambda: ours.ClusterGCNSampler(g, 3, cache_path=None, mode="both")),
        ("and back", lambda: ours.PinSAGESampler(typed, "a", "p", 1, 0.5, 2, 2)),
        ("metapath must be given", lambda: ours.RandomWalkNeighborSampler(typed, 1, 0.5, 2, 2)),
        ("at least 1", lambda: ours.RandomWalkNeighborSampler(g, 0, 0.5, 2, 2)),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("kind", ["node", "cluster", "shadow"])
def test_ranks_have_shares_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    g = dgl.rand_graph(200, 2000)
    made = {
        "node": lambda: ours.SAINTSampler("node", 20),
        "cluster": lambda: ours.ClusterGCNSampler(g, 12, cache_path=None),
        "shadow": lambda: ours.ShaDowKHopSampler([2]),
    }
    indices = torch.arange(200) < 12 if kind == "shadow" else torch.arange(12)  # a mask, too
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    seen = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        loader = ours.DataLoader(g, indices, made[kind](), use_ddp=True, shuffle=True, batch_size=2, seed=1)
        batches = [batch[1] if kind == "shadow" else batch.ndata[dgl.NID] for batch in loader]
        loader.close()
        assert len(batches) == 3
        seen.append({tuple(sorted(ids.tolist())) for ids in batches})
    assert not seen[0] & seen[1]
    if kind == "shadow":
        assert sorted(i for of in seen for ids in of for i in ids) == list(range(12))


SUBGRAPH_SAMPLERS: dict[str, Callable[..., Any]] = {
    "clusters": lambda g, **options: ours.ClusterGCNSampler(g, 6, cache_path=None, **options),
    "saint": lambda g, **options: ours.SAINTSampler("node", 20, **options),
    "shadow": lambda g, **options: ours.ShaDowKHopSampler([4], **options),
}


@pytest.mark.parametrize("kind", SUBGRAPH_SAMPLERS)
def test_batches_go_to_the_samplers_output_device_unless_the_loader_names_one(kind: str, monkeypatch) -> None:
    g, seen = plain_graph(), []
    moved = loader_module._to_device
    monkeypatch.setattr(loader_module, "_to_device", lambda value, device: seen.append(device) or moved(value, device))

    def batches(device: Any, **options: Any) -> list[Any]:
        sampler = SUBGRAPH_SAMPLERS[kind](g, **options)
        loader = ours.DataLoader(g, torch.arange(6), sampler, device, batch_size=3, seed=1)
        found = list(loader)
        loader.close()
        return [batch[-1] if isinstance(batch, tuple) else batch for batch in found]

    expected = batches("cpu", output_device=None)
    assert set(seen) == {torch.device("cpu")}
    seen.clear()
    found = batches(None, output_device="cpu")
    assert set(seen) == {torch.device("cpu")}
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.ndata[dgl.NID], b.ndata[dgl.NID]) and a.device == torch.device("cpu")
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="device='cuda' is not available here"):
            batches(None, output_device="cuda")
        assert len(batches("cpu", output_device="cuda")) == 2  # the loader's device is what counts
