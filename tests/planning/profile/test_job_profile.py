"""Job profiles: files that come back as they were, shares for any number of trainers, and whose machine has which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnsys.partition import Placement
from gnnsys.planning import FLOWS, WORK, ByteWork, Cluster, JobProfile, place_job
from gnnsys.seeds import assign_shares
from tests.planning.profile.profiles import made_profile, made_share


def test_a_saved_profile_is_read_as_it_was(tmp_path: Path) -> None:
    profile = made_profile()
    profile.save(tmp_path / "job.json")
    again = JobProfile.from_file(tmp_path / "job.json")
    assert again.to_json() == profile.to_json()
    assert again.digest == profile.digest
    assert again.digest != made_profile(batch_size=11).digest


def test_as_many_trainers_as_were_profiled_have_their_very_shares() -> None:
    profile = made_profile(3)
    assert [profile.share(number, 3) for number in range(3)] == list(profile.shares)


@pytest.mark.parametrize("trainers", [1, 2, 4, 5, 9])
def test_shares_for_other_numbers_of_trainers_have_the_same_total(trainers: int) -> None:
    """Each of T trainers has 1/T of the seeds: the mean over trainers is the mean over shares."""
    profile = made_profile(3)
    for name in (*FLOWS, *WORK):
        mean = np.mean([getattr(profile.share(number, trainers), name) for number in range(trainers)], axis=0)
        np.testing.assert_allclose(mean, np.mean([getattr(share, name) for share in profile.shares], axis=0))


def test_a_share_inside_one_that_was_profiled_is_like_it() -> None:
    profile = made_profile(2)
    np.testing.assert_array_equal(profile.share(0, 4).pull_in, profile.shares[0].pull_in)
    assert profile.share(3, 4).home == (1,)
    assert profile.share(0, 1).home == (0, 1)


def test_at_home_nothing_crosses_a_link_from_there_but_is_served_all_the_same() -> None:
    share = made_share(3, home=1)
    home = share.at_home()
    assert not home.bytes_in[:, 1].any() and not home.bytes_out[:, 1].any()
    np.testing.assert_array_equal(home.pull_in[:, [0, 2]], share.home_pull_in[:, [0, 2]])
    np.testing.assert_array_equal(home.serving[:, 1], share.serving[:, 1])
    cheap = replace(share, local_cost=0.25).at_home()
    np.testing.assert_allclose(cheap.serving[:, 1], 0.25 * share.serving[:, 1])
    np.testing.assert_array_equal(cheap.sample_seconds[:, [0, 2]], share.sample_seconds[:, [0, 2]])


def test_of_late_rows_those_that_were_counted_so_are_taken_in_their_share() -> None:
    share = made_share(3, home=1)
    for local, prefix in (((1,), "home_"), ((0,), "")):
        in_time, late, mixed = (share.seen_from(local, part) for part in (0.0, 1.0, 0.25))
        away = [part for part in range(3) if part not in local]
        np.testing.assert_array_equal(in_time.pull_in[:, away], getattr(share, f"{prefix}pull_in")[:, away])
        np.testing.assert_array_equal(late.pull_in[:, away], getattr(share, f"{prefix}late_pull_in")[:, away])
        np.testing.assert_allclose(mixed.pull_in, 0.75 * in_time.pull_in + 0.25 * late.pull_in)
        np.testing.assert_array_equal(mixed.sample_in, in_time.sample_in)


@pytest.mark.parametrize(("trainers", "steps"), [(1, 30), (3, 10), (4, 8), (300, 1), (1000, 1)])
def test_an_epoch_has_as_many_steps_as_the_largest_share_needs(trainers: int, steps: int) -> None:
    assert made_profile(3).batches_per_epoch(trainers) == steps


@pytest.mark.parametrize(
    ("machine_of_part", "ranks"),
    [([0, 1, 2], [1, 1, 1]), ([0, 0, 1], [1, 2]), ([1, 0, 1], [3, 1]), ([0, 0, 0], [0, 2])],
)
def test_machines_of_shares_are_those_that_a_run_deals_them_to(machine_of_part: list[int], ranks: list[int]) -> None:
    profile = made_profile(3)
    machine_of_rank = tuple(machine for machine, count in enumerate(ranks) for _ in range(count))
    dealt = assign_shares([100] * 3, Placement(0, machine_of_rank, tuple(machine_of_part)), 1)
    found = profile.worker_machines(machine_of_part, ranks)
    assert len(found) == sum(ranks)
    machines, shares = profile.dealt(machine_of_part, ranks)
    assert tuple(machines) == machine_of_rank
    for rank, share in enumerate(dealt):
        assert shares[rank] == share.start * len(found) // 300
        assert found[shares[rank]] == machine_of_rank[rank]


def test_work_that_is_scaled_is_scaled_everywhere_and_bytes_are_not() -> None:
    profile = made_profile(2)
    twice = profile.scaled(work=2, step=0.5)
    for share, before in zip(twice.shares, profile.shares, strict=True):
        np.testing.assert_allclose(share.serving, 2 * before.serving)
        np.testing.assert_allclose(share.computing, 2 * before.computing + 0.5)
        np.testing.assert_array_equal(share.bytes_in, before.bytes_in)
    assert twice.byte_work.total == 2 * profile.byte_work.total
    with pytest.raises(ValueError, match="must be more than 0"):
        profile.scaled(work=0)


def test_a_profile_of_other_parts_is_refused() -> None:
    made_profile().check_parts(0xABC, "parts/")
    with pytest.raises(ValueError, match="digest 00000abc, parts/ has 00000abd"):
        made_profile().check_parts(0xABD, "parts/")


def damaged(change: Any) -> dict[str, Any]:
    value = json.loads(json.dumps(made_profile().to_json()))
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda v: v.update(format="x"), "it is no job profile"),
        (lambda v: v.update(version=99), "version 99 is not understood"),
        (lambda v: v.update(version=1), "version 1 is not understood: make it anew with `gnnsys profile`"),
        (lambda v: v.update(in_flight=6), "in_flight must be from 0 to ahead, which is 5, got 6"),
        (lambda v: v.update(batchsize=3), "unknown key 'batchsize': did you mean 'batch_size'?"),
        (lambda v: v.pop("ahead"), "ahead is missing"),
        (lambda v: v.update(shares=[]), "at least one share"),
        (lambda v: v["shares"][0].pop("rows"), "a share has"),
        (lambda v: v["shares"][0].update(rows=[[1, 2]]), "must have the shape"),
        (lambda v: v["shares"][0]["nodes"].__setitem__(0, -1), "nodes must be finite and not negative"),
        (lambda v: v["shares"][0].update(local_cost=2), "local_cost must be from 0 to 1"),
        (lambda v: v["shares"][0].update(home=[7]), "home must be parts from 0 to 2"),
        (lambda v: v.update(subpart_seeds=[0, 0, 0]), "not all of them 0"),
        (lambda v: v.update(gradients=3), "it is damaged"),
    ],
)
def test_a_damaged_profile_is_told_in_one_line(change: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(damaged(change)))
    with pytest.raises(ValueError) as caught:
        JobProfile.from_file(file)
    assert told in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_profile_is_told_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make one with `gnnsys profile PARTS"):
        JobProfile.from_file(tmp_path / "none.json")


def test_costs_of_nothing_are_refused_with_the_load_unless_a_run_was_measured() -> None:
    busy = {"byte_work": ByteWork(seal=1e-9, carry=0.0), "about": {"load": 12.06, "cores": 2}}
    said = r"not usable: a byte to carry cost 0.00 core-seconds, on a machine with a load of 12.1 on 2 cores. .*--trace"
    with pytest.raises(ValueError, match=said):
        made_profile(**busy).check_costs()
    with pytest.raises(ValueError, match=said):
        place_job(Cluster.from_json({"hosts": [{"name": "h1", "cores": 4, "rate": "1gbit"}]}), made_profile(**busy), 3)
    share = made_share(3, 0)
    no_step = made_profile(shares=(share, replace(share, computing=0 * share.computing)))
    with pytest.raises(ValueError, match=r"not usable: computing cost 0\.00"):
        no_step.check_costs()
    made_profile().check_costs()
    made_profile(**busy, source="run").check_costs()
    assert "busy before, load 12.1 on 2 cores" in made_profile(**busy).report()


def test_the_report_has_a_line_for_each_share() -> None:
    lines = made_profile(3).report().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("3 parts, 300 seeds")
