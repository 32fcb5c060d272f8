"""Which edges a filter keeps, asked where they live: how many there are, and the k-th to the l-th of them.

What `gnnsys.split` needs to give every rank its share of a split of links. A part answers from its view, so no process
holds more than its own edges and its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnsys.comm import Kind
from gnnsys.graph import EdgeType, Graph
from gnnsys.partition import PartitionBook
from gnnsys.sampling.edge_filter import EdgeFilter, ends_of_csc, rows_by_position
from gnnsys.sampling.part_view import PartView, ViewSpec

if TYPE_CHECKING:
    from gnnsys.comm import Message
    from gnnsys.sampling.dist_graph import DistGraph

KEPT_COUNTS, KEPT_IDS = 4, 5  # of EDGE_ENDS, beside what `lookups` has


def answer_kept(view: PartView, edge_type: EdgeType, what: int, numbers: list[int]) -> Tensor:
    """`KEPT_COUNTS`: how many edges the view has in each subpart. `KEPT_IDS`: global edge ids of the first-th to the
    (end - 1)-th, the numbers being [first, end]. int64."""
    book, part = view.part.book, view.part.index
    own, order = book.part_range(part, edge_type), view.order(edge_type)
    if what == KEPT_COUNTS:
        bounds = torch.tensor(_subpart_ends(book, part, edge_type), device="cpu")
        return (bounds if order is None else torch.searchsorted(order.long(), bounds)).diff()
    num_kept = view.source(edge_type).csc.num_edges
    if what != KEPT_IDS or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] <= num_kept:
        raise ValueError(f"edges of part {part} must be asked for in [0, {num_kept}], got {what} {numbers[:3]}")
    chosen = torch.arange(*numbers, device="cpu") if order is None else order[numbers[0] : numbers[1]].long()
    return chosen + own.start


def _subpart_ends(book: PartitionBook, part: int, edge_type: EdgeType) -> list[int]:
    first, start = part * book.trainers_per_part, book.part_range(part, edge_type).start
    return [0, *(book.subpart_range(first + i, edge_type).stop - start for i in range(book.trainers_per_part))]


def kept_edge_ids(graph: Graph, kept: EdgeFilter, edge_type: EdgeType) -> Tensor:
    """Ids of the edges of a graph in memory that a filter keeps, int64, ascending."""
    kept.check(graph.edge_data)
    csc = graph.csc(edge_type)
    rows = rows_by_position(csc, graph.edge_data[edge_type])
    mask = kept.keeps(edge_type, rows, csc.num_edges, ends_of_csc(csc))
    if mask is None:
        return torch.arange(csc.num_edges, device="cpu")
    positions = mask.to(csc.indices.device).nonzero().view(-1)
    return (positions if csc.edge_ids is None else csc.edge_ids[positions].long().sort().values).cpu()


class KeptEdges:
    """Edges of one type in parts that a filter keeps, numbered in the order of their global ids."""

    def __init__(self, graph: DistGraph, kept: EdgeFilter, edge_type: EdgeType) -> None:
        self._graph, self._edge_type = graph, edge_type
        self._hoods = graph.host_neighborhoods(ViewSpec(edges=kept.text))
        self.told = kept.text  # what tells it from others
        self._counts: list[int] = []

    def counts(self) -> list[int]:
        """How many there are in each subpart."""
        graph = self._graph
        away = [p for p in range(graph.book.num_parts) if p not in graph.parts_here]
        asked = {part: self._ask(part, KEPT_COUNTS, []) for part in away}
        here = {p: answer_kept(self._hoods.own_view(p), self._edge_type, KEPT_COUNTS, []) for p in graph.parts_here}
        by_part = here | {part: self._checked_counts(part, _only(messages)) for part, messages in asked.items()}
        self._counts = [count for part in range(graph.book.num_parts) for count in by_part[part].tolist()]
        return self._counts

    def ids(self, first: int, end: int) -> Tensor:
        """Global ids of the first-th to the (end - 1)-th."""
        graph = self._graph
        ends = [0, *accumulate(self._counts)][:: graph.book.trainers_per_part]
        pieces: list[Callable[[], Tensor]] = []
        for part, (begin, stop) in enumerate(pairwise(ends)):
            wish = [max(first, begin) - begin, min(end, stop) - begin]
            if wish[0] < wish[1] and part in graph.parts_here:
                own = self._hoods.own_view(part)
                pieces.append(partial(answer_kept, own, self._edge_type, KEPT_IDS, wish))
            elif wish[0] < wish[1]:
                messages = self._ask(part, KEPT_IDS, wish)
                pieces.append(partial(self._received_ids, part, wish[1] - wish[0], messages))
        found = [piece() for piece in pieces]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")

    def _ask(self, part: int, what: int, numbers: list[int]) -> Iterator[Message]:
        number = self._hoods.number_of(self._edge_type)
        wish = [self._hoods.spec.key, *numbers]
        head = torch.tensor([what, number, part, len(wish)], device="cpu")
        arrays = [head, torch.tensor(wish, dtype=torch.int64, device="cpu")]
        return self._hoods.request(self._graph.machine_of_part[part], Kind.EDGE_ENDS, arrays, -1)

    # -- what came from another machine --------------------------------------------------------------------------------

    def _checked_counts(self, part: int, counts: Tensor) -> Tensor:
        book = self._graph.book
        num_edges, wanted = len(book.part_range(part, self._edge_type)), book.trainers_per_part
        is_right = counts.dtype == torch.int64 and counts.shape == (wanted,)
        if not is_right or int(counts.min()) < 0 or sum(counts.tolist()) > num_edges:
            raise ValueError(
                f"part {part} must say of {wanted} trainers how many of its {num_edges} edges are kept, got "
                f"{counts.dtype} {list(counts.shape)}, {counts.reshape(-1)[:3].tolist()}"
            )
        return counts

    def _received_ids(self, part: int, count: int, messages: Iterator[Message]) -> Tensor:
        ids, own = _only(messages), self._graph.book.part_range(part, self._edge_type)
        is_right = ids.dtype == torch.int64 and ids.shape == (count,)
        if not is_right or int(ids[0]) < own.start or int(ids[-1]) >= own.stop or bool((ids.diff() <= 0).any()):
            raise ValueError(
                f"part {part} must name {count} of its edges, ascending ids in [{own.start}, {own.stop}), got "
                f"{ids.dtype} {list(ids.shape)}, {ids.reshape(-1)[:3].tolist()}"
            )
        return ids


def _only(messages: Iterator[Message]) -> Tensor:
    """The one array of the one message."""
    arrays = [array for message in messages for array in message.arrays]
    if len(arrays) != 1:
        raise ValueError(f"kept edges are told in one array, got {len(arrays)}")
    return arrays[0].clone()
