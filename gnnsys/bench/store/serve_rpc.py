"""`python -m gnnsys.bench.store.serve_rpc FILE`: the process that holds the rows of `torch_rpc`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

from gnnsys.bench.child_process import wait_for_end
from gnnsys.bench.store.torch_rpc import OWNER, join

if __name__ == "__main__":
    torch.set_num_threads(1)
    join(OWNER, 1, Path(sys.argv[1]))
    wait_for_end()
    rpc.shutdown()
