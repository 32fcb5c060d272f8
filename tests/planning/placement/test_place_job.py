from __future__ import annotations

from collections.abc import Sequence
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
    SimulatedRun,
    link_use,
    place_job,
    queue_delays,
    simulate,
    simulate_plan,
    steady_iteration,
)
from gnnsys.planning.placement.descend import descend
from gnnsys.planning.placement.queued_run import late_rows, settle_late_rows, steady_path
from gnnsys.seeds import assign_shares
from tests.planning.profile.profiles import made_profile

QUICK = ExploreSettings(steps=800)


def heavy_profile(num_parts: int = 4, scale: float = 1e4) -> JobProfile:
    """A profile whose batches are megabytes."""
    profile = made_profile(num_parts, gradients=JobGradients(dense=1e5), part_bytes=(10**9,) * num_parts)
    shares = []
    for share in profile.shares:
        names = ("sample_in", "pull_in", "late_pull_in", "sample_out", "pull_out", "late_pull_out")
        grown = {name: getattr(share, name) * scale for name in names}
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


@pytest.mark.parametrize("trainers", [4, 20])
def test_queues_make_a_run_slower_the_longer_they_are_and_agree_with_the_use_of_links(trainers: int) -> None:
    """Step by step with few trainers, in one step with many."""
    seconds = []
    for queue in (0.0, 0.02, 0.05):
        hosts = cluster(queue=queue, slots=9, rate="1gbit")
        made = JobPlacer(hosts, heavy_profile(scale=2e3), trainers, 0, PlaceOptions(search=QUICK))
        run = made.simulate(made.as_run(np.array([0, 1, 2, 3, *np.arange(trainers) % 4])))
        seconds.append(made.seconds_per_epoch(run))
        if queue:
            into, out = link_use(run, steady_iteration(run))
            workers = run.placement[-trainers:].tolist()
            said = queue_delays(workers, into, out, np.full(4, queue))
            waited = run.demands.seconds[0, run.tasks.ids("ring")]
            expected = said if trainers == 4 else [38 * max(said)] * trainers
            assert waited[0] == pytest.approx(expected, rel=0.05)
    assert seconds[0] < seconds[1] < seconds[2]


def late_job(computing: float) -> tuple[JobPlacer, np.ndarray]:
    """Two trainers with as much to do on hosts of 100 Mbit/s without parts, and where: rows come from fast hosts.
    `computing`: seconds of a step."""
    profile = heavy_profile()
    shares = (replace(profile.shares[0], computing=np.full(profile.shares[0].num_batches, computing)),) * 4
    made = JobPlacer(cluster(), replace(profile, shares=shares), 2, 0, PlaceOptions(search=QUICK))
    return made, np.array([2, 3, 2, 3, 0, 1])


def bytes_in_of(made: JobPlacer, late: float) -> np.ndarray:
    """[hosts]: what links carry into hosts in an iteration where so many batches have late rows."""
    tasks, demands = made.profile.as_tasks(2, iterations=60, placement=([2, 3, 2, 3], [0, 1]), late=[late] * 2)
    run = simulate(made.machines, tasks, np.array([2, 3, 2, 3, 0, 1]), demands, "maxmin")
    return run.link_bytes()[4:8] / 60


@pytest.mark.parametrize(("computing", "share"), [(1e-3, 1.0), (60.0, 0.0)])
def test_rows_come_late_to_trainers_that_are_faster_than_their_links_and_then_fewer_are_asked_for(
    computing: float, share: float
) -> None:
    made, placement = late_job(computing)
    run = made.simulate(placement)
    np.testing.assert_array_equal(late_rows(run, made.profile.in_flight), [share] * 2)
    carried = run.link_bytes()[4:8] / run.demands.iterations
    np.testing.assert_allclose(carried[:2], bytes_in_of(made, share)[:2], rtol=0.01)  # all but messages of the ring
    assert bytes_in_of(made, 1.0)[0] < 0.9 * bytes_in_of(made, 0.0)[0]


def test_a_trainer_that_would_be_late_with_all_rows_and_not_with_fewer_is_late_for_a_part_of_its_batches() -> None:
    fast, placement = late_job(1e-3)
    with_fewer = steady_iteration(fast.simulate(placement))
    made, _ = late_job(1.15 * with_fewer)
    seen: list[list[float]] = []

    def simulate_with(late: Sequence[float]) -> SimulatedRun:
        seen.append(list(late))
        tasks, demands = made.profile.as_tasks(2, iterations=60, placement=([2, 3, 2, 3], [0, 1]), late=late)
        return simulate(made.machines, tasks, placement, demands, "maxmin")

    run = settle_late_rows(simulate_with, 2, 1)
    settled = seen[-1]
    assert late_rows(run, 1) == pytest.approx(settled, abs=0.1) and 0.2 < min(settled) <= max(settled) < 0.8
    assert late_rows(simulate_with([0.0] * 2), 1).min() > 0.9 and late_rows(simulate_with([1.0] * 2), 1).max() < 0.1
    assert bytes_in_of(made, 1.0)[0] < run.link_bytes()[4] / 60 < bytes_in_of(made, 0.0)[0]


