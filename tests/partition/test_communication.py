"""The communication objective against sets of (node, part) pairs, and its invariants over many random graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnsys.graph.datasets import available_datasets, dataset
from gnnsys.graph.generate import rmat
from gnnsys.ops import CSC
from gnnsys.ops.partition_volume import REFINE_STOPPED, even_out_volume, refine_volume, volume_changes
from gnnsys.partition import communication_volume, refine_communication
from tests.support.grid import grid


def brute_force(csc: CSC, part: Tensor, num_parts: int) -> np.ndarray:
    """The traffic matrix by its definition: the set of (node, part that needs it) pairs."""
    dst = part[csc.dst()].tolist()
    pairs = {(u, q) for u, q in zip(csc.indices.tolist(), dst, strict=True) if part[u] != q}
    matrix = np.zeros((num_parts, num_parts), dtype=np.int64)
    for u, q in pairs:
        matrix[part[u], q] += 1
    return matrix


def random_case(seed: int) -> tuple[CSC, Tensor, int]:
    """Hubs, loops, repeated edges, isolated nodes, empty parts; sometimes more parts than nodes, or than 64."""
    generator = torch.Generator().manual_seed(seed)
    num_nodes = int(torch.randint(1, 120, (), generator=generator))
    num_edges = int(torch.randint(0, 8 * num_nodes, (), generator=generator))
    num_parts = [1, 2, 3, 5, 8, 64, 65, 150][seed % 8]
    unit = torch.rand(2, num_edges, generator=generator) ** 2
    dtype = torch.int32 if seed % 2 else torch.int64
    csc = CSC.from_edge_index((unit * num_nodes).to(dtype), num_nodes)
    part = torch.randint(0, num_parts, (num_nodes,), generator=generator, dtype=torch.int32)
    return csc, part, num_parts


def constraints(csc: CSC, part: Tensor, num_parts: int, seed: int = 0, slack: float = 1.2) -> tuple[Tensor, Tensor]:
    """Nodes, in-edges and a random subset, each with its own limit per part: never below what the part weighs."""
    generator = torch.Generator().manual_seed(1000 + seed)
    chosen = torch.randint(0, 2, (csc.num_dst,), generator=generator)
    weights = torch.stack([torch.ones_like(chosen), csc.in_degrees(), chosen])
    now = totals(weights, part, num_parts)
    perfect = (slack * weights.sum(1, keepdim=True) / num_parts).ceil().long()
    return weights, torch.maximum(now, perfect)


def totals(weights: Tensor, part: Tensor, num_parts: int) -> Tensor:
    """int64 [C, num_parts]."""
    return torch.zeros(weights.shape[0], num_parts, dtype=torch.int64).index_add_(1, part.long(), weights)


def communities(num_nodes: int = 2000, num_edges: int = 16_000, seed: int = 0) -> CSC:
    """Three edges of four between neighbours on a ring, so that there is something to find."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    near = (src + torch.randint(-20, 21, (num_edges,), generator=generator)) % num_nodes
    far = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    dst = torch.where(torch.rand(num_edges, generator=generator) < 0.75, near, far)
    return CSC.from_edge_index(torch.stack([src, dst]), num_nodes)


def random_part(num_nodes: int, num_parts: int, seed: int = 0) -> Tensor:
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    return (order % num_parts).int()


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@grid(seed=range(16))
def test_the_traffic_matrix_counts_each_pair_of_node_and_remote_part_once(seed):
    csc, part, num_parts = random_case(seed)
    sent, received, matrix = communication_volume(csc, part, num_parts)
    expected = brute_force(csc, part, num_parts)
    assert np.array_equal(matrix.numpy(), expected)
    assert np.array_equal(sent.numpy(), expected.sum(1)) and np.array_equal(received.numpy(), expected.sum(0))


@grid(seed=range(5))
def test_the_change_of_volume_foreseen_for_a_move_is_what_the_move_does(seed):
    csc, part, num_parts = random_case(seed)
    foreseen = volume_changes(csc, part, num_parts)
    before = brute_force(csc, part, num_parts).sum()
    generator = torch.Generator().manual_seed(seed)
    for v in torch.randperm(csc.num_dst, generator=generator)[:8].tolist():
        for q in torch.randperm(num_parts, generator=generator)[:4].tolist():
            moved = part.clone()
            moved[v] = q
            assert foreseen[v, q] == brute_force(csc, moved, num_parts).sum() - before


def test_the_traffic_matrix_is_the_same_for_any_number_of_threads(one_thread):
    csc = rmat(50_000, 400_000).csc()
    part = random_part(csc.num_dst, 70)
    alone = communication_volume(csc, part, 70).matrix
    torch.set_num_threads(3)
    assert torch.equal(communication_volume(csc, part, 70).matrix, alone)


def test_a_graph_without_nodes_has_no_volume_and_nothing_to_refine():
    csc = CSC.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0)
    nobody = torch.zeros(0, dtype=torch.int32)
    result = refine_communication(csc, nobody, 4, torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]))
    assert result.after.total == 0 and result.part.numel() == 0
    assert result.after.imbalance == 1.0


