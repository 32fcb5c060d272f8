"""gnnsys.dgl against DGL itself: the same blocks where nothing is random, the same meaning where something is."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip("dgl", reason="dgl is not installed")

import gnnsys.dgl as ours  # noqa: E402
from gnnsys.graph import NODE, from_dgl  # noqa: E402
from gnnsys.partition import Placement  # noqa: E402
from gnnsys.sampling import NeighborSampler as OurSampler  # noqa: E402
from gnnsys.sampling import SampleKey  # noqa: E402
from gnnsys.seeds import split  # noqa: E402
from tests.loader.test_inputs import HOLDERS, mask_of  # noqa: E402


def plain_graph(num_nodes: int = 300, num_edges: int = 4000) -> Any:
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    g = dgl.graph((src, dst), num_nodes=num_nodes)
    g.ndata["feat"] = torch.rand(num_nodes, 8, generator=generator)
    g.ndata["label"] = torch.randint(0, 4, (num_nodes,), generator=generator)
    g.edata["w"] = torch.rand(num_edges, generator=generator)
    g.edata["keep"] = torch.rand(num_edges, generator=generator) < 0.5
    return g


def typed_graph() -> Any:
    generator = torch.Generator().manual_seed(1)

    def edges(src: int, dst: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randint(0, n, (count,), generator=generator) for n in (src, dst))  # type: ignore[return-value]

    g = dgl.heterograph(
        {("a", "writes", "p"): edges(50, 80, 400), ("p", "cites", "p"): edges(80, 80, 500)},
        num_nodes_dict={"a": 50, "p": 80},
    )
    g.nodes["a"].data["feat"] = torch.rand(50, 3)
    g.nodes["p"].data["feat"] = torch.rand(80, 5)
    return g


def edge_set(g: Any, block: Any, edge_type: Any = None) -> set[tuple[int, int, int]]:
    """(source, destination, edge id) in the whole graph's ids, checked to be the graph's own."""
    edge_type = edge_type or block.canonical_etypes[0]
    src, dst = block.edges(etype=edge_type)
    src_ids = block.srcnodes[edge_type[0]].data[dgl.NID][src.long()]
    dst_ids = block.dstnodes[edge_type[2]].data[dgl.NID][dst.long()]
    ids = block.edges[edge_type].data[dgl.EID]
    real_src, real_dst = g.find_edges(ids, etype=edge_type)
    assert torch.equal(src_ids, real_src) and torch.equal(dst_ids, real_dst)
    return set(zip(src_ids.tolist(), dst_ids.tolist(), ids.tolist(), strict=True))


def test_all_neighbours_give_dgls_own_blocks() -> None:
    g = plain_graph()
    seeds = torch.tensor([5, 17, 200])
    mine = ours.MultiLayerFullNeighborSampler(2).sample_blocks(g, seeds)
    theirs = dgl.dataloading.MultiLayerFullNeighborSampler(2).sample_blocks(g, seeds)
    assert sorted(mine[0].tolist()) == sorted(theirs[0].tolist())
    assert torch.equal(mine[1], theirs[1])
    for a, b in zip(mine[2], theirs[2], strict=True):
        assert (a.num_src_nodes(), a.num_dst_nodes(), a.num_edges()) == (
            b.num_src_nodes(), b.num_dst_nodes(), b.num_edges())  # fmt: skip
        assert edge_set(g, a) == edge_set(g, b)
        assert torch.equal(a.dstdata[dgl.NID], a.srcdata[dgl.NID][: a.num_dst_nodes()])


def test_a_dgl_model_computes_the_same_on_our_blocks() -> None:
    g = plain_graph()
    seeds = torch.arange(20)
    layer = dgl.nn.SAGEConv(8, 4, "mean")
    outputs = []
    for sampler in (ours.MultiLayerFullNeighborSampler(1), dgl.dataloading.MultiLayerFullNeighborSampler(1)):
        _, _, blocks = sampler.sample(g, seeds)
        outputs.append(layer(blocks[0], blocks[0].srcdata["feat"]))
    torch.testing.assert_close(outputs[0], outputs[1])


def test_fanouts_are_listed_by_layer_as_dgl_lists_them() -> None:
    g = plain_graph()
    _, _, blocks = ours.NeighborSampler([2, 7]).sample_blocks(g, torch.arange(30))
    assert int(blocks[1].in_degrees().max()) == 7 and int(blocks[0].in_degrees().max()) == 2


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_loader_covers_an_epoch_in_order_with_features_and_labels(num_workers: int) -> None:
    g = plain_graph()
    sampler = ours.NeighborSampler([4, 3], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = ours.DataLoader(g, torch.arange(100), sampler, batch_size=32, num_workers=num_workers)
    seen = []
    assert len(loader) == 4
    for input_nodes, output_nodes, blocks in loader:
        seen.append(output_nodes)
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes])
        assert torch.equal(blocks[-1].dstdata["label"], g.ndata["label"][output_nodes])
        for block in blocks:
            edge_set(g, block)
            assert int(block.in_degrees().max()) <= 4
    assert torch.equal(torch.cat(seen), torch.arange(100))
    loader.close()


def test_features_that_were_not_prefetched_are_sliced_when_asked_for() -> None:
    g = plain_graph()
    loader = ours.DataLoader(g, torch.arange(10), ours.NeighborSampler([3]), batch_size=10)
    input_nodes, _, blocks = next(iter(loader))
    assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes])
    assert torch.equal(blocks[0].edata["w"], g.edata["w"][blocks[0].edata[dgl.EID]])
    loader.close()


def test_the_loader_draws_what_every_other_face_draws() -> None:
    g = plain_graph()
    loader = ours.DataLoader(g, torch.arange(40), ours.NeighborSampler([3, 5]), batch_size=20, seed=9)
    batches = list(loader)
    sampler = OurSampler(from_dgl(g), [5, 3], expand="frontier")
    for index, (input_nodes, output_nodes, _) in enumerate(batches):
        sample = sampler.sample({NODE: output_nodes}, key=SampleKey(9, 0, index))
        assert torch.equal(sample.node[NODE], input_nodes)
    loader.close()


def test_a_resumed_epoch_goes_on_with_the_same_batches() -> None:
    g = plain_graph()

    def make() -> ours.DataLoader:
        return ours.DataLoader(g, torch.arange(90), ours.NeighborSampler([3]), batch_size=20, shuffle=True, seed=4)

    first = make()
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    state = first.state_dict()
    rest = [t[0] for t in iterator]
    second = make()
    second.load_state_dict(state)
    resumed = [t[0] for t in second]
    assert len(rest) == len(resumed) == 3 and all(torch.equal(a, b) for a, b in zip(rest, resumed, strict=True))
    first.close()
    second.close()


def test_dgls_own_loader_takes_our_sampler() -> None:
    g = plain_graph()
    loader = dgl.dataloading.DataLoader(g, torch.arange(50), ours.NeighborSampler([3, 3]), batch_size=25)
    for input_nodes, output_nodes, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes])
        assert output_nodes.numel() == 25
        edge_set(g, blocks[0])


def test_dgls_link_prediction_takes_our_sampler_and_its_exclusions_hold() -> None:
    g = plain_graph()
    sampler = dgl.dataloading.as_edge_prediction_sampler(ours.NeighborSampler([-1]), exclude="self")
    loader = dgl.dataloading.DataLoader(g, torch.arange(64), sampler, batch_size=32)
    for _, pairs, blocks in loader:
        used = {i for _, _, i in edge_set(g, blocks[0])}
        assert not used & set(pairs.edata[dgl.EID].tolist())


def test_probabilities_and_masks_are_respected() -> None:
    g = plain_graph()
    _, _, blocks = ours.NeighborSampler([3], mask="keep").sample_blocks(g, torch.arange(100))
    assert bool(g.edata["keep"][blocks[0].edata[dgl.EID]].all())
    g.edata["w"][::2] = 0
    _, _, blocks = ours.NeighborSampler([3], prob="w").sample_blocks(g, torch.arange(100))
    assert bool((blocks[0].edata[dgl.EID] % 2 == 1).all())


def test_typed_graphs_give_typed_blocks() -> None:
    g = typed_graph()
    seeds = {"p": torch.arange(10)}
    mine = ours.MultiLayerFullNeighborSampler(2).sample_blocks(g, seeds)
    theirs = dgl.dataloading.MultiLayerFullNeighborSampler(2).sample_blocks(g, seeds)
    for a, b in zip(mine[2], theirs[2], strict=True):
        for t in g.canonical_etypes:
            assert edge_set(g, a, t) == edge_set(g, b, t)
    loader = ours.DataLoader(g, seeds, ours.NeighborSampler([{"writes": 2, "cites": 3}] * 2), batch_size=4)
    for input_nodes, output_nodes, blocks in loader:
        assert set(input_nodes) == {"a", "p"} and set(output_nodes) == {"p"} and output_nodes["p"].numel() <= 4
        assert torch.equal(blocks[0].srcnodes["a"].data["feat"], g.nodes["a"].data["feat"][input_nodes["a"]])
        assert int(blocks[0].in_degrees(etype="cites").max()) <= 3
    loader.close()


def test_edges_added_to_the_graph_are_sampled() -> None:
    g = dgl.graph((torch.tensor([0]), torch.tensor([1])), num_nodes=5)
    sampler = ours.NeighborSampler([-1])
    assert sampler.sample_blocks(g, torch.tensor([1]))[2][0].num_edges() == 1
    g.add_edges(torch.tensor([2, 3]), torch.tensor([1, 1]))
    assert sampler.sample_blocks(g, torch.tensor([1]))[2][0].num_edges() == 3


def test_a_replaced_mask_is_respected() -> None:
    g = plain_graph()
    sampler = ours.NeighborSampler([-1], mask="keep")
    sampler.sample_blocks(g, torch.arange(50))
    g.edata["keep"] = ~g.edata["keep"]
    block = sampler.sample_blocks(g, torch.arange(50))[2][0]
    assert bool(g.edata["keep"][block.edata[dgl.EID]].all())


def test_blocks_have_the_id_type_of_the_graph() -> None:
    g = plain_graph().int()
    loader = ours.DataLoader(g, torch.arange(10, dtype=torch.int32), ours.NeighborSampler([3]), batch_size=5)
    for input_nodes, output_nodes, blocks in loader:
        assert input_nodes.dtype == output_nodes.dtype == blocks[0].idtype == torch.int32
        assert torch.equal(blocks[0].srcdata["feat"], g.ndata["feat"][input_nodes.long()])
    loader.close()


def test_what_is_not_supported_says_so_early() -> None:
    g = plain_graph()
    with pytest.raises(ValueError, match="edge_dir"):
        ours.NeighborSampler([2], edge_dir="out")
    with pytest.raises(ValueError, match="prob and mask"):
        ours.NeighborSampler([2], prob="w", mask="keep")
    with pytest.raises(ValueError, match="graph_sampler"):
        ours.DataLoader(g, torch.arange(5), dgl.dataloading.NeighborSampler([2]))
    with pytest.raises(ValueError, match="shuffle must be True or False, got 'adaptive'"):
        ours.DataLoader(g, torch.arange(5), ours.NeighborSampler([2]), shuffle="adaptive")
    with pytest.raises(ValueError, match="use_uva"):
        ours.DataLoader(g, torch.arange(5), ours.NeighborSampler([2]), use_uva=True)
    with pytest.raises(ValueError, match="process group"):
        ours.DataLoader(g, torch.arange(5), ours.NeighborSampler([2]), use_ddp=True)
    with pytest.raises(ValueError, match="exclude_eids"):
        ours.NeighborSampler([2]).sample_blocks(g, torch.arange(3), exclude_eids=torch.tensor([-1]))
    with pytest.raises(ValueError, match="indices must be in"):
        ours.DataLoader(g, torch.tensor([300]), ours.NeighborSampler([2]))


def test_ids_and_masks_mean_the_same_whatever_holds_them() -> None:
    g = dgl.rand_graph(40, 300)
    mask = mask_of(40)
    ids = mask.nonzero().view(-1)
    excluded = torch.arange(300) % 2 == 0
    for name, hold in HOLDERS.items():
        sampler = ours.NeighborSampler([3])
        outputs = [output for _, output, _ in ours.DataLoader(g, hold(mask), sampler, batch_size=7)]
        assert torch.equal(torch.cat(outputs), ids), name
        _, _, blocks = sampler.sample_blocks(g, hold(mask), exclude_eids=hold(excluded))
        assert torch.equal(blocks[0].dstdata[dgl.NID], ids), name
        assert not excluded[blocks[0].edata[dgl.EID]].any(), name
    for wrong in ([0.5], np.array([1.0]), [True] * 39, [True, 2]):
        with pytest.raises(ValueError, match="indices"):
            ours.DataLoader(g, wrong, ours.NeighborSampler([3]))
        with pytest.raises(ValueError, match="exclude_eids"):
            ours.NeighborSampler([3]).sample_blocks(g, ids, exclude_eids=wrong)


def test_a_feature_that_does_not_exist_is_named_when_the_loader_is_made() -> None:
    g = plain_graph()
    for option in ("prefetch_node_feats", "prefetch_labels"):
        with pytest.raises(ValueError, match=rf"{option}: '_N' has no 'fet', only .*did you mean 'feat'"):
            ours.DataLoader(g, torch.arange(9), ours.NeighborSampler([2], **{option: ["fet"]}))
    with pytest.raises(ValueError, match=r"prefetch_edge_feats.*has no 'v'"):
        ours.DataLoader(g, torch.arange(9), ours.NeighborSampler([2], prefetch_edge_feats=["v"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(ValueError, match="device='cuda' is not available here"):
        ours.DataLoader(plain_graph(), torch.arange(9), ours.NeighborSampler([2]), device="cuda")


def test_a_mask_given_as_integers_is_refused_when_our_loader_is_made():
    g = dgl.graph((torch.arange(30), torch.arange(30).flip(0)), num_nodes=30)
    mask = torch.arange(30) % 3 == 0
    for given in (mask.long(), mask.int(), {"_N": mask.long()}):
        with pytest.raises(ValueError, match=r"all 0 or 1.*write mask.bool\(\)"):
            ours.DataLoader(g, given, ours.NeighborSampler([2]), batch_size=5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"batchsize": 2}, r"takes no 'batchsize': did you mean 'batch_size'\?"),
        ({"prefetch_factor": 2}, "takes no 'prefetch_factor': write prefetch"),
        ({"worker_init_fn": print}, "takes no 'worker_init_fn': it is torch's"),
        ({"gpu_cache": {}}, "takes no 'gpu_cache': features stay in host memory"),
    ],
)
def test_words_that_the_loader_does_not_know_are_refused_with_what_was_meant(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=f"^DataLoader {told}"):
        ours.DataLoader(plain_graph(), torch.arange(5), ours.NeighborSampler([2]), **given)


def test_words_that_a_sampler_does_not_know_are_refused_with_what_was_meant() -> None:
    for make, told in (
        (lambda: ours.NeighborSampler(fanout=[2]), r"NeighborSampler takes no 'fanout': did you mean 'fanouts'\?"),
        (lambda: ours.LaborSampler([2], layer_dependent=True), "LaborSampler takes no 'layer_dependent': did you"),
        (lambda: ours.ShaDowKHopSampler([2], probs="w"), r"ShaDowKHopSampler takes no 'probs': did you mean 'prob'\?"),
        (lambda: ours.SAINTSampler("node", budgets=2), r"SAINTSampler takes no 'budgets': did you mean 'budget'\?"),
        (
            lambda: ours.MultiLayerFullNeighborSampler(2, masks="keep"),
            r"MultiLayerFullNeighborSampler takes no 'masks': did you mean 'mask'\?",
        ),
    ):
        with pytest.raises(TypeError, match=f"^{told}"):
            make()


@pytest.mark.parametrize("name", ["seed", "ddp_seed"])
def test_a_seed_that_is_no_whole_number_is_refused_when_the_loader_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a whole number, got 'a'"):
        ours.DataLoader(
            plain_graph(), torch.arange(5), ours.NeighborSampler([2]), use_ddp=name == "ddp_seed", **{name: "a"}
        )


def test_a_seed_of_ranks_is_nothing_to_a_loader_alone() -> None:
    loader = ours.DataLoader(plain_graph(), torch.arange(5), ours.NeighborSampler([2]), ddp_seed=None)  # type: ignore[arg-type]
    assert len(list(loader)) == 5


def test_what_cannot_be_sampled_is_refused_in_dgls_words() -> None:
    g, make = plain_graph(), ours.DataLoader
    sampler = ours.NeighborSampler([2])
    mask = torch.arange(g.num_nodes()) % 2
    for given, told in (
        ((None, torch.arange(3), sampler), "graph must be a DGLGraph, or what gnnsys.open returns, got NoneType"),
        ((g, torch.empty(0, dtype=torch.int64), sampler), "indices is empty: there are no nodes of type 'node'"),
        ((g, torch.tensor([3, 300]), sampler), r"indices must be in \[0, 300\), got 3 to 300"),
        ((g, mask, sampler), "indices holds 300 integers, all 0 or 1.* write mask.bool"),
        ((g, torch.arange(3), ours.NeighborSampler([2], prob="v")), r"prob: no edges have 'v', only \['keep', 'w'\]"),
        ((g, torch.arange(3), ours.NeighborSampler([2], mask="kep")), r"mask: no edges have 'kep', .* mean 'keep'\?"),
        (
            (g, torch.arange(3), ours.NeighborSampler([2], prefetch_node_feats="feat")),
            r"features to prefetch are lists of names, got 'feat': write \['feat'\]",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{told}"):
            make(*given)


@pytest.mark.parametrize("fanouts", [3, "3", {"w": 2}])
def test_fanouts_that_are_no_list_are_refused(fanouts: Any) -> None:
    for make in (ours.NeighborSampler, ours.LaborSampler, ours.ShaDowKHopSampler):
        with pytest.raises(ValueError, match="fanouts must be a list with an entry for each layer, got "):
            make(fanouts)


def test_scripts_read_what_dgls_loader_has() -> None:
    g, indices = plain_graph(), torch.arange(10)
    loader = ours.DataLoader(g, indices, ours.NeighborSampler([2]), batch_size=3, drop_last=True, num_workers=1)
    theirs = dgl.dataloading.DataLoader(g, indices, dgl.dataloading.NeighborSampler([2]), batch_size=3, drop_last=True)
    for name in ("shuffle", "use_ddp", "ddp_seed"):
        assert getattr(loader, name) == getattr(theirs, name)
    assert loader.indices is indices and (loader.batch_size, loader.drop_last, loader.num_workers) == (3, True, 1)
    with loader.enable_cpu_affinity(loader_cores=[0], compute_cores=[0], verbose=False):
        assert sum(1 for _ in loader) == 3


def test_the_loaders_dataset_is_dgls() -> None:
    plain, typed = plain_graph(), typed_graph()
    for g, indices in (
        (plain, torch.arange(10)),
        (plain, {"_N": torch.arange(10)}),
        (typed, {"p": torch.arange(10), "a": torch.arange(5)}),
    ):
        options = {"batch_size": 4, "drop_last": False}
        loader = ours.DataLoader(g, indices, ours.NeighborSampler([2]), **options)
        theirs = dgl.dataloading.DataLoader(g, indices, dgl.dataloading.NeighborSampler([2]), **options)
        assert len(loader.dataset) == len(theirs.dataset) == len(loader)
        for a, b in zip(loader.dataset, theirs.dataset, strict=True):
            a, b = (a, b) if isinstance(indices, dict) else ({"": a}, {"": b})
            assert {t: ids.tolist() for t, ids in a.items()} == {t: ids.tolist() for t, ids in b.items()}
    shuffled = ours.DataLoader(plain, torch.arange(50), ours.NeighborSampler([2]), batch_size=9, shuffle=True)
    for _ in range(2):
        told = list(shuffled.dataset)
        assert all(torch.equal(ids, output) for ids, (_, output, _) in zip(told, shuffled, strict=True))


@pytest.mark.parametrize("make", [ours.NeighborSampler, ours.LaborSampler], ids=["neighbors", "labor"])
def test_seeds_of_several_types_are_batched_as_dgl_batches_them(make: Any) -> None:
    g, indices = typed_graph(), {"p": torch.arange(30), "a": torch.arange(50).flip(0)}
    loader = ours.DataLoader(g, indices, make([3, 3]), batch_size=16)
    theirs = dgl.dataloading.DataLoader(g, indices, dgl.dataloading.NeighborSampler([3, 3]), batch_size=16)
    assert len(loader) == len(theirs) == 5
    for (input_nodes, output_nodes, blocks), (_, wanted, _) in zip(loader, theirs, strict=True):
        assert {t: ids.tolist() for t, ids in output_nodes.items()} == {t: ids.tolist() for t, ids in wanted.items()}
        for t, ids in output_nodes.items():
            assert torch.equal(blocks[-1].dstnodes[t].data[dgl.NID], ids)
            assert torch.equal(blocks[0].srcnodes[t].data["feat"], g.nodes[t].data["feat"][input_nodes[t]])
        for block in blocks:
            for edge_type in g.canonical_etypes:
                edge_set(g, block, edge_type)


def test_what_split_returns_is_taken_by_type() -> None:
    g = typed_graph()
    g.nodes["p"].data["train_mask"] = torch.arange(80) % 2 == 0
    shares = [
        split(from_dgl(g), {"p": "train", "a": None}, placement=Placement(rank, (0, 0, 0), ())) for rank in range(3)
    ]
    loaders = [ours.DataLoader(g, share, ours.NeighborSampler([2]), batch_size=8) for share in shares]
    assert len({len(loader) for loader in loaders}) == 1
    batches = [output_nodes for loader in loaders for _, output_nodes, _ in loader]
    for t, expected in (("p", torch.arange(0, 80, 2)), ("a", torch.arange(50))):
        assert torch.equal(torch.cat([ids[t] for ids in batches if t in ids]).sort().values, expected)
    (only,) = [share["p"] for share in shares[:1]]
    for indices in (only, {"p": only}):
        for sampler in (ours.NeighborSampler([2]), ours.ShaDowKHopSampler([2])):
            loader = ours.DataLoader(g, indices, sampler, batch_size=100)
            assert torch.equal(torch.cat([batch[1]["p"] for batch in loader]), only.ids)
        with pytest.raises(ValueError, match="leave use_ddp away"):
            ours.DataLoader(g, indices, ours.NeighborSampler([2]), use_ddp=True)
