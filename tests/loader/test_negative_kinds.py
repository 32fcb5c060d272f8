"""Kinds of negatives: each against its definition, the same on parts, and how often a batch waits for look-ups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnsys.comm import Client, Kind, Pending
from gnnsys.graph import EDGE, Graph
from gnnsys.loader import (
    DegreeNegatives,
    HardNegatives,
    JointNegatives,
    LinkEnd,
    LinkNeighborLoader,
    NegativeKind,
    NegativeSampling,
    NodeDrawer,
    ScoredNegatives,
    UniformNegatives,
    supervision_edges,
)
from gnnsys.sampling import DistGraph, NeighborSampler
from gnnsys.seeds import Seeds
from tests.loader.test_dist_links import assert_same_batches
from tests.sampling.machines import REV_WRITES, WRITES, homogeneous, machines, typed

LINKS = 40


def all_equal(ends: Tensor, nodes: Tensor) -> Tensor:
    """Scores that do not depend on how nodes are named; ties go to the node that was drawn first."""
    return torch.zeros(ends.numel(), nodes.numel())


def kinds(num_nodes: int) -> dict[str, Any]:
    candidates = torch.arange(LINKS * 3).view(LINKS, 3) % num_nodes
    candidates[::4, 1:] = -1
    candidates[1] = -1
    return {
        "degree": DegreeNegatives(0.5),
        "joint": "joint",
        "joint by degree": JointNegatives(DegreeNegatives()),
        "in_batch": "in_batch",
        "hard": HardNegatives(candidates),
        "scored": ScoredNegatives(all_equal, 16),
    }


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Iterator[tuple[Graph, list[DistGraph]]]:
    graph = homogeneous()
    candidates = torch.randint(0, 120, (900, 4), generator=torch.Generator().manual_seed(9))
    graph.set_edge_data("hard", candidates)
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", 3, machine_of_part=[0, 1, 1]) as graphs:
        yield graph, graphs


@pytest.fixture(scope="module")
def parted_types(tmp_path_factory) -> Iterator[tuple[Graph, DistGraph]]:
    graph = typed()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", 4, machine_of_part=[0, 1, 0, 1]) as graphs:
        yield graph, graphs[1]


def test_batches_of_every_kind_are_those_of_one_process(parted, parted_types) -> None:
    graph, (mine, _) = parted
    links = graph.edge_index()[:, :LINKS]
    names = mine.from_original(links)
    of_types, typed_mine = parted_types
    writes = of_types.edge_index(WRITES)[:, :LINKS]
    typed_names = typed_mine.from_original(writes, WRITES)
    for turn, (mode, amount) in enumerate((("binary", 1.5), ("triplet", 2))):
        for number, kind in enumerate(kinds(90).values()):  # every kind in both modes, disjoint in one of them
            options = {"batch_size": 20, "shuffle": True, "disjoint": (turn + number) % 2 == 0, "num_threads": 0}
            options["neg_sampling"] = NegativeSampling(mode, amount, kind=kind)
            theirs = LinkNeighborLoader(graph, [3, 2], edge_label_index=links, **options)
            ours = LinkNeighborLoader(mine, [3, 2], edge_label_index=names, **options)
            assert_same_batches(ours, theirs, mine)
            theirs = LinkNeighborLoader(of_types, [3], edge_label_index=(WRITES, writes), **options)
            ours = LinkNeighborLoader(typed_mine, [3], edge_label_index=(WRITES, typed_names), **options)
            assert_same_batches(ours, theirs, typed_mine)


def test_hard_negatives_of_an_array_of_edges_are_read_where_they_live(parted) -> None:
    graph, (mine, _) = parted
    ids = torch.arange(0, 900, 7)
    given, options = Seeds(mine.from_global(ids, EDGE), EDGE, ids.numel(), 900), {"batch_size": 50, "num_threads": 0}
    original = Seeds(mine.original_edge_ids(ids), EDGE, ids.numel(), 900)
    for mode in ("binary", "triplet"):
        negatives = NegativeSampling(mode, 2, kind=HardNegatives("hard"))
        theirs = LinkNeighborLoader(graph, [2], edge_label_index=original, neg_sampling=negatives, **options)
        ours = LinkNeighborLoader(mine, [2], edge_label_index=given, neg_sampling=negatives, **options)
        assert_same_batches(ours, theirs, mine)


def test_local_negatives_depend_on_the_parts_and_not_on_who_serves_them(parted, tmp_path: Path) -> None:
    graph, (mine, _) = parted
    links = graph.edge_index()[:, ::9]
    for kind in ("local", "local_joint"):
        options = {"neg_sampling": NegativeSampling("triplet", 5, kind=kind), "batch_size": 20, "num_threads": 0}
        with machines(graph, tmp_path / kind, 3, machine_of_part=[0, 0, 0]) as (alone,):
            expected = LinkNeighborLoader(alone, [2], edge_label_index=alone.from_original(links), **options)
            ours = LinkNeighborLoader(mine, [2], edge_label_index=mine.from_original(links), **options)
            for a, b in zip(ours, expected, strict=True):
                assert torch.equal(a.n_id, b.n_id) and torch.equal(a.dst_neg_index, b.dst_neg_index)
                part = mine.book.part_of(a.n_id)
                own = part[a.dst_pos_index]
                assert torch.equal(part[a.dst_neg_index], own[:, None].expand(-1, 5))
                sets = [a.dst_neg_index[own == p].unique(dim=0).shape[0] for p in range(3) if bool((own == p).any())]
                assert max(sets) == 1 if kind == "local_joint" else max(sets) > 1  # one set for all links of a part


# -- distributions -----------------------------------------------------------------------------------------------------


def drawn(graph: Any, kind: Any, links: Tensor, amount: int = 200, **options: Any) -> Tensor:
    """All negative destinations of one batch, [num_links, amount], as the graph names them."""
    negatives = NegativeSampling("triplet", amount, kind=kind)
    (batch,) = LinkNeighborLoader(
        graph,
        [0],
        edge_label_index=graph.from_global(links),
        neg_sampling=negatives,
        batch_size=links.shape[1],
        **options,
    )
    return batch.n_id[batch.dst_neg_index].view(links.shape[1], amount)


def chi_square(nodes: Tensor, weight: Tensor) -> float:
    """Normalised: about 0 +- 1 where nodes are drawn in proportion to `weight`."""
    assert bool((weight[nodes] > 0).all())
    possible = weight > 0
    expected = weight[possible].double() / weight.sum() * nodes.numel()
    counts = torch.bincount(nodes.reshape(-1), minlength=weight.numel())[possible]
    degrees = int(possible.sum()) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


def test_each_kind_draws_by_its_definition(parted) -> None:
    graph, (mine, _) = parted
    links = graph.edge_index()[:, :100]
    degrees = graph.csc().in_degrees()
    assert abs(chi_square(drawn(graph, "uniform", links), torch.ones(120))) < 4
    for power in (0.0, 0.75, 2.0):
        weight = torch.where(degrees > 0, degrees.double() ** power, 0)
        assert abs(chi_square(drawn(graph, DegreeNegatives(power), links), weight)) < 4, power
    assert chi_square(drawn(graph, DegreeNegatives(2.0), links), degrees.double()) > 20  # the test can fail
    own = torch.bincount(links[1], minlength=120)
    others = own.double() - (own.double() / 100)  # of links i != j, each pair as often
    assert abs(chi_square(drawn(graph, "in_batch", links), others)) < 6
    joint = drawn(graph, "joint", links)
    assert bool((joint == joint[:1]).all()) and len(joint[0].unique()) > 60
    sets = torch.cat([drawn(graph, "joint", links, seed=seed)[0] for seed in range(60)])
    assert abs(chi_square(sets, torch.ones(120))) < 4
    names = mine.from_original(links).ids
    local = drawn(mine, "local", names)
    for part in range(3):
        here = mine.book.part_range(part)
        mask = torch.zeros(120)
        mask[here.start : here.stop] = 1
        assert abs(chi_square(local[mine.book.part_of(names[1]) == part], mask)) < 4


def test_in_batch_negatives_are_of_other_links(parted) -> None:
    graph, _ = parted
    links = torch.stack([torch.arange(30), torch.arange(30) + 50])  # all ends differ
    found = drawn(graph, "in_batch", links)
    assert not bool((found == links[1][:, None]).any()) and set(found.reshape(-1).tolist()) == set(range(50, 80))
    alone = drawn(graph, "in_batch", links[:, :1])
    assert abs(chi_square(alone, torch.ones(120))) < 4


def test_hard_negatives_are_candidates_and_uniform_where_there_are_none(parted) -> None:
    graph, _ = parted
    links = graph.edge_index()[:, :3]
    found = drawn(graph, HardNegatives([[7, -1, 9], [-1, 5, -1], [-1, -1, -1]]), links, amount=2000)
    weight = torch.zeros(120)
    weight[[7, 9]] = 1
    assert abs(chi_square(found[0], weight)) < 4 and set(found[1].tolist()) == {5}
    assert abs(chi_square(found[2], torch.ones(120))) < 4


def test_scored_negatives_are_the_hardest_of_the_pool(parted) -> None:
    graph, _ = parted
    links = graph.edge_index()[:, :20]
    pools = []

    def scores(ends: Tensor, nodes: Tensor) -> Tensor:
        assert torch.equal(ends, links[0])
        pools.append(nodes)
        return -((ends[:, None] - nodes[None]) ** 2).float()

    found = drawn(graph, ScoredNegatives(scores, 50), links, amount=3, num_threads=0)
    (pool,) = pools
    for (src, dst), nodes in zip(links.t().tolist(), found.tolist(), strict=True):
        ranked = sorted((n for n in pool.tolist() if n != dst), key=lambda n: (n - src) ** 2)
        assert [(n - src) ** 2 for n in nodes] == [(n - src) ** 2 for n in ranked[:3]]


def test_scored_negatives_are_never_the_links_own_nodes(parted) -> None:
    graph, _ = parted
    links = graph.edge_index()[:, :20]

    def last(ends: Tensor, nodes: Tensor) -> Tensor:
        return torch.where(nodes < 60, -torch.inf, 0.0)[None].expand(ends.numel(), -1)

    def own_first(ends: Tensor, nodes: Tensor) -> Tensor:
        return (nodes[None] == links[1][:, None]).float()

    for scores in (all_equal, own_first, last):
        for pool in (2, 128, 600):  # the last has every node several times
            found = drawn(graph, ScoredNegatives(scores, pool), links, amount=min(pool, 150))
            assert not bool((found == links[1][:, None]).any()), (scores.__name__, pool)

    def undefined(ends: Tensor, nodes: Tensor) -> Tensor:
        return torch.zeros(ends.numel(), nodes.numel()).index_fill_(0, torch.tensor([3, 5]), torch.nan)

    with pytest.raises(ValueError, match="got NaN for 2 of 20 links: return -inf"):
        drawn(graph, ScoredNegatives(undefined, 8), links, amount=2, num_threads=0)


def test_pairs_keep_the_end_that_is_not_drawn(parted) -> None:
    graph, _ = parted
    links = graph.edge_index()[:, :30]
    for kind, corrupt, kept in (
        ("joint", None, 0),
        ("uniform", "src", 1),
        ("uniform", "dst", 0),
        ("in_batch", "src", 1),
    ):
        negatives = NegativeSampling("binary", 1.5, kind=kind, corrupt=corrupt)
        (batch,) = LinkNeighborLoader(graph, [0], edge_label_index=links, neg_sampling=negatives, batch_size=30)
        pairs = batch.n_id[batch.edge_label_index]
        assert torch.equal(pairs[:, :30], links) and pairs.shape[1] == 75
        of_link = torch.arange(45) % 30
        assert torch.equal(pairs[kept, 30:], links[kept][of_link])
        assert not torch.equal(pairs[1 - kept, 30:], links[1 - kept][of_link])


# -- how often other machines are waited for ---------------------------------------------------------------------------


@contextmanager
def turns_counted(graph: DistGraph, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many messages had to be waited for in a row: one entry each time that something was waited for which had been
    asked since the last time. What was asked earlier is on its way already."""
    turns: list[int] = []
    asked: list[tuple[Pending, int]] = []  # with the number of turns when it was asked
    request, receive = Client.request, Pending._receive

    def asks(self: Client, machine: int, kind: Kind, *rest: Any, **options: Any) -> Pending:
        pending = request(self, machine, kind, *rest, **options)
        if self is graph.client and kind != Kind.SAMPLE:
            asked.append((pending, len(turns)))
        return pending

    def waits(self: Pending, *rest: Any) -> Any:
        if any(self is pending and turn == len(turns) for pending, turn in asked):
            turns.append(len(asked))
        return receive(self, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Client, "request", asks)
        patched.setattr(Pending, "_receive", waits)
        yield turns


