"""A table as a device reads it, with the host as the device: own rows, cached rows and rows from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnnsys.sampling.place import own_rows
from gnnsys.store import DeviceTable, ReadContext, Source, TablePiece, copied_pieces, runs_of
from gnnsys.store.registered_files import mapped_range
from tests.sampling.machines import homogeneous, machines

HOST = torch.device("cpu")
IDS = torch.tensor([119, 3, 3, 80, 0, 41, 7, 118])


def on_host(mine, name: str) -> DeviceTable:
    return DeviceTable(mine.store.tensor(name), copied_pieces(own_rows(mine).get(name, []), HOST), HOST)


@pytest.mark.parametrize("owner", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 2, 3]])
def test_rows_are_those_of_the_table_wherever_its_parts_lie_cached_or_not(tmp_path: Path, owner: list[int]) -> None:
    with machines(homogeneous(), tmp_path / "p", 4, machine_of_part=owner) as graphs:
        for mine in graphs:
            for name in ("node/node/x", "node/node/t"):
                table, rows = mine.store.tensor(name), on_host(mine, name)
                assert isinstance(rows, Source) and rows.is_remote == mine.is_remote
                for ids in (IDS, IDS[:0], torch.arange(120)):
                    expected = table[ids]
                    assert torch.equal(rows.read(ids), expected)
                    out = torch.empty_like(expected)
                    assert rows.read(ids, out) is out and torch.equal(out, expected)
                rows.fill_cache(torch.tensor([3, 80, 118, 44]))
                assert torch.equal(rows.read(IDS), table[IDS])
                assert rows.counters().hits == 4 and rows.counters().misses == 4
                scattered = torch.zeros(10, *table.shape[1:], dtype=table.dtype)
                context = ReadContext()
                read = rows.begin(IDS, scattered, context, at=torch.arange(8) + 1)
                context.send()
                assert torch.equal(read.result()[1:9], table[IDS])


def test_only_rows_that_are_neither_here_nor_cached_are_asked_for(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 3) as graphs:
        mine = graphs[1]
        rows = on_host(mine, "node/node/x")
        own = mine.book.part_range(1)
        ids = torch.arange(120)
        for cached in (torch.empty(0).long(), torch.tensor([0, 1, own.start, 119])):
            rows.fill_cache(cached)
            context = ReadContext()
            read = rows.begin(ids, None, context)
            context.send()
            assert torch.equal(read.result(), mine.store.tensor("node/node/x")[ids])
            away = torch.ones(120, dtype=torch.bool)
            away[own.start : own.stop] = False
            away[cached] = False
            assert context.counts["rows_asked"] == int(away.sum())
            asked = sum(each.local.numel() for each in rows.locate(ids) if each.serving.is_remote)
            assert asked == int(away.sum())


def test_pieces_that_follow_each_other_become_one() -> None:
    rows = torch.arange(12.0).view(12, 1)
    pieces = copied_pieces([(3, rows[3:5]), (0, rows[0:3]), (9, rows[9:12]), (5, rows[5:5])], HOST)
    assert [(p.first, p.end) for p in pieces] == [(0, 5), (9, 12)]
    assert all(torch.equal(p.rows, rows[p.first : p.end]) for p in pieces)
    assert runs_of([]) == [] and runs_of([(4, 4)]) == []


def test_a_table_that_trains_is_refused(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 1) as graphs:
        store = graphs[0].store
        trained = store.create("trained", 10, (2,))
        with pytest.raises(ValueError, match="changes while it is read"):
            DeviceTable(trained, [TablePiece(0, torch.zeros(10, 2))], HOST)


def test_the_file_behind_a_mapped_tensor_is_found(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        rows = graphs[0].parts.part(0).node_data["node"]["x"]
        where = mapped_range(rows.data_ptr())
        assert where is not None and Path(where.path).suffix == ".npy"
        offset = where.offset + rows.data_ptr() - where.first
        with open(where.path, "rb") as file:
            file.seek(offset)
            assert file.read(rows.nbytes) == rows.numpy().tobytes()
    assert mapped_range(torch.zeros(4).data_ptr()) is None
