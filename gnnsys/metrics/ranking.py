"""The rank of a link's end among all nodes of its type: MRR, Hits@k and mean rank, filtered or not.

Links are compared with all candidates in tiles, so that no array has a number for every link and candidate. Ranks are
counted in float64 and in tiles of one shape, in which the true end has a column of its own: a rank does not depend on
which links share a batch, on the last tile, nor on how many processes share the work, and candidates with equal rows
are ties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from gnnsys.metrics.merge import gather

Ties = Literal["mean", "best", "worst"]
_TILE = (256, 4096)  # links and candidates: 8 MB of scores
_LEAST_LINKS = 16  # of a tile: products of single rows round otherwise
_MOST_BY_CHANCE = 16  # links of nodes of one type whose heads all come before their tails: a chance of 3e-9


class AllScores(Protocol):
    """What ranks are made with: a decoder of `gnnsys.nn`, or anything with both methods."""

    def query(self, known: Tensor, relation: Tensor | None, wanted: Any) -> Tensor:
        """What candidates for an end are compared with: [links, dim]."""

    def compare_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Scores [links, candidates]; higher is more likely."""


class RowTable(Protocol):
    """A table of rows: a tensor, or one of the store's, whose rows are read a tile at a time."""

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, ids: Any) -> Tensor: ...


Rows: TypeAlias = "RowTable | Mapping[str, RowTable]"


class LinkRanks(NamedTuple):
    """Of each link, how many candidates score above the true end, and how many others score the same: int64."""

    above: Tensor
    same: Tensor

    def ranks(self, ties: Ties = "mean") -> Tensor:
        """Ranks from 1, float64: "mean" places the true end in the middle of its ties, "best" before, "worst" behind
        them. A model that gives everything one score has the rank of chance by "mean", and 1 by "best"."""
        share = {"mean": 0.5, "best": 0.0, "worst": 1.0}
        if ties not in share:
            raise ValueError(f"ties must be one of {', '.join(share)}, got {ties!r}")
        return 1 + self.above.double() + share[ties] * self.same.double()


class KnownLinks:
    """Links that are true, to be left out where another link is ranked: filtered ranking (Bordes et al. 2013).

    `head`, `tail` and, where links have kinds, `relation`: int64 [links], of all splits. Memory: three numbers a link.
    """

    def __init__(self, head: Tensor, tail: Tensor, relation: Tensor | None = None) -> None:
        self.has_relations = relation is not None
        if relation is None:
            relation = torch.zeros_like(head)
        if head.dim() != 1 or head.shape != tail.shape or head.shape != relation.shape:
            raise ValueError(
                "head, tail and relation must have one number per link, got "
                f"{list(head.shape)}, {list(tail.shape)}, {list(relation.shape)}"
            )
        if any(ids.numel() and int(ids.min()) < 0 for ids in (head, tail, relation)):
            raise ValueError("head, tail and relation must be at least 0")
        ends = {"head": head.long().cpu(), "tail": tail.long().cpu()}
        self.looks_joined = _looks_joined(**ends)
        self._ranges = {end: (int(ids.min()), int(ids.max())) for end, ids in ends.items() if ids.numel()}
        self._relation = relation.long().cpu()
        self._num_relations = int(self._relation.max()) + 1 if head.numel() else 1
        self._keys: dict[str, Tensor] = {}  # by the wanted end: (known end, relation) as one number, ascending
        self._ends: dict[str, Tensor] = {}  # and what is known to be true with it
        for wanted, known in (("tail", "head"), ("head", "tail")):
            keys = self._key(ends[known], self._relation)
            by_end = ends[wanted].argsort(stable=True)
            order = by_end[keys[by_end].argsort(stable=True)]
            pairs = torch.stack([keys[order], ends[wanted][order]])
            pairs = pairs.unique_consecutive(dim=1)
            self._keys[wanted], self._ends[wanted] = pairs[0].contiguous(), pairs[1].contiguous()

    def check_ends(self, tables: Mapping[str, RowTable]) -> None:
        """ValueError unless both ends are ids within their tables."""
        for end, (least, most) in self._ranges.items():
            num_rows = int(tables[end].shape[0])
            if most >= num_rows:
                raise ValueError(
                    f"known: {end} must be in [0, {num_rows}), the rows that there are, got {least} to {most}: these "
                    "may be ids of all types joined, or head and tail may be swapped. Give ids within each type"
                )

    def _key(self, known: Tensor, relation: Tensor) -> Tensor:
        return known * self._num_relations + relation

    def of(self, known: Tensor, relation: Tensor | None, wanted: str) -> tuple[Tensor, Tensor]:
        """For each link (place in `known`) the ends that are known to be true with it: places and ends, int64."""
        if self.has_relations != (relation is not None):
            raise ValueError(
                f"links are ranked {'with' if relation is not None else 'without'} relations, and the known ones were "
                f"given {'with' if self.has_relations else 'without'}: pass both the same way"
            )
        known = known.long().cpu()
        relation = torch.zeros_like(known) if relation is None else relation.long().cpu()
        keys, ends = self._keys[wanted], self._ends[wanted]
        asked = self._key(known, relation)
        first, last = torch.searchsorted(keys, asked), torch.searchsorted(keys, asked, right=True)
        is_kind = relation < self._num_relations  # others have no number here, and no link
        counts = torch.where(is_kind, last - first, 0)
        places = torch.repeat_interleave(torch.arange(known.numel(), device="cpu"), counts)
        starts = counts.cumsum(0) - counts
        at = torch.arange(int(counts.sum()), device="cpu") - starts[places] + first[places]
        return places, ends[at]


