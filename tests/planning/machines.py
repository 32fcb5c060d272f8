"""Machines that others have measured: their figures, and profiles with the rates of these.

Every operator that was measured has one rate: the one with the least relative errors. Calls and all else are from data
sheets. `python -m tests.planning.machines` writes the profiles that docs/ has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from gnnsys.planning.costs import OPERATORS, MachineProfile, OperatorCost

FOLDER = Path(__file__).parents[2] / "docs" / "machines"
# DAHA, Table 2: nodes, edges, features, classes. Its hidden layers are taken to be 16 wide.
PAPER_GRAPHS = {
    "cora": (2708, 10556, 1433, 7),
    "citeseer": (3327, 9104, 3703, 6),
    "pubmed": (19717, 88648, 500, 3),
    "cs": (18333, 163788, 6805, 15),
    "physics": (34493, 495924, 8415, 5),
}
HIDDEN = 16
# DAHA, Table 6, "truth" of M1: seconds of 100 epochs, spmm and mm on processor and GPU, and transfer.
M1_SECONDS = {
    "pubmed": (5.8, 0.5, 0.3001, 0.1, 0.6),
    "cs": (68.8993, 6.2001, 1.0, 0.1001, 6.011),
    "physics": (243.9285, 17.3027, 2.4999, 0.2, 13.8314),
}
M1_MEGABYTES = {"pubmed": 41.382, "cs": 479.125, "physics": 1117.459}  # Table 2: both matrices


Seen = Mapping[str, tuple[str, list[tuple[dict[str, float], float]]]]
"""Of each operator what it is bound by, and sizes with seconds."""


def paper_m1() -> MachineProfile:
    """An i9-12900KF and an RTX 3080 Ti, by Table 6; its copies are from pageable memory."""
    at: list[list[tuple[dict[str, float], float]]] = [[], [], [], [], []]
    for name, seconds in M1_SECONDS.items():
        nodes, edges, features, _ = PAPER_GRAPHS[name]
        sums = {"edges": edges + nodes, "destinations": nodes, "width": features}
        product = {"rows": nodes, "inner": features, "width": HIDDEN}
        copy = {"bytes": 1e6 * M1_MEGABYTES[name]}
        for seen, sizes, of_100_epochs in zip(at, (sums, sums, product, product, copy), seconds, strict=True):
            seen.append((sizes, of_100_epochs / 100))
    sums_host, sums_device, product_host, product_device, copies = at
    sheet = MachineProfile.from_rates(
        cores=16, host_gbs_per_core=3.5, host_gflops_per_core=40, bus_gbs=8, device_gbs=730, device_tflops=27,
        pageable_gbs=8, processor="Intel i9-12900KF", gpu="NVIDIA GeForce RTX 3080 Ti",
        source="rates of DAHA, Table 6 (M1, truth), and data sheets",
    )  # fmt: skip
    return _with_rates(sheet, {
        "spmm/host": ("elements", sums_host),
        "spmm/device": ("bytes", sums_device),
        "product/host": ("macs", product_host),
        "product/device": ("macs", product_device),
        "copy/up": ("bytes", copies),
        "copy/down": ("bytes", copies),
        "copy/pageable": ("bytes", copies),
    })  # fmt: skip


def h200() -> MachineProfile:
    """An H200 with 16 cores and PCIe 5: figures of a batch of 1,024 seeds, and of a product of 8,415 columns."""
    rows, destinations, edges = 640_000, 164_000, 985_000
    sheet = MachineProfile.from_rates(
        cores=16, host_gbs_per_core=4.3, host_gflops_per_core=30, bus_gbs=55, device_gbs=4000, device_tflops=60,
        processor="16 cores", gpu="NVIDIA H200", source="rates of some operators, and data sheets",
    )  # fmt: skip
    copies = [
        ({"bytes": 400.0 * rows}, 4.6e-3),
        ({"bytes": 4096.0 * 400_000}, 29.5e-3),
        ({"bytes": 4.0 * 34_493 * 8_415}, 20.9e-3),
    ]
    products = [
        ({"rows": rows, "inner": 100, "width": 256}, 72e-3),
        ({"rows": 34_493, "inner": 8_415, "width": 16}, 16.9e-3),
    ]
    own_rows = [({"rows": destinations, "row_bytes": 400}, 1.0e-3), ({"rows": 110_000, "row_bytes": 4096}, 12e-3)]
    return _with_rates(sheet, {
        "copy/up": ("bytes", copies),
        "gather/bus": ("sectors", [({"rows": rows, "row_bytes": 400}, 5.4e-3)]),
        "sample/pinned": ("edges", [({"edges": edges, "nodes": rows, "hops": 3}, 1.5e-3)]),
        "spmm/host": ("elements", [({"edges": edges, "destinations": destinations, "width": 100}, 10.9e-3)]),
        "gather/host": ("bytes", own_rows),
        "product/host": ("macs", products),
    })  # fmt: skip


def _with_rates(sheet: MachineProfile, seen: Seen) -> MachineProfile:
    costs = {}
    for name, (term, points) in seen.items():
        operator = OPERATORS[name]
        calls = {key: value for key, value in sheet.costs.operators[name].terms.items() if key in ("call", "hops")}
        parts = [operator.quantities(operator.checked(sizes), sheet.costs.context) for sizes, _ in points]
        left = [
            seconds - sum(calls[key] * part[key] for key in calls)
            for part, (_, seconds) in zip(parts, points, strict=True)
        ]
        share = np.array([part[term] / seconds for part, seconds in zip(parts, left, strict=True)])
        costs[name] = OperatorCost({**calls, term: float(share.sum() / (share**2).sum())}, points=len(points))
        if name.startswith("product"):
            costs[name.replace("product", "backward")] = costs[name]
    return replace(sheet, costs=sheet.costs.replace(costs))


PROFILES = {"daha-m1": paper_m1, "h200": h200}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in PROFILES.items():
        make().save(FOLDER / f"{name}.json")
