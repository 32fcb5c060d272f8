"""One hop of `expected_visits`: the arithmetic on a CSC, and the same on a graph in parts, here or behind servers.

A part adds up over its own core columns, so every edge is counted by one part. What a part answers depends on the part
and the message alone (VISITS is stateless), and the asker adds the parts in ascending order: the result has the same
bits whichever machine has which part.

    VISITS  head int64 [edge type, part, fanout, replace, with halo]; p of the part's core nodes, float64 [num_core]
            reply, in chunks: none of its arrays while edges are looked at; then [first, count], the sums of the sources
            first, first + 1, ... of count (local ids: core, then first hop of the halo), float64; and, with halo, the
            global ids of those of them that are halo
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import Kind, Reply
from gnnsys.graph import EdgeType
from gnnsys.ops import CSC
from gnnsys.partition import Part
from gnnsys.sampling.fanouts import MAX_FANOUT
from gnnsys.sampling.owners import part_bounds
from gnnsys.sampling.part_view import core_csc, halo_sources

if TYPE_CHECKING:
    from gnnsys.comm import Pending
    from gnnsys.sampling.dist_graph import DistGraph

HOST_PIECE = 1 << 17  # edges, or columns, before others may have their turn: 1.5 ms, within a cache
_CHUNK = 1 << 19  # sums in one message of a reply: a frame
_SECONDS = 600.0  # for a part to answer, behind all that its machine answers before


def log_of_rest(probability: Tensor) -> Tensor:
    """log(1 - p), -inf where it is certain."""
    return torch.log1p(-probability.clamp(max=1.0))


def add_hop(total: Tensor, csc: CSC, found: Tensor, fanout: int, replace: bool, *, piece: int) -> Iterator[None]:
    """Adds log(1 - p(v) t(v)) to `total` at u, for every edge u -> v, in the order of the edges. `found` is p.

    Yields after every `piece` edges or columns, which changes no bits and bounds the memory at 16 bytes for each.
    """
    missed = torch.empty(csc.num_dst, dtype=torch.float64, device=found.device)
    for first in range(0, csc.num_dst, piece):
        some = slice(first, min(first + piece, csc.num_dst))
        in_degrees = csc.indptr[some.start : some.stop + 1].diff()
        missed[some] = log_of_rest(found[some] * _taken(in_degrees, fanout, replace))
        yield
    ends = csc.indptr.cpu()
    for begin in range(0, csc.num_edges, piece):
        end = min(begin + piece, csc.num_edges)
        first = int(torch.searchsorted(ends, begin, right=True)) - 1
        last = int(torch.searchsorted(ends, end))
        in_piece = csc.indptr[first : last + 1].clamp(begin, end).diff()
        of_edge = missed[first:last].repeat_interleave(in_piece, output_size=end - begin)
        total.index_add_(0, csc.indices[begin:end], of_edge)
        yield


def _taken(in_degrees: Tensor, fanout: int, replace: bool) -> Tensor:
    """t: the probability that a node's draw takes a given one of its in-edges."""
    if fanout < 0:
        return torch.ones_like(in_degrees, dtype=torch.float64)
    in_degrees = in_degrees.double().clamp(min=1.0)
    if replace:
        return -torch.expm1(fanout * torch.log1p(-1.0 / in_degrees)) if fanout else torch.zeros_like(in_degrees)
    return (fanout / in_degrees).clamp(max=1.0)


# -- a part ----------------------------------------------------------------------------------------------------------


class PartHop(NamedTuple):
    """What one part is asked in one hop."""

    edge_type: int  # its place in the schema
    part: int
    fanout: int
    replace: bool
    with_halo: bool
    found: Tensor  # p of the core nodes

    def to_arrays(self) -> list[Tensor]:
        return [torch.tensor([int(number) for number in self[:5]], dtype=torch.int64, device="cpu"), self.found]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Tensor]) -> PartHop:
        """ValueError for what no asker writes. Whether there is such a part, and of which size, is not known here."""
        if len(arrays) != 2 or arrays[0].shape != (5,) or arrays[0].dtype != torch.int64:
            raise ValueError("expected a head of five int64 numbers, and the probabilities of a part's core nodes")
        edge_type, part, fanout, replace, with_halo = arrays[0].tolist()
        if not -1 <= fanout < MAX_FANOUT or not {replace, with_halo} <= {0, 1}:
            raise ValueError(f"no hop has fanout {fanout} and flags {replace} and {with_halo}")
        if arrays[1].dim() != 1 or arrays[1].dtype != torch.float64:
            raise ValueError(f"probabilities must be float64 [num_core], got {list(arrays[1].shape)} {arrays[1].dtype}")
        return cls(edge_type, part, fanout, bool(replace), bool(with_halo), arrays[1])