@torch.no_grad()
def rank_links(
    decoder: AllScores,
    rows: Rows,
    head: Tensor,
    tail: Tensor,
    relation: Tensor | None = None,
    *,
    edge_type: tuple[str, str, str] | None = None,
    wanted: Literal["head", "tail"] = "tail",
    known: KnownLinks | None = None,
    tile: tuple[int, int] = _TILE,
) -> LinkRanks:
    """Ranks the `wanted` end of each link among all nodes of its type.

    `rows` is one table where both ends are of one type: candidates are all of its rows. On a typed graph it is a dict
    of tables by node type, and `edge_type` names the types of head and tail: a product is ranked among products alone.
    `head`, `tail` and `relation` are int64 [links], ids within their own table, as are those of `known`. A single
    table in which all heads come before (or after) all tails, of the links or of `known`, looks like two joined types
    and is refused, unless `edge_type` names the same type at both ends. With `known`, other ends that are
    known to be true do not count. Scores are made where the rows are, CPU or GPU. `tile`: links and candidates that are
    compared at once; memory is what their scores and rows take, whatever the number of links and of nodes.

    >>> from gnnsys.nn import DistMult, Dot
    >>> rows, links = torch.randn(100, 8), torch.randint(100, (2, 20))
    >>> ranks = rank_links(DistMult(8, 1), rows, *links, torch.zeros(20, dtype=torch.int64))
    >>> ranks.ranks().shape
    torch.Size([20])
    >>> tables = {"customer": torch.randn(40, 8), "product": torch.randn(60, 8)}
    >>> bought = torch.randint(40, (20,)), torch.randint(60, (20,))
    >>> len(rank_links(Dot(8), tables, *bought, edge_type=("customer", "buys", "product")).ranks())
    20
    """
    _check(head, tail, relation, wanted, tile)
    tables = _tables(rows, edge_type)
    for end, ids in (("head", head), ("tail", tail)):
        _check_table(end, ids, tables[end], getattr(decoder, "dim", None))
    if known is not None:
        known.check_ends(tables)
    if edge_type is None and (_looks_joined(head, tail) or (known is not None and known.looks_joined)):
        raise ValueError(
            "rows: every head comes before every tail, or after it: this looks like rows of two node types in one "
            "table, and both would be candidates. Give rows by type, {'a': ..., 'b': ...}, ids within each type and "
            "edge_type=('a', 'to', 'b'); or edge_type=('a', 'to', 'a') if all nodes are of one type"
        )
    num_links, num_candidates = head.numel(), int(tables[wanted].shape[0])
    if check := getattr(decoder, "check_relations", None):
        check(relation, num_links)
    tile = (max(tile[0], _LEAST_LINKS), min(tile[1], max(num_candidates, 1)))  # the same for all links of a table
    above = torch.zeros(num_links, dtype=torch.int64, device="cpu")
    same = torch.zeros_like(above)
    given, true = (head, tail) if wanted == "tail" else (tail, head)
    sides = tables["head" if wanted == "tail" else "tail"], tables[wanted]
    for begin in range(0, num_links, tile[0]):
        part = slice(begin, begin + tile[0])
        kinds = None if relation is None else relation[part]
        left_out = None if known is None else known.of(given[part], kinds, wanted)
        found = _rank_batch(decoder, sides, given[part], true[part], kinds, wanted, left_out, tile)
        above[part], same[part] = found
    return LinkRanks(above, same)


