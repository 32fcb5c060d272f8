"""Brings files of a checkpoint to machines that lack them, from machines that have them.

A machine with its own disk has only what it wrote itself, and a job may come back with more machines, or in another
order. Files travel in pieces through a small table of bytes in the shards, and are kept in a temporary folder until
they are read. No process and no shard holds more than two pieces.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from gnnsys.comm import Group
from gnnsys.store import Store

if TYPE_CHECKING:
    from gnnsys.session import Session

_ROW = 1 << 16  # bytes
_PIECE_ROWS = 512
_SECONDS = 1800.0  # for all machines to send or take a piece


class _Piece(NamedTuple):
    file: str
    begin: int
    end: int
    is_last: bool  # of its file


@contextmanager
def brought(
    group: Group,
    session: Session | None,
    path: Path,
    files: Sequence[str],
    holders: Mapping[str, list[int]],
    entries: Mapping[str, Sequence[int]],
) -> Iterator[dict[str, Path]]:
    """Paths of `files` on this machine, valid inside the `with` block. Every rank calls it with the same arguments.

    `entries`: size and CRC-32 of each file. Files from other machines are removed when the block ends.
    """
    found = {file: path / file for file in files if group.machine in holders[file]}
    everyone = set(range(group.num_machines))
    away = [file for file in files if set(holders[file]) != everyone]
    if not away:
        yield found
        return
    assert session is not None and session.client is not None, "a process that is alone has every file"
    store = Store(
        machine_of_part=list(range(group.num_machines)), machine=group.machine, client=session.client, rank=group.rank,
        world_size=group.world_size, timeout=group.timeout,
    )  # fmt: skip
    inbox = path.parent / f".gone-brought-{group.nonce[:16]}-{group.machine}"  # swept after a kill
    try:
        exchange(group, store, path, inbox, away, holders, entries)
        yield {**{file: inbox / file for file in away}, **found}
    finally:
        if group.is_leader:
            shutil.rmtree(inbox, ignore_errors=True)


def exchange(
    group: Group, store: Store, path: Path, inbox: Path, files: Sequence[str], holders: Mapping[str, list[int]],
    entries: Mapping[str, Sequence[int]],
) -> None:  # fmt: skip
    """Copies `files` into `inbox` on every machine that lacks them at `path`. Raises the same error on every rank.

    The table has room for two pieces. A rank that comes to the meeting for a piece has taken the piece before.
    """
    name = f"checkpoint/{group.nonce[:16]}"
    try:
        group.agree("checkpoint's pieces begin", _create(store, name) if group.rank == 0 else None, _SECONDS)
        transfer = _Transfer(store, name, path, inbox, entries)
        for number, piece in enumerate(_pieces(files, entries)):
            have = holders[piece.file]
            if group.is_leader and group.machine == have[0]:
                transfer.send(number, piece)
            crc32 = _meet(group, transfer)
            if group.is_leader and group.machine not in have:
                transfer.take(number, piece, crc32)
        _meet(group, transfer)
    finally:
        if group.rank == 0:
            with suppress(Exception):  # its shard is gone, and that error is being raised already
                store.drop(name)


def _create(store: Store, name: str) -> Exception | None:
    try:
        store.create(name, 2 * _PIECE_ROWS, (_ROW,), torch.uint8)
    except (RuntimeError, ValueError, OSError) as error:
        return error
    return None


def _pieces(files: Sequence[str], entries: Mapping[str, Sequence[int]]) -> Iterator[_Piece]:
    size = _PIECE_ROWS * _ROW
    for file in files:
        end = int(entries[file][0])
        for begin in range(0, max(1, end), size):
            yield _Piece(file, begin, min(begin + size, end), begin + size >= end)


def _meet(group: Group, transfer: _Transfer) -> int:
    """The checksum of the piece that was sent; ValueError, on every rank, where one had a problem."""
    told = group.gather("checkpoint's pieces", [transfer.problem, transfer.crc32], _SECONDS)
    transfer.crc32 = None
    problem = next((problem for problem, _ in told if problem is not None), None)
    if problem is not None:
        raise ValueError(f"files of a checkpoint could not be sent between machines: {problem}") from transfer.cause
    return next((int(crc32) for _, crc32 in told if crc32 is not None), 0)


class _Transfer:
    """What one rank sends and takes. An error is kept until the next meeting, where all ranks learn of it."""

    def __init__(
        self, store: Store, name: str, path: Path, inbox: Path, entries: Mapping[str, Sequence[int]]
    ) -> None:  # fmt: skip
        self._store, self._name, self._path, self._inbox, self._entries = store, name, path, inbox, entries
        self._running = 0  # CRC-32 of the part of a file that has arrived
        self.crc32: int | None = None  # of the last piece sent
        self.problem: str | None = None
        self.cause: Exception | None = None

    def send(self, number: int, piece: _Piece) -> None:
        """Puts a piece into its half of the table."""
        try:
            with open(self._path / piece.file, "rb") as file:
                file.seek(piece.begin)
                content = bytearray(file.read(piece.end - piece.begin))
            if len(content) != piece.end - piece.begin:
                raise ValueError("it was cut")
            self.crc32 = zlib.crc32(content)
            content.extend(bytes(-len(content) % _ROW))
            if content:
                rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, _ROW)
                self._store.push(self._name, _ids(number, rows.shape[0]), rows).result()
        except Exception as error:
            self._complain(piece, error)

    def take(self, number: int, piece: _Piece, crc32: int) -> None:
        """Appends a piece to its file."""
        try:
            size = piece.end - piece.begin
            rows = self._store.tensor(self._name)[_ids(number, -(-size // _ROW))]
            content = memoryview(rows.flatten()[:size].numpy().data)
            self._running = zlib.crc32(content, self._running if piece.begin else 0)
            if zlib.crc32(content) != crc32:
                raise ValueError(f"bytes {piece.begin} to {piece.end} came otherwise than they were sent")
            if piece.is_last and self._running != int(self._entries[piece.file][1]):
                raise ValueError("it does not match its checksum: it was altered")
            target = self._inbox / piece.file
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "ab" if piece.begin else "wb") as file:
                file.write(content)
        except Exception as error:
            self._complain(piece, error)

    def _complain(self, piece: _Piece, error: Exception) -> None:
        self.problem = f"machine {self._store.machine}: {piece.file}: {error}"
        self.cause = error


def _ids(number: int, count: int) -> torch.Tensor:
    first = (number % 2) * _PIECE_ROWS
    return torch.arange(first, first + count, device="cpu")
