"""A plan carried out: who serves which part, by the names of hosts and not by the numbers that a rendezvous gave.

Every rank has the plan and decides the same from what all of them tell, so a plan that does not fit is the same error
on every rank, before anything is served.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gnnsys.partition import part_folder
from gnnsys.planning import LaunchPlan, PlanWatch, parse_launch_plan, read_launch_plan

PLAN = "GNNSYS_PLAN"  # a plan, or the path of its file: set by `gnnsys launch --plan`
LAUNCH_HOST = "GNNSYS_LAUNCH_HOST"  # what the launcher calls this host
REMEDY = "start it by gnnsys launch --plan, or plan again"

GivenPlan: TypeAlias = "str | os.PathLike[str] | LaunchPlan | Literal[False] | None"


def find_plan(given: GivenPlan) -> LaunchPlan | None:
    """What was given, else what the environment says. False: no plan, whatever that says."""
    if given is False:
        return None
    if given is None:
        told = os.environ.get(PLAN, "")
        if told.lstrip().startswith("{"):
            return parse_launch_plan(told, PLAN)
        return read_launch_plan(told) if told else None
    if isinstance(given, LaunchPlan):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"plan must be the path of a plan, a LaunchPlan, None or False, got {given!r}")
    return read_launch_plan(given)


def host_name() -> str:
    """What a plan calls this host: as the launcher says, else its own name."""
    return os.environ.get(LAUNCH_HOST) or socket.gethostname()


def watch_of(plan: LaunchPlan | None) -> PlanWatch | None:
    """What compares an epoch with the plan's prediction, where it has one."""
    is_said = plan is not None and plan.seconds_per_epoch is not None
    return PlanWatch(plan.seconds_per_epoch, plan.binds) if is_said else None  # type: ignore[union-attr,arg-type]


def serve_by_plan(
    plan: LaunchPlan, hosts: Sequence[str], machine_of_rank: Sequence[int], reports: Sequence[Mapping[str, Any]]
) -> list[int] | None:
    """The machine of each part; None where the plan leaves that to the disks. ValueError where it does not fit.

    `hosts[m]` is the name of machine m, `reports[m]` what it has on its disk (`survey`).
    """
    planned = {host.name: host for host in plan.hosts}
    named = [planned_name(name, planned) for name in hosts]
    for name, count in Counter(named).items():
        if count > 1:
            raise ValueError(
                f"{count} machines are called {name}: start one torchrun on each host, or set {LAUNCH_HOST}"
            )
    for name in named:
        if name not in planned:
            there = ", ".join(list(planned)[:16])
            raise ValueError(f"host {name} takes part, the plan has {there}: {REMEDY} for these hosts")
    for host in plan.hosts:
        if host.name not in named:
            what = "which does not take part" if host.num_ranks else "which has no ranks and does not assist"
            raise ValueError(f"the plan has host {host.name}, {what}: {REMEDY} for these hosts")
        runs = list(machine_of_rank).count(named.index(host.name))
        if runs != host.num_ranks:
            raise ValueError(f"host {host.name} runs {_ranks(runs)}, the plan has {host.num_ranks}: {REMEDY}")
    first = reports[0]
    plan.check_parts(first["path"], int(first["crc32"]))
    if any(host.parts is None for host in plan.hosts):
        return None
    machine_of_part = {part: named.index(host.name) for host in plan.hosts for part in host.parts or ()}
    num_parts = int(first["num_parts"])
    if len(machine_of_part) != num_parts:
        raise ValueError(f"the plan has {len(machine_of_part)} parts, {first['path']} has {num_parts}: {REMEDY}")
    for part, machine in sorted(machine_of_part.items()):
        if part not in reports[machine]["on_disk"]:
            folder = Path(reports[machine]["path"]) / part_folder(part)
            raise ValueError(
                f"the plan has part {part} served by {named[machine]}, where {folder} is missing: gnnsys push --plan "
                "sends it"
            )
    return [machine_of_part[part] for part in range(num_parts)]


def planned_name(name: str, planned: Mapping[str, Any]) -> str:
    """gpu1.cluster.local is the gpu1 of a plan that has no other."""
    short = name.split(".", 1)[0]
    return short if name not in planned and short in planned else name


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