def _rank_batch(
    decoder: AllScores,
    sides: tuple[RowTable, RowTable],
    given: Tensor,
    true: Tensor,
    relation: Tensor | None,
    wanted: str,
    left_out: tuple[Tensor, Tensor] | None,
    tile: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Candidates above and beside the true ends of at most `tile[0]` links; `sides` are both tables, wanted last."""
    rows = sides[1]
    num_links, num_candidates, width = given.numel(), int(rows.shape[0]), tile[1]
    known_rows, true_rows = (of[ids].detach().double() for of, ids in zip(sides, (given, true), strict=True))
    device = known_rows.device
    query = decoder.query(known_rows, None if relation is None else relation.to(device), wanted)
    query = _padded(query, tile[0])
    true_rows = _padded(true_rows.to(device), tile[0])
    above = torch.zeros(num_links, dtype=torch.int64, device=device)
    same = torch.zeros_like(above)
    place = torch.arange(num_links, device=device)
    for begin in range(0, num_candidates, width):
        end = min(begin + width, num_candidates)
        candidates = rows[torch.arange(begin, end, device=_ids_device(rows))].detach().double()
        both = torch.cat([_padded(candidates.to(device), width), true_rows])
        scores = decoder.compare_all(query, both)[:num_links]
        own = scores[place, width + place].unsqueeze(1)
        scores = scores[:, : end - begin]
        if bool(own.isnan().any()) or bool(scores.isnan().any()):
            raise ValueError("a score is nan, which is above or below nothing: look for a loss that was nan before")
        higher, equal = scores > own, scores == own
        in_tile = ((true >= begin) & (true < end)).to(device)
        equal[place[in_tile], true.to(device)[in_tile] - begin] = False  # itself
        if left_out is not None:
            links, ends = left_out
            here = (ends >= begin) & (ends < end)
            links, ends = links[here].to(device), ends[here].to(device) - begin
            is_other = ends + begin != true.to(device)[links]
            links, ends = links[is_other], ends[is_other]
            higher[links, ends] = False
            equal[links, ends] = False
        above += higher.sum(1)
        same += equal.sum(1)
    return above.cpu(), same.cpu()


def _ids_device(rows: RowTable) -> torch.device:
    return rows.device if isinstance(rows, Tensor) else torch.device("cpu")


def _padded(rows: Tensor, size: int) -> Tensor:
    """`rows` and as many zeros behind them as make `size`: products of another shape may round otherwise."""
    return torch.cat([rows, rows.new_zeros(size - rows.shape[0], rows.shape[1])])


def _tables(rows: Rows, edge_type: tuple[str, str, str] | None) -> dict[str, RowTable]:
    """The table of each end; ValueError where one table would be of two types."""
    if isinstance(rows, Mapping):
        if edge_type is None or len(edge_type) != 3 or any(end not in rows for end in edge_type[::2]):
            raise ValueError(
                f"rows are by node type, {', '.join(map(repr, rows))}: edge_type must name the types of head and tail, "
                f"(type of heads, relation, type of tails), got {edge_type!r}"
            )
        return {"head": rows[edge_type[0]], "tail": rows[edge_type[2]]}
    if edge_type is not None and edge_type[0] != edge_type[-1]:
        raise ValueError(
            f"one table has rows of one node type, and {edge_type!r} joins two: nodes of {edge_type[0]!r} would be "
            f"candidates for {edge_type[-1]!r}. Give rows by type, {{{edge_type[0]!r}: ..., {edge_type[-1]!r}: ...}}"
        )
    return {"head": rows, "tail": rows}


def _looks_joined(head: Tensor, tail: Tensor) -> bool:
    """Whether all heads come before all tails, or after them: with many of both, they are hardly of one type."""
    if head.numel() < _MOST_BY_CHANCE or not (head.max() < tail.min() or tail.max() < head.min()):
        return False
    return min(head.unique().numel(), tail.unique().numel()) >= _MOST_BY_CHANCE


def _check_table(end: str, ids: Tensor, rows: RowTable, dim: int | None) -> None:
    num_rows = int(rows.shape[0])
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise ValueError(
            f"{end} must be in [0, {num_rows}), the rows that there are, got {int(ids.min())} to {int(ids.max())}"
        )
    if dim is not None and dim != int(rows.shape[1]):
        raise ValueError(f"the decoder was made for rows of {dim} numbers, and these have {int(rows.shape[1])}: {end}")


def _check(head: Tensor, tail: Tensor, relation: Tensor | None, wanted: str, tile: tuple[int, int]) -> None:
    if wanted not in ("head", "tail"):
        raise ValueError(f"wanted must be 'head' or 'tail', the end that is ranked, got {wanted!r}")
    if len(tile) != 2 or min(tile) < 1:
        raise ValueError(f"tile must be two positive numbers, of links and of candidates, got {tile}")
    shapes = [list(ids.shape) for ids in (head, tail, relation) if ids is not None]
    if head.dim() != 1 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"head, tail and relation must have one number per link, got {shapes}")


class Ranking:
    """MRR, Hits@k and the mean rank of links.

    >>> ranking = Ranking(hits=(1, 3))
    >>> ranking.update(torch.tensor([1.0, 2.0, 4.0]))
    >>> {name: round(value, 3) for name, value in ranking.compute().items()}
    {'mrr': 0.583, 'mean_rank': 2.333, 'hits@1': 0.333, 'hits@3': 0.667}
    """

    def __init__(self, hits: Sequence[int] = (1, 3, 10), ties: Ties = "mean") -> None:
        if any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in hits):
            raise ValueError(f"hits must be whole numbers of at least 1, got {list(hits)}")
        self.hits, self.ties = tuple(hits), ties
        self._twice: list[Tensor] = []  # twice the ranks, whole numbers

    def update(self, ranks: LinkRanks | Tensor) -> None:
        """What `rank_links` found, or ranks from 1, in halves where there are ties."""
        found = ranks.ranks(self.ties) if isinstance(ranks, LinkRanks) else ranks.detach().to("cpu", torch.float64)
        twice = (2 * found).round().long()
        if bool((twice < 2).any()) or bool((twice != 2 * found).any()):
            raise ValueError("ranks begin at 1 and are whole or half numbers: pass what `rank_links` returns")
        self._twice.append(twice.view(-1))

    def compute(self, group: Any = None) -> dict[str, float]:
        """Over all ranks of the process group, which all call this; nan without links."""
        twice = gather(torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *self._twice]), group)
        values, counts = twice.unique(return_counts=True)
        total = int(counts.sum())
        if not total:
            return dict.fromkeys(["mrr", "mean_rank", *(f"hits@{k}" for k in self.hits)], float("nan"))
        found = {
            "mrr": float((counts.double() * 2 / values.double()).cumsum(0)[-1]) / total,
            "mean_rank": int((counts * values).sum()) / (2 * total),
        }
        return found | {f"hits@{k}": int(counts[values <= 2 * k].sum()) / total for k in self.hits}
