"""Restores the newest checkpoint of which every file is complete on some machine, or says why there is none.

All files are checked before anything is loaded. Ranks first exchange what they found, so that all decide the same, and
an error on one rank is raised on every rank.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnsys.checkpoint import folder as folders
from gnnsys.checkpoint.files import read_state
from gnnsys.checkpoint.folder import LocalCheckpoint
from gnnsys.checkpoint.folder_lock import FolderLock
from gnnsys.checkpoint.generators import seed_generators, write_generators
from gnnsys.checkpoint.missing_files import brought
from gnnsys.checkpoint.optimizer_parameters import check_places, places_of
from gnnsys.checkpoint.rank_differences import differing_file, merged
from gnnsys.checkpoint.snapshot import same
from gnnsys.checkpoint.states import States, unwrapped
from gnnsys.checkpoint.tables import SavedTable, graph_of
from gnnsys.comm import Group

if TYPE_CHECKING:
    from gnnsys.session import Session

_log = logging.getLogger(__name__)
_READ_SECONDS = 1800.0  # to read a machine's files once


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A checkpoint of which every file is on some machine. `names`: its folder on each machine that has files of it.

    `holders`: the machines that have each file.
    """

    manifest: dict[str, Any]
    names: dict[int, str]
    holders: dict[str, list[int]]

    @property
    def steps(self) -> int:
        return int(self.manifest["steps"])

    def path(self, folder: Path, machine: int) -> Path:
        """Its folder on a machine. It keeps the staging name while the job that wrote it has not renamed it yet."""
        named = folder / folders.name_of(self.steps)
        return named if named.is_dir() or machine not in self.names else folder / self.names[machine]


def restore(
    folder: Path, group: Group, session: Session | None, states: States, lock: FolderLock
) -> CompleteCheckpoint | None:
    """Loads the newest complete checkpoint in `folder` into `states`; None if there is none yet."""
    found = _find(folder, group, session, states)
    _tidy(folder, group, found, lock)
    if found is None:
        if group.rank == 0:
            _log.info("no checkpoint in %s: begins at step 0", folder)
        return None
    path = found.path(folder, group.machine)
    tables = _fitting(group, session, states, found)
    wanted, entries = _wanted(group, found, tables), found.manifest["files"]
    with brought(group, session, path, wanted, found.holders, entries) as files:
        saved = _Loaded(group, states, found, files)
        _restore_tables(group, path, found, tables, files)
    saved.load()
    if group.rank == 0:
        _log.info("restored step %d from %s", found.steps, path)
    return found


# -- which one --------------------------------------------------------------------------------------------------------


def _find(folder: Path, group: Group, session: Session | None, states: States) -> CompleteCheckpoint | None:
    seen: list[Any] = []
    wrong: list[str] = []
    problem = None
    if group.is_leader:
        try:
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, give a folder", str(folder))
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "it may not be written to", str(folder))
            seen = [[s.name, s.steps, s.token, s.lacks] for s in folders.look(folder)]
            wrong = folders.unreadable(folder)
        except OSError as error:
            problem = (
                f"machine {group.machine}: checkpoints cannot be kept in {error.filename or folder}: {error.strerror}"
            )
    group.agree("checkpoint's folder", problem, timeout=_READ_SECONDS)
    told = group.gather("checkpoints seen", [group.machine, seen, wrong], timeout=_READ_SECONDS)
    by_machine = {machine: [LocalCheckpoint(*entry) for entry in entries] for machine, entries, _ in told if entries}
    complaints = [f"machine {machine}: {text}" for machine, _, texts in told for text in texts]
    tokens = {s.token: s.steps for entries in by_machine.values() for s in entries}
    for token in sorted(tokens, key=lambda token: tokens[token], reverse=True):
        here = {m: s for m, entries in by_machine.items() for s in entries if s.token == token}
        nowhere = set.intersection(*[set(s.lacks) for s in here.values()])
        if not nowhere:
            found = _share_manifest(folder, group, here)
            problem = _check(folder, group, found, _reads(group, session, states, found))
            if problem is None:
                if complaints and group.rank == 0:
                    _log.warning("step %d is restored, because: %s", found.steps, "; ".join(complaints))
                return found
            complaints.append(problem)
        elif any(not s.name.startswith(".") for s in here.values()):  # an unfinished save is no loss
            complaints.append(f"{folder / folders.name_of(tokens[token])} lacks {min(nowhere)} on every machine")
    if complaints:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(complaints)}. Bring back the machines and files it was "
            "saved on, or give another folder to begin anew"
        )
    return None


