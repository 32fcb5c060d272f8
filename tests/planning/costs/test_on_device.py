"""The profile of a machine with a GPU. What operators take is not looked at."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from gnnsys.ops import HAS_CUDA_KERNELS
from gnnsys.planning import CostContext, CostProbe, DeviceProbes, ProbeTimer, profile_machine, time_probes
from gnnsys.planning.costs.host_probes import random_graph
from gnnsys.planning.costs.operators import OPERATORS

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and HAS_CUDA_KERNELS), reason="needs a GPU")


def test_all_operators_have_costs_and_the_memory_is_given_back():
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MB for each thread and stream that multiplies
    before = torch.cuda.memory_allocated(device)
    profile = profile_machine(device, 2, 6.0)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert set(profile.costs.operators) == set(OPERATORS) and profile.machine.gpu and profile.machine.driver
    assert ("spmm/host", "copy/up") in profile.pairs and ("sample/pinned", "gather/bus") in profile.pairs
    assert all(cost.terms for cost in profile.costs.operators.values())
    assert torch.cuda.memory_allocated(device) - before < 64 << 20


def test_samples_are_of_the_graph_wherever_it_lies():
    device = torch.device("cuda", 0)
    there = DeviceProbes(device, CostContext(), scale=0.1)
    graph = random_graph(1000, 20_000, 1.0, there.generator)
    probes = [there.sample_of(graph, (3, 2), 10, is_pinned) for is_pinned in (False, True)]
    for probe in probes:
        assert probe.sizes["nodes"] > 10 and 0 < probe.sizes["edges"] <= 10 * 3 + 30 * 2
        num_edges, num_nodes = probe.call()
        assert 0 < num_edges <= 90 and num_nodes <= 100


def test_the_time_in_which_the_host_queues_a_call_is_not_the_devices():
    """Two small kernels, and between them a millisecond of the host's: the device has enough to do meanwhile."""
    device = torch.device("cuda", 0)
    small = torch.ones(1024, device=device)

    def slow_to_queue() -> None:
        small.add_(1.0)
        until = time.perf_counter() + 1e-3
        while time.perf_counter() < until:
            pass
        small.add_(1.0)

    probe = CostProbe("launch/device", {"calls": 2}, slow_to_queue, device)
    (seen,) = time_probes([probe], time.perf_counter() + 1.0, ProbeTimer(device))
    assert seen.seconds < 2e-4 and probe.fills > 2