@grid(seed=range(9))
def test_refining_keeps_every_limit_and_neither_adds_volume_nor_load(seed):
    csc, part, num_parts = random_case(seed)
    weights, limits = constraints(csc, part, num_parts, seed, slack=[1.0, 1.05, 1.5][seed % 3])
    result = refine_communication(csc, part, num_parts, weights, limits, slack=0.05, seed=seed)
    assert result.part.dtype == torch.int32 and 0 <= int(result.part.min()) <= int(result.part.max()) < num_parts
    assert (totals(weights, result.part, num_parts) <= limits).all()
    assert result.refined.total <= result.before.total
    assert result.after.load.max() <= result.refined.load.max()
    assert result.after.total <= 1.05 * result.refined.total
    assert np.array_equal(result.after.matrix.numpy(), brute_force(csc, result.part, num_parts))


@grid(seed=range(6))
def test_the_loads_kept_move_by_move_equal_a_recount(seed):
    csc, part, num_parts = random_case(seed)
    weights, limits = constraints(csc, part, num_parts, seed)
    first = refine_volume(csc, part, num_parts, weights, limits, key=seed)
    second = even_out_volume(csc, part, num_parts, weights, limits, tolerance=0.0, slack=0.5, key=seed)
    for run in (first, second):
        sent, received, _ = communication_volume(csc, run.part, num_parts)
        assert torch.equal(run.loads, torch.stack([sent, received]))


def test_without_slack_evening_out_adds_no_volume():
    csc = communities()
    part = (torch.arange(csc.num_dst) * 4 // csc.num_dst).int()
    weights, limits = constraints(csc, part, 4)
    run = even_out_volume(csc, part, 4, weights, limits, tolerance=0.0, slack=0.0, key=1)
    assert run.num_moves > 0
    assert int(run.loads[0].sum()) <= communication_volume(csc, part, 4).total


def test_a_random_assignment_of_a_graph_with_structure_loses_most_of_its_volume():
    csc = communities()
    part = random_part(csc.num_dst, 4)
    weights, limits = constraints(csc, part, 4, slack=1.05)
    result = refine_communication(csc, part, 4, weights, limits)
    assert result.num_moves > 0 and result.num_swaps > 0
    assert result.refined.total < 0.7 * result.before.total


def test_the_result_is_the_same_for_any_number_of_threads(one_thread):
    csc = rmat(1500, 15_000).csc()
    part = random_part(csc.num_dst, 8)
    weights, limits = constraints(csc, part, 8, slack=1.05)
    alone = refine_communication(csc, part, 8, weights, limits, seed=3)
    torch.set_num_threads(2)
    together = refine_communication(csc, part, 8, weights, limits, seed=3)
    assert torch.equal(alone.part, together.part)
    assert (alone.num_moves, alone.num_swaps, alone.stopped) == (
        together.num_moves,
        together.num_swaps,
        together.stopped,
    )


def test_an_assignment_above_its_limits_is_brought_below_them():
    csc = rmat(2000, 20_000).csc()
    part = random_part(csc.num_dst, 6)
    part[:1000] = 0  # half the nodes in one part
    weights, _ = constraints(csc, part, 6)
    limits = (1.05 * weights.sum(1) / 6).ceil().long()
    assert (totals(weights, part, 6) > limits.unsqueeze(1)).any()
    result = refine_communication(csc, part, 6, weights, limits)
    assert (totals(weights, result.part, 6) <= limits.unsqueeze(1)).all()


def test_nodes_that_may_not_change_places_stay_and_evening_out_says_that_nothing_improves():
    # A star whose hub feeds every other part. Each node weighs in a constraint of its own, which its part alone allows.
    csc = CSC.from_edge_index(torch.tensor([[0, 0, 0], [1, 2, 3]]), 4)
    part = torch.arange(4, dtype=torch.int32)
    weights = torch.eye(4, dtype=torch.int64)
    result = refine_communication(csc, part, 4, weights, weights.clone())
    assert torch.equal(result.part, part)
    assert result.stopped == "no improvement"


def test_loads_that_agree_end_the_search_as_balanced():
    csc = rmat(4000, 40_000).csc()
    part = random_part(csc.num_dst, 4)
    weights, limits = constraints(csc, part, 4, slack=1.05)
    result = refine_communication(csc, part, 4, weights, limits)
    assert result.stopped == "balanced"
    load = result.after.load
    assert int(load.max() - load.min()) <= 0.005 * int(load.max())
    untouched = even_out_volume(csc, result.part, 4, weights, limits, tolerance=0.005, slack=0.05, key=0)
    assert untouched.stopped == "balanced" and untouched.num_moves == 0
    assert torch.equal(untouched.part, result.part)


def test_a_volume_that_falls_to_nothing_has_converged():
    csc = CSC.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), 4)
    weights = torch.ones(1, 4, dtype=torch.int64)
    part = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    run = refine_volume(csc, part, 2, weights, torch.tensor([[3, 3]]), key=0)
    assert run.stopped == "converged" and int(run.loads.sum()) == 0
    assert run.part[0] == run.part[1] and run.part[2] == run.part[3]


