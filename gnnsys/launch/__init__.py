"""From one description to torchrun on every host: over ssh, here, by Slurm or for Kubernetes; and parts to their hosts.

`gnnsys launch` and `gnnsys push` are its command line. Importing this room does not import torch.
"""

from gnnsys.launch.channel import HostError, HostLost
from gnnsys.launch.host_facts import host_facts, source_digest, versions
from gnnsys.launch.host_group import EXIT_HOST_LOST, HostGroup, LaunchOptions
from gnnsys.launch.hosts import Host, local_hosts, read_hosts
from gnnsys.launch.kubernetes import PodOptions, manifest_text, pytorch_job
from gnnsys.launch.launcher import EXIT_NOT_STARTED, Launcher
from gnnsys.launch.network_probe import LinkSpeed, ProbeServer, measure_link
from gnnsys.launch.part_files import folders_there, read_listing
from gnnsys.launch.part_files import problem as file_problem
from gnnsys.launch.preflight import Checks, Finding, judge_host, judge_versions
from gnnsys.launch.push import Pushed, PushOptions, push_parts
from gnnsys.launch.slurm import SRUN, SlurmOptions, batch_file, in_allocation, slurm_hosts, submit

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
    "Launcher",
    "LinkSpeed",
    "PodOptions",
    "ProbeServer",
    "PushOptions",
    "Pushed",
    "SlurmOptions",
    "batch_file",
    "file_problem",
    "folders_there",
    "host_facts",
    "in_allocation",
    "judge_host",
    "judge_versions",
    "local_hosts",
    "manifest_text",
    "measure_link",
    "push_parts",
    "pytorch_job",
    "read_hosts",
    "read_listing",
    "slurm_hosts",
    "source_digest",
    "submit",
    "versions",
]
