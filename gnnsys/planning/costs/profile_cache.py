"""Profiles in the user's cache: one for each machine, build and number of threads, made when it is first asked for."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from gnnsys.observe import num_usable_cores
from gnnsys.planning.costs.facts import facts_of, gpu_of
from gnnsys.planning.costs.profile import MachineProfile, ProfiledMachine
from gnnsys.planning.costs.profiling import BUDGET_SECONDS, profile_machine

_CONTENTS = 3  # one more whenever other things are measured, or quantities mean something else: then all measure again
_PATIENCE = 3  # times what a profile takes
_LOOK_AGAIN = 0.05  # seconds


def machine_profile(
    device: torch.device | None = None,
    threads: int | None = None,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    again: bool = False,
) -> MachineProfile:
    """The profile of this machine, from the cache, or measured now and kept there; with `again`, measured in any case.

    Of several processes that ask at once one measures, as two would measure each other, and the others wait for it.
    A file that is damaged, or is of another machine, is made anew. A cache that cannot be written to is no error: the
    next process will measure again.
    """
    device = gpu_of(device)
    facts = facts_of(device, num_usable_cores() if threads is None else threads)
    path = profile_path(facts)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = None if again else cached_profile(facts)
    if kept is not None:
        return kept
    with _alone(path.parent / "lock", _PATIENCE * budget_seconds):
        kept = None if again else cached_profile(facts)
        if kept is not None:
            return kept
        made = profile_machine(device, facts.threads, budget_seconds)
        with suppress(OSError):
            made.save(path)
    return made


@contextmanager
def _alone(path: Path, seconds: float) -> Iterator[None]:
    """No other process of this machine is in here, unless it has been for so long. Without a lock where none can be."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_LOOK_AGAIN)
        yield
    finally:
        os.close(handle)


def cached_profile(facts: ProfiledMachine) -> MachineProfile | None:
    """What the cache has of such a machine; None where that is nothing of use."""
    try:
        found = MachineProfile.load(profile_path(facts))
    except (OSError, ValueError):
        return None
    return found if found.machine == facts else None


def profile_path(facts: ProfiledMachine) -> Path:
    """The file of a machine's profile, in `XDG_CACHE_HOME` or `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    named_by = json.dumps({**asdict(facts), "contents": _CONTENTS}, sort_keys=True)
    name = hashlib.sha256(named_by.encode()).hexdigest()[:16]
    return root / "gnnsys" / "profiles" / f"{name}.json"
