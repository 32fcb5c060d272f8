"""A session: what a process has while it takes part in a job. `gnnsys.init` makes one, `close` leaves nothing behind.

Its servers are in `job_servers.py`, its graphs in `open_graphs.py`; here is which process it is, and how it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from gnnsys.comm import Client, CommError, Group, RendezvousError, check_order
from gnnsys.session.job_servers import JobServers
from gnnsys.session.open_graphs import OPEN_SECONDS, OpenGraphs, OpenOptions
from gnnsys.session.paced_links import GivenPace
from gnnsys.session.planned_hosts import GivenPlan
from gnnsys.session.torchrun_agent import TorchrunAgent
from gnnsys.store import Policy, shared_by_ranks

if TYPE_CHECKING:
    from gnnsys.sampling import DistGraph

_log = logging.getLogger(__name__)


def current() -> Session | None:
    """The session that this process began last and has not closed."""
    return _open_sessions[-1] if _open_sessions else None


class Session:
    """What `init` returns. `rank`, `world_size`, `local_rank`, `machine` and `num_machines` say which process this is.

    `device` is where it computes. `client` asks the machines' servers; it is None where this process is alone.
    """

    def __init__(self, group: Group, timeout: float, lost_after: float = 30.0) -> None:
        self.group = group
        self.timeout = timeout
        self.lost_after = lost_after
        self.device = torch.device("cpu")
        self.is_closed = False
        self._agent: TorchrunAgent | None = None  # torchrun's: this process ends with it
        self._made_process_group = self._uses_process_group = False
        self._servers = JobServers(group, timeout, lost_after)
        self._graphs = OpenGraphs(group, self._servers, timeout, lost_after)
        self._memory = contextlib.ExitStack()  # what budgets of memory are told for as long as it is open
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
        return self._graphs.all

    @property
    def client(self) -> Client | None:
        return self._servers.client

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
        """See `gnnsys.open`. The same directory again is the same graph; several ranks serve one directory."""
        self._check_open()
        options = OpenOptions(
            verify=verify, timeout=timeout, servers=servers, key=key, policy=policy, priority=priority, path_id=path_id,
            device=device, place=place, cache=cache, plan=plan, samplers=samplers, pace=pace,
        )  # fmt: skip
        return self._graphs.open(path, options)

    def pace(self, rate: GivenPace) -> None:
        """Has servers send at a rate from now on, or not (False): see `gnnsys.open`. True is for `open` alone.

        A rank that leads its machine tells the machine's server. Ranks need not call it together.
        """
        self._check_open()
        self._graphs.pace(rate)

    def order(self, order: str) -> None:
        """Has servers send replies in another order from now on: see `gnnsys.init`.

        A rank that leads its machine tells the machine's server. Ranks need not call it together.
        """
        self._check_open()
        check_order(order)
        self._servers.set_flow_order(order)

    def flows(self) -> list[dict[str, Any]]:
        """What each machine's server has sent, by class: "waited" (a rank waits for it), "ahead", "background".

        `classes` has replies, bytes, and `held_us`, the microseconds that jobs were held back. `ahead` are bytes that
        are handed to the network and not sent yet, `window` how many these may be, `waiting` how many jobs wait.
        """
        self._check_open()
        return self._servers.flows()

    def status(self) -> list[dict[str, Any]]:
        """What each machine's server says of itself: process id, parts, requests served, requests that wait.

        `counters` has, per kind of request, messages and bytes (`kinds`) and the microseconds they were queued and
        served (`times`); refusals and errors by reason (`events`); and what clients hold against their `limits`.
        """
        self._check_open()
        return self._servers.status()

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
        for graph in self.graphs:
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

    def _use_device(self, device: torch.device, num_ranks: int) -> None:
        """`num_ranks` of the job compute on it, this one among them."""
        self.device = device
        if device.type == "cuda":
            self._memory.enter_context(shared_by_ranks(device, num_ranks))

    def _make_current(self) -> None:
        _open_sessions.append(self)

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
            ends.callback(self._memory.close)
            if self._agent is not None:
                ends.callback(self._agent.close)
            ends.callback(self.group.close)
            ends.callback(self._leave_process_group, later)
            ends.callback(self._servers.close)
            if self._graphs.samplers is not None:
                ends.callback(self._graphs.samplers.close)
            for client in [*([] if self.client is None else [self.client]), *self._graphs.clients]:
                ends.callback(client.close)
            for graph in self.graphs:
                ends.callback(graph.store.close)
            if wait:
                for path, graph in self._graphs.by_path.items():
                    try:
                        graph.store.flush()
                    except Exception as error:  # the others still need this rank's server
                        _log.error("rank %d: a push to a table of %s was not applied: %s", self.rank, path, error)
                self._servers.wait_for_others()

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


_open_sessions: list[Session] = []  # only for `current`; what a process has is in the sessions themselves
