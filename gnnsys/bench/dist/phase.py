"""A phase: a stretch of training that is measured, inside a job that has several so that they share its start.

Trainer and harness speak through two things both can see: lines that rank 0 prints, and files in the job's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnsys.loader import PipelineOptions

SYNCHRONOUS, ASYNCHRONOUS, NON_STOP, KEEPING = "synchronous", "asynchronous", "non-stop", "keeping"
COMPUTE = "compute"
AHEAD = {"num_threads": 1, "prefetch": 1}
NO_LONGER = PipelineOptions(depths={"sample": 1}, keep=0)  # five batches at most, and rows that are shared by those alone
MODES: dict[str, dict[str, Any]] = {
    # sample, fetch and compute, one after another
    SYNCHRONOUS: {"num_threads": 0, "across_epochs": False, "pipeline": NO_LONGER},
    ASYNCHRONOUS: {**AHEAD, "across_epochs": False, "pipeline": NO_LONGER},  # ahead, but not into the next epoch
    NON_STOP: {**AHEAD, "across_epochs": True, "pipeline": NO_LONGER},
    KEEPING: {**AHEAD, "across_epochs": True, "pipeline": PipelineOptions(depths={"sample": 1})},
    COMPUTE: {"num_threads": 0, "across_epochs": False},  # one batch, over and over: no loading at all
}
READY, BEGIN, END, FIGURES = "phase-ready", "phase-begin", "phase-end", "phase-figures"  # lines: word, name (, JSON)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`warm` steps that are not measured, then `epochs` epochs that are; `rate` of every link, None for no limit."""

    name: str
    mode: str = KEEPING
    rate: str | None = None
    warm: int = 3
    epochs: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.warm < 0 or self.epochs < 1:
            raise ValueError(f"warm must be >= 0 and epochs >= 1, got {self.warm} and {self.epochs}")


def save(phases: Sequence[Phase], folder: Path) -> None:
    (folder / "phases.json").write_text(json.dumps([asdict(phase) for phase in phases]))


def load(folder: Path) -> list[Phase]:
    return [Phase(**value) for value in json.loads((folder / "phases.json").read_text())]


def go_file(folder: Path, word: str, name: str) -> Path:
    """Written by the harness when links have the phase's rate (READY), and when it has read the counters (BEGIN)."""
    return folder / f"{name}.{word}.go"
