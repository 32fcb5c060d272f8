"""spmm and sddmm on a GPU equal sums in float64, forward and backward, and are the same on every run."""

import subprocess
import sys

import pytest
import torch

from gnnsys.ops import CSC, sddmm, spmm, spmm_add
from gnnsys.ops._library import native

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Vectors of 16, 8, 4 and 2 bytes; rows below, at and above a warp's and two warps' worth of them.
WIDTHS = [1, 2, 3, 4, 5, 8, 12, 16, 31, 32, 36, 64, 65, 100, 101, 128, 130, 200, 256, 257, 260, 512, 516, 768, 1024]
HEAVY, PART = (
    256,
    512,
)  # edges beyond which a row goes to warps of its own, and is cut: Tuning in csrc/cuda/spmm_split.cuh


def graph(degrees: list[int], num_src: int, index_dtype: torch.dtype = torch.int64, seed: int = 0) -> CSC:
    """On the CPU: rows of the given lengths, with multi-edges."""
    generator = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    indices = torch.randint(0, max(num_src, 1), (int(indptr[-1]),), generator=generator).to(index_dtype)
    return CSC(indptr, indices, num_src)


def skewed(num_dst: int, num_src: int, seed: int, index_dtype: torch.dtype = torch.int64) -> CSC:
    """Many short rows, empty ones, some around a warp's, and rows on both sides of what is cut."""
    generator = torch.Generator().manual_seed(seed + 1)
    degrees = torch.randint(0, 12, (num_dst,), generator=generator)
    degrees[::7] = 0
    special = torch.tensor([31, 32, 33, 64, 100, HEAVY - 1, HEAVY, HEAVY + 1, PART, PART + 1, 5000])
    degrees[3 : 3 + len(special)] = special
    return graph(degrees.tolist(), num_src, index_dtype, seed)


def on_gpu(csc: CSC, with_transpose: bool = True) -> CSC:
    """The transpose is made on the CPU: these tests are about aggregation alone."""
    t = csc.transpose() if with_transpose else None
    moved = None
    if t is not None:
        assert t.edge_ids is not None
        moved = CSC(t.indptr.cuda(), t.indices.cuda(), t.num_src, t.edge_ids.cuda())
    return CSC(csc.indptr.cuda(), csc.indices.cuda(), csc.num_src, None, moved)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def poison() -> None:
    """Fills free memory of torch's allocator with NaN, so that what a kernel leaves unwritten shows."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 22)]
    del blocks


def assert_sums(out: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within rounding: of a sum in float32 (float64), relative to the sum of magnitudes, and of the result's dtype."""
    assert out.is_cuda and not out.isnan().any()
    sums = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).eps
    bound = 64 * sums * magnitude + torch.finfo(out.dtype).eps * exact.abs() + 1e-30
    error = (out.cpu().double() - exact).abs()
    subnormal = 6e-8 if out.dtype == torch.float16 else 0.0
    assert (error <= bound + subnormal).all(), f"off by {(error / bound).max():.2f} bounds"


def check_forward(csc: CSC, x: torch.Tensor, weight: torch.Tensor | None, reduce: str) -> None:
    gpu = on_gpu(csc, with_transpose=False)
    poison()
    out = spmm(gpu, x.cuda(), None if weight is None else weight.cuda(), reduce)
    again = spmm(gpu, x.cuda(), None if weight is None else weight.cuda(), reduce)
    assert out.dtype == x.dtype and torch.equal(out, again)
    wide = None if weight is None else weight.double()
    exact = spmm(csc, x.double(), wide, reduce)
    magnitude = spmm(csc, x.double().abs(), None if wide is None else wide.abs(), reduce)
    assert_sums(out, exact, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_equals_the_one_in_float64_at_every_width(width, dtype):
    csc = skewed(60, 50, seed=width)
    check_forward(csc, randn(50, width, dtype=dtype, seed=width), None, "sum")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(5, torch.float32), (47, torch.float32), (47, torch.bfloat16), (100, torch.float16), (349, torch.float32)],
    ids=str,
)
def test_sums_of_so_many_edges_that_rows_are_padded(width, dtype, weighted):
    num_edges = (80 << 20) // (width * dtype.itemsize)  # more bytes than kPadBytes in csrc/cuda/padding.cuh
    num_nodes = num_edges // 48
    degrees = torch.randint(0, 98, (num_nodes,), generator=torch.Generator().manual_seed(width))
    degrees[:3] = torch.tensor([0, HEAVY + 1, 5000])
    csc = graph(degrees.tolist(), num_nodes - 7, torch.int32)
    assert csc.num_edges > 32 * num_nodes
    x = randn(csc.num_src, width, dtype=dtype, seed=1)
    check_forward(csc, x, randn(csc.num_edges, dtype=dtype, seed=2) if weighted else None, "mean")


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 33, 100, 128, 300])
def test_weighted_sums_and_means_equal_those_in_float64(width, dtype, index_dtype, reduce):
    csc = skewed(60, 50, seed=width, index_dtype=index_dtype)
    x = randn(50, width, dtype=dtype, seed=width)
    check_forward(csc, x, randn(csc.num_edges, dtype=dtype, seed=1), reduce)
    check_forward(csc, x, None, reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 8), (2, 3), (4, 8), (3, 12), (8, 16), (4, 100), (2, 200), (5, 1)])
