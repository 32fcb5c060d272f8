"""Machines with disks of their own: what one lacks is brought in pieces, and each checks the copy that it reads."""

from __future__ import annotations

import shutil
import zlib

import pytest
import torch

import gnnsys
from gnnsys.checkpoint import missing_files
from gnnsys.checkpoint.folder_lock import FolderLock
from gnnsys.checkpoint.restore import restore
from gnnsys.checkpoint.states import States
from gnnsys.store import Shard, Store
from tests.checkpoint.groups import on_ranks
from tests.store.cluster import cluster

PIECE = 2 * missing_files._ROW
SIZES = {"dense.pt": 3 * PIECE + 5000, "rank-1.pt": 10, "originals/0.npy": 2 * PIECE, "rank-0.pt": 0}
HOLDERS = {"dense.pt": [0], "rank-1.pt": [1], "originals/0.npy": [1], "rank-0.pt": [0]}


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Runs an exchange between two machines: what each rank got, and what the shards have left."""
    monkeypatch.setattr(missing_files, "_PIECE_ROWS", 2)
    content = {
        file: torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes() for file, size in SIZES.items()
    }
    entries = {file: [len(text), zlib.crc32(text)] for file, text in content.items()}
    for file, (machine,) in HOLDERS.items():
        path = tmp_path / str(machine) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[file])
    pushed = []
    push = Store.push
    monkeypatch.setattr(
        Store, "push", lambda self, name, *rows: (pushed.append(rows[1].nbytes), push(self, name, *rows))[1]
    )

    def run():
        def body(group):
            here, inbox = tmp_path / str(group.rank), tmp_path / f"inbox-{group.rank}"
            missing_files.exchange(group, c.stores[group.rank], here, inbox, list(SIZES), HOLDERS, entries)
            return {
                path.relative_to(inbox).as_posix(): path.read_bytes() for path in inbox.rglob("*") if path.is_file()
            }

        with cluster([0, 1], num_ranks=2) as c:
            return on_ranks(2, body), [shard.names() for shard in c.shards], pushed

    return run, content, entries, tmp_path


def test_files_travel_in_pieces_and_arrive_whole(sent):
    run, content, _, _ = sent
    got, left, pushed = run()
    for rank, files in enumerate(got):
        assert files == {file: text for file, text in content.items() if HOLDERS[file] != [rank]}
    assert left == [[], []], "the table they travelled through is gone"
    assert len(pushed) == 7 and max(pushed) == PIECE


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("dense.pt", lambda text: text[:-1], "machine 0: dense.pt: it was cut"),
        ("originals/0.npy", lambda text: b"x" + text[1:], "machine 0: originals/0.npy: it does not match its checksum"),
        ("rank-1.pt", None, r"machine 1: rank-1.pt: .*No such file"),
    ],
)
def test_what_goes_wrong_on_the_way_is_the_same_error_on_all_and_leaves_no_table(sent, file, damage, words):
    run, content, _, base = sent
    path = base / str(HOLDERS[file][0]) / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(b"y" + content[file][1:]))
    got, left, _ = run()
    for error in got:
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=f"could not be sent between machines: {words}"):
            raise error
    assert left == [[], []]


def test_bytes_that_change_in_a_shard_are_noticed(sent, monkeypatch):
    run, *_ = sent
    take = missing_files._Transfer.take

    def late(self, number, piece, crc32):
        if piece.file == "dense.pt" and piece.begin == PIECE:
            self._store.push(
                self._name, missing_files._ids(number, 1), torch.zeros(1, missing_files._ROW, dtype=torch.uint8)
            ).result()
        take(self, number, piece, crc32)

    monkeypatch.setattr(missing_files._Transfer, "take", late)
    got, left, _ = run()
    assert all(f"bytes {PIECE} to {2 * PIECE} came otherwise than they were sent" in str(error) for error in got)
    assert left == [[], []]


def save_twice(folder):
    """Checkpoints of steps 1 and 2, by one process: a model and a table of two parts, all as large as the step."""
    shard, model = Shard(0), torch.nn.Linear(4, 4)
    table = Store(machine_of_part=[0, 0], local=shard).create("t", 10, (4,))
    with gnnsys.resume(folder, table=table, model=model, every=1, asynchronous=False) as saver:
        for step in (1.0, 2.0):
            torch.nn.init.constant_(model.weight, step)
            table[:] = torch.full((10, 4), step)
            saver.step()
    shard.close()


def test_every_machine_checks_the_copy_that_it_reads(tmp_path):
    save_twice(tmp_path / "saved")
    newest = tmp_path / "saved" / "step-0000000002"
    parts = sorted(file.relative_to(newest).as_posix() for file in newest.rglob("part*/*") if file.is_file())
    assert len(parts) == 4
    faults = [(0, "dense.pt"), (1, "dense.pt"), (0, "rank-0.pt"), (1, "rank-0.pt")]
    faults += [(int(f"/part{1:05d}/" in file), file) for file in parts]  # where the part's rows go
    for number, (machine, file) in enumerate(faults):
        base = tmp_path / str(number)
        for copy in range(2):
            shutil.copytree(tmp_path / "saved", base / str(copy))
        path = base / str(machine) / "step-0000000002" / file
        content = path.read_bytes()
        path.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])

        def body(group, base=base):
            model, table = torch.nn.Linear(4, 4), c.stores[group.rank].create("t", 10, (4,))
            folder = base / str(group.rank)
            states = States({"model": model}, {}, {"table": table})
            found = restore(folder, group, None, states, FolderLock(folder, group.nonce))
            return found.steps, model.weight.unique().tolist(), table[:].unique().tolist()

        with cluster([0, 1], num_ranks=2) as c:
            assert on_ranks(2, body) == [(1, [1.0], [1.0])] * 2, f"{file} of machine {machine}"
        for copy in range(2):
            assert len(list((base / str(copy)).glob("damaged-step-0000000002-*"))) == 1
