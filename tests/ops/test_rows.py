"""Rows move as torch's own indexing moves them."""

import pytest
import torch

from gnnsys.ops import gather_rows, read_rows, scatter_rows
from gnnsys.ops._library import native
from tests.support.grid import grid

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (1,), (3,), (16,), (100,), (128,), (5, 7)]


def table(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(seed))
    return (values * 50).to(dtype)


def ids(size: int, bound: int, dtype: torch.dtype = torch.int64, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, bound, (size,), dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@grid(index_dtype=[torch.int32, torch.int64], shape=SHAPES, dtype=DTYPES)
def test_gather_equals_indexing(dtype, shape, index_dtype):
    src, index = table(50, shape, dtype), ids(333, 50, index_dtype)
    assert torch.equal(gather_rows(src, index), src[index.long()])


@grid(index_dtype=[torch.int32, torch.int64], width=[2, 6, 100, 128])
def test_reading_rows_sees_every_line_of_them(threads, width, index_dtype):
    src, index = table(500, (width,), torch.float32), ids(3001, 500, index_dtype)
    words = src[index.long()].view(torch.int64)[:, ::8].flatten().tolist()
    found = 0
    for word in words:
        found ^= word
    assert read_rows(src, index) == found


def test_rows_that_are_no_words_and_ids_out_of_range_are_not_read():
    with pytest.raises(ValueError, match="a multiple of eight bytes, got 12"):
        read_rows(torch.ones(4, 3), torch.arange(2))
    with pytest.raises(ValueError, match="index"):
        read_rows(torch.ones(4, 2), torch.tensor([4]))


def test_gather_is_the_same_on_any_number_of_threads(threads):
    src, index = table(5000, (33,), torch.float32), ids(20_000, 5000)
    assert torch.equal(gather_rows(src, index), src[index])


def test_gather_fills_the_buffer_it_is_given_and_returns_it():
    src, index = table(50, (8,), torch.float32), ids(20, 50)
    buffer = torch.full((30, 8), -1.0)
    result = gather_rows(src, index, out=buffer[:20])
    assert result.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:20], src[index])
    assert (buffer[20:] == -1).all()


@grid(to=FLOATS, dtype=FLOATS)
def test_gather_casts_as_torch_casts(dtype, to):
    src, index = table(50, (19,), dtype), ids(99, 50)
    assert torch.equal(gather_rows(src, index, dtype=to), src[index].to(to))
    out = torch.empty(99, 19, dtype=to)
    assert torch.equal(gather_rows(src, index, out=out), src[index].to(to))


def test_casts_keep_what_is_not_a_number_and_what_is_infinite():
    src = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30, -0.0]])
    for to in [torch.bfloat16, torch.float16, torch.float64]:
        torch.testing.assert_close(
            gather_rows(src, torch.zeros(1, dtype=torch.int64), dtype=to), src.to(to), equal_nan=True
        )


@grid(shape=SHAPES, dtype=DTYPES)
def test_scatter_equals_indexed_assignment(dtype, shape):
    index = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:40]
    src, dst = table(40, shape, dtype), table(60, shape, dtype, seed=5)
    expected = dst.clone()
    expected[index] = src
    result = scatter_rows(dst, index, src)
    assert result is dst
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("to", FLOATS)
def test_scatter_casts_to_the_dtype_of_the_table(to):
    index, src = torch.tensor([4, 0, 2]), table(3, (9,), torch.float32)
    dst = torch.zeros(5, 9, dtype=to)
    assert torch.equal(scatter_rows(dst, index, src)[index], src.to(to))


def test_the_last_of_several_rows_for_one_place_wins_on_any_number_of_threads(threads):
    index, src = ids(30_000, 500, torch.int32), table(30_000, (16,), torch.float32)
    dst = torch.zeros(600, 16)
    expected = dst.clone()
    for position, row in enumerate(index.tolist()):
        expected[row] = src[position]
    assert torch.equal(scatter_rows(dst, index, src), expected)


