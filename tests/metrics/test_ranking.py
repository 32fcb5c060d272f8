"""Ranks of links among all nodes are those of a plain transcription, to the last one, whatever the tiles."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from gnnsys.metrics import KnownLinks, LinkRanks, Ranking, rank_links
from gnnsys.nn import Bilinear, ComplEx, DistMult, Dot, RotatE, TransE

NODES, DIM, KINDS, LINKS = 50, 6, 3, 30
DECODERS = {
    "dot": lambda: Dot(DIM),
    "bilinear": lambda: Bilinear(DIM, KINDS),
    "distmult": lambda: DistMult(DIM, KINDS),
    "complex": lambda: ComplEx(DIM, KINDS),
    "transe l1": lambda: TransE(DIM, KINDS, 1),
    "transe l2": lambda: TransE(DIM, KINDS, 2),
    "rotate": lambda: RotatE(DIM, KINDS),
}


def world(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of which many are equal, and links of which some share an end and a kind."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(NODES, DIM, generator=generator)
    rows[20:40] = rows[:20]
    head, tail = (torch.randint(high, (LINKS,), generator=generator) for high in (6, NODES))
    return rows, head, tail, torch.randint(KINDS, (LINKS,), generator=generator)


def plain(decoder, rows, head, tail, relation, wanted, known) -> list[tuple[int, int]]:
    """One link at a time, by pairs, in float64; `known` as a set of triples, or None."""
    decoder, rows, found = decoder.double(), rows.double(), []
    for h, t, r in zip(head.tolist(), tail.tolist(), relation.tolist(), strict=True):
        kind = torch.full((NODES,), r) if decoder.num_relations else None
        ends = (rows[[h] * NODES], rows) if wanted == "tail" else (rows, rows[[t] * NODES])
        scores, true = decoder(*ends, kind, wanted).tolist(), t if wanted == "tail" else h
        triples = [(h, r, c) if wanted == "tail" else (c, r, t) for c in range(NODES)]
        others = [c for c in range(NODES) if c != true and (known is None or triples[c] not in known)]
        above = sum(scores[c] > scores[true] + 1e-12 for c in others)
        found.append((above, sum(abs(scores[c] - scores[true]) <= 1e-12 for c in others)))
    return found


@pytest.mark.parametrize("wanted", ["tail", "head"])
@pytest.mark.parametrize("name", DECODERS)
def test_ranks_are_those_of_a_plain_transcription_filtered_and_not(name, wanted):
    torch.manual_seed(1)
    decoder, (rows, head, tail, relation) = DECODERS[name](), world()
    kinds = relation if decoder.num_relations else None
    told = relation if kinds is not None else torch.zeros_like(relation)
    triples = set(zip(head.tolist(), told.tolist(), tail.tolist(), strict=True))
    for known, as_set in ((None, None), (KnownLinks(head, tail, kinds), triples)):
        found = rank_links(decoder, rows, head, tail, kinds, wanted=wanted, known=known, tile=(16, 32))
        want = plain(copy.deepcopy(decoder), rows, head, tail, told, wanted, as_set)
        assert list(zip(found.above.tolist(), found.same.tolist(), strict=True)) == want
    assert any(same for _, same in want), "equal rows are ties"


@pytest.mark.parametrize("name", DECODERS)
def test_a_rank_does_not_depend_on_the_links_beside_it(name):
    torch.manual_seed(2)
    decoder, (rows, head, tail, relation) = DECODERS[name](), world(3)
    rows = (rows * 4).round() / 10  # many scores that are equal but for their rounding
    kinds = relation if decoder.num_relations else None
    known = KnownLinks(head, tail, kinds)
    whole = rank_links(decoder, rows, head, tail, kinds, known=known)
    for share in (slice(0, None, 2), slice(1, None, 2), slice(0, 0)):
        some = rank_links(decoder, rows, head[share], tail[share], None if kinds is None else kinds[share], known=known)
        assert torch.equal(some.above, whole.above[share]) and torch.equal(some.same, whole.same[share])


def test_rows_may_be_a_table_that_is_read_a_tile_at_a_time():
    rows, head, tail, relation = world()
    decoder, asked = DistMult(DIM, KINDS), []

    class Table:
        shape = rows.shape

        def __getitem__(self, ids: Tensor) -> Tensor:
            asked.append(ids.numel())
            return rows[ids]

    found = rank_links(decoder, Table(), head, tail, relation, tile=(32, 7))
    assert torch.equal(found.above, rank_links(decoder, rows, head, tail, relation).above)
    assert max(asked) == LINKS and len(asked) > 8


def test_links_known_several_times_or_of_kinds_never_seen_are_left_out_once_or_not_at_all():
    known = KnownLinks(torch.tensor([1, 1, 1, 2]), torch.tensor([4, 4, 3, 5]), torch.tensor([0, 0, 1, 0]))
    places, ends = known.of(torch.tensor([2, 1, 1, 1, 9]), torch.tensor([0, 0, 1, 2, 0]), "tail")
    assert places.tolist() == [0, 1, 2] and ends.tolist() == [5, 4, 3]
    places, ends = known.of(torch.tensor([4, 5]), torch.tensor([0, 0]), "head")
    assert places.tolist() == [0, 1] and ends.tolist() == [1, 2]
    empty = KnownLinks(*torch.empty(2, 0, dtype=torch.int64))
    assert empty.of(torch.tensor([1]), None, "tail")[0].numel() == 0


def test_a_typed_link_is_ranked_among_nodes_of_the_wanted_type_alone():
    generator, buys = torch.Generator().manual_seed(4), ("customer", "buys", "product")
    tables = {
        "customer": torch.randn(40, DIM, generator=generator),
        "product": torch.randn(25, DIM, generator=generator),
    }
    tables["product"][10:20] = tables["product"][:10]
    head, tail = (torch.randint(high, (LINKS,), generator=generator) for high in (40, 25))
    links = set(zip(head.tolist(), tail.tolist(), strict=True))
    scores = tables["customer"].double() @ tables["product"].double().T
    for filtered in (False, True):
        known = KnownLinks(head, tail) if filtered else None
        for wanted in ("head", "tail"):
            want = []
            for h, t in zip(head.tolist(), tail.tolist(), strict=True):
                true = t if wanted == "tail" else h
                row = (scores[h] if wanted == "tail" else scores[:, t]).tolist()
                pairs = [(h, c) if wanted == "tail" else (c, t) for c in range(len(row))]
                others = [
                    row[c] - row[true] for c in range(len(row)) if c != true and not (filtered and pairs[c] in links)
                ]
                want.append((sum(gap > 1e-12 for gap in others), sum(abs(gap) <= 1e-12 for gap in others)))
            found = rank_links(Dot(DIM), tables, head, tail, edge_type=buys, wanted=wanted, known=known, tile=(16, 7))
            assert list(zip(found.above.tolist(), found.same.tolist(), strict=True)) == want


def test_a_table_of_two_types_joined_is_refused():
    generator, buys = torch.Generator().manual_seed(5), ("customer", "buys", "product")
    tables = {
        "customer": torch.randn(40, DIM, generator=generator),
        "product": torch.randn(25, DIM, generator=generator),
    }
    head, tail = (torch.randint(high, (LINKS,), generator=generator) for high in (40, 25))
    joined = torch.cat(list(tables.values()))
    known = KnownLinks(head, tail + 40)
    for ends in ((head, tail + 40), (tail + 40, head)):
        with pytest.raises(
            ValueError, match=r"looks like rows of two node types in one table.* edge_type=\('a', 'to', 'b'\)"
        ):
            rank_links(Dot(DIM), joined, *ends)
    with pytest.raises(
        ValueError, match="looks like rows of two node types"
    ):  # a share of two links is too few to tell
        rank_links(Dot(DIM), joined, head[:2], tail[:2] + 40, known=known)
    both_ways = KnownLinks(torch.cat([head, tail + 40]), torch.cat([tail + 40, head]))
    for hides in (both_ways, KnownLinks(*torch.empty(2, 0, dtype=torch.int64))):
        with pytest.raises(ValueError, match="looks like rows of two node types"):
            rank_links(Dot(DIM), joined, head, tail + 40, known=hides)
    assert rank_links(Dot(DIM), joined, head, tail + 40, edge_type=("a", "to", "a")).above.numel() == LINKS
    for rows, edge_type, message in (
        (joined, buys, "nodes of 'customer' would be candidates for 'product'. Give rows by type"),
        (tables, None, r"edge_type must name the types of head and tail, .* got None"),
        (tables, ("customer", "buys", "shop"), "rows are by node type, 'customer', 'product': edge_type must name"),
    ):
        with pytest.raises(ValueError, match=message):
            rank_links(Dot(DIM), rows, head, tail, edge_type=edge_type)
    with pytest.raises(ValueError, match=r"tail must be in \[0, 25\)"):
        rank_links(Dot(DIM), tables, head, tail + 40, edge_type=buys)
    for ends, message in (
        ((head, tail + 40), r"known: tail must be in \[0, 25\), the rows that there are, got 4\d to 6\d: these may be"),
        ((tail + 40, tail), r"known: head must be in \[0, 40\), .* Give ids within each type"),
    ):
        with pytest.raises(ValueError, match=message):
            rank_links(Dot(DIM), tables, head, tail, edge_type=buys, known=KnownLinks(*ends))
    with pytest.raises(ValueError, match="rows of 6 numbers, and these have 5: tail"):
        rank_links(Dot(DIM), tables | {"product": torch.zeros(25, 5)}, head, tail, edge_type=buys)


def test_ties_count_as_they_are_told_to():
    found = LinkRanks(torch.tensor([0, 3]), torch.tensor([4, 0]))
    assert [found.ranks(ties).tolist() for ties in ("best", "mean", "worst")] == [[1, 4], [3, 4], [5, 4]]
    with pytest.raises(ValueError, match="ties must be one of mean, best, worst"):
        found.ranks("first")
    same = rank_links(Dot(2), torch.zeros(101, 2), torch.arange(5), torch.arange(5))
    assert same.ranks().tolist() == [51.0] * 5  # a model that says nothing is in the middle


def test_mrr_hits_and_mean_rank_are_their_definitions():
    ranks = torch.tensor([1.0, 2.5, 10.0, 11.0, 400.0])
    ranking = Ranking(hits=(1, 10))
    ranking.update(ranks[:2])
    ranking.update(ranks[2:])
    found = ranking.compute()
    assert found["mrr"] == pytest.approx(float((1 / ranks).mean()), rel=1e-6)
    assert (
        found["mean_rank"] == pytest.approx(float(ranks.mean())) and found["hits@1"] == 0.2 and found["hits@10"] == 0.6
    )
    assert all(math.isnan(value) for value in Ranking().compute().values())


def test_nonsense_is_refused_with_what_to_do():
    rows, head, tail, relation = world()
    with pytest.raises(ValueError, match="wanted must be 'head' or 'tail'"):
        rank_links(Dot(DIM), rows, head, tail, wanted="both")
    with pytest.raises(ValueError, match="tile must be two positive numbers"):
        rank_links(Dot(DIM), rows, head, tail, tile=(0, 4))
    with pytest.raises(ValueError, match="one number per link"):
        rank_links(Dot(DIM), rows, head, tail[:3])
    with pytest.raises(ValueError, match=r"tail must be in \[0, 50\)"):
        rank_links(Dot(DIM), rows, head, tail + NODES)
    with pytest.raises(ValueError, match=r"head must be in \[0, 50\), the rows that there are, got -1 to "):
        rank_links(Dot(DIM), rows, head - 1 - head.min(), tail)
    with pytest.raises(ValueError, match="one number per link"):
        KnownLinks(head, tail, relation[:3])
    with pytest.raises(ValueError, match="must be at least 0"):
        KnownLinks(head, tail, relation - 1)
    with pytest.raises(ValueError, match="links are ranked with relations, and the known ones were given without"):
        rank_links(DistMult(DIM, KINDS), rows, head, tail, relation, known=KnownLinks(head, tail))
    with pytest.raises(ValueError, match="links are ranked without relations, and the known ones were given with"):
        rank_links(Dot(DIM), rows, head, tail, known=KnownLinks(head, tail, relation))
    with pytest.raises(ValueError, match="called without relations"):
        rank_links(DistMult(DIM, KINDS), rows, head, tail)
    with pytest.raises(ValueError, match="made for rows of 4 numbers, and these have 6"):
        rank_links(Dot(4), rows, head, tail)
    with pytest.raises(ValueError, match="a score is nan"):
        rank_links(Dot(DIM), rows * math.nan, head, tail)
    with pytest.raises(ValueError, match="ranks begin at 1"):
        Ranking().update(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="whole numbers of at least 1"):
        Ranking(hits=(0,))


def test_links_of_few_nodes_may_all_lead_one_way() -> None:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    head, tail = torch.zeros(20, dtype=torch.int64), torch.arange(20, 40)
    assert rank_links(Dot(4), rows, head, tail).above.numel() == 20