def test_the_stages_are_reported_as_they_start():
    csc, part, num_parts = random_case(3)
    weights, limits = constraints(csc, part, num_parts)
    stages: list[str] = []
    refine_communication(csc, part, num_parts, weights, limits, progress=stages.append)
    assert stages == ["volume", "even out"]
    stages.clear()
    result = refine_communication(csc, part, num_parts, weights, limits, even_out=False, progress=stages.append)
    assert stages == ["volume"]
    assert result.stopped in REFINE_STOPPED
    assert torch.equal(result.refined.matrix, result.after.matrix)


def test_a_search_that_still_gains_when_its_work_is_used_up_says_so():
    csc = communities(1000, 8000)
    part = random_part(csc.num_dst, 8)
    weights, limits = constraints(csc, part, 8, slack=1.05)
    run = refine_volume(csc, part, 8, weights, limits, key=0)
    assert run.stopped == "out of work"
    again = refine_volume(csc, run.part, 8, weights, limits, key=1)
    assert int(again.loads[0].sum()) < int(run.loads[0].sum())

    csc = communities(1000, 20_000)
    part = random_part(csc.num_dst, 8)
    part[:333] = 0  # limits follow the parts, so that this one may stay as large as it is
    weights, limits = constraints(csc, part, 8, slack=1.0)
    run = even_out_volume(csc, part, 8, weights, limits, tolerance=0.0, slack=0.0, key=0)
    assert run.stopped == "out of work"
    assert run.loads.max() < communication_volume(csc, part, 8).load.max()


@pytest.mark.long
@pytest.mark.skipif("pubmed" not in available_datasets(), reason="no pubmed in $GNNSYS_DATA")
def test_on_a_real_graph_loads_fall_below_those_of_metis_at_about_its_volume():
    pymetis = pytest.importorskip("pymetis")
    csc = dataset("pubmed").csc()  # both directions are stored
    weights = torch.stack([torch.ones(csc.num_dst, dtype=torch.int64), csc.in_degrees()])
    adjacency = pymetis.CSRAdjacency(csc.indptr.numpy(), csc.indices.long().numpy())

    def metis(objective: int) -> Tensor:
        options = pymetis.Options(objtype=objective)
        vertex_weights = (1 + csc.in_degrees()).tolist()
        return torch.tensor(
            pymetis.part_graph(8, adjacency, vweights=vertex_weights, options=options, recursive=False).vertex_part,
            dtype=torch.int32,
        )

    edge_cut, volume = metis(0), metis(1)
    theirs = communication_volume(csc, volume, 8)
    limits = (1.05 * weights.sum(1) / 8).floor().long()
    assert (totals(weights, volume, 8)[0] > limits[0]).any()  # METIS balances one weight: nodes differ by 20%
    result = refine_communication(csc, edge_cut, 8, weights, limits)
    assert (totals(weights, result.part, 8) <= limits.unsqueeze(1)).all()
    assert result.refined.total <= 1.1 * theirs.total
    assert result.after.load.max() < theirs.load.max()
    assert result.after.imbalance < theirs.imbalance


@pytest.mark.parametrize(
    "change,message",
    [
        ({"part": torch.tensor([0, 1, 2], dtype=torch.int32)}, r"part must be in \[0, 2\), got 2"),
        ({"part": torch.tensor([0, 1, 1])}, "part must be Int"),
        ({"part": torch.tensor([0, 1], dtype=torch.int32)}, "one entry per node, 3, got 2"),
        ({"num_parts": 0}, "num_parts must be in"),
        ({"weights": torch.ones(1, 4, dtype=torch.int64)}, r"weights must be int64 \[num_constraints, 3\]"),
        ({"weights": torch.tensor([[1, -1, 1]])}, "weights must be >= 0, got -1 for node 1"),
        ({"limits": torch.tensor([[1, 2, 3]])}, r"limits must be int64 \[1\] or \[1, 2\]"),
        ({"slack": -1.0}, "tolerance and slack must be >= 0"),
        ({"csc": CSC(torch.tensor([0, 0, 0, 1]), torch.tensor([3]), 4)}, "from a set of nodes to itself"),
        ({"csc": CSC(torch.tensor([0, 0, 0, 1]), torch.tensor([3]), 3)}, r"indices must be in \[0, 3\)"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "csc": CSC.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3),
        "part": torch.tensor([0, 1, 1], dtype=torch.int32),
        "num_parts": 2,
        "weights": torch.ones(1, 3, dtype=torch.int64),
        "limits": torch.tensor([2]),
    }
    with pytest.raises(ValueError, match=message):
        refine_communication(**{**arguments, **change})
