"""Rows of other parts by some of their columns on a device: the host's batches, narrow until they are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnnsys.graph import NODE
from gnnsys.loader import NeighborLoader
from gnnsys.ops import fill_columns, widen_rows
from gnnsys.sampling import GuidedSampler
from gnnsys.sampling.place import place_parts_on
from gnnsys.store import ColumnChoice
from tests.cuda.places import same_batch
from tests.cuda.test_parts import CUDA, large
from tests.sampling.machines import machines
from tests.sampling.test_guided import some_scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

COLUMNS = torch.arange(100)[torch.arange(100) % 7 > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_are_widened_there_as_on_the_host(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    choice = ColumnChoice("x", (0, 0), COLUMNS, torch.rand(100, generator=g))
    narrow = torch.rand(500, COLUMNS.numel(), generator=g).to(dtype)
    at = torch.randperm(900, generator=g)[:500]
    rows, is_own = torch.rand(900, 100, generator=g).to(dtype), torch.rand(900, generator=g) < 0.5
    parts = (choice.place, choice.dropped, choice.values(dtype))
    here = fill_columns(widen_rows(narrow, rows.clone(), at, *parts), is_own, *parts[1:])
    there = widen_rows(narrow.cuda(), rows.cuda(), at.cuda(), *(part.cuda() for part in parts))
    there = fill_columns(there, is_own.cuda(), *(part.cuda() for part in parts[1:]))
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("place", ["device", "structure", "registered", None])
@pytest.mark.parametrize("owner", [[0, 0, 0], [0, 1, 0], [0, 1, 2]])
def test_batches_are_the_hosts_wherever_parts_lie(tmp_path: Path, owner: list[int], place: str | None) -> None:
    with machines(large(), tmp_path / "p", 3, machine_of_part=owner) as graphs:
        graph = graphs[0]

        def batches(device: torch.device | None) -> list:
            sampler = GuidedSampler(graph, [10, 5], requester=0)
            sampler.use(some_scores(graph, 0), at=(0, 2), columns=COLUMNS)
            own = graph.book.part_range(0, NODE)
            seeds = graph.from_global(range(own.start, own.stop)[:1500])
            loader = NeighborLoader(graph, sampler=sampler, input_nodes=seeds, batch_size=256, device=device)
            found = list(loader)
            bytes_over_bus = [record.bytes.get("device", 0) for record in loader.trace()]
            loader.close()
            return [found, bytes_over_bus]

        here, _ = batches(torch.device("cpu"))
        if place is not None:
            place_parts_on(graph, CUDA, place)
        there, moved = batches(CUDA)
        assert len(here) == len(there) == 6
        for ours, theirs in zip(here, there, strict=True):
            assert theirs.x.is_cuda
            same_batch(theirs, ours)
        if place is None and graph.sampled_on.type == "cpu":
            rows = there[-1].num_nodes * 400
            assert 0 < moved[-1] < rows + 64 * there[-1].num_edges  # narrow rows, and the structure
        graph.release_device()
