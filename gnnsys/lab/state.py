"""The state of a lab on disk: a folder under /run, through which another process can use or remove the lab.

The folder is made first and removed last, so whatever a crash leaves behind can be found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from gnnsys.lab import control_groups

ROOT = Path("/run/gnnsys-lab")


def folder_of(lab: str) -> Path:
    return ROOT / lab


def read(lab: str) -> dict[str, Any]:
    """ValueError where there is no such lab."""
    try:
        return json.loads((folder_of(lab) / "state.json").read_text())
    except FileNotFoundError:
        there = ", ".join(all_labs()) or "none"
        raise ValueError(f"there is no lab {lab!r}; labs on this machine: {there}") from None


def write(lab: str, state: dict[str, Any]) -> Path:
    folder = folder_of(lab)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "state.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(path)
    return path


def all_labs() -> list[str]:
    """Every lab on this machine, dead ones included, oldest first."""
    if not ROOT.exists():
        return []
    return [path.parent.name for path in sorted(ROOT.glob("*/state.json"), key=_written)]


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks, or None. Tells a process from a later one with the same pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(state: dict[str, Any]) -> bool:
    """Whether its keeper runs, or, before there is one, the process that is making it."""
    return _same(state, "keeper") or ("keeper_pid" not in state and _same(state, "owner"))


def remove(lab: str, deadline: float = 15.0) -> None:
    """Takes a lab down in any state: first asks its keeper, then kills and removes what is left."""
    _remove(lab, read(lab), deadline)


def _remove(lab: str, state: dict[str, Any], deadline: float = 15.0) -> None:
    end = time.monotonic() + deadline
    if _same(state, "keeper"):
        pid = state["keeper_pid"]
        os.kill(pid, signal.SIGTERM)
        while _same(state, "keeper") and time.monotonic() < end:
            time.sleep(0.01)
        if _same(state, "keeper"):
            os.kill(pid, signal.SIGKILL)  # its namespaces go with it
    control_groups.remove([Path(path) for path in state["groups"]])
    shutil.rmtree(folder_of(lab), ignore_errors=True)


def remove_dead() -> list[str]:
    """Removes what crashed labs left. Returns their names."""
    dead = []
    for lab in all_labs():
        try:
            state = read(lab)
        except ValueError:
            continue  # gone meanwhile
        if not is_alive(state):
            _remove(lab, state)  # its own process may be doing so too
            dead.append(lab)
    return dead


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # removed in the meantime
        return 0.0


def _same(state: dict[str, Any], who: str) -> bool:
    pid = state.get(f"{who}_pid")
    return pid is not None and process_start(pid) == state.get(f"{who}_start")
