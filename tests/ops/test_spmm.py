"""spmm and sddmm equal the dense matrix product, forward and backward, whatever the structure, dtype or threads."""

import weakref

import pytest
import torch

from gnnsys.ops import CSC, sddmm, spmm, spmm_add
from gnnsys.ops._library import native
from tests.ops.graphs import GRAPHS, dense, gradients_are_right, random_csc
from tests.support.grid import grid

ALL_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 4, 7, 16, 37, 64, 100, 128, 131]


@pytest.fixture(params=GRAPHS, ids=str)
def csc(request) -> CSC:
    return GRAPHS[request.param]()


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = False) -> torch.Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.requires_grad_(grad)


def reference(csc: CSC, x: torch.Tensor, weight: torch.Tensor | None, reduce: str) -> torch.Tensor:
    """Dense: x [num_src, heads, d], weight [num_edges, heads] or None."""
    num_dst, heads, d = csc.num_dst, x.shape[1], x.shape[2]
    weight = x.new_ones(csc.num_edges, heads) if weight is None else weight
    if reduce in ("sum", "mean"):
        if heads == 0 or csc.num_dst == 0:
            return x.new_zeros(num_dst, heads, d)
        out = torch.stack([dense(csc, weight[:, h]) @ x[:, h] for h in range(heads)], dim=1)
        return out / csc.in_degrees().clamp(min=1)[:, None, None] if reduce == "mean" else out
    messages = x[csc.indices.long()] * weight[:, :, None]
    rows = messages.split(csc.in_degrees().tolist()) if num_dst else []
    best = torch.amax if reduce == "max" else torch.amin
    return torch.stack([best(r, 0) if len(r) else x.new_zeros(heads, d) for r in rows]) if rows else x[:0]


@grid(reduce=["sum", "mean", "max", "min"], weighted=[False, True], width=WIDTHS)
def test_spmm_equals_the_dense_product_at_every_width(width, weighted, reduce):
    csc = random_csc(50, 20, 400)
    x, weight = randn(50, width), randn(400, seed=1) if weighted else None
    expected = reference(csc, x[:, None], None if weight is None else weight[:, None], reduce)[:, 0]
    torch.testing.assert_close(spmm(csc, x, weight, reduce), expected)


@grid(reduce=["sum", "mean", "max", "min"])
def test_spmm_equals_the_dense_product_on_every_graph(csc, reduce):
    x, weight = randn(csc.num_src, 2, 3), randn(csc.num_edges, 2, seed=1)
    torch.testing.assert_close(spmm(csc, x, weight, reduce), reference(csc, x, weight, reduce))
    torch.testing.assert_close(spmm(csc, x, None, reduce), reference(csc, x, None, reduce))


@grid(reduce=["sum", "mean", "max", "min"], dtype=ALL_DTYPES)
def test_every_dtype_is_summed_in_at_least_float32(dtype, reduce):
    csc = random_csc(30, 10, 3000)
    x, weight = randn(30, 2, 21, dtype=dtype), randn(3000, 2, dtype=dtype, seed=1)
    out = spmm(csc, x, weight, reduce)
    assert out.dtype == dtype
    expected = reference(csc, x.double(), weight.double(), reduce)
    torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-4)


def test_one_weight_per_edge_serves_all_heads():
    csc = random_csc(13, 9, 60)
    x, weight = randn(13, 3, 4), randn(60, seed=1)
    for reduce in ("sum", "max"):
        torch.testing.assert_close(spmm(csc, x, weight, reduce), spmm(csc, x, weight[:, None].expand(60, 3), reduce))


def test_mean_over_one_heavy_row_is_the_mean():
    csc = CSC(torch.tensor([0, 10_000]), torch.arange(10_000) % 100, 100)
    x = randn(100, 5)
    torch.testing.assert_close(spmm(csc, x, reduce="mean")[0], x.mean(0))


@grid(dtype=ALL_DTYPES, heads=[None, 2])
def test_spmm_add_adds_piece_by_piece_to_what_is_there(csc, heads, dtype):
    shape = () if heads is None else (heads,)
    x, weight = randn(csc.num_src, *shape, 5, dtype=dtype), randn(csc.num_edges, *shape, dtype=dtype, seed=1)
    before = randn(csc.num_dst, *shape, 5, dtype=dtype, seed=2)
    scale = native.inverse_degrees(csc.indptr, torch.float64 if dtype == torch.float64 else torch.float32)
    out = before.clone()
    assert spmm_add(csc, x, out) is out
    spmm_add(csc, x, out, weight, scale)
    exact = before.double() + spmm(csc, x.double()) + spmm(csc, x.double(), weight.double(), "mean")
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, exact.to(dtype), rtol=2 * eps, atol=max(2e-4, 64 * eps))


