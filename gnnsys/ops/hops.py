"""All hops of a batch in one native call, on a device: typed face of `sample_hops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import scan_bytes, tells_workspace
from gnnsys.ops.csc import CSC
from gnnsys.ops.sampling import LABOR_ROW_BYTES, choosing_bytes

_INT32_END = 1 << 31
_EXPECTED_ROOM = 1 << 22  # ids that tables are made for ahead of need


class JoinedParts(NamedTuple):
    """In-edges in parts as one structure: columns and edges are numbered over all parts, sources stay in local ids.

    Local id i of part p is node `bounds[0][p] + i` as far as the part's core goes, the others are listed in its halo.
    """

    indptr: Tensor  # int64 [num_columns + 1], over all parts
    indices: list[Tensor]  # int32 local ids, for each part
    halo: list[Tensor]  # global ids, for each part
    bounds: Tensor  # int64 [2, num_parts + 1] on the host: the first core node and the first edge of each, and the ends


class HopRelation(NamedTuple):
    """The in-edges of one edge type. Its ends are numbers of node types."""

    structure: CSC | JoinedParts
    src: int
    dst: int


class HopStructure:
    """A graph as `sample_hops` reads it, made once for all batches.

    `num_nodes` has an entry per node type, and so has `original`, the original ids of all nodes, where they were
    relabelled. A relation's structure is in the memory of the device that samples, or in pinned memory.
    """

    def __init__(
        self, relations: Sequence[HopRelation], num_nodes: Sequence[int], original: Sequence[Tensor] = ()
    ) -> None:
        self.num_nodes, self.num_relations = list(num_nodes), len(relations)
        indptr, indices, num_parts, halo, bounds, edge_ids = [], [], [], [], [], []
        positions = torch.empty(0, dtype=torch.int64, device="cpu")  # in place of edge ids: positions are the ids
        for structure, _, _ in relations:
            indptr.append(structure.indptr)
            if isinstance(structure, JoinedParts):
                indices += structure.indices
                halo += structure.halo
                bounds.append(structure.bounds)
                num_parts.append(len(structure.indices))
                edge_ids.append(positions)
            else:
                indices.append(structure.indices)
                num_parts.append(0)
                edge_ids.append(positions if structure.edge_ids is None else structure.edge_ids)
        ends = [end for _, src, dst in relations for end in (src, dst)]
        self.tensors = [*indptr, *indices, *halo, *edge_ids, *original]  # what kernels read
        self.arguments = (
            indptr, indices, num_parts, halo, bounds, edge_ids, list(original), ends, self.num_nodes,
        )  # fmt: skip

    @classmethod
    def of(cls, csc: CSC) -> HopStructure:
        """A graph with one node type and one edge type."""
        return cls([HopRelation(csc, 0, 0)], [csc.num_src])


class SampledHops(NamedTuple):
    """All hops around a batch's seeds, per node type and per relation.

    Nodes are the seeds as given, then others in the order they were first seen: hop by hop, in the order of relations.
    """

    nodes: list[Tensor]  # int64 [num_nodes], ids
    edge_index: list[Tensor]  # int64 [2, num_edges], local ids of sources and destinations
    edge_ids: list[Tensor]  # int64 [num_edges], or positions where the structure has no ids
    num_nodes: list[list[int]]  # per hop, the seeds first
    num_edges: list[list[int]]  # per hop
    weight: list[Tensor] | None = None  # float32 [num_edges], where LABOR draws


def sample_hops(
    structure: HopStructure,
    seeds: Sequence[Tensor],
    fanouts: Sequence[int],
    *,
    keys: Sequence[int],
    replace: bool = False,
    labor: bool = False,
    on: Tensor,
) -> SampledHops:
    """Hop after hop, up to a fanout of in-edges (-1: all) of each node that the hop before it was the first to see.

    `fanouts` and `keys` have an entry per relation and hop, hops side by side; `seeds` an entry per node type, int64 on
    the host. Each hop of a relation is a `sample_neighbors`, or with `labor` a `sample_labor`, by its key. On CUDA
    devices only: on the one that has the tensor `on`. Waits once per hop, and once more.
    """
    nodes, edge_index, edge_ids, counts, weight = native.sample_hops(
        *structure.arguments, seeds, fanouts, keys, replace, labor, on
    )
    flat, num_hops = counts.tolist(), len(fanouts) // structure.num_relations
    end = len(nodes) * (num_hops + 1)
    num_nodes = [flat[at : at + num_hops + 1] for at in range(0, end, num_hops + 1)]
    num_edges = [flat[at : at + num_hops] for at in range(end, len(flat), num_hops)]
    return SampledHops(nodes, edge_index, edge_ids, num_nodes, num_edges, weight if labor else None)


@torch.library.register_fake("gnnsys::sample_hops")
def _(
    indptr, indices, num_parts, halo, bounds, edge_ids, original, ends, num_nodes, seeds, fanouts, keys, replace, labor,
    on,
):  # fmt: skip
    context = torch.library.get_ctx()
    nodes = [on.new_empty(context.new_dynamic_size(), dtype=torch.int64) for _ in seeds]
    edge_index = [on.new_empty((2, context.new_dynamic_size()), dtype=torch.int64) for _ in indptr]
    edges = [each.new_empty(each.shape[1]) for each in edge_index]
    weight = [each.new_empty(each.shape[0], dtype=torch.float32) for each in edges] if labor else []
    num_hops = len(fanouts) // len(indptr)
    counts = torch.empty(len(seeds) * (num_hops + 1) + len(fanouts), dtype=torch.int64, device="cpu")
    return nodes, edge_index, edges, counts, weight


@tells_workspace("sample_hops", "cuda")
def _(
    expected, indptr, indices, num_parts, halo, bounds, edge_ids, original, ends, num_nodes, seeds, fanouts, keys,
    replace, labor, on,
) -> int:  # fmt: skip
    """Every hop's edges until all are joined, and tables of ids, each at most half full. Types whose tables were made
    together keep them together, so there may be as many generations of them as hops, and one in the making."""
    wide = any(each.dtype == torch.int64 for each in indices) or max(num_nodes, default=0) > _INT32_END
    id_bytes, slot = (8, 16) if wide else (4, 8)
    starts = sum(ids.numel() for ids in seeds)
    frontier = known = [ids.numel() for ids in seeds]
    row = (LABOR_ROW_BYTES + 8 if labor else 24) + id_bytes
    of_edge = 2 * id_bytes + 20
    num_bytes, at = 0, 0
    num_edges = []
    for count in num_parts:
        num_edges.append(sum(each.numel() for each in indices[at : at + max(count, 1)]))
        at += max(count, 1)
    num_hops = len(fanouts) // max(len(num_parts), 1)
    for hop in range(num_hops):
        found = [0] * len(seeds)
        for r, edges in enumerate(num_edges):
            src, dst, fanout = ends[2 * r], ends[2 * r + 1], fanouts[r * num_hops + hop]
            num_bytes += row * frontier[dst] + 2 * scan_bytes(frontier[dst]) + choosing_bytes(frontier[dst], fanout)
            drawn = frontier[dst] * fanout if fanout >= 0 and not labor else expected.edges_of(frontier[dst], edges)
            num_bytes += drawn * of_edge + 2 * scan_bytes(drawn)
            found[src] += drawn
        frontier, known = found, [a + b for a, b in zip(known, found, strict=True)]
    room = sum(known)
    if expected.num_found is not None:  # edges of all hops: they bound the nodes too
        most = max((ends[1::2].count(dst) for dst in set(ends[1::2])), default=0)  # relations with a row for a node
        each = row * most + of_edge
        num_bytes = min(num_bytes, each * (expected.num_found + starts) + len(num_parts) * (1 << 16))
        room = min(room, expected.num_found + starts)
    room = max(room, min(_EXPECTED_ROOM, _ids_by_fanouts(ends, fanouts, [ids.numel() for ids in seeds])))
    return num_bytes + (min(num_hops, len(seeds)) + 1) * 2 * slot * room


def hop_workspaces(
    ends: Sequence[int],
    fanouts: Sequence[int],
    num_nodes: Sequence[Sequence[int]],
    num_edges: Sequence[Sequence[int]],
    *,
    labor: bool = False,
    wide: bool = False,
) -> list[int]:
    """What `sample_hops` takes on a device beside its results, one after the other, for a batch of known counts: nodes
    per type and hop (the seeds first), edges per relation and hop. It gives all of it back when the results are there.

    The workspaces of hops are those of `Walk`, and the tables of ids those of `HopNumbering::make_room` (csrc/cuda).

    >>> hop_workspaces([0, 0], [10, 5], [[100, 800, 3000]], [[1000, 4000]])
    [2800, 52008, 112000, 112000]
    """
    id_bytes, slot = (8, 16) if wide else (4, 8)
    row = LABOR_ROW_BYTES + 8 if labor else 24
    num_hops, num_types = len(num_edges[0]), len(num_nodes)
    sources, destinations = ends[::2], ends[1::2]
    of_hops = [sum((row + id_bytes) * num_nodes[t][0] for t in destinations)]
    room = [0] * num_types
    tables: dict[int, list[int]] = {}
    for hop in range(num_hops):
        found = [0] * num_types
        for src, edges in zip(sources, num_edges, strict=True):
            found[src] += edges[hop]
        last = hop + 1 == num_hops
        next_rows = 0 if last else sum(row * found[t] + 8 for t in destinations)
        of_hops.append(sum(found) * (2 * id_bytes + 20) + next_rows)
        needed = [sum(num_nodes[t][: hop + 1]) + found[t] for t in range(num_types)]
        grown = [t for t in range(num_types) if found[t] and needed[t] > room[t]]
        expected = _ids_after(hop, found, ends, fanouts, num_hops)
        for t in grown:
            room[t] = max(needed[t], min(needed[t] + expected[t], _EXPECTED_ROOM // num_types))
        if grown:
            tables[hop] = [sum(2 * slot * room[t] for t in grown)]
    out = [of_hops[0]]
    for hop, num_bytes in enumerate(of_hops[1:]):
        out += [num_bytes, *tables.get(hop, [])]
    choosing = [
        choosing_bytes(num_nodes[dst][hop], fanouts[r * num_hops + hop])
        for hop in range(num_hops)
        for r, dst in enumerate(destinations)
    ]  # taken and given back one at a time
    return [*out, max(choosing)] if any(choosing) else out


def _ids_after(hop: int, found: Sequence[int], ends: Sequence[int], fanouts: Sequence[int], num_hops: int) -> list[int]:
    """How many ids of each type the hops after `hop` may bring, as their fanouts say."""
    expected, frontier = [0] * len(found), list(found)
    for later in range(hop + 1, num_hops):
        drawn = [0] * len(found)
        for r in range(len(ends) // 2):
            src, dst, fanout = ends[2 * r], ends[2 * r + 1], max(fanouts[r * num_hops + later], 0)
            drawn[src] = min(drawn[src] + min(frontier[dst], _EXPECTED_ROOM) * fanout, _EXPECTED_ROOM)
        expected = [a + b for a, b in zip(expected, drawn, strict=True)]
        frontier = drawn
    return expected


def _ids_by_fanouts(ends: list[int], fanouts: list[int], frontier: list[int]) -> int:
    """As many as the first hops may bring, for which tables are made before it is known how many there are."""
    num_hops = len(fanouts) * 2 // max(len(ends), 1)
    total = sum(frontier)
    for hop in range(num_hops):
        drawn = [0] * len(frontier)
        for r in range(len(ends) // 2):
            src, dst, fanout = ends[2 * r], ends[2 * r + 1], max(fanouts[r * num_hops + hop], 0)
            drawn[src] = min(drawn[src] + frontier[dst] * fanout, _EXPECTED_ROOM)
        total, frontier = total + sum(drawn), drawn
    return total
