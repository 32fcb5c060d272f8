"""Batches that are made one after the other: those of the pipeline, and samples that are made once for two loaders."""

from __future__ import annotations

import pytest
import torch

import gnnsys
from gnnsys.graph import sbm
from gnnsys.loader import Batch, KeptSamples, NeighborLoader, in_turn
from gnnsys.sampling import NeighborSampler

NUM_BATCHES = 6


def made_loader(graph: gnnsys.Graph) -> NeighborLoader:
    return NeighborLoader(graph, [4, 3], input_nodes=torch.arange(300), batch_size=50, shuffle=True, seed=5)


def assert_same(one: Batch, other: Batch) -> None:
    for name in ("n_id", "edge_index", "e_id", "x", "y", "input_id"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_of_kept_samples_are_those_of_the_pipeline_and_are_not_sampled_again(ahead: int, monkeypatch):
    graph, samples = sbm(1000, seed=1), KeptSamples()
    expected = list(made_loader(graph))
    first = [made.batch for made in in_turn(made_loader(graph), NUM_BATCHES, samples=samples)]
    loader = made_loader(graph)
    monkeypatch.setattr(NeighborSampler, "sample", None)  # whoever samples now fails
    again = list(in_turn(loader, NUM_BATCHES, ahead=ahead, samples=samples))
    assert len(again) == len(expected) == NUM_BATCHES
    for made, one, other in zip(again, first, expected, strict=True):
        assert_same(made.batch, one)
        assert_same(made.batch, other)
        assert "sample" not in made.seconds and "fetch" in made.seconds


def test_samples_that_have_no_room_are_made_again():
    graph = sbm(1000, seed=1)
    whole = KeptSamples()
    first = [made.batch for made in in_turn(made_loader(graph), NUM_BATCHES, samples=whole)]
    size = sum(tensor.nbytes for kept in whole._kept.values() for tensor in kept.tensors())
    few = KeptSamples(size // 2)
    list(in_turn(made_loader(graph), NUM_BATCHES, samples=few))
    again = list(in_turn(made_loader(graph), NUM_BATCHES, samples=few))
    sampled = ["sample" in made.seconds for made in again]
    assert any(sampled) and not all(sampled)
    for made, one in zip(again, first, strict=True):
        assert_same(made.batch, one)
