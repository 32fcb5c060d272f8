"""A machine's agent as torchrun runs it, but for one thing: ranks are forked from it, and so need not import torch.

A restart then takes a second instead of ten on two cores, and thirty runs minutes instead of an hour. A leader's first
servers are forked too, and so is the agent itself, on a host of the lab (tests/support/lab_host.py).
Usage: agent.py PLAN ENDPOINT RUN_ID [LOCAL_ADDRESS]
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch._dynamo  # what the first optimizer of a process loads
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.chaos import job, program
from tests.support.disk import do_not_wait_for_disks
from tests.support.spare_servers import keep_spares


def run_rank(plan: str) -> None:
    """In the forked process: signals do what they do in a fresh one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ["LOCAL_RANK"] == "0":
        keep_spares()
    program.main(plan)


def main(plan: str, endpoint: str, run_id: str, local_address: str | None = None) -> int:
    torch.set_num_threads(1)
    do_not_wait_for_disks()
    config = LaunchConfig(
        min_nodes=job.NUM_HOSTS,
        max_nodes=job.NUM_HOSTS,
        nproc_per_node=job.TRAINERS,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={} if local_address is None else {"is_host": "0"},
        max_restarts=job.MAX_RESTARTS,
        monitor_interval=0.1,
        start_method="fork",
        local_addr=local_address,
    )
    try:
        elastic_launch(config, run_rank)(plan)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
