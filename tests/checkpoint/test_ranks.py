"""Checkpoints of several ranks on several machines, whose folders are shared or their own."""

from __future__ import annotations

import json

import pytest

from tests.checkpoint.training import make_parts
from tests.processes import run_ranks

PROGRAM = "from tests.checkpoint.lives import main; main()"


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """What both ranks said of each life."""
    base = tmp_path_factory.mktemp("ranks")
    (base / "file").write_text("no folder")
    ranks = run_ranks(PROGRAM, [1, 1], make_parts(base / "parts"), base, timeout=120)
    told = [[json.loads(line) for line in rank.stdout.splitlines()] for rank in ranks]
    return {one["life"]: (one, other) for one, other in zip(*told, strict=True)}


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


def test_what_is_wrong_on_one_rank_is_the_same_error_on_both(lives):
    one, other = lives["complaints"]
    assert one == other and one["left"] == []
    steps, strange, names, folder = one["errors"]
    assert "rank 0 saves after step 0 and rank 1 after step 1" in steps
    assert "rank 1 cannot save step 5: strange['value'] is a slice" in strange
    assert "rank 0 and rank 1 call resume() with different states" in names
    assert "machine 1: checkpoints cannot be kept in" in folder and "/file: File exists" in folder
