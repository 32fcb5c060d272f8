"""Typed graphs on a device give what they give on the CPU: rows on the device, or on the host and bins moved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing
from tests.fullgraph.test_typed import ALL, MODELS, Rows, make_graph, rows_of, seeded, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPTIONS: dict[str, dict[str, Any]] = {
    "one bin": {"schedule": BinSchedule(packing=Packing(num_bins=1))},
    "four bins": {"schedule": BinSchedule(packing=Packing(num_bins=4))},
    "recompute": {"schedule": BinSchedule(packing=Packing(num_bins=4)), "recompute": True},
    "budget": {"memory_budget": 200_000},
}


@pytest.mark.parametrize("rows_on", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "sage, max"])
def test_a_device_gives_what_the_cpu_gives(name, rows_on):
    graph = make_graph()
    make, widths = MODELS[name]
    model, x = seeded(lambda: make(graph)), rows_of(widths)
    want, x_grads, grads = step(copy.deepcopy(model), x, ALL, {t: graph.csc(t) for t in graph.edge_types})
    largest = max(float(grad.abs().max()) for grad in grads if grad is not None and grad.numel())
    for options in OPTIONS.values():
        parallel = HybridParallel(copy.deepcopy(model).cuda(), graph, **options)
        nodes: Rows = {t: ids.to(rows_on) for t, ids in ALL.items()}
        out, of_x, of_parameters = step(parallel, {t: rows.to(rows_on) for t, rows in x.items()}, nodes)
        assert out.keys() == want.keys()
        for node_type, rows in out.items():
            torch.testing.assert_close(rows.cpu(), want[node_type], rtol=1e-9, atol=1e-9)
        for got, expected in [
            *zip(of_x.values(), x_grads.values(), strict=True),
            *zip(of_parameters, grads, strict=True),
        ]:
            if got is not None and expected is not None:
                torch.testing.assert_close(got.cpu(), expected, rtol=1e-9, atol=1e-9 * largest)
