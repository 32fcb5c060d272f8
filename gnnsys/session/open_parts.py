"""Opening a directory of parts: who has what, who serves what, and one answer for all ranks.

Each machine's first rank looks at its own disk; every rank then decides the same from what all of them saw, so that a
part missing on one machine is the same error everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnsys.comm import Client, CommError, Group, Keys, Kind, default_lanes
from gnnsys.graph import MANIFEST
from gnnsys.observe import num_usable_cores
from gnnsys.partition import Parts, Placement, open_parts, part_folder, place_parts
from gnnsys.sampling import DistGraph, graph_tables, part_rows
from gnnsys.session.assistants import Assistants, AssistedJob
from gnnsys.session.planned_hosts import GivenPlan, find_plan, host_name, serve_by_plan
from gnnsys.store import Policy, Shard, Store

Remember = Callable[[str | None, Sequence[int]], None]
SERVE_PARTS = "GNNSYS_SERVE_PARTS"


def open_alone(path: str | os.PathLike[str], *, verify: bool, policy: Policy | None = None) -> DistGraph:
    """All parts mapped in this process. `policy` is the store's."""
    parts = open_parts(path, verify=verify)
    for part in range(parts.num_parts):
        parts.part(part)
    machine_of_part = [0] * parts.num_parts
    shard, specs = Shard(0), graph_tables(parts)
    for part in range(parts.num_parts):  # the shard is a candidate for the graph's rows too
        for name, rows in part_rows(parts, part).items():
            shard.add(specs[name], part, rows)
    store = Store(machine_of_part=machine_of_part, machine=0, client=None, local=shard, policy=policy)
    graph = DistGraph(parts, store, None, 0, machine_of_part)
    graph.placement = Placement(0, (0,), tuple(machine_of_part))
    return graph


def open_in_group(
    group: Group,
    client: Client,
    path: str | os.PathLike[str],
    *,
    verify: bool,
    timeout: float,
    remember: Remember,
    policy: Policy | None = None,
    place: str = "auto",
    given_plan: GivenPlan = None,
    assistants: Assistants | None = None,
    assisted: AssistedJob | None = None,
    samplers: int | None = None,
) -> DistGraph:
    """The parts of all machines: those of this one mapped here, the others through their servers.

    `remember` is told the directory and the parts that this machine's server is to have open. `place` is where a device
    is to find them, which all ranks say alike: else all would wait for the slowest. `given_plan`: see `find_plan`.
    `assistants`: hosts without ranks, which serve parts where a plan says so, and are told of the job (`assisted`).
    `samplers`: how many each rank starts, which all must say alike.
    """
    machine_of_part = decide(group, path, given_plan, place, assistants, client, samplers)
    if max(machine_of_part, default=0) < group.num_machines and not _has_samplers(given_plan):
        assistants = None  # nothing is asked of them
    here = [part for part, machine in enumerate(machine_of_part) if machine == group.machine]
    remember(str(Path(path).resolve()), here)
    try:
        _serve(group, client, path, here, verify=verify, timeout=timeout)
        if assistants is not None:
            job = assisted or AssistedJob()
            _assist(group, client, path, machine_of_part, assistants, job, verify=verify, timeout=timeout)
        return _map(group, client, path, machine_of_part, here, timeout, policy)
    except ValueError:
        remember(None, ())
        if group.is_leader:  # what this machine has opened is of no use without the others
            with contextlib.suppress(CommError):  # every rank raises what went wrong first
                client.request(group.machine, Kind.OPEN, options={"path": None}).result()
        if group.rank == 0 and assistants is not None:
            assistants.forget(client, group.num_machines)
        raise


def _has_samplers(given_plan: GivenPlan) -> bool:
    planned = find_plan(given_plan)
    return planned is not None and any(host.samplers for host in planned.hosts)


def _assist(
    group: Group, client: Client, path: str | os.PathLike[str], machine_of_part: list[int], assistants: Assistants,
    job: AssistedJob, *, verify: bool, timeout: float,
) -> None:  # fmt: skip
    """Has hosts without ranks open their parts and start their samplers; ValueError on every rank where one cannot."""
    found: dict[str, list[str]] = {}
    problem = None
    if group.rank == 0:
        found, problem = assistants.serve(
            client, group.num_machines, str(path), machine_of_part, verify, timeout, job.to_json()
        )
    group.agree("assisted", problem, timeout + group.timeout)
    assistants.samplers = group.share("assisting", found)


