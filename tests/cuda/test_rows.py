"""Rows move on the device as torch's indexing moves them on the CPU, from device memory and from the host's."""

import subprocess
import sys

import pytest
import torch

from gnnsys.ops import gather_rows, scatter_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (1,), (2,), (3,), (4,), (16,), (31,), (100,), (128,), (5, 7)]
WIDTHS = [1, 2, 3, 7, 8, 31, 32, 33, 64, 100, 127, 128, 129, 200, 256, 500, 602, 768, 1000, 1024]


def rand(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def ids(size: int, bound: int, dtype: torch.dtype = torch.int64, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, bound, (size,), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def put(rows: torch.Tensor, place: str, skip: int = 0) -> torch.Tensor:
    """`rows` on the device or in pinned memory, contiguous, starting `skip` values after an aligned address."""
    flat = torch.zeros(rows.numel() + skip, dtype=rows.dtype)
    flat = flat.cuda() if place == "device" else flat.pin_memory()
    there = flat[skip:].view(rows.shape)
    return there.copy_(rows)


def poisoned(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, skip: int = 0) -> torch.Tensor:
    """Room for the rows with a row on each side, full of a value that no row has."""
    return put(torch.full((num_rows + 2, *shape), 77.125).to(dtype), "device", skip)


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_gather_equals_indexing(dtype, shape, place):
    src = rand(50, shape, dtype, seed=2)
    for index in (ids(333, 50), ids(333, 50, torch.int32, seed=5)):
        got = gather_rows(put(src, place), index.cuda())
        assert got.is_cuda and got.dtype == dtype
        assert torch.equal(got.cpu(), src[index.long()])


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_gather_of_any_width_from_any_address_writes_its_rows_and_no_more(dtype, width, place):
    src, index = rand(211, (width,), dtype, seed=width), ids(1037, 211, torch.int32, seed=width)
    for skip_src, skip_out in ((0, 0), (1, 0), (0, 1), (4, 8), (3, 2)):
        room = poisoned(1037, (width,), dtype, skip_out)
        before = room.clone()
        gather_rows(put(src, place, skip_src), index.cuda(), out=room[1:-1])
        assert torch.equal(room[1:-1].cpu(), src[index.long()])
        assert torch.equal(room[:1], before[:1]) and torch.equal(room[-1:], before[-1:])


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("width", [1, 4, 19, 64, 200])
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gather_casts_as_torch_casts(dtype, to, width, place):
    src, index = rand(50, (width,), dtype, seed=3), ids(199, 50)
    for skip in (0, 1):
        there = put(src, place, skip)
        assert torch.equal(gather_rows(there, index.cuda(), dtype=to).cpu(), src[index].to(to))
        room = poisoned(199, (width,), to, skip)
        gather_rows(there, index.cuda(), out=room[1:-1])
        assert torch.equal(room[1:-1].cpu(), src[index].to(to))


def test_casts_keep_what_is_not_a_number_what_is_infinite_and_what_is_tiny():
    src = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30, -0.0, 1e-40, 6e-8, 65519.9, 65520.0]])
    for dtype in [torch.float32, torch.float64]:
        for to in FLOATS:
            got = gather_rows(src.to(dtype).cuda(), torch.zeros(1, dtype=torch.int64, device="cuda"), dtype=to)
            torch.testing.assert_close(got.cpu(), src.to(dtype).to(to), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 1023, 1024, 1025, 300_000])
