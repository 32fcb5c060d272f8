"""The graphs that jobs of a service share: who keeps them (`GraphHolder`), and when one that nobody uses is freed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gnnsys.jobs.policies import Room, WaitingJob, memory_of

if TYPE_CHECKING:
    from gnnsys.jobs.graph_holder import GraphHolder
    from gnnsys.jobs.mps import DeviceSharing

_log = logging.getLogger(__name__)


class HeldGraphs:
    """`environment` is what workers need to find the holder, by the device that they ask for."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._holder: GraphHolder | None = None

    def start(self, sharing: DeviceSharing | None) -> None:
        from gnnsys.jobs.graph_holder import GraphHolder

        self._sharing = sharing
        environment = {} if sharing is None else sharing.environment()
        self._holder = GraphHolder(self._folder, device=self._device, environment=environment)

    def environment(self, device: str | None = None) -> dict[str, str]:
        return {} if self._holder is None else self._holder.environment(device)

    def revive(self) -> bool:
        """Whether the process that keeps graphs had ended, and another one was started: workers must begin anew."""
        if self._holder is None or self._holder.is_alive():
            return False
        _log.warning("the process that keeps graphs has ended: jobs begin again from their checkpoints")
        self._holder.close()
        self.start(self._sharing)
        return True

    def free_for(self, company: Sequence[WaitingJob], room: Room) -> None:
        """Graphs that nobody uses stay for the next job, as long as there is room beside these jobs."""
        if self._holder is None:
            return
        from gnnsys.jobs.graph_holder import GraphHolderLost

        wanted = {name for job in company for name in job.graphs}
        with contextlib.suppress(GraphHolderLost):  # `revive` sees that
            idle = [graph for graph in self._holder.graphs() if not graph.users and graph.name not in wanted]
            if idle and memory_of(company) + sum(graph.bytes for graph in idle) > room.capacity:
                self._holder.drop([graph.name for graph in idle])

    def close(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None
