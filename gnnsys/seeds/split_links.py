"""`gnnsys.split_links`: which links train, validate and test a model, and which edges messages pass meanwhile.

A side is computed of a link's two ends (or its time) wherever it is asked for: nothing is written down, every machine
looks at its own edges alone, and the answer is the same for any number of parts and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gnnsys.graph import EdgeType, Graph, check_ours, some
from gnnsys.partition import Placement
from gnnsys.sampling import MESSAGE, SUPERVISION, TEST, VAL, AnyGraph, LinkFilter, reverse_of
from gnnsys.seeds.split import Seeds, split

_ALIASES = {"valid": "val"}


@dataclass(frozen=True, eq=False)
class LinkSplit:
    """Three sides of the links of one edge type. See `split_links`."""

    graph: AnyGraph
    rule: LinkFilter

    def links(self, which: str = "train", *, placement: Placement | None = None) -> Seeds:
        """This rank's share of the links of "train", "val" or "test": what a loader takes as `edge_label_index`."""
        training = SUPERVISION if self.rule.disjoint > 0 else MESSAGE
        side = {"train": training, "val": VAL, "test": TEST}[self._which(which)]
        return split(self.graph, self.rule.only(side), type=self.rule.edge_type, placement=placement)

    def messages(self, which: str = "train") -> LinkFilter:
        """The edges that messages may pass, as loaders take them (`edge_mask`): in "train" those of training links that
        are not for supervision alone, in "val" all training links, in "test" also those for validation. Of other
        edge types, but for the reverse, all edges.
        """
        sides = {"train": (MESSAGE,), "val": (MESSAGE, SUPERVISION), "test": (MESSAGE, SUPERVISION, VAL)}
        return self.rule.only(*sides[self._which(which)])

    def _which(self, which: str) -> str:
        name = _ALIASES.get(which, which)
        if name not in ("train", "val", "test"):
            raise ValueError(f"which must be 'train', 'val' or 'test', got {which!r}")
        return name


def split_links(
    graph: AnyGraph,
    edge_type: EdgeType | None = None,
    *,
    val: float = 0.1,
    test: float = 0.1,
    disjoint: float = 0.0,
    time: str | None = None,
    val_from: float | None = None,
    test_from: float | None = None,
    reverse_edge_type: EdgeType | None = None,
    seed: int = 0,
) -> LinkSplit:
    """Splits the links of an edge type; every rank calls it with the same arguments.

    At random: each link is a test link with a chance of `test`, for validation with `val`, by its ends and `seed`
    alone. Its parallel edges and its reverses (`reverse_edge_type`, by default PyG's `rev_...`, or the type itself
    where it joins nodes of one type) are on the same side. By `time`, an array of the edges: test links are those from
    `test_from` on, those before it from `val_from` on are for validation; in memory the cuts may be left to `val` and
    `test`. Each edge goes by its own time: a reverse is on its link's side where both have the same. `disjoint`: the
    share of training links that are for supervision alone, the others for messages alone.

    >>> split = gnnsys.split_links(graph, val=0.1, test=0.1)  # doctest: +SKIP
    >>> loader = gnnsys.LinkNeighborLoader(  # doctest: +SKIP
    ...     graph, [10, 5], edge_label_index=split.links("train"), edge_mask=split.messages("train"), batch_size=512)
    """
    check_ours(graph)
    if edge_type is None:
        if len(graph.edge_types) != 1:
            raise ValueError(f"split_links: edge_type must be given, one of {some(graph.edge_types)}")
        edge_type = graph.edge_types[0]
    graph.num_edges(edge_type)  # ValueError where there is no such type
    if reverse_edge_type is None:
        reverse_edge_type = reverse_of(edge_type, graph)
    else:
        graph.num_edges(reverse_edge_type)
        src, _, dst = edge_type
        if (reverse_edge_type[0], reverse_edge_type[2]) != (dst, src):
            raise ValueError(
                f"split_links: reverse_edge_type must lead from {dst!r} to {src!r}, got {reverse_edge_type!r}"
            )
    for name, share in (("val", val), ("test", test), ("disjoint", disjoint)):
        if not 0 <= share < 1:
            raise ValueError(f"split_links: {name} must be a share in [0, 1), got {share}")
    if val + test >= 1:
        raise ValueError(f"split_links: val and test must leave links to train with, got {val} and {test}")
    cuts: tuple[float, float] = (val, test)
    if time is not None:
        cuts = _cuts(graph, edge_type, time, val, test, val_from, test_from)
    elif val_from is not None or test_from is not None:
        raise ValueError("split_links: val_from and test_from are times: name the array that holds them, time=...")
    rule = LinkFilter(edge_type, reverse_edge_type, int(seed), *cuts, float(disjoint), time)
    rule.check(graph.edge_data)
    return LinkSplit(graph, rule)


def _cuts(
    graph: AnyGraph, edge_type: EdgeType, time: str, val: float, test: float, val_from: Any, test_from: Any
) -> tuple[float, float]:
    """The times from which on links are for validation, and for testing: whole numbers, or floating point."""
    if (val_from is None) != (test_from is None):
        raise ValueError("split_links: val_from and test_from go together: give both, or neither")
    if val_from is not None:
        first, second = (_time(value, name) for value, name in ((val_from, "val_from"), (test_from, "test_from")))
        if first > second:
            raise ValueError(f"split_links: val_from must not be later than test_from, got {val_from} and {test_from}")
        return first, second
    if not isinstance(graph, Graph):
        raise ValueError("split_links: on parts, say from when on links are held out: val_from=..., test_from=...")
    rows = graph.edge_data[edge_type].get(time)
    if rows is None:
        known = some(graph.edge_data[edge_type], near=time)
        raise ValueError(f"split_links: edges {edge_type!r} have no times {time!r}, only {known}")
    times = torch.as_tensor(rows, device="cpu").reshape(-1).sort().values
    num_links = times.numel()
    if not num_links:
        return 0, 0
    last = _time(times[-1].item(), f"times {time!r}")  # one that is no number would be here
    never = last + (1 if isinstance(last, int) else max(1, abs(last)))  # later, in whatever precision
    places = [num_links - round(share * num_links) for share in (val + test, test)]
    first, second = (times[at].item() if at < num_links else never for at in places)
    return first, second


def _time(value: Any, name: str) -> float:
    """A time as JSON keeps it: whole numbers stay whole."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"split_links: {name} must be numbers, got {value!r}")
    return value