def test_any_number_of_rows(size):
    src = rand(1000, (12,), torch.float32, seed=size)
    index = ids(size, 1000, seed=size)
    for place in ("device", "pinned"):
        assert torch.equal(gather_rows(put(src, place), index.cuda()).cpu(), src[index])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("width", "to"), [(1, torch.float64), (3, torch.float64), (100, torch.float32), (33, torch.half)]
)
def test_rows_of_the_host_that_are_asked_for_in_another_order_arrive_in_their_own(width, to, index_dtype):
    """So many that they are asked for in the order of their ids."""
    src = rand(5000, (width,), torch.float64, seed=width).to(torch.float32 if width == 100 else torch.float64)
    index = ids(400_000, 5000, index_dtype, seed=6)
    room = poisoned(index.numel(), (width,), to, skip=1)
    gather_rows(put(src, "pinned"), index.cuda(), out=room[1:-1])
    assert torch.equal(room[1:-1].cpu(), src[index.long()].to(to))
    assert (room[0] == 77.125).all() and (room[-1] == 77.125).all()


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_scatter_equals_indexed_assignment(dtype, shape, place):
    index = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:40]
    src, dst = rand(40, shape, dtype, seed=4), rand(60, shape, dtype, seed=5)
    expected = dst.clone()
    expected[index] = src
    for one in (index, index.int()):
        there = put(dst, "device", skip=1)
        assert scatter_rows(there, one.cuda(), put(src, place)) is there
        assert torch.equal(there.cpu(), expected)


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_scatter_casts_to_the_dtype_of_the_table(dtype, to):
    index = torch.tensor([4, 0, 2])
    for width in (9, 16, 600):
        src = rand(3, (width,), dtype, seed=6)
        dst = scatter_rows(torch.zeros(5, width, dtype=to, device="cuda"), index.cuda(), src.cuda())
        assert torch.equal(dst.cpu()[index], src.to(to))
        assert not dst[[1, 3]].any()


@pytest.mark.parametrize("width", [1, 16, 129])
@pytest.mark.parametrize("bound", [1, 3, 500, 200_000])
def test_the_last_of_several_rows_for_one_place_wins_on_every_run(bound, width):
    index, src = ids(30_000, bound, torch.int32, seed=bound), rand(30_000, (width,), torch.float32, seed=7)
    expected = scatter_rows(torch.zeros(bound, width), index, src)
    for _ in range(3):
        got = scatter_rows(torch.zeros(bound, width, device="cuda"), index.cuda(), src.cuda())
        assert torch.equal(got.cpu(), expected)


def test_nothing_to_move_is_fine():
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    assert gather_rows(torch.randn(5, 3, device="cuda"), none).shape == (0, 3)
    assert gather_rows(torch.empty(0, 3, device="cuda"), none).shape == (0, 3)
    assert gather_rows(torch.empty(4, 0, device="cuda"), torch.tensor([3, 1], device="cuda")).shape == (2, 0)
    dst = torch.randn(5, 3, device="cuda")
    assert torch.equal(scatter_rows(dst.clone(), none, torch.empty(0, 3, device="cuda")), dst)


def test_offsets_beyond_32_bits_are_kept():
    num_rows, width = 5_000_000, 512  # 2.56 GB
    src = torch.zeros(num_rows, width, dtype=torch.uint8, device="cuda")
    marked = torch.tensor([num_rows - 1, 0, num_rows // 2, 4_194_304, 4_194_305], device="cuda")
    rows = rand(5, (width,), torch.uint8, seed=8).cuda()
    scatter_rows(src, marked, rows)
    assert torch.equal(src[marked], rows)
    assert torch.equal(gather_rows(src, marked), rows)
    backwards = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device="cuda")
    assert torch.equal(gather_rows(src, backwards)[num_rows - 1 - marked], rows)


def test_the_gradient_of_a_gather_is_the_sum_of_what_came_back():
    src, index = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 5, 5, 2])
    ours = src.cuda().requires_grad_()
    theirs = src.clone().requires_grad_()
    (gather_rows(ours, index.cuda()) * torch.arange(12.0).view(4, 3).cuda()).sum().backward()
    (theirs[index] * torch.arange(12.0).view(4, 3)).sum().backward()
    assert torch.equal(ours.grad.cpu(), theirs.grad)


