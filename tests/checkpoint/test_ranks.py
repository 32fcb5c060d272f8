"""Checkpoints of several ranks on several machines, whose folders are shared or their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnnsys.checkpoint.resuming import _check_folders
from gnnsys.checkpoint.tables import merged_entries
from gnnsys.comm.rendezvous import Group
from tests.checkpoint.training import digest, make_parts, train
from tests.support.processes import run_ranks

PROGRAM = "from tests.checkpoint.lives import main; main()"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What both ranks said of each life."""
    base = tmp_path_factory.mktemp("ranks")
    (base / "file").write_text("no folder")
    make_parts(base / "parts")
    train(base / "parts", base / "alone", 3)
    ranks = run_ranks(PROGRAM, [1, 1], base / "parts", base, timeout=240)
    told = [[json.loads(line) for line in rank.stdout.splitlines()] for rank in ranks]
    return base, {one["life"]: (one, other) for one, other in zip(*told, strict=True)}


@pytest.fixture
def base(ran):
    return ran[0]


@pytest.fixture
def lives(ran):
    return ran[1]


def test_machines_that_share_a_folder_save_to_it_together(lives):
    for rank in lives["unbroken"]:
        assert rank["from"] == 0 and rank["folder"] == ["step-0000000004", "step-0000000008"]


def test_machines_with_folders_of_their_own_resume_though_they_come_back_in_another_order(lives):
    kept = [f"step-{n:010d}" for n in (2, 4, 6)]
    assert [rank["folder"] for rank in lives["cut"]] == [kept, kept[:2]], "rank 1 was cut before it named its third one"
    for rank in range(2):
        life, unbroken = lives["resumed"][rank], lives["unbroken"][rank]
        assert life["from"] == 6, "a checkpoint counts once all machines have all of it"
        assert lives["cut"][rank]["losses"] + life["losses"] == unbroken["losses"]
        assert life["trained"] == unbroken["trained"]
        assert life["folder"] == ["step-0000000006", "step-0000000008"]


def test_a_job_that_comes_back_with_fewer_ranks_has_everything_and_goes_on(base, lives):
    values, losses = train(base / "parts", base / "shared", 8)
    assert losses == {} and digest(values) == lives["unbroken"][0]["trained"]
    assert sorted(train(base / "parts", base / "shared", 10)[1]) == [8, 9]


def test_a_job_that_comes_back_with_more_ranks_goes_on_from_where_it_was(lives):
    for rank in lives["grown"]:
        assert rank["from"] == 3 and len(rank["losses"]) == 6 and rank["folder"][-1] == "step-0000000009"


def test_files_of_a_machine_that_did_not_come_back_are_missed(base):
    with pytest.raises(ValueError, match=r"step-0000000008 lacks \S+ on every machine.*Bring back the machines"):
        train(base / "parts", base / "own-1", 9)


def test_several_savers_of_one_session_do_not_mix_up_their_meetings(base, lives):
    assert "complaints" in lives
    for number in range(2):
        names = {path.name for path in (base / f"twice-{number}" / "step-0000000000").iterdir()}
        assert names == {"manifest.json", "dense.pt", "rank-0.pt", "rank-1.pt", "tables"}


def test_what_is_wrong_on_one_rank_is_the_same_error_on_both(lives):
    one, other = lives["complaints"]
    assert one == other and one["left"] == []
    assert one["uneven"] == [1, 2], "a machine that has no rows of a table has nothing to say of it"
    named, steps, strange, names, folder = one["errors"]
    assert "strange['value'] is a slice" in named
    assert "rank 0 saves after step 0 and rank 1 after step 1" in steps
    assert "rank 1 cannot save step 5: strange['value'] is a slice" in strange
    assert "rank 0 and rank 1 call resume() with different states" in names
    assert "machine 1: checkpoints cannot be kept in" in folder and "/file: it is a file, give a folder" in folder


def test_ranks_of_one_machine_must_give_one_folder():
    class TwoRanks(Group):
        def gather(self, name, value=None, timeout=None):
            return ["/a/ckpt-0", value]

    group = TwoRanks()
    group.machine_of_rank = [0, 0]
    with pytest.raises(ValueError, match=r"ranks 0 and 1 are on one machine and call .* different folders, /a/ckpt-0"):
        _check_folders(group, Path("/a/ckpt-1"))
    group.machine_of_rank = [0, 1]
    _check_folders(group, Path("/a/ckpt-1"))


def test_machines_with_rows_must_agree_on_the_steps_of_a_table():
    entry = {"spec": {}, "rows": None, "steps": 3, "states": ["m"], "num_here": 10}
    empty = entry | {"steps": 0, "states": [], "num_here": 0}
    assert merged_entries([{"t": entry}, {"t": empty}, {}])["t"] == {
        "spec": {}, "rows": None, "steps": 3, "states": ["m"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"'t' cannot be saved: .* one says steps 3 and another 2"):
        merged_entries([{"t": entry}, {"t": entry | {"steps": 2}}])
