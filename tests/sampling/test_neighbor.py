"""NeighborSampler against the graph itself and against a walk written with sets."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, EdgeType, Graph
from gnnsys.ops import CSC, find_edges, sample_neighbors, stream_key
from gnnsys.sampling import NeighborSampler, Sample, SampleKey

KEY = SampleKey(seed=3, epoch=1, batch=4)
WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
HAS: EdgeType = ("paper", "has", "author")


def homogeneous(num_nodes: int = 400, num_edges: int = 6000) -> tuple[Graph, Tensor]:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    node_data = {"t": torch.randint(0, 100, (num_nodes,), generator=generator)}
    edge_data = {
        "w": torch.rand(num_edges, generator=generator),
        "et": torch.randint(0, 100, (num_edges,), generator=generator),
    }
    return Graph.from_edge_index(edge_index, num_nodes, node_data, edge_data), edge_index


def typed() -> tuple[Graph, dict[EdgeType, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def edges(src: int, dst: int, count: int) -> Tensor:
        return torch.stack([torch.randint(0, n, (count,), generator=generator) for n in (src, dst)])

    edge_index = {WRITES: edges(60, 100, 500), CITES: edges(100, 100, 800), HAS: edges(100, 60, 400)}
    return Graph.from_edge_indices(edge_index, {"author": 60, "paper": 100, "alone": 5}), edge_index


def check_structure(sample: Sample, edge_index: dict[EdgeType, Tensor]) -> None:
    """What every sample promises: real edges, local ids in range, hop by hop, sizes that add up."""
    for t, edges in edge_index.items():
        row, col, edge = sample.row[t], sample.col[t], sample.edge[t]
        assert torch.equal(sample.node[t[0]][row], edges[0][edge])
        assert torch.equal(sample.node[t[2]][col], edges[1][edge])
        assert bool((col.diff() >= 0).all())
        assert sum(sample.num_sampled_edges[t]) == row.numel()
    for node_type, nodes in sample.node.items():
        assert sum(sample.num_sampled_nodes[node_type]) == nodes.numel()


@pytest.mark.parametrize("fanouts", [[5], [4, 3], [-1, 2], [3, 0, 2], [2, 2, 2, 2]])
@pytest.mark.parametrize("replace", [False, True])
def test_a_homogeneous_sample_is_made_of_the_graphs_own_edges(fanouts: list[int], replace: bool) -> None:
    graph, edge_index = homogeneous()
    seeds = torch.tensor([7, 11, 300])
    sample = NeighborSampler(graph, fanouts, replace=replace).sample({NODE: seeds}, key=KEY)
    check_structure(sample, {EDGE: edge_index})
    assert torch.equal(sample.node[NODE][:3], seeds)
    assert sample.node[NODE].unique().numel() == sample.node[NODE].numel()
    assert len(sample.num_sampled_nodes[NODE]) == len(fanouts) + 1
    assert len(sample.num_sampled_edges[EDGE]) == len(fanouts)


def test_all_neighbours_of_two_hops_are_the_breadth_first_ball() -> None:
    graph, edge_index = homogeneous(200, 500)
    sample = NeighborSampler(graph, [-1, -1]).sample({NODE: torch.tensor([5])}, key=KEY)
    ball = {5}
    for _ in range(2):
        ball |= {int(s) for s, d in edge_index.T.tolist() if d in ball}
    assert set(sample.node[NODE].tolist()) == ball


def test_each_hop_draws_what_the_kernel_draws_for_that_hop_and_node() -> None:
    """The sampler adds nothing of its own: (hop, node) decides, in both ways of expanding."""
    graph, _ = homogeneous()
    csc = graph.csc()
    seeds = torch.arange(40)
    new = NeighborSampler(graph, [5, 4]).sample({NODE: seeds}, key=KEY)
    frontier = NeighborSampler(graph, [5, 4], expand="frontier").sample({NODE: seeds}, key=KEY)
    first = new.num_sampled_edges[EDGE][0]
    for hop, fanout in enumerate([5, 4]):
        key = stream_key(*KEY, hop, 0)
        block = frontier.blocks[1 - hop]
        of_block = block.csc[EDGE]
        dst = frontier.node[NODE][: block.num_dst[NODE]]
        expected = sample_neighbors(csc, dst.to(csc.indices.dtype), fanout, key=key)
        assert torch.equal(frontier.node[NODE][of_block.indices], expected.ids.long())
        edges = slice(0, first) if hop == 0 else slice(first, None)
        for node in new.node[NODE][new.col[EDGE][edges]].unique().tolist()[::7]:
            mine = new.edge[EDGE][edges][new.node[NODE][new.col[EDGE][edges]] == node]
            alone = sample_neighbors(csc, torch.tensor([node], dtype=csc.indices.dtype), fanout, key=key)
            assert torch.equal(mine, _edge_ids(graph, alone.positions))


def _edge_ids(graph: Graph, positions: Tensor) -> Tensor:
    edge_ids = graph.csc().edge_ids
    return positions if edge_ids is None else edge_ids[positions].long()


def test_repeated_seeds_both_get_their_in_edges() -> None:
    graph, edge_index = homogeneous()
    seeds = torch.tensor([9, 30, 9])
    sample = NeighborSampler(graph, [6, 3]).sample({NODE: seeds}, key=KEY)
    check_structure(sample, {EDGE: edge_index})
    assert torch.equal(sample.node[NODE][:3], seeds)
    row, col = sample.row[EDGE], sample.col[EDGE]
    assert torch.equal(row[col == 0], row[col == 2]) and row[col == 0].numel() == 6


def test_a_typed_sample_keeps_every_type_even_when_empty() -> None:
    graph, edge_index = typed()
    fanouts = {WRITES: [3, 2], CITES: [2, 2], HAS: [0, 4]}
    sample = NeighborSampler(graph, fanouts).sample({"paper": torch.tensor([3, 50])}, key=KEY)
    check_structure(sample, edge_index)
    assert sample.num_sampled_edges[HAS][0] == 0 and sample.num_sampled_edges[HAS][1] > 0
    assert sample.node["alone"].numel() == 0 and sample.num_sampled_nodes["alone"] == [0, 0, 0]


def test_the_order_in_which_types_are_listed_does_not_change_what_is_drawn() -> None:
    graph, edge_index = typed()
    counts = {"author": 60, "paper": 100, "alone": 5}
    shuffled = Graph.from_edge_indices({t: edge_index[t] for t in (HAS, WRITES, CITES)}, counts)
    seeds = {"paper": torch.arange(20)}
    one = NeighborSampler(graph, [3]).sample(seeds, key=KEY)
    other = NeighborSampler(shuffled, [3]).sample(seeds, key=KEY)
    for t in edge_index:
        assert torch.equal(one.edge[t], other.edge[t])


def test_disjoint_trees_share_no_node() -> None:
    graph, edge_index = homogeneous()
    seeds = torch.tensor([4, 4, 200])
    sample = NeighborSampler(graph, [5, 5], disjoint=True).sample({NODE: seeds}, key=KEY)
    check_structure(sample, {EDGE: edge_index})
    assert sample.tree is not None
    tree = sample.tree[NODE]
    assert tree[:3].tolist() == [0, 1, 2]
    assert torch.equal(tree[sample.row[EDGE]], tree[sample.col[EDGE]])
    pairs = tree * 400 + sample.node[NODE]
    assert pairs.unique().numel() == pairs.numel()


@pytest.mark.parametrize("time", ["t", "et"])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_a_tree_never_sees_the_future_of_its_seed(time: str, strategy: str) -> None:
    graph, edge_index = homogeneous()
    seeds, seed_time = torch.arange(50), torch.arange(50) * 2
    sampler = NeighborSampler(graph, [4, 4], time=time, temporal_strategy=strategy)  # type: ignore[arg-type]
    sample = sampler.sample({NODE: seeds}, key=KEY, seed_time={NODE: seed_time})
    check_structure(sample, {EDGE: edge_index})
    assert sample.tree is not None
    limit = seed_time[sample.tree[NODE][sample.col[EDGE]]]
    if time == "t":
        seen = graph.node_data[NODE]["t"][sample.node[NODE][sample.row[EDGE]]]
    else:
        seen = graph.edge_data[EDGE]["et"][sample.edge[EDGE]]
    assert seen.numel() > 100 and bool((seen <= limit).all())


def test_seeds_bring_their_own_time_when_nodes_have_one() -> None:
    graph, _ = homogeneous()
    seeds = torch.arange(30)
    sampler = NeighborSampler(graph, [4], time="t")
    own = sampler.sample({NODE: seeds}, key=KEY)
    given = sampler.sample({NODE: seeds}, key=KEY, seed_time={NODE: graph.node_data[NODE]["t"][seeds]})
    assert torch.equal(own.edge[EDGE], given.edge[EDGE])
    with pytest.raises(ValueError, match="seed_time"):
        NeighborSampler(graph, [4], time="et").sample({NODE: seeds}, key=KEY)


def test_weights_of_zero_are_never_drawn() -> None:
    graph, _ = homogeneous()
    weight = graph.edge_data[EDGE]["w"].clone()
    weight[::2] = 0
    graph.set_edge_data("half", weight)
    sample = NeighborSampler(graph, [5, 5], weight="half").sample({NODE: torch.arange(50)}, key=KEY)
    assert sample.edge[EDGE].numel() > 500 and bool((sample.edge[EDGE] % 2 == 1).all())


def test_excluded_edges_do_not_appear() -> None:
    graph, edge_index = homogeneous()
    hidden = torch.arange(0, 6000, 3)
    positions = find_edges(graph.csc(), edge_index[0][hidden], edge_index[1][hidden])
    sampler = NeighborSampler(graph, [-1, -1])
    sample = sampler.sample({NODE: torch.arange(400)}, key=KEY, exclude={EDGE: positions})
    gone = {tuple(pair) for pair in edge_index[:, hidden].T.tolist()}
    left = {tuple(pair) for pair in edge_index[:, sample.edge[EDGE]].T.tolist()}
    assert not gone & left
    assert len(left) == len({tuple(p) for p in edge_index.T.tolist()} - gone)


def test_blocks_chain_and_cover_the_sample() -> None:
    graph, edge_index = typed()
    sample = NeighborSampler(graph, [3, 2, 2], expand="frontier").sample({"paper": torch.tensor([3, 50])}, key=KEY)
    outer, middle, inner = sample.blocks
    assert inner.num_dst == {"author": 0, "paper": 2, "alone": 0}
    assert outer.num_dst == middle.num_src and middle.num_dst == inner.num_src
    assert outer.num_src == {t: n.numel() for t, n in sample.node.items()}
    for block in sample.blocks:
        for t, csc in block.csc.items():
            assert csc.num_dst == block.num_dst[t[2]] and csc.num_src == block.num_src[t[0]]
            assert csc.edge_ids is not None
            assert torch.equal(sample.node[t[0]][csc.indices], edge_index[t][0][csc.edge_ids])
            assert torch.equal(sample.node[t[2]][csc.dst()], edge_index[t][1][csc.edge_ids])


def test_a_copy_of_a_sampler_samples_the_same() -> None:
    graph, _ = homogeneous()
    sampler = NeighborSampler(graph, [4, 3])
    seeds = {NODE: torch.arange(50)}
    first, second = (each.sample(seeds, key=KEY) for each in (sampler, pickle.loads(pickle.dumps(sampler))))
    assert torch.equal(first.node[NODE], second.node[NODE]) and torch.equal(first.edge[EDGE], second.edge[EDGE])


def test_no_seeds_give_an_empty_sample() -> None:
    graph, edge_index = homogeneous()
    for options in ({}, {"disjoint": True}, {"time": "t"}):
        sample = NeighborSampler(graph, [3, 3], **options).sample({NODE: torch.tensor([], dtype=torch.int64)}, key=KEY)  # type: ignore[arg-type]
        check_structure(sample, {EDGE: edge_index})
        assert sample.num_sampled_nodes[NODE] == [0, 0, 0] and sample.row[EDGE].numel() == 0


BAD = {
    "a fanout below -1": (dict(num_neighbors=[-2]), "num_neighbors"),
    "no hops": (dict(num_neighbors=[]), "num_neighbors"),
    "an unknown weight": (dict(num_neighbors=[2], weight="nope"), "weight"),
    "an unknown time": (dict(num_neighbors=[2], time="nope"), "time"),
    "an unknown strategy": (dict(num_neighbors=[2], temporal_strategy="first"), "temporal_strategy"),
    "an unknown expansion": (dict(num_neighbors=[2], expand="old"), "expand"),
    "an unknown edge type": (dict(num_neighbors={("a", "b", "c"): [2]}), "edge type"),
    "weight and time": (dict(num_neighbors=[2], weight="w", time="t"), "weight and time"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_options_name_themselves(case: str) -> None:
    options, name = BAD[case]
    with pytest.raises(ValueError, match=name):
        NeighborSampler(homogeneous()[0], **options)  # type: ignore[arg-type]


def test_bad_seeds_name_themselves() -> None:
    graph, _ = homogeneous()
    for sampler in (NeighborSampler(graph, [2]), NeighborSampler(graph, [2], disjoint=True)):
        with pytest.raises(ValueError, match="seeds"):
            sampler.sample({NODE: torch.tensor([400])}, key=KEY)
        with pytest.raises(ValueError, match="node type"):
            sampler.sample({"nobody": torch.tensor([0])}, key=KEY)


def test_structure_that_no_device_can_read_is_refused() -> None:
    graph, _ = homogeneous()
    assert NeighborSampler(graph, [3], device="cpu").device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"needs CUDA kernels|only if it is pinned"):
        NeighborSampler(graph, [3], device="cuda")


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"replace": True}])
def test_edges_come_by_destination_and_hops_end_where_a_sample_says(options):
    for graph, seeds in ((homogeneous()[0], {NODE: torch.arange(0, 90, 3)}), (typed()[0], {"paper": torch.arange(9)})):
        sample = NeighborSampler(graph, [4, 3, 2], **options).sample(seeds, key=KEY)
        assert sample.by_destination
        for edge_type in sample.row:
            edge_index = torch.stack([sample.row[edge_type], sample.col[edge_type]])
            sizes = [sample.node[edge_type[at]].numel() for at in (0, 2)]
            looked = CSC.from_edge_index(edge_index, *sizes, narrow=True)
            trusted = CSC.from_sorted(edge_index, *sizes, sample.ends(edge_type))
            assert looked.edge_ids is None and torch.equal(looked.indptr, trusted.indptr)
            assert torch.equal(looked.indices, trusted.indices) and looked.indices.dtype == trusted.indices.dtype
            known = list(sample.ends(edge_type))
            assert trusted.ends(known) == looked.ends(known) and known[-1] == sizes[1]


def test_a_hop_that_fills_the_smallest_table_at_once_is_sampled():
    """128 seeds, 256 neighbours and 512 of theirs: all that a table of 1024 places takes before it is asked to grow."""
    num_nodes = 200_000
    sources = torch.randint(num_nodes, (2 * num_nodes,), generator=torch.Generator().manual_seed(1))
    graph = Graph({NODE: num_nodes}, {EDGE: CSC(2 * torch.arange(num_nodes + 1), sources, num_nodes)})
    for num_seeds in range(120, 130):
        sample = NeighborSampler(graph, [2, 2, 2]).sample({NODE: torch.arange(num_seeds)}, key=SampleKey(0, 0, 0))
        assert len(sample.node[NODE].unique()) == len(sample.node[NODE]) > 14 * num_seeds
