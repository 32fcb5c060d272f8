"""How many cores this process may use."""

from __future__ import annotations

import os

import pytest

from gnnsys.observe import cores as found
from gnnsys.observe import num_local_ranks, num_usable_cores


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
