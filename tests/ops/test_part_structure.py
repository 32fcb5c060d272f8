"""Tables and graphs in several parts against the same in one piece: gather_parts, sample_parts, expand_indptr."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, PartedCSC, expand_indptr, gather_parts, sample_neighbors, sample_parts

FEW = torch.tensor([0, 0, 150, 150, 270, 400])  # with empty parts
MANY = torch.cat([torch.arange(0, 400, 9), torch.tensor([400])])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cut(rows: Tensor, bounds: Tensor) -> dict[int, Tensor]:
    ends = bounds.tolist()
    return {p: rows[ends[p] : ends[p + 1]].clone() for p in range(len(ends) - 1)}


@pytest.mark.parametrize("bounds", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (64,), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_rows_of_parts_are_gathered_as_if_they_were_one_table(dtype, shape, id_dtype, bounds, threads):
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 2 if dtype == torch.bool else 99, (400, *shape), generator=g).to(dtype)
    ids = torch.randint(0, 400, (70_000 if shape == () else 5_000,), generator=g).to(id_dtype)
    out = torch.empty((ids.numel(), *shape), dtype=dtype)
    assert torch.equal(gather_parts(cut(rows, bounds), ids, bounds, out), rows[ids.long()])


def test_rows_go_where_they_are_told_and_those_of_absent_parts_are_left_alone(threads):
    g = torch.Generator().manual_seed(2)
    rows, ids = torch.randn(400, 20, generator=g), torch.randint(0, 400, (6_000,), generator=g)
    at, out = torch.randperm(7_000, generator=g)[:6_000], torch.full((7_000, 20), -7.0, dtype=torch.bfloat16)
    parts = cut(rows, FEW)
    del parts[3]
    expected = out.clone()
    here = (ids < 150) | (ids >= 270)
    expected[at[here]] = rows[ids[here]].bfloat16()
    assert torch.equal(gather_parts(parts, ids, FEW, out, at), expected)


@pytest.mark.parametrize(
    ("parts", "ids", "out", "at", "message"),
    [
        ({0: 2, 1: 1}, [0, 3], 2, None, r"ids must be in \[0, 3\), got 3"),
        ({0: 2, 1: 2}, [0], 1, None, "part 1 must have 1 rows, got 2"),
        ({2: 1}, [0], 1, None, r"parts must be in \[0, 2\), got 2"),
        ({}, [0], 1, None, "at least one part"),
        ({0: 2, 1: 1}, [0], 2, None, "out must have 1 rows"),
        ({0: 2, 1: 1}, [0], 2, [2], r"at must be in \[0, 2\)"),
        ({0: 2, 1: 1}, [0], 2, [0, 1], "at must name a row of out per id"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, ids, out, at, message):
    sources = {p: torch.zeros(n, 4) for p, n in parts.items()}
    place = None if at is None else torch.tensor(at)
    with pytest.raises(ValueError, match=message):
        gather_parts(sources, torch.tensor(ids), torch.tensor([0, 2, 3]), torch.zeros(out, 4), place)


def parted(csc: CSC, bounds: Tensor, original: Tensor, halo_dtype: torch.dtype) -> PartedCSC:
    """The CSC cut at `bounds`, its sources in local ids."""
    indptr, indices, halos = [], [], []
    ends = bounds.tolist()
    for begin, end in pairwise(ends):
        first = csc.indptr[begin]
        sources = csc.indices[int(first) : int(csc.indptr[end])].long()
        is_core = (sources >= begin) & (sources < end)
        halo = sources[~is_core].unique()
        local = torch.where(is_core, sources - begin, torch.searchsorted(halo, sources) + end - begin)
        indptr.append(csc.indptr[begin : end + 1] - first)
        indices.append(local.int())
        halos.append(halo.to(halo_dtype))
    originals = [original[begin:end] for begin, end in pairwise(ends)]
    return PartedCSC(indptr, indices, originals, halos, bounds, bounds, csc.indptr[bounds])


def random_csc() -> tuple[CSC, Tensor]:
    g = torch.Generator().manual_seed(3)
    edges = torch.randint(0, 400, (2, 6_000), generator=g)
    edges[1, :500] = 17  # a node of many edges
    return CSC.from_edge_index(edges, 400, 400, narrow=True), torch.randperm(400, generator=g)


@pytest.mark.parametrize("bounds", [FEW, MANY, torch.tensor([0, 400])], ids=["few", "many", "one"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fanout", [-1, 0, 1, 7, 40])
@pytest.mark.parametrize("replace", [False, True])
def test_a_parted_graph_is_sampled_as_if_it_were_whole(fanout, replace, wide, bounds, threads):
    csc, original = random_csc()
    dtype = torch.int64 if wide else torch.int32
    seeds = torch.randint(0, 400, (1_500,), generator=torch.Generator().manual_seed(4)).to(dtype)
    tree = torch.arange(seeds.numel()) if wide else None
    rng_ids = original[seeds.long()]
    whole = sample_neighbors(csc, seeds.int(), fanout, key=9, replace=replace, tree=tree, rng_ids=rng_ids)
    parts = parted(csc, bounds, original.to(dtype), dtype)
    found = sample_parts(parts, seeds, fanout, key=9, replace=replace, tree=tree, wide=wide)
    assert found.ids.dtype == dtype and torch.equal(found.ids.long(), whole.ids.long())
    assert torch.equal(found.indptr, whole.indptr) and torch.equal(found.positions, whole.positions)


def test_parts_that_are_broken_are_refused_not_read():
    csc, original = random_csc()
    parts, seeds = parted(csc, FEW, original, torch.int32), torch.arange(400)
    beyond = [indices.clone() for indices in parts.indices]
    beyond[4][0] = 400
    with pytest.raises(ValueError, match="some name neither"):
        sample_parts(parts._replace(indices=beyond), seeds, -1, key=1, wide=False)
    torn = [indptr.clone() for indptr in parts.indptr]
    torn[1][5] = -1
    with pytest.raises(ValueError, match="indptr must ascend"):
        sample_parts(parts._replace(indptr=torn), seeds, 2, key=1, wide=False)
    with pytest.raises(ValueError, match=r"seeds must be in \[0, 400\)"):
        sample_parts(parts, torch.tensor([400]), 2, key=1, wide=False)
    with pytest.raises(ValueError, match="part 1 must have 149 columns, got 150"):
        moved = torch.tensor([0, 0, 149, 149, 270, 400])
        sample_parts(parts._replace(dst_bounds=moved), seeds, 2, key=1, wide=False)


def test_columns_are_written_out_edge_by_edge(threads):
    counts = torch.randint(0, 5, (20_000,), generator=torch.Generator().manual_seed(5))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    out = torch.empty(int(indptr[-1]), dtype=torch.int64)
    assert torch.equal(expand_indptr(indptr, 7, out), torch.repeat_interleave(torch.arange(7, 20_007), counts))
    with pytest.raises(ValueError, match="indptr must go from 0 to"):
        expand_indptr(indptr, 7, out[1:])
