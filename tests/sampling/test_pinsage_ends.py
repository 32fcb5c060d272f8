"""PinSAGE where a hop finds nothing new, or has nobody to start from."""

from __future__ import annotations

import pytest
import torch

from gnnsys.graph import NODE, Graph
from gnnsys.sampling import PinSAGESampler, SampleKey

GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 4)  # node 3 is alone


@pytest.mark.parametrize("seeds", [[0, 1, 2, 3], [3], []], ids=["all nodes", "a node alone", "none"])
def test_a_hop_without_anything_new_is_an_empty_one(seeds: list[int]) -> None:
    sampler = PinSAGESampler(GRAPH, [2, 2], num_walks=3, length=2)
    sample = sampler.sample({NODE: torch.tensor(seeds, dtype=torch.int64)}, key=SampleKey())
    assert sample.node[NODE].tolist() == seeds
    assert sample.num_sampled_nodes[NODE] == [len(seeds), 0, 0]