def test_a_batch_waits_for_look_ups_twice_at_most(parted, parted_types, monkeypatch) -> None:
    graph, (mine, _) = parted
    pairs = mine.from_original(graph.edge_index()[:, :LINKS])
    own = mine.book.part_range(0, EDGE)
    at_home = Seeds(mine.from_global(range(own.start, own.start + LINKS), EDGE), EDGE, LINKS, 900)
    anywhere = Seeds(mine.from_global(range(0, 900, 23), EDGE), EDGE, LINKS, 900)
    assert len(anywhere) == LINKS
    by_edge = {"by edge": HardNegatives("hard")}
    for given, most in ((pairs, 1), (at_home, 1), (anywhere, 2)):
        more = {} if given is pairs else by_edge
        for name, kind in {"none": None, "uniform": "uniform", "local": "local", **kinds(120), **more}.items():
            negatives = None if kind is None else NegativeSampling("triplet", 3, kind=kind)
            options = {"neg_sampling": negatives, "batch_size": LINKS, "fetch": [], "num_threads": 0}
            loader = LinkNeighborLoader(mine, [2], edge_label_index=given, **options)
            with turns_counted(mine, monkeypatch) as turns:
                assert len(list(loader)) == 1
            two = "degree" in name or name == "by edge"  # what these have looked up says what to look up next
            assert 1 <= len(turns) <= (2 if two else most), (name, given)
    _, typed_mine = parted_types
    anywhere = Seeds(typed_mine.from_global(range(0, 300, 3), WRITES), WRITES, 100, 300)
    loader = LinkNeighborLoader(
        typed_mine, [2], edge_label_index=anywhere, neg_sampling="binary", batch_size=50, fetch=[], num_threads=0
    )
    with turns_counted(typed_mine, monkeypatch) as turns:
        assert len(list(loader)) == 2
    assert 2 <= len(turns) <= 4


