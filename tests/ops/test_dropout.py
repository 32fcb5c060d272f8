"""Dropout by node is what Philox says of (key, id, column), and of nothing else."""

import math

import numpy as np
import pytest
import torch

from gnnsys.ops import dropout_rows, stream_key
from gnnsys.ops._library import native
from tests.support.grid import grid

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 64, 65, 68, 100, 256, 257]
STREAM = 0x80726F77
IDS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1]


def philox(counter: list[np.ndarray], key: int) -> list[np.ndarray]:
    """Philox4x32-10 from its paper: uint64 arrays that hold 32-bit words."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    for i in range(10):
        k0 = np.uint64(((key & 0xFFFFFFFF) + i * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((((key >> 32) & 0xFFFFFFFF) + i * 0xBB67AE85) & 0xFFFFFFFF)
        p0 = np.uint64(0xD2511F53) * c[0]
        p1 = np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> half) ^ c[1] ^ k0, p1 & low, (p0 >> half) ^ c[3] ^ k1, p0 & low]
    return c


def is_kept(ids: torch.Tensor, width: int, p: float, key: int) -> torch.Tensor:
    """[n, width]"""
    rows = ids.numpy().astype(np.uint64)[:, None]
    blocks = np.arange((width + 3) // 4, dtype=np.uint64)[None, :]
    zeros = np.zeros((len(rows), blocks.size), dtype=np.uint64)
    id_low, id_high = zeros + (rows & np.uint64(0xFFFFFFFF)), zeros + (rows >> np.uint64(32))
    words = philox([id_low, id_high, zeros + blocks, zeros + np.uint64(STREAM)], key)
    flat = np.stack(words, axis=-1).reshape(len(ids), -1)[:, :width]
    return torch.from_numpy(flat >= np.uint64(math.floor(p * 2**32)))


def expected(x: torch.Tensor, ids: torch.Tensor, p: float, key: int) -> torch.Tensor:
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    kept = is_kept(ids, math.prod(x.shape[1:]), p, key).view(x.shape)
    scaled = (x.to(wide) * torch.tensor(1.0 / (1.0 - p), dtype=wide)).to(x.dtype)
    return torch.where(kept, scaled, torch.zeros((), dtype=x.dtype))


def rand(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def some_ids(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 2**62, (size,), generator=torch.Generator().manual_seed(seed))


def test_the_oracle_gives_the_known_answers_of_random123():
    def words(*counter: int, key: int) -> list[int]:
        return [int(word) for word in philox([np.array(c) for c in counter], key)]

    ones = 0xFFFFFFFF
    assert words(0, 0, 0, 0, key=0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(ones, ones, ones, ones, key=2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words(*pi, key=0x299F31D0A4093822) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@grid(width=WIDTHS, dtype=FLOATS)
def test_what_is_dropped_and_what_is_kept_is_the_oracles_bit_by_bit(dtype, width):
    for num_rows in (1, 2, 15, 16, 17, 53):
        x, ids = rand((num_rows, width), dtype, seed=width), some_ids(num_rows)
        for p, key in ((0.5, 3), (0.1, -7), (0.93, stream_key(1, 2, 3))):
            got = dropout_rows(x, ids, p, key)
            assert got.dtype == dtype
            assert torch.equal(got, expected(x, ids, p, key))


def test_every_bit_of_id_and_key_counts():
    x, ids = torch.ones(len(IDS), 40), torch.tensor(IDS)
    for key in (0, 1, 2**32, 2**63 - 1, -(2**63), -1):
        assert torch.equal(dropout_rows(x, ids, 0.5, key), expected(x, ids, 0.5, key))
    masks = [dropout_rows(x[:1], torch.tensor([1 << bit]), 0.5, 0) for bit in range(63)]
    masks += [
        dropout_rows(x[:1], torch.tensor([0]), 0.5, (1 << bit) - (1 << 64 if bit == 63 else 0)) for bit in range(64)
    ]
    assert len(torch.unique(torch.cat(masks), dim=0)) == len(masks)


def test_narrow_ids_are_the_same_nodes():
    x, ids = rand((100, 19)), torch.arange(100, dtype=torch.int32) * 21_474_836
    assert torch.equal(dropout_rows(x, ids, 0.5, 1), dropout_rows(x, ids.long(), 0.5, 1))
    assert torch.equal(dropout_rows(x, ids, 0.5, 1), expected(x, ids.long(), 0.5, 1))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (4, 1, 5), (8, 32)])
def test_columns_are_counted_through_all_dimensions_behind_the_first(shape):
    x, ids = rand((30, *shape)), some_ids(30)
    got = dropout_rows(x, ids, 0.4, 5)
    assert got.shape == x.shape
    assert torch.equal(got.view(30, -1), dropout_rows(x.view(30, -1), ids, 0.4, 5))
    assert torch.equal(got, expected(x, ids, 0.4, 5))


@pytest.mark.parametrize("width", [1, 6, 64, 130])
def test_rows_in_another_order_or_in_pieces_are_the_same_rows(width):
    x, ids = rand((200, width)), some_ids(200)
    whole = dropout_rows(x, ids, 0.3, 9)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    assert torch.equal(dropout_rows(x[order], ids[order], 0.3, 9), whole[order])
    for sizes in ([200], [1, 199], [7, 0, 93, 100], [1] * 200):
        pieces = [dropout_rows(a, b, 0.3, 9) for a, b in zip(x.split(sizes), ids.split(sizes), strict=True)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("width", [1, 5, 256])
def test_the_number_of_threads_does_not_matter(width):
    x, ids = rand((40_000 // width + 3, width)), some_ids(40_000 // width + 3)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(dropout_rows(x, ids, 0.5, 4))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], expected(x, ids, 0.5, 4))
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("width", [3, 64, 100])
def test_a_wider_row_begins_as_a_narrower_one_and_every_dtype_has_its_mask(width):
    ids = some_ids(50)
    mask = dropout_rows(torch.ones(50, 128, dtype=torch.float64), ids, 0.5, 6) != 0
    for dtype in FLOATS:
        assert torch.equal(dropout_rows(torch.ones(50, width, dtype=dtype), ids, 0.5, 6) != 0, mask[:, :width])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_share_of_p_is_dropped_everywhere(p):
    num_rows, width = 20_000, 64
    kept = dropout_rows(torch.ones(num_rows, width), torch.arange(num_rows), p, stream_key(5)) != 0
    deviation = math.sqrt(p * (1 - p))
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation / math.sqrt(num_rows * width)
    assert (kept.double().mean(0) - (1 - p)).abs().max() < 5 * deviation / math.sqrt(num_rows)  # the worst of 64
    both = (kept[:, 1:] & kept[:, :-1]).double().mean().item()  # neighbouring columns know nothing of each other
    assert abs(both - (1 - p) ** 2) < 0.003
    both = (kept[1:] & kept[:-1]).double().mean().item()  # nor do neighbouring ids
    assert abs(both - (1 - p) ** 2) < 0.003


@pytest.mark.parametrize("p", [2.0**-33, 2.0**-20, 1 - 2.0**-20, 1 - 2.0**-53])
def test_the_ends_of_the_range_of_p_are_exact(p):
    x, ids = rand((1000, 256), torch.float64), torch.arange(1000)
    assert torch.equal(dropout_rows(x, ids, p, 2), expected(x, ids, p, 2))


def test_nothing_is_done_where_nothing_is_dropped():
    x, ids = rand((5, 7)), torch.arange(5)
    assert dropout_rows(x, ids, 0.0, 1) is x
    copy = native.dropout_rows(x, ids, 0.0, 1)
    assert torch.equal(copy, x) and copy.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_dropped_is_zero_whatever_it_was(dtype):
    ids = torch.arange(40)
    kept = is_kept(ids, 30, 0.5, 8)
    for value in (float("inf"), float("-inf"), float("nan")):
        got = dropout_rows(torch.full((40, 30), value, dtype=dtype), ids, 0.5, 8)
        assert torch.equal(got[~kept], torch.zeros(int((~kept).sum()), dtype=dtype))
        assert not torch.signbit(got[~kept]).any()
        torch.testing.assert_close(got[kept], torch.full_like(got[kept], value), equal_nan=True)


def test_rows_may_begin_anywhere_and_lie_in_any_order_in_memory():
    ids = torch.arange(20)
    for skip in (1, 2, 3):
        x = rand((20 * 24 + skip,))[skip:].view(20, 24)
        assert torch.equal(dropout_rows(x, ids, 0.5, 1), expected(x, ids, 0.5, 1))
    x = rand((24, 20)).t()
    assert torch.equal(dropout_rows(x, torch.arange(40)[::2], 0.5, 1), expected(x, torch.arange(40)[::2], 0.5, 1))


def test_no_rows_and_no_columns_are_fine():
    none = torch.empty(0, dtype=torch.int64)
    assert dropout_rows(torch.empty(0, 6), none, 0.5, 1).shape == (0, 6)
    assert dropout_rows(torch.empty(0), none, 0.5, 1).shape == (0,)
    assert dropout_rows(torch.empty(3, 0, 2), torch.arange(3), 0.5, 1).shape == (3, 0, 2)


def test_the_gradient_is_dropped_where_the_value_was_and_can_be_differentiated_again():
    x, ids = rand((6, 5), torch.float64).requires_grad_(), torch.tensor([4, 0, 4, 9, 2**40, 3])
    assert torch.autograd.gradcheck(lambda rows: dropout_rows(rows, ids, 0.4, 3), (x,))
    assert torch.autograd.gradgradcheck(lambda rows: dropout_rows(rows, ids, 0.4, 3) ** 2, (x,))
    grad = rand((6, 5), torch.float64, seed=3)
    (got,) = torch.autograd.grad(dropout_rows(x, ids, 0.4, 3), x, grad.t().contiguous().t())
    assert torch.equal(got, expected(grad, ids, 0.4, 3))


def test_the_op_obeys_torch_library_and_compiles():
    x, ids = rand((6, 5)).requires_grad_(), torch.arange(6)
    torch.library.opcheck(native.dropout_rows, (x, ids, 0.5, 3))
    torch.library.opcheck(native.dropout_rows, (x.detach().view(6, 5, 1).bfloat16(), ids.int(), 0.0, -3))
    compiled = torch.compile(lambda a, i: dropout_rows(a * 2, i, 0.5, 3) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids), expected(x.detach() * 2, ids, 0.5, 3) + 1)


@pytest.mark.parametrize("op", [dropout_rows, native.dropout_rows])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4, 3, dtype=torch.int64)}, "x must be float32, float64, bfloat16 or float16"),
        ({"x": torch.ones(())}, "x must have a row per id"),
        ({"x": torch.ones(5, 3)}, "x must have a row per id, 4, got"),
        ({"x": torch.empty(0, 2**34 + 4), "ids": torch.empty(0, dtype=torch.int64)}, "at most 2\\^34 values in a row"),
        ({"ids": torch.arange(4.0)}, "ids must be"),
        ({"ids": torch.arange(4)[None]}, "ids must"),
        ({"ids": torch.tensor([0, -3, 2, -4])}, "ids must be >= 0, got -3 at position 1"),
        (
            {"ids": torch.tensor([0, 1, 2, -(2**31)], dtype=torch.int32)},
            "ids must be >= 0, got -2147483648 at position 3",
        ),
        ({"p": 1.0}, "p must be in \\[0, 1\\), got 1"),
        ({"p": -0.1}, "p must be in \\[0, 1\\), got -0.1"),
        ({"p": float("nan")}, "p must be in \\[0, 1\\), got nan"),
    ],
)
def test_bad_arguments_are_refused_by_name(op, change, message):
    arguments = {"x": torch.ones(4, 3), "ids": torch.arange(4), "p": 0.5, "key": 1} | change
    with pytest.raises(ValueError, match=message):
        op(*arguments.values())


def test_a_key_beyond_64_bits_and_bad_arguments_where_nothing_is_dropped_are_refused():
    for key in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="key must be a signed 64-bit number"):
            dropout_rows(torch.ones(4, 3), torch.arange(4), 0.5, key)
    with pytest.raises(ValueError, match="x must have a row per id"):
        dropout_rows(torch.ones(4, 3), torch.arange(5), 0.0, 1)


def test_the_op_itself_wants_rows_one_after_the_other():
    with pytest.raises(ValueError, match="x must be contiguous"):
        native.dropout_rows(torch.ones(3, 4).t(), torch.arange(4), 0.5, 1)
