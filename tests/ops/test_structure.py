"""Structure ops against a stable sort, scipy and networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor

from gnnsys.ops import CSC, bfs_order, degrees, expand_indptr, in_subgraph, induced_subgraph
from gnnsys.ops._library import native
from tests.support.grid import grid

# Below and above the size at which the native core switches from a counting sort to buckets.
SIZES = [(1, 1, 0), (1, 1, 3), (7, 5, 40), (300, 2000, 50_000), (70_001, 1009, 200_000), (3, 150_000, 300_000)]
DTYPES = [torch.int32, torch.int64]


def random_edges(num_src: int, num_dst: int, num_edges: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Squared uniforms: low ids are hubs, high ids mostly have no edge."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(2, num_edges, generator=generator, dtype=torch.float64) ** 2
    return (unit * torch.tensor([[num_src], [num_dst]])).to(dtype)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_src,num_dst,num_edges", SIZES)
@grid(dtype=DTYPES)
def test_coo_to_csc_is_a_stable_sort_by_destination(num_src, num_dst, num_edges, dtype, threads):
    src, dst = random_edges(num_src, num_dst, num_edges, dtype)
    csc = CSC.from_edge_index(torch.stack([src, dst]), num_src, num_dst)
    order = torch.sort(dst, stable=True).indices
    assert csc.indices.dtype == dtype
    assert torch.equal(csc.indices, src[order])
    assert torch.equal(csc.indptr.diff(), torch.bincount(dst, minlength=num_dst))
    if csc.edge_ids is None:
        assert torch.equal(order, torch.arange(num_edges))
    else:
        assert csc.edge_ids.dtype == dtype
        assert torch.equal(csc.edge_ids.long(), order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_src,num_dst,num_edges", SIZES)
def test_transpose_agrees_with_scipy_and_names_positions(num_src, num_dst, num_edges, dtype, threads):
    csc = CSC.from_edge_index(random_edges(num_src, num_dst, num_edges, dtype), num_src, num_dst)
    turned = csc.transpose()
    # Data = position + 1, so that scipy carries the positions through its own transpose; duplicates are kept.
    data = np.arange(1, num_edges + 1)
    theirs = scipy.sparse.csc_matrix((data, csc.indices.numpy(), csc.indptr.numpy()), shape=(num_src, num_dst)).tocsr()
    assert turned.num_src == num_dst and turned.num_dst == num_src
    assert np.array_equal(turned.indptr.numpy(), theirs.indptr)
    assert np.array_equal(turned.indices.numpy(), theirs.indices)
    assert turned.edge_ids is not None and turned.edge_ids.dtype == dtype
    assert np.array_equal(turned.edge_ids.numpy(), theirs.data - 1)


def test_transposing_twice_gives_the_sorted_original():
    csc = CSC.from_edge_index(random_edges(500, 400, 6000, torch.int32), 500, 400)
    back = csc.transpose().transpose()
    keys = csc.dst() * csc.num_src + csc.indices
    assert torch.equal(back.indptr, csc.indptr)
    assert torch.equal(back.dst() * back.num_src + back.indices, keys.sort().values)


def test_edges_sorted_by_destination_need_no_edge_ids(threads):
    src, dst = random_edges(2000, 9000, 250_000, torch.int64)
    dst = dst.sort().values
    csc = CSC.from_edge_index(torch.stack([src, dst]), 2000, 9000)
    assert csc.edge_ids is None
    assert torch.equal(csc.indices, src)
    assert torch.equal(csc.dst(), dst)


def test_narrow_stores_int32_and_changes_nothing_else():
    edges = random_edges(900, 800, 200_000, torch.int64)
    wide, slim = CSC.from_edge_index(edges, 900, 800), CSC.from_edge_index(edges, 900, 800, narrow=True)
    assert slim.indices.dtype == torch.int32 and slim.edge_ids is not None and slim.edge_ids.dtype == torch.int32
    assert torch.equal(slim.indptr, wide.indptr)
    assert torch.equal(slim.indices.long(), wide.indices)
    assert torch.equal(slim.edge_ids.long(), wide.edge_ids)


def test_narrow_keeps_int64_where_node_ids_do_not_fit():
    edges = torch.tensor([[2**31, 5, 7], [1, 0, 1]])
    csc = CSC.from_edge_index(edges, 2**31 + 1, 2, narrow=True)
    assert csc.indices.tolist() == [5, 2**31, 7]


def test_an_id_that_would_wrap_into_range_is_refused_not_narrowed():
    with pytest.raises(ValueError, match=r"src must be in \[0, 10\), got 4294967301 at position 1"):
        CSC.from_edge_index(torch.tensor([[0, 2**32 + 5], [0, 1]]), 10, narrow=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("row,name", [(0, "src"), (1, "dst")])
def test_an_index_out_of_range_names_the_argument_and_the_value(row, name, bad, dtype, threads):
    edges = random_edges(10, 10, 400_000, dtype)
    edges[row, 399_990] = bad
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 10\), got {bad} at position 399990"):
        CSC.from_edge_index(edges, 10)


def test_malformed_edge_indices_are_refused():
    with pytest.raises(ValueError, match="shape"):
        CSC.from_edge_index(torch.zeros(3, 4, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="int64 or int32"):
        CSC.from_edge_index(torch.zeros(2, 4), 4)
    with pytest.raises(ValueError, match="num_src and num_dst"):
        CSC.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), -1)
    with pytest.raises(ValueError, match="equally long"):
        native.coo_to_csc(torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), 4, 4)
    with pytest.raises(ValueError, match="one dtype"):
        native.coo_to_csc(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), 4, 4)


@pytest.mark.parametrize(
    "indptr,indices,message",
    [
        ([0, 2, 1, 3], [0, 1, 2], "indptr must never decrease, got 2 then 1"),
        ([0, 9, 1, 3], [0, 1, 2], "indptr must never decrease"),
        ([1, 2, 3, 3], [0, 1, 2], "from 0"),
        ([0, 1, 2, 4], [0, 1, 2], "got 0 to 4"),
        ([0, 1, 2, 3], [0, 1, 4], r"indices must be in \[0, 4\), got 4 at position 2"),
        ([0, 1, 2, 3], [-1, 1, 2], r"indices must be in \[0, 4\), got -1 at position 0"),
        ([], [], "none"),
    ],
)
def test_a_broken_csc_is_refused_by_validate_and_transpose(indptr, indices, message):
    csc = CSC(torch.tensor(indptr, dtype=torch.int64), torch.tensor(indices, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=message):
        csc.validate()
    with pytest.raises(ValueError, match=message):
        csc.transpose()


@pytest.mark.parametrize("num_nodes,num_ids", [(0, 0), (5, 0), (1, 9), (1000, 400_000), (500_000, 200_000)])
@grid(dtype=DTYPES)
def test_degrees_count_occurrences(num_nodes, num_ids, dtype, threads):
    ids = random_edges(num_nodes, num_nodes, num_ids, dtype)[0]
    assert torch.equal(degrees(ids, num_nodes), torch.bincount(ids, minlength=num_nodes))


def test_degrees_refuses_an_id_out_of_range():
    with pytest.raises(ValueError, match=r"ids must be in \[0, 3\), got 3"):
        degrees(torch.tensor([0, 3]), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_subgraph_is_the_slices_of_the_nodes(dtype, threads):
    csc = CSC.from_edge_index(random_edges(900, 700, 9000, dtype), 900, 700)
    nodes = torch.randint(700, (2000,))  # with repeats
    part = in_subgraph(csc, nodes)
    bounds = list(zip(csc.indptr[nodes].tolist(), csc.indptr[nodes + 1].tolist(), strict=True))
    expected = torch.cat([torch.arange(begin, end) for begin, end in bounds])
    assert part.edge_ids is not None
    assert torch.equal(part.edge_ids.long(), expected)
    assert torch.equal(part.indices, csc.indices[expected])
    assert part.in_degrees().tolist() == [end - begin for begin, end in bounds]


@pytest.mark.parametrize("dtype", DTYPES)
def test_induced_subgraph_is_scipys_slice_of_rows_and_columns(dtype, threads):
    csc = CSC.from_edge_index(random_edges(700, 700, 20_000, dtype), 700).transpose()
    nodes = torch.randperm(700)[:300].to(torch.int32)
    part = induced_subgraph(csc, nodes)
    matrix = scipy.sparse.csc_matrix((np.ones(20_000), csc.indices.numpy(), csc.indptr.numpy()), shape=(700, 700))
    theirs = matrix[nodes.numpy()][:, nodes.numpy()].toarray()
    ours = scipy.sparse.csc_matrix((np.ones(part.num_edges), part.indices.numpy(), part.indptr.numpy()), (300, 300))
    assert np.array_equal(ours.toarray(), theirs) and part.num_edges > 1000
    assert part.edge_ids is not None
    positions = part.edge_ids.long()
    assert torch.equal(nodes[part.indices], csc.indices[positions].int())
    assert torch.equal(nodes[part.dst()].long(), csc.dst()[positions])


def test_induced_subgraph_between_two_types_looks_sources_up_in_their_own_list():
    csc = CSC.from_edge_index(random_edges(50, 80, 3000, torch.int64), 50, 80)
    dst_nodes, src_nodes = torch.randperm(80)[:30], torch.randperm(50)[:20]
    part = induced_subgraph(csc, dst_nodes, src_nodes)
    keep = torch.isin(csc.indices, src_nodes) & torch.isin(csc.dst(), dst_nodes)
    assert part.num_src == 20 and part.num_dst == 30
    assert part.edge_ids is not None
    assert torch.equal(part.edge_ids.sort().values, keep.nonzero().view(-1))
    assert torch.equal(src_nodes[part.indices], csc.indices[part.edge_ids])


def test_every_copy_of_a_node_gets_the_same_in_edges_in_an_induced_subgraph():
    csc = CSC.from_edge_index(random_edges(40, 40, 600, torch.int32), 40)
    nodes = torch.tensor([5, 1, 5, 0, 1, 5])
    part = induced_subgraph(csc, nodes)
    columns = [part.indices[part.indptr[i] : part.indptr[i + 1]].tolist() for i in range(6)]
    assert columns[0] == columns[2] == columns[5] and columns[1] == columns[4]
    assert set(part.indices.tolist()) <= {0, 1, 3} and len(columns[0]) > 0


def test_bfs_order_visits_distances_in_order_and_every_node_once():
    num_nodes = 3000
    edges = random_edges(num_nodes, num_nodes, 4000, torch.int32)
    csc = CSC.from_edge_index(edges, num_nodes)
    roots = torch.tensor([17, 4, 17])
    order = bfs_order(csc, roots).tolist()
    assert sorted(order) == list(range(num_nodes)) and order[:2] == [17, 4]
    reverse = nx.DiGraph()
    reverse.add_nodes_from(range(num_nodes))
    reverse.add_edges_from(edges.flip(0).t().tolist())
    distance = nx.multi_source_dijkstra_path_length(reverse, {17, 4})
    reached = order[: len(distance)]
    assert set(reached) == set(distance) and 2 < len(distance) < num_nodes
    assert [distance[v] for v in reached] == sorted(distance.values())
    assert order[len(distance)] == min(set(range(num_nodes)) - set(distance))


def test_subgraphs_refuse_nodes_out_of_range():
    csc = CSC.from_edge_index(random_edges(9, 9, 30, torch.int32), 9)
    for op in (in_subgraph, induced_subgraph):
        with pytest.raises(ValueError, match=r"nodes must be in \[0, 9\), got 9"):
            op(csc, torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="src_nodes"):
        induced_subgraph(csc, torch.tensor([0]), torch.tensor([-3]))
    with pytest.raises(ValueError, match="roots"):
        bfs_order(csc, torch.tensor([-1]))
    with pytest.raises(ValueError, match="9 x 3"):
        bfs_order(CSC.from_edge_index(torch.zeros(2, 1, dtype=torch.int32), 9, 3), torch.tensor([0]))


def test_empty_selections_give_empty_parts():
    csc = CSC.from_edge_index(random_edges(9, 9, 30, torch.int32), 9)
    none = torch.empty(0, dtype=torch.int64)
    for op in (in_subgraph, induced_subgraph):
        assert op(csc, none).indptr.tolist() == [0] and op(csc, none).num_edges == 0
    assert bfs_order(csc, none).sort().values.tolist() == list(range(9))


def test_structure_ops_have_schemas_and_fake_kernels():
    csc = CSC.from_edge_index(random_edges(20, 30, 200, torch.int32), 20, 30)
    src, dst = random_edges(20, 30, 200, torch.int32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(native.coo_to_csc.default, (src, dst, 20, 30), test_utils=checks)
    torch.library.opcheck(native.transpose.default, (csc.indptr, csc.indices, 20), test_utils=checks)
    torch.library.opcheck(native.degrees.default, (src, 20), test_utils=checks)
    torch.library.opcheck(native.validate_csc.default, (csc.indptr, csc.indices, 20), test_utils=checks)
    square = CSC.from_edge_index(random_edges(20, 20, 200, torch.int32), 20)
    nodes = torch.tensor([3, 1, 4])
    torch.library.opcheck(native.in_subgraph.default, (csc.indptr, csc.indices, nodes), test_utils=checks)
    torch.library.opcheck(native.induced_subgraph.default, (csc.indptr, csc.indices, nodes), test_utils=checks)
    torch.library.opcheck(native.bfs_order.default, (square.indptr, square.indices, nodes), test_utils=checks)


@pytest.mark.parametrize("op", [in_subgraph, induced_subgraph, bfs_order], ids=lambda op: op.__name__)
@pytest.mark.parametrize("indptr", [[0, 10**9, 2], [0, -1, 2]])
def test_an_indptr_that_leaves_the_indices_is_refused(op, indptr):
    with pytest.raises(ValueError, match="indptr"):
        op(CSC(torch.tensor(indptr), torch.tensor([0, 1]), 2), torch.tensor([0]))


def test_columns_are_counted_from_first_and_never_beyond_int64():
    indptr, out = torch.tensor([0, 2, 2, 3]), torch.empty(3, dtype=torch.int64)
    assert expand_indptr(indptr, 5, out).tolist() == [5, 5, 7]
    with pytest.raises(ValueError, match="first must leave room for 3 columns"):
        expand_indptr(indptr, 2**63 - 2, out)
