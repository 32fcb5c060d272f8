"""A suite of this checkout beside the same suite of another one: did a change make anything slower?

Both run in processes of their own, one after the other and in turns (here, there, there, here, ...), so that a machine
that gets slower does so for both. A case's figure is the median over the rounds of here divided by there, oriented so
that more is better. `gnnsys bench loader --against ../before` prints it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gnnsys.bench.case import Unit

TOLERANCE = 0.03
"""How much worse than before is still the same."""
_SECONDS = 3600.0  # for one run of a suite


@dataclass(frozen=True)
class Change:
    """One case: the figures of every round, and how many times better here is."""

    name: str
    unit: Unit
    here: tuple[float, ...]
    there: tuple[float, ...]

    @staticmethod
    def header() -> str:
        return f"{'name':<42}  {'unit':<10}  {'here':>10}  {'there':>10}  {'ratio':>6}  rounds"

    @property
    def ratio(self) -> float:
        return median(self.unit.ratio(a, b) for a, b in zip(self.here, self.there, strict=True))

    @property
    def is_worse(self) -> bool:
        return self.ratio < 1 - TOLERANCE

    def line(self) -> str:
        """As it is printed; the spread of the rounds tells how much the ratio is worth."""
        ratios = [self.unit.ratio(a, b) for a, b in zip(self.here, self.there, strict=True)]
        figures = f"{median(self.here):10.4g}  {median(self.there):10.4g}  {self.ratio:6.3f}"
        verdict = "  WORSE" if self.is_worse else ""
        return f"{self.name:<42}  {self.unit.name:<10}  {figures}  {min(ratios):.3f} to {max(ratios):.3f}{verdict}"


def compare(
    arguments: Sequence[str],
    units: Mapping[str, Unit],
    there: Path,
    rounds: int,
    show: Callable[[str], None] = print,
) -> list[Change]:
    """Runs `gnnsys bench ARGUMENTS` in both checkouts, `rounds` times each. `units` has the cases by name."""
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    here = Path(__file__).resolve().parents[2]
    there = there.resolve()
    if not any((there / "gnnsys").glob("_C*.so")):
        raise ValueError(
            f"--against {there}: no built checkout is there: run `python setup.py build_ext --inplace` in it"
        )
    checkouts = {"here": here, "there": there}
    figures: dict[str, list[dict[str, float]]] = {"here": [], "there": []}
    for number in range(rounds):
        for side in ("here", "there") if number % 2 == 0 else ("there", "here"):
            show(f"round {number + 1} of {rounds}: {checkouts[side]}")
            figures[side].append(_run(checkouts[side], arguments))
    changes = []
    for name, unit in units.items():
        both = [[one.get(name) for one in runs] for runs in figures.values()]
        found = [tuple(value for value in values if value is not None) for values in both]
        if all(len(values) == rounds for values in found):
            changes.append(Change(name, unit, found[0], found[1]))
        else:
            show(f"{name}: did not run in both")
    return changes


def _run(checkout: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Our figure of every case that ran, in a process that loads the package of `checkout`, or fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        program = (
            "import sys, gnnsys; from pathlib import Path; from gnnsys.cli import main; "
            f"assert Path(gnnsys.__file__).resolve().is_relative_to({str(checkout)!r}), gnnsys.__file__; "
            "sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", program, "bench", *arguments, "--json", str(report)]
        path = os.pathsep.join([str(checkout), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode != 0 or not report.exists():
            words = " ".join(arguments)
            raise ValueError(f"gnnsys bench {words} ended with {done.returncode} in {checkout}: {done.stderr[-2000:]}")
        rows = json.loads(report.read_text())["rows"]
    return {row["name"]: row["ours"] for row in rows if row["ours"] is not None}
