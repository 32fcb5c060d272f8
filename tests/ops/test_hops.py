"""`sample_hops` without a device: what it is given, what it says of its results and of its memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gnnsys.ops import CSC, HopRelation, HopStructure, JoinedParts, native, workspace_bytes

EDGES = torch.tensor([[0, 1, 2, 2, 3], [1, 0, 2, 0, 1]])


def structure() -> HopStructure:
    """Types of 4 and 3 nodes; edges of the second relation come by destination, those of the third are in two parts."""
    mixed = CSC.from_edge_index(EDGES, 4, 3, narrow=True)
    ordered = CSC.from_edge_index(EDGES[:, EDGES[1].argsort(stable=True)], 4, 4)
    bounds = torch.tensor([[0, 2, 3], [0, 1, 2]])
    local = [torch.zeros(1, dtype=torch.int32)] * 2
    parts = JoinedParts(torch.tensor([0, 1, 1, 2, 2]), local, [torch.tensor([2]), torch.tensor([0])], bounds)
    return HopStructure([HopRelation(mixed, 0, 1), HopRelation(ordered, 0, 0), HopRelation(parts, 1, 0)], [4, 3])


def test_a_structure_lists_relations_and_what_kernels_read():
    made = structure()
    indptr, indices, num_parts, halo, bounds, edge_ids, original, ends, num_nodes = made.arguments
    assert (num_parts, ends, num_nodes, original) == ([0, 0, 2], [0, 1, 0, 0, 1, 0], [4, 3], [])
    assert (len(indptr), len(indices), len(halo), len(bounds)) == (3, 4, 2, 1)
    assert [ids.numel() for ids in edge_ids] == [5, 0, 0]  # without ids of their own, edges are known by position
    read = {t.data_ptr() for t in made.tensors if t.numel()}
    assert read >= {t.data_ptr() for t in (*indptr, *indices, *halo, edge_ids[0])}
    assert bounds[0].data_ptr() not in read  # the host alone reads it


@pytest.mark.parametrize("labor", [False, True])
def test_results_have_their_shapes_before_there_are_any(labor: bool):
    arguments = structure().arguments
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        seeds = [torch.arange(2), torch.arange(1)]
        on = torch.empty(0, device="cuda")
        given = (*arguments, seeds, [2] * 6, [1] * 6, False, labor, on)
        nodes, edge_index, edge_ids, counts, weight = native.sample_hops(*given)
        assert [t.dim() for t in (*nodes, *edge_index, *edge_ids)] == [1, 1, 2, 2, 2, 1, 1, 1]
        assert {t.dtype for t in (*nodes, *edge_index, *edge_ids, counts)} == {torch.int64}
        assert {t.device.type for t in (*nodes, *edge_index, *edge_ids, *weight)} == {"cuda"}
        assert counts.is_cpu and counts.numel() == 2 * 3 + 3 * 2
        assert [t.dtype for t in weight] == [torch.float32] * (3 if labor else 0)


def stated(num_relations: int, num_hops: int, num_seeds: int = 100, **options: int) -> int:
    csc = CSC.from_edge_index(EDGES, 4, 4, narrow=True)
    made = HopStructure([HopRelation(csc, r % 2, 0) for r in range(num_relations)], [4, 4])
    size = num_relations * num_hops
    seeds = [torch.zeros(num_seeds, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
    given = (*made.arguments, seeds, [3] * size, [1] * size, False, False, None)
    return workspace_bytes("sample_hops", *given, device="cuda", **options)


def test_memory_grows_with_seeds_relations_and_hops_and_is_bounded_by_the_edges_found():
    assert 0 < stated(1, 1) < stated(2, 1) < stated(2, 2) < stated(2, 2, num_seeds=200)
    assert stated(2, 3, num_found=500) < stated(2, 3, num_found=900) < stated(2, 3)
