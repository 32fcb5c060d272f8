"""A session: what a process has while it takes part in a job. `init` makes one, `close` leaves nothing behind.

Under torchrun the ranks meet, the first rank of each machine starts that machine's graph server, and a process group is
made where the script has none. Alone there is neither server nor rendezvous, and the same calls work.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from gnnsys.comm import (
    CURVE,
    LOOPBACK,
    Client,
    CommError,
    DeadlineExceeded,
    Group,
    Keys,
    Kind,
    LaunchInfo,
    RendezvousError,
    RequestContext,
    agree_on_address,
    default_lanes,
    default_server_threads,
    join,
    read_key,
)
from gnnsys.observe import num_usable_cores
from gnnsys.sampling import check_device, check_place
from gnnsys.session.assistants import ASSISTANTS, Assistants
from gnnsys.session.open_parts import check_alike, decide, open_alone, open_in_group, open_served
from gnnsys.session.planned_hosts import GivenPlan, find_plan, watch_of
from gnnsys.session.process_group import make_process_group
from gnnsys.session.rank_device import agree_on_devices
from gnnsys.session.server_supervisor import ServerSupervisor
from gnnsys.session.torchrun_agent import TorchrunAgent
from gnnsys.store import Policy, check_policy

if TYPE_CHECKING:
    from gnnsys.planning import LaunchPlan
    from gnnsys.sampling import DistGraph, Placed
    from gnnsys.session.sampler_processes import SamplerProcesses

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_START_SECONDS = 150.0  # for all graph servers to listen
_OPEN_SECONDS = 900.0  # to read every file of a machine's parts once
_LOOK_SECONDS = 0.2
MOST_SAMPLERS = 64  # that one rank starts


def init(
    *,
    timeout: float = 60.0,
    join_timeout: float = 300.0,
    lost_after: float = 30.0,
    server_threads: int | None = None,
    process_group: bool = True,
    backend: str | None = None,
    encrypt: bool | str = True,
    device: torch.device | str | None = None,
) -> Session:
    """Joins the job this process was launched into, or begins one of its own. Every rank calls it.

    `timeout`: seconds that a request to a server, or a meeting of the ranks, may take; `join_timeout`: that ranks may
    start apart; `lost_after`: that a server or a rank may be silent before it counts as dead (ShardLost, TrainerLost),
    which is how long a pause, a cut, or the restart of a server is ridden out. Under torchrun this process ends within
    `lost_after`, too, when the agent that launched it was killed. `server_threads`: of this machine's server, for
    requests; by default a quarter of the cores, at least two and at most eight.

    `device` is where this rank computes (`session.device`): by default the GPU with the number LOCAL_RANK, counted
    around where a machine has fewer, and the CPU where there is none. A GPU is made torch's current one, which takes
    some of its memory; with "cpu" CUDA is never asked for anything.

    A process group is made unless there is one, or `process_group` is False: `backend`, or gloo, and nccl with it where
    every rank has a GPU of its own. Servers admit only who has the job's key. What they say is encrypted: orders by
    ZeroMQ's CURVE, rows frame by frame with AES-256-GCM. With `encrypt="curve"` all of it is by CURVE, which is slower
    and needs one port only. With `encrypt=False` it travels in the clear, for networks that nobody else can read. The
    session is closed by `close()`, by `with`, or when the process exits.

    >>> with gnnsys.init() as session:
    ...     graph = gnnsys.open("parts/")
    """
    for name, seconds in (("timeout", timeout), ("join_timeout", join_timeout), ("lost_after", lost_after)):
        if not seconds > 0:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds}")
    if server_threads is None:
        server_threads = default_server_threads(num_usable_cores())
    if encrypt not in (True, False, CURVE):
        raise ValueError(f"encrypt must be True, False or {CURVE!r}, got {encrypt!r}")
    if server_threads < 1:
        raise ValueError(f"server_threads must be at least 1, got {server_threads}")
    agent = TorchrunAgent.watch(lost_after)
    try:
        group = join(join_timeout)
        group.timeout = timeout
        session = Session(group, timeout, lost_after)
    except BaseException:
        if agent is not None:
            agent.close()
        raise
    session._agent = agent
    try:
        session._assistants = Assistants.from_environment()
        session._begin_server()
        session.device = agree_on_devices(group, device)
        address = agree_on_address(group)
        session._uses_process_group = process_group
        session._made_process_group = make_process_group(
            group, process_group, backend, address, timeout, session.device
        )
        session._encrypt = encrypt
        session._order_server(server_threads, address)
    except BaseException:
        session.close(wait=False)
        raise
    _open_sessions.append(session)
    return session


def current() -> Session | None:
    """The session that this process began last and has not closed."""
    return _open_sessions[-1] if _open_sessions else None


def open(
    path: str | os.PathLike[str],
    *,
    session: Session | None = None,
    verify: bool = True,
    timeout: float = _OPEN_SECONDS,
    servers: Sequence[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
    priority: int | None = None,
    path_id: int | None = None,
    device: torch.device | str | None = None,
    place: str = "auto",
    cache: int | Literal["auto"] | None = None,
    plan: GivenPlan = None,
    samplers: int | None = None,
) -> DistGraph:
    """The graph in a directory of parts, over all machines of the session. Every rank calls it with the same arguments.

    Each machine needs the manifest and the folders of the parts it serves; where all have all, parts are served in
    equal blocks. With `verify` every file is read once and compared with its checksum; `timeout` is how many seconds a
    machine may take for it. What is wrong on one machine is the same ValueError on every rank. A process that was not
    launched by torchrun needs no `init` for it.

    `plan`: the path of a plan (`gnnsys plan`, docs/launch.md), which says by the names of hosts who serves which part;
    by default that of `gnnsys launch --plan`, and False is none at all. A plan for other parts, other hosts or another
    number of ranks is a ValueError on every rank. `samplers`: so many processes on this machine make batches for this
    rank, in the place of those that the plan has for it; 0 for none (docs/samplers_elsewhere.md).

    `servers`: endpoints of servers that `gnnsys serve` runs, which together have all parts, and `key` the file that
    holds their key; `path` then needs the manifest alone.

    `policy` chooses which of the candidates for rows serves them (`gnnsys.store.Policy`; the nearest by default).
    `priority` (smaller is served first) and `path_id` (the number of a route) are said in every request about this
    graph, unless a loader says others (`PipelineOptions`) or `gnnsys.comm.use_context` does; 0 if nobody does.

    `device`: where batches go unless a loader says otherwise, "cuda" say. A GPU then samples and reads the parts of its
    machine by itself: `place` says from where, "device" (all copied to it), "structure" (rows stay in their files,
    which it reads), "registered" (indices too) or "host" (nothing); "auto" decides by bytes, and one line tells what it
    chose (`graph.placed`). `cache`: bytes of the device's memory for rows that would come from other machines or over
    the bus, or "auto" for half of what is left when the first loader is made, which says what its batches will ask for.
    """
    session = session or current()
    if session is None:
        if LaunchInfo.from_environment() is not None:
            raise ValueError("this process was launched by torchrun: call gnnsys.init() before gnnsys.open()")
        session = init(process_group=False)
    return session.open(
        path, verify=verify, timeout=timeout, servers=servers, key=key, policy=policy, priority=priority,
        path_id=path_id, device=device, place=place, cache=cache, plan=plan, samplers=samplers,
    )  # fmt: skip


def _nothing() -> None:
    return None


class Session:
    """What `init` returns. `rank`, `world_size`, `local_rank`, `machine` and `num_machines` say which process this is.

    `device` is where it computes. `client` asks the machines' servers; it is None where this process is alone.
    """

    def __init__(self, group: Group, timeout: float, lost_after: float = 30.0) -> None:
        self.group = group
        self.timeout = timeout
        self.lost_after = lost_after
        self.device = torch.device("cpu")
        self.client: Client | None = None
        self.is_closed = False
        self._encrypt: bool | str = True
        self._agent: TorchrunAgent | None = None  # torchrun's: this process ends with it
        self._server: ServerSupervisor | None = None
        self._made_process_group = self._uses_process_group = False
        self._graphs: dict[str, DistGraph] = {}
        self._served: list[DistGraph] = []  # by servers of their own
        self._clients: list[Client] = []
        self._keys: Keys | None = None  # the job's, where it has servers
        self._address = LOOPBACK  # where other machines reach this one
        self._samplers: SamplerProcesses | None = None  # that this process has started
        self._assistants: Assistants | None = None  # hosts of the job without ranks
        self._loader_numbers = itertools.count(1)  # tell the loaders of this process apart in messages
        self.before_close: list[Callable[[bool], None]] = []  # called first, last to first, with close's `wait`
        self._lock = threading.Lock()
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    # -- where this process is ----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def local_rank(self) -> int:
        return self.group.local_rank

    @property
    def machine(self) -> int:
        return self.group.machine

    @property
    def num_machines(self) -> int:
        return self.group.num_machines

    @property
    def graphs(self) -> list[DistGraph]:
        """The graphs that were opened in this session."""
        return [*self._graphs.values(), *self._served]

    def barrier(self, timeout: float | None = None) -> None:
        """Returns when every rank has called it; the error names the ranks that did not."""
        self._check_open()
        self.group.barrier("barrier", timeout)

    # -- what it does -------------------------------------------------------------------------------------------------

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        timeout: float = _OPEN_SECONDS,
        servers: Sequence[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        policy: Policy | None = None,
        priority: int | None = None,
        path_id: int | None = None,
        device: torch.device | str | None = None,
        place: str = "auto",
        cache: int | Literal["auto"] | None = None,
        plan: GivenPlan = None,
        samplers: int | None = None,
    ) -> DistGraph:
        """See `gnnsys.open`. The same directory again is the same graph; several ranks serve one directory."""
        self._check_open()
        check_policy(policy)
        check_place(place)
        if samplers is not None and (isinstance(samplers, bool) or not 0 <= samplers <= MOST_SAMPLERS):
            raise ValueError(f"samplers must be a whole number from 0 to {MOST_SAMPLERS}, got {samplers!r}")
        if samplers and servers is not None:
            raise ValueError("samplers make batches of parts that this job serves: leave samplers or servers away")
        if not (cache is None or cache == "auto" or (isinstance(cache, int) and cache > 0)):
            raise ValueError(f"cache must be a positive number of bytes, 'auto' or None, got {cache!r}")
        is_first = servers is None and self.client is not None and str(Path(path).resolve()) not in self._graphs
        target = self._together("device", is_first, lambda: check_device(device))
        context = RequestContext(priority=priority, path=path_id)
        graph = self._open(path, verify, timeout, servers, key, policy, place, plan)
        graph.loader_numbers = self._loader_numbers
        if servers is None:
            carried_out = find_plan(plan)
            self._start_samplers(graph, samplers, carried_out)
            graph.plan_watch = graph.plan_watch or watch_of(carried_out)
        if graph.client is not None and context != RequestContext():  # opened again, it keeps what it was given
            graph.client.context = context
        if cache is not None:
            graph.cache = cache
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
        if placed is not None and self.group.is_leader:
            print(f"gnnsys: parts {graph.parts_here} for {target}: {placed}", file=sys.stderr)
        return graph

    def _start_samplers(self, graph: DistGraph, samplers: int | None, plan: LaunchPlan | None) -> None:
        """Once per graph. All ranks come here, where the plan has samplers; else each starts its own, or none."""
        is_planned = samplers is None and plan is not None and any(host.samplers for host in plan.hosts)
        if graph.samplers is not None or self._samplers is not None or not (samplers or is_planned):
            return
        from gnnsys.session.sampler_processes import SamplerProcesses, peers_of, start_own, start_planned  # and loaders

        keys = self._keys or Keys.generate(encrypts=self._encrypt)
        address = self._address if is_planned else LOOPBACK
        started = SamplerProcesses(str(graph.parts.path), self.machine, address, keys, self.lost_after)
        self._samplers = started
        if is_planned:
            assert plan is not None
            others = {} if self._assistants is None else self._assistants.samplers
            endpoints = start_planned(started, self.group, plan, others)
        else:
            endpoints = start_own(started, cast(int, samplers), self.group, self.client is not None)
        if endpoints:
            graph.samplers = peers_of(
                endpoints, graph, self.group, keys, self.timeout, self.lost_after, self._clients.append
            )

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
            self.group.agree(name, problem)
        return cast("_T", result)

    def _open(
        self, path: str | os.PathLike[str], verify: bool, timeout: float, servers: Sequence[str] | None,
        key: str | os.PathLike[str] | None, policy: Policy | None, place: str, plan: GivenPlan,
    ) -> DistGraph:  # fmt: skip
        name = str(Path(path).resolve())
        if servers is not None:
            if plan:
                raise ValueError("a plan says who serves which part, and so do servers: leave one of both away")
            keys = None if key is None else read_key(key)
            if keys is not None and keys.encrypts and self._encrypt == CURVE:
                keys = replace(keys, encrypts=CURVE)
            graph, client = open_served(self.group, path, servers, keys, self.timeout, self.lost_after, policy)
            self._clients.append(client)
            self._served.append(graph)
            return graph
        if name in self._graphs:
            if policy is not None and policy != self._graphs[name].store.policy:
                raise ValueError(f"{name!r} is open with another policy: give it to loaders (PipelineOptions)")
            return self._graphs[name]
        if self.client is None:
            if (planned := find_plan(plan)) is not None:
                decide(self.group, path, planned)
            self._graphs[name] = open_alone(path, verify=verify, policy=policy)
        elif self._graphs:
            raise ValueError(f"this session serves {next(iter(self._graphs))!r}: begin another with gnnsys.init()")
        else:
            self._graphs[name] = open_in_group(
                self.group, self.client, path, verify=verify, timeout=timeout, remember=self._remember, policy=policy,
                place=place, given_plan=plan, assistants=self._assistants,
            )  # fmt: skip
        return self._graphs[name]

    def status(self) -> list[dict[str, Any]]:
        """What each machine's server says of itself: process id, parts, requests served, requests that wait.

        `counters` has, per kind of request, messages and bytes (`kinds`) and the microseconds they were queued and
        served (`times`); refusals and errors by reason (`events`); and what clients hold against their `limits`.
        """
        self._check_open()
        if self.client is None:
            return []
        wish = {"counters": True}
        asked = [self.client.request(machine, Kind.STATUS, options=wish) for machine in sorted(self.client.peers)]
        return [pending.result().options for pending in asked]

    def close(self, wait: bool = True) -> None:
        """Ends everything that `init` and `open` began. Idempotent.

        A rank that serves others waits until all have closed, for as long as its server is asked for things and
        `timeout` seconds more; not so after an error (`wait=False`). Raises, once all is ended, what went wrong with
        the last checkpoint.
        """
        with self._lock:
            if self.is_closed or os.getpid() != self._process:  # a forked child owns none of it
                return
            self.is_closed = True
        for graph in [*self._graphs.values(), *self._served]:
            try:
                graph.end_guides()
                graph.release_device()
            except Exception as error:  # of a device that is broken, say: the rest must end all the same
                _log.warning("what a device had of %s could not be given back: %s", graph.parts.path, error)
        try:
            failed = self._say_goodbye(wait)
        except BaseException:  # Ctrl-C while a checkpoint is waited for, say
            self._end(wait=False)
            raise
        self._end(wait)
        if failed is not None:
            raise failed

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(wait=error is None)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"machine {self.machine} of {self.num_machines}"
        return f"Session(rank {self.rank} of {self.world_size}, {state})"

    def _check_open(self) -> None:
        if self.is_closed:
            raise ValueError("this session is closed: begin another with gnnsys.init()")
        if self.world_size > 1 and os.getpid() != self._process:
            raise ValueError(
                f"this session belongs to process {self._process}, from which this one was forked: what it waits for "
                "would never come here. Fork before gnnsys.init(), or start processes by spawn"
            )

    # -- beginning and end --------------------------------------------------------------------------------------------

    def _begin_server(self) -> None:
        """Early: while it imports torch, the ranks meet and make their process group."""
        if self._has_servers and self.group.is_leader:
            self._server = ServerSupervisor()

    @property
    def _has_servers(self) -> bool:
        return self.world_size > 1 or self._assistants is not None

    def _order_server(self, threads: int, address: str) -> None:
        group = self.group
        if not self._has_servers:
            return
        assistants = self._assistants
        check_alike(ASSISTANTS, group.gather("assistants", "" if assistants is None else assistants.digest))
        if assistants is not None:
            keys = assistants.keys
            address = assistants.own_address() if group.num_machines == 1 else address
        else:
            # On one machine too: whoever else has an account there could connect to its loopback interface.
            made = Keys.generate(encrypts=self._encrypt).to_json() if group.rank == 0 else None
            keys = Keys.from_json(group.share_secret("key", made))
        self._keys, self._address = keys, address
        problem, endpoints = None, None
        if self._server is not None:
            try:
                endpoints = self._server.order(
                    group.machine, address, keys=keys, threads=threads, lost_after=self.lost_after
                )
            except (RuntimeError, OSError) as error:
                problem = f"machine {group.machine}: {error}"
        group.agree("server", problem, timeout=_START_SECONDS + self.timeout)
        served = group.gather("endpoints", [group.machine, endpoints])
        peers = {machine: found for machine, found in served if found is not None}
        if assistants is not None:
            peers |= dict(enumerate(assistants.endpoints.values(), start=group.num_machines))
        self.client = Client(
            peers,
            sender=group.rank,
            incarnation=group.incarnation,
            keys=keys,
            timeout=self.timeout,
            name=f"rank-{group.rank}",
            lost_after=self.lost_after,
            lanes=default_lanes(num_usable_cores(), group.local_world_size),
        )
        self._clients.append(self.client)
        group.watch(self._silences, self.lost_after)
        if self._server is not None:
            client, machine = self.client, self.machine
            self._server.keep(lambda why: client.lose(machine, why))

    def _silences(self, ranks: Sequence[int]) -> list[float]:
        """How long this machine's server has not heard of ranks; ValueError or CommError where it does not say."""
        assert self.client is not None
        asked = self.client.request(
            self.machine, Kind.STATUS, options={"ranks": list(ranks)}, timeout=self.lost_after / 4
        )
        return [float(seconds) for seconds in asked.result().options["silent"]]

    def _say_goodbye(self, wait: bool) -> Exception | None:
        """Calls the `before_close` callbacks; returns the first error, which `close` raises at its end."""
        failed: Exception | None = None
        for callback in reversed(self.before_close):
            try:
                callback(wait)
            except Exception as error:  # raised in the end: the others still need this rank's server
                _log.error("rank %d: %s", self.rank, error)
                failed = failed or error
        return failed

    def _end(self, wait: bool) -> None:
        atexit.unregister(self._close_at_exit)
        later: list[Session] = []
        if self in _open_sessions:
            later = _open_sessions[_open_sessions.index(self) + 1 :]
            _open_sessions.remove(self)
        with contextlib.ExitStack() as ends:  # called from the last to the first, each whatever the others do
            if self._agent is not None:
                ends.callback(self._agent.close)
            ends.callback(self.group.close)
            ends.callback(self._leave_process_group, later)
            if self._server is not None:
                ends.callback(self._server.close)
            if self._samplers is not None:
                ends.callback(self._samplers.close)
            for client in self._clients:
                ends.callback(client.close)
            for graph in self.graphs:
                ends.callback(graph.store.close)
            if wait:
                for path, graph in self._graphs.items():
                    try:
                        graph.store.flush()
                    except Exception as error:  # the others still need this rank's server
                        _log.error("rank %d: a push to a table of %s was not applied: %s", self.rank, path, error)
                if self._server is not None:
                    self._wait_for_others()

    def _remember(self, path: str | None, parts: Sequence[int]) -> None:
        """Keeps what this machine's server has open, for the one that is started in its place."""
        if self._server is not None:
            self._server.parts = None if path is None else (path, parts)

    def _leave_process_group(self, later: Sequence[Session]) -> None:
        """Destroys it, or leaves it to a session that was begun after this one and uses it."""
        heir = next((session for session in later if session._uses_process_group), None)
        if self._made_process_group and heir is not None:
            heir._made_process_group = True
        elif self._made_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def _close_at_exit(self) -> None:
        """Without waiting for others if the process exits by an error."""
        try:
            self.close(wait=not hasattr(sys, "last_value"))
        except (CommError, RendezvousError) as error:
            _log.warning("rank %d: %s", self.rank, error)

    def _wait_for_others(self) -> None:
        """Until all ranks have closed, or nobody has asked this machine's server for anything for `timeout` seconds."""
        assert self._server is not None and self.client is not None
        self.group.leave()
        served, until = -1, time.monotonic() + self.timeout
        while not self._server.is_over and not self.group.all_left(_LOOK_SECONDS):
            now = served
            try:
                now = int(self.client.request(self.machine, Kind.STATUS, timeout=5.0).result().options["served"])
            except DeadlineExceeded:
                pass  # it is slow, or started again
            except (CommError, RuntimeError):
                return
            if now != served:
                served, until = now, time.monotonic() + self.timeout
            if time.monotonic() > until:
                _log.warning(
                    "rank %d closes while others have not: they asked nothing for %g s", self.rank, self.timeout
                )
                return


_open_sessions: list[Session] = []  # only for `current`; what a process has is in the sessions themselves
