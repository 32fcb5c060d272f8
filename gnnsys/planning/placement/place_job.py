"""From a cluster and a job profile to a plan: the placement that is chosen, its runners-up and what is said of them.

A run of gnnsys decides by itself which trainer gets which seeds: those of the parts beside it first. So a placement is
which host serves which part, how many trainers each host has, and where samplers are; every candidate is simulated as a
run would deal its seeds (`JobPlacer.as_run`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import numpy as np

from gnnsys.graph import in_words
from gnnsys.partition import place_parts
from gnnsys.planning.cluster.cluster import Cluster
from gnnsys.planning.cluster.machines_of import machines_of
from gnnsys.planning.placement.balanced_placement import balanced_placements
from gnnsys.planning.placement.baselines import distdgl_placement, even_placement
from gnnsys.planning.placement.descend import descend
from gnnsys.planning.placement.explore import ExploreSettings, SimulatedPlacement, explore
from gnnsys.planning.placement.first_placement import first_placement
from gnnsys.planning.placement.plan_file import (
    PlacedHost,
    PlacedSampler,
    PlacementForecast,
    PlacementPlan,
    RunnerUp,
    check_hosts,
)
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.queued_run import (
    MOST_STEPS,
    settle_late_rows,
    settle_queues,
    steady_iteration,
    steady_path,
)
from gnnsys.planning.placement.resources import Ints, Resources
from gnnsys.planning.profile.job_profile import JobProfile
from gnnsys.planning.simulation import ClusterMachines, SimulatedRun, simulate

ITERATIONS = 20  # that are simulated of every candidate
LONGER = 3  # times as many of those that are compared at the end
SAMPLERS = 1  # per trainer, where samplers are tried
WORTH_SAMPLERS = 1.02  # more processes must be so many times as fast
ANNEALED = (3.0, 1000.0)  # betas: parts, trainers and their traffic leave a host together or not at all
_NO_LIMIT = 1e18
_FINALISTS, _RUNNERS_UP = 6, 3
_MOST_NEIGHBOURS = 400  # of the best finalist that are simulated with their queues, which the search does not know
_LEAST_NEIGHBOURS = 10
_DEALT_KEPT = 4096
_STAGES = 4  # of a search, with the comparison at its end
_PAIRS_SIMULATED = 160_000  # of tasks, in all neighbours: a simulation takes about as long as tasks have flows


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """`samplers` per trainer: 0, trainers sample for themselves; None: both are tried, and what is faster is taken.
    `move_parts`: parts may go to any host that has them on its disk. `policy`: how links are shared; TCP comes near
    max-min."""

    samplers: int | None = None
    move_parts: bool = True
    policy: str = "maxmin"
    iterations: int = ITERATIONS
    search: ExploreSettings = field(default_factory=lambda: ExploreSettings(steps=50_000, most_simulated=200))


class JobPlacer:
    """A job of `trainers` trainers with so many samplers each, on a cluster."""

    def __init__(
        self, cluster: Cluster, profile: JobProfile, trainers: int, samplers: int, options: PlaceOptions
    ) -> None:
        if trainers < 1:
            raise ValueError(f"--trainers must be at least 1, got {trainers}")
        cluster.check_parts(profile.num_parts)
        profile.check_costs()
        self.cluster, self.profile, self.options = cluster, profile, options
        self.trainers, self.samplers = trainers, samplers
        self.names = tuple(cluster.names)
        self._worker_machines = lru_cache(_DEALT_KEPT)(profile.worker_machines)  # a search asks for few, many times

    @cached_property
    def machines(self) -> ClusterMachines:
        return machines_of(self.cluster, computes_on=self.profile.computes_on)

    @cached_property
    def problem(self) -> PlacementProblem:
        """What is searched. Bytes that stay on a host are not sent, but their encryption is counted, as it is not known
        yet who is where. `simulate` knows."""
        tasks, demands = self.profile.as_tasks(
            self.trainers, iterations=self.options.iterations, samplers_per_trainer=self.samplers
        )
        every = range(self.profile.num_parts)
        disks = [set(every if host.parts is None else host.parts) for host in self.cluster]
        allowed = np.array([[part in disk for disk in disks] for part in every], dtype=bool)
        stores = np.array(place_parts(self.profile.num_parts, disks), dtype=np.int64)
        return PlacementProblem(
            self.machines,
            tasks,
            demands,
            self._resources(),
            stores,
            allowed if self.options.move_parts else None,
            self.options.policy,
        )

    def _resources(self) -> Resources:
        """GPUs, one per trainer where the job computes on one; `slots` of the cluster file, the most trainers that a
        host may have; memory, for parts."""
        on_gpu = self.profile.computes_on != "cpu"
        capacity = [
            [
                float(host.num_gpus) if on_gpu else _NO_LIMIT,
                _NO_LIMIT if (slots := host.launch.get("slots")) is None else float(slots),
                _NO_LIMIT if host.memory is None else host.memory / 1e9,
            ]
            for host in self.cluster
        ]
        takes = np.array([[0.0, 0.0, 0.0], [float(on_gpu), 1.0, 0.0], [0.0, 0.0, 0.0]])
        stores = np.zeros((self.profile.num_parts, 3))
        if self.profile.part_bytes:
            stores[:, 2] = np.array(self.profile.part_bytes, dtype=np.float64) / 1e9
        return Resources(("GPUs", "slots", "GB of memory"), np.array(capacity), takes, stores, self.names)

    def simulate(self, placement: Ints) -> SimulatedRun:
        """A placement that is as a run has it, with the flows and the work that it has there, over more iterations."""
        counts = self.problem.counts
        stores, workers = placement[: counts.num_stores], placement[counts.worker_id(0) :][: counts.num_workers]
        by_rank = np.argsort(workers, kind="stable")  # ranks are numbered machine by machine, and so goes their ring
        ranks = np.bincount(workers, minlength=len(self.names)).tolist()
        machine_of_rank, shares = self.profile.dealt(stores.tolist(), ranks)
        samplers = placement[counts.num_stores : counts.worker_id(0)].reshape(counts.num_workers, self.samplers)[
            by_rank
        ]
        fetching = samplers[:, 0].tolist() if self.samplers else machine_of_rank
        in_order = np.concatenate([stores, samplers.reshape(-1), machine_of_rank]).astype(np.int64)
        queue = np.array([host.queue for host in self.cluster])

        def simulate_with(late: Sequence[float] | None, step_delays: Sequence[float] | None) -> SimulatedRun:
            tasks, demands = self.profile.as_tasks(
                self.trainers,
                iterations=max(LONGER * self.options.iterations, 6 * self.profile.ahead),
                samplers_per_trainer=self.samplers,
                sync="ring" if queue.any() and self.trainers <= MOST_STEPS else "ring-whole",
                placement=(stores.tolist(), fetching),
                shares=shares,
                step_delays=step_delays,
                late=late,
            )
            return simulate(self.machines, tasks, in_order, demands, self.options.policy)

        def with_queues(late: Sequence[float] | None) -> SimulatedRun:
            return settle_queues(partial(simulate_with, late), machine_of_rank, queue)

        return (
            with_queues(None) if self.samplers else settle_late_rows(with_queues, self.trainers, self.profile.in_flight)
        )

    # --- between arrays and names

    def as_run(self, placement: Ints) -> Ints:
        """The placement as a run has it: which range of the seeds each trainer gets is what `gnnsys.split` says."""
        counts = self.problem.counts
        stores, workers = placement[: counts.num_stores], placement[counts.worker_id(0) :][: counts.num_workers]
        ranks = np.bincount(workers, minlength=len(self.names)).tolist()
        dealt = np.array(self._worker_machines(tuple(stores.tolist()), tuple(ranks)), dtype=np.int64)
        samplers = np.zeros((counts.num_workers, counts.samplers_per_worker), dtype=np.int64)
        if counts.samplers_per_worker:
            before = placement[counts.num_stores : counts.worker_id(0)].reshape(samplers.shape)
            for machine in np.unique(workers):
                own = np.sort(before[workers == machine], axis=1)
                samplers[dealt == machine] = own[np.lexsort(own.T[::-1])]
        return np.concatenate([stores, samplers.reshape(-1), dealt])

    def hosts_of(self, placement: Ints) -> tuple[PlacedHost, ...]:
        """A placement that is as a run has it, by names. Hosts with nothing to do are left out."""
        counts = self.problem.counts
        stores, workers = placement[: counts.num_stores], placement[counts.worker_id(0) :][: counts.num_workers]
        number = [int((workers[:worker] == workers[worker]).sum()) for worker in range(counts.num_workers)]
        samplers: list[list[PlacedSampler]] = [[] for _ in self.names]
        for worker in range(counts.num_workers):
            for machine in placement[counts.sampler_ids(worker)]:
                samplers[machine].append(PlacedSampler(host=self.names[workers[worker]], trainer=number[worker]))
        hosts = [
            PlacedHost(
                name=name,
                parts=tuple(np.flatnonzero(stores == machine).tolist()),
                num_trainers=int((workers == machine).sum()),
                samplers=tuple(samplers[machine]),
            )
            for machine, name in enumerate(self.names)
        ]
        return tuple(host for host in hosts if host.parts or host.num_trainers or host.samplers)

    def placement_of(self, hosts: Sequence[PlacedHost]) -> Ints:
        """What a plan says, as an array. ValueError where it is of other hosts, parts or numbers of tasks."""
        check_hosts(hosts)
        if missing := [host.name for host in hosts if host.name not in self.names]:
            raise ValueError(f"the plan has host {missing[0]}, the cluster has not: it has {', '.join(self.names)}")
        machine = {name: number for number, name in enumerate(self.names)}
        parts = {part: machine[host.name] for host in hosts for part in host.parts}
        if len(parts) != self.profile.num_parts:
            raise ValueError(f"the plan serves {len(parts)} parts, the profile is of {self.profile.num_parts}")
        for part, at in parts.items():
            there = self.cluster.hosts[at].parts
            if there is not None and part not in there:
                raise ValueError(
                    f"the plan has part {part} on {self.names[at]}, whose disk has {in_words(there)}: push it there, "
                    f"or make another plan"
                )
        stores = [parts[part] for part in range(len(parts))]
        ranks = [0] * len(self.names)
        for host in hosts:
            ranks[machine[host.name]] = host.num_trainers
        dealt = self.profile.worker_machines(stores, ranks)
        seen: Counter[int] = Counter()
        samplers: list[int] = []
        for at in dealt:
            wanted = PlacedSampler(host=self.names[at], trainer=seen[at])
            seen[at] += 1
            found = [machine[host.name] for host in hosts for sampler in host.samplers if sampler == wanted]
            if len(found) != self.samplers:
                raise ValueError(
                    f"trainer {wanted.trainer} of {wanted.host} has {len(found)} samplers, others have "
                    f"{self.samplers}: a prediction needs as many for each"
                )
            samplers += found
        return np.array([*stores, *samplers, *dealt], dtype=np.int64)

    # --- what is said of a placement

    def seconds_per_epoch(self, run: SimulatedRun) -> float:
        """In the long run: the pipeline does not stop between epochs."""
        return steady_iteration(run) * self.profile.batches_per_epoch(self.trainers)

    def forecast(self, run: SimulatedRun) -> PlacementForecast:
        """Bounds are those of epochs in the long run, as the prediction is. What a link carries in an iteration is a
        mean of all that were simulated, the prediction one of those in the middle, which may have had a little less
        to do: no bound is said to be above it."""
        binding, bounds, seconds = run.binding(), run.bounds(), self.seconds_per_epoch(run)
        if not self.samplers:
            own = {key: name.replace("work of samplers on", "sampling on") for key, name in binding.names.items()}
            binding = replace(binding, names=own)
        batches = self.profile.batches_per_epoch(self.trainers)
        epochs = batches / run.demands.iterations
        least = {
            f"busiest link ({bounds.busiest_link_name})": bounds.busiest_link * epochs,
            f"busiest cores ({bounds.busiest_cores_name})": bounds.busiest_cores * epochs,
            "full-rate path": steady_path(run) * batches,
        }
        return PlacementForecast(
            seconds_per_epoch=seconds,
            binds=binding.lines()[0].removeprefix("what binds: "),
            shares={binding.names[key]: round(binding.percent(key) / 100, 6) for key in list(binding.seconds)[:8]},
            bounds={name: min(value, seconds) for name, value in least.items()},
            settings={
                "trainers": self.trainers,
                "samplers_per_trainer": self.samplers,
                "policy": run.policy,
                "iterations": run.demands.iterations,
                "batches_per_epoch": batches,
                "cores": {host.name: host.cores for host in self.cluster},
            },
        )

    def overfull(self, placement: Ints) -> list[str]:
        """What hosts have too little of for a placement, a line each: predictions do not mind, runs do."""
        resources, counts = self.problem.resources, self.problem.counts
        used = resources.used(placement, counts)
        return [
            f"{self.names[machine]} has {resources.capacity[machine, r]:g} {resources.names[r]}, and needs "
            f"{used[machine, r]:g}"
            for machine, r in np.argwhere(used > resources.room())
        ]

    def search(self, tell: Callable[[int, str], None] = lambda stage, what: None) -> list[SimulatedPlacement]:
        """Baselines, balanced placements, what ETP finds from IFS's start with a beta that grows, and from the best of
        these with one that does not: the fastest first, different ones. `NoPlacement` where nothing fits. `tell` is
        called with the number of the stage, again and again."""
        problem, found, stage = self.problem, list[SimulatedPlacement](), 0
        first_placement(problem.resources, problem.counts, problem.store_machine)  # raises at once what others find out
        tell(stage, "baselines")

        def as_run(placement: Ints) -> Ints:
            tell(stage, "search" if stage else "baselines")
            return self.as_run(placement)

        for name, start in _baselines(problem):
            placement = as_run(start)
            found.append(SimulatedPlacement(placement, problem.simulate(placement).seconds, name))
        annealed = replace(self.options.search, beta=ANNEALED[0], last_beta=ANNEALED[1], relative=True)
        tell(stage := 1, "search")
        from_first = explore(problem, annealed, as_run=as_run)
        best = min([*found, *from_first.best], key=lambda each: each.seconds)
        tell(stage := 2, "search")
        again = explore(problem, self.options.search, start=best.placement, as_run=as_run)
        seen: set[bytes] = set()
        different = []
        for each in sorted([*found, *from_first.best, *again.best], key=lambda each: each.seconds):
            if each.placement.tobytes() not in seen:
                seen.add(each.placement.tobytes())
                different.append(each)
        return different

    def better_with_queues(self, found: Sequence[SimulatedPlacement]) -> list[SimulatedPlacement]:
        """What is near the best of these, where links have queues: the search does not know what waits in them."""
        if not any(host.queue for host in self.cluster):
            return []

        def cost(placement: Ints) -> float:
            return self.seconds_per_epoch(self.simulate(placement))

        start = min(found, key=lambda each: cost(each.placement)).placement
        most = max(_LEAST_NEIGHBOURS, min(_MOST_NEIGHBOURS, _PAIRS_SIMULATED // len(start) ** 2))
        placement = descend(self.problem, start, cost, as_run=self.as_run, most=most, seed=self.options.search.seed)
        return [SimulatedPlacement(placement, self.problem.simulate(placement).seconds, "descent")]


def place_job(
    cluster: Cluster, profile: JobProfile, trainers: int, options: PlaceOptions | None = None, *,
    profile_path: str = "", progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> PlacementPlan:  # fmt: skip
    """The plan with the fewest seconds per epoch of all that were simulated. `NoPlacement` says what lacks.

    The best few of a search are simulated again, with more iterations, and compared by what an iteration takes once the
    pipeline is full.
    """
    chosen = options or PlaceOptions()
    ways = (0, SAMPLERS) if chosen.samplers is None else (chosen.samplers,)
    finalists = []
    for way, samplers in enumerate(ways):

        def tell(stage: int, what: str, way: int = way) -> None:
            progress(_STAGES * way + stage, _STAGES * len(ways), what)

        placer = JobPlacer(cluster, profile, trainers, samplers, chosen)
        ranked = placer.search(tell)
        kept = ranked[:_FINALISTS] + [each for each in ranked[_FINALISTS:] if each.name in ("even", "distdgl")]
        for each in kept + placer.better_with_queues(kept):
            tell(_STAGES - 1, "comparison")
            run = placer.simulate(each.placement)
            name = each.name if not samplers else f"{each.name}, {samplers} sampler{'s'[: samplers > 1]} per trainer"
            finalists.append((placer.seconds_per_epoch(run), name, placer, run))
    progress(_STAGES * len(ways), _STAGES * len(ways), "comparison")
    finalists.sort(key=lambda each: each[0] * (WORTH_SAMPLERS if each[2].samplers else 1.0))
    _, _, placer, run = finalists[0]
    others = [
        RunnerUp(name=name, hosts=other.hosts_of(their_run.placement), seconds_per_epoch=seconds)
        for seconds, name, other, their_run in finalists[1:]
    ]
    others = _different(others, placer.hosts_of(run.placement))
    plain = [other for other in others[_RUNNERS_UP:] if other.name in ("even", "distdgl")]
    return PlacementPlan(
        hosts=placer.hosts_of(run.placement),
        parts_digest=profile.parts_digest,
        forecast=placer.forecast(run),
        profile_digest=profile.digest,
        profile_path=profile_path,
        runners_up=tuple(others[:_RUNNERS_UP] + plain),
        cluster=cluster.to_json(),
    )


def _baselines(problem: PlacementProblem) -> Iterator[tuple[str, Ints]]:
    yield "even", even_placement(problem)
    yield "distdgl", distdgl_placement(problem)
    for placement in balanced_placements(problem):
        yield "balanced", placement


def _different(others: Sequence[RunnerUp], chosen: Sequence[PlacedHost]) -> list[RunnerUp]:
    """Those with other numbers of trainers or samplers per host than all before them, and the baselines."""

    def numbers(hosts: Sequence[PlacedHost]) -> tuple[tuple[str, int, int], ...]:
        return tuple((host.name, host.num_trainers, len(host.samplers)) for host in hosts)

    seen, found = {numbers(chosen)}, []
    for other in others:
        if numbers(other.hosts) not in seen or other.name in ("even", "distdgl"):
            seen.add(numbers(other.hosts))
            found.append(other)
    return found


def simulate_plan(
    plan: PlacementPlan,
    cluster: Cluster,
    profile: JobProfile,
    *,
    trainers: int | None = None,
    policy: str | None = None,
) -> tuple[JobPlacer, SimulatedRun]:
    """A plan on a cluster that may be another one, with other trainers: in the plan's proportions,
    and then trainers sample for themselves."""
    told = plan.forecast.settings
    samplers = int(told.get("samplers_per_trainer", 0)) if trainers in (None, plan.num_trainers) else 0
    options = PlaceOptions(policy=policy or str(told.get("policy", "maxmin")))
    hosts = plan.hosts
    if trainers not in (None, plan.num_trainers):
        assert trainers is not None
        hosts = _in_proportion(plan.hosts, trainers)
    placer = JobPlacer(cluster, profile, trainers or plan.num_trainers, samplers, options)
    return placer, placer.simulate(placer.placement_of(hosts))


def _in_proportion(hosts: Sequence[PlacedHost], trainers: int) -> tuple[PlacedHost, ...]:
    """So many trainers, divided as the plan divides its own: by the largest remainders."""
    if trainers < 1:
        raise ValueError(f"--trainers must be at least 1, got {trainers}")
    before = np.array([host.num_trainers for host in hosts], dtype=np.float64)
    wanted = before * trainers / before.sum()
    given = np.floor(wanted).astype(np.int64)
    for host in np.argsort(given - wanted, kind="stable")[: trainers - int(given.sum())]:
        given[host] += 1
    return tuple(replace(host, num_trainers=int(n), samplers=()) for host, n in zip(hosts, given, strict=True))
