"""The queue that trains many models on one device (CoGNN): jobs are submitted to a folder (`Queue`), a service runs
them (`JobService`), `policies` says which start next, and a graph is in memory once for all of them (`shared_graph`).

docs/jobs.md is the guide. What needs torch is loaded when it is first used: who lists jobs, or keeps a script, need not
wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gnnsys.jobs.device_facts import DeviceFacts
from gnnsys.jobs.grid import combinations, parse_grid
from gnnsys.jobs.job_memory import FIRST_FACTOR, estimate_spec
from gnnsys.jobs.job_record import JobRecord, JobState, JobTimes, SpecEstimate
from gnnsys.jobs.job_spec import JobSpec, make_spec
from gnnsys.jobs.job_tables import job_json, job_lines, job_page, result_lines
from gnnsys.jobs.mps import DeviceSharing, MpsDaemon, MpsUnavailable, start_sharing
from gnnsys.jobs.policies import (
    ContinuousPolicy,
    EndedRun,
    FifoPolicy,
    GroupedPolicy,
    Grouping,
    Policy,
    ReplayedJob,
    ReplayedQueue,
    Room,
    SharingRecord,
    SharingWatch,
    WaitingJob,
    WatchedPace,
    base_groups,
    bmc_groups,
    find_policy,
    fits,
    lmcf_groups,
    memory_of,
    predict_seconds,
    relative_speeds,
    replay_queue,
    steps_per_second,
    to_be_parted,
    undisturbed,
)
from gnnsys.jobs.queue import Queue, default_folder
from gnnsys.jobs.queue_database import QueueDiskFull
from gnnsys.jobs.running_job import JobPace
from gnnsys.jobs.service import JobService
from gnnsys.jobs.sharing_hook import SharingJudge

if TYPE_CHECKING:
    from gnnsys.jobs.graph_holder import GraphHolder, GraphHolderLost, HeldGraph
    from gnnsys.jobs.shared_graphs import (
        NotedGraphs,
        Released,
        check_holder,
        noted_graphs,
        release_graphs,
        shared_graph,
    )
    from gnnsys.jobs.train_job import run_alone

_MODULE_OF = {
    "GraphHolder": "graph_holder",
    "GraphHolderLost": "graph_holder",
    "HeldGraph": "graph_holder",
    "NotedGraphs": "shared_graphs",
    "Released": "shared_graphs",
    "check_holder": "shared_graphs",
    "noted_graphs": "shared_graphs",
    "release_graphs": "shared_graphs",
    "run_alone": "train_job",
    "shared_graph": "shared_graphs",
}

__all__ = [
    "FIRST_FACTOR",
    "ContinuousPolicy",
    "DeviceFacts",
    "DeviceSharing",
    "EndedRun",
    "FifoPolicy",
    "GraphHolder",
    "GraphHolderLost",
    "GroupedPolicy",
    "Grouping",
    "HeldGraph",
    "JobPace",
    "JobRecord",
    "JobService",
    "JobSpec",
    "JobState",
    "JobTimes",
    "MpsDaemon",
    "MpsUnavailable",
    "NotedGraphs",
    "Policy",
    "Queue",
    "QueueDiskFull",
    "Released",
    "ReplayedJob",
    "ReplayedQueue",
    "Room",
    "SharingJudge",
    "SharingRecord",
    "SharingWatch",
    "SpecEstimate",
    "WaitingJob",
    "WatchedPace",
    "base_groups",
    "bmc_groups",
    "check_holder",
    "combinations",
    "default_folder",
    "estimate_spec",
    "find_policy",
    "fits",
    "job_json",
    "job_lines",
    "job_page",
    "lmcf_groups",
    "make_spec",
    "memory_of",
    "noted_graphs",
    "parse_grid",
    "predict_seconds",
    "relative_speeds",
    "release_graphs",
    "replay_queue",
    "result_lines",
    "run_alone",
    "shared_graph",
    "start_sharing",
    "steps_per_second",
    "to_be_parted",
    "undisturbed",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"gnnsys.jobs.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'gnnsys.jobs' has no attribute {name!r}")
