"""How many cores this process may use."""

from __future__ import annotations

import os

import pytest

from gnnsys.observe import cores as found
from gnnsys.observe import num_local_ranks, num_usable_cores, usable_core_time


def test_local_ranks_are_what_torchrun_says():
    assert num_local_ranks({"LOCAL_WORLD_SIZE": "8"}) == 8
    assert [num_local_ranks(e) for e in ({}, {"LOCAL_WORLD_SIZE": ""}, {"LOCAL_WORLD_SIZE": "0"})] == [1, 1, 1]


def test_cores_are_those_that_the_process_may_run_on():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert num_usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= num_usable_cores() <= len(before)


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "max 100000", "job": "max 100000", "job/rank": "350000 100000"}, [3]),
        ({"job": "400000 100000", "job/rank": "50000 100000"}, [1, 4]),  # half a core is one
        ({"job": "max 100000"}, []),
        ({}, []),
    ],
)
def test_quotas_of_all_control_groups_around_a_process_count(limits, cores, tmp_path):
    for folder, text in limits.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / folder / "cpu.max").write_text(text + "\n")
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/job/rank\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")  # outside of the control groups
    assert found._cgroup_quotas(tmp_path / "cgroup", tmp_path / "own") == cores
    assert found._cgroup_quotas(tmp_path / "cgroup", tmp_path / "missing") == []


def test_core_time_has_the_fractions_of_quotas_of_both_versions(tmp_path):
    """The order is that of the groups, from the innermost out."""
    for folder, name, text in [
        ("job/rank", "cpu.max", "30000 100000"),
        ("cpu,cpuacct/host/one", "cpu.cfs_quota_us", "6000"),
        ("cpu,cpuacct/host/one", "cpu.cfs_period_us", "20000"),
        ("cpu,cpuacct/host", "cpu.cfs_quota_us", "-1"),
        ("cpu,cpuacct/host", "cpu.cfs_period_us", "100000"),
        ("cpu,cpuacct", "cpu.cfs_quota_us", "250000"),
        ("cpu,cpuacct", "cpu.cfs_period_us", "100000"),
    ]:
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / folder / name).write_text(text + "\n")
    (tmp_path / "own").write_text("4:memory:/x\n1:cpu,cpuacct:/host/one\n0::/job/rank\n")
    assert found._exact_quotas(tmp_path / "cgroup", tmp_path / "own") == [0.3, 2.5, 0.3]
    assert found._cgroup_quotas(tmp_path / "cgroup", tmp_path / "own") == [1]
    assert found._exact_quotas(tmp_path / "cgroup", tmp_path / "missing") == []


def test_core_time_is_no_more_than_the_cores():
    assert 0 < usable_core_time() <= len(os.sched_getaffinity(0))
