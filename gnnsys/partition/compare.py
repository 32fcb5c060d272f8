"""Bit for bit: parts against the graph they were made of, and copied columns against their owners'."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.ops import CSC, as_bytes, gather_rows, in_subgraph
from gnnsys.partition.array_pieces import Meter, column_pieces, row_pieces, take
from gnnsys.partition.layout import Schema
from gnnsys.partition.merge import core_ids, original_by_global, original_by_local
from gnnsys.partition.part import Part
from gnnsys.partition.parts_directory import Parts


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equality of bits: a NaN equals itself, and 0.0 is not -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(as_bytes(left), as_bytes(right))


def compare_with_source(parts: Parts, graph: Graph, meter: Meter) -> Iterator[str]:
    """Every array of every part, halo columns included, against the graph's own."""
    sizes: dict[object, int] = {t: parts.book.num_ids(t) for t in parts.schema.node_types}
    sizes |= {t: parts.book.num_ids(t) for t in parts.schema.edge_types}
    expected: dict[object, int] = {t: graph.num_nodes(t) for t in graph.node_types}
    expected |= {t: graph.num_edges(t) for t in graph.edge_types}
    if sizes != expected:
        yield f"the parts have {sizes}, the source {expected}"
        return
    if parts.schema != Schema.of(graph):
        yield f"the schema is {parts.schema}, the source's {Schema.of(graph)}"
        return
    if parts.graph_info != graph.info:
        yield f"the graph's info is {parts.graph_info}, the source's {graph.info}"
    original = {t: original_by_global(parts, t) for t in parts.schema.node_types}
    for index in range(parts.num_parts):
        part = parts.part(index)
        for node_type, arrays in part.node_data.items():
            ids = core_ids(part, node_type)
            for name, rows in arrays.items():
                source = graph.node_data[node_type][name]
                for first, end in row_pieces(rows, rows.shape[0]):
                    if not same_bytes(rows[first:end], take(source, ids[first:end])):
                        yield f"part {index}: rows of {name!r} of {node_type!r} differ from the source"
                        break
        for edge_type in parts.schema.edge_types:
            names = original_by_local(part, edge_type[0], original[edge_type[0]])
            yield from _compare_edges(part, edge_type, graph, names)
        meter.advance(sum(parts.stored_bytes(index).values()), f"part {index} against the source")


def _compare_edges(part: Part, edge_type: EdgeType, graph: Graph, names: Tensor) -> Iterator[str]:
    csc, source = part.csc(edge_type), graph.csc(edge_type)
    columns, different = part.original_ids(edge_type[2]), set()
    for first, end in column_pieces(csc.indptr):
        there = in_subgraph(source, columns[first:end])
        piece = slice(int(csc.indptr[first]), int(csc.indptr[end]))
        if not torch.equal(csc.indptr[first : end + 1] - piece.start, there.indptr):
            different.add("degrees")
            break
        if not torch.equal(gather_rows(names, csc.indices[piece]).long(), there.indices.long()):
            different.add("edges")
        assert there.edge_ids is not None
        numbers = there.edge_ids if source.edge_ids is None else take(source.edge_ids, there.edge_ids)
        ids = part.column_edge_ids(first, end, edge_type)
        if ids is not None and not torch.equal(ids.long(), numbers.long()):
            different.add("edge ids")
        for name, rows in part.edge_data[edge_type].items():
            if not same_bytes(rows[piece], take(graph.edge_data[edge_type][name], numbers)):
                different.add(f"rows of {name!r}")
    for what in sorted(different):
        yield f"part {part.index}: {what} of {edge_type} differ from the source"


def compare_copies(parts: Parts, part: Part, edge_type: EdgeType) -> Iterator[str]:
    """Columns of halo nodes (`halo_hops` > 1) against those of the parts that own them."""
    dst = edge_type[2]
    num_core, num_columns = part.num_core(dst), part.num_columns(dst)
    halo = part.halo(dst)[: num_columns - num_core].long()
    owners = parts.book.part_of(halo, dst)
    for owner in owners.unique().tolist():
        chosen = (owners == owner).nonzero().view(-1)
        there = parts.part(owner)
        local = parts.book.to_local(halo[chosen], owner, dst)
        mine = chosen + num_core
        if not torch.equal(part.original_ids(dst)[mine].long(), core_ids(there, dst)[local].long()):
            yield f"part {part.index}: original ids of its halo of type {dst!r} are not part {owner}'s"
        if not _same_columns(part, mine, there, local, edge_type):
            yield f"part {part.index}: columns of its halo, {edge_type}, are not those of part {owner}"


def _same_columns(here: Part, mine: Tensor, there: Part, theirs: Tensor, edge_type: EdgeType) -> bool:
    indptr = here.csc(edge_type).indptr
    degrees = indptr[mine + 1] - indptr[mine]
    sizes = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    for first, end in column_pieces(sizes):
        a = in_subgraph(here.csc(edge_type), mine[first:end])
        b = in_subgraph(there.csc(edge_type), theirs[first:end])
        if not torch.equal(a.indptr, b.indptr) or not _same_edges(here, a, there, b, edge_type):
            return False
    return True


def _same_edges(here: Part, a: CSC, there: Part, b: CSC, edge_type: EdgeType) -> bool:
    """Two cuts of equal shape: sources, global ids, the user's ids and rows."""
    at, bt = a.edge_ids, b.edge_ids
    assert at is not None and bt is not None
    src = edge_type[0]
    if not torch.equal(here.global_ids(a.indices, src), there.global_ids(b.indices, src)):
        return False
    if not torch.equal(here.global_edge_ids(at, edge_type), there.global_edge_ids(bt, edge_type)):
        return False
    numbers = [part.edge_ids(positions, edge_type) for part, positions in ((here, at), (there, bt))]
    if numbers[0] is not None and (numbers[1] is None or not torch.equal(numbers[0], numbers[1])):
        return False
    rows = here.edge_data[edge_type]
    return all(same_bytes(take(rows[name], at), take(there.edge_data[edge_type][name], bt)) for name in rows)