def test_weights_by_head_equal_those_in_float64(heads, width, dtype):
    csc = skewed(40, 50, seed=heads, index_dtype=torch.int32)
    x, weight = randn(50, heads, width, dtype=dtype, seed=3), randn(csc.num_edges, heads, dtype=dtype, seed=4)
    check_forward(csc, x, weight, "sum")
    check_forward(csc, x, weight, "mean")
    check_forward(csc, x, weight[:, 0].contiguous(), "sum")


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 32, 100, 129, 256, 600])
def test_extremes_have_the_bits_and_the_edges_of_the_cpu(width, dtype, reduce):
    csc = skewed(60, 20, seed=width)  # few sources: many equals
    gpu = on_gpu(csc, with_transpose=False)
    x = randn(20, width, dtype=dtype, seed=width).mul(2).round()
    x[3, 0] = float("nan")
    for weight in (None, randn(csc.num_edges, dtype=dtype, seed=1)):
        poison()
        args = (x, weight, reduce == "min")
        out, arg = native.spmm_extreme(gpu.indptr, gpu.indices, *(a.cuda() if torch.is_tensor(a) else a for a in args))
        expected, expected_arg = native.spmm_extreme(csc.indptr, csc.indices, *args)
        assert torch.equal(arg.cpu(), expected_arg)
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", ["plain", "weighted", "heads"])
def test_gradients_equal_those_of_the_cpu_in_float64(shape, reduce, dtype):
    csc = skewed(80, 70, seed=5, index_dtype=torch.int32)
    gpu = on_gpu(csc)
    x = randn(70, *((3, 20) if shape == "heads" else (20,)), dtype=dtype, seed=1)
    weight = randn(csc.num_edges, *((3,) if shape == "heads" else ()), dtype=dtype, seed=2)
    grad = randn(80, *x.shape[1:], dtype=dtype, seed=3)

    def gradients(csc: CSC, device: str, to: torch.dtype) -> list[torch.Tensor]:
        inputs = [t.to(device, to).requires_grad_() for t in ([x] if shape == "plain" else [x, weight])]
        return list(torch.autograd.grad(spmm(csc, *inputs, reduce=reduce), inputs, grad.to(device, to)))

    poison()
    found, again = gradients(gpu, "cuda", dtype), gradients(gpu, "cuda", dtype)
    # Which of two products is larger may depend on their precision: max and min are compared in their own.
    exact = gradients(csc, "cpu", torch.float64 if reduce in ("sum", "mean") else dtype)
    for a, b, c in zip(found, again, exact, strict=True):
        assert torch.equal(a, b) and a.dtype == dtype
        tolerance = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(a.cpu().double(), c.double(), rtol=tolerance, atol=tolerance * 4)


def test_sums_can_be_differentiated_twice():
    csc = on_gpu(graph([3, 0, 5, 4, 3], 6))
    x = randn(6, 2, 3, dtype=torch.float64, seed=0).cuda().requires_grad_()
    weight = randn(15, 2, dtype=torch.float64, seed=1).cuda().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: spmm(csc, x, w, "mean"), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: spmm(csc, x, w, "sum"), (x, weight))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(0, 1), (0, 3), (0, 32), (0, 100), (0, 130), (0, 1024), (4, 8), (3, 7)])
def test_sddmm_equals_dot_products_in_float64(heads, width, dtype, index_dtype):
    csc = skewed(60, 50, seed=width, index_dtype=index_dtype)
    shape = (heads, width) if heads else (width,)
    dst, src = randn(60, *shape, dtype=dtype, seed=1), randn(50, *shape, dtype=dtype, seed=2)
    poison()
    out = sddmm(on_gpu(csc, with_transpose=False), dst.cuda(), src.cuda())
    assert out.dtype == dtype
    assert_sums(out, sddmm(csc, dst.double(), src.double()), sddmm(csc, dst.double().abs(), src.double().abs()))


