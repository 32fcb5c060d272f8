"""Placements to compare with: `distdgl`, `even`, `random`, and all of them where they can be counted.

Each is a function of a problem, and keeps its resources or raises `NoPlacement`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gnnsys.planning.placement.explore import SimulatedPlacement, simulate_best
from gnnsys.planning.placement.first_placement import NoPlacement, first_placement, what_lacks
from gnnsys.planning.placement.problem import PlacementProblem
from gnnsys.planning.placement.resources import SAMPLER, SERVER, WORKER, Floats, Ints

MOST_EXHAUSTIVE = 100_000
_TRIES = 200  # random placements that do not fit, before it is given up


class _Seats:
    """Machines that are filled task by task."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, self.counts = problem, problem.counts
        self.demand = problem.resources.demand
        self.left = problem.resources.behind_stores(problem.store_machine)
        self.workers = np.full(self.counts.num_workers, -1, dtype=np.int64)
        self.samplers = np.full((self.counts.num_workers, self.counts.samplers_per_worker), -1, dtype=np.int64)
        self.servers = np.full(self.counts.num_servers, -1, dtype=np.int64)
        self.num_workers = np.zeros(len(self.left), dtype=np.int64)

    def able(self, takes: Floats) -> Ints:
        """Machines that have room for so much."""
        return np.flatnonzero((self.left >= takes).all(axis=1))

    def group(self) -> Floats:
        """What a worker takes with all its samplers."""
        return self.demand[WORKER] + self.counts.samplers_per_worker * self.demand[SAMPLER]

    def seat_group(self, worker: int, machine: int) -> None:
        self.left[machine] -= self.group()
        self.workers[worker] = machine
        self.samplers[worker] = machine
        self.num_workers[machine] += 1

    def seat_rest(self) -> bool:
        """Workers, samplers and servers that have no place yet, in this order: each where its worker is, or else on the
        machine that has most room. Whether all fit."""
        for worker in np.flatnonzero(self.workers < 0):
            machine = self._roomiest(self.demand[WORKER], -1)
            if machine < 0:
                return False
            self.workers[worker] = machine
        for worker, place in np.argwhere(self.samplers < 0):
            machine = self._roomiest(self.demand[SAMPLER], int(self.workers[worker]))
            if machine < 0:
                return False
            self.samplers[worker, place] = machine
        for server in range(self.counts.num_servers):
            machine = self._roomiest(self.demand[SERVER], -1)
            if machine < 0:
                return False
            self.servers[server] = machine
        return True

    def _roomiest(self, takes: Floats, preferred: int) -> int:
        able = self.able(takes)
        if not len(able):
            return -1
        if preferred in able:
            machine = preferred
        else:
            share = (self.left - takes) / np.maximum(self.problem.resources.capacity, 1e-300)
            machine = int(able[np.argmax(share[able].min(axis=1))])
        self.left[machine] -= takes
        return machine

    def placement(self) -> Ints:
        stores = self.problem.store_machine
        return np.concatenate([stores, self.samplers.reshape(-1), self.workers, self.servers])


def distdgl_placement(problem: PlacementProblem) -> Ints:
    """Each worker with its samplers on one machine, machines filled one after another; workers and samplers that fit no
    machine together are separated, as few as can be this way."""
    seats = _Seats(problem)
    for worker in range(problem.counts.num_workers):
        able = seats.able(seats.group())
        if not len(able):
            break
        seats.seat_group(worker, int(able[np.argmin(seats.num_workers[able])]))
    return _complete(seats)


def even_placement(problem: PlacementProblem) -> Ints:
    """What torchrun and `place_parts` do: the same number of trainers on every machine, in blocks, the first ones with
    one more where it does not go up; samplers beside their trainer."""
    seats = _Seats(problem)
    num_workers, num_machines = problem.counts.num_workers, problem.machines.num_machines
    for worker in range(num_workers):
        machine = worker * num_machines // num_workers
        if machine in seats.able(seats.group()):
            seats.seat_group(worker, machine)
    return _complete(seats)


def _complete(seats: _Seats) -> Ints:
    """The rest where there is room. A greedy rest may fail where a placement exists: then IFS's counts are taken."""
    if seats.seat_rest():
        return seats.placement()
    problem = seats.problem
    return first_placement(problem.resources, problem.counts, problem.store_machine, seed=0)


def random_placement(problem: PlacementProblem, seed: int = 0) -> Ints:
    """Every task on a machine that is drawn from those with room for it, tasks in a random order."""
    generator = np.random.default_rng(seed)
    demand = problem.resources.of_each_task(problem.counts)
    for _ in range(_TRIES):
        left = problem.resources.behind_stores(problem.store_machine)
        placement = np.full(problem.counts.num_placed, -1, dtype=np.int64)
        placement[: problem.counts.num_stores] = problem.store_machine
        for task in problem.counts.num_stores + generator.permutation(sum(problem.counts.by_kind)):
            able = np.flatnonzero((left >= demand[task]).all(axis=1))
            if not len(able):
                break
            placement[task] = generator.choice(able)
            left[placement[task]] -= demand[task]
        else:
            return placement
    why = what_lacks(problem.resources, problem.counts, problem.store_machine)
    raise NoPlacement(f"none of {_TRIES} random placements fits: {why}")


def all_placements(problem: PlacementProblem, most: int = MOST_EXHAUSTIVE) -> Ints:
    """Every placement that fits, [count, num_placed]. ValueError where there are more than `most`."""
    demand = problem.resources.of_each_task(problem.counts)
    placement = np.full(problem.counts.num_placed, -1, dtype=np.int64)
    fixed = np.setdiff1d(np.arange(len(placement)), problem.movable)
    placement[fixed] = problem.store_machine[fixed]
    left = problem.resources.room()
    np.subtract.at(left, placement[fixed], demand[fixed])

    def fill(number: int) -> Iterator[Ints]:
        if number == len(problem.movable):
            yield placement.copy()
            return
        task = problem.movable[number]
        for machine in np.flatnonzero(problem.allowed[task] & (left >= demand[task]).all(axis=1)):
            placement[task] = machine
            left[machine] -= demand[task]
            yield from fill(number + 1)
            left[machine] += demand[task]

    found = []
    for one in fill(0) if (left >= 0).all() else ():
        if len(found) == most:
            raise ValueError(f"there are more than {most:,} placements: search them with explore()")
        found.append(one)
    return np.array(found, dtype=np.int64).reshape(len(found), problem.counts.num_placed)


def exhaustive(problem: PlacementProblem, most: int = MOST_EXHAUSTIVE) -> SimulatedPlacement:
    """The fastest of all placements. `NoPlacement` where nothing fits."""
    found = all_placements(problem, most)
    if not len(found):
        raise NoPlacement(what_lacks(problem.resources, problem.counts, problem.store_machine))
    order = np.argsort(problem.bounds(found).least, kind="stable")
    first = SimulatedPlacement(found[order[0]], problem.simulate(found[order[0]]).seconds, "exhaustive")
    return simulate_best(problem, found[order[1:]], first, name="exhaustive")[0]


BASELINES = {"distdgl": distdgl_placement, "even": even_placement, "random": random_placement}
