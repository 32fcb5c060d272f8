"""An inspection as text: one table with a row per part, totals under it, a second table where types are several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gnnsys.observe import format_size

if TYPE_CHECKING:
    from gnnsys.partition.inspect import Inspection
    from gnnsys.partition.remote_share import RemoteShare
    from gnnsys.partition.subpart_loads import Load

OVER = "!"  # after a share that is more than was allowed
_MOST_COLUMNS = 6  # of constraints; the others are in the totals


def inspection_table(inspection: Inspection) -> str:
    counts = f"{inspection.num_nodes:,} nodes, {inspection.num_edges:,} edges"
    hops = f"{inspection.halo_hops} hop" + ("s" if inspection.halo_hops > 1 else "")
    size = f"{_plural(len(inspection.parts), 'part')}, {_plural(inspection.trainers_per_part, 'trainer')} each"
    blocks = [f"{inspection.path}: {size}; {counts}; halo of {hops}", _parts(inspection), _totals(inspection)]
    if len(inspection.types) > 1:
        blocks.append(_types(inspection))
    return "\n\n".join(blocks)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _parts(inspection: Inspection) -> str:
    loads = inspection.loads[:_MOST_COLUMNS]
    header = ["part", "nodes", "edges", "halo", "cut", "sent", "received", "structure", "features", "total", "remote"]
    counts, stored = [], []
    rows = []
    for index, part in enumerate(inspection.parts):
        counts.append((part.num_nodes, part.num_edges, part.num_halo, part.num_cut, part.num_sent, part.num_received))
        stored.append((part.structure_bytes, part.feature_bytes, part.structure_bytes + part.feature_bytes))
        remote = _percent(inspection.remote.parts[index].fraction)
        marks = inspection.trainers_per_part == 1  # what was allowed is allowed to subparts
        shares = [_share(load.part_shares[index], load if marks else None) for load in loads]
        rows.append([str(index), *_numbers(counts[-1]), *map(format_size, stored[-1]), remote, *shares])
        if inspection.trainers_per_part > 1:
            rows += _subparts(inspection, index, loads)
    sums = [
        *_numbers(list(map(sum, zip(*counts, strict=True)))),
        *map(format_size, map(sum, zip(*stored, strict=True))),
    ]
    rows.append(["total", *sums, _percent(inspection.remote.fraction), *([""] * len(loads))])
    return columns([*header, *(f"{load.name}/avg" for load in loads)], rows)


def _subparts(inspection: Inspection, index: int, loads: Sequence[Load]) -> list[list[str]]:
    """What trainers have of their own: nodes, in-edges and the rows they send; halo and files are the part's."""
    rows = []
    for i, subpart in enumerate(inspection.parts[index].subparts):
        number = index * inspection.trainers_per_part + i
        shares = [_share(load.subpart_shares[number], load) for load in loads]
        nodes, edges, cut, sent = _numbers((subpart.num_nodes, subpart.num_edges, subpart.num_cut, subpart.num_sent))
        rows.append([f"  {index}.{i}", nodes, edges, "", cut, sent, "", "", "", "", "", *shares])
    return rows


def _totals(inspection: Inspection) -> str:
    lines = [
        ("cut", f"{inspection.cut_fraction:.2%} of the edges have their source in another part"),
        ("replication", f"{inspection.replication:.3f} (core and halo nodes to nodes)"),
        ("traffic", _traffic(inspection)),
        *((f"balance {load.name}", _balance(load)) for load in inspection.loads),
        ("structure", _structure(inspection)),
        ("remote", _remote(inspection.remote)),
        *(("note", note) for note in inspection.notes),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def _traffic(inspection: Inspection) -> str:
    most = [max(part.num_sent, part.num_received) for part in inspection.parts]
    ratio = max(most) * len(most) / sum(most) if sum(most) else 1.0
    return f"{sum(p.num_sent for p in inspection.parts):,} rows per layer; busiest part {ratio:.3f} of the average"


def _balance(load: Load) -> str:
    balance = load.balance
    text = f"{balance.ratio:.3f}"
    if load.trainers_per_part > 1:
        text += f" (whole parts {max(load.part_shares):.3f})"
    if load.allowed is None:
        return text
    text += f" of {load.allowed:.2f} allowed"
    return text if balance.met else f"{text} {OVER} {balance.reason}"


def _structure(inspection: Inspection) -> str:
    stored, edges, nodes = inspection.stored_bytes, max(inspection.num_edges, 1), max(inspection.num_nodes, 1)
    per_node = (stored["indptr"] + stored["original_ids"] + stored["halo"]) / nodes
    text = f"{stored['indices'] / edges:.2f} bytes per edge + {per_node:.2f} per node"
    text += f" (of which halo {stored['halo'] / nodes:.2f})"
    return f"{text}; edge ids {stored['edge_ids'] / edges:.2f} per edge" if stored["edge_ids"] else text


def _remote(remote: RemoteShare) -> str:
    if remote.fraction is None:
        return "no seeds: no batch to expect"
    text = f"{remote.fraction:.2%} of a batch's input rows, expected"
    text += f" (fanouts {','.join(map(str, remote.fanouts))}; {remote.batch_size:,} of a part's {remote.seeds})"
    if remote.num_skipped:
        text += (
            f"; {_plural(remote.num_skipped, 'more hop')} not counted on a graph this large: name fanouts to have them"
        )
    return text


def _types(inspection: Inspection) -> str:
    rows = []
    for of in inspection.types:
        counts = _numbers((of.num_nodes, of.num_halo, of.num_edges, of.num_cut, of.num_sent))
        rows.append([of.name, *counts, f"{of.balance:.3f}", format_size(of.feature_bytes)])
    return columns(["node type", "nodes", "halo", "in-edges", "cut", "sent", "largest/avg", "features"], rows)


def _share(share: float, marked: Load | None) -> str:
    over = marked is not None and marked.allowed is not None and share > marked.allowed + 1e-9
    return f"{share:.3f}{OVER if over else ''}"


def _numbers(values: Sequence[int]) -> list[str]:
    return [f"{value:,}" for value in values]


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