class SourceSums:
    """What one hop adds up on one part: made at once, filled by `steps`."""

    def __init__(self, part: Part, edge_type: EdgeType, hop: PartHop) -> None:
        num_core = part.num_core(edge_type[2])
        if hop.found.numel() != num_core:
            raise ValueError(f"part {part.index} has {num_core} core nodes, {hop.found.numel()} probabilities came")
        lowest, highest = hop.found.aminmax() if num_core else (0.0, 0.0)
        if not 0.0 <= float(lowest) <= float(highest) <= 1.0:  # false for NaN, too
            raise ValueError(f"probabilities must be in [0, 1], got {float(lowest)} to {float(highest)}")
        self._csc, self._hop = core_csc(part, edge_type), hop
        self.num_core = part.num_core(edge_type[0])
        self.halo = halo_sources(part, edge_type[0])

    def steps(self) -> Iterator[None]:
        """Fills `sums`; yields where others may have their turn."""
        total = torch.zeros(self._csc.num_src, dtype=torch.float64, device="cpu")
        yield from add_hop(total, self._csc, self._hop.found, self._hop.fanout, self._hop.replace, piece=HOST_PIECE)
        self.sums = total[: self.num_core + self.halo.numel()]  # later hops of the halo have no edge into the core

    def replies(self) -> Iterator[Reply]:
        """The answer to a VISITS message."""
        for _ in self.steps():
            yield Reply()
        count = self.sums.numel()
        for first in range(0, max(count, 1), _CHUNK):  # a part without nodes has an answer too
            end = min(first + _CHUNK, count)
            arrays = [torch.tensor([first, count], device="cpu"), self.sums[first:end]]
            if self._hop.with_halo:
                arrays.append(self.halo[max(first - self.num_core, 0) : max(end - self.num_core, 0)])
            yield Reply(arrays, last=end == count)


# -- all parts -------------------------------------------------------------------------------------------------------


class PartedSums:
    """One hop after the other on an opened graph with one node type and one edge type."""

    def __init__(self, graph: DistGraph) -> None:
        (self._edge_type,), (node_type,) = graph.edge_types, graph.node_types
        self._graph = graph
        self._bounds = part_bounds(graph.book, node_type).tolist()
        self._halo: dict[int, Tensor] = {}  # of parts that were asked: it travels once

    def __call__(self, found: Tensor, fanout: int, replace: bool) -> Tensor:
        """Of every node u the sum over its out-edges u -> v of log(1 - p(v) t(v)). Remote parts are asked first."""
        graph, client = self._graph, self._graph.client
        pending: dict[int, Pending] = {}
        own: list[PartHop] = []
        for part in range(graph.parts.num_parts):
            of_part = found[self._bounds[part] : self._bounds[part + 1]]
            if not bool(of_part.any()):
                continue  # the hop before found nothing there
            hop = PartHop(0, part, fanout, replace, part not in self._halo, of_part)
            if part in graph.parts_here:
                own.append(hop)
            else:
                assert client is not None
                machine = graph.machine_of_part[part]
                pending[part] = client.request(machine, Kind.VISITS, hop.to_arrays(), timeout=_SECONDS)
        sums = {hop.part: self._add_here(hop) for hop in own}
        sums |= {part: self._receive(part, sent) for part, sent in pending.items()}
        total = torch.zeros_like(found)
        for part in sorted(sums):
            first, end = self._bounds[part], self._bounds[part + 1]
            total[first:end] += sums[part][: end - first]
            total.index_add_(0, self._halo[part], sums[part][end - first :])
        return total

    def _add_here(self, hop: PartHop) -> Tensor:
        part = SourceSums(self._graph.parts.part(hop.part), self._edge_type, hop)
        for _ in part.steps():
            pass
        self._halo[hop.part] = part.halo
        return part.sums

    def _receive(self, part: int, sent: Pending) -> Tensor:
        num_core, num_nodes = self._bounds[part + 1] - self._bounds[part], self._bounds[-1]
        sums: Tensor | None = None
        num_filled, halo, seen = 0, dict[int, Tensor](), set[int]()
        for message in sent.chunks():
            if not message.arrays:
                continue
            if len(message.arrays) != (2 if part in self._halo else 3) or message.arrays[0].shape != (2,):
                raise ValueError(f"part {part} answers with {len(message.arrays)} arrays")
            (first, count), values = message.arrays[0].tolist(), message.arrays[1]
            if sums is None and num_core <= count <= num_nodes:
                sums = torch.empty(count, dtype=torch.float64, device="cpu")
            is_new = first not in seen and values.dtype == torch.float64
            seen.add(first)
            if sums is None or count != sums.numel() or not (is_new and 0 <= first <= first + values.numel() <= count):
                raise ValueError(f"part {part} answers with sums {first} to {first + values.numel()} of {count}")
            sums[first : first + values.numel()] = values
            num_filled += values.numel()
            if part not in self._halo:
                halo[first] = message.arrays[2]
        if sums is None or num_filled != sums.numel():
            raise ValueError(f"part {part} answered with {num_filled} sums, it has {num_core} core nodes")
        if part not in self._halo:
            ids = torch.cat([halo[first] for first in sorted(halo)])
            if ids.numel() != sums.numel() - num_core or not _are_ids(ids, num_nodes):
                raise ValueError(f"part {part} has {sums.numel() - num_core} halo nodes, it named {ids.numel()}")
            self._halo[part] = ids
        return sums


def _are_ids(ids: Tensor, num_nodes: int) -> bool:
    return not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < num_nodes
