"""The servers of a job as one of its processes sees them: where they listen, the key, and the client that asks them.

Every machine with ranks has one server, which its first rank starts and keeps alive. Hosts without ranks are machines
behind these (`assistants.py`). A process that is alone has none of all this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gnnsys.comm import (
    CURVE,
    LOOPBACK,
    Client,
    CommError,
    DeadlineExceeded,
    Group,
    Keys,
    Kind,
    check_can_seal,
    default_lanes,
)
from gnnsys.observe import num_usable_cores
from gnnsys.session.assistants import ASSISTANTS, Assistants, AssistedJob
from gnnsys.session.open_parts import check_alike
from gnnsys.session.server_supervisor import ServerSupervisor

_log = logging.getLogger(__name__)

_START_SECONDS = 150.0  # for all graph servers to listen
_LOOK_SECONDS = 0.2


class JobServers:
    """`client` is None where this process is alone; `address` is where other machines reach this one. `own`: the server
    of this machine, where this rank is the one that keeps it."""

    def __init__(self, group: Group, timeout: float, lost_after: float) -> None:
        self._group, self._timeout, self._lost_after = group, timeout, lost_after
        self.client: Client | None = None
        self.keys: Keys | None = None
        self.encrypts: bool | str = True
        self.address = LOOPBACK
        self.assistants: Assistants | None = None  # hosts of the job without ranks
        self.own: ServerSupervisor | None = None

    @property
    def are_needed(self) -> bool:
        return self._group.world_size > 1 or self.assistants is not None

    @property
    def assisted(self) -> AssistedJob | None:
        """What hosts without ranks are told of this session, where there are any."""
        if self.assistants is None or self.keys is None:
            return None
        return AssistedJob(lost_after=self._lost_after, encrypts=self.keys.encrypts)

    # -- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, assistants: Assistants | None) -> None:
        """Early: while a server imports torch, the ranks meet and make their process group."""
        self.assistants = assistants
        if self.are_needed and self._group.is_leader:
            self.own = ServerSupervisor()

    def order(self, threads: int, address: str, encrypts: bool | str, flow_order: str = "auto") -> None:
        """Has this machine's server listen at `address`, and makes the client once all do; every rank calls it."""
        self.encrypts = encrypts
        if not self.are_needed:
            return
        group, assistants = self._group, self.assistants
        check_alike(ASSISTANTS, group.gather("assistants", "" if assistants is None else assistants.digest))
        self.keys = self._agree_on_keys(self._agree_on_encryption())
        if assistants is not None and group.num_machines == 1:
            address = assistants.own_address()
        self.address = address
        problem, endpoint = None, None
        if self.own is not None:
            self.own.flow_order = flow_order
            try:
                endpoint = self.own.order(
                    group.machine, address, keys=self.keys, threads=threads, lost_after=self._lost_after
                )
            except (RuntimeError, OSError) as error:
                problem = f"machine {group.machine}: {error}"
        group.agree("server", problem, timeout=_START_SECONDS + self._timeout)
        served = group.gather("endpoints", [group.machine, endpoint])
        peers = {machine: found for machine, found in served if found is not None}
        if assistants is not None:
            peers |= dict(enumerate(assistants.endpoints.values(), start=group.num_machines))
        self._connect(peers)
        if flow_order != "auto" and assistants is not None and group.rank == 0:
            self._order_assistants(flow_order)

    def set_flow_order(self, order: str) -> None:
        """Has this machine's server, and of rank 0 those of hosts without ranks, send in this order from now on."""
        if self.client is None:
            return
        if self.own is not None:
            self.own.flow_order = order
            self.client.request(self._group.machine, Kind.OPEN, options={"order": order}).result()
        if self.assistants is not None and self._group.rank == 0:
            self._order_assistants(order)

    def _order_assistants(self, order: str) -> None:
        assert self.client is not None and self.assistants is not None
        first = self._group.num_machines
        for machine in range(first, first + len(self.assistants.names)):
            self.client.request(machine, Kind.OPEN, options={"order": order}).result()

    def flows(self) -> list[dict[str, Any]]:
        """What each server says of its way out."""
        return [{"machine": machine, **said["counters"]["egress"]} for machine, said in enumerate(self.status())]

    def _agree_on_encryption(self) -> bool | str:
        """`encrypts`, or CURVE on one machine that cannot seal rows, where they are in shared memory.

        ValueError on every rank if rows travel between machines and one of these cannot seal them.
        """
        problem = None if self.encrypts is not True else _why_not_sealed()
        if self._group.num_machines > 1 or self.assistants is not None:
            self._group.agree("sealing", problem)
            return self.encrypts
        problems = self._group.gather("sealing", problem)
        return self.encrypts if problems == [None] * len(problems) else CURVE

    def keys_of_own_processes(self) -> Keys:
        """For processes that this one starts on its own machine: the job's, or new ones where it is alone."""
        encrypts = CURVE if self.encrypts is True and _why_not_sealed() else self.encrypts
        return self.keys or Keys.generate(encrypts=encrypts)

    def _agree_on_keys(self, encrypts: bool | str) -> Keys:
        """Of the job. Hosts without ranks have theirs already, which are used as rank 0 is to encrypt."""
        group, assistants = self._group, self.assistants
        if assistants is None:
            # On one machine too: whoever else has an account there could connect to its loopback interface.
            made = Keys.generate(encrypts=encrypts).to_json() if group.rank == 0 else None
            return Keys.from_json(group.share_secret("key", made))
        encrypts = group.share("encrypt", encrypts)
        if not encrypts and assistants.keys.encrypts:
            raise ValueError(
                f"encrypt=False, and {assistants.names[0]}, which has no ranks, encrypts: leave encrypt away, or give "
                "every host of the plan a rank"
            )
        return replace(assistants.keys, encrypts=encrypts)

    def _connect(self, peers: dict[int, str]) -> None:
        group = self._group
        client = self.client = Client(
            peers,
            sender=group.rank,
            incarnation=group.incarnation,
            keys=self.keys,
            timeout=self._timeout,
            name=f"rank-{group.rank}",
            lost_after=self._lost_after,
            lanes=default_lanes(num_usable_cores(), group.local_world_size),
        )
        group.watch(self._silences, self._lost_after)
        if self.own is not None:
            self.own.keep(lambda why: client.lose(group.machine, why))

    def _silences(self, ranks: Sequence[int]) -> list[float]:
        """How long this machine's server has not heard of ranks; ValueError or CommError where it does not say."""
        assert self.client is not None
        asked = self.client.request(
            self._group.machine, Kind.STATUS, options={"ranks": list(ranks)}, timeout=self._lost_after / 4
        )
        return [float(seconds) for seconds in asked.result().options["silent"]]

    # -- while they serve --------------------------------------------------------------------------------------------

    def remember(self, path: str | None, parts: Sequence[int]) -> None:
        """Keeps what this machine's server has open, for the one that is started in its place."""
        if self.own is not None:
            self.own.parts = None if path is None else (path, parts)

    def status(self) -> list[dict[str, Any]]:
        """What each says of itself, with its counters."""
        if self.client is None:
            return []
        wish = {"counters": True}
        asked = [self.client.request(machine, Kind.STATUS, options=wish) for machine in sorted(self.client.peers)]
        return [pending.result().options for pending in asked]

    # -- the end -----------------------------------------------------------------------------------------------------

    def wait_for_others(self) -> None:
        """Until all ranks have closed, or nobody has asked this machine's server for anything for `timeout` seconds.
        Of the rank that keeps it."""
        if self.own is None:
            return
        assert self.client is not None
        self._group.leave()
        served, until = -1, time.monotonic() + self._timeout
        while not self.own.is_over and not self._group.all_left(_LOOK_SECONDS):
            now = served
            try:
                now = int(self.client.request(self._group.machine, Kind.STATUS, timeout=5.0).result().options["served"])
            except DeadlineExceeded:
                pass  # it is slow, or started again
            except (CommError, RuntimeError):
                return
            if now != served:
                served, until = now, time.monotonic() + self._timeout
            if time.monotonic() > until:
                _log.warning(
                    "rank %d closes while others have not: they asked nothing for %g s", self._group.rank, self._timeout
                )
                return

    def close(self) -> None:
        """Ends this machine's server, where this rank keeps it. The client is closed before."""
        if self.own is not None:
            self.own.close()


def _why_not_sealed() -> str | None:
    """Why this host cannot seal rows, with what to install; None where it can."""
    try:
        check_can_seal()
    except ValueError as error:
        return str(error)
    return None
