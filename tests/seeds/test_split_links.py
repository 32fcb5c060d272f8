"""gnnsys.split_links: sides of links, the same in memory and on parts, and that messages never pass held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import gnnsys
from gnnsys.graph import EDGE, EdgeType, Graph
from gnnsys.partition import Placement
from gnnsys.sampling import DistGraph, find_filter, service
from gnnsys.sampling.kept_edges import KEPT_COUNTS, KEPT_IDS
from tests.sampling.machines import CITES, REV_WRITES, WRITES, homogeneous, machines, typed

SIDES = ("train", "val", "test")
OPTIONS = {
    "random": {"val": 0.2, "test": 0.1},
    "disjoint": {"val": 0.2, "test": 0.1, "disjoint": 0.4, "seed": 3},
    "time": {"time": "et", "val_from": 12, "test_from": 17},
    "time, disjoint": {"time": "et", "val_from": 12, "test_from": 17, "disjoint": 0.5},
}


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Iterator[tuple[Graph, list[DistGraph]]]:
    graph = homogeneous()
    with machines(graph, tmp_path_factory.mktemp("links") / "p", 4, machine_of_part=[0, 1, 1, 2]) as graphs:
        yield graph, graphs


@pytest.fixture(scope="module")
def parted_types(tmp_path_factory) -> Iterator[tuple[Graph, list[DistGraph]]]:
    graph = typed()
    graph.set_edge_data("et", graph.edge_data[WRITES]["et"].clone(), REV_WRITES)
    with machines(graph, tmp_path_factory.mktemp("links") / "p", 3, machine_of_part=[0, 1, 1]) as graphs:
        yield graph, graphs


def own(graph: Graph | DistGraph, ids: Tensor, edge_type: EdgeType) -> Tensor:
    found = ids if isinstance(graph, Graph) else graph.original_edge_ids(ids, edge_type)
    return found.sort().values


@pytest.mark.parametrize("kind", OPTIONS)
def test_sides_are_the_same_in_memory_and_on_parts_and_cover_all_links_once(parted, parted_types, kind: str) -> None:
    for (graph, graphs), edge_type in ((parted, EDGE), (parted_types, WRITES)):
        whole = gnnsys.split_links(graph, edge_type, **OPTIONS[kind])
        sides = {side: whole.links(side).ids for side in SIDES}
        passed = {side: gnnsys.split(graph, whole.messages(side), type=edge_type).ids for side in SIDES}
        held = torch.cat([sides["val"], sides["test"]])
        everything = torch.cat([passed["val"], held]).sort().values
        assert torch.equal(everything, torch.arange(graph.num_edges(edge_type)))
        assert torch.equal(passed["test"].sort().values, torch.cat([passed["val"], sides["val"]]).sort().values)
        if "disjoint" in OPTIONS[kind]:
            assert not set(passed["train"].tolist()) & set(sides["train"].tolist()) and len(sides["train"])
            both = torch.cat([passed["train"], sides["train"]])
            assert torch.equal(both.sort().values, passed["val"].sort().values)
        else:
            assert torch.equal(passed["train"].sort().values, sides["train"].sort().values)
        for mine in (graphs[0], graphs[-1]):
            split = gnnsys.split_links(mine, edge_type, **OPTIONS[kind])
            for side in SIDES:
                assert torch.equal(own(mine, split.links(side).ids, edge_type), sides[side].sort().values), side


def test_shares_of_ranks_are_disjoint_and_cover_a_side(parted) -> None:
    graph, graphs = parted
    expected = gnnsys.split_links(graph, val=0.2).links("val").ids
    machine_of_rank, machine_of_part = (0, 0, 1, 2), (0, 1, 1, 2)
    shares = []
    for rank, machine in enumerate(machine_of_rank):
        placement = Placement(rank, machine_of_rank, machine_of_part)
        shares.append(gnnsys.split_links(graphs[machine], val=0.2).links("val", placement=placement))
    found = torch.cat([share.ids for share in shares])
    assert torch.equal(own(graphs[0], found, EDGE), expected.sort().values)
    assert {share.largest for share in shares} == {max(map(len, shares))}


def test_a_link_its_parallels_and_its_reverse_are_on_one_side() -> None:
    links = torch.randint(0, 500, (2, 20_000), generator=torch.Generator().manual_seed(0))
    graph = Graph.from_edge_index(torch.cat([links, links, links.flip(0)], 1), 500)
    side = torch.zeros(60_000, dtype=torch.int64)
    split = gnnsys.split_links(graph, val=0.3, test=0.1)
    for number, name in enumerate(SIDES):
        side[split.links(name).ids] = number
    assert torch.equal(side[:20_000], side[20_000:40_000]) and torch.equal(side[:20_000], side[40_000:])
    index = {("a", "to", "b"): links, ("b", "rev_to", "a"): links.flip(0)}
    typed_graph = Graph.from_edge_indices(index, {"a": 500, "b": 500})
    split = gnnsys.split_links(typed_graph, ("a", "to", "b"), val=0.3, test=0.1)
    kept = [gnnsys.split(typed_graph, split.messages("train"), type=t).ids for t in index]
    assert torch.equal(kept[0].sort().values, kept[1].sort().values) and 0 < len(kept[0]) < 20_000


def test_sides_are_as_large_as_was_asked_for_and_another_seed_is_another_split() -> None:
    links = torch.randint(0, 3000, (2, 40_000), generator=torch.Generator().manual_seed(0)).unique(dim=1)
    links = links[:, links[0] < links[1]]
    graph = Graph.from_edge_index(links, 3000)
    num_links = links.shape[1]
    first, second = (gnnsys.split_links(graph, val=0.2, test=0.1, disjoint=0.3, seed=seed) for seed in (0, 1))
    for name, share in (("val", 0.2), ("test", 0.1), ("train", 0.7 * 0.3)):
        spread = 5 * (num_links * share * (1 - share)) ** 0.5
        assert abs(len(first.links(name)) - share * num_links) < spread, name
        common = set(first.links(name).ids.tolist()) & set(second.links(name).ids.tolist())
        assert abs(len(common) - share**2 * num_links) < spread
    assert torch.equal(first.links("val").ids, gnnsys.split_links(graph, val=0.2, test=0.1).links("val").ids)


def test_by_time_the_last_links_are_held_out(parted) -> None:
    graph, _ = parted
    times = graph.edge_data[EDGE]["et"]
    given = gnnsys.split_links(graph, time="et", val_from=10, test_from=20)
    assert bool((times[given.links("train").ids] < 10).all()) and bool((times[given.links("test").ids] >= 20).all())
    split = gnnsys.split_links(graph, time="et", val=0.2, test=0.1)
    train, val, test = (times[split.links(side).ids] for side in SIDES)
    assert train.max() < val.min() and val.max() < test.min() and len(train) + len(val) + len(test) == 900
    assert 90 <= len(test) <= 90 + int((times == test.min()).sum())


def test_times_are_compared_as_they_are(parted) -> None:
    links = parted[0].edge_index()
    numbers = torch.randperm(900, generator=torch.Generator().manual_seed(1))
    arrays = {
        "float": numbers / 900,
        "double": numbers.double() / 900,
        "negative": numbers / 9 - 200,
        "seconds": numbers + 1_700_000_000,  # float32 would round them
        "large": numbers.float() * 1e20,  # the last plus one is the last
    }
    graph = Graph.from_edge_index(links, 120, edge_data=arrays)
    latest = numbers.argsort()
    for name, times in arrays.items():
        split = gnnsys.split_links(graph, time=name, val=0.2, test=0.1)
        found = [split.links(side).ids.sort().values for side in SIDES]
        expected = [ids.sort().values for ids in (latest[:630], latest[630:810], latest[810:])]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
        assert find_filter(split.messages("val").text) == split.messages("val")
        given = gnnsys.split_links(graph, time=name, val_from=times[latest[630]], test_from=times[latest[810]].item())
        assert all(torch.equal(given.links(s).ids.sort().values, e) for s, e in zip(SIDES, expected, strict=True))
        assert len(gnnsys.split_links(graph, time=name, val=0.1, test=0).links("test")) == 0
    between = gnnsys.split_links(graph, time="float", val_from=0.25, test_from=0.5)
    assert [len(between.links(side)) for side in SIDES] == [225, 225, 450]
    halves = gnnsys.split_links(parted[0], time="et", val_from=9.5, test_from=10**12)
    times = parted[0].edge_data[EDGE]["et"]
    assert len(halves.links("val")) == int((times >= 10).sum()) and len(halves.links("test")) == 0
    nan = arrays["float"].clone()
    nan[3] = torch.nan
    graph.set_edge_data("nan", nan)
    for options in ({"time": "nan"}, {"time": "float", "val_from": torch.nan, "test_from": 1.0}):
        with pytest.raises(ValueError, match="must be numbers, got nan"):
            gnnsys.split_links(graph, **options)


def test_a_mask_without_one_of_the_reverse_type_is_refused(tmp_path) -> None:
    graph = typed()
    graph.set_edge_data("keep", torch.arange(300) % 2 == 0, WRITES)
    graph.set_edge_data("both", torch.arange(300) % 2 == 0, WRITES)
    graph.set_edge_data("both", torch.ones(300, 1, dtype=torch.bool), REV_WRITES)
    graph.set_edge_data("wide", torch.ones(500, 2, dtype=torch.bool), CITES)
    seeds = {"input_nodes": "paper", "batch_size": 90, "num_threads": 0}
    with machines(graph, tmp_path / "p", 2) as (mine, _):
        for of in (graph, mine):
            with pytest.raises(ValueError, match=r"'rev_writes', 'author'\) has none.* one of all true to keep all"):
                gnnsys.NeighborLoader(of, [-1], edge_mask="keep", **seeds)
            with pytest.raises(ValueError, match=r"'wide' of .*'cites'.* got torch.bool \['num_edges', 2\]: store one"):
                gnnsys.NeighborLoader(of, [-1], edge_mask="wide", **seeds)
            (batch,) = gnnsys.NeighborLoader(of, [-1, -1], edge_mask="both", **seeds)
            drawn = {t: own(of, batch.edges[t]["e_id"], t) for t in (WRITES, REV_WRITES)}
            assert bool((drawn[WRITES] % 2 == 0).all()) and bool((drawn[REV_WRITES] % 2).any())


def test_what_another_machine_says_of_kept_edges_is_checked(parted, monkeypatch) -> None:
    _, (mine, *_) = parted
    rule = gnnsys.split_links(mine, val=0.2).messages()
    said = service.answer_kept

    def answers(wanted: int, wrong: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def answer(view: Any, edge_type: EdgeType, what: int, numbers: list[int]) -> Tensor:
            right = said(view, edge_type, what, numbers)
            return wrong(right) if what == wanted else right

        return answer

    counts: list[Callable[[Tensor], Tensor]] = [
        lambda right: torch.cat([right, right]),
        lambda right: right[:0],
        lambda right: -right,
        lambda right: right + 900,
        lambda right: right.double(),
    ]
    ids: list[Callable[[Tensor], Tensor]] = [
        lambda right: right[:-3],
        lambda right: right + 10**9,
        lambda right: right - 900,
        lambda right: right.flip(0),
        lambda right: right[:1].expand(right.numel()).contiguous(),
        lambda right: right.int(),
        lambda right: right[None],
    ]
    cases = [(KEPT_COUNTS, wrong) for wrong in counts] + [(KEPT_IDS, wrong) for wrong in ids]
    for wanted, wrong in cases:
        monkeypatch.setattr(service, "answer_kept", answers(wanted, wrong))
        with pytest.raises(ValueError, match=r"must say of 1 trainers|must name \d+ of its edges, ascending"):
            gnnsys.split(mine, rule, type=EDGE)
    monkeypatch.setattr(service, "answer_kept", said)
    assert len(gnnsys.split(mine, rule, type=EDGE)) > 500


@pytest.mark.parametrize("kind", OPTIONS)
def test_held_out_links_are_never_sampled(parted, parted_types, kind: str) -> None:
    for ((graph, graphs), edge_type), which in product(((parted, EDGE), (parted_types, WRITES)), ("train", "test")):
        whole = gnnsys.split_links(graph, edge_type, **OPTIONS[kind])
        allowed = {t: set(gnnsys.split(graph, whole.messages(which), type=t).ids.tolist()) for t in graph.edge_types}
        mine = graphs[0]
        split = gnnsys.split_links(mine, edge_type, **OPTIONS[kind])
        options = {"batch_size": 100, "exclude_supervision": False, "num_threads": 0}
        loader = gnnsys.LinkNeighborLoader(
            mine, [-1], edge_label_index=split.links(which), edge_mask=split.messages(which), **options
        )
        seen: dict[EdgeType, set[int]] = {t: set() for t in graph.edge_types}
        for batch in loader:
            for t in graph.edge_types:
                seen[t] |= set(mine.original_edge_ids(batch.edges[t]["e_id"], t).tolist())
        assert all(seen[t] <= allowed[t] for t in seen) and len(seen[edge_type]) > 20
        assert edge_type == EDGE or len(seen[CITES]) > 20  # other types pass messages as ever


def test_bad_use_is_refused_in_one_line(parted, parted_types) -> None:
    (graph, graphs), (types, _) = parted, parted_types
    cases = [
        (types, {}, "edge_type must be given"),
        (types, {"edge_type": ("author", "wrote", "paper")}, "does not exist"),
        (types, {"edge_type": WRITES, "reverse_edge_type": CITES}, "must lead from 'paper' to 'author'"),
        (graph, {"val": 1.0}, r"val must be a share in \[0, 1\)"),
        (graph, {"val": 0.6, "test": 0.5}, "must leave links to train with"),
        (graph, {"val_from": 3}, "are times: name the array"),
        (graph, {"time": "et", "val_from": 3}, "go together"),
        (graph, {"time": "et", "val_from": 9, "test_from": 3}, "must not be later"),
        (graph, {"time": "at"}, "have no times 'at'"),
        (graphs[0], {"time": "et"}, "on parts, say from when on"),
        (graphs[0], {"time": "at", "val_from": 3, "test_from": 9}, "have no times 'at'"),
    ]
    for of, options, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            gnnsys.split_links(of, **options)
        assert "\n" not in str(caught.value)
    split = gnnsys.split_links(graph)
    with pytest.raises(ValueError, match="which must be"):
        split.links("holdout")
    with pytest.raises(ValueError, match="is of edges, and 'node' are nodes"):
        gnnsys.split(graph, split.messages(), type="node")
    nested = "links:" + "[" * 3000
    infinite = split.messages().text.replace("0.1", "Infinity")
    for text in (
        "links:[1]",
        nested,
        infinite,
        "mask:" + "x" * 5000,
        'links:[["a","b"],null,0,0.1,0.1,0,null,[0]]',
        "masked:x",
    ):
        with pytest.raises(ValueError, match=r"no split of links|filter of edges"):
            find_filter(text)
    assert find_filter(split.messages("test").text) == split.messages("test")
