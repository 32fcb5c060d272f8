"""Rows and what becomes of them: a table for a person, JSON for a machine, and a verdict for CI.

`ratio` is oriented so that bigger is better for us, whatever the unit: 2.0 means twice as good as the peer.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench import peers
from gnnsys.bench.case import Case, Versus
from gnnsys.bench.measure import Measured, median


@dataclass(frozen=True)
class Row:
    """One comparison. `peer` and `ratio` are None when the peer did not run; `met` is None when nothing was judged.

    `reason` says why a peer of the row has no figure: it is not installed, or it cannot do this here.
    """

    name: str
    unit: str
    ours: float | None
    peer: float | None
    peer_name: str
    ratio: float | None
    limit: float | None
    target: float | None
    met: bool | None
    reason: str | None = None


@dataclass
class Report:
    """The rows of one run, with all that is needed to read them later."""

    suite: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    more_is_better: dict[str, bool] = field(default_factory=dict)  # by case
    absent: dict[str, str] = field(default_factory=dict)  # peer -> why it is not in the rows
    refused: dict[str, dict[str, str]] = field(default_factory=dict)  # case -> peer -> why it cannot do that
    not_run: list[str] = field(default_factory=list)  # required rows without a figure, with the reason
    interrupted: str | None = None  # the case that ran when it was

    def add(self, case: Case, measured: Measured) -> list[Row]:
        """Turns what was measured of a case into its rows."""
        samples = measured.samples
        if measured.refused:
            self.refused[case.name] = dict(measured.refused)
        figures = {name: case.unit.figure(median(values)) for name, values in samples.items()}
        self.samples[case.name] = {n: [case.unit.figure(v) for v in values] for n, values in samples.items()}
        self.more_is_better[case.name] = case.unit.more_is_better
        rows = [self._row(case, versus, figures, measured.refused) for versus in case.versus]
        self.rows += rows
        return rows

    def add_failure(self, case: Case, reason: str) -> None:
        """A case that raised: its rows stay in the report without figures."""
        self.rows += [self._empty_row(case, versus, None, reason=reason) for versus in case.versus]
        self.not_run.append(f"{case.name}: {reason}")

    def add_missing(self, case: Case, reason: str) -> list[Row]:
        """A case that this machine cannot run: rows without figures, of which `--check` misses the required ones."""
        rows = [self._empty_row(case, versus, None, reason=reason) for versus in case.versus]
        self.rows += rows
        if any(versus.required for versus in case.versus):
            self.not_run.append(f"{case.name}: {reason}")
        return rows

    def interrupt(self, left: Sequence[Case]) -> None:
        """The first of these cases was running, the others had not begun."""
        self.interrupted = left[0].name
        required = [case for case in left if any(versus.required for versus in case.versus)]
        self.not_run += [f"{case.name}: interrupted" for case in required]

    def failures(self) -> list[str]:
        """What `--check` objects to, a line each; empty when all is well."""
        missed = [
            f"{r.name} beside {r.peer_name}: ratio {r.ratio:.2f}, target {r.target:.2f}"
            for r in self.rows
            if r.met is False and r.ratio is not None and r.target is not None
        ]
        return missed + [f"did not run: {line}" for line in self.not_run]

    def _row(self, case: Case, versus: Versus, figures: dict[str, float], refused: Mapping[str, str]) -> Row:
        without = [p for p in versus.peers if p not in figures]
        absent = {p: (case.missing or {}).get(p, "no such side") for p in without if p not in refused}
        reason = "; ".join(f"{p}: {absent.get(p) or refused[p]}" for p in without) or None
        self.absent.update(absent)
        if absent and versus.required:
            self.not_run += [f"{case.name} beside {peer}: {reason}" for peer, reason in absent.items()]
        present = {p: figures[p] for p in versus.peers if p in figures}
        ours = figures[case.ours]
        half_a_bound = versus.pick == "worst" and any(p in refused for p in without)
        if not present or half_a_bound:
            return self._empty_row(case, versus, ours, figures.get(case.limit or ""), reason=reason)
        wants_most = case.unit.more_is_better == (versus.pick == "best")
        peer = (max if wants_most else min)(present, key=lambda p: present[p])
        ratio = case.unit.ratio(ours, present[peer])
        judged = versus.target is not None and not self.quick
        return Row(
            name=case.name,
            unit=case.unit.name,
            ours=ours,
            peer=present[peer],
            peer_name=versus.label or peer,
            ratio=ratio,
            limit=figures.get(case.limit or ""),
            target=versus.target,
            met=ratio >= versus.target if judged and versus.target is not None else None,
            reason=reason,
        )

    def _empty_row(
        self, case: Case, versus: Versus, ours: float | None, limit: float | None = None, *, reason: str | None
    ) -> Row:
        name = versus.label or "/".join(versus.peers)
        return Row(case.name, case.unit.name, ours, None, name, None, limit, versus.target, None, reason)

    # -- faces -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "quick": self.quick,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "environment": environment(),
            "ratio": "how many times better ours is; bigger is better",
            "rows": [asdict(row) for row in self.rows],
            "absent": self.absent,
            "refused": self.refused,
            "not_run": self.not_run,
            **({} if self.interrupted is None else {"interrupted": self.interrupted}),
            "more_is_better": self.more_is_better,
            "samples": self.samples,
        }

    def write(self, path: Path) -> None:
        """In one go. A run that was interrupted before its first row leaves a file that is there as it is."""
        if self.interrupted is not None and not self.rows:
            return
        text = json.dumps(self.to_json(), indent=1) + "\n"
        if path.is_symlink() or (path.exists() and not path.is_file()):  # a pipe, or /dev/stdout
            path.write_text(text)
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)


def environment() -> dict[str, Any]:
    """Hardware and versions: what a figure depends on besides the code."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: v for name in peers.PEERS if (v := peers.version(name)) is not None}
    return {**hardware(), "versions": versions}


def hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(v, 2) for v in os.getloadavg()],
        **({"gpu": _gpu()} if torch.cuda.is_available() else {}),
    }


def library_versions() -> dict[str, str]:
    """Of what a training job runs on; nothing is imported for it."""
    names = ("gnnsys", "numpy", "pyzmq", "cryptography")
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_state() -> dict[str, Any] | None:
    """The commit of this checkout, and whether files were changed since; None where it is none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    asked = [["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=True)
            for words in asked
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "is_changed": bool(changed.stdout.strip())}


def _gpu() -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": facts.name,
        "memory": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "l2": facts.L2_cache_size,
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    """The driver's version, which torch does not know: nvidia-smi's word for it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return lines[0].strip() if lines else "unknown"


def _processor() -> str:
    """The processor's name as the kernel gives it; on Arm, where it gives none, implementer and part."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    if "model name" in facts:
        return facts["model name"]
    if "CPU part" in facts:
        return f"Arm implementer {facts.get('CPU implementer')}, part {facts['CPU part']}"
    return platform.processor() or "unknown"
