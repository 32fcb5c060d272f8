"""What is asked of a shard that would fill memory, leave its folder or never end: refused before anything is taken."""

from __future__ import annotations

import gc
import os
import re
import weakref
from pathlib import Path

import pytest
import torch

from gnnsys.comm import Kind, Reply, Request
from gnnsys.store import Shard, TableSpec
from gnnsys.store.push_order import PushOrder

BOUNDS = torch.tensor([0, 50, 100])
SPEC = {"name": "t", "row_shape": [4], "dtype": "float32", "mutable": True}


@pytest.fixture
def shard(tmp_path):
    shard = Shard(max_bytes=1 << 20, folder=tmp_path / "tables")
    yield shard
    shard.close()


def create(shard, bounds=BOUNDS, parts=(0, 1), init=None, **spec):
    options = {"spec": SPEC | spec, "parts": list(parts), "init": init or {"kind": "zeros"}}
    return shard.handlers()[Kind.CREATE](Request.local(Kind.CREATE, [bounds], options))


REFUSED = [
    ({"bounds": torch.tensor([0, 10**15])}, "needs 16000000000000000 bytes on machine 0"),
    ({"row_shape": [2**31, 2**31, 2**31]}, "may take 1048576"),
    ({"bounds": torch.tensor([0.0, 1.0])}, "bounds must be int64"),
    ({"bounds": torch.tensor([0, 2**62])}, "may take 1048576"),
    ({"dtype": "qint8"}, "cannot be torch.qint8"),
    ({"dtype": "Tensor"}, "unknown dtype"),
    ({"name": "x" * 1000}, "1 to 512 characters"),
    ({"name": "global/node"}, "tables of the graph begin like this"),
    ({"parts": [0, 0]}, "parts 0 to 1, got"),
    ({"parts": [-1]}, "parts 0 to 1, got"),
    ({"init": {"kind": "constant", "value": "much"}}, "cannot begin with"),
    ({"init": {"kind": "constant", "value": 10**400}}, "cannot begin with"),
    ({"init": {"kind": "uniform", "low": "nan", "high": [], "seed": 1}}, "init is not one"),
]


def test_a_table_that_cannot_be_is_refused_and_leaves_nothing_behind(shard):
    """One after the other: looking for garbage takes longer than all of them."""
    gc.collect()  # what tests before this one left
    before = len(os.listdir("/proc/self/fd"))
    for changed, words in REFUSED:
        parts = changed.get("parts", [0] if "bounds" in changed else [0, 1])
        with pytest.raises(ValueError, match=re.escape(words)):
            create(shard, **changed | {"parts": parts})
        assert shard.names() == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_tables_take_no_more_memory_than_was_allowed_and_dropped_ones_give_it_back(shard):
    create(shard, torch.tensor([0, 20_000, 40_000]), name="large")
    with pytest.raises(ValueError, match="tables take 640000 and may take 1048576"):
        create(shard, torch.tensor([0, 20_000, 40_000]), name="second")
    shard.drop("large")
    create(shard, torch.tensor([0, 20_000, 40_000]), name="second")
    shard._max_created = 4
    create(shard, name="small")
    with pytest.raises(ValueError, match="is one too many"):
        create(shard, name="smaller")


