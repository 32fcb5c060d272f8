"""A job with a cap takes the same of a GPU whoever else is there: beside nobody, and beside a process that has 4 GB."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gnnsys.jobs.device_facts import DeviceFacts
from tests.support.processes import processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CAP = 256 << 20

BALLAST = """
import sys, threading, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
threading.Event().wait(300)  # it is killed before
"""

# The cap leaves too little for all rows and all bins, so that each size below is a choice. cuBLAS takes 64 MiB of it.
JOB = """
import json, sys, torch, gnnsys
from gnnsys.graph import NODE, sbm
from gnnsys.nn import SAGEConv
from gnnsys.store import DeviceCache, MemoryBudget

free, total = torch.cuda.mem_get_info()
graph = sbm(400_000, avg_degree=10, num_features=128, seed=1)
rows = graph.node_data[NODE]["x"]
layers = [SAGEConv(128, 64).cuda(), SAGEConv(64, 64).cuda()]
if sys.argv[1] != "none":
    MemoryBudget.of("cuda").cap = int(sys.argv[1])
cache = DeviceCache.from_scores(rows, torch.arange(len(rows)), device="cuda")
loader = gnnsys.NeighborLoader(
    graph.pin_memory(), [5, 4], input_nodes=torch.arange(2000), batch_size=64, device="cuda", num_threads=1
)
promised = [use.bytes for use in MemoryBudget.of("cuda").uses() if use.is_promised]
model = gnnsys.HybridParallel(layers, graph)
model(rows).square().mean().backward()
(plan,) = model._planner.plans.values()
print(json.dumps({
    "taken": total - free, "cache": cache.nbytes, "batches": promised, "bins": [step.bounds for step in plan.steps],
}), flush=True)
"""


def _told(cap: int | None, ballast: int) -> dict[str, Any]:
    with processes() as running:
        if ballast:
            running.await_output(running.start_code("ballast", BALLAST, ballast), "held")
        number = running.start_code("job", JOB, "none" if cap is None else cap, environment={"OMP_NUM_THREADS": "1"})
        said = running.await_output(number, "}\n")
    return json.loads(said.splitlines()[-1])


def test_cache_batches_and_bins_of_a_job_with_a_cap_are_the_same_beside_a_ballast_of_4_gb():
    ballast = 4 << 30
    alone, beside = _told(CAP, 0), _told(CAP, ballast)
    assert beside.pop("taken") >= ballast  # the driver's figure: it was really there
    alone.pop("taken")
    assert beside == alone
    assert len(alone["bins"][0]) > 2, "all nodes are in one bin: nothing was chosen"
    assert 0 < alone["cache"] <= CAP // 2


def test_a_queue_knows_the_memory_and_the_name_of_its_device_as_torch_does():
    told = torch.cuda.get_device_properties(0)
    assert DeviceFacts.ask("cuda:0") == DeviceFacts("cuda:0", told.total_memory, told.name)
