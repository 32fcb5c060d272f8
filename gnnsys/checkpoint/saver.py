"""Saver: counts steps and saves the job. It copies all states between two steps, and writes while training goes on.

A save has two halves. In `save`, all ranks meet with no push under way, and every rank and shard copies its states;
then training goes on. A thread writes the copies, and the ranks meet again: either every machine keeps the checkpoint,
or every machine removes it. Without copies (not asked for, or no memory for them) both halves run inside `save`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from gnnsys.checkpoint import folder as folders
from gnnsys.checkpoint import rank_differences
from gnnsys.checkpoint.errors import of_step, raise_first, words
from gnnsys.checkpoint.files import write_state
from gnnsys.checkpoint.folder_lock import FolderLock
from gnnsys.checkpoint.generators import read_generators
from gnnsys.checkpoint.optimizer_parameters import places_of
from gnnsys.checkpoint.restore import CompleteCheckpoint
from gnnsys.checkpoint.snapshot import RankSnapshot, as_it_is, check_state, copied, snapshot
from gnnsys.checkpoint.states import States, unwrapped
from gnnsys.checkpoint.tables import graph_of, merged_entries, originals_key, rows_of, table_folder, write_originals
from gnnsys.comm import CommError, Group, RendezvousError
from gnnsys.store import DistTensor, free_memory, sync_folders

if TYPE_CHECKING:
    from gnnsys.session import Session

_States: TypeAlias = dict[str, Any]  # by name
_log = logging.getLogger(__name__)
_WRITE_SECONDS = 7200.0  # for a machine to write its files: a terabyte on a slow disk
_GIVE_UP_SECONDS = 10.0  # for the files of a save that is given up to be removed
_SPARE = 0.1  # copies leave this share of the free memory free

STAGES = (
    "begun", "copied", "dense written", "rank written", "tables written", "all written", "described", "published",
    "old removed",
)  # fmt: skip


class Saver:
    """What `gnnsys.resume` returns.

    `steps`: training steps so far, including those before restarts. `restored`: the checkpoint that was restored, or
    None. `newest`: the last complete one. `on_stage(name)` is called at each of `STAGES` of a save, in the thread that
    saves.
    """

    def __init__(
        self,
        folder: Path,
        group: Group,
        session: Session | None,
        states: States,
        *,
        every: int | None,
        keep: int,
        asynchronous: bool,
        found: CompleteCheckpoint | None,
        lock: FolderLock,
    ) -> None:
        self.folder, self.every, self.keep, self.asynchronous = folder, every, keep, asynchronous
        self.steps = found.steps if found is not None else 0
        self.restored = None if found is None else folder / folders.name_of(found.steps)
        self.newest = self.restored
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._states, self._session = states, session
        self._group = group.apart("checkpoint")  # its own connection: the writing threads of all ranks meet too
        self._saved_steps = None if found is None else found.steps
        self._has_stepped = found is not None
        self._thread: threading.Thread | None = None
        self._error: tuple[int, Exception] | None = None  # the step whose checkpoint failed, and why
        self._lock = lock
        self._has_warned = False
        self._is_closed = False
        if session is not None:
            session.before_close.append(self.close)
        else:
            atexit.register(self.close)

    def step(self) -> bool:
        """Counts a training step, and saves after every `every` of them. Call it after the optimizer, on every rank."""
        self._check_open()
        self.steps += 1
        self._has_stepped = True
        if self.every is None or self.steps % self.every:
            return False
        self.save()
        return True

    def save(self) -> Path | None:
        """Saves now; every rank calls it. Returns None once the copy is taken, or the path if it was written at once.

        First waits for the previous save. If that one failed, raises its error, which names its step, on every rank,
        and saves nothing of this step.
        """
        self._check_open()
        self.wait()
        if self._saved_steps == self.steps:
            if not self._has_stepped:
                raise ValueError(f"step {self.steps} is saved already: call saver.step() after each training step")
            return self.newest
        copy = self._copy()
        self._saved_steps = self.steps
        if not self.asynchronous or copy.too_large is not None:
            self._write(copy)
            self.wait()
            return self.newest
        self._thread = threading.Thread(target=self._write, args=(copy,), name="gnnsys-checkpoint", daemon=True)
        self._thread.start()
        return None

    def wait(self) -> None:
        """Waits until nothing is being written. Raises the error of a failed save, on every rank."""
        if self._thread is not None:
            self._thread.join(3 * _WRITE_SECONDS)
            if self._thread.is_alive():
                raise TimeoutError(f"a checkpoint of step {self._saved_steps} is still being written to {self.folder}")
            self._thread = None
        failed, self._error = self._error, None
        if failed is not None:
            self._saved_steps = None
            raise of_step(*failed)

    def close(self, wait: bool = True) -> None:
        """Waits for the save under way and raises its error, if any.

        Without `wait` (after an error) several ranks give that save up: others may never come. One rank alone finishes
        it. Either way nothing is written to the folder afterwards, and its lock is free. Idempotent. Closing the
        session calls it too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._session is not None and self.close in self._session.before_close:
            self._session.before_close.remove(self.close)
        try:
            if wait:
                self.wait()
            elif self._thread is not None and self._group.world_size == 1:
                self._thread.join(_WRITE_SECONDS)
        finally:
            self._group.close()  # ends every meeting of the thread that writes
            if self._thread is not None:
                self._thread.join(_GIVE_UP_SECONDS)
            self._lock.close()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(wait=error is None)

    def __repr__(self) -> str:
        return f"Saver({str(self.folder)!r}, {self.steps} steps, newest {self.newest and self.newest.name})"

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this saver is closed: make another with gnnsys.resume()")

    # -- the first half: a copy ---------------------------------------------------------------------------------------

    def _begin(self) -> tuple[RankSnapshot, _States, _States]:
        """All ranks meet, with no push under way. Returns an empty snapshot, this rank's shared states, and the entries
        of those that differ from rank 0's."""
        group, problem, cause = self._group, None, None
        shared, digests = _States(), rank_differences.Digests()
        try:
            for store in self._states.stores():
                store.flush()
            shared = {name: unwrapped(value).state_dict() for name, value in self._states.shared.items()}
            digests = rank_differences.digest_states(shared) if group.world_size > 1 else {}
        except Exception as error:
            problem, cause = f"rank {group.rank}: {error}", error
        told = group.gather(
            "checkpoint begins", [problem, self.steps, secrets.token_hex(8), rank_differences.summary(digests)]
        )
        raise_first([entry[0] for entry in told], cause)
        differ = [rank for rank, entry in enumerate(told) if entry[1] != told[0][1]]
        if differ:
            raise ValueError(
                f"rank 0 saves after step {told[0][1]} and rank {differ[0]} after step {told[differ[0]][1]}: call "
                "saver.step() equally often on every rank"
            )
        apart = sorted({name for entry in told for name, digest in entry[3].items() if digest != told[0][3][name]})
        first = group.share("checkpoint's digests", {name: digests[name] for name in apart}) if apart else {}
        return RankSnapshot(self.steps, told[0][2]), shared, rank_differences.differing(shared, digests, first)

    def _copy(self) -> RankSnapshot:
        copy, shared, apart = self._begin()
        group, problem, cause = self._group, None, None
        self.on_stage("begun")
        try:
            self._fill(copy, shared, apart)
        except Exception as error:  # of any type: the other ranks must learn of it
            problem, cause = f"rank {group.rank} cannot save step {copy.steps}: {words(error)}", error
        told = group.gather("checkpoint copied", [problem, copy.too_large], timeout=_WRITE_SECONDS)
        problems = [problem for problem, _ in told]
        if any(problem is not None for problem in problems):
            self._give_up(copy)
        raise_first(problems, cause)
        copy.too_large = next((what for _, what in told if what is not None), None)
        if copy.too_large is not None and not self._has_warned and group.rank == 0:
            self._has_warned = True
            text = "there is no memory for a copy of %s: checkpoints are written straight from it, and training waits"
            _log.warning(f"{text} meanwhile", copy.too_large)
        self.on_stage("copied")
        return copy

    def _fill(self, copy: RankSnapshot, shared: _States, apart: _States) -> None:
        """Copies this rank's states. The first rank of each machine asks the machine's shard to copy its tables."""
        group = self._group
        for name, own in apart.items():
            rank_differences.check_parameters(name, self._states.shared[name], own, group.rank)
        if group.is_leader:
            self._lock.take()
            folders.sweep(self.folder, keep=[copy.staging])  # left by a failed save
            (self.folder / copy.staging).mkdir(parents=True, exist_ok=True)
            for name, table in self._states.tables.items():
                self._copy_table(copy, name, table)
        own = {name: value.state_dict() for name, value in self._states.own.items()}
        own, copy.differing, dense = self._copy_states(copy, [own, apart, shared if group.rank == 0 else {}])
        copy.keys = rank_differences.keys_of(apart)
        copy.own = {"own": own, "generators": read_generators(), "parameters": places_of(self._states)}
        copy.dense = dense if group.rank == 0 else None

    def _copy_states(self, copy: RankSnapshot, each: list[_States]) -> list[_States]:
        """The states copied, if this save is asynchronous and there is memory; otherwise the states themselves."""

        def taken(of: Callable[[Tensor], Tensor]) -> list[_States]:
            return [{name: snapshot(state, name, of) for name, state in states.items()} for states in each]

        if self.asynchronous and copy.too_large is None:
            size = sum(check_state(state, name) for states in each for name, state in states.items())
            if size <= (1 - _SPARE) * free_memory():
                with contextlib.suppress(RuntimeError, MemoryError):  # other limits, such as on the address space
                    return taken(copied)
            copy.too_large = f"the states of rank {self._group.rank}, {size} bytes"
        return taken(as_it_is)

    def _copy_table(self, copy: RankSnapshot, name: str, table: DistTensor) -> None:
        store, graph = table.store, graph_of(table, self._session)
        if store.machine < 0:
            raise ValueError(
                f"table {name!r} is on servers of their own, which this job's machines cannot have write a checkpoint: "
                "save it there with store.save(name, folder)"
            )
        rows = rows_of(table, graph)
        if rows is not None and rows["what"] == "node":
            copy.originals[originals_key(rows)] = (graph, rows["type"])
        if store.machine in store.machine_of_part:
            folder = self.folder / copy.staging / table_folder(name)
            copies = self.asynchronous and copy.too_large is None
            described = store.snapshot(table.name, store.machine, str(folder), copy.token_of(name), copy=copies)
            copy.tables.append((name, table, store.machine))
            spec = store.spec(table.name)
            if not described.pop("copied") and copies:
                copy.too_large = f"table {name!r} on machine {store.machine}"
            here = sum(
                spec.bounds[p + 1] - spec.bounds[p] for p, m in enumerate(store.machine_of_part) if m == store.machine
            )
            copy.entries[name] = {"spec": spec.to_json(), "rows": rows, "num_here": here, **described}

    # -- the second half: on disk -------------------------------------------------------------------------------------

    def _write(self, copy: RankSnapshot) -> None:
        try:
            self._write_all(copy)
        except Exception as error:  # the training thread raises it at its next save
            if self._group.rank == 0 and not (self._is_closed and self._group.world_size > 1):
                _log.error("the checkpoint of step %d was not saved: %s", copy.steps, error)
            self._error = copy.steps, error

    def _write_all(self, copy: RankSnapshot) -> None:
        group, problem, files = self._group, None, dict[str, list[int]]()
        try:
            files = self._write_files(copy)
        except Exception as error:
            problem = f"rank {group.rank} on machine {group.machine}: {words(error)}"
        told = group.gather("checkpoint written", [problem, files, copy.entries, copy.keys], timeout=_WRITE_SECONDS)
        problems = [entry[0] for entry in told]
        if not any(problems):
            self.on_stage("all written")
            problems = group.gather("checkpoint described", self._describe(copy, told), timeout=_WRITE_SECONDS)
        if any(problem is not None for problem in problems):
            self._give_up(copy)
        raise_first(problems)
        self.on_stage("described")
        problem, path = None, self.folder / folders.name_of(copy.steps)
        if group.is_leader:
            try:
                folders.publish(self.folder, copy.staging, copy.steps, copy.token)
            except (OSError, ValueError) as error:
                problem = f"machine {group.machine}: {words(error)}"
        raise_first(group.gather("checkpoint published", problem))
        self.on_stage("published")
        self.newest = path
        if group.is_leader:
            try:
                folders.remove(self.folder, folders.old_ones(self.folder, self.keep))
            except OSError as error:  # the new checkpoint is complete: the save has not failed
                _log.warning("old checkpoints stay in %s: %s", self.folder, words(error))
        self.on_stage("old removed")

    def _write_files(self, copy: RankSnapshot) -> dict[str, list[int]]:
        """Writes this rank's files. Returns size and CRC-32 of each."""
        staging, files = self.folder / copy.staging, {}
        staging.mkdir(parents=True, exist_ok=True)
        if copy.dense is not None:
            files["dense.pt"] = write_state(staging / "dense.pt", copy.dense)
            copy.dense = None
        self.on_stage("dense written")
        own, differing = f"rank-{self._group.rank}.pt", rank_differences.differing_file(self._group.rank)
        if copy.differing:
            files[differing] = write_state(staging / differing, copy.differing)
            copy.differing = {}
        files[own] = write_state(staging / own, copy.own)
        self.on_stage("rank written")
        if self._group.is_leader:
            files |= write_originals(copy.originals, staging)
        for name, table, machine in copy.tables:
            prefix = table_folder(name)
            written = table.store.written(machine, copy.token_of(name), _WRITE_SECONDS)
            files |= {f"{prefix}/{file}": entry for file, entry in written.items()}
        self.on_stage("tables written")
        return files

    def _describe(self, copy: RankSnapshot, told: list[Any]) -> str | None:
        """Writes this machine's manifest, which lists the files of all machines. Returns what went wrong, or None."""
        if not self._group.is_leader:
            return None
        files = {file: entry for rank in told for file, entry in sorted(rank[1].items())}
        group, names, staging = self._group, self._states.names(), self.folder / copy.staging
        for rank, (_, written, _, _) in enumerate(told):
            problem = folders.check_sizes(staging, written) if group.machine_of_rank[rank] == group.machine else None
            if problem is not None:
                return f"machine {group.machine}: rank {rank} wrote elsewhere: {problem}"
        originals = {
            key: [file for file in sorted(files) if file.startswith(f"originals/{number}-")]
            for number, key in enumerate(sorted(copy.originals))
        }
        try:
            tables = merged_entries([rank[2] for rank in told])
        except ValueError as error:
            return str(error)
        manifest = {
            "format": folders.FORMAT,
            "version": folders.VERSION,
            "steps": copy.steps,
            "token": copy.token,
            "world_size": group.world_size,
            "machines": group.num_machines,
            "shared": names["shared"],
            "own": names["own"],
            "optimizers": self._states.optimizers(),
            "differing": {rank_differences.differing_file(rank): keys for rank, (*_, keys) in enumerate(told) if keys},
            "tables": tables,
            "originals": originals,
            "files": files,
        }
        try:
            sync_folders(staging, [file for file in files if (staging / file).exists()])
            folders.describe(staging, manifest)
        except (OSError, ValueError) as error:
            return f"machine {group.machine}: {words(error)}"
        return None

    def _give_up(self, copy: RankSnapshot) -> None:
        """Removes what was written so far, after the shards have stopped writing."""
        for name, table, machine in copy.tables:
            with contextlib.suppress(ValueError, CommError, RuntimeError):
                table.store.written(machine, copy.token_of(name), _WRITE_SECONDS)
        with contextlib.suppress(RendezvousError, CommError):
            self._group.barrier("checkpoint given up", _WRITE_SECONDS)  # others may still write to the same folder
        if self._group.is_leader:
            shutil.rmtree(self.folder / copy.staging, ignore_errors=True)
