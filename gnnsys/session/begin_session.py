"""How a script begins: `gnnsys.init` joins the job that this process was launched into, `gnnsys.open` opens a graph.

Under torchrun the ranks meet, the first rank of each machine starts that machine's graph server, and a process group is
made where the script has none. Alone there is neither server nor rendezvous, and the same calls work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from gnnsys.comm import CURVE, LaunchInfo, agree_on_address, check_order, default_server_threads, join
from gnnsys.observe import num_usable_cores
from gnnsys.session.assistants import Assistants
from gnnsys.session.open_graphs import OPEN_SECONDS
from gnnsys.session.paced_links import GivenPace
from gnnsys.session.planned_hosts import GivenPlan
from gnnsys.session.process_group import make_process_group
from gnnsys.session.rank_device import agree_on_devices
from gnnsys.session.session import Session, current
from gnnsys.session.torchrun_agent import TorchrunAgent
from gnnsys.store import Policy

if TYPE_CHECKING:
    from gnnsys.sampling import DistGraph


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
    order: str = "auto",
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

    `order`: which replies servers send first (docs/order.md). "auto": what a rank waits for, then what it will need,
    then what nobody waits for. "fair": ranks in turns. "fifo": as requests came.

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
    check_order(order)
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
        session._servers.begin(Assistants.from_environment())
        devices = agree_on_devices(group, device)
        session._use_device(devices.own, devices.num_sharing(group.rank))
        address = agree_on_address(group)
        session._uses_process_group = process_group
        session._made_process_group = make_process_group(
            group, process_group, backend, address, timeout, devices.places
        )
        session._servers.order(server_threads, address, encrypt, order)
    except BaseException:
        session.close(wait=False)
        raise
    session._make_current()
    return session


def open(
    path: str | os.PathLike[str],
    *,
    session: Session | None = None,
    verify: bool = True,
    timeout: float = OPEN_SECONDS,
    servers: Sequence[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
    priority: int | str | None = None,
    path_id: int | None = None,
    device: torch.device | str | None = None,
    place: str = "auto",
    cache: int | Literal["auto"] | None = None,
    plan: GivenPlan = None,
    samplers: int | None = None,
    pace: GivenPace = None,
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

    `pace`: has servers send rows and structure at the rate that is fair to all flows of both links (docs/pacing.md):
    the rate of this host's link, "10gbit", or True for what the plan says of it. By default TCP decides.

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
        path_id=path_id, device=device, place=place, cache=cache, plan=plan, samplers=samplers, pace=pace,
    )  # fmt: skip
