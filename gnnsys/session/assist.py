"""What a host that runs no rank does (`gnnsys assist`): serves its parts, and runs its samplers once parts are open."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from gnnsys.comm import default_server_threads, endpoint, resolve
from gnnsys.observe import num_usable_cores
from gnnsys.planning import LaunchPlan
from gnnsys.session.assistants import ASSISTANTS, Assistants, AssistedJob
from gnnsys.session.graph_server import GraphServer, wait_for_end
from gnnsys.session.planned_hosts import PLAN, find_plan, host_name, planned_name
from gnnsys.session.sampler_processes import SAMPLERS_REMEDY, SamplerProcesses


class Assistant:
    """What one host does; `close` ends it."""

    def __init__(self, plan: LaunchPlan, assistants: Assistants, name: str) -> None:
        name = planned_name(name, assistants.endpoints)
        hosts = {host.name: host for host in plan.hosts}
        if name not in assistants.endpoints or name not in hosts:
            raise ValueError(f"{name} is to assist, {ASSISTANTS} has {', '.join(assistants.names)}")
        self._name, self._plan, self._host, self._keys = name, plan, hosts[name], assistants.keys
        num_machines = sum(host.num_ranks > 0 for host in plan.hosts)
        self.machine = num_machines + assistants.names.index(name)
        where = urlsplit(assistants.endpoints[name])
        self._address = resolve(str(where.hostname), f"the address of {name}")[0]
        self._samplers: SamplerProcesses | None = None
        self._endpoints: list[str] = []
        self._sampling: tuple[str, AssistedJob] | None = None  # what the samplers were started for
        self.server = GraphServer(
            self.machine, bind=[endpoint(self._address, int(where.port or 0))], keys=assistants.keys,
            threads=default_server_threads(num_usable_cores()), on_open=self._on_open,
        )  # fmt: skip

    def _on_open(self, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
        job = AssistedJob.from_json(options)
        self.server.lose_ranks_after(job.lost_after)
        if self._host.samplers and self._sampling != (path, job):
            self._end_samplers()
            self._start_samplers(path, job)
        return {"samplers": self._endpoints}

    def _start_samplers(self, path: str, job: AssistedJob) -> None:
        """All of them, or none: then ValueError says what the user can do."""
        hosts, keys = list(self._plan.hosts), replace(self._keys, encrypts=job.encrypts)
        first = sum(len(host.samplers) for host in hosts[: hosts.index(self._host)])
        self._samplers = SamplerProcesses(path, self.machine, self._address, keys, job.lost_after)
        try:
            self._endpoints = self._samplers.start(len(self._host.samplers), first)
        except (RuntimeError, OSError) as error:
            self._end_samplers()
            raise ValueError(f"{error}: {SAMPLERS_REMEDY}") from None
        self._sampling = path, job

    def _end_samplers(self) -> None:
        if self._samplers is not None:
            self._samplers.close()
        self._samplers, self._endpoints, self._sampling = None, [], None

    def close(self) -> None:
        self._end_samplers()
        self.server.close()


def assist() -> int:
    """Takes part in the job that the environment tells of, until it is interrupted; ValueError where there is none."""
    plan, assistants = find_plan(None), Assistants.from_environment()
    if plan is None or assistants is None:
        raise ValueError(f"{PLAN} and {ASSISTANTS} must be set, as gnnsys launch --plan sets them")
    assistant = Assistant(plan, assistants, host_name())
    try:
        assistant.server.start()
        wait_for_end(assistant.server.stopped, [signal.SIGINT, signal.SIGTERM], watch_input=False)
    finally:
        assistant.close()
    return 0
