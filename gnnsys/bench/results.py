"""Results of benchmarks as they lie on disk: what `gnnsys bench SUITE --json` and `gnnsys bench suite` write.

Both become cases with samples by side, so that whoever compares or draws does not care where they are from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.bench import peers
from gnnsys.bench.case import OURS

CELL_KIND = "gnnsys-suite-cell"
_OTHERS = (*peers.PEERS, "PyG", "torch", "index_select", "index_add_", "memcpy", "cuSPARSE", "device copy", "bare ")
"""How names of sides begin that are others' code."""


@dataclass(frozen=True)
class CaseSamples:
    """Figures of a case, repeat by repeat: `ours`, and by side those of others' code."""

    name: str
    unit: str
    more_is_better: bool
    ours: list[float]
    others: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """What a file or a folder holds. `reasons`: why a case has no samples."""

    path: Path
    cases: dict[str, CaseSamples] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)  # of the machine when each file was begun, per core


def read_results(path: Path) -> Results:
    """Of a JSON file, or of all in a folder. A case that several files have is one with the samples of all."""
    if not path.exists():
        raise ValueError(f"{path} is not there: give a file of `gnnsys bench SUITE --json`, or a folder of results")
    files = sorted((path / "cells").glob("*.json")) or sorted(path.glob("*.json")) if path.is_dir() else [path]
    results = Results(path)
    for file in files:
        _read_file(file, results)
    if not results.cases:
        raise ValueError(f"{path} holds no results of a benchmark")
    return results


def _read_file(file: Path, results: Results) -> None:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(told, dict) or not ({"rows", "samples"} <= set(told) or told.get("kind") == CELL_KIND):
        raise ValueError(f"{file} is not a result of `gnnsys bench SUITE --json` or `gnnsys bench suite`")
    environment = told.get("environment") or {}
    results.versions.update(environment.get("versions", {}))
    results.hardware.update({name: environment.get(name) for name in ("machine", "processor", "cores")})
    if environment.get("load") and environment.get("cores"):
        results.loads.append(environment["load"][0] / environment["cores"])
    cases = _cells(told, results) if told.get("kind") == CELL_KIND else _rows(told, results)
    for case in cases:
        known = results.cases.get(case.name)
        if known is None:
            results.cases[case.name] = case
            continue
        known.ours.extend(case.ours)
        for side, values in case.others.items():
            known.others.setdefault(side, []).extend(values)


def _rows(told: dict[str, Any], results: Results) -> list[CaseSamples]:
    """A report of `gnnsys bench SUITE`."""
    found = []
    rows = {row["name"]: row for row in told["rows"]}
    for name, row in rows.items():
        sides = told["samples"].get(name, {})
        if OURS not in sides and row.get("reason"):
            results.reasons[name] = row["reason"]
        more = told.get("more_is_better", {}).get(name)
        if more is None:
            more = _more_is_better([r for r in told["rows"] if r["name"] == name])
        others = {side: list(values) for side, values in sides.items() if side.startswith(_OTHERS)}
        found.append(CaseSamples(name, row["unit"], more, list(sides.get(OURS, ())), others))
    return found


def _more_is_better(rows: list[dict[str, Any]]) -> bool:
    """Of reports that do not say so: by a ratio, which is oriented, and else by the unit."""
    for row in rows:
        ours, peer, ratio = row["ours"], row["peer"], row["ratio"]
        if ours and peer and ratio and abs(ours / peer - 1) > 1e-9:
            return abs(ratio - ours / peer) < abs(ratio - peer / ours)
    return str(rows[0]["unit"]).endswith("/s")


def _cells(told: dict[str, Any], results: Results) -> list[CaseSamples]:
    """A cell of a suite: a case for everything that it measured."""
    name = told["name"]
    if told["status"] != "done":
        results.reasons.update({f"{name}/{measure}": told["reason"] for measure in told["compared"]})
        return [CaseSamples(f"{name}/{measure}", measure, True, []) for measure in told["compared"]]
    return [
        CaseSamples(f"{name}/{measure}", measure, of["more_is_better"], list(of["samples"]))
        for measure, of in told["measures"].items()
        if measure in told["compared"]
    ]
