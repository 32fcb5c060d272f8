"""Where a device finds the parts of its machine: in its own memory, in mapped files that it reads, or not at all.

| place | structure | rows |
|---|---|---|
| device | copied to the device | copied to the device |
| structure | copied to the device | in their files, which the device reads over the bus; short ones are copied |
| registered | indices in their files, the rest on the device | the same |
| host | sampled by the host | gathered by the host |

`auto` takes the first of these that fits: what is copied may take half of what the device has left, shared among the
ranks that use it, because models, batches and caches come later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import HAS_CUDA_KERNELS, WHY_NO_KERNELS
from gnnsys.sampling.device_structure import DeviceStructure, structure_bytes
from gnnsys.sampling.part_view import UNIFORM
from gnnsys.sampling.tables import part_rows
from gnnsys.store import DeviceTable, MemoryBudget, RegisteredFiles, TablePiece, copied_pieces, is_short

if TYPE_CHECKING:
    from gnnsys.sampling.dist_graph import DistGraph

DEVICE, STRUCTURE, REGISTERED, HOST = "device", "structure", "registered", "host"
PLACES = ("auto", DEVICE, STRUCTURE, REGISTERED, HOST)
_SHARE = 0.5  # of what the device has left
_log = logging.getLogger(__name__)


class PartBytes(NamedTuple):
    """What a machine's own parts take of a device, when they are copied there."""

    structure: int
    rows: int


class Placed(NamedTuple):
    """What was chosen, and why."""

    place: str
    why: str

    def __str__(self) -> str:
        return f"place={self.place!r}, {self.why}"


def check_place(place: str) -> None:
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")


def choose_place(bytes: PartBytes, left: int) -> Placed:
    """The first place that fits, by bytes alone. `left`: what this process may still take of the device.

    >>> choose_place(PartBytes(10, 100), 1000).place, choose_place(PartBytes(10, 100), 100).place
    ('device', 'structure')
    """
    allowed = int(_SHARE * left)
    both = bytes.structure + bytes.rows
    if both <= allowed:
        return Placed(DEVICE, f"structure and rows take {_size(both)} of the {_size(allowed)} they may take there")
    if bytes.structure <= allowed:
        return Placed(
            STRUCTURE,
            f"structure takes {_size(bytes.structure)} of {_size(allowed)}, with rows it would be {_size(both)}",
        )
    return Placed(REGISTERED, f"structure alone would take {_size(bytes.structure)}, and {_size(allowed)} are allowed")


def place_parts_on(graph: DistGraph, device: torch.device, place: str = "auto") -> Placed:
    """Has `device` sample and read the graph's own parts by itself, as far as `place` says; tells what came of it.

    ValueError where a place that was named cannot be had; `auto` falls back to the host, which can always do it.
    """
    check_place(place)
    if device.type == "cuda" and not HAS_CUDA_KERNELS and place not in ("auto", HOST):
        raise ValueError(f"place={place!r} needs CUDA kernels; {WHY_NO_KERNELS}. Or pass place='host'")
    if place == HOST or not graph.parts_here or (device.type == "cuda" and not HAS_CUDA_KERNELS):
        why = "as was asked for" if place == HOST else "no part is here" if not graph.parts_here else WHY_NO_KERNELS
        graph.use_device(device, None, {})
        return Placed(HOST, why)
    rows = own_rows(graph)
    bytes = PartBytes(
        structure_bytes(graph.parts, graph.parts_here), sum(r.nbytes for of in rows.values() for _, r in of)
    )
    chosen = Placed(place, "as was asked for")
    if place == "auto":
        chosen = choose_place(bytes, MemoryBudget.of(device).share())
    try:
        structure, tables = _place(graph, device, chosen.place, rows)
    except _Refused as refused:
        if place != "auto":
            raise ValueError(f"place={place!r} cannot be had on {device}: {refused}") from refused
        chosen = Placed(HOST, str(refused))
        structure, tables = None, {}
    graph.use_device(device, structure, tables)
    files = graph.registered
    if files is not None and files.copied_bytes:
        copied = f"{_size(files.copied_bytes)} from shared memory, as {files.why_copied}"
        chosen = chosen._replace(why=f"{chosen.why}; {copied}")
    _log.info("parts %s for %s: %s", graph.parts_here, device, chosen)
    return chosen


def own_rows(graph: DistGraph) -> dict[str, list[tuple[int, Tensor]]]:
    """Of every table of nodes and edges, (first row, rows) of each part that is here."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for part in graph.parts_here:
        for name, rows in part_rows(graph.parts, part).items():
            if name.startswith(("node/", "edge/")):
                first = graph.store.spec(name).bounds[part]
                found.setdefault(name, []).append((first, rows))
    return found


class _Refused(Exception):
    """A place that cannot be had, and why."""


def _place(
    graph: DistGraph, device: torch.device, place: str, rows: Mapping[str, list[tuple[int, Tensor]]]
) -> tuple[DeviceStructure, dict[str, DeviceTable]]:
    files = None if place == DEVICE else RegisteredFiles(device)
    try:
        structure = DeviceStructure(graph.parts, graph.parts_here, device, files if place == REGISTERED else None)
        if files is not None and place == REGISTERED:
            _check_indices(structure, files)
        structure.runs(UNIFORM, graph.own_view)  # copied now, so that a device that is full is found now
        tables = {}
        for name, of_parts in rows.items():
            if files is None or all(is_short(of_part, device) for _, of_part in of_parts):
                pieces = copied_pieces(of_parts, device)
            else:
                pieces = _registered(files, of_parts, device)
            tables[name] = DeviceTable(graph.store.tensor(name), pieces, device)
    except BaseException as error:
        if files is not None:
            files.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise _Refused(f"{device} is full: {str(error).splitlines()[0]}") from error
        raise
    graph.registered = files
    return structure, tables


def _check_indices(structure: DeviceStructure, files: RegisteredFiles) -> None:
    for part in structure.own_parts:
        for edge_type in structure.parts.schema.edge_types:
            if files.view(structure.parts.part(part).csc(edge_type).indices) is None:
                raise _Refused(files.why_not)


def _registered(files: RegisteredFiles, of_parts: list[tuple[int, Tensor]], device: torch.device) -> list[TablePiece]:
    views = [(first, files.view(rows)) for first, rows in of_parts]
    if any(view is None for _, view in views):
        raise _Refused(files.why_not)
    return [TablePiece(first, view) for first, view in views if view is not None]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