@pytest.mark.parametrize("folder", ["/etc", "..", "tables/../..", "", "a\0b", None, 5, "link"])
def test_tables_are_saved_and_loaded_below_the_folder_that_was_allowed(shard, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    create(shard)
    (tmp_path / "link").symlink_to("/")
    save = {"name": "t", "folder": folder, "save": "s", "overwrite": True}
    with pytest.raises(ValueError, match=r"is not below|malformed request"):
        shard.handlers()[Kind.SAVE](Request.local(Kind.SAVE, (), save))
    load = {"name": "other", "load": folder, "parts": [0, 1]}
    with pytest.raises(ValueError, match=r"is not below|malformed request"):
        shard.handlers()[Kind.CREATE](Request.local(Kind.CREATE, (), load))
    assert shard.handlers()[Kind.SAVE](Request.local(Kind.SAVE, (), save | {"folder": "tables/here"})).result(120)
    assert {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.npy")} == {("tables", "here")}


def test_a_server_that_saves_nothing_says_how_it_would(tmp_path):
    shard = Shard(folder=Path(os.devnull))
    save = {"name": "t", "folder": str(tmp_path), "save": "s", "overwrite": True}
    with pytest.raises(ValueError, match="start it with --tables DIR"):
        shard.handlers()[Kind.SAVE](Request.local(Kind.SAVE, (), save))


def test_a_table_named_like_a_path_is_saved_inside_its_folder(shard, tmp_path):
    create(shard, name="../../up/./../x")
    save = {"name": "../../up/./../x", "folder": str(tmp_path / "tables"), "save": "s", "overwrite": False}
    shard.handlers()[Kind.SAVE](Request.local(Kind.SAVE, (), save)).result(120)
    assert all(path.is_relative_to(tmp_path / "tables") for path in tmp_path.rglob("*.npy"))
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]


def pull(shard, plan, *arrays):
    return list(shard.handlers()[Kind.PULL](Request.local(Kind.PULL, [plan, *arrays])))


def test_plans_that_name_what_is_not_there_are_refused(shard):
    create(shard)
    number, ids = TableSpec("t", (4,), torch.float32, (0, 50, 100), True).number, torch.arange(5)
    assert pull(shard, torch.tensor([[number, 0, 1, -1, -1]]), ids)
    many = torch.zeros(1 << 22, dtype=torch.int64)
    for plan, arrays, words in [
        (torch.tensor([[number, 0, 2, -1, -1]]), [ids], "it names array 2 of 2"),
        (torch.tensor([[number, 0, 0, -1, -1]]), [ids], "it names array 0 of 2"),
        (torch.tensor([[number, 7, 1, -1, -1]]), [ids], "part 7 is not served here"),
        (torch.tensor([[5, 0, 1, -1, -1]]), [ids], "does not exist"),
        (torch.tensor([[number, 0, 1, -1, 99]]), [ids], "unknown dtype 99"),
        (torch.tensor([[number, 0, 1, -1, -1]]), [ids + 46], r"must be in \[0, 50\)"),
        (torch.tensor([[number, 0, 1, -1, -1]]), [ids - 1], r"must be in \[0, 50\)"),
        (torch.tensor([[number, 0, 1, 2, -1]]), [ids, torch.tensor([4])], r"\[0, 4\)"),
        (torch.tensor([[number, 0, 1, 2, -1]]), [ids, many], "names columns again and again"),
        (torch.zeros(1 << 17, 5, dtype=torch.int64), [ids], "a plan of 131072 items"),
    ]:
        with pytest.raises(ValueError, match=words):
            pull(shard, plan, *arrays)


def test_pushes_that_never_have_their_turn_take_so_much_memory_and_no_more():
    pushes, applied = PushOrder(max_waiting_bytes=1 << 20), []

    def apply() -> Reply:
        applied.append(1)
        return Reply()

    def request(number, timeout, sender=0):
        rows = [torch.zeros(1 << 16)]  # 256 KB
        return Request.local(Kind.PUSH, rows, sequence=number, sender=sender, timeout=timeout)

    waiting = [pushes.submit(request(number, 60), apply) for number in range(1, 5)]
    with pytest.raises(RuntimeError, match="too many bytes wait already"):
        pushes.submit(request(5, 60), apply)
    pushes.submit(request(0, 60, sender=1), apply)  # whose turn it is has no need of room
    assert applied == [1] and not any(future.done() for future in waiting)

    overdue = PushOrder(max_waiting_bytes=1 << 20)
    lost = [overdue.submit(request(number, -1), apply) for number in range(1, 5)]
    overdue.submit(request(1, 60, sender=1), apply)  # nobody waits for those any more
    assert all(isinstance(future.exception(0), RuntimeError) for future in lost)


def test_a_push_that_failed_is_remembered_without_its_rows():
    pushes = PushOrder()

    def fail_with(rows: torch.Tensor):
        raise ValueError(f"{rows.numel()} rows of no table")

    rows = torch.zeros(1000)
    alive = weakref.ref(rows)
    request = Request.local(Kind.PUSH, [rows], sequence=0)
    answer = pushes.submit(request, lambda rows=rows: fail_with(rows))
    assert "1000 rows" in str(answer.exception(0))
    del rows, request
    gc.collect()
    assert alive() is None and pushes.submit(Request.local(Kind.PUSH, [], sequence=0), Reply) is answer
