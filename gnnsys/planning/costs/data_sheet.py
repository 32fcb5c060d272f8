"""Costs of a machine that nobody can measure, from the rates on its data sheet.

A plan for such a machine needs no more than which way is several times faster. Every operator is taken to be bound by
the bytes that it moves, or by its multiply-adds; the factors below say how many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnsys.planning.costs.model import OperatorCost
from gnnsys.planning.costs.operators import LINE, SECTOR

_CALL = 2e-6  # of a host operator, from Python
_EDGE_READS, _NODE_READS = (
    2,
    3,
)  # lines of memory: drawn, looked up; a new node is written, too
_MOVED = 2  # a gathered row is read and written
_ADAM_BYTES = 28  # of a parameter: four arrays are read, three written
_SORTED_BYTES = 48  # of an edge, until a batch's structure and its transpose are made
_SPMM_LAUNCHES, _COMPACT_LAUNCHES, _HOP_LAUNCHES, _OPTIMIZER_LAUNCHES = 2, 12, 10, 4


@dataclass(frozen=True)
class Rated:
    """Bytes and multiply-adds per second, and seconds of a launch. No device where `bus` or `device` is 0."""

    host: float
    host_macs: float
    bus: float = 0.0
    pageable: float = 0.0
    device: float = 0.0
    device_macs: float = 0.0
    launch: float = 5e-6


def rated_costs(rated: Rated) -> dict[str, OperatorCost]:
    """Of every operator; without a device, of those on the host. ValueError for rates that are none."""
    if not (rated.host > 0 and rated.host_macs > 0):
        raise ValueError("a machine has cores, whose bytes and multiply-adds per second must be more than 0")
    costs = _costs_of("host", rated.host, rated.host_macs, _CALL)
    if rated.bus > 0 or rated.device > 0:
        if not (rated.bus > 0 and rated.device > 0 and rated.device_macs > 0):
            raise ValueError("a machine with a GPU needs all of bus_gbs, device_gbs and device_tflops")
        costs |= _costs_of("device", rated.device, rated.device_macs, rated.launch) | _costs_of_bus(rated)
    return {name: OperatorCost(terms) for name, terms in costs.items()}


def _costs_of(place: str, memory: float, macs: float, call: float) -> dict[str, dict[str, float]]:
    """Operators that exist on both sides; a GPU moves less for a random read, and is called more often."""
    line = LINE if place == "host" else SECTOR
    launches = (1, 1, 1) if place == "host" else (_SPMM_LAUNCHES, _HOP_LAUNCHES, _OPTIMIZER_LAUNCHES)
    element = {"elements": 4 / memory} if place == "host" else {"bytes": 1 / memory}
    product = {"call": call, "macs": 1 / macs, "read": 1 / memory, "written": 1 / memory}
    return {
        f"sample/{place}": {
            "hops": launches[1] * call,
            "edges": (_EDGE_READS if place == "host" else _EDGE_READS / 2) * line / memory,
            "nodes": _NODE_READS * line / memory,
        },
        f"gather/{place}": {"call": call, "bytes": _MOVED / memory},
        f"spmm/{place}": {"call": launches[0] * call, **element, "written": 1 / memory},
        f"product/{place}": product,
        f"backward/{place}": product,
        f"optimizer/{place}": {"call": launches[2] * call, "parameters": _ADAM_BYTES / memory},
    }


def _costs_of_bus(rated: Rated) -> dict[str, dict[str, float]]:
    launch, bus, device = rated.launch, rated.bus, rated.device
    return {
        "sample/pinned": {
            "hops": _HOP_LAUNCHES * launch,
            "edges": LINE / bus + SECTOR / device,
            "nodes": _NODE_READS * SECTOR / device,
        },
        "gather/bus": {"call": launch, "sectors": SECTOR / bus},
        "gather/cached": {"call": launch, "hit bytes": _MOVED / device, "missed sectors": SECTOR / bus},
        "copy/up": {"call": launch, "bytes": 1 / bus},
        "copy/down": {"call": launch, "bytes": 1 / bus},
        "copy/pageable": {"call": launch, "bytes": 1 / rated.pageable},
        "compact/device": {"call": _COMPACT_LAUNCHES * launch, "edges": _SORTED_BYTES / device},
        "launch/device": {"calls": launch},
    }
