"""Where a host's limits are written, in either version of control groups; folders stand in for the kernel's files."""

from pathlib import Path

import pytest

from gnnsys.lab import control_groups

V1 = "30 1 0:1 {root} {top}/{name} rw - cgroup cgroup rw,{name}\n"


def version_1(tmp_path: Path, own: str, mounted: str = "/") -> Path:
    """A /proc/self of a process in group `own` of every hierarchy, of which `mounted` is what can be seen."""
    names = ("cpu", "memory", "cpuacct")
    for name in names:
        (tmp_path / name / own.removeprefix(mounted).strip("/")).mkdir(parents=True)
    text = "".join(V1.format(root=mounted, top=tmp_path, name=name) for name in names)
    (tmp_path / "mountinfo").write_text(text)
    (tmp_path / "cgroup").write_text("".join(f"{i}:{name}:{own}\n" for i, name in enumerate(names)) + "0::/\n")
    return tmp_path


def version_2(tmp_path: Path, groups_there: dict[str, tuple[str, str]], own: str) -> Path:
    """Groups with what they have and what they give to their children."""
    top = tmp_path / "unified"
    for group, (has, gives) in groups_there.items():
        folder = top / group.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(has)
        (folder / "cgroup.subtree_control").write_text(gives)
    (tmp_path / "mountinfo").write_text(f"30 1 0:1 / {top} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
    (tmp_path / "cgroup").write_text(f"0::{own}\n")
    return tmp_path


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_version_1_groups_are_made_below_the_own_one(tmp_path, mounted):
    proc = version_1(tmp_path, "/docker/abc/job", mounted)
    roots = control_groups.find_roots(proc)
    below = "job" if mounted != "/" else "docker/abc/job"
    assert roots == control_groups.Roots(
        1, tmp_path / "cpu" / below, tmp_path / "memory" / below, tmp_path / "cpuacct" / below
    )
    assert control_groups.Roots.from_json(roots.to_json()) == roots


def test_version_1_limits_are_a_quota_per_period_and_bytes(tmp_path):
    host = control_groups.find_roots(version_1(tmp_path, "/")).of("lab/h1")
    host.make(0.45, 1 << 30, 0.02)
    assert (tmp_path / "cpu/lab/h1/cpu.cfs_period_us").read_text() == "20000"
    assert (tmp_path / "cpu/lab/h1/cpu.cfs_quota_us").read_text() == "9000"
    assert (tmp_path / "memory/lab/h1/memory.limit_in_bytes").read_text() == str(1 << 30)
    assert host.leaf("first") == [tmp_path / name / "lab/h1/first" for name in ("cpu", "memory", "cpuacct")]


def test_version_2_groups_are_made_where_children_get_cpu_and_memory(tmp_path):
    there = {"/": ("cpu memory io", "cpu memory"), "/a": ("cpu memory", "memory"), "/a/own": ("memory", "")}
    roots = control_groups.find_roots(version_2(tmp_path, there, "/a/own"))
    assert roots == control_groups.Roots(2, tmp_path / "unified", tmp_path / "unified")


def test_version_2_gives_children_cpu_and_memory_where_nobody_has_yet(tmp_path):
    there = {"/": ("cpu memory io", ""), "/own": ("", "")}
    roots = control_groups.find_roots(version_2(tmp_path, there, "/own"))
    assert roots == control_groups.Roots(2, tmp_path / "unified", tmp_path / "unified")
    assert (tmp_path / "unified/cgroup.subtree_control").read_text() == "+cpu +memory"


def test_version_2_limits_and_use_are_read_and_written_in_one_folder(tmp_path):
    there = {"/": ("cpu memory", "cpu memory")}
    host = control_groups.find_roots(version_2(tmp_path, there, "/")).of("lab/h1")
    host.make(0.45, 1 << 30, 0.02)
    folder = tmp_path / "unified/lab/h1"
    assert host.paths == (folder,)
    assert (folder / "cpu.max").read_text() == "9000 20000"
    assert (folder / "memory.max").read_text() == str(1 << 30)
    host.set_cpu(None, 0.02)
    assert (folder / "cpu.max").read_text() == "max 20000"
    (folder / "cpu.stat").write_text("usage_usec 1500000\nthrottled_usec 250000\n")
    (folder / "memory.current").write_text("100\n")
    assert host.usage() == control_groups.Usage(1.5, 100, 0.25)
    (folder / "memory.peak").write_text("300\n")
    assert host.usage().memory_peak == 300


def test_a_system_without_groups_that_can_limit_says_so(tmp_path):
    for file in ("mountinfo", "cgroup"):
        (tmp_path / file).write_text("")
    assert "no control groups" in control_groups.find_roots(tmp_path)
    assert "can give its children" in control_groups.find_roots(version_2(tmp_path, {"/": ("hugetlb", "")}, "/"))
