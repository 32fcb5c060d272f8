"""Loaders whose batches are sampled group by group: the same batches, resumed in mid-group too, within their memory."""

from itertools import islice

import pytest
import torch

import gnnsys
from gnnsys.loader import PipelineOptions
from gnnsys.store import MemoryBudget, limited
from tests.loader.planned_ways import GRAPH, are_same, node_loader, tensors_of

NODES = {"input_nodes": torch.arange(8 * 25)}


def _grouped(size, **options):
    return node_loader(**{**NODES, "num_threads": 2, "pipeline": PipelineOptions(group=size), **options})


@pytest.mark.parametrize("across_epochs", [True, False])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_batches_are_those_of_a_loader_without_groups(size, across_epochs):
    plain, grouped = node_loader(**NODES), _grouped(size, across_epochs=across_epochs)
    for _ in range(2):
        assert are_same([tensors_of(batch) for batch in grouped], [tensors_of(batch) for batch in plain])
    grouped.close()


@pytest.mark.parametrize("stop", [1, 9, 14])
def test_a_run_that_is_killed_in_mid_group_resumes_to_the_same_batches(stop):
    expected = [tensors_of(batch) for batch in node_loader(**NODES)]
    killed = _grouped(7)
    for _ in islice(killed, stop):
        pass
    resumed = _grouped(5)
    resumed.load_state_dict(killed.state_dict())
    assert are_same([tensors_of(batch) for batch in resumed], expected[stop:])
    killed.close()
    resumed.close()


def test_epochs_that_are_left_in_mid_group_are_gone_on_behind():
    plain, grouped = node_loader(**NODES), _grouped(7)
    for count in (3, 10, 25, 1):
        ours = [tensors_of(batch) for batch in islice(grouped, count)]
        assert are_same(ours, [tensors_of(batch) for batch in islice(plain, count)])
    grouped.close()


def test_links_and_functions_of_the_users_own_go_in_groups_too():
    def links(**options):
        loader = gnnsys.LinkNeighborLoader(
            GRAPH, [3, 2], edge_label_index=GRAPH.edge_index()[:, ::60], batch_size=8, neg_sampling="binary",
            transform=lambda batch: batch, **options,
        )  # fmt: skip
        return [tensors_of(batch) for batch in loader]

    assert are_same(links(num_threads=2, pipeline=PipelineOptions(group=6)), links())


def test_a_group_that_would_take_more_than_its_memory_is_smaller():
    plain = [tensors_of(batch) for batch in node_loader(**NODES)]
    taken = sum(use.bytes for use in MemoryBudget.of("cpu").uses())
    with limited("cpu", taken + 40_000):
        grouped = _grouped(25)
        assert are_same([tensors_of(batch) for batch in grouped], plain)
        waited = grouped.counters()["sample"].waiting_most
    grouped.close()
    free = _grouped(25)
    for _ in free:
        pass
    assert waited < free.counters()["sample"].waiting_most == 25
    free.close()


def test_groups_need_a_thread():
    with pytest.raises(ValueError, match="group=4 needs a thread that samples"):
        _grouped(4, num_threads=0)
    with pytest.raises(ValueError, match="group=4 needs a thread that samples"):
        _grouped(4, num_threads=0, pipeline=PipelineOptions(group=4, threads={"sample": 2}))
    with pytest.raises(ValueError, match="group=4 needs a thread that samples"):
        _grouped(4, pipeline=PipelineOptions(group=4, threads={"sample": 0}))
    with pytest.raises(ValueError, match="group must be >= 0"):
        PipelineOptions(group=-1)