def _share_manifest(folder: Path, group: Group, here: dict[int, LocalCheckpoint]) -> CompleteCheckpoint:
    machine = min(here)
    root = next(rank for rank, of in enumerate(group.machine_of_rank) if of == machine)
    value = folders.read_checkpoint(folder / here[machine].name) if group.rank == root else None
    manifest = group.share("checkpoint's manifest", value, root=root, timeout=_READ_SECONDS)
    holders = {file: [m for m, s in sorted(here.items()) if file not in s.lacks] for file in manifest["files"]}
    return CompleteCheckpoint(manifest, {m: s.name for m, s in here.items()}, holders)


def _reads(group: Group, session: Session | None, states: States, found: CompleteCheckpoint) -> set[str]:
    """The files that this machine will read from its own disk."""
    try:
        tables = _tables_of(session, states, found)
        wanted = _wanted(group, found, tables)
        folders_read = {folder for table in tables for folder in table.reads(group.machine, found.holders)}
    except Exception:  # it does not fit these states: `_fitting` reports it on all ranks
        return set()
    return {*wanted, *(file for file in found.manifest["files"] if file.rsplit("/", 1)[0] in folders_read)}


def _check(folder: Path, group: Group, found: CompleteCheckpoint, reads: Set[str]) -> str | None:
    """Checks all files: each machine those that it will read, and every file on at least one machine.

    Several machines may have copies of a file, and one copy may be damaged. Returns the first problem, or None.
    """
    problem = None
    if group.is_leader and group.machine in found.names:
        mine = {
            file: found.manifest["files"][file]
            for number, (file, have) in enumerate(sorted(found.holders.items()))
            if have[number % len(have)] == group.machine or (group.machine in have and file in reads)
        }
        problem = folders.check_files(folder / found.names[group.machine], mine)
    told = group.gather("checkpoint checked", problem, timeout=_READ_SECONDS)
    return next((text for text in told if text is not None), None)


def _tidy(folder: Path, group: Group, found: CompleteCheckpoint | None, lock: FolderLock) -> None:
    """Renames the found checkpoint if its job did not get to it, sets damaged newer ones aside, removes leftovers.

    Does nothing in the folder of another job that still runs: what looks left over there is being written.
    """
    problem, other, dead = None, None, None
    with suppress(OSError):  # reported below
        dead = lock.dead() if group.is_leader else None
    lock.learn(group.gather("checkpoints' owner", dead, timeout=_READ_SECONDS))
    if group.is_leader:
        try:
            other = lock.other()
            if other is not None:
                _log.warning("another job that still runs saves to %s (%s): this one cannot", folder, other)
        except OSError as error:
            problem = f"machine {group.machine}: {error}"
    if group.is_leader and other is None and problem is None:
        try:
            name = None if found is None else found.names.get(group.machine)
            if found is not None:
                for seen in sorted(folder.iterdir()):
                    if folders.is_checkpoint(seen.name) and seen.name > folders.name_of(found.steps):
                        folders.set_aside(folder, seen.name)
                if name is not None and name.startswith("."):
                    folders.publish(folder, name, found.steps, found.manifest["token"])
            folders.sweep(folder)
        except (OSError, ValueError) as error:
            problem = f"machine {group.machine}: {error}"
    group.agree("checkpoints tidied", problem, timeout=_READ_SECONDS)


# -- what is in it ----------------------------------------------------------------------------------------------------


def _attempt(group: Group, meeting: str, act: Callable[[], Any]) -> Any:
    """Calls `act` on every rank. If one rank fails, all ranks raise its error."""
    problem, result = None, None
    try:
        result = act()
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    group.agree(meeting, problem, _READ_SECONDS)
    return result


def _tables_of(session: Session | None, states: States, found: CompleteCheckpoint) -> list[SavedTable]:
    """The tables of a checkpoint. ValueError, with the reason, if one cannot be restored into the tables of now."""
    tables, entries = [], found.manifest["tables"]
    for name, saved in sorted(states.saved_tables(entries, session).items()):
        table = states.tables[name]
        tables.append(SavedTable(saved, entries[saved], table, graph_of(table, session)))
        tables[-1].check()
    return tables


def _fitting(group: Group, session: Session | None, states: States, found: CompleteCheckpoint) -> list[SavedTable]:
    def check() -> list[SavedTable]:
        manifest = found.manifest
        known = states.saved_tables(manifest["tables"], session)
        for kind, names in states.names().items():
            is_table = kind == "tables"
            missing = sorted(set(names) - set(known if is_table else manifest[kind]))
            more = sorted(set(manifest[kind]) - set(known.values() if is_table else names))
            if missing or more:
                told = f"it has no {missing[0]!r}" if missing else f"it has {more[0]!r}, which resume() was not given"
                raise ValueError(
                    f"the checkpoint of step {found.steps} is of another job: {told}. Its names are "
                    f"{', '.join([*manifest['shared'], *manifest['own'], *sorted(manifest['tables'])])}"
                )
        kinds = states.optimizers()
        for name, kind in sorted(manifest.get("optimizers", {}).items()):  # earlier versions did not keep it
            if kinds.get(name) != kind:
                raise ValueError(
                    f"the checkpoint of step {found.steps} has {name} as {kind}, resume() was given "
                    f"{type(states.shared[name]).__name__}: options and moments of one mean nothing to another. Give "
                    f"it {kind} again, or another folder to begin anew"
                )
        return _tables_of(session, states, found)

    return _attempt(group, "checkpoint fits", check)


