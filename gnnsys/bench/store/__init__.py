"""`gnnsys bench store`: rows of another process beside bare ZeroMQ and torch's RPC, own rows beside index_select.

Also what an extra trainer on a machine takes in memory. Everything remote is in a process of its own, over loopback.
"""

from gnnsys.bench.store.checks import checks
from gnnsys.bench.store.memory import memory
from gnnsys.bench.store.pulls import keyed_pull, lanes, local_pull, pull_variants, remote_pull
from gnnsys.bench.store.updates import changes

BENCHMARKS = [remote_pull, local_pull, pull_variants, keyed_pull, lanes, changes, memory, checks]

__all__ = ["BENCHMARKS"]