def decide(
    group: Group, path: str | os.PathLike[str], given_plan: GivenPlan, place: str = "auto",
    assistants: Assistants | None = None, client: Client | None = None, samplers: int | None = None,
) -> list[int]:  # fmt: skip
    """The machine of each part, the same on every rank: by the plan where there is one, else by the disks."""
    report = survey(path) if group.is_leader else None
    try:
        planned, problem = find_plan(given_plan), None
    except ValueError as error:
        planned, problem = None, str(error)
    text = None if planned is None else planned.line_for_ranks()
    others: list[dict[str, Any]] = []
    if assistants is not None and client is not None and planned is not None and group.rank == 0:
        others = assistants.survey(client, group.num_machines, str(path))
    told = group.gather("open", [group.machine, report, str(path), place, text, problem, host_name(), others, samplers])
    check_alike("place", [row[3] for row in told])
    check_alike("samplers", [row[8] for row in told])
    by_machine = {row[0]: row[1] for row in told if row[1] is not None}
    reports = [*(by_machine[machine] for machine in range(group.num_machines)), *told[0][7]]
    machine_of_part = plan(reports, [row[2] for row in told])
    for rank, row in enumerate(told):
        if row[5] is not None:
            raise ValueError(f"rank {rank} on {row[6]}: {row[5]}")
        if row[4] != told[0][4]:
            raise ValueError(f"the plan must be the same on all ranks: rank {rank} on {row[6]} has another than rank 0")
    if planned is None:
        return machine_of_part
    names = {row[0]: row[6] for row in told if row[1] is not None}
    hosts = [names[machine] for machine in range(group.num_machines)]
    hosts += [] if assistants is None else assistants.names
    return serve_by_plan(planned, hosts, group.machine_of_rank, reports) or machine_of_part


def _serve(
    group: Group, client: Client, path: str | os.PathLike[str], here: list[int], *, verify: bool, timeout: float
) -> None:
    """Has the server of each machine open its parts; ValueError on every rank where one cannot."""
    problem = None
    if group.is_leader:
        try:
            options = {"path": str(Path(path).resolve()), "parts": here, "verify": verify}
            client.request(group.machine, Kind.OPEN, options=options, timeout=timeout).result()
        except CommError as error:
            problem = f"machine {group.machine}: {getattr(error, 'remote_text', error)}"
    group.agree("served", problem, timeout + group.timeout)


def _map(
    group: Group,
    client: Client,
    path: str | os.PathLike[str],
    machine_of_part: list[int],
    here: list[int],
    timeout: float,
    policy: Policy | None,
) -> DistGraph:
    """Maps the parts of this machine into this process; ValueError on every rank where one cannot."""
    graph, problem = None, None
    try:
        parts = open_parts(path, verify=False)  # the machine's server has read and checked these files
        for part in here:
            parts.part(part)
        store = Store(
            machine_of_part=machine_of_part,
            machine=group.machine,
            client=client,
            rank=group.rank,
            world_size=group.world_size,
            timeout=group.timeout,
            policy=policy,
        )
        graph = DistGraph(parts, store, client, group.machine, machine_of_part)
        graph.placement = Placement(group.rank, tuple(group.machine_of_rank), tuple(machine_of_part))
    except (ValueError, OSError) as error:
        problem = f"rank {group.rank} on machine {group.machine}: {error}"
    group.agree("mapped", problem, timeout)
    assert graph is not None
    return graph


def check_alike(name: str, given: Sequence[Any]) -> None:
    """ValueError where ranks say different things."""
    if len(set(given)) > 1:
        rank = next(rank for rank, value in enumerate(given) if value != given[0])
        raise ValueError(f"{name} must be the same on all ranks: rank 0 has {given[0]!r}, rank {rank} {given[rank]!r}")