def _wanted(group: Group, found: CompleteCheckpoint, tables: Sequence[SavedTable]) -> list[str]:
    """The files that every machine reads."""
    wanted = ["dense.pt", *(f"rank-{rank}.pt" for rank in range(found.manifest["world_size"]))]
    if group.world_size == found.manifest["world_size"]:
        wanted += sorted(found.manifest.get("differing", ()))
    if any(table.is_moved for table in tables):
        wanted += [file for files in found.manifest["originals"].values() for file in files]
    return wanted


def _restore_tables(
    group: Group, path: Path, found: CompleteCheckpoint, tables: Sequence[SavedTable], files: dict[str, Path]
) -> None:
    if not tables:
        return
    originals = {t: [files[f] for f in names if f in files] for t, names in found.manifest["originals"].items()}

    def begin() -> None:
        for table in tables:
            table.begin()

    def push() -> None:
        if group.is_leader:
            for table in tables:
                table.push(path, group.machine, found.holders, originals)

    _attempt(group, "tables are ready", begin)
    _attempt(group, "tables are restored", push)


class _Loaded:
    """States that were read from files and checked; `load` loads them."""

    def __init__(self, group: Group, states: States, found: CompleteCheckpoint, files: dict[str, Path]) -> None:
        self._group, self._states = group, states
        self._world_size = int(found.manifest["world_size"])

        def read() -> list[Any]:
            ranks = [read_state(files[f"rank-{rank}.pt"]) for rank in range(self._world_size)]
            self._check_own(ranks)
            mine = ranks[group.rank if self._is_same_size else 0]
            check_places(mine.get("parameters", {}), places_of(states), found.steps)  # earlier versions did not keep it
            own = files.get(differing_file(group.rank))
            return [read_state(files["dense.pt"]), {} if own is None else read_state(own), ranks]

        self._dense, self._differing, self._ranks = _attempt(group, "states are read", read)
        if group.rank == 0 and not self._is_same_size and found.manifest.get("differing"):
            text = "%d ranks saved different values of %s, and %d are here: all take those that rank 0 saved"
            _log.warning(text, self._world_size, _described(found.manifest["differing"]), group.world_size)

    def load(self) -> None:
        """Loads all states. Generators come last, because loading may draw from them."""

        def load() -> None:
            for name, value in self._states.shared.items():
                state = merged(self._dense[name], self._differing.get(name))
                _load(name, unwrapped(value).load_state_dict, state)
            for name, value in self._states.own.items():
                saved = [states["own"][name] for states in self._ranks]
                if hasattr(value, "load_state_dicts"):
                    _load(name, value.load_state_dicts, saved)
                else:
                    _load(name, value.load_state_dict, saved[self._group.rank if self._is_same_size else 0])
            if self._group.rank < self._world_size:
                write_generators(self._ranks[self._group.rank]["generators"])
            else:
                seed_generators([states["generators"] for states in self._ranks], self._group.rank)

        _attempt(self._group, "states are loaded", load)

    @property
    def _is_same_size(self) -> bool:
        return self._world_size == self._group.world_size

    def _check_own(self, ranks: Sequence[dict[str, Any]]) -> None:
        if self._is_same_size:
            return
        for name, value in self._states.own.items():
            first = ranks[0]["own"][name]
            if not hasattr(value, "load_state_dicts") and not all(same(first, r["own"][name]) for r in ranks):
                raise ValueError(
                    f"{name} was saved by {self._world_size} ranks, each its own, and {self._group.world_size} are here"
                    f": a {type(value).__name__} has no load_state_dicts() to deal them out again. Start as many ranks"
                )


def _load(name: str, load: Callable[[Any], Any], state: Any) -> None:
    try:
        load(state)
    except Exception as error:
        raise ValueError(f"{name} does not take the state it was saved with: {error}") from error


def _described(differing: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The states that ranks saved separately, as text: `model (norm.running_mean and 2 more), scaler`."""
    keys: dict[str, set[str]] = {}
    for own in differing.values():
        for name, entries in own.items():
            keys.setdefault(name, set()).update(entries)
    more = {name: f" and {len(each) - 1} more" if len(each) > 1 else "" for name, each in keys.items()}
    return ", ".join(f"{name} ({min(each)}{more[name]})" if each else name for name, each in sorted(keys.items()))