def test_nothing_is_asked_where_everything_is_here(parted, tmp_path: Path, monkeypatch) -> None:
    graph, (mine, _) = parted
    links = graph.edge_index()[:, :LINKS]
    with machines(graph, tmp_path / "alone", 3, machine_of_part=[0, 0, 0]) as (alone,):
        for kind in ["uniform", "local", *kinds(120).values()]:
            negatives = NegativeSampling("binary", kind=kind)
            loader = LinkNeighborLoader(
                alone, [2], edge_label_index=alone.from_original(links), neg_sampling=negatives, num_threads=0
            )
            with turns_counted(alone, monkeypatch) as turns:
                next(iter(loader))
            assert turns == []
    own = mine.book.part_range(0, EDGE)
    at_home = Seeds(mine.from_global(range(own.start, own.start + LINKS), EDGE), EDGE, LINKS, 900)
    for kind in ("local", "local_joint", "in_batch"):  # their names need no look-up: what is left is of the links
        options = {"neg_sampling": NegativeSampling("binary", 2, kind=kind), "batch_size": LINKS, "fetch": []}
        with turns_counted(mine, monkeypatch) as turns:
            loader = LinkNeighborLoader(
                mine, [2], edge_label_index=at_home, disjoint=True, exclude_supervision=False, num_threads=0, **options
            )
            assert len(list(loader)) == 1
        assert turns == []


