"""Dropout by node on the device is the CPU's, bit by bit."""

import subprocess
import sys

import pytest
import torch

from gnnsys.ops import dropout_rows
from gnnsys.ops._library import native

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 64, 100, 128, 129, 200, 256, 602, 1024]


def rand(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def some_ids(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 2**62, (size,), generator=torch.Generator().manual_seed(seed))


def shifted(x: torch.Tensor, skip: int) -> torch.Tensor:
    """`x` on the device, contiguous, starting `skip` values after an aligned address."""
    room = torch.zeros(x.numel() + skip, dtype=x.dtype, device="cuda")
    return room[skip:].view(x.shape).copy_(x)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_any_width_from_any_address_are_the_cpus(dtype, width):
    for num_rows in (1, 33, 517):
        x, ids = rand((num_rows, width), dtype, seed=width), some_ids(num_rows)
        for p, key in ((0.5, 3), (0.1, -(2**63)), (1 - 2.0**-20, 2**63 - 1), (2.0**-33, 0)):
            here = dropout_rows(x, ids, p, key)
            for skip in (0, 1, 2, 4):
                there = dropout_rows(shifted(x, skip), ids.cuda(), p, key)
                assert there.is_cuda and there.dtype == dtype
                assert torch.equal(there.cpu(), here), f"{num_rows} rows, p = {p}, {skip} values off"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(1, 1_000_003), (2, 2_000_000), (3, 5, 70_000), (1_000_000,), (300_000, 6), (70_000, 96)]
)
def test_few_long_rows_and_many_short_ones_are_the_cpus(shape, dtype):
    x, ids = rand(shape, dtype), some_ids(shape[0])
    assert torch.equal(dropout_rows(x.cuda(), ids.cuda(), 0.3, 11).cpu(), dropout_rows(x, ids, 0.3, 11))


def test_narrow_and_extreme_ids_are_the_cpus():
    x = rand((6, 20), torch.float32)
    for ids in (
        torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]),
        torch.tensor([0, 1, 2, 3, 65536, 2**31 - 1], dtype=torch.int32),
    ):
        assert torch.equal(dropout_rows(x.cuda(), ids.cuda(), 0.5, 1).cpu(), dropout_rows(x, ids, 0.5, 1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_dropped_is_zero_and_what_is_kept_stays_what_it_was_where_it_is_no_number(dtype):
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40, 6e-8, 65504.0, -0.0]).to(dtype)
    x, ids = odd.repeat(50, 4), some_ids(50)
    here, there = dropout_rows(x, ids, 0.5, 8), dropout_rows(x.cuda(), ids.cuda(), 0.5, 8).cpu()
    torch.testing.assert_close(there, here, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(there[~here.isnan()]), torch.signbit(here[~here.isnan()]))


def test_offsets_beyond_32_bits_are_kept():
    num_rows, width = 2_300_000, 1024  # 2.36e9 values, 4.7 GB
    x = torch.ones(num_rows, width, dtype=torch.bfloat16, device="cuda")
    out = dropout_rows(x, torch.arange(num_rows, device="cuda"), 0.5, 5)
    some = torch.tensor([0, 1, 2_097_151, 2_097_152, num_rows - 1])
    here = dropout_rows(torch.ones(5, width, dtype=torch.bfloat16), some, 0.5, 5)
    assert torch.equal(out[some.cuda()].cpu(), here)


def test_gradients_are_the_cpus_and_can_be_differentiated_again():
    x, ids, grad = rand((40, 12), torch.float32), some_ids(40), rand((40, 12), torch.float32, seed=2)
    grads = []
    for device in ("cpu", "cuda"):
        leaf = x.detach().to(device).requires_grad_()
        dropout_rows(leaf, ids.to(device), 0.4, 3).backward(grad.to(device))
        grads.append(leaf.grad.cpu())
    assert torch.equal(*grads)
    wide = rand((6, 5), torch.float64).cuda().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda rows: dropout_rows(rows, ids[:6].cuda(), 0.4, 3) ** 2, (wide,))


def test_no_rows_and_no_columns_are_fine():
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    assert dropout_rows(torch.empty(0, 6, device="cuda"), none, 0.5, 1).shape == (0, 6)
    assert dropout_rows(torch.empty(3, 0, device="cuda"), torch.arange(3, device="cuda"), 0.5, 1).shape == (3, 0)


def test_work_goes_to_the_current_stream_and_can_be_captured():
    x, ids = torch.ones(500, 40, device="cuda"), torch.zeros(500, dtype=torch.int64, device="cuda")
    dropout_rows(x, ids, 0.5, 1)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dropout_rows(x, ids, 0.5, 1)
    ids.copy_(torch.arange(500))
    graph.replay()
    assert torch.equal(out.cpu(), dropout_rows(torch.ones(500, 40), torch.arange(500), 0.5, 1))


def test_the_op_obeys_torch_library():
    x, ids = torch.randn(6, 5, requires_grad=True, device="cuda"), torch.arange(6, device="cuda")
    torch.library.opcheck(native.dropout_rows, (x, ids, 0.5, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, i: dropout_rows(x, i.cpu(), 0.5, 1), "x and ids must be on one device"),
        (lambda x, i: native.dropout_rows(x, i.cpu(), 0.5, 1), "ids must be on cuda:0"),
        (lambda x, i: native.dropout_rows(x.cpu(), i, 0.5, 1), "x must be on the device"),
        (lambda x, i: native.dropout_rows(x.t(), i, 0.5, 1), "x must be contiguous"),
        (lambda x, i: native.dropout_rows(x[:2], i, 0.5, 1), "x must have a row per id, 3, got 2"),
        (lambda x, i: native.dropout_rows(x, i.float(), 0.5, 1), "ids must be int32 or int64"),
        (lambda x, i: native.dropout_rows(x.int(), i, 0.5, 1), "x must be float32, float64, bfloat16 or float16"),
        (lambda x, i: native.dropout_rows(x, i, 1.0, 1), "p must be in"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 4, device="cuda"), torch.tensor([0, 5, 2], device="cuda"))


def test_a_negative_id_ends_the_kernel_with_its_name():
    program = (
        "import torch\nfrom gnnsys.ops import dropout_rows\n"
        "i = torch.tensor([0, -3, 2], device='cuda')\n"
        "dropout_rows(torch.ones(3, 4, device='cuda'), i, 0.5, 1)\ntorch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "ids must be >= 0, got -3 at position 1" in done.stdout
