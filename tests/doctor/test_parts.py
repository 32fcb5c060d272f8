"""Parts on disk: whole, damaged or missing, on local and network disks, and more of them than memory holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.doctor import ADVICE, FAILS, OK, PartsFacts, judge_parts, parts_check, read_parts
from gnnsys.doctor.parts_check import disk_of

WELL = PartsFacts(path="parts", num_parts=4, parts=(0, 1), num_files=9, size=100, checked=100, disk="ext4")


@pytest.fixture
def parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["partition", "sbm-200", "--parts", "2", "--out", str(tmp_path / "parts")]) == 0
    capsys.readouterr()
    return tmp_path / "parts"


def test_parts_that_are_whole_are_compared_with_their_checksums(parts: Path):
    facts = read_parts(str(parts))
    sizes = sum(file.stat().st_size for file in parts.glob("part-*/*"))
    assert (facts.num_parts, facts.parts, facts.problems) == (2, (0, 1), ())
    assert facts.size == facts.checked == sizes and facts.disk
    assert [each.state for each in judge_parts(facts, 1 << 40)] == [OK] * 4


def test_a_damaged_file_is_named(parts: Path):
    file = max(parts.glob("part-0001/*.npy"), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = judge_parts(read_parts(str(parts)), None)[0]
    assert found.state == FAILS and f"{file} does not match its checksum" in str(found)
    file.unlink()
    assert f"{file} is missing" in str(judge_parts(read_parts(str(parts)), None)[0])


def test_checksums_of_large_files_are_left_out_and_that_is_said(parts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts_check, "CHECKED_BYTES", 2000)
    facts = read_parts(str(parts))
    assert 0 < facts.checked <= 2000 < facts.size
    assert "sizes agree, and checksums of 1." in str(judge_parts(facts, None)[0])


def test_a_folder_without_parts_is_refused(tmp_path: Path, parts: Path):
    (found,) = judge_parts(read_parts(str(tmp_path / "nowhere")), None)
    assert found.state == FAILS and "nowhere has no manifest.json: nothing can be opened there" in str(found)
    for folder in parts.glob("part-*"):
        folder.rename(tmp_path / folder.name)
    (found,) = judge_parts(read_parts(str(parts)), None)
    assert found.state == FAILS and "has a manifest and no part" in str(found)


@pytest.mark.parametrize("disk", ["nfs4", "lustre", "ceph", "cifs", "fuse.sshfs", "beegfs", "9p"])
def test_a_network_disk_is_worth_a_word(disk: str):
    found = judge_parts(replace(WELL, disk=disk), None)[2]
    assert found.state == ADVICE and f"{disk}, a network disk" in str(found) and "gnnsys push parts" in found.remedy


@pytest.mark.parametrize("disk", ["ext4", "xfs", "overlay", "tmpfs", "btrfs", "fuse.fuse-overlayfs", None])
def test_a_local_disk_is_well(disk: str | None):
    assert judge_parts(replace(WELL, disk=disk), None)[2].state == OK


def test_more_parts_than_memory_are_worth_a_word():
    assert judge_parts(WELL, 99)[3].state == ADVICE and judge_parts(WELL, 100)[3].state == OK
    assert "100 B of parts, 99 B of memory" in str(judge_parts(WELL, 99)[3])
    assert "0,1 of 4 parts, 9 files" in str(judge_parts(WELL, 100)[0])


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path: Path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "22 21 0:40 / /data rw,relatime shared:7 - nfs4 server:/data rw\n"
        "23 22 8:2 / /data/my\\040disk rw - xfs /dev/sdb1 rw\n"
    )
    assert disk_of(Path("/data/parts"), mounts) == "nfs4"
    assert disk_of(Path("/data/my disk/parts"), mounts) == "xfs"
    assert disk_of(Path("/database"), mounts) == "ext4"
    assert disk_of(Path("/"), tmp_path / "nowhere") is None


def test_whether_your_own_ids_can_be_looked_up_is_said(parts: Path):
    found = judge_parts(read_parts(str(parts)), None)[1]
    assert found.state == OK and "graph.from_original looks up your ids of nodes; edges too" in str(found)
    found = judge_parts(replace(WELL, finds_nodes=False, finds_edges=False), None)[1]
    assert found.state == ADVICE and "no table of your ids of nodes; of edges they were left out" in str(found)
    assert "gnnsys partition SOURCE" in found.remedy
