"""A cluster in a box: hosts as Linux namespaces with their own rates, CPU quota, memory limit and shared memory.

`launch/lab.py` is its command line; tests and benchmarks that need several machines use `Lab` and skip, with the reason
that `available()` gives, where it cannot run.
"""

from gnnsys.lab import state
from gnnsys.lab.command import Command, Result
from gnnsys.lab.control_groups import Usage
from gnnsys.lab.lab import Lab, available, wait_all
from gnnsys.lab.network import HostTraffic, parse_rate, queue_seconds

Traffic = HostTraffic  # the old name, kept for one version

__all__ = [
    "Command",
    "HostTraffic",
    "Lab",
    "Result",
    "Traffic",
    "Usage",
    "available",
    "parse_rate",
    "queue_seconds",
    "state",
    "wait_all",
]
