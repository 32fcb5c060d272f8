"""From one description to torchrun on every host: over ssh, here, by Slurm or for Kubernetes; and parts to their hosts.

`gnnsys launch` and `gnnsys push` are its command line. Its modules are loaded when first used, so that an agent
is up at once; none of them imports torch before it must.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.launch.agent_checks import find_parts
    from gnnsys.launch.channel import HostError, HostLost
    from gnnsys.launch.cluster_measurement import MeasuredCluster, MeasureOptions, bounded_by_others, measure_cluster
    from gnnsys.launch.dry_run import job_text
    from gnnsys.launch.host_group import EXIT_HOST_LOST, EXIT_NOT_STARTED, HostGroup, LaunchOptions
    from gnnsys.launch.hosts import Host, local_hosts, read_hosts
    from gnnsys.launch.kubernetes import PodOptions, manifest_text, pytorch_job, train_job
    from gnnsys.launch.launcher import Launcher
    from gnnsys.launch.local_facts import host_facts, source_digest, versions
    from gnnsys.launch.network_probe import LinkSpeed, ProbeServer, measure_link
    from gnnsys.launch.part_files import file_problem, folders_there, read_listing
    from gnnsys.launch.preflight import Checks, Finding, judge_host, judge_versions
    from gnnsys.launch.push import Pushed, PushOptions, push_parts
    from gnnsys.launch.slurm import SRUN, SlurmOptions, batch_file, in_allocation, slurm_hosts, submit
    from gnnsys.planning import LaunchPlan, PlannedHost
    from gnnsys.planning import read_launch_plan as read_plan

__all__ = [
    "EXIT_HOST_LOST",
    "EXIT_NOT_STARTED",
    "SRUN",
    "Checks",
    "Finding",
    "Host",
    "HostError",
    "HostGroup",
    "HostLost",
    "LaunchOptions",
    "LaunchPlan",
    "Launcher",
    "LinkSpeed",
    "MeasureOptions",
    "MeasuredCluster",
    "PlannedHost",
    "PodOptions",
    "ProbeServer",
    "PushOptions",
    "Pushed",
    "SlurmOptions",
    "batch_file",
    "bounded_by_others",
    "file_problem",
    "find_parts",
    "folders_there",
    "host_facts",
    "in_allocation",
    "job_text",
    "judge_host",
    "judge_versions",
    "local_hosts",
    "manifest_text",
    "measure_cluster",
    "measure_link",
    "push_parts",
    "pytorch_job",
    "read_hosts",
    "read_listing",
    "read_plan",
    "slurm_hosts",
    "source_digest",
    "submit",
    "train_job",
    "versions",
]

_MODULE_OF = {
    "Checks": "preflight",
    "EXIT_HOST_LOST": "host_group",
    "EXIT_NOT_STARTED": "host_group",
    "Finding": "preflight",
    "Host": "hosts",
    "HostError": "channel",
    "HostGroup": "host_group",
    "HostLost": "channel",
    "LaunchOptions": "host_group",
    "Launcher": "launcher",
    "LinkSpeed": "network_probe",
    "MeasureOptions": "cluster_measurement",
    "MeasuredCluster": "cluster_measurement",
    "PodOptions": "kubernetes",
    "ProbeServer": "network_probe",
    "PushOptions": "push",
    "Pushed": "push",
    "SRUN": "slurm",
    "SlurmOptions": "slurm",
    "batch_file": "slurm",
    "bounded_by_others": "cluster_measurement",
    "file_problem": "part_files",
    "find_parts": "agent_checks",
    "folders_there": "part_files",
    "host_facts": "local_facts",
    "in_allocation": "slurm",
    "job_text": "dry_run",
    "judge_host": "preflight",
    "judge_versions": "preflight",
    "local_hosts": "hosts",
    "manifest_text": "kubernetes",
    "measure_cluster": "cluster_measurement",
    "measure_link": "network_probe",
    "push_parts": "push",
    "pytorch_job": "kubernetes",
    "read_hosts": "hosts",
    "read_listing": "part_files",
    "slurm_hosts": "slurm",
    "source_digest": "local_facts",
    "submit": "slurm",
    "train_job": "kubernetes",
    "versions": "local_facts",
}
_OF_PLANNING = {"LaunchPlan": "LaunchPlan", "PlannedHost": "PlannedHost", "read_plan": "read_launch_plan"}


def __getattr__(name: str) -> Any:
    if name in _OF_PLANNING:
        return getattr(importlib.import_module("gnnsys.planning"), _OF_PLANNING[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gnnsys.launch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gnnsys.launch.{_MODULE_OF[name]}"), name)