def test_a_process_keeps_a_sum_for_64_nodes_and_nothing_of_all() -> None:
    graph = homogeneous(10_000, 30_000)
    drawer = DegreeNegatives().prepare(LinkEnd(graph, EDGE, "node", "dst"))
    kept = [value for name, value in vars(drawer).items() if isinstance(value, Tensor) and name != "_indptr"]
    assert sum(rows.numel() for rows in kept) == -(-10_000 // 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "jiont"}, "did you mean 'joint'"),
        ({"kind": 3}, "kind must be one of"),
        ({"kind": "joint", "corrupt": "tail"}, "corrupt must be 'src', 'dst' or 'both'"),
        ({"kind": "joint", "corrupt": "both"}, "draws one end of a pair"),
        ({"mode": "triplet", "corrupt": "src"}, "triplets have other destinations"),
        ({"kind": "in_batch", "dst_weight": torch.ones(120)}, "no use for src_weight"),
        ({"kind": "degree", "corrupt": "src"}, "DegreeNegatives draws destinations"),
        ({"kind": HardNegatives("hard")}, "'hard' is by edge, and links were given by their ends"),
        ({"kind": HardNegatives("herd")}, "did you mean 'hard'"),
        ({"kind": HardNegatives(torch.zeros(7, 2, dtype=torch.int64))}, "must have a row per link, 40, got"),
        ({"kind": HardNegatives(torch.zeros(LINKS, 2))}, "candidates must be integers"),
    ],
)
def test_bad_use_is_refused_in_one_line(parted, given: dict, message: str) -> None:
    graph, _ = parted
    with pytest.raises(ValueError, match=message) as caught:
        negatives = NegativeSampling(**{"mode": "binary", **given})
        LinkNeighborLoader(graph, [2], edge_label_index=graph.edge_index()[:, :LINKS], neg_sampling=negatives)
    assert "\n" not in str(caught.value)


