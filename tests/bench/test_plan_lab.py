"""The lab's part of `gnnsys bench plan`: placements that can be carried out, and what is compared."""

from __future__ import annotations

import pytest

from gnnsys.bench.plan.lab import FREE, QUICK, SLOW, UNEQUAL, PlanLabSettings, kendall
from gnnsys.bench.plan.lab_job import fitted_profile, forecast
from gnnsys.bench.plan.lab_placements import LabPlacement
from gnnsys.bench.plan.lab_samplers import FREE as SAMPLERS_FREE
from gnnsys.bench.plan.lab_samplers import SamplersLabSettings
from gnnsys.planning import ByteWork, Cluster, ExploreSettings, PlaceOptions, place_job
from tests.planning.profile.profiles import made_profile


@pytest.mark.parametrize("settings", [PlanLabSettings(), PlanLabSettings(**QUICK), PlanLabSettings(trainers=8)])
def test_every_placement_has_all_parts_once_and_as_many_trainers(settings: PlanLabSettings) -> None:
    for placement in [settings.calibrating(), *settings.held_out()]:
        assert sorted(part for host in placement.hosts for part in host.parts) == list(range(settings.parts))
        assert placement.num_trainers == settings.trainers
        assert {host.num_trainers for host in placement.hosts} <= {1, 2}
        assert placement.launch_plan().num_ranks == settings.trainers


def test_what_is_judged_was_not_calibrated_with_and_differs() -> None:
    settings = PlanLabSettings()
    judged = [placement.hosts for placement in settings.held_out()]
    assert len(set(judged)) == len(judged) == 6
    assert settings.calibrating().hosts not in judged
    assert judged == [placement.hosts for placement in PlanLabSettings().held_out()]


def test_even_follows_the_order_of_hosts() -> None:
    placement = LabPlacement.even("even", 8, 6, [2, 0, 3, 1])  # h3 is machine 0, h1 machine 1, ...
    told = {host.name: (host.num_trainers, host.parts) for host in placement.hosts}
    assert told == {"h3": (2, (0, 1)), "h1": (1, (2, 3)), "h4": (2, (4, 5)), "h2": (1, (6, 7))}


def test_clusters_have_the_rates_that_hosts_are_given() -> None:
    settings = PlanLabSettings()
    free, unequal, slow = (settings.cluster(rates) for rates in (FREE, UNEQUAL, SLOW))
    assert [host.rate_in for host in free] == [float("inf")] * 4 and not any(host.queue for host in free)
    assert [host.rate_in * 8 / 1e6 for host in unequal] == [250, 250, 50, 50]
    assert [host.rate_in * 8 / 1e6 for host in slow] == [50] * 4
    assert [round(host.queue, 3) for host in unequal] == [0.052, 0.052, 0.061, 0.061]
    with pytest.raises(ValueError, match="rates must be of 4 hosts, got 1"):
        PlanLabSettings(rates=("1gbit",))


def test_hosts_without_slots_have_no_trainer() -> None:
    """Samplers elsewhere: a plan must not put trainers on the hosts with more cores."""
    settings = SamplersLabSettings()
    cluster = settings.cluster(SAMPLERS_FREE)
    assert [host.cores for host in cluster] == [0.3, 0.3, 0.6, 0.6]
    profile = made_profile(4)
    for samplers in (0, 1):
        options = PlaceOptions(samplers=samplers, search=ExploreSettings(steps=500))
        plan = place_job(cluster, profile, settings.trainers, options)
        assert {host.name for host in plan.hosts if host.num_trainers} == {"h1", "h2"}
    alone = settings.alone()
    assert [(host.name, host.num_trainers, host.parts) for host in alone.hosts] == [
        ("h1", 1, ()), ("h2", 1, ()), ("h3", 0, (0, 1)), ("h4", 0, (2, 3)),
    ]  # fmt: skip


def test_a_profile_is_fitted_to_what_hosts_used() -> None:
    profile, settings = made_profile(4, byte_work=ByteWork(carry=1e-12)), SamplersLabSettings()
    said = forecast(profile, settings.cluster(SAMPLERS_FREE), settings.alone())
    used = 3 * said.core_seconds
    fitted = fitted_profile(profile, settings.alone(), said, used)
    again = forecast(fitted, settings.cluster(SAMPLERS_FREE), settings.alone())
    assert again.core_seconds == pytest.approx(used, rel=0.05)


def test_slower_links_never_make_an_epoch_shorter() -> None:
    profile = made_profile(3, byte_work=made_profile().byte_work)
    placement = LabPlacement.of("x", [[0], [1], [2]], [1, 1, 1])
    seconds = []
    for rate in ("unlimited", "10mbit", "1mbit", "100kbit"):
        cluster = Cluster.from_json([{"name": f"h{n}", "cores": 1, "rate": rate} for n in (1, 2, 3)])
        said = forecast(profile, cluster, placement)
        seconds.append(said.seconds)
        least = said.bytes_in.max() / cluster["h1"].rate_in
        assert said.seconds >= 0.9 * least
    assert seconds == sorted(seconds) and seconds[-1] > 2 * seconds[0]


def test_kendall_is_one_for_the_same_order_and_minus_one_for_the_other() -> None:
    assert kendall([("a", 1, 10), ("b", 2, 20), ("c", 3, 30)]) == 1
    assert kendall([("a", 1, 30), ("b", 2, 20), ("c", 3, 10)]) == -1
    assert kendall([("a", 1, 1), ("b", 1, 2)]) == 0
    assert kendall([("a", 1, 1.0), ("b", 2, 0.99), ("c", 3, 2)], apart=0.05) == 1
