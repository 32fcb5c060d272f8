"""How the processes of a job find each other: over torchrun's own store, under a nonce that only this start knows.

Keys in that store outlive a restart, so nothing is read by a fixed name: every rank posts a fresh nonce, rank 0 answers
each with the job's, and a rank believes only the answer to its own. Waits poll, so that Ctrl-C is heard, and each has a
deadline whose error names the ranks that never came. Without torchrun there is a group of one and no store.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

_PREFIX = "gnnsys"
_GRACE_SECONDS = 2.0  # how much longer others wait, so that what rank 0 has to say about a deadline reaches them
_POLL_SECONDS = (0.002, 0.05)


class RendezvousError(RuntimeError):
    """The group did not come together, or one of its ranks did not come to a meeting."""


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job, as the launcher said.

    `told`: local rank, ranks on the machine, machine, number of machines; None where the launcher did not say.
    """

    rank: int
    world_size: int
    told: tuple[int, ...] | None
    address: str
    port: int
    hosts_store: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Place | None:
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
        told = tuple(_integer(env, name) for name in names) if all(name in env for name in names) else None
        port = _integer(env, "MASTER_PORT")
        return cls(rank, world_size, told, env["MASTER_ADDR"], port, hosts_store=rank == 0 and not agent)


class Group:
    """The ranks of one start of a job, and how they tell each other small things. Values are plain JSON.

    Every rank calls the same methods with the same names in the same order. `machine` numbers the torchrun agents.
    """

    def __init__(
        self,
        place: Place | None = None,
        store: dist.Store | None = None,
        nonce: str = "",
        timeout: float = 60.0,
        store_of: Callable[[], dist.Store] | None = None,
    ) -> None:
        self.rank = place.rank if place else 0
        self.world_size = place.world_size if place else 1
        self.local_rank, self.local_world_size = 0, 1
        self.machine, self.num_machines = 0, 1
        self.machine_of_rank = [0]
        self.address = place.address if place else "127.0.0.1"
        self.nonce = nonce or secrets.token_hex(16)
        self.timeout = timeout
        self._hosts_store = bool(place and place.hosts_store and store is not None)
        self._store = store
        self._store_of = store_of
        self._turns: dict[str, int] = {}

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its machine."""
        return self.local_rank == 0

    @property
    def incarnation(self) -> int:
        """A number for this start of the job, the same on every rank."""
        return int(self.nonce[:12], 16)

    @property
    def process_group_store(self) -> dist.Store | None:
        """A connection of its own for `init_process_group`, under the job's nonce; None in a group of one."""
        return None if self._store_of is None else dist.PrefixStore(f"{_PREFIX}/{self.nonce}/pg", self._store_of())

    def apart(self, name: str) -> Group:
        """The same ranks with a connection and names of their own: for a thread that meets others beside this one."""
        other = copy.copy(self)
        other.nonce, other._turns, other._hosts_store = f"{self.nonce}/{name}", {}, False
        other._store = None if self._store_of is None else self._store_of()
        return other

    def gather(self, name: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self._store is None:
            return [json.loads(json.dumps(value))]
        timeout = self.timeout if timeout is None else timeout
        key = self._turn(name)
        self._call(lambda store: store.set(f"{key}/{self.rank}", json.dumps(value)))
        ranks = [f"{key}/{rank}" for rank in range(self.world_size)]
        if self.rank == 0:
            if not self._wait(ranks, timeout):
                message = self._absent(name, ranks, timeout)
                self._set(f"{key}/all", {"error": message})
                raise RendezvousError(message)
            values = [json.loads(text) for text in self._call(lambda store: store.multi_get(ranks))]
            self._set(f"{key}/all", {"values": values})
            self._clear(name)
            return values
        if not self._wait([f"{key}/all"], timeout + _GRACE_SECONDS):
            raise RendezvousError(self._absent(name, ranks, timeout))
        answer = self._get(f"{key}/all")
        if "error" in answer:
            raise RendezvousError(answer["error"])
        return list(answer["values"])

    def share(self, name: str, value: Any = None, root: int = 0, timeout: float | None = None) -> Any:
        """What `root` gave, on every rank."""
        if self._store is None:
            return json.loads(json.dumps(value))
        timeout = self.timeout if timeout is None else timeout
        key = self._turn(name)
        if self.rank == root:
            self._set(key, value)
        elif not self._wait([key], timeout):
            raise RendezvousError(f"rank {root} did not arrive at {name!r} within {timeout:g} s")
        return self._get(key)

    def share_secret(self, name: str, value: Any = None, root: int = 0, timeout: float | None = None) -> Any:
        """The same as `share`; it is deleted from the store once every rank has it, or one does not come for it."""
        key = f"{_PREFIX}/{self.nonce}/{name}/{self._turns.get(name, -1) + 1}"
        try:
            shared = self.share(name, value, root, timeout)
            self.barrier(f"{name} taken", timeout)
        finally:
            if self._store is not None and self.rank == root:
                with contextlib.suppress(RuntimeError, OSError):  # it went with the store
                    self._store.delete_key(key)
        return shared

    def barrier(self, name: str = "barrier", timeout: float | None = None) -> None:
        """Returns when every rank has called it."""
        self.gather(name, None, timeout)

    def agree(self, name: str, error: BaseException | str | None, timeout: float | None = None) -> None:
        """Where a rank has something to complain of, every rank raises the same ValueError, in words of the first."""
        texts = self.gather(name, None if error is None else str(error) or type(error).__name__, timeout)
        complaints = {rank: text for rank, text in enumerate(texts) if text is not None}
        if complaints:
            first = next(iter(complaints.values()))
            more = sum(text != first for text in complaints.values())
            cause = error if isinstance(error, BaseException) else None
            raise ValueError(f"{first} (and {more} other ranks failed otherwise)" if more else first) from cause

    def leave(self) -> None:
        """Says that this rank needs nobody any more. Others see it in `left`."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, OSError):  # whoever held the store is gone: nobody is left to tell
                self._store.set(f"{_PREFIX}/{self.nonce}/left/{self.rank}", "")

    def left(self) -> list[int]:
        """The ranks that have left; all of them where the store is gone with whoever held it."""
        ranks = list(range(self.world_size))
        if self._store is None:
            return ranks
        try:
            keys = {rank: f"{_PREFIX}/{self.nonce}/left/{rank}" for rank in ranks}
            return (
                ranks if self._store.check(list(keys.values())) else [r for r in ranks if self._store.check([keys[r]])]
            )
        except (RuntimeError, OSError):
            return ranks

    def all_left(self, timeout: float = 0.0) -> bool:
        """Whether every rank has left, waiting up to `timeout` for it."""
        return _poll(lambda: len(self.left()) == self.world_size, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Leaves. Whoever holds the store waits a little for the others, which still may read from it. Idempotent."""
        self.leave()
        if self._hosts_store:
            self.all_left(timeout)
        self._store = self._store_of = None

    # -- the store -----------------------------------------------------------------------------------------------------

    def _turn(self, name: str) -> str:
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        return f"{_PREFIX}/{self.nonce}/{name}/{turn}"

    def _clear(self, name: str) -> None:
        """Removes the meeting before this one from the store: who came to this one has read all of that."""
        if self._turns[name] == 0:
            return
        before = f"{_PREFIX}/{self.nonce}/{name}/{self._turns[name] - 1}"
        for key in [f"{before}/all", *(f"{before}/{rank}" for rank in range(self.world_size))]:
            self._call(partial(_delete, key=key))

    def _call(self, act: Callable[[dist.Store], Any]) -> Any:
        if self._store is None:
            raise RendezvousError("the group is closed")
        try:
            return act(self._store)
        except (RuntimeError, OSError) as error:
            where = f"rank {self.rank} lost torchrun's store at {self.address}"
            raise RendezvousError(f"{where}: the process that holds it has ended ({_first_line(error)})") from error

    def _set(self, key: str, value: Any) -> None:
        self._call(lambda store: store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:
        return json.loads(self._call(lambda store: store.get(key)))

    def _wait(self, keys: Sequence[str], timeout: float) -> bool:
        return _poll(lambda: self._call(lambda store: store.check(list(keys))), timeout)

    def _absent(self, name: str, keys: Sequence[str], timeout: float) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._wait([key], 0)]
        return absence(missing or [0], f"at {name!r}", timeout)


def join(timeout: float = 300.0, environment: Mapping[str, str] | None = None, version: str | None = None) -> Group:
    """The group this process was launched into; alone, a group of one. All ranks must have one `version` of gnnsys."""
    place = Place.from_environment(environment)
    if place is None or place.world_size == 1:
        return Group(place, timeout=timeout)
    version = _version() if version is None else version
    store = _connect(place, timeout)
    answer = _receive(store, place, version, timeout) if place.rank else _answer_all(store, place, version, timeout)
    group = Group(place, store, answer, timeout, lambda: _connect(place, timeout))
    _place_on_machines(group, place)
    return group


def absence(ranks: Sequence[int], where: str, timeout: float) -> str:
    """One line about ranks that never came."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:16]))}"
    rest = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return (
        f"{who}{rest} did not arrive {where} within {timeout:g} s: look at the output of that process, "
        f"or give a longer timeout if it is only slow"
    )


def _connect(place: Place, timeout: float) -> dist.Store:
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
            f"({_first_line(error)}): rank 0 or its agent is not running, or MASTER_ADDR is not reachable from here"
        ) from error


def _answer_all(store: dist.Store, place: Place, version: str, timeout: float) -> str:
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
                store.set(f"{_PREFIX}/answer/{post.decode()}", nonce)
            confirmation = f"{_PREFIX}/{nonce}/joined/{post.decode()}"
            if store.check([confirmation]):
                joined[rank] = store.get(confirmation).decode()
        return len(joined) == place.world_size - 1

    complaint = ""
    if not _poll(everyone, timeout):
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
    store.set(f"{_PREFIX}/{nonce}/ready", complaint)
    if complaint:
        raise RendezvousError(complaint)
    return nonce


def _receive(store: dist.Store, place: Place, version: str, timeout: float) -> str:
    own = secrets.token_hex(16)
    store.set(_post(place.rank), own)
    answer = f"{_PREFIX}/answer/{own}"
    deadline = time.monotonic() + timeout
    if not _poll(lambda: store.check([answer]), timeout):
        raise RendezvousError(absence([0], "at the start of the job", timeout))
    nonce = store.get(answer).decode()
    store.set(f"{_PREFIX}/{nonce}/joined/{own}", version)
    if not _poll(lambda: store.check([f"{_PREFIX}/{nonce}/ready"]), deadline - time.monotonic() + _GRACE_SECONDS):
        raise RendezvousError(
            f"rank {place.rank} joined, but the others did not within {timeout:g} s, and rank 0 does not say which"
        )
    complaint = store.get(f"{_PREFIX}/{nonce}/ready").decode()
    if complaint:
        raise RendezvousError(complaint)
    return nonce


def _place_on_machines(group: Group, place: Place) -> None:
    """Which machine each rank is on: torchrun's word where it gave one, else the host the process finds itself on."""
    seen = group.gather("machines", [place.told, _host()])
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


def _poll(ready: Callable[[], bool], timeout: float) -> bool:
    """Whether it became true in time. Sleeps ever longer between looks, up to a twentieth of a second."""
    deadline = time.monotonic() + timeout
    pause, longest = _POLL_SECONDS
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True


def _delete(store: dist.Store, key: str) -> None:
    store.delete_key(key)


def _post(rank: int) -> str:
    return f"{_PREFIX}/join/{rank}"


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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
