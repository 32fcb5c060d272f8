"""Files that a device cannot lock where they are: copies that processes share. Locks are stand-ins, all else is not."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnsys.store import MemoryBudget, RegisteredFiles, shared_copy
from gnnsys.store.memory_budget import limited
from gnnsys.store.registered_files import mapped_range
from gnnsys.store.shared_copy import SharedCopy, _note_path, share_copy

HOST = torch.device("cpu")


class Lock:
    """Refuses memory by what it is: a map of a file, or any."""

    held = 0

    def __init__(self, address: int, bytes: int, device: torch.device, *, read_only: bool) -> None:
        self.bytes, self.is_held = bytes, True
        is_file = mapped_range(address) is not None
        assert read_only == is_file
        self.error = self.refuses(is_file)
        if self.error:
            self.is_held = False
        else:
            Lock.held += bytes

    def refuses(self, is_file: bool) -> int:
        return 0

    def close(self) -> None:
        Lock.held -= self.bytes if self.is_held else 0
        self.is_held = False


class RefusesFiles(Lock):
    def refuses(self, is_file: bool) -> int:
        return 801 if is_file else 0


class RefusesAll(Lock):
    def refuses(self, is_file: bool) -> int:
        return 2


class RefusesMuch(Lock):
    """More than a page."""

    def refuses(self, is_file: bool) -> int:
        return 2 if is_file or self.bytes > mmap.PAGESIZE else 0


@pytest.fixture
def rows(tmp_path: Path) -> torch.Tensor:
    np.save(tmp_path / "rows.npy", np.arange(5000, dtype=np.float32).reshape(1000, 5))
    return torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="c"))


def note_of(rows: torch.Tensor) -> Path:
    where = mapped_range(rows.data_ptr())
    assert where is not None
    return _note_path(where.path, os.stat(where.path))


def test_a_file_is_read_where_it_is(rows: torch.Tensor) -> None:
    files = RegisteredFiles(HOST, lock=Lock)
    assert torch.equal(files.view(rows), rows) and files.nbytes > rows.nbytes and files.copied_bytes == 0
    files.close()
    assert files.nbytes == Lock.held == 0


def test_of_a_file_that_is_refused_processes_share_one_copy(rows: torch.Tensor) -> None:
    first, second = (RegisteredFiles(HOST, lock=RefusesFiles) for _ in range(2))
    for files in (first, second):
        view = files.view(rows)
        assert view is not None and torch.equal(view, rows) and view.data_ptr() != rows.data_ptr()
        assert files.copied_bytes == files.nbytes > rows.nbytes and "error 801" in files.why_copied
        assert torch.equal(files.view(rows[100:]), rows[100:])  # of the same copy
    (one,), (other,) = first._copies.values(), second._copies.values()
    assert one.inode == other.inode and note_of(rows).exists()
    first.close()
    assert torch.equal(second.view(rows), rows)  # the memory is there as long as somebody has it
    second.close()
    assert first.nbytes == second.nbytes == Lock.held == 0 and not note_of(rows).exists()


def test_a_copy_whose_owner_is_gone_or_whose_file_is_another_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one" * 1000)
    note = _note_path(str(path), path.stat())
    for text in (b"", b"nonsense", f"{os.getpid()} 0 1".encode(), b"999999999 3 4"):
        note.write_bytes(text)
        copy = share_copy(str(path), 1 << 20)
        assert copy.memory[:] == path.read_bytes()
        copy.close()
        assert not note.exists()
    old = share_copy(str(path), 1 << 20)
    path.write_bytes(b"two" * 1001)
    new = share_copy(str(path), 1 << 20)
    assert new.memory[:3] == b"two" and old.memory[:3] == b"one" and new.inode != old.inode
    old.close()
    new.close()


def test_whoever_comes_later_finds_the_copy_with_any_process_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"some" * 1000)
    note, held = _note_path(str(path), path.stat()), [share_copy(str(path), 1 << 20) for _ in range(2)]
    inode = held[0].inode
    for _ in range(3):  # whoever has had it longest leaves
        held.pop(0).close()
        assert note.exists()
        held.append(share_copy(str(path), 0))  # nothing may be copied
        assert held[-1].inode == inode
    for copy in held:
        copy.close()
    assert not note.exists()


def test_a_note_that_is_removed_while_it_is_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"some" * 1000)
    first, lock = share_copy(str(path), 1 << 20), shared_copy._lock

    def lock_late(note: int, end: float) -> None:
        monkeypatch.setattr(shared_copy, "_lock", lock)
        first.close()  # after the note was opened, and before it is locked
        lock(note, end)

    monkeypatch.setattr(shared_copy, "_lock", lock_late)
    second = share_copy(str(path), 1 << 20)
    third = share_copy(str(path), 0)
    assert second.inode == third.inode
    second.close()
    fourth = share_copy(str(path), 0)  # nobody removed the note of others
    assert fourth.inode == third.inode
    third.close()
    fourth.close()
    assert not _note_path(str(path), path.stat()).exists()


def test_where_no_shared_memory_is_locked_no_file_is_copied(
    tmp_path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    def note_copy(path: str, *given: int) -> SharedCopy:
        copied.append(path)
        return share_copy(path, *given)

    monkeypatch.setattr("gnnsys.store.registered_files.share_copy", note_copy)
    files = RegisteredFiles(HOST, lock=RefusesAll)
    for _ in range(2):
        assert files.view(rows) is None and "refuses to lock shared memory (error 2)" in files.why_not
    assert copied == []
    files = RegisteredFiles(HOST, lock=RefusesMuch)  # what is known of a large file is known of a larger one
    np.save(tmp_path / "more.npy", np.zeros(10_000, dtype=np.float32))
    more = torch.from_numpy(np.load(tmp_path / "more.npy", mmap_mode="c"))
    for each in (rows, more, rows):
        assert files.view(each) is None and "refuses to lock shared memory (error 2)" in files.why_not
    assert copied == [str(tmp_path / "rows.npy")]
    files.close()
    assert Lock.held == 0


def test_what_does_not_fit_or_cannot_be_locked_is_left_to_the_host_and_says_why(rows: torch.Tensor) -> None:
    with limited("cpu", max(1, sum(use.bytes for use in MemoryBudget.of("cpu").uses()) + 1000)):
        files = RegisteredFiles(HOST, limit=1 << 30, lock=RefusesFiles)
        assert files.view(rows) is None and "are allowed" in files.why_not and "error 801" in files.why_not
    files = RegisteredFiles(HOST, lock=RefusesAll)
    assert files.view(rows) is None and "refuses to lock shared memory" in files.why_not
    assert files.copied_bytes == 0 and files.view(torch.zeros(3)) is None
    assert not note_of(rows).exists()


def test_nobody_waits_for_ever_for_a_process_that_copies(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"some")
    with open(_note_path(str(path), path.stat()), "wb") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another process has copied .* is not done"):
            share_copy(str(path), 1 << 20, seconds=0.01)
    os.unlink(_note_path(str(path), path.stat()))