def test_spmm_add_refuses_what_it_cannot_do():
    csc, x = random_csc(13, 9, 60), randn(13, 4)
    for out in (randn(8, 4), randn(9, 5), randn(9, 4).float(), randn(4, 9).t()):
        with pytest.raises(ValueError, match="out"):
            spmm_add(csc, x, out)
    with pytest.raises(RuntimeError, match="no gradient"):
        spmm_add(csc, x.requires_grad_(), randn(9, 4))


@grid(reduce=["sum", "mean", "max", "min"], weight_shape={"unweighted": None, "scalar": (), "heads": (2,)})
def test_gradients_are_right(csc, weight_shape, reduce):
    shape = (csc.num_src, 3) if weight_shape in (None, ()) else (csc.num_src, 2, 3)
    x = randn(*shape, grad=True)
    weight = None if weight_shape is None else randn(csc.num_edges, *weight_shape, seed=1, grad=True)
    inputs = (x,) if weight is None else (x, weight)
    assert gradients_are_right(lambda x, w=None: spmm(csc, x, w, reduce), inputs)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_can_be_differentiated_twice(reduce):
    csc = random_csc(6, 4, 15)
    x, weight = randn(6, 2, 3, grad=True), randn(15, 2, seed=1, grad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: spmm(csc, x, w, reduce), (x, weight))


def test_half_precision_gradients_follow_the_double_ones():
    csc = random_csc(30, 10, 500)
    for reduce in ("sum", "mean", "max"):
        x, weight = randn(30, 2, 8, grad=True), randn(500, 2, seed=1, grad=True)
        half = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]
        exact = [t.detach().double().requires_grad_() for t in half]
        for inputs in (half, exact):
            spmm(csc, *inputs, reduce).sum().backward()
        for a, b in zip(half, exact, strict=True):
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-2, atol=2e-2)


def test_the_gradient_of_a_maximum_goes_to_the_first_of_equals():
    csc = CSC(torch.tensor([0, 3]), torch.tensor([2, 0, 1]), 3)
    x = torch.ones(3, 1, requires_grad=True)
    spmm(csc, x, reduce="max").sum().backward()
    assert x.grad[:, 0].tolist() == [0.0, 0.0, 1.0]