def test_a_table_in_pinned_memory_gets_its_gradient_there():
    src = torch.randn(6, 3).pin_memory().requires_grad_()
    gather_rows(src, torch.tensor([1, 1], device="cuda"), dtype=torch.bfloat16).sum().backward()
    assert src.grad.device.type == "cpu"
    assert src.grad[1].tolist() == [2.0, 2.0, 2.0]


def test_work_goes_to_the_current_stream_and_can_be_captured():
    src, dst = torch.randn(500, 40, device="cuda"), torch.zeros(500, 40, device="cuda")
    host = torch.randn(500, 40).pin_memory()
    index = torch.zeros(300, dtype=torch.int64, device="cuda")
    out, from_host = torch.empty(300, 40, device="cuda"), torch.empty(300, 40, device="cuda")

    def work() -> None:
        gather_rows(src, index, out=out)
        gather_rows(host, index, out=from_host)
        scatter_rows(dst, index, out)

    work()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    index.copy_(torch.randperm(500)[:300])
    graph.replay()
    assert torch.equal(out, src[index])
    assert torch.equal(from_host.cpu(), host[index.cpu()])
    assert torch.equal(dst[index], src[index])


def test_the_ops_obey_torch_library_and_compile():
    src, index = torch.randn(6, 3, requires_grad=True, device="cuda"), torch.tensor([0, 5, 5, 2], device="cuda")
    torch.library.opcheck(torch.ops.gnnsys.gather_rows, (src, index, None))
    torch.library.opcheck(torch.ops.gnnsys.gather_rows_out, (src.detach(), index, torch.empty(4, 3, device="cuda")))
    rows = torch.randn(4, 3, device="cuda")
    torch.library.opcheck(torch.ops.gnnsys.scatter_rows, (torch.zeros(6, 3, device="cuda"), index, rows))
    compiled = torch.compile(lambda x, i: gather_rows(x * 2, i) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(src, index), src[index] * 2 + 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, i: gather_rows(x.t(), i), "src"),
        (lambda x, i: gather_rows(x.cpu(), i), "src must be on cuda:0 or in pinned host memory"),
        (lambda x, i: gather_rows(x, i.cpu()), "index must be on the device"),
        (lambda x, i: gather_rows(x, i.float()), "index"),
        (lambda x, i: gather_rows(x, i[None]), "index"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(3, 4)), "out must be on cuda:0"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(2, 4, device="cuda")), "out"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(3, 5, device="cuda")), "out"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(4, 3, device="cuda").t()), "out"),
        (lambda x, i: gather_rows(x, i, dtype=torch.int32), "out"),
        (lambda x, i: gather_rows(x, i[:1], out=x[:1]), "out must not share memory"),
        (lambda x, i: scatter_rows(x, i, torch.empty(2, 4, device="cuda")), "src"),
        (lambda x, i: scatter_rows(x, i, torch.empty(3, 5, device="cuda")), "src"),
        (lambda x, i: scatter_rows(x, i, torch.empty(3, 4)), "src must be on cuda:0 or in pinned host memory"),
        (lambda x, i: scatter_rows(x.cpu(), i, x[:3]), "dst must be on cuda:0"),
        (lambda x, i: scatter_rows(x, i, x[:3]), "src must not share memory"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call(torch.randn(6, 4, device="cuda"), torch.tensor([0, 5, 2], device="cuda"))


@pytest.mark.parametrize("call", ["gather_rows(x, i)", "scatter_rows(x, i, torch.ones(3, 4, device='cuda'))"])
def test_an_index_out_of_range_ends_the_kernel_with_its_name(call):
    program = (
        "import torch\nfrom gnnsys.ops import gather_rows, scatter_rows\n"
        "x = torch.ones(6, 4, device='cuda')\ni = torch.tensor([0, -3, 2], device='cuda')\n"
        f"{call}\ntorch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "index must be in [0, 6), got -3" in done.stdout
