"""Runs the cells of a suite one after another and keeps a JSON of each in the result folder.

    RESULTS/suite.json           which suite the folder is of
    RESULTS/cells/NAME.json      a cell: figures repeat by repeat, or the reason why there are none
    RESULTS/logs/NAME.log        what its processes printed
    RESULTS/parts/               parts of graphs, shared by cells (elsewhere with `cache`)

A cell that has a JSON is not run again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.bench.matrix.cell import Cell
from gnnsys.bench.matrix.description import Description
from gnnsys.bench.matrix.figures import cell_measures, stage_counters
from gnnsys.bench.matrix.lab_cell import run_in_lab
from gnnsys.bench.matrix.prepare import parts_name
from gnnsys.bench.matrix.processes import Ended, reason_of_output, run_with_deadline
from gnnsys.bench.report import git_state, hardware, library_versions
from gnnsys.bench.results import CELL_KIND
from gnnsys.graph import MANIFEST
from gnnsys.lab import available
from gnnsys.observe import num_usable_cores

TRAINER, PREPARE = "gnnsys.bench.matrix.train", "gnnsys.bench.matrix.prepare"
DONE, FAILED = "done", "failed"
COMPARED = ("seeds/s", "MB of remote rows/epoch", "s to accuracy")
_SUITE_KIND = "gnnsys-suite"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """`only`: cells whose name contains it (A|B: A or B). `retry`: cells that failed are run again."""

    only: str | None = None
    retry: bool = False
    cache: Path | None = None


@dataclass(frozen=True)
class CellRow:
    """A cell as it is printed."""

    name: str
    status: str
    reason: str | None
    medians: dict[str, float]
    is_old: bool = False  # from a run before

    @staticmethod
    def header() -> str:
        return f"{'cell':<56}  {'seeds/s':>9}  {'s/epoch':>8}  {'MB rows':>8}  {'waiting':>7}  status"

    def line(self) -> str:
        found = [self.medians.get(n) for n in ("seeds/s", "s/epoch", "MB of remote rows/epoch", "% waiting")]
        rate, seconds, rows, waiting = ("-" if v is None else f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in found)
        extra = "" if "s to accuracy" not in self.medians else f", {self.medians['s to accuracy']:.3g} s to accuracy"
        status = (
            self.status + extra + (f": {self.reason}" if self.reason else "") + (" (before)" if self.is_old else "")
        )
        return f"{self.name:<56}  {rate:>9}  {seconds:>8}  {rows:>8}  {waiting:>7}  {status}"


def run_matrix(
    description: Description, out: Path, options: RunOptions, show: Callable[[str], None] = print
) -> list[CellRow]:
    """Rows of all selected cells. What a cell does wrong is in its row."""
    cells = [c for c in description.cells if options.only is None or any(p in c.name for p in options.only.split("|"))]
    if not cells:
        names = ", ".join(cell.name for cell in description.cells)
        raise ValueError(f"--only {options.only!r} matches none of: {names}")
    if description.where == "lab" and (lacking := available()):
        raise ValueError(lacking)
    _claim(out, description)
    show(CellRow.header())
    rows = []
    commits: Counter[str] = Counter()
    for number, cell in enumerate(cells, 1):
        path = out / "cells" / cell.file_name
        found = _read(path)
        is_old = found is not None and not (options.retry and found["status"] == FAILED)
        if not is_old:
            print(f"  {number} of {len(cells)}: {cell.name} ...", file=sys.stderr, flush=True)
            found = run_cell(description, cell, out, options.cache)
            _write(path, found)
        assert found is not None
        rows.append(make_row(found, is_old))
        show(rows[-1].line())
        commits[str((found["environment"]["git"] or {}).get("commit"))] += 1
    if len(commits) > 1:
        counts = ", ".join(f"{count} of {commit[:12]}" for commit, count in commits.items())
        show(f"note: cells are of different commits: {counts}")
    return rows


def run_cell(description: Description, cell: Cell, out: Path, cache: Path | None) -> dict[str, Any]:
    """The cell's JSON."""
    begin = time.monotonic()
    told: dict[str, Any] = {
        "kind": CELL_KIND,
        "suite": description.name,
        "digest": description.digest,
        "name": cell.name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": {**hardware(), "versions": library_versions(), "git": git_state()},
        "where": description.where,
        "cell": cell.to_json(),
        "compared": list(COMPARED[:1]),
    }
    log = out / "logs" / f"{cell.file_name.removesuffix('.json')}.log"
    reason, figures = _attempt(description, cell, out, cache, log)
    told |= {"status": FAILED if reason else DONE, "reason": reason, "seconds": round(time.monotonic() - begin, 3)}
    if figures is not None:
        measures = cell_measures(cell, figures)
        told |= {
            "measures": measures,
            "compared": [name for name in COMPARED if name in measures],
            "stages": stage_counters(figures["ranks"]),
            "figures": figures,
        }
    return told


