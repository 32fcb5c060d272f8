"""LABOR-i's probabilities (Balin and Catalyurek 2023, section 3.2): sources that many seeds share become likelier.

Edge u -> v is taken with probability min(1, c_v * pi_u). For given pi, c_v is what gives the estimate at v the variance
that k uniform draws have: sum over u of 1 / min(1, c_v * pi_u) = degree(v)^2 / k. From pi = 1 (LABOR-0)
a round sets pi_u to the largest c_v * pi_u of its edges, which lowers the expected number of nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops import CSC, Neighbors, sample_labor_importance


def draw_by_importance(
    csc: CSC, seeds: Tensor, fanout: int, rounds: int, *, key: int, exclude: Tensor | None = None
) -> Neighbors:
    """In-edges of the seeds, with their weights."""
    return sample_labor_importance(csc, seeds, fanout, rounds, key=key, exclude=exclude)


def importance(indptr: Tensor, source: Tensor, fanout: int, rounds: int) -> Tensor:
    """The probability of each edge, float64, after `rounds` rounds: what the kernel computes, in plain torch.

    Columns are those of `indptr`; `source` are numbers of sources from 0 on, one per edge. Columns of at most `fanout`
    edges take all. Work: a sort of the edges per round.
    """
    degree = indptr.diff()
    column = torch.repeat_interleave(degree, output_size=source.numel())
    num_src = int(source.max()) + 1 if source.numel() else 0
    pi = torch.ones(num_src, dtype=torch.float64, device="cpu")
    for _ in range(rounds):
        scaled = _solve(indptr, column, pi[source], fanout) * pi[source]
        pi = torch.zeros_like(pi).scatter_reduce_(0, source, scaled, "amax", include_self=False)
    return (_solve(indptr, column, pi[source], fanout) * pi[source]).clamp_(max=1.0)


def _solve(indptr: Tensor, column: Tensor, pi: Tensor, fanout: int) -> Tensor:
    """c of each edge's column.

    Where its j likeliest edges are certain, c_j = (sum of the others' 1 / pi) / (target - j). The first j at which the
    next edge is not certain is the solution.
    """
    degree = indptr.diff()
    order = pi.argsort(descending=True, stable=True)
    order = order[column[order].argsort(stable=True)]  # by column, then from the likeliest on
    sorted_pi = pi[order]
    inverse = 1.0 / sorted_pi
    done = torch.cat([inverse.new_zeros(1), inverse.cumsum(0)])
    place = torch.arange(pi.numel(), device="cpu") - indptr[column]
    rest = done[indptr[1:]][column] - done[:-1]  # of this edge and those after it in its column
    target = degree.double().square() / fanout
    scale = rest / (target[column] - place)
    fits = (scale * sorted_pi <= 1.0) | (place == degree[column] - 1)
    first = torch.full((degree.numel(),), pi.numel(), dtype=torch.int64, device="cpu")
    first.scatter_reduce_(0, column[fits], fits.nonzero().view(-1), "amin")
    all_taken = degree <= fanout
    per_column = torch.where(all_taken, 0.0, scale[first.clamp(max=max(0, pi.numel() - 1))] if pi.numel() else 0.0)
    found = per_column[column]
    return torch.where(all_taken[column], 1.0 / pi, found)
