"""Snapshots of tables: rows copied at once, written while training goes on.

A snapshot takes the memory of the rows and states it copies until it is on disk, given back part by part; a table has
one at a time. One thread writes, so that a checkpoint of many tables does not compete with itself for the disk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gnnsys.comm import Reply
from gnnsys.graph.arrays import file_checksum
from gnnsys.graph.manifest import MANIFEST, read_manifest, sync_folder
from gnnsys.store.saved import FORMAT, VERSION, WHAT, SavedPart, part_folder, save_part
from gnnsys.store.table import Table

_REMEMBERED = 256  # snapshots whose outcome can still be asked for


class Snapshots:
    """The snapshots of one shard, by token. Thread-safe."""

    def __init__(self) -> None:
        self._written: OrderedDict[str, Future[Reply]] = OrderedDict()
        self._newest: dict[int, Future[Reply]] = {}  # by table
        self._writer: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def take(self, table: Table, folder: str, token: str) -> dict[str, Any]:
        """Copies a table's parts and returns its steps and states; the same token again copies nothing more."""
        with self._lock:
            known = token in self._written
            if not known:
                before = self._newest.get(table.spec.number)
                if before is not None and not before.done():
                    raise ValueError(f"table {table.spec.name!r} is still being written: wait for the save before")
                self._written[token] = self._newest[table.spec.number] = Future()
            while len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, "gnnsys-snapshots")
        with table.lock:
            described = {"steps": table.steps, "states": sorted(table.states)}
            if known:
                return described
            try:
                copies = [
                    SavedPart(
                        table.spec, part, token, table.steps, rows.rows.clone(),
                        {state: of.part(part).rows.clone() for state, of in sorted(table.states.items())},
                    )
                    for part, rows in sorted(table.parts.items())
                ]  # fmt: skip
            except (RuntimeError, MemoryError) as error:
                with self._lock:
                    del self._written[token], self._newest[table.spec.number]
                raise ValueError(f"table {table.spec.name!r} cannot be copied for a checkpoint: {error}") from error
        self._writer.submit(_write, copies, folder, self._written[token])
        return described

    def written(self, token: str) -> Future[Reply]:
        """The outcome of a snapshot: options `files`, by path in its folder, as [bytes, CRC-32]."""
        with self._lock:
            if token not in self._written:
                raise ValueError("this checkpoint was begun by another life of this shard, and is lost with it")
            return self._written[token]

    def close(self) -> None:
        """Writes nothing more but what is being written now."""
        if self._writer is not None:
            self._writer.shutdown(wait=False, cancel_futures=True)


def _write(copies: list[SavedPart], folder: str, written: Future[Reply]) -> None:
    files: dict[str, list[int]] = {}
    try:
        while copies:
            saved = copies.pop(0)
            try:
                save_part(saved, folder, overwrite=False)
            except OSError as error:
                where = error.filename or part_folder(folder, saved.spec.name, saved.part)
                raise ValueError(f"{where}: {error.strerror or error}") from error
            files |= part_files(folder, saved.spec.name, saved.part)
        sync_folders(folder, files)
        written.set_result(Reply(options={"files": files}))
    except Exception as error:  # whoever asks for the outcome gets it
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
