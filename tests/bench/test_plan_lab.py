"""The lab's part of `gnnsys bench plan`: placements that can be carried out, and what is compared."""

from __future__ import annotations

import pytest

from gnnsys.bench.plan.lab import QUICK, PlanLabSettings, forecast, kendall
from gnnsys.bench.plan.lab_placements import LabPlacement
from gnnsys.planning import Cluster
from tests.planning.profile.profiles import made_profile


@pytest.mark.parametrize("settings", [PlanLabSettings(), PlanLabSettings(**QUICK), PlanLabSettings(trainers=8)])
def test_every_placement_has_all_parts_once_and_as_many_trainers(settings: PlanLabSettings) -> None:
    placements = settings.placements()
    assert len({(p.parts, p.ranks) for p in placements}) >= 3
    for placement in placements:
        assert sorted(part for parts in placement.parts for part in parts) == list(range(settings.parts))
        assert sum(placement.ranks) == settings.trainers
        assert set(placement.ranks) <= {1, 2}


def test_clusters_have_the_rates_that_hosts_are_given() -> None:
    settings = PlanLabSettings()
    free, unequal, slow = (settings.cluster(rates) for rates in settings.all_rates())
    assert [host.rate_in for host in free] == [float("inf")] * 4
    assert [host.rate_in * 8 / 1e6 for host in unequal] == [250, 250, 50, 50]
    assert [host.rate_in * 8 / 1e6 for host in slow] == [50] * 4
    with pytest.raises(ValueError, match="rates must be of 4 hosts, got 1"):
        PlanLabSettings(rates=("1gbit",))


def test_slower_links_never_make_an_epoch_shorter() -> None:
    profile = made_profile(3, byte_work=made_profile().byte_work)
    placement = LabPlacement(name="x", parts=((0,), (1,), (2,)), ranks=(1, 1, 1))
    seconds = []
    for rate in ("unlimited", "10mbit", "1mbit", "100kbit"):
        cluster = Cluster.from_json([{"name": f"h{n}", "cores": 1, "rate": rate} for n in range(3)])
        said = forecast(profile, cluster, placement)
        seconds.append(said.seconds)
        least = said.bytes_in.max() / cluster["h0"].rate_in
        assert said.seconds >= 0.9 * least
    assert seconds == sorted(seconds) and seconds[-1] > 2 * seconds[0]


def test_kendall_is_one_for_the_same_order_and_minus_one_for_the_other() -> None:
    assert kendall([("a", 1, 10), ("b", 2, 20), ("c", 3, 30)]) == 1
    assert kendall([("a", 1, 30), ("b", 2, 20), ("c", 3, 10)]) == -1
    assert kendall([("a", 1, 1), ("b", 1, 2)]) == 0