def survey(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What this machine has at `path`: a digest of the manifest and the parts with a folder there; or what is wrong."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise ValueError(f"{str(path)!r} is not a directory")
        parts = open_parts(folder, verify=False)
        manifest = (folder / MANIFEST).read_bytes()
        digest, told = hashlib.sha256(manifest).hexdigest(), told_to_serve(manifest)
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    there = [part for part in range(parts.num_parts) if (folder / part_folder(part)).is_dir()]
    have = there if told is None else [part for part in there if part in told]
    about = {"digest": digest, "crc32": zlib.crc32(manifest), "num_parts": parts.num_parts}
    return {**about, "folders": have, "on_disk": there, "path": str(folder.resolve())}


def told_to_serve(manifest: bytes) -> set[int] | None:
    """The parts that `gnnsys launch` has told this machine to serve: "0,1", or "DIGEST:0,1" for one manifest alone."""
    if (text := os.environ.get(SERVE_PARTS)) is None:
        return None
    digest, _, parts = text.rpartition(":")
    try:
        if digest and int(digest, 16) != zlib.crc32(manifest):
            return None
        return {int(part) for part in parts.split(",") if part}
    except ValueError:
        raise ValueError(f"{SERVE_PARTS} must be parts such as 0,1, got {text!r}") from None


def plan(reports: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> list[int]:
    """The machine of each part, from what every machine reported; ValueError names the machine and the file."""
    if len(set(paths)) > 1:
        rank = next(rank for rank, path in enumerate(paths) if path != paths[0])
        raise ValueError(f"the ranks open different directories: rank 0 {paths[0]!r}, rank {rank} {paths[rank]!r}")
    for machine, report in enumerate(reports):
        if "error" in report:
            raise ValueError(f"machine {machine}: {report['error']}")
    for machine, report in enumerate(reports):
        if report["digest"] != reports[0]["digest"]:
            raise ValueError(
                f"machine {machine} has other parts than machine 0: {Path(report['path']) / MANIFEST} differs from "
                f"{Path(reports[0]['path']) / MANIFEST} there; copy one directory to both"
            )
    num_parts = int(reports[0]["num_parts"])
    missing = [part for part in range(num_parts) if not any(part in report["folders"] for report in reports)]
    if missing:
        folder = Path(reports[0]["path"]) / part_folder(missing[0])
        raise ValueError(f"no machine has part {missing[0]} of {num_parts}: {folder} is missing on all of them")
    return place_parts(num_parts, [report["folders"] for report in reports])


def open_served(
    group: Group,
    path: str | os.PathLike[str],
    servers: Sequence[str],
    keys: Keys | None,
    timeout: float,
    lost_after: float,
    policy: Policy | None,
) -> tuple[DistGraph, Client]:
    """The parts that servers of `gnnsys serve` have; only the manifest is read here. The caller closes the client.

    The first server that has a part serves it; the others that have it are further candidates for its rows.
    """
    parts = open_parts(path, verify=False)
    peers = dict(enumerate(servers))
    client = Client(
        peers,
        sender=group.rank,
        incarnation=group.incarnation,
        keys=keys,
        timeout=timeout,
        name="served",
        lost_after=lost_after,
        lanes=default_lanes(num_usable_cores(), group.local_world_size),
    )
    try:
        asked = [client.request(server, Kind.STATUS) for server in peers]
        servers_of_part = _who_serves(parts, servers, [pending.result().options for pending in asked])
        machine_of_part = [having[0] for having in servers_of_part]
        store = Store(
            machine_of_part=machine_of_part,
            machine=-1,
            client=client,
            rank=group.rank,
            world_size=group.world_size,
            timeout=timeout,
            policy=policy,
        )
        graph = DistGraph(parts, store, client, -1, machine_of_part)
        for part, (_, *others) in enumerate(servers_of_part):
            for name in graph_tables(parts) if others else ():
                for server in others:
                    store.add_replica(name, part, server)
    except BaseException:
        client.close()
        raise
    graph.placement = Placement(group.rank, tuple(group.machine_of_rank), tuple(machine_of_part))
    return graph, client


def _who_serves(parts: Parts, servers: Sequence[str], told: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """For each part the servers that have it, at least one."""
    digest = hashlib.sha256((parts.path / MANIFEST).read_bytes()).hexdigest()
    for server, values in zip(servers, told, strict=True):
        if values.get("digest") != digest:
            raise ValueError(
                f"{server} serves other parts ({values.get('path')!r}) than {parts.path / MANIFEST} describes"
            )
    found = [[i for i, of in enumerate(told) if part in of["parts"]] for part in range(parts.num_parts)]
    missing = [part for part, having in enumerate(found) if not having]
    if missing:
        raise ValueError(f"no server has part {missing[0]} of {parts.num_parts}: {', '.join(servers)} do not serve it")
    return found
