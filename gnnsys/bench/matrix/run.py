"""Runs the cells of a suite one after another and keeps a JSON of each in the result folder.

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
from gnnsys.bench.matrix.cluster import LaunchedCluster
from gnnsys.bench.matrix.description import LAB, Description
from gnnsys.bench.matrix.figures import cell_measures, stage_counters
from gnnsys.bench.matrix.lab_cell import run_in_lab
from gnnsys.bench.matrix.prepare import parts_name
from gnnsys.bench.matrix.processes import Ended, reason_of_output, run_with_deadline
from gnnsys.bench.matrix.result_folder import ResultFolder
from gnnsys.bench.report import git_state, hardware, library_versions
from gnnsys.bench.results import CELL_KIND
from gnnsys.graph import MANIFEST
from gnnsys.lab import available
from gnnsys.observe import num_usable_cores

TRAINER, PREPARE = "gnnsys.bench.matrix.train", "gnnsys.bench.matrix.prepare"
DONE, FAILED = "done", "failed"
COMPARED = ("seeds/s", "CPU s/epoch", "MB of remote rows/epoch", "s to accuracy")


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
    if description.where == LAB and (lacking := available()):
        raise ValueError(lacking)
    cluster = None if description.cluster is None else LaunchedCluster.find(description.cluster, cells)
    with ResultFolder.claimed(out, description) as folder:
        runner = CellRunner(description, folder, options.cache, cluster)
        for note in description.notes:
            show(f"note: {note}")
        show(CellRow.header())
        rows = []
        commits: Counter[str] = Counter()
        for number, cell in enumerate(cells, 1):
            found = folder.read(cell)
            is_old = found is not None and not (options.retry and found["status"] == FAILED)
            if not is_old:
                print(f"  {number} of {len(cells)}: {cell.name} ...", file=sys.stderr, flush=True)
                found = runner.run(cell)
                folder.write(cell, found)
            assert found is not None
            rows.append(make_row(found, is_old))
            show(rows[-1].line())
            commits[str((found["environment"]["git"] or {}).get("commit"))] += 1
    if len(commits) > 1:
        counts = ", ".join(f"{count} of {commit[:12]}" for commit, count in commits.items())
        show(f"note: cells are of different commits: {counts}")
    return rows


def make_row(found: dict[str, Any], is_old: bool = False) -> CellRow:
    medians = {name: statistics.median(of["samples"]) for name, of in found.get("measures", {}).items()}
    return CellRow(found["name"], found["status"], found["reason"], medians, is_old)


class CellRunner:
    """Runs cells of a description, where it says."""

    def __init__(
        self, description: Description, folder: ResultFolder, cache: Path | None, cluster: LaunchedCluster | None
    ) -> None:
        self._description, self._folder, self._cluster = description, folder, cluster
        self._parts = folder.parts if cache is None else cache.resolve()

    def run(self, cell: Cell) -> dict[str, Any]:
        """The cell's JSON."""
        begin = time.monotonic()
        told: dict[str, Any] = {
            "kind": CELL_KIND,
            "suite": self._description.name,
            "digest": self._description.digest,
            "name": cell.name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "environment": {**hardware(), "versions": library_versions(), "git": git_state()},
            "where": self._description.where,
            "cell": cell.to_json(),
            "compared": list(COMPARED[:1]),
        }
        reason, figures = self._attempt(cell)
        told |= {"status": FAILED if reason else DONE, "reason": reason, "seconds": round(time.monotonic() - begin, 3)}
        if figures is not None:
            measures = cell_measures(cell, figures)
            told |= {
                "measures": measures,
                "compared": [name for name in COMPARED if name in measures],
                "stages": stage_counters(figures["ranks"]),
                "figures": figures,
            }
            if self._cluster is not None:  # it did not run on this machine
                first = next(iter(figures["hosts"].values()))
                told["environment"] |= {**first, "versions": figures["versions"]}
        return told

    def _attempt(self, cell: Cell) -> tuple[str | None, dict[str, Any] | None]:
        """Why there are no figures, or the figures. The deadline is for parts and job, each."""
        if not cell.parts:
            made = self._make_parts(cell)
            cell = replace(cell, parts=str(self._parts / parts_name(cell)))
            if made is not None and made.code != 0:
                self._folder.log_path(cell).write_text(made.output)
                return f"its parts: {reason_of_output(made, cell.deadline)}", None
        if self._cluster is not None:
            ended, figures, reason = self._cluster.run(cell, TRAINER, self._folder.scratch)
        else:
            ended, figures, reason = self._run_beside(cell)
        self._folder.log_path(cell).write_text(ended.output)
        return reason, figures

    def _make_parts(self, cell: Cell) -> Ended | None:
        """None where they are there."""
        out = self._parts / parts_name(cell)
        if (out / MANIFEST).exists():
            return None
        self._parts.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", PREPARE, cell.to_text(), str(out)]
        return run_with_deadline(command, cell.deadline, trainer_environment())

    def _run_beside(self, cell: Cell) -> tuple[Ended, dict[str, Any] | None, str | None]:
        """On this machine or in the lab: ranks read and write files of this folder."""
        scratch = self._folder.scratch
        told, result = scratch / "cell.json", scratch / "result.json"
        result.unlink(missing_ok=True)
        told.write_text(cell.to_text())
        job = ["-m", TRAINER, str(told), str(result)]
        traffic = None
        if self._description.where == LAB:
            ended, traffic = run_in_lab(cell, job, scratch)
        else:
            ended = self._run_here(cell, job)
        if ended.code != 0:
            return ended, None, reason_of_output(ended, cell.deadline)
        if not result.exists():
            return ended, None, "its ranks ended without figures"
        figures = json.loads(result.read_text())
        return ended, figures if traffic is None else {**figures, "traffic": traffic}, None

    def _run_here(self, cell: Cell, job: list[str]) -> Ended:
        if self._description.launcher:
            numbers = {"hosts": str(cell.hosts), "trainers": str(cell.trainers)}
            words = [_fill(word, numbers) for word in self._description.launcher]
        else:
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", str(cell.trainers)]
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, num_usable_cores() // cell.trainers)))
        return run_with_deadline([*words, *job], cell.deadline, trainer_environment(OMP_NUM_THREADS=threads))


def _fill(word: str, numbers: dict[str, str]) -> str:
    for name, value in numbers.items():
        word = word.replace("{" + name + "}", value)
    return word
