"""What the processes of a service share: the device, by MPS or in time slices, and the graphs that are kept on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gnnsys.jobs.held_graphs import HeldGraphs
from gnnsys.jobs.mps import DeviceSharing, check_sharing, start_sharing
from gnnsys.jobs.policies import Room, WaitingJob

_log = logging.getLogger(__name__)
_DAEMON_SECONDS, _MOST_MISSES = 5.0, 3


class SharedDevice:
    """`wanted` is how the device is shared, None where that is left to who started this process (`start_sharing`)."""

    def __init__(self, folder: Path, device: str, room: Room, wanted: str | None, shares_graphs: bool) -> None:
        self._folder, self._room = folder, room
        self._index = int(device.partition(":")[2] or 0)
        if wanted is not None:
            check_sharing(wanted)
        self._wanted = wanted if device != "cpu" else None
        self._shares_graphs = shares_graphs
        self._graphs = HeldGraphs(folder, device)
        self._sharing: DeviceSharing | None = None
        self._is_lost = False
        self._asked_at, self._misses = 0.0, 0

    def start(self) -> None:
        if self._wanted is not None:
            self._sharing = start_sharing(self._folder, self._wanted)
            _log.info("%s", self._sharing.said)
        self._start_graphs()

    def close(self) -> None:
        self._graphs.close()
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None

    @property
    def has_mps(self) -> bool:
        return self._sharing is not None and self._sharing.mps is not None

    def worker_environment(self) -> dict[str, str]:
        return {**self._share(self._room.capacity), **self._graphs.environment()}

    def script_environment(self, memory: int) -> dict[str, str]:
        return {**self._share(memory), **self._graphs.environment()}

    def estimator_environment(self) -> dict[str, str]:
        """No GPU is touched there."""
        return self._graphs.environment("cpu")

    def error_seen(self) -> None:
        """A job has told of an error of the device: under MPS that has taken all jobs along."""
        self._is_lost |= self.has_mps

    def revive(self, end_users: Callable[[], None]) -> bool:
        """Where the process that keeps graphs, or the daemon of MPS, has ended: ends all who used it, and starts
        another. Whether that was so: who begins now needs another environment."""
        if self._sharing is not None and (self._is_lost or self._is_daemon_gone()):
            _log.warning("an error of the device has taken all jobs along: they begin again from their checkpoints")
            self._is_lost = False
            end_users()
            self._graphs.close()
            self._sharing.restart()
            self._start_graphs()
            return True
        if self._graphs.revive():
            end_users()
            return True
        return False

    def free_for(self, company: Sequence[WaitingJob]) -> None:
        """Graphs that nobody uses stay for the next job, as long as there is room beside these jobs."""
        self._graphs.free_for(company, self._room)

    def let_go(self, pid: int) -> None:
        """Before a client of MPS is killed: a signal in the midst of a kernel could harm the others."""
        if self._sharing is not None:
            self._sharing.terminate_client(pid)

    def _start_graphs(self) -> None:
        if self._shares_graphs:
            self._graphs.start(self._sharing)

    def _share(self, memory: int) -> dict[str, str]:
        return {} if self._sharing is None else self._sharing.environment(memory, self._index)

    def _is_daemon_gone(self) -> bool:
        """Asked now and then: a program is started for it. One answer that does not come means little."""
        now = time.monotonic()
        if self._sharing is None or now < self._asked_at:
            return False
        self._asked_at = now + _DAEMON_SECONDS
        self._misses = 0 if self._sharing.is_alive() else self._misses + 1
        return self._misses >= _MOST_MISSES