def test_a_plan_for_links_with_queues_is_no_slower_than_what_the_search_found() -> None:
    hosts = cluster(queue=0.05)
    plan = place_job(hosts, heavy_profile(), 4, PlaceOptions(samplers=0, search=QUICK))
    made = JobPlacer(hosts, heavy_profile(), 4, 0, PlaceOptions(search=QUICK))
    for each in made.search()[:6]:
        assert plan.forecast.seconds_per_epoch <= 1.001 * made.seconds_per_epoch(made.simulate(each.placement))


def test_a_descent_ends_where_no_neighbour_is_better() -> None:
    """Of a cost that counts tasks on the wrong machine there is one best placement that fits."""
    problem = placer().problem
    wanted = np.array([2, 3, 2, 3, 0, 1, 2, 3])
    start = np.array([0, 1, 2, 3, 0, 0, 1, 1])
    asked: list[bytes] = []

    def cost(placement: np.ndarray) -> float:
        asked.append(placement.tobytes())
        return 1.0 + float((placement != wanted).sum())

    found = descend(problem, start, cost, as_run=lambda placement: placement, most=10_000)
    assert found.tolist() == wanted.tolist() and len(set(asked)) == len(asked)
    few = descend(problem, start, cost, as_run=lambda placement: placement, most=3)
    assert len(asked) <= 10_003 and cost(few) <= cost(start)


def random_job(seed: int) -> tuple[JobPlacer, np.ndarray]:
    """A small job of any proportions on a small cluster, and a placement."""
    rng = np.random.default_rng(seed)
    num_parts, num_hosts, samplers = (int(number) for number in rng.integers([1, 1, 0], [5, 4, 2]))
    profile = made_profile(num_parts, gradients=JobGradients(dense=10 ** rng.uniform(3, 7)))
    names = ("sample_in", "pull_in", "late_pull_in", "sample_out", "pull_out", "late_pull_out")
    scales = dict.fromkeys(names, 10 ** rng.uniform(0, 5))
    scales |= {name: 10 ** rng.uniform(-1, 3) for name in ("sampling", "fetching", "computing")}
    shares = []
    for share in profile.shares:
        drawn = {n: getattr(share, n) * by * rng.uniform(0.3, 1.7, getattr(share, n).shape) for n, by in scales.items()}
        shares.append(replace(share, **drawn))
    queue = float(rng.choice([0, 0, 0.02]))
    hosts = [
        {"name": f"h{number}", "cores": float(rng.choice([0.5, 1, 4])), "queue": queue}
        | {"rate": str(rng.choice(["10mbit", "100mbit", "1gbit"]))}
        for number in range(num_hosts)
    ]
    options = PlaceOptions(policy=str(rng.choice(["maxmin", "oes", "fifo"])))
    profile = replace(profile, shares=tuple(shares))
    made = JobPlacer(Cluster.from_json(hosts), profile, int(rng.integers(1, 5)), samplers, options)
    return made, made.as_run(rng.integers(0, num_hosts, made.problem.counts.num_placed))


def test_no_bound_of_a_plan_is_above_its_prediction() -> None:
    above = 0
    for seed in range(60):
        made, placement = random_job(seed)
        run = made.simulate(placement)
        forecast = made.forecast(run)
        for name, seconds in forecast.bounds.items():
            assert 0 <= seconds <= forecast.seconds_per_epoch, (seed, name)
        bounds, steady = run.bounds(), steady_iteration(run)
        assert steady_path(run) <= 1.001 * steady, seed
        assert max(bounds.busiest_link, bounds.busiest_cores) / run.demands.iterations <= 1.05 * steady, seed
        above += bounds.full_rate_path / run.demands.iterations > 1.001 * steady
        assert made.samplers or "work of samplers" not in " ".join([forecast.binds, *forecast.shares]), seed
    assert above, "paths with the filling of the pipeline are above some predictions"


def test_what_has_no_room_is_refused_before_anything_is_searched() -> None:
    seen: list[str] = []
    made = JobPlacer(cluster(slots=2), heavy_profile(), 200, 0, PlaceOptions())
    with pytest.raises(NoPlacement, match="slots lack 192"):
        made.search(lambda stage, what: seen.append(what))
    assert not seen


def test_a_plan_says_how_far_its_search_is() -> None:
    seen: list[tuple[int, int, str]] = []
    options = PlaceOptions(search=ExploreSettings(steps=50, most_simulated=2))
    place_job(cluster(), heavy_profile(), 4, options, progress=lambda *told: seen.append(told))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[0] == (0, 8, "baselines") and seen[-1] == (8, 8, "comparison")
    assert {"baselines", "search", "comparison"} == {what for _, _, what in seen}


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
    more, more_run = simulate_plan(plan, cluster(), heavy_profile(), trainers=13)
    hosts = more.hosts_of(more_run.placement)
    assert sum(host.num_trainers for host in hosts) == 13
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
        (
            lambda: place_job(cluster(memory="500M"), profile, 4),
            "slow1 lacks 0.476 GB of memory for .* give it more, or other hosts some",
        ),
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
