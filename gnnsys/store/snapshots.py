"""Snapshots of tables: rows copied at once, or held still, and written in the background.

A copy takes the memory of the rows and states until it is on disk, given back part by part, and the table goes on at
once. Where there is no memory for it, or none is wanted, rows are written straight from the table: whatever would
change them waits meanwhile. A table has one snapshot at a time. One thread writes, so that a checkpoint of many tables
does not compete with itself for the disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gnnsys.comm import Reply
from gnnsys.graph import MANIFEST, file_checksum, read_manifest, sync_folder
from gnnsys.store.capacity import free_memory
from gnnsys.store.saved import FORMAT, VERSION, WHAT, SavedPart, part_folder, save_part
from gnnsys.store.table import Table

_REMEMBERED = 256  # snapshots whose outcome can still be asked for
_SPARE = 0.1  # of the free memory, which a copy leaves free
_LOCK_SECONDS = 60.0  # for who holds the table to end


@dataclass(eq=False)
class _Taken:
    """A snapshot: what is known of the table, once it is taken, and of the files, once they are written."""

    described: Future[dict[str, Any]] = field(default_factory=Future)
    written: Future[Reply] = field(default_factory=Future)


class Snapshots:
    """The snapshots of one shard, by token. Thread-safe."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, _Taken] = OrderedDict()
        self._newest: dict[int, _Taken] = {}  # by table
        self._writer: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._copying = threading.Lock()  # one at a time: each sees what the one before has left of the memory
        self._is_closed = False

    def take(self, table: Table, folder: str, token: str, *, copy: bool = True) -> dict[str, Any]:
        """Has a table as it is now written to `folder`; the same token again takes nothing more.

        Returns its steps and states, and whether it was copied. If not, because `copy` is False or memory is short,
        who changes the table waits until it is written.
        """
        with self._lock:
            taken = self._taken.get(token)
            if taken is None:
                before = self._newest.get(table.spec.number)
                if before is not None and not before.written.done():
                    raise ValueError(f"table {table.spec.name!r} is still being written: wait for the save before")
                new = self._taken[token] = self._newest[table.spec.number] = _Taken()
            while len(self._taken) > _REMEMBERED:
                self._taken.popitem(last=False)
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, "gnnsys-snapshots")
        if taken is not None:
            return taken.described.result(2 * _LOCK_SECONDS)
        try:
            described = (self._copy(table, folder, token, new) if copy else None) or self._hold(
                table, folder, token, new
            )
        except BaseException as error:
            with self._lock:
                self._taken.pop(token, None)
                self._newest.pop(table.spec.number, None)
            new.described.set_exception(error)
            raise
        new.described.set_result(described)
        return described

    def written(self, token: str) -> Future[Reply]:
        """The outcome of a snapshot: options `files`, by path in its folder, as [bytes, CRC-32]."""
        with self._lock:
            if token not in self._taken:
                raise ValueError("this checkpoint was begun by another life of this shard, and is lost with it")
            return self._taken[token].written

    def close(self) -> None:
        """Ends what is being written, and lets go of the tables that were held still for it."""
        self._is_closed = True
        if self._writer is not None:
            self._writer.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [taken.written for taken in self._taken.values()]
        for written in left:
            with suppress(InvalidStateError):  # it has come out before
                written.set_exception(ValueError("this shard was closed before the checkpoint was written"))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this shard is being closed")

    def _copy(self, table: Table, folder: str, token: str, taken: _Taken) -> dict[str, Any] | None:
        """A copy, to be written; None where there is no memory for one."""
        with self._copying, table.held():
            parts = _parts(table, token, lambda rows: rows)
            needed = sum(rows.nbytes for part in parts for rows in (part.rows, *part.states.values()))
            if needed > (1 - _SPARE) * free_memory():
                return None
            try:
                parts = _parts(table, token, lambda rows: rows.clone())
            except (RuntimeError, MemoryError):  # other limits, an address space's say
                return None
            described = _described(table, copied=True)
        self._submit(parts, folder, taken)
        return described

    def _hold(self, table: Table, folder: str, token: str, taken: _Taken) -> dict[str, Any]:
        """Has rows written from where they are: the table is held until they are."""
        table.hold(_LOCK_SECONDS)
        try:
            described = _described(table, copied=False)
            self._submit(_parts(table, token, lambda rows: rows), folder, taken)
        except BaseException:
            table.release()
            raise
        taken.written.add_done_callback(lambda _: table.release())
        return described

    def _submit(self, parts: list[SavedPart], folder: str, taken: _Taken) -> None:
        assert self._writer is not None
        self._writer.submit(_write, parts, folder, taken.written, self._check_open)


def _parts(table: Table, token: str, of: Callable[[Tensor], Tensor]) -> list[SavedPart]:
    return [
        SavedPart(
            table.spec, part, token, dict(table.step_counts), of(rows.rows),
            {state: of(kept.part(part).rows) for state, kept in sorted(table.states.items())},
        )
        for part, rows in sorted(table.parts.items())
    ]  # fmt: skip


def _described(table: Table, *, copied: bool) -> dict[str, Any]:
    if len({*table.step_counts.values()}) > 1:
        raise ValueError(
            f"table {table.spec.name!r} was trained by optimizers of several kinds ({table.step_counts} steps), and a "
            "checkpoint has one count: use one kind, or save the table with store.save(name, folder)"
        )
    return {"steps": table.steps, "states": sorted(table.states), "copied": copied}


def _write(parts: list[SavedPart], folder: str, written: Future[Reply], check: Callable[[], None]) -> None:
    files: dict[str, list[int]] = {}
    try:
        while parts:
            saved = parts.pop(0)
            try:
                save_part(saved, folder, overwrite=False, check=check)
            except OSError as error:
                where = error.filename or part_folder(folder, saved.spec.name, saved.part)
                raise ValueError(f"{where}: {error.strerror or error}") from error
            files |= part_files(folder, saved.spec.name, saved.part)
        sync_folders(folder, files)
        written.set_result(Reply(options={"files": files}))
    except Exception as error:  # whoever asks for the outcome gets it
        with suppress(InvalidStateError):  # the shard was closed meanwhile
            written.set_exception(ValueError(str(error)))


def part_files(folder: str, name: str, part: int) -> dict[str, list[int]]:
    """The files of a part that was saved, by path in `folder`: bytes and CRC-32."""
    path = part_folder(folder, name, part)
    manifest = read_manifest(path, format=FORMAT, version=VERSION, what=WHAT)
    prefix = path.relative_to(folder).as_posix()
    listed = {f"{prefix}/{file}": [entry["bytes"], entry["crc32"]] for file, entry in manifest["files"].items()}
    file = path / MANIFEST
    return listed | {f"{prefix}/{MANIFEST}": [file.stat().st_size, file_checksum(file)]}


def sync_folders(folder: str | Path, files: Iterable[str]) -> None:
    """Makes the names of files and of the folders they are in last through a power cut."""
    parents = {parent for file in files for parent in (Path(folder) / file).parents}
    for parent in parents:
        if parent == Path(folder) or Path(folder) in parent.parents:
            sync_folder(parent)