def test_kinds_that_do_not_know_times_are_refused_in_time(parted) -> None:
    graph, _ = parted
    times = {"time_attr": "t", "edge_label_time": torch.full((LINKS,), 20)}
    links = graph.edge_index()[:, :LINKS]
    with pytest.raises(ValueError, match="does not know that nodes"):
        negatives = NegativeSampling("triplet", kind="in_batch")
        LinkNeighborLoader(graph, [2], edge_label_index=links, neg_sampling=negatives, **times)
    negatives = NegativeSampling("triplet", 50, kind="joint")
    (batch,) = LinkNeighborLoader(graph, [2], edge_label_index=links, neg_sampling=negatives, batch_size=LINKS, **times)
    assert bool((graph.node_data["node"]["t"][batch.n_id[batch.dst_neg_index]] <= 20).all())


def test_a_loader_of_another_kind_does_not_take_up_the_state(parted) -> None:
    graph, _ = parted

    def make(kind: Any) -> LinkNeighborLoader:
        negatives = NegativeSampling("triplet", kind=kind)
        return LinkNeighborLoader(graph, [2], neg_sampling=negatives, batch_size=100)

    state = make("joint").state_dict()
    make("joint").load_state_dict(state)
    with pytest.raises(ValueError):
        make("in_batch").load_state_dict(state)


class OwnKind(NegativeKind):
    """A user's kind that says nothing of itself."""

    def __init__(self, share: float, rows: Any = None) -> None:
        self.share, self.rows, self.of, self.call = share, rows, DegreeNegatives(share), all_equal

    def prepare(self, end: LinkEnd) -> NodeDrawer:
        return UniformNegatives().prepare(end)


def test_a_state_tells_kinds_by_their_values(parted) -> None:
    graph, _ = parted

    def make(kind: Any) -> LinkNeighborLoader:
        negatives = NegativeSampling("triplet", 2, kind=kind)
        links = graph.edge_index()[:, :LINKS]
        return LinkNeighborLoader(graph, [2], edge_label_index=links, neg_sampling=negatives, batch_size=10)

    rows = np.arange(LINKS * 2).reshape(LINKS, 2)
    same = [HardNegatives(of) for of in (rows, torch.from_numpy(rows), torch.from_numpy(rows).int(), rows.tolist())]
    cases = [
        (same, [HardNegatives(rows[::-1].copy()), HardNegatives(rows[:, ::-1].copy()), "joint"]),
        ([OwnKind(0.5), OwnKind(0.5)], [OwnKind(0.25), OwnKind(0.5, rows), UniformNegatives()]),
        ([OwnKind(1, rows), OwnKind(1, torch.from_numpy(rows))], [OwnKind(1, rows + 1), OwnKind(1, rows[1:])]),
        ([JointNegatives(DegreeNegatives(0.5))] * 2, [JointNegatives(DegreeNegatives(0.25)), JointNegatives()]),
    ]
    for equal, others in cases:
        state = json.loads(json.dumps(make(equal[0]).state_dict()))
        for kind in equal:
            make(kind).load_state_dict(state)
        for kind in others:
            with pytest.raises(ValueError, match="this state is of a loader with"):
                make(kind).load_state_dict(state)


def test_supervision_edges_are_found_as_in_the_version_before(parted_types) -> None:
    graph, mine = parted_types
    src, dst = graph.edge_index(WRITES)[:, ::7]
    known = graph.edge_index(WRITES).t().tolist()
    found = supervision_edges(NeighborSampler(graph, [2]), WRITES, src, dst, REV_WRITES)
    wanted = set(zip(src.tolist(), dst.tolist(), strict=True))
    for edge_type in (WRITES, REV_WRITES):
        csc = graph.csc(edge_type)
        ids = found[edge_type] if csc.edge_ids is None else csc.edge_ids[found[edge_type]]
        assert sorted(ids.tolist()) == [i for i, ends in enumerate(known) if tuple(ends) in wanted]
    names = mine.global_ids(src, "author"), mine.global_ids(dst, "paper")
    assert list(supervision_edges(NeighborSampler(mine, [2]), WRITES, *names, None)) == [WRITES]
