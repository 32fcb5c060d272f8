"""The graphs of a session: opened once each, with their device, their samplers, and clients of their own."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import torch

from gnnsys.comm import CURVE, LOOPBACK, Client, Group, Kind, RequestContext, read_key, user_priority
from gnnsys.ops import check_device
from gnnsys.sampling import check_place
from gnnsys.session.job_servers import JobServers
from gnnsys.session.open_parts import decide, open_alone, open_in_group, open_served
from gnnsys.session.paced_links import GivenPace, PacedLink, assisting_links, paced_link
from gnnsys.session.planned_hosts import GivenPlan, find_plan, host_name, watch_of
from gnnsys.store import Policy, check_policy

if TYPE_CHECKING:
    from gnnsys.planning import LaunchPlan
    from gnnsys.sampling import DistGraph, Placed
    from gnnsys.session.sampler_processes import SamplerProcesses

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

OPEN_SECONDS = 900.0  # to read every file of a machine's parts once
MOST_SAMPLERS = 64  # that one rank starts
_NO_LIMIT = 1000.0  # times another rate


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """What `gnnsys.open` was given, which says what each of them is."""

    verify: bool = True
    timeout: float = OPEN_SECONDS
    servers: Sequence[str] | None = None
    key: str | os.PathLike[str] | None = None
    policy: Policy | None = None
    priority: int | str | None = None
    path_id: int | None = None
    device: torch.device | str | None = None
    place: str = "auto"
    cache: int | Literal["auto"] | None = None
    plan: GivenPlan = None
    samplers: int | None = None
    pace: GivenPace = None

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_place(self.place)
        samplers, cache = self.samplers, self.cache
        if samplers is not None and (isinstance(samplers, bool) or not 0 <= samplers <= MOST_SAMPLERS):
            raise ValueError(f"samplers must be a whole number from 0 to {MOST_SAMPLERS}, got {samplers!r}")
        if samplers and self.servers is not None:
            raise ValueError("samplers make batches of parts that this job serves: leave samplers or servers away")
        if not (cache is None or cache == "auto" or (isinstance(cache, int) and cache > 0)):
            raise ValueError(f"cache must be a positive number of bytes, 'auto' or None, got {cache!r}")

    @property
    def context(self) -> RequestContext:
        return RequestContext(priority=user_priority(self.priority), path=self.path_id)


class OpenGraphs:
    """`by_path`: graphs of the job's own servers; `served`: those of other servers. `clients`: beside that of the job's
    servers. `samplers`: those that this process has started."""

    def __init__(self, group: Group, servers: JobServers, timeout: float, lost_after: float) -> None:
        self._group, self._servers, self._timeout, self._lost_after = group, servers, timeout, lost_after
        self.by_path: dict[str, DistGraph] = {}
        self.served: list[DistGraph] = []
        self.clients: list[Client] = []
        self.samplers: SamplerProcesses | None = None
        self._loader_numbers = itertools.count(1)  # tell the loaders of this process apart in messages

    @property
    def all(self) -> list[DistGraph]:
        return [*self.by_path.values(), *self.served]

    def open(self, path: str | os.PathLike[str], options: OpenOptions) -> DistGraph:
        """See `gnnsys.open`. The same directory again is the same graph."""
        is_own = options.servers is None
        is_first = is_own and self._servers.client is not None and str(Path(path).resolve()) not in self.by_path
        target = self._together("device", is_first, lambda: check_device(options.device))
        link = self._together("pace", is_first, lambda: paced_link(options.pace, _rates_of(options), host_name()))
        context = options.context
        graph = self._open_own(path, options) if is_own else self._open_served(path, options)
        graph.loader_numbers = self._loader_numbers
        if options.pace is not None:
            self._pace(graph, link, _rates_of(options))
        if is_own:
            carried_out = find_plan(options.plan)
            self._start_samplers(graph, options.samplers, carried_out, context)
            graph.plan_watch = graph.plan_watch or watch_of(carried_out)
        if graph.client is not None and context != RequestContext():  # opened again, it keeps what it was given
            graph.client.context = context
        if options.cache is not None:
            graph.cache = options.cache
        self._place(graph, path, options.place, target, is_first)
        return graph

    def pace(self, rate: GivenPace) -> None:
        """See `Session.pace`."""
        if rate is True:
            raise ValueError('pace(True) needs a plan: write gnnsys.open(..., plan=..., pace=True), or pace("10gbit")')
        link = paced_link(rate, None, host_name())
        for graph in self.all:
            self._pace(graph, link, None)

    def _pace(self, graph: DistGraph, link: PacedLink, planned: LaunchPlan | None) -> None:
        client, group, servers = graph.client, self._group, self._servers
        if client is None:
            return
        own = [] if client is not servers.client else [group.machine]  # over the loopback interface
        share = None if link.rate_in is None else link.rate_in / group.local_world_size
        if share is None and link.rate_out is not None:
            share = link.rate_out * _NO_LIMIT  # the other half of the rate is all there is
        client.set_rate_in(share, without=own)
        if client is not servers.client:
            return
        if servers.own is not None:
            servers.own.rate_out = link.rate_out
            client.request(group.machine, Kind.OPEN, options={"rate_out": link.rate_out}).result()
        if group.rank == 0 and servers.assistants is not None:
            for number, each in enumerate(assisting_links(planned, servers.assistants.names)):
                machine = group.num_machines + number
                client.request(machine, Kind.OPEN, options={"rate_out": each.rate_out}).result()

    def _open_served(self, path: str | os.PathLike[str], options: OpenOptions) -> DistGraph:
        if options.plan:
            raise ValueError("a plan says who serves which part, and so do servers: leave one of both away")
        keys = None if options.key is None else read_key(options.key)
        if keys is not None and keys.encrypts and self._servers.encrypts == CURVE:
            keys = replace(keys, encrypts=CURVE)
        servers = cast("Sequence[str]", options.servers)
        graph, client = open_served(
            self._group, path, servers, keys, self._timeout, self._lost_after, options.policy
        )  # fmt: skip
        self.clients.append(client)
        self.served.append(graph)
        return graph

    def _open_own(self, path: str | os.PathLike[str], options: OpenOptions) -> DistGraph:
        name, servers = str(Path(path).resolve()), self._servers
        if name in self.by_path:
            if options.policy is not None and options.policy != self.by_path[name].store.policy:
                raise ValueError(f"{name!r} is open with another policy: give it to loaders (PipelineOptions)")
            return self.by_path[name]
        if servers.client is None:
            if (planned := find_plan(options.plan)) is not None:
                decide(self._group, path, planned)
            self.by_path[name] = open_alone(path, verify=options.verify, policy=options.policy)
        elif self.by_path:
            raise ValueError(f"this session serves {next(iter(self.by_path))!r}: begin another with gnnsys.init()")
        else:
            self.by_path[name] = open_in_group(
                self._group, servers.client, path, verify=options.verify, timeout=options.timeout,
                remember=servers.remember, policy=options.policy, place=options.place, given_plan=options.plan,
                assistants=servers.assistants, assisted=servers.assisted, samplers=options.samplers,
            )  # fmt: skip
        if self._group.rank == 0:
            for where, text in self.by_path[name].parts.unfit_rows.items():
                _log.warning("%s: %s: of its rows %s. A model that reads them computes NaN", path, where, text)
        return self.by_path[name]

    def _start_samplers(
        self, graph: DistGraph, samplers: int | None, plan: LaunchPlan | None, context: RequestContext
    ) -> None:
        """Once per graph. All ranks come here, where the plan has samplers; else each starts its own, or none."""
        is_planned = samplers is None and plan is not None and any(host.samplers for host in plan.hosts)
        if graph.samplers is not None or self.samplers is not None or not (samplers or is_planned):
            return
        from gnnsys.session.sampler_processes import SamplerProcesses, peers_of, start_own, start_planned  # and loaders

        group, servers = self._group, self._servers
        keys = servers.keys_of_own_processes()
        address = servers.address if is_planned else LOOPBACK
        started = SamplerProcesses(str(graph.parts.path), group.machine, address, keys, self._lost_after)
        self.samplers = started
        try:
            if is_planned:
                assert plan is not None
                others = {} if servers.assistants is None else servers.assistants.samplers
                endpoints = start_planned(started, group, plan, others)
            else:
                endpoints = start_own(started, cast(int, samplers), group, servers.client is not None)
        except BaseException:  # on every rank: who opens the graph again tries again
            started.close()
            self.samplers = None
            raise
        if endpoints:
            graph.samplers = peers_of(
                endpoints, graph, group, keys, self._timeout, self._lost_after, context, self.clients.append
            )

    def _place(
        self, graph: DistGraph, path: str | os.PathLike[str], place: str, target: torch.device | None, is_first: bool
    ) -> None:
        """Has a device that computes find the parts of its machine, and tells where."""
        if graph.placed is None:
            graph.place = place
        elif place not in ("auto", graph.place):
            raise ValueError(f"{path} was placed before, {graph.placed}: it cannot be had at place={place!r} as well")
        if target is not None:
            graph.device = target
        place_it: Callable[[], Placed | None] = _nothing
        if target is not None and target.type == "cuda":
            place_it = partial(graph.place_on, target)
        placed = self._together("placed", is_first, place_it)
        if placed is not None and self._group.is_leader:
            print(f"gnnsys: parts {graph.parts_here} for {target}: {placed}", file=sys.stderr)

    def _together(self, name: str, is_collective: bool, call: Callable[[], _T]) -> _T:
        """What `call` returns. Where all ranks call it, a ValueError on one of them is one on all."""
        result: _T | None = None
        problem: ValueError | None = None
        try:
            result = call()
        except ValueError as error:
            if not is_collective:
                raise
            problem = error
        if is_collective:
            self._group.agree(name, problem)
        return cast("_T", result)


def _rates_of(options: OpenOptions) -> LaunchPlan | None:
    """The plan that says how fast links are, where it is asked for that."""
    return find_plan(options.plan) if options.pace is True else None


def _nothing() -> None:
    return None
