"""IFS (Algorithm 2 of DGTP): a first placement that fits, or what is missing for one; then who is whose sampler.

Algorithm 2 keeps every triple (samplers, workers, servers) that the first i machines can hold. What holds q samplers
holds fewer as well, so it is enough to keep the most samplers for each (workers, servers): the same answer from a table
of one dimension less. The printed loops leave out counts of zero and a single machine; here they are cases like others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gnnsys.planning.placement.resources import (
    NAMES_OF_TASKS,
    SAMPLER,
    SERVER,
    WORKER,
    Floats,
    Ints,
    Resources,
    TaskCounts,
)

_NEVER = -1
_STEPS = 40  # of halving, for how much is missing


class NoPlacement(ValueError):
    """No placement fits. The text says which resource lacks how much."""


def first_placement(resources: Resources, counts: TaskCounts, store_machine: Ints, *, seed: int = 0) -> Ints:
    """Algorithm 2 with its random order of machines, then identities (`with_identities`).

    `store_machine` are the machines of the stores, which stay where they are. `NoPlacement` says what lacks.
    """
    order = np.random.default_rng(seed).permutation(resources.num_machines)
    left = resources.behind_stores(store_machine)
    found = first_counts(left, resources.demand, counts, order)
    if found is None:
        raise NoPlacement(what_lacks(resources, counts, store_machine))
    return with_identities(found, counts, store_machine)


def first_counts(left: Floats, demand: Floats, counts: TaskCounts, order: Ints) -> Ints | None:
    """How many samplers, workers and servers each machine gets, [num_machines, 3]; None if nothing fits.

    `left` is what machines have behind their stores. They are filled in `order`, and the first ones that suffice are
    used.
    """
    if (left < 0).any():
        return None
    num_samplers, num_workers, num_servers = counts.by_kind
    most = np.full((num_workers + 1, num_servers + 1), _NEVER, dtype=np.int64)  # samplers that are held so far
    most[0, 0] = 0
    rows: list[tuple[Ints, dict[tuple[int, int], int]]] = []
    for machine in order:
        options = _options(left[machine], demand, counts)
        best = np.full_like(most, _NEVER)
        choice = np.zeros((*most.shape, 2), dtype=np.int64)  # (workers, servers) of this machine that led to `best`
        for (workers, servers), samplers in options.items():
            before = most[: num_workers + 1 - workers, : num_servers + 1 - servers]
            total = np.where(before == _NEVER, _NEVER, np.minimum(before + samplers, num_samplers))
            there = best[workers:, servers:]
            better = total > there
            there[better] = total[better]
            choice[workers:, servers:][better] = (workers, servers)
        most = best
        rows.append((choice, options))
        if most[num_workers, num_servers] >= num_samplers:
            return _trace(order[: len(rows)], rows, counts, len(left))
    return None


def _options(left: Floats, demand: Floats, counts: TaskCounts) -> dict[tuple[int, int], int]:
    """For each (workers, servers) that a machine can hold: how many samplers beside them."""
    takes = demand[SAMPLER] > 0
    found: dict[tuple[int, int], int] = {}
    for workers in range(counts.num_workers + 1):
        for servers in range(counts.num_servers + 1):
            room = left - workers * demand[WORKER] - servers * demand[SERVER]
            if (room < 0).any():
                break
            samplers = np.floor(room[takes] / demand[SAMPLER][takes]).min(initial=counts.num_samplers)
            found[workers, servers] = int(samplers)
        if (workers, 0) not in found:
            break
    return found


def _trace(
    order: Ints, rows: list[tuple[Ints, dict[tuple[int, int], int]]], counts: TaskCounts, num_machines: int
) -> Ints:
    """Walks the choices back from the last machine to the first."""
    placed = np.zeros((num_machines, len(NAMES_OF_TASKS)), dtype=np.int64)
    samplers, workers, servers = counts.by_kind
    for machine, (choice, options) in zip(order[::-1], rows[::-1], strict=True):
        own_workers, own_servers = map(int, choice[workers, servers])
        own_samplers = min(samplers, options[own_workers, own_servers])
        placed[machine] = own_samplers, own_workers, own_servers
        samplers, workers, servers = samplers - own_samplers, workers - own_workers, servers - own_servers
    assert (samplers, workers, servers) == (0, 0, 0)
    return placed


def with_identities(placed: Ints, counts: TaskCounts, store_machine: Ints) -> Ints:
    """A placement with so many tasks on each machine (`placed` [num_machines, 3]) and as many samplers beside their own
    worker as can be: min(samplers, samplers_per_worker * workers) on every machine. What is left over goes to workers
    in order, so that the samplers of one worker stay together."""
    machines = np.arange(len(placed))
    worker_machine = np.repeat(machines, placed[:, WORKER])
    per_worker = counts.samplers_per_worker
    sampler_machine = np.full((counts.num_workers, per_worker), _NEVER, dtype=np.int64)
    spare: list[int] = []
    for machine in machines:
        free = int(placed[machine, SAMPLER])
        for worker in np.flatnonzero(worker_machine == machine):
            own = min(free, per_worker)
            sampler_machine[worker, :own] = machine
            free -= own
        spare += [int(machine)] * free
    sampler_machine[sampler_machine == _NEVER] = spare
    server_machine = np.repeat(machines, placed[:, SERVER])
    return np.concatenate([store_machine, sampler_machine.reshape(-1), worker_machine, server_machine]).astype(np.int64)


def what_lacks(resources: Resources, counts: TaskCounts, store_machine: Ints) -> str:
    """Why nothing fits, in one line: a machine that its stores overfill, a task that fits no machine, a sum that is
    short, or how much more of which resource every machine would need."""
    names = resources.names
    left = resources.behind_stores(store_machine)
    for machine, short in zip(resources.machines, left, strict=True):
        if (short < 0).any():
            lacking = int(np.argmin(short))
            return (
                f"{machine} lacks {_amount(-short[lacking])} {names[lacking]} for the parts that it serves: "
                "give it more, or other hosts some of these parts"
            )
    for kind, count in enumerate(counts.by_kind):
        if count and not (left >= resources.demand[kind]).all(axis=1).any():
            return _fits_nowhere(resources, left, kind)
    need = np.array(counts.by_kind) @ resources.demand
    have = left.sum(axis=0)
    if (short_of := np.flatnonzero(need > have)).size:
        told = [
            f"{names[r]} lack {_amount(need[r] - have[r])}: {_tasks(counts)} need {_amount(need[r])}, "
            f"{len(left)} host{'s have' if len(left) > 1 else ' has'} {_amount(have[r])} beside their parts"
            for r in short_of
        ]
        return f"{'; '.join(told)}: add hosts, give these more, or ask for less"
    return _short_on_each(resources, counts, left)


def _fits_nowhere(resources: Resources, left: Floats, kind: int) -> str:
    need = resources.demand[kind]
    short = np.maximum(need - left, 0)
    nearest = int(np.argmin((short / np.maximum(need, 1e-300)).sum(axis=1)))
    host = resources.machines[nearest]
    lacking = [
        f"{_amount(need[r])} {resources.names[r]}, {_amount(short[nearest, r])} more than {host} has left"
        for r in np.flatnonzero(short[nearest])
    ]
    return f"no host can hold a {NAMES_OF_TASKS[kind]}: it needs {' and '.join(lacking)}"


def _short_on_each(resources: Resources, counts: TaskCounts, left: Floats) -> str:
    """Sums suffice, but tasks cannot be cut: the least that every host would need more of one resource."""
    order = np.arange(len(left))

    def fits_with(resource: int, more: float) -> bool:
        wider = left.copy()
        wider[:, resource] += more
        return first_counts(wider, resources.demand, counts, order) is not None

    told = []
    for resource, name in enumerate(resources.names):
        enough = float((np.array(counts.by_kind) @ resources.demand)[resource])
        if enough > 0 and fits_with(resource, enough):
            more = _least(partial(fits_with, resource), enough)
            told.append(f"{_amount(more)} more {name}")
    if told:
        return f"{_tasks(counts)} do not fit whole: they would with {' or '.join(told)} on every host"
    return f"{_tasks(counts)} do not fit whole, whichever one of {', '.join(resources.names)} there is more of"


def _least(is_enough: Callable[[float], bool], most: float) -> float:
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _tasks(counts: TaskCounts) -> str:
    told = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in
            zip(NAMES_OF_TASKS, counts.by_kind, strict=True) if count]  # fmt: skip
    return " and ".join(told[::-1])


def _amount(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
