"""The samplers of a job, seen from its session: who starts which, where they listen, and who asks whom.

By a plan the first rank of each host starts the samplers of that host, for ranks anywhere. By a number every rank
starts its own, here. One that ends is started again, at the same port; trainers make their own batches meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from gnnsys.comm import Client, Group, Keys, RequestContext, default_server_threads
from gnnsys.loader import SamplerPeers, graph_identity
from gnnsys.observe import num_usable_cores
from gnnsys.planning import LaunchPlan
from gnnsys.sampling import DistGraph
from gnnsys.session.planned_hosts import host_name, planned_name
from gnnsys.session.sampler_server import GraphOpening
from gnnsys.session.server_supervisor import ServerSupervisor

_log = logging.getLogger(__name__)

OF_ONE_RANK = 1 << 10  # numbers of samplers
_START_SECONDS = 150.0
SAMPLERS_REMEDY = "see what that host printed, or plan without samplers there (gnnsys plan --samplers 0)"


class SamplerProcesses:
    """The samplers that this process has started; `close` ends them."""

    def __init__(self, path: str, machine: int, address: str, keys: Keys, lost_after: float) -> None:
        self._path, self._machine, self._address, self._keys = str(Path(path).resolve()), machine, address, keys
        self._lost_after = lost_after
        self._processes: list[ServerSupervisor] = []

    def start(self, count: int, first_number: int) -> list[str]:
        """Starts so many, all at once; their endpoints. RuntimeError where one does not listen."""
        begun = [ServerSupervisor() for _ in range(count)]
        self._processes += begun
        endpoints = []
        for number, process in enumerate(begun, start=first_number):
            orders = {"path": self._path, "number": number}
            threads = default_server_threads(num_usable_cores())
            endpoints.append(
                process.order(
                    self._machine, self._address, keys=self._keys, threads=threads, lost_after=self._lost_after,
                    sampler=orders,
                )
            )  # fmt: skip
            process.keep(lambda why: _log.error("%s: trainers make their own batches", why))
        return endpoints

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends all of them. Idempotent."""
        for process in self._processes:
            process.close()


def start_own(processes: SamplerProcesses, count: int, group: Group, is_collective: bool) -> list[str]:
    """Starts samplers for this rank alone. Where all ranks do, what goes wrong on one is a ValueError on all."""
    problem, endpoints = None, list[str]()
    try:
        endpoints = processes.start(count, group.rank * OF_ONE_RANK)
    except (RuntimeError, OSError) as error:
        problem = f"rank {group.rank} on machine {group.machine}: {error}"
    if is_collective:
        group.agree("samplers", problem, _START_SECONDS + group.timeout)
    elif problem is not None:
        raise ValueError(problem)
    return endpoints


def start_planned(
    processes: SamplerProcesses, group: Group, plan: LaunchPlan, others: Mapping[str, list[str]]
) -> list[str]:
    """Has the first rank of each host start what the plan has for it; the endpoints of this rank's samplers.

    `others`: where those of hosts without ranks listen.
    """
    by_name: Mapping[str, int] = {host.name: number for number, host in enumerate(plan.hosts)}
    name = planned_name(host_name(), by_name)
    problem, endpoints = None, None
    if group.is_leader:
        first = sum(len(host.samplers) for host in plan.hosts[: by_name[name]])
        try:
            endpoints = processes.start(len(plan.hosts[by_name[name]].samplers), first)
        except (RuntimeError, OSError) as error:
            problem = f"{name}: {error}: {SAMPLERS_REMEDY}"
    group.agree("samplers", problem, _START_SECONDS + group.timeout)
    told = group.gather("sampler endpoints", [name, endpoints])
    listening = {**others, **{host: found for host, found in told if found is not None}}
    for host in plan.hosts:  # every rank knows of all, so that all say the same
        if len(found := listening.get(host.name, [])) != len(host.samplers):
            raise ValueError(
                f"{host.name}: {len(found)} of {len(host.samplers)} samplers of the plan listen: {SAMPLERS_REMEDY}"
            )
    return [listening[host][number] for host, number in plan.samplers_of(name, group.local_rank)]


def peers_of(
    endpoints: list[str], graph: DistGraph, group: Group, keys: Keys, timeout: float, lost_after: float,
    context: RequestContext, keep: Callable[[Client], None],
) -> SamplerPeers:  # fmt: skip
    """How a rank asks its samplers. `context`: priority and path of all that it asks, and of what they ask for it.
    `keep` is told the client, which the session closes."""
    served = {} if graph.client is None else graph.client.peers
    servers = tuple(served[machine] for machine in sorted(served))
    opening = GraphOpening(
        digest=graph_identity(graph), machine_of_part=tuple(graph.machine_of_part), peers=servers,
        incarnation=group.incarnation, timeout=timeout, lost_after=lost_after, priority=context.priority,
        path=context.path,
    )  # fmt: skip
    client = Client(
        dict(enumerate(endpoints)), sender=group.rank, incarnation=group.incarnation, keys=keys, timeout=timeout,
        name=f"rank-{group.rank}-samplers", lost_after=lost_after,
    )  # fmt: skip
    client.context = context
    keep(client)
    return SamplerPeers(client, tuple(range(len(endpoints))), opening.to_json(), timeout)
