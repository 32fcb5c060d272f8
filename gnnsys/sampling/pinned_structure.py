"""The structure of a pinned graph on the device that samples it, where there is room: rows then have the bus alone.

A sampled edge is a read of a few bytes, for which the bus carries a whole sector, between the rows that the loader
brings at the same time. Structure is small beside rows, so a copy on the device often fits; it is made once for a graph
and a device, whoever samples.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.ops import CSC
from gnnsys.sampling.edge_sources import EdgeSource, pinned
from gnnsys.store import MemoryBudget

_SHARE = 0.25  # of what the device has left


def read_by_device(
    graph: Graph, sources: dict[EdgeType, EdgeSource], device: torch.device
) -> dict[EdgeType, EdgeSource]:
    """Sources of a pinned graph as `device` reads them: structure in its memory where it fits, all else pinned."""
    copies = structure_on(graph, device)
    found = {}
    for edge_type, source in sources.items():
        if source.csc is graph.csc(edge_type) and edge_type in copies:  # not one in the order of times
            source = replace(source, csc=copies[edge_type])
        found[edge_type] = pinned(source)
    return found


def structure_on(graph: Graph, device: torch.device) -> dict[EdgeType, CSC]:
    """Copies of a graph's structure on a device; none where they do not fit a quarter of what it has left."""
    if device not in graph.structure_copies:
        cscs = {t: graph.csc(t) for t in graph.edge_types}
        allowed = _SHARE * MemoryBudget.of(device).share()
        fits = sum(t.nbytes for csc in cscs.values() for t in _tensors(csc)) <= allowed
        graph.structure_copies[device] = {t: csc.to(device) for t, csc in cscs.items()} if fits else {}
        MemoryBudget.of(device).watch(graph, "structure of a pinned graph", lambda g: copied_bytes(g, device))
        torch.accelerator.synchronize(device)  # samples may be made on any stream
    return graph.structure_copies[device]


def copied_bytes(graph: Graph, device: torch.device) -> int:
    """What the copies take of the device's memory."""
    copies = graph.structure_copies.get(device, {})
    return sum(t.nbytes for csc in copies.values() for t in _tensors(csc))


def _tensors(csc: CSC) -> list[Tensor]:
    return [t for t in (csc.indptr, csc.indices, csc.edge_ids) if isinstance(t, Tensor)]