@pytest.mark.parametrize("positions_dtype", [None, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [3, 64])
def test_positions_and_scales_mean_what_they_mean_on_the_cpu(width, positions_dtype):
    csc = skewed(60, 50, seed=9)
    x, dst = randn(50, width, dtype=torch.float64, seed=1), randn(60, width, dtype=torch.float64, seed=2)
    weight = randn(csc.num_edges, dtype=torch.float64, seed=3)
    scales = randn(50, dtype=torch.float64, seed=4), randn(60, dtype=torch.float64, seed=5)
    order = torch.randperm(csc.num_edges, generator=torch.Generator().manual_seed(6))
    positions = None if positions_dtype is None else order.to(positions_dtype)
    structure = (csc.indptr, csc.indices, positions)
    for op, rows in ((native.spmm, (x, weight)), (native.spmm, (x, None)), (native.sddmm, (dst, x))):
        args = (*structure, *rows, *scales, None, None, None)
        found = op(*(None if a is None else a.cuda() for a in args))
        torch.testing.assert_close(found.cpu(), op(*args))
        narrow = tuple(a.float() if a is not None and a.dtype == torch.float64 else a for a in args)
        found = op(*(None if a is None else a.cuda() for a in narrow))
        torch.testing.assert_close(found.cpu().double(), op(*args), rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 32, 100, 257])
