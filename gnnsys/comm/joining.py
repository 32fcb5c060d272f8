"""Joining a job: every rank posts a fresh nonce in torchrun's store, rank 0 answers each with the job's own.

Keys in that store outlive a restart, so nothing is read by a fixed name: a rank believes only the answer to its own
post. Without torchrun there is a group of one and no store.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from gnnsys.comm.rendezvous import GRACE_SECONDS, PREFIX, Group, RendezvousError, absence, first_line, poll


@dataclass(frozen=True)
class LaunchInfo:
    """Which process of the job this is, as the launcher's environment variables say.

    `on_machine`: local rank, ranks on the machine, machine, number of machines; None where they are not set.
    """

    rank: int
    world_size: int
    on_machine: tuple[int, ...] | None
    address: str
    port: int
    hosts_store: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> LaunchInfo | None:
        """None where nothing launched this process; ValueError where the variables make no sense together."""
        env = os.environ if environment is None else environment
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return None
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise ValueError(f"{missing[0]} is not set, though others of its kind are: launch with torchrun")
        rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK must be in [0, WORLD_SIZE), got {rank} of {world_size}")
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        on_machine = tuple(_integer(env, name) for name in names) if all(name in env for name in names) else None
        port = _integer(env, "MASTER_PORT")
        return cls(rank, world_size, on_machine, env["MASTER_ADDR"], port, hosts_store=rank == 0 and not agent)


def join(timeout: float = 300.0, environment: Mapping[str, str] | None = None, version: str | None = None) -> Group:
    """The group this process was launched into; alone, a group of one. All ranks must have one `version` of gnnsys."""
    place = LaunchInfo.from_environment(environment)
    if place is None or place.world_size == 1:
        return Group(place, timeout=timeout)
    version = _version() if version is None else version
    store = _connect(place, timeout)
    answer = _receive(store, place, version, timeout) if place.rank else _answer_all(store, place, version, timeout)
    group = Group(place, store, answer, timeout, lambda: _connect(place, timeout))
    _place_on_machines(group, place)
    return group


def _connect(place: LaunchInfo, timeout: float) -> dist.Store:
    wait = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(
            place.address,
            place.port,
            is_master=place.hosts_store,
            timeout=wait,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, OSError) as error:
        raise RendezvousError(
            f"rank {place.rank} cannot reach torchrun's store at {place.address}:{place.port} within {timeout:g} s "
            f"({first_line(error)}): rank 0 or its agent is not running, or MASTER_ADDR is not reachable from here"
        ) from error


def _answer_all(store: dist.Store, place: LaunchInfo, version: str, timeout: float) -> str:
    """Rank 0: answers every post, old ones too, until each rank has confirmed the post that is there now."""
    nonce = secrets.token_hex(16)
    answered: set[bytes] = set()
    joined: dict[int, str] = {}

    def everyone() -> bool:
        for rank in range(1, place.world_size):
            if rank in joined or not store.check([_post(rank)]):
                continue
            post = store.get(_post(rank))
            if post not in answered:
                answered.add(post)
                store.set(f"{PREFIX}/answer/{post.decode()}", nonce)
            confirmation = f"{PREFIX}/{nonce}/joined/{post.decode()}"
            if store.check([confirmation]):
                joined[rank] = store.get(confirmation).decode()
        return len(joined) == place.world_size - 1

    complaint = ""
    if not poll(everyone, timeout):
        missing = [rank for rank in range(1, place.world_size) if rank not in joined]
        complaint = absence(missing, "at the start of the job", timeout)
    else:
        others = {rank: text for rank, text in joined.items() if text != version}
        if others:
            rank, text = min(others.items())
            complaint = (
                f"the ranks run different versions of gnnsys: rank 0 has {version}, rank {rank} has {text}; "
                f"install the same on every machine"
            )
    store.set(f"{PREFIX}/{nonce}/ready", complaint)
    if complaint:
        raise RendezvousError(complaint)
    return nonce


def _receive(store: dist.Store, place: LaunchInfo, version: str, timeout: float) -> str:
    own = secrets.token_hex(16)
    store.set(_post(place.rank), own)
    answer = f"{PREFIX}/answer/{own}"
    deadline = time.monotonic() + timeout
    if not poll(lambda: store.check([answer]), timeout):
        raise RendezvousError(absence([0], "at the start of the job", timeout))
    nonce = store.get(answer).decode()
    store.set(f"{PREFIX}/{nonce}/joined/{own}", version)
    if not poll(lambda: store.check([f"{PREFIX}/{nonce}/ready"]), deadline - time.monotonic() + GRACE_SECONDS):
        raise RendezvousError(
            f"rank {place.rank} joined, but the others did not within {timeout:g} s, and rank 0 does not say which"
        )
    complaint = store.get(f"{PREFIX}/{nonce}/ready").decode()
    if complaint:
        raise RendezvousError(complaint)
    return nonce


def _place_on_machines(group: Group, place: LaunchInfo) -> None:
    """Finds which machine each rank is on: as torchrun says, else by the host that each process runs on."""
    seen = group.gather("machines", [place.on_machine, _host()])
    if all(entry[0] is not None for entry in seen):
        group.local_rank, group.local_world_size, group.machine, group.num_machines = seen[group.rank][0]
        group.machine_of_rank = [entry[0][2] for entry in seen]
        return
    hosts = [entry[1] for entry in seen]
    order = list(dict.fromkeys(hosts))
    group.machine_of_rank = [order.index(host) for host in hosts]
    group.machine, group.num_machines = group.machine_of_rank[group.rank], len(order)
    group.local_rank = hosts[: group.rank].count(hosts[group.rank])
    group.local_world_size = hosts.count(hosts[group.rank])


def _post(rank: int) -> str:
    return f"{PREFIX}/join/{rank}"


def _host() -> str:
    """The same text in two processes exactly where they share a host (a container counts as one)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = os.stat("/proc/self/ns/net").st_ino if Path("/proc/self/ns/net").exists() else 0
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}/{namespace}"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gnnsys")
    except PackageNotFoundError:
        return "unknown"


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {env[name]!r}") from None