def make_row(found: dict[str, Any], is_old: bool = False) -> CellRow:
    medians = {name: statistics.median(of["samples"]) for name, of in found.get("measures", {}).items()}
    return CellRow(found["name"], found["status"], found["reason"], medians, is_old)


def _attempt(
    description: Description, cell: Cell, out: Path, cache: Path | None, log: Path
) -> tuple[str | None, dict[str, Any] | None]:
    """Why there are no figures, or the figures. The deadline is for parts and job, each."""
    scratch = out.resolve() / "running"
    scratch.mkdir(exist_ok=True)
    told, result = scratch / "cell.json", scratch / "result.json"
    result.unlink(missing_ok=True)
    if not cell.parts:
        cell = replace(cell, parts=str(_parts_folder(cell, out, cache)))
    cell.save(told)
    if not (Path(cell.parts) / MANIFEST).exists():
        made = run_with_deadline(
            [sys.executable, "-m", PREPARE, str(told), cell.parts], cell.deadline, trainer_environment()
        )
        if made.code != 0:
            log.write_text(made.output)
            return f"its parts: {reason_of_output(made, cell.deadline)}", None
    job = ["-m", TRAINER, str(told), str(result)]
    traffic = None
    if description.where == "lab":
        ended, traffic = run_in_lab(cell, job, scratch)
    else:
        ended = _run_here(description, cell, job)
    log.write_text(ended.output)
    if ended.code != 0:
        return reason_of_output(ended, cell.deadline), None
    if not result.exists():
        return "its ranks ended without figures", None
    figures = json.loads(result.read_text())
    return None, figures if traffic is None else {**figures, "traffic": traffic}


def _run_here(description: Description, cell: Cell, job: list[str]) -> Ended:
    if description.launcher:
        numbers = {"hosts": str(cell.hosts), "trainers": str(cell.trainers)}
        words = [_fill(word, numbers) for word in description.launcher]
    else:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(cell.trainers)]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, num_usable_cores() // cell.trainers)))
    return run_with_deadline([*words, *job], cell.deadline, trainer_environment(OMP_NUM_THREADS=threads))


def _fill(word: str, numbers: dict[str, str]) -> str:
    for name, value in numbers.items():
        word = word.replace("{" + name + "}", value)
    return word


def _parts_folder(cell: Cell, out: Path, cache: Path | None) -> Path:
    folder = (cache or out / "parts").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / parts_name(cell)


def _claim(out: Path, description: Description) -> None:
    """Makes the folder this suite's, or refuses one of another."""
    path = out / "suite.json"
    if path.exists():
        known = json.loads(path.read_text())
        if known.get("kind") != _SUITE_KIND or known.get("digest") != description.digest:
            whose = f"suite {known.get('name')!r}" if known.get("name") != description.name else "another version of it"
            raise ValueError(f"{out} has results of {whose}, not of {description.name!r}: give another folder by --out")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is neither empty nor results of a suite: give another folder by --out")
    for folder in ("cells", "logs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    if not path.exists():
        told = {"kind": _SUITE_KIND, "name": description.name, "digest": description.digest, "told": description.told}
        _write(path, told)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _write(path: Path, told: dict[str, Any]) -> None:
    """All of it or nothing, also when the run is killed."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told, indent=1) + "\n")
    os.replace(part, path)