def test_spmm_add_adds_to_what_is_there(width, dtype):
    csc = skewed(60, 50, seed=width)
    gpu = on_gpu(csc, with_transpose=False)
    x, before = randn(50, width, dtype=dtype, seed=1), randn(60, width, dtype=dtype, seed=2)
    scale = native.inverse_degrees(csc.indptr, torch.float64)
    out = before.cuda()
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    assert spmm_add(gpu, x.cuda(), out, dst_scale=scale.to("cuda", sums)) is out
    exact = before.double() + spmm(csc, x.double(), None, "mean")
    assert_sums(out, exact, before.double().abs() + spmm(csc, x.double().abs(), None, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("degree", [1, HEAVY, HEAVY + 1, PART + 1, 100_000])
def test_one_giant_row_equals_the_sum_in_float64(degree, dtype):
    csc = graph([0, degree, 0, 2], 1000, torch.int32, seed=degree)
    for width in (1, 32, 100):
        x = randn(1000, width, dtype=dtype, seed=width)
        check_forward(csc, x, None, "sum")
        check_forward(csc, x, randn(csc.num_edges, dtype=dtype, seed=1), "mean")
        args = (x, None, False)
        out, arg = native.spmm_extreme(csc.indptr.cuda(), csc.indices.cuda(), x.cuda(), None, False)
        expected = native.spmm_extreme(csc.indptr, csc.indices, *args)
        assert torch.equal(out.cpu(), expected[0]) and torch.equal(arg.cpu(), expected[1])


def test_parts_grow_with_the_graph_and_sums_stay_right():
    """Past 32768 parts of 512 edges, parts are longer: rows of 600 edges are then whole in one part."""
    num_dst, degree = 30_000, 600
    indptr = torch.arange(0, (num_dst + 1) * degree, degree).cuda()
    indices = torch.randint(0, 5000, (num_dst * degree,), dtype=torch.int32, device="cuda")
    x = torch.randn(5000, 4, device="cuda")
    out = spmm(CSC(indptr, indices, 5000), x)
    exact = x.double()[indices.view(num_dst, degree).long()].sum(1)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-3)


def test_graphs_without_edges_destinations_or_sources_give_zeros():
    no_edges = CSC(torch.tensor([0, 0, 0]).cuda(), torch.empty(0, dtype=torch.int64).cuda(), 5)
    nothing = CSC(torch.tensor([0]).cuda(), torch.empty(0, dtype=torch.int32).cuda(), 0)
    for reduce in ("sum", "mean", "max", "min"):
        poison()
        assert torch.equal(spmm(no_edges, torch.randn(5, 3).cuda(), reduce=reduce), torch.zeros(2, 3).cuda())
        assert spmm(nothing, torch.randn(0, 3).cuda(), reduce=reduce).shape == (0, 3)
        assert spmm(no_edges, torch.randn(5, 0).cuda(), reduce=reduce).shape == (2, 0)
    assert sddmm(no_edges, torch.randn(2, 3).cuda(), torch.randn(5, 3).cuda()).shape == (0,)
    zeros = sddmm(CSC(torch.tensor([0, 1]).cuda(), torch.tensor([0]).cuda(), 1), *[torch.randn(1, 0).cuda()] * 2)
    assert zeros.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_rows_that_are_not_aligned_are_read_right(offset, dtype):
    csc = skewed(60, 50, seed=offset)
    gpu = on_gpu(csc, with_transpose=False)
    storage = randn(50 * 64 + offset, dtype=dtype, seed=offset)
    x = storage.cuda()[offset:].view(50, 64)
    assert x.data_ptr() % 16 != 0 or offset * x.element_size() % 16 == 0
    exact = storage[offset:].view(50, 64)
    assert torch.equal(spmm(gpu, x, reduce="max").cpu(), spmm(csc, exact, reduce="max"))
    torch.testing.assert_close(spmm(gpu, x).cpu(), spmm(csc, exact), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(spmm(gpu, x), spmm(gpu, x.clone()), rtol=1e-2, atol=1e-2)
    out = torch.zeros(60 * 64 + offset, dtype=dtype, device="cuda")[offset:].view(60, 64)
    torch.testing.assert_close(spmm_add(gpu, x, out).cpu(), spmm(csc, exact), rtol=1e-2, atol=1e-2)


def test_structure_is_read_from_pinned_memory():
    csc = skewed(60, 50, seed=1)
    x = randn(50, 16, dtype=torch.float32, seed=1).cuda()
    pinned = CSC(csc.indptr.pin_memory(), csc.indices.pin_memory(), 50)
    assert torch.equal(spmm(pinned, x), spmm(on_gpu(csc, with_transpose=False), x))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_step_can_be_captured_into_a_cuda_graph(reduce):
    csc = on_gpu(skewed(60, 50, seed=1))
    x = torch.randn(50, 32, device="cuda", requires_grad=True)
    weight = torch.randn(csc.num_edges, device="cuda", requires_grad=True)
    grad = torch.randn(60, 32, device="cuda")

    def step() -> list[torch.Tensor]:
        out = spmm(csc, x, weight, reduce)
        return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        replayed = step()
    with torch.no_grad():
        x.normal_()
        weight.normal_()
    captured.replay()
    for a, b in zip(replayed, step(), strict=True):
        assert torch.equal(a, b)


def test_nothing_waits_for_the_device():
    """In torch's debug mode a wait is an error."""
    csc = on_gpu(skewed(60, 50, seed=1))
    x = torch.randn(50, 32, device="cuda", requires_grad=True)
    weight = torch.randn(csc.num_edges, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduce in ("sum", "mean", "max", "min"):
            spmm(csc, x, weight, reduce).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_message_per_edge_is_ever_stored():
    csc = on_gpu(graph([2000] * 100, 100))  # messages would take 51 MB
    x = torch.randn(100, 64, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spmm(csc, x, reduce="mean").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2_000_000


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c, x, w: spmm(c, x.cpu(), w), "x"),
        (lambda c, x, w: spmm(c, x.long(), None), "x"),
        (lambda c, x, w: spmm(c, x, w.cpu()), "weight"),
        (lambda c, x, w: spmm(c, x, w[:-1]), "weight"),
        (lambda c, x, w: spmm(c, x, w.float()), "weight"),
        (lambda c, x, w: spmm(c, x[:, None], torch.stack([w, w], 1)), "weight"),
        (lambda c, x, w: spmm(CSC(c.indptr.cpu(), c.indices, c.num_src), x), "indptr"),
        (lambda c, x, w: spmm_add(c, x, torch.zeros(4, 5, dtype=x.dtype).cuda()), "out"),
        (lambda c, x, w: spmm_add(c, x, torch.zeros(4, 4).cuda()), "out"),
        (lambda c, x, w: sddmm(c, x[:4], x[:, :-1]), "src_rows"),
        (lambda c, x, w: sddmm(c, x[:4], x.float()), "src_rows"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    csc = on_gpu(graph([3, 0, 2, 5], 13), with_transpose=False)
    with pytest.raises(ValueError, match=name):
        call(csc, randn(13, 4, dtype=torch.float64, seed=0).cuda(), randn(10, dtype=torch.float64, seed=1).cuda())


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_index_that_points_outside_ends_the_process_with_a_message(bad):
    """In a process of its own: a device that has stopped stays so."""
    program = f"""
import torch
from gnnsys.ops import CSC, spmm
csc = CSC(torch.tensor([0, 2]).cuda(), torch.tensor([0, {bad}]).cuda(), 3)
spmm(csc, torch.randn(3, 4).cuda())
torch.cuda.synchronize()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert f"indices must be in [0, 3), got {bad}" in run.stdout