def test_nothing_to_move_is_fine():
    none = torch.empty(0, dtype=torch.int64)
    assert gather_rows(torch.randn(5, 3), none).shape == (0, 3)
    assert gather_rows(torch.empty(0, 3), none).shape == (0, 3)
    assert gather_rows(torch.empty(4, 0), torch.tensor([3, 1])).shape == (2, 0)
    dst = torch.randn(5, 3)
    assert torch.equal(scatter_rows(dst.clone(), none, torch.empty(0, 3)), dst)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1, -(2**31)])
def test_an_index_out_of_range_is_refused_and_named(bad, index_dtype):
    index = ids(1000, 10, index_dtype)
    index[777] = bad
    with pytest.raises(ValueError, match=rf"index must be in \[0, 10\), got {bad} at position 777"):
        gather_rows(torch.randn(10, 4), index)
    with pytest.raises(ValueError, match=rf"index must be in \[0, 10\), got {bad} at position 777"):
        scatter_rows(torch.randn(10, 4), index, torch.randn(1000, 4))


def test_an_index_into_an_empty_table_is_refused():
    with pytest.raises(ValueError, match="index"):
        gather_rows(torch.empty(0, 4), torch.tensor([0]))


def test_an_int64_index_that_is_small_only_in_its_low_half_is_refused():
    with pytest.raises(ValueError, match="index"):
        gather_rows(torch.randn(10, 4), torch.tensor([2**32]))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, i: gather_rows(x.t(), i), "src"),
        (lambda x, i: gather_rows(x, i.float()), "index"),
        (lambda x, i: gather_rows(x, i[None]), "index"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(2, 4)), "out"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(3, 5)), "out"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(4, 3).t()), "out"),
        (lambda x, i: gather_rows(x, i, out=torch.empty(3, 4), dtype=torch.float16), "dtype"),
        (lambda x, i: gather_rows(x, i, dtype=torch.int32), "out"),
        (lambda x, i: gather_rows(x.clone().requires_grad_(), i, out=torch.empty(3, 4)), "out"),
        (lambda x, i: scatter_rows(x, i, torch.empty(2, 4)), "src"),
        (lambda x, i: scatter_rows(x, i, torch.empty(3, 5)), "src"),
        (lambda x, i: scatter_rows(x, i, torch.empty(3, 4, requires_grad=True)), "gradient"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call(torch.randn(6, 4), torch.tensor([0, 5, 2]))


def test_gather_is_differentiable():
    src = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 5, 5, 2])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), (src,))
    assert torch.autograd.gradgradcheck(lambda x: gather_rows(x, index), (src,))


def test_gather_with_a_cast_gives_a_gradient_in_the_dtype_of_the_table():
    src = torch.randn(6, 3, requires_grad=True)
    gather_rows(src, torch.tensor([1, 1]), dtype=torch.bfloat16).sum().backward()
    assert src.grad is not None and src.grad.dtype == torch.float32
    assert src.grad[1].tolist() == [2.0, 2.0, 2.0]


def test_the_ops_obey_torch_library_and_compile():
    src, index = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 5, 5, 2])
    torch.library.opcheck(native.gather_rows, (src, index, None))
    torch.library.opcheck(native.gather_rows_out, (src.detach(), index, torch.empty(4, 3)))
    torch.library.opcheck(native.scatter_rows, (torch.zeros(6, 3), index, torch.randn(4, 3)))
    compiled = torch.compile(lambda x, i: gather_rows(x * 2, i) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(src, index), src[index] * 2 + 1)


def test_memory_that_is_read_and_written_at_once_is_refused():
    rows = torch.arange(6.0).view(3, 2)
    with pytest.raises(ValueError, match="out must not share memory"):
        gather_rows(rows, torch.tensor([2, 0, 1]), out=rows)
    with pytest.raises(ValueError, match="src must not share memory"):
        scatter_rows(rows, torch.tensor([1, 2]), rows[:2])
