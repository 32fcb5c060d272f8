"""GraphService: the structure of a machine's parts, as handlers of a server. No network in it.

Every message is checked before it is answered; what does not add up is a ValueError, which the server sends back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gnnsys.comm import Handler, Kind, Reply, Request
from gnnsys.partition import Parts
from gnnsys.sampling.edge_filter import find_filter
from gnnsys.sampling.edges_within import answer_inner
from gnnsys.sampling.hop_message import HopAnswer, InnerRequest, PartsRequest, answers_to_arrays
from gnnsys.sampling.kept_edges import KEPT_COUNTS, KEPT_IDS, answer_kept
from gnnsys.sampling.layer_shares import answer_shares
from gnnsys.sampling.lookups import look_up
from gnnsys.sampling.node_scores import NodeScores
from gnnsys.sampling.part_view import ViewSpec
from gnnsys.sampling.part_visits import PartHop, SourceSums
from gnnsys.sampling.prepared_views import PreparedViews
from gnnsys.sampling.rules import find_rule

_CHUNK_BYTES = 1 << 20  # a reply is sent as soon as it has so much
_CHUNK_PIECES = 128
_MAX_NUMBERS = 1 << 18


class GraphService:
    """Answers PREPARE, SAMPLE, FIND_EDGES, EDGE_ENDS, VISITS, INDUCED, GUIDE and SHARES for `own_parts`."""

    def __init__(self, parts: Parts, own_parts: Sequence[int]) -> None:
        self.views = PreparedViews(parts, own_parts)
        self._parts = parts

    def handlers(self) -> dict[int, Handler]:
        return {
            Kind.PREPARE: self.prepare,
            Kind.SAMPLE: self.sample,
            Kind.FIND_EDGES: self.find_edges,
            Kind.EDGE_ENDS: self.edge_ends,
            Kind.VISITS: self.visits,
            Kind.GUIDE: self.guide,
            Kind.INDUCED: self.induced,
            Kind.SHARES: self.shares,
        }

    def prepare(self, request: Request) -> Reply:
        """Asked without arrays: whether a view is there, else the halo nodes whose rows it needs; with them: makes it.

        Options: `weight`, `time`, `rule` and `edges` (names or None). Reply: `ready`; if not, `wanted` [[part, node
        type], ...] and as many arrays of global ids, which come back as arrays of their times, or original ids, in the
        same order.
        """
        names = [request.options.get(name) for name in ViewSpec._fields]
        if not all(name is None or isinstance(name, str) for name in names):
            raise ValueError(f"weight, time, rule and edges must be names, got {names}")
        weight, time, rule, edges = names
        spec = ViewSpec(
            weight,
            time,
            None if rule is None else find_rule(rule).text,
            None if edges is None else find_filter(edges).text,
        )
        if self.views.has(spec):
            return Reply(options={"ready": True})
        wanted = self.views.wanted(spec)
        if len(request.arrays) == len(wanted):  # also where nothing is wanted
            self.views.prepare(spec, dict(zip(wanted, (rows.clone() for rows in request.arrays), strict=True)))
            return Reply(options={"ready": True})
        if request.arrays:
            raise ValueError(f"rows of {len(wanted)} lists of halo nodes are needed, got {len(request.arrays)}")
        return Reply([ids.contiguous() for ids in wanted.values()], {"ready": False, "wanted": [*map(list, wanted)]})

    def sample(self, request: Request) -> Reply | Iterator[Reply]:
        """One hop of one batch: `PartsRequest`, answered in chunks where it is large."""
        answers = self.views.sample(PartsRequest.from_arrays(request.arrays))
        return self._chunks(answers, request.chunk_bytes)

    def _chunks(self, answers: Iterator[HopAnswer], chunk_bytes: Callable[[int], int]) -> Iterator[Reply]:
        ready: list[HopAnswer] = []
        size = 0
        for answer in answers:
            ready.append(answer)
            size += sum(rows.nbytes for rows in answer.piece if rows is not None)
            if size >= chunk_bytes(_CHUNK_BYTES) or len(ready) >= _CHUNK_PIECES:
                yield Reply(answers_to_arrays(ready))
                ready, size = [], 0
        yield Reply(answers_to_arrays(ready), last=True)

    def induced(self, request: Request) -> Iterator[Reply]:
        """Edges among chosen nodes: `InnerRequest`, answered in chunks where it is large."""
        answers = answer_inner(self._parts, self.views.own_parts, InnerRequest.from_arrays(request.arrays))
        return self._chunks(answers, request.chunk_bytes)

    def find_edges(self, request: Request) -> Reply:
        """Arrays: head [view, edge type, part, number of pairs, part, number, ...], src (global), dst (local to part).

        Reply: counts per part, then positions, ascending inside each part.
        """
        head, src, dst = _arrays(request, 3)
        view, edge_type, pairs = _pairs_of_parts(head)
        found = []
        begin = 0
        for part, count in pairs:
            chosen = slice(begin, begin + count)
            found.append(
                self.views.view(view, part).find_edges(self.views.edge_type(edge_type), src[chosen], dst[chosen])
            )
            begin += count
        if begin != src.numel() or begin != dst.numel():
            raise ValueError(f"{begin} pairs are announced, {src.numel()} sources and {dst.numel()} destinations came")
        counts = torch.tensor([positions.numel() for positions in found], dtype=torch.int64, device="cpu")
        return Reply([counts, torch.cat(found) if found else counts.new_empty(0)])

    def edge_ends(self, request: Request) -> Reply:
        """Arrays: head [what, edge type, part, count, ...], and numbers local to each part: see `look_up`.

        Edges of a view (`answer_kept`): the numbers are the view, and what it takes.
        """
        head, numbers = _arrays(request, 2)
        what, edge_type, pairs = _pairs_of_parts(head)
        found: list[list[Tensor]] = []
        begin = 0
        for part, count in pairs:
            self.views.view(0, part)  # ValueError where it is not here
            chosen = numbers[begin : begin + count]
            if what in (KEPT_COUNTS, KEPT_IDS):
                view, *wish = chosen.tolist()
                kept = answer_kept(self.views.view(view, part), self.views.edge_type(edge_type), what, wish)
                found.append([kept])
            else:
                found.append(look_up(self._parts.part(part), self.views.edge_type(edge_type), chosen, what))
            begin += count
        if begin != numbers.numel():
            raise ValueError(f"{begin} numbers are announced, {numbers.numel()} came")
        return Reply([torch.cat(rows) for rows in zip(*found, strict=True)])

    def visits(self, request: Request) -> Iterator[Reply]:
        """What one hop of `expected_visits` adds up on one part: see `part_visits`."""
        hop = PartHop.from_arrays(request.arrays)
        edge_type = self.views.edge_type(hop.edge_type)
        self.views.view(0, hop.part)  # ValueError where it is not here
        return SourceSums(self._parts.part(hop.part), edge_type, hop).replies()

    def shares(self, request: Request) -> Iterator[Reply]:
        """What the in-edges of a layer add up to at each source: see `layer_shares`."""
        head, most_often, nodes = _arrays(request, 3)
        view, edge_type, parts = _pairs_of_parts(head)
        return answer_shares(self.views, view, self.views.edge_type(edge_type), parts, most_often, nodes)

    def guide(self, request: Request) -> Reply:
        """Keeps a version of a part's scores: see `NodeScores`."""
        self.views.scores.add(NodeScores.from_arrays(request.arrays))
        return Reply()


def _arrays(request: Request, count: int) -> list[Tensor]:
    arrays = list(request.arrays)
    if len(arrays) != count or any(rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64) for rows in arrays):
        raise ValueError(f"expected {count} vectors of integers")
    return arrays


def _pairs_of_parts(head: Tensor) -> tuple[int, int, list[tuple[int, int]]]:
    if head.numel() > _MAX_NUMBERS:
        raise ValueError(f"the head has {head.numel()} numbers, at most {_MAX_NUMBERS} are read")
    numbers = head.tolist()
    if len(numbers) < 2 or len(numbers) % 2:
        raise ValueError("the head must be two numbers, then a part and a count each")
    pairs = list(zip(numbers[2::2], numbers[3::2], strict=True))
    if any(count < 0 for _, count in pairs):
        raise ValueError("counts must not be negative")
    return numbers[0], numbers[1], pairs
