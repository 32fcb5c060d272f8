"""`gnnsys bench execution --only refill`: the count of rows that cross the bus."""

from itertools import combinations

import pytest
import torch

from gnnsys.bench.execution.refill import rows_crossing


def test_a_cache_that_is_filled_once_keeps_the_rows_most_visited_before():
    batches = [torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([3, 4])]
    assert rows_crossing(batches, 5, 0.2) == 1.5


@pytest.mark.parametrize("seed", range(8))
def test_a_refilled_cache_brings_what_is_best_for_the_group(seed):
    """Beside every set of rows that could be kept."""
    draw = torch.Generator("cpu").manual_seed(seed)
    batches = [torch.randperm(8, generator=draw)[:3] for _ in range(12)]
    kept = set(torch.topk(torch.bincount(torch.cat(batches[:6]), minlength=8).double(), 2).indices.tolist())
    visits = torch.cat(batches[6:]).tolist()

    def crossing(chosen):
        return sum(row not in chosen for row in visits) + len(set(chosen) & set(visits) - kept)

    least = min(map(crossing, combinations(range(8), 2)))
    assert rows_crossing(batches, 8, 0.25, group=6) == pytest.approx(least / 6)
    assert least / 6 <= rows_crossing(batches, 8, 0.25)
