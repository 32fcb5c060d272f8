from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gnnsys.partition import Placement
from gnnsys.planning import (
    Cluster,
    ExploreSettings,
    JobGradients,
    JobPlacer,
    JobProfile,
    NoPlacement,
    PlaceOptions,
    place_job,
    simulate_plan,
)
from gnnsys.seeds import assign_shares
from tests.planning.profile.profiles import made_profile

QUICK = ExploreSettings(steps=800)


def heavy_profile(num_parts: int = 4, scale: float = 1e4) -> JobProfile:
    """A profile whose batches are megabytes."""
    profile = made_profile(num_parts, gradients=JobGradients(dense=1e5), part_bytes=(10**9,) * num_parts)
    shares = []
    for share in profile.shares:
        grown = {name: getattr(share, name) * scale for name in ("sample_in", "pull_in", "sample_out", "pull_out")}
        shares.append(replace(share, **grown))
    return replace(profile, shares=tuple(shares))


def cluster(**changes: object) -> Cluster:
    """Two hosts of 1 Gbit/s and two of 100 Mbit/s."""
    hosts = [
        {"name": name, "cores": 4, "rate": rate, "slots": 3, "memory": "8G"} | changes
        for name, rate in (("slow1", "100mbit"), ("slow2", "100mbit"), ("fast1", "1gbit"), ("fast2", "1gbit"))
    ]
    return Cluster.from_json({"hosts": hosts})


def placer(samplers: int = 0, **options: object) -> JobPlacer:
    return JobPlacer(cluster(), heavy_profile(), 4, samplers, PlaceOptions(search=QUICK, **options))  # type: ignore[arg-type]


def test_slow_links_are_left_to_others():
    plan = place_job(cluster(), heavy_profile(), 4, PlaceOptions(samplers=0, search=QUICK))
    told = {other.name: other.seconds_per_epoch for other in plan.runners_up}
    assert plan.forecast.seconds_per_epoch < 0.7 * told["even"]
    assert all(host.name.startswith("fast") for host in plan.hosts), "nothing crosses a slow link"
    assert plan.num_trainers == 4 and plan.num_parts == 4
    assert all(seconds <= plan.forecast.seconds_per_epoch * 1.001 for seconds in plan.forecast.bounds.values())
    assert plan.profile_digest == heavy_profile().digest and plan.parts_digest == 0xABC
    assert plan.forecast.binds and 0 < sum(plan.forecast.shares.values()) <= 1.001


def test_no_placement_that_was_simulated_is_faster_and_runners_up_are_in_order():
    plan = place_job(cluster(), heavy_profile(), 4, PlaceOptions(samplers=0, search=QUICK))
    seconds = [plan.forecast.seconds_per_epoch, *(other.seconds_per_epoch for other in plan.runners_up)]
    assert seconds == sorted(seconds)


def test_parts_stay_on_the_disks_that_have_them():
    hosts = [host.to_json() | {"parts": [number]} for number, host in enumerate(cluster())]
    plan = place_job(Cluster.from_json(hosts), heavy_profile(), 4, PlaceOptions(samplers=0, search=QUICK))
    assert plan.host_of_part() == ("slow1", "slow2", "fast1", "fast2")
    kept = place_job(cluster(), heavy_profile(), 4, PlaceOptions(samplers=0, search=QUICK, move_parts=False))
    assert kept.host_of_part() == ("slow1", "slow2", "fast1", "fast2")


def test_a_placement_is_simulated_as_a_run_deals_its_seeds():
    job = placer()
    mixed = np.array([2, 2, 3, 0, 3, 0, 2, 2])  # parts, then trainers in an order that no run has
    dealt = job.as_run(mixed)
    assert (dealt[:4] == mixed[:4]).all() and sorted(dealt[4:]) == sorted(mixed[4:])
    ranks = (0, 2, 2, 3)
    shares = assign_shares(job.profile.subpart_seeds, Placement(0, ranks, (2, 2, 3, 0)), 1)
    by_range = sorted(range(4), key=lambda rank: shares[rank].start)
    assert dealt[4:].tolist() == [ranks[rank] for rank in by_range]
    assert (job.as_run(dealt) == dealt).all()


