"""Machines that others have measured: profiles with the rates of their figures.

Every operator that was measured has one rate, the one with the least relative errors, and the calls of data sheets.
Fits with more terms (`tests/planning/costs/published.py`) are nearer to Table 6 of DAHA, and give a call milliseconds,
as its graphs are few and large: they say little of sums of 16 columns, which pre-transformation has.
`python -m tests.planning.machines` writes the profiles that examples/ has, and what `gnnsys plan` prints with them into
docs/schedules.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from gnnsys.cli import main
from gnnsys.planning import MachineProfile, Observation, OperatorCost
from gnnsys.planning.costs import OPERATORS
from tests.planning.costs.published import FOLDER, HIDDEN, ROOT, SHEETS, observations

__all__ = ["FOLDER", "HIDDEN", "PAPER_GRAPHS", "PROFILES", "h200", "paper_m1", "printed_by", "shown_on_page"]

PAGE = ROOT / "docs" / "schedules.md"

PAPER_GRAPHS = {  # DAHA, Table 2: nodes, edges, features, classes
    "cora": (2708, 10556, 1433, 7),
    "citeseer": (3327, 9104, 3703, 6),
    "pubmed": (19717, 88648, 500, 3),
    "cs": (18333, 163788, 6805, 15),
    "physics": (34493, 495924, 8415, 5),
}
_BOUND_BY = {"spmm/host": "elements", "spmm/device": "bytes", "product/host": "macs", "product/device": "macs",
             "copy/up": "bytes", "copy/down": "bytes", "copy/pageable": "bytes", "gather/bus": "sectors",
             "gather/host": "bytes", "sample/pinned": "edges"}  # fmt: skip
_CALLS = ("call", "hops")


def paper_m1() -> MachineProfile:
    """An i9-12900KF and an RTX 3080 Ti, by Table 6; its copies are from pageable memory."""
    sheet = MachineProfile.from_rates(**SHEETS["M1"])
    return _with_rates(sheet, observations("M1"), "DAHA's M1: rates of Table 6, and data sheets for what it lacks")


def h200() -> MachineProfile:
    """An H200 with 16 cores and PCIe 5: figures of a batch of 1,024 seeds, and of a product of 8,415 columns."""
    rows, destinations, edges = 640_000, 164_000, 985_000
    sheet = MachineProfile.from_rates(
        cores=16, host_gbs_per_core=4.3, host_gflops_per_core=30, bus_gbs=55, device_gbs=4000, device_tflops=60,
        processor="16 cores", gpu="NVIDIA H200",
    )  # fmt: skip
    figures = [
        ("copy/up", {"bytes": 400.0 * rows}, 4.6e-3),
        ("copy/up", {"bytes": 4096.0 * 400_000}, 29.5e-3),
        ("copy/up", {"bytes": 4.0 * 34_493 * 8_415}, 20.9e-3),
        ("gather/bus", {"rows": rows, "row_bytes": 400.0}, 5.4e-3),
        ("sample/pinned", {"edges": edges, "nodes": rows, "hops": 3.0}, 1.5e-3),
        ("spmm/host", {"edges": edges, "destinations": destinations, "width": 100.0}, 10.9e-3),
        ("gather/host", {"rows": destinations, "row_bytes": 400.0}, 1.0e-3),
        ("gather/host", {"rows": 110_000.0, "row_bytes": 4096.0}, 12e-3),
        ("product/host", {"rows": rows, "inner": 100.0, "width": 256.0}, 72e-3),
        ("product/host", {"rows": 34_493.0, "inner": 8_415.0, "width": 16.0}, 16.9e-3),
    ]
    return _with_rates(sheet, [Observation(*one) for one in figures], "rates of some operators, and data sheets")


def _with_rates(sheet: MachineProfile, observed: Iterable[Observation], source: str) -> MachineProfile:
    seen: dict[str, list[Observation]] = {}
    for one in observed:
        seen.setdefault(one.operator, []).append(one)
    costs = {}
    for name, points in seen.items():
        operator, term = OPERATORS[name], _BOUND_BY[name]
        calls = {key: value for key, value in sheet.costs.operators[name].terms.items() if key in _CALLS}
        shares = []
        for one in points:
            parts = operator.quantities(operator.checked(one.sizes), sheet.costs.context)
            shares.append(parts[term] / (one.seconds - sum(value * parts[key] for key, value in calls.items())))
        rate = sum(shares) / float(np.square(shares).sum())
        costs[name] = OperatorCost({**calls, term: rate}, points=len(points))
        if name.startswith("product"):
            costs[name.replace("product", "backward")] = costs[name]
    return replace(
        sheet, machine=replace(sheet.machine, source=source), costs=sheet.costs.replace(costs)
    )  # fmt: skip


def printed_by(line: str) -> str:
    """What a command prints, run in the folder of the checkout."""
    printed, before = io.StringIO(), os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(printed):
            assert main(shlex.split(line)[1:]) == 0
    finally:
        os.chdir(before)
    return printed.getvalue()


def shown_on_page() -> dict[str, str]:
    """Commands of docs/schedules.md, and what it says they print."""
    found = (text.partition("\n") for text in re.findall(r"^```console\n\$ (.*?)^```$", PAGE.read_text(), re.M | re.S))
    return {line: output for line, _, output in found}


PROFILES = {"m1-rates": paper_m1, "h200": h200}

if __name__ == "__main__":
    for name, make in PROFILES.items():
        make().save(FOLDER / f"{name}.json")
    page = PAGE.read_text()
    for line, output in shown_on_page().items():
        page = page.replace(output, printed_by(line))
    PAGE.write_text(page)
