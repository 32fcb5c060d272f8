"""Shares of seeds: nothing dropped or repeated, equal to one, local first. The oracle is the mask of one process."""

from __future__ import annotations

import random

import pytest
import torch

from gnnsys.comm import Client
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.partition import Placement, open_parts, write_parts
from gnnsys.sampling import DistGraph
from gnnsys.sampling.select import count_true, select_true
from gnnsys.seeds import IdRange, assign_shares, resolve_nodes, split
from gnnsys.session import init
from gnnsys.session.graph_server import GraphServer
from gnnsys.store import Store
from tests.partition.part_graphs import heterogeneous, homogeneous, random_assignment
from tests.sampling.machines import machines


def local_share(counts, placement, trainers, shares):
    """How many of all chosen ids are trained on the machine that serves them."""
    machine_of = [placement.machine_of_part[s // trainers] for s, n in enumerate(counts) for _ in range(n)]
    return sum(machine_of[i] == placement.machine_of_rank[r] for r, share in enumerate(shares) for i in share)


def test_shares_cover_everything_once_and_differ_by_at_most_one():
    draw = random.Random(0)
    for _ in range(200):
        num_parts, trainers, num_machines = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 4)
        counts = [draw.choice([0, 0, 1, draw.randint(0, 30)]) for _ in range(num_parts * trainers)]
        ranks = tuple(sorted(draw.randrange(num_machines) for _ in range(draw.randint(1, 7))))
        placement = Placement(0, ranks, tuple(draw.randrange(num_machines) for _ in range(num_parts)))
        shares = assign_shares(counts, placement, trainers)
        assert sorted(i for share in shares for i in share) == list(range(sum(counts)))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_balanced_subparts_go_to_their_own_ranks():
    placement = Placement(0, (0, 0, 1, 1), (0, 1))
    assert assign_shares([10, 10, 10, 10], placement, 2) == [range(i, i + 10) for i in range(0, 40, 10)]


def test_ranges_go_to_the_machine_that_owns_most_of_them():
    placement = Placement(0, (0, 0, 1, 1), (1, 0))  # part 0 is served by machine 1
    shares = assign_shares([11, 9, 10, 10], placement, 2)
    assert shares == [range(20, 30), range(30, 40), range(0, 10), range(10, 20)]
    assert local_share([11, 9, 10, 10], placement, 2, shares) == 40


def test_a_machine_without_parts_takes_what_is_left():
    placement = Placement(0, (0, 1, 2), (0, 2))
    shares = assign_shares([6, 6], placement, 1)
    assert shares == [range(0, 4), range(4, 8), range(8, 12)]


def test_an_uneven_mask_still_gives_the_greater_part_of_each_range_to_its_owner():
    placement = Placement(0, tuple(i // 2 for i in range(8)), (0, 1, 2, 3))
    counts = [30, 20, 25, 25, 22, 28, 30, 20]
    shares = assign_shares(counts, placement, 2)
    assert local_share(counts, placement, 2, shares) >= 0.9 * sum(counts)


def test_counting_and_selecting_agree_with_nonzero_across_blocks(monkeypatch):
    monkeypatch.setattr("gnnsys.sampling.select.BLOCK", 7)
    mask = torch.rand(100, generator=torch.Generator().manual_seed(1)) < 0.3
    rows = mask.nonzero().view(-1)
    assert count_true(mask, [0, 10, 10, 63, 100]) == [
        int(mask[a:b].sum()) for a, b in [(0, 10), (10, 10), (10, 63), (63, 100)]
    ]
    for first in range(len(rows) + 1):
        for end in range(first, len(rows) + 1, 3):
            assert torch.equal(select_true(mask, first, end), rows[first:end])


def test_a_range_behaves_as_the_ids_it_stands_for():
    ids, written = IdRange(10**12, 10**12 + 9), torch.arange(10**12, 10**12 + 9)
    assert len(ids) == ids.numel() == 9 and torch.equal(ids.to_tensor(), written)
    for index in (torch.tensor([8, 0, 3]), slice(2, 7), slice(None, None, 4), 5, -1):
        assert torch.equal(ids[index], written[index])
    with pytest.raises(IndexError, match=r"positions must be in \[0, 9\)"):
        ids[torch.tensor([9])]


# -- graphs in memory --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> Graph:
    graph = homogeneous(200, 900)
    graph.set_edge_data("train_mask", torch.rand(900, generator=torch.Generator().manual_seed(2)) < 0.5)
    graph.set_node_data("many_mask", torch.rand(200, 3, generator=torch.Generator().manual_seed(3)) < 0.2)
    return graph


def ranks(world_size):
    return [Placement(rank, (0,) * world_size, ()) for rank in range(world_size)]


def test_ranks_share_a_mask_in_memory(graph):
    chosen = graph.node_data[NODE]["train_mask"].nonzero().view(-1)
    seeds = [split(graph, "train", placement=place) for place in ranks(3)]
    assert torch.equal(torch.cat([s.ids for s in seeds]), chosen)
    assert {s.largest for s in seeds} == {-(-chosen.numel() // 3)} and {s.total for s in seeds} == {chosen.numel()}
    assert torch.equal(split(graph, "train_mask").ids, chosen) and split(graph).type == NODE


def test_masks_ids_and_everything_may_be_split(graph):
    mask = graph.node_data[NODE]["train_mask"]
    assert torch.equal(split(graph, mask).ids, mask.nonzero().view(-1))
    assert split(graph, [7, 3, 5], placement=ranks(2)[0]).ids.tolist() == [3]
    assert split(graph, torch.tensor([7, 3, 5]), placement=ranks(2)[1]).ids.tolist() == [5, 7]
    for nothing in ([], torch.tensor([])):
        assert len(split(graph, nothing)) == 0 and split(graph, nothing, placement=ranks(2)[1]).largest == 0
    column = graph.node_data[NODE]["many_mask"][:, 2].nonzero().view(-1)
    assert torch.equal(split(graph, "many", column=2).ids, column)
    everything = split(graph, None, placement=ranks(3)[2])
    assert isinstance(everything.ids, IdRange) and everything.ids.to_tensor().tolist() == list(range(133, 200))


def test_bytes_are_a_mask_where_they_are_0_and_1_and_refused_where_they_are_not(tmp_path):
    """Splits numbered 0, 1, 2 and small ids are bytes as well."""
    graph, bits = homogeneous(40, 100), torch.arange(40).remainder(3).eq(1)
    numbers = torch.arange(40).remainder(3).byte()
    graph.set_node_data("bits", bits.byte())
    graph.set_node_data("numbers", numbers)
    many = torch.stack([bits.byte(), numbers], 1)
    for what, column in ((bits.byte(), None), (bits.byte().numpy(), None), ("bits", None), (many, 0)):
        assert torch.equal(split(graph, what, column=column).ids, bits.nonzero().view(-1))
    for what, column in ((numbers, None), (numbers.numpy(), None), ("numbers", None), (many, 1)):
        with pytest.raises(ValueError, match=r"(the mask|'numbers' of 'node') must be a mask.* got torch.uint8 with 2"):
            split(graph, what, column=column)
    with machines(graph, tmp_path / "parts", 2, machine_of_part=[0, 0]) as (parts,):
        assert len(split(parts, "bits")) == int(bits.sum())
        with pytest.raises(ValueError, match="'numbers' of 'node' must be a mask"):
            split(parts, "numbers")


def test_a_stored_mask_of_integers_is_a_mask_in_memory_and_on_parts_and_other_numbers_are_none(tmp_path):
    graph, bits = homogeneous(40, 100), torch.arange(40).remainder(3).eq(1)
    chosen = bits.nonzero().view(-1)
    graph.set_node_data("train_mask", bits.long())
    graph.set_node_data("fold_mask", torch.arange(40).remainder(3) - 1)
    graph.set_node_data("soft_mask", bits.float())
    with machines(graph, tmp_path / "parts", 2, machine_of_part=[0, 0]) as (parts,):
        for where, ids in ((graph, chosen), (parts, None)):
            found = [split(where, "train").ids, resolve_nodes(where, "train")[1]]
            assert torch.equal(*found) and found[0].numel() == chosen.numel()
            assert ids is None or torch.equal(found[0], ids)
            for name, words in (
                ("fold", r"'fold_mask' of 'node' must be a mask.* got torch.int64 with -1.*as bools"),
                ("soft", r"'soft_mask' of 'node' must be a mask.* got torch.float32 \[[0-9]+\]: store rows.bool\(\)"),
            ):
                for take in (split, resolve_nodes):
                    with pytest.raises(ValueError, match=words):
                        take(where, name)


def test_a_mask_given_as_integers_is_refused_and_ids_are_not(graph):
    mask = graph.node_data[NODE]["train_mask"]
    for given in (mask.long(), mask.int(), mask.long().numpy(), mask.long().tolist(), [0] * 200):
        with pytest.raises(ValueError, match=r"ids holds 200 integers, all 0 or 1.*write mask.bool\(\)"):
            split(graph, given)
    with pytest.raises(ValueError, match=r"all 0 or 1, one per edge"):
        split(graph, graph.edge_data[EDGE]["train_mask"].long(), type=EDGE)
    assert split(graph, [0, 1]).ids.tolist() == [0, 1]
    assert split(graph, [1] * 199).total == 199 and split(graph, [1, 0] * 101).total == 202
    assert split(graph, [0] * 199 + [2]).total == 200
    assert split(homogeneous(2, 3), [0, 1]).ids.tolist() == [0, 1]


def test_edges_are_split_by_mask_and_without(graph):
    chosen = graph.edge_data[EDGE]["train_mask"].nonzero().view(-1)
    assert torch.equal(split(graph, "train", type=EDGE).ids, chosen)
    last = split(graph, None, type=EDGE, placement=ranks(4)[3])
    assert isinstance(last.ids, IdRange) and (last.ids.first, last.ids.end, last.largest) == (675, 900, 225)


def test_all_edges_of_a_graph_too_large_for_memory_are_a_range():
    shares = assign_shares([10**12, 2 * 10**12], Placement(0, (0, 1), (0, 1)), 1)
    assert shares == [range(1500 * 10**9), range(1500 * 10**9, 3000 * 10**9)]


def test_a_share_knows_those_of_other_ranks_and_of_other_numbers_of_them(graph):
    for what, type in (("train", NODE), (None, EDGE), ([7, 3, 5, 90], NODE), ("train", EDGE)):
        mine = split(graph, what, type=type, placement=ranks(3)[1])
        for world_size in (1, 2, 5):
            for place in ranks(world_size):
                other, expected = mine.recipe.share(place), split(graph, what, type=type, placement=place)
                assert torch.equal(other.ids[:], expected.ids[:]) and other.largest == expected.largest
                assert other.recipe.digest == mine.recipe.digest
        shares = [mine.recipe.share(place).ids[:] for place in ranks(3)]
        assert [len(share) for share in mine.recipe.shares] == [len(ids) for ids in shares]
        chosen = mine.recipe.chosen()
        assert torch.equal(chosen.ids(0, mine.total)[:], torch.cat(shares))
    assert split(graph, "train").recipe.digest != split(graph, [1, 2]).recipe.digest


def test_what_changes_after_it_was_split_is_noticed(graph):
    mask = torch.arange(200) % 2 == 0
    share = split(graph, mask, placement=ranks(2)[0])
    mask[0] = False
    with pytest.raises(ValueError, match="what was split among the ranks has changed: 100 ids"):
        share.recipe.chosen()


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("dev", {}, "neither 'dev_mask' nor 'dev': it has .*train_mask"),
        ("x", {}, "'x' of 'node' must be a mask"),
        ("many", {}, "column of 'many_mask' of 'node' must be one of 0 to 2"),
        ("train", {"column": 1}, "column of 'train_mask' of 'node' must be None"),
        ("train", {"type": "paper"}, "type must be one of"),
        (torch.ones(5, dtype=torch.bool), {}, "a row for each of 200 'node', got 5"),
        ([1, 200], {}, "200"),
    ],
)
def test_what_cannot_be_split_is_explained(graph, what, options, words):
    with pytest.raises(ValueError, match=words):
        split(graph, what, **options)


def test_the_type_is_found_where_one_has_the_mask_and_asked_for_where_it_is_not():
    graph = heterogeneous()
    graph.set_node_data("val_mask", torch.arange(17) % 2 == 0, "paper")
    assert split(graph, "valid").type == "paper" and split(graph, "val").ids.tolist() == list(range(0, 17, 2))
    with pytest.raises(ValueError, match="type must be given: no node type has 'train'"):
        split(graph, "train")
    with pytest.raises(ValueError, match="type must be given, one of"):
        split(graph, None)


# -- graphs in parts ---------------------------------------------------------------------------------------------------


def test_alone_every_part_is_counted_here(graph, tmp_path):
    write_parts(graph, random_assignment(graph, 3, 2), tmp_path / "parts")
    with init(process_group=False) as session:
        opened = session.open(tmp_path / "parts")
        ids = opened.original_ids(split(opened, "train").ids)
        assert sorted(ids.tolist()) == graph.node_data[NODE]["train_mask"].nonzero().view(-1).tolist()
        write_parts(graph, random_assignment(graph, 3, 2, seed=5), tmp_path / "others")
        others = session.open(tmp_path / "others")
        assert split(others, None).recipe.digest != split(opened, None).recipe.digest  # ids mean other nodes there
        edges = opened.original_edge_ids(split(opened, "train", type=EDGE).ids)
        assert sorted(edges.tolist()) == graph.edge_data[EDGE]["train_mask"].nonzero().view(-1).tolist()


@pytest.mark.parametrize("machine_of_part", [(0, 0, 1), (1, 0, 1), (1, 1, 1)])
def test_ranks_of_two_machines_ask_each_other_for_what_they_have_not(graph, tmp_path, machine_of_part):
    write_parts(graph, random_assignment(graph, 3, 2), tmp_path / "parts")
    servers = [GraphServer(machine) for machine in range(2)]
    peers = {machine: server.start()[0] for machine, server in enumerate(servers)}
    for machine, server in enumerate(servers):
        server.open(str(tmp_path / "parts"), [p for p, owner in enumerate(machine_of_part) if owner == machine])
    seen: dict[str, list[int]] = {"train": [], "edges": [], "many": [], "written": []}
    machine_of_rank = (0, 0, 1)
    try:
        for rank, machine in enumerate(machine_of_rank):
            with Client(peers, sender=rank, incarnation=1) as client:
                parts = open_parts(tmp_path / "parts", verify=False)
                store = Store(machine_of_part=machine_of_part, machine=machine, client=client, rank=rank, world_size=3)
                opened = DistGraph(parts, store, client, machine, machine_of_part)
                opened.placement = Placement(rank, machine_of_rank, machine_of_part)
                share = split(opened, "train")
                assert len(share) in (share.largest, share.largest - 1)
                assert torch.equal(share.ids, share.ids.sort().values)
                seen["train"] += opened.original_ids(share.ids).tolist()
                seen["edges"] += opened.original_edge_ids(split(opened, "train", type=EDGE).ids).tolist()
                seen["many"] += opened.original_ids(split(opened, "many", column=1).ids).tolist()
                opened.set_node_data("own_mask", torch.arange(200) % 3 == 0, order="global")
                seen["written"] += split(opened, "own").ids.tolist()
                with pytest.raises(ValueError, match="must be a mask"):
                    split(opened, "x")
    finally:
        for server in servers:
            server.close()
    assert sorted(seen["train"]) == graph.node_data[NODE]["train_mask"].nonzero().view(-1).tolist()
    assert sorted(seen["edges"]) == graph.edge_data[EDGE]["train_mask"].nonzero().view(-1).tolist()
    assert sorted(seen["many"]) == graph.node_data[NODE]["many_mask"][:, 1].nonzero().view(-1).tolist()
    assert sorted(seen["written"]) == list(range(0, 200, 3))
