"""Visits of graphs on a device, or in memory that it reads, are those of the graph on the host, and are on the host."""

import pytest
import torch

from gnnsys.sampling import batch_visits, visits
from tests.cuda.places import PLACES, homogeneous, placed, typed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("edges", [100, 1 << 24])  # looked at together: fewer than a hub has, and all of them
def test_computed_visits_differ_by_rounding_alone(monkeypatch, place, replace, edges):
    monkeypatch.setattr(visits, "_EDGES", edges)
    graph, seeds = homogeneous(), torch.arange(0, 600, 3)
    here = batch_visits(graph, [5, 3, -1], seeds, batch_size=20, replace=replace)
    there = batch_visits(placed(graph, place), [5, 3, -1], seeds, batch_size=20, replace=replace)
    assert there["node"].is_cpu
    torch.testing.assert_close(there["node"], here["node"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("place", PLACES)
def test_counted_visits_are_the_same(place):
    graph, seeds = typed(), torch.arange(0, 100, 3)
    here = batch_visits(graph, [5, 3], seeds, batch_size=8, node_type="paper")
    there = batch_visits(placed(graph, place), [5, 3], seeds, batch_size=8, node_type="paper")
    assert list(there) == list(here)
    assert all(there[t].is_cpu and torch.equal(there[t], here[t]) for t in here)
