"""Rows about costs: every operator of this machine has a mean and a worst error, whatever they are."""

from __future__ import annotations

import torch

from gnnsys.bench import Report, Workload
from gnnsys.bench.execution.costs import EQUATION, HOST, LIMIT, ON_GPU, costs
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.workload import Sizes
from gnnsys.ops import HAS_CUDA_KERNELS
from gnnsys.planning.costs.operators import OPERATORS


def test_every_operator_has_errors_and_profile_and_fit_have_seconds():
    with Workload(Sizes(2_000, 20_000, dim=16, num_seeds=64, epoch_batches=2)) as work:
        report = Report("test", quick=True)
        for case in costs(work):
            report.add(case, measure(case, RoundLimits(least=1, most=1)))
    here = (*HOST, *(ON_GPU if torch.cuda.is_available() and HAS_CUDA_KERNELS else ()))
    names = [f"{operator}/{kind} error" for operator in here for kind in ("mean", "worst")]
    beside_limits = [row for row in report.rows if row.peer_name == LIMIT]
    assert [row.name for row in beside_limits] == [f"execution/costs/{name}" for name in ("profile", "fit", *names)]
    assert all(row.target == 1.0 and row.ours is not None and row.ours >= 0 for row in beside_limits)
    assert all(row.limit is not None and row.limit > 0 for row in beside_limits[2:]), "how noisy measurements are"
    beside = [row.name for row in report.rows if row.peer_name == EQUATION and row.ours is not None]
    assert beside == [f"execution/costs/{name}, one width" for name in names if name.startswith("spmm/")]
    assert {*HOST, *ON_GPU} == set(OPERATORS)