@pytest.mark.parametrize("samplers", [0, 1, 2])
def test_names_and_numbers_say_the_same(samplers):
    job = placer(samplers)
    generator = np.random.default_rng(3)
    for _ in range(20):
        placement = job.as_run(generator.integers(0, 4, job.problem.counts.num_placed))
        hosts = job.hosts_of(placement)
        again = job.placement_of(hosts)
        assert (again[:4] == placement[:4]).all()
        pairs = [
            sorted(zip(place[-4:].tolist(), np.sort(place[4:-4].reshape(4, samplers), axis=1).tolist(), strict=True))
            for place in (placement, again)
        ]
        assert pairs[0] == pairs[1]
        assert sum(len(host.samplers) for host in hosts) == 4 * samplers


def test_samplers_elsewhere_are_chosen_where_cores_bind_and_links_do_not():
    """Trainers must be on two small hosts; two other hosts have cores and nothing to do."""
    profile = made_profile(2)
    shares = tuple(replace(share, sampling=share.sampling * 200) for share in profile.shares)
    profile = replace(profile, shares=shares)
    small = {"cores": 0.3, "rate": "unlimited", "slots": 1}
    large = {"cores": 0.6, "rate": "unlimited", "slots": 0.5}
    hosts = [{"name": "t1", **small}, {"name": "t2", **small}, {"name": "s1", **large}, {"name": "s2", **large}]
    own = place_job(Cluster.from_json(hosts), profile, 2, PlaceOptions(samplers=0, search=QUICK))
    best = place_job(Cluster.from_json(hosts), profile, 2, PlaceOptions(search=QUICK))
    assert best.num_samplers == 2 and own.num_samplers == 0
    assert best.forecast.seconds_per_epoch < own.forecast.seconds_per_epoch / 1.3
    assert {host.name for host in best.hosts if host.samplers} == {"s1", "s2"}
    narrow = [host | {"rate": "1kbit"} for host in hosts]
    near = place_job(Cluster.from_json(narrow), profile, 2, PlaceOptions(search=QUICK))
    assert not {host.name for host in near.hosts if host.samplers} & {"s1", "s2"}


def test_a_plan_is_simulated_as_it_was_predicted_and_otherwise_with_another_cluster():
    plan = place_job(cluster(), heavy_profile(), 4, PlaceOptions(samplers=0, search=QUICK, move_parts=False))
    job, run = simulate_plan(plan, cluster(), heavy_profile())
    assert job.seconds_per_epoch(run) == pytest.approx(plan.forecast.seconds_per_epoch)
    slower, slow_run = simulate_plan(plan, cluster().with_settings(["all.rate=10mbit"]), heavy_profile())
    assert slower.seconds_per_epoch(slow_run) > 5 * plan.forecast.seconds_per_epoch
    more, more_run = simulate_plan(plan, cluster(), heavy_profile(), trainers=9)
    hosts = more.hosts_of(more_run.placement)
    assert sum(host.num_trainers for host in hosts) == 9
    assert {host.name for host in hosts if host.num_trainers} == {host.name for host in plan.hosts if host.num_trainers}
    assert any("slots" in line for line in more.overfull(more_run.placement))


def test_what_cannot_be_is_one_line():
    profile = heavy_profile()
    for build, told in [
        (lambda: place_job(cluster(slots=1), profile, 6), "slots lack 2: 6 trainers need 6, 4 hosts have 4"),
        (
            lambda: place_job(cluster(), replace(profile, computes_on="a100"), 4),
            "no host can hold a trainer: it needs 1 GPU",
        ),
        (lambda: place_job(cluster(memory="500M"), profile, 4), "slow1 lacks 0.475712 GB of memory for"),
        (lambda: place_job(cluster(), profile, 0), "--trainers must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=told) as error:
            build()
        assert "\n" not in str(error.value)
    with pytest.raises(NoPlacement):
        place_job(cluster(slots=1), profile, 6)
    plan = place_job(cluster(), profile, 4, PlaceOptions(samplers=0, search=QUICK))
    others = Cluster.from_json([{"name": "other", "cores": 4, "rate": "1gbit"}])
    with pytest.raises(ValueError, match=r"the plan has host .*, the cluster has not: it has other"):
        simulate_plan(plan, others, profile)