def test_nan_and_infinity_pass_through():
    csc = CSC(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 1, 2]), 3)
    x = torch.tensor([[float("nan")] * 5, [1.0] * 5, [float("inf")] * 5])
    for reduce in ("sum", "mean", "max"):
        out = spmm(csc, x, reduce=reduce)
        assert out[0].isnan().all() and (out[1] == float("inf")).all()
    weight = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    assert spmm(csc, torch.ones(3, 5), weight)[0].isnan().all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_results_have_the_same_bits_for_any_threads_and_index_type(reduce, index_dtype):
    def run(dtype: torch.dtype, threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            csc = random_csc(2000, 3000, 40_000, dtype)
            x = randn(2000, 2, 20, dtype=torch.float32, grad=True)
            weight = randn(40_000, 2, dtype=torch.float32, seed=1, grad=True)
            out = spmm(csc, x, weight, reduce)
            out.backward(randn(3000, 2, 20, dtype=torch.float32, seed=2))
            assert x.grad is not None and weight.grad is not None
            return [out.detach(), x.grad, weight.grad]
        finally:
            torch.set_num_threads(before)

    for a, b in zip(run(torch.int64, 1), run(index_dtype, 2), strict=True):
        assert torch.equal(a, b)


@grid(dtype=ALL_DTYPES, width=[*WIDTHS, 15, 32, 33], id_dtype=[torch.int32, torch.int64])
def test_scaled_sources_have_the_bits_of_weights_that_say_the_same(width, dtype, id_dtype):
    """Sums without weights go through a loop of their own; destination 0 has more in-edges than that loop takes."""
    short, long = random_csc(60, 40, 600, id_dtype), random_csc(60, 3, 1500, id_dtype)
    for csc in (short, long):
        x, scales = randn(60, width, dtype=dtype), {torch.bfloat16: torch.float32, torch.float16: torch.float32}
        accurate = scales.get(dtype, dtype)
        src, dst = randn(60, dtype=accurate, seed=1), randn(csc.num_dst, dtype=accurate, seed=2)
        ones = torch.ones(csc.num_edges, dtype=dtype)
        found, want = (
            native.spmm(csc.indptr, csc.indices, None, x, weight, src, dst, None, None, None) for weight in (None, ones)
        )
        assert torch.equal(found, want)
        by_hand = dense(csc, ones.double()) @ (src.double()[:, None] * x.double()) * dst.double()[:, None]
        assert torch.allclose(found.double(), by_hand, atol=0.1 if dtype != accurate else 1e-4, rtol=1e-2)


def test_rows_that_are_not_contiguous_are_accepted():
    csc = random_csc(13, 9, 60)
    x, weight = randn(6, 13).t(), randn(60, 2)[:, 0]
    torch.testing.assert_close(spmm(csc, x, weight), spmm(csc, x.contiguous(), weight.contiguous()))


def test_sddmm_equals_gathered_dot_products(csc):
    for heads in ((), (3,)):
        dst, src = randn(csc.num_dst, *heads, 5), randn(csc.num_src, *heads, 5, seed=1)
        expected = (dst[csc.dst()] * src[csc.indices.long()]).sum(-1)
        torch.testing.assert_close(sddmm(csc, dst, src), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_sddmm_is_right_at_every_width(width):
    csc = random_csc(13, 9, 60)
    for dtype in ALL_DTYPES:
        dst, src = randn(9, width, dtype=dtype), randn(13, width, dtype=dtype, seed=1)
        expected = (dst.double()[csc.dst()] * src.double()[csc.indices]).sum(-1).to(dtype)
        torch.testing.assert_close(sddmm(csc, dst, src), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_sddmm_has_the_right_gradients(csc):
    dst, src = randn(csc.num_dst, 2, 3, grad=True), randn(csc.num_src, 2, 3, seed=1, grad=True)
    assert gradients_are_right(lambda d, s: sddmm(csc, d, s), (dst, src))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c, x, w: spmm(c, x[:-1], w), "x"),
        (lambda c, x, w: spmm(c, x[0], w), "x"),
        (lambda c, x, w: spmm(c, x.long(), None), "x"),
        (lambda c, x, w: spmm(c, x, w[:-1]), "weight"),
        (lambda c, x, w: spmm(c, x, w.float()), "weight"),
        (lambda c, x, w: spmm(c, x, w[:, None]), "weight"),
        (lambda c, x, w: spmm(c, x[:, None], torch.stack([w, w], 1)), "weight"),
        (lambda c, x, w: spmm(c, x, w, "product"), "reduce"),
        (lambda c, x, w: sddmm(c, x, x), "dst_rows"),
        (lambda c, x, w: sddmm(c, x[:9], x[:, :-1]), "src_rows"),
        (lambda c, x, w: sddmm(c, x[:9], x.float()), "src_rows"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call(random_csc(13, 9, 60), randn(13, 4), randn(60))


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_a_structure_that_points_outside_is_refused(bad, reduce):
    csc = CSC(torch.tensor([0, 2]), torch.tensor([0, bad]), 3)
    with pytest.raises(ValueError, match="indices"):
        spmm(csc, torch.randn(3, 4), reduce=reduce)
    with pytest.raises(ValueError, match="indices"):
        sddmm(csc, torch.randn(1, 4), torch.randn(3, 4))


@pytest.mark.parametrize("indptr", [[0, 3, 1, 2], [1, 1, 2, 2], [0, 1, 1, 3], [0, 2, -5, 2]])
def test_an_indptr_that_is_not_one_is_refused(indptr):
    with pytest.raises(ValueError, match="indptr"):
        spmm(CSC(torch.tensor(indptr), torch.tensor([0, 1]), 3), torch.randn(3, 4))


def test_no_message_per_edge_is_ever_stored():
    csc = random_csc(100, 100, 200_000)  # messages would take 51 MB, the output takes 26 KB
    x, weight = torch.randn(100, 64, requires_grad=True), torch.randn(200_000, requires_grad=True)
    csc.transpose()
    with torch.profiler.profile(profile_memory=True) as profile:
        spmm(csc, x, weight).sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 5_000_000


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_features_are_not_kept_for_a_backward_pass_that_does_not_need_them(reduce):
    csc = random_csc(13, 9, 60)
    x = randn(13, 3, grad=True) * 2
    alive = weakref.ref(x)
    out = spmm(csc, x, randn(60), reduce)
    del x
    assert alive() is None
    out.sum().backward()


def test_the_ops_obey_torch_library():
    csc = random_csc(13, 9, 60)
    x, weight = randn(13, 2, 3, grad=True), randn(60, 2, seed=1, grad=True)
    t = csc.transpose()
    structure, transposed = (csc.indptr, csc.indices, None), (t.indptr, t.indices, t.edge_ids)
    torch.library.opcheck(native.spmm, (*structure, x, weight, None, None, *transposed))
    torch.library.opcheck(native.sddmm, (*structure, randn(9, 2, 3, grad=True), x, None, None, *transposed))
    torch.library.opcheck(native.spmm_extreme, (csc.indptr, csc.indices, x, weight, False))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_spmm_compiles_into_one_graph(reduce):
    csc = random_csc(13, 9, 60)
    x, weight = randn(13, 3, grad=True), randn(60, seed=1, grad=True)
    compiled = torch.compile(lambda x, w: spmm(csc, x * 2, w, reduce).sum(), fullgraph=True, backend="aot_eager")
    compiled(x, weight).backward()
    grads = [x.grad, weight.grad]
    expected = torch.autograd.grad(spmm(csc, x * 2, weight, reduce).sum(), (x, weight))
    torch.testing.assert_close(grads, list(expected))
