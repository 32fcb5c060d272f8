"""Rows move, change and take optimizer steps as torch's own operations would have it, for any number of threads."""

import threading
import time

import pytest
import torch

from gnnsys.ops import fill_uniform, move_rows, num_versions, sparse_adagrad_step, sparse_adam_step, update_rows
from tests.support.grid import grid

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def versions(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_versions(num_rows), dtype=torch.int32)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@grid(
    index_dtype=[torch.int32, torch.int64],
    dtype=[*FLOATS, torch.uint8, torch.int64, torch.complex128],
    shape=[(), (3,), (128,), (5, 7)],
    guarded=[False, True],
)
def test_rows_are_moved_from_their_index_to_their_place(shape, dtype, index_dtype, guarded, threads):
    src = (torch.randn(500, *shape, generator=generator()) * 50).to(dtype)
    index = torch.randint(0, 500, (3000,), generator=generator(1)).to(index_dtype)
    order = torch.randperm(4000, generator=generator(2))[:3000]
    out = torch.zeros(4000, *shape, dtype=dtype)
    expected = out.clone()
    expected[order] = src[index.long()]
    move_rows(src, out, index=index, order=order, versions=versions(500) if guarded else None)
    assert torch.equal(out, expected)


def test_rows_in_turn_go_to_their_places_and_places_in_turn_take_their_rows():
    src, order = torch.randn(50, 9, generator=generator()), torch.randperm(50, generator=generator(1))
    assert torch.equal(move_rows(src, torch.empty(50, 9), order=order)[order], src)
    assert torch.equal(move_rows(src, torch.empty(50, 9), index=order), src[order])
    assert torch.equal(move_rows(src, torch.empty(50, 9)), src)


@grid(to=FLOATS, dtype=FLOATS)
def test_columns_and_whole_rows_are_cast_as_torch_casts(dtype, to):
    src = torch.randn(60, 4, 5, generator=generator()).to(dtype)
    index, columns = torch.randint(0, 60, (99,), generator=generator(1)), torch.tensor([19, 0, 7, 7])
    assert torch.equal(move_rows(src, torch.empty(99, 4, 5, dtype=to), index=index), src[index].to(to))
    picked = move_rows(src, torch.empty(99, 4, dtype=to), index=index, columns=columns)
    assert torch.equal(picked, src.view(60, 20)[index][:, columns].to(to))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.complex128])
def test_columns_of_any_width_are_taken(dtype):
    src = (torch.randn(60, 8, generator=generator()) * 50).to(dtype)
    columns = torch.tensor([5, 2])
    assert torch.equal(move_rows(src, torch.empty(60, 2, dtype=dtype), columns=columns), src[:, columns])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.tensor([5])}, r"index must be in \[0, 5\), got 5"),
        ({"index": torch.tensor([0]), "order": torch.tensor([7])}, r"order must be in \[0, 1\), got 7"),
        ({"index": torch.tensor([0, 1])}, "out must have 2 rows"),
        ({"index": torch.tensor([0]), "columns": torch.tensor([0, 3])}, r"columns must be in \[0, 3\)"),
        ({"index": torch.tensor([0]), "columns": torch.tensor([0])}, "rows of 1 columns"),
        ({"index": torch.tensor([0]), "versions": torch.zeros(0, dtype=torch.int32)}, "one entry per 64 rows"),
    ],
)
def test_moves_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        move_rows(torch.zeros(5, 3), torch.zeros(1, 3), **change)


@grid(dtype=[*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_rows_are_added_in_order(dtype, threads):
    dst = (torch.randn(300, 7, generator=generator()) * 5).to(dtype)
    src = (torch.randn(4000, 7, generator=generator(1)) * 5).to(dtype)
    index = torch.randint(0, 300, (4000,), generator=generator(2))
    expected = dst.clone()
    for row, value in zip(index.tolist(), src, strict=True):
        expected[row] += value
    update_rows(dst, index, src, add=True, versions=versions(300))
    assert torch.equal(dst, expected)


def test_the_last_write_of_a_row_wins(threads):
    dst, src = torch.zeros(200, 33), torch.randn(20_000, 33, generator=generator())
    index = torch.randint(0, 200, (20_000,), generator=generator(1))
    expected = {int(row): value for row, value in zip(index, src, strict=True)}
    counters = versions(200)
    update_rows(dst, index, src, versions=counters)
    assert all(torch.equal(dst[row], value) for row, value in expected.items())
    assert (counters % 2 == 0).all() and (counters > 0).all()


def test_a_row_is_never_read_half_written():
    num_rows, width = 4096, 512
    table, counters = torch.zeros(num_rows, width), versions(num_rows)
    stop, torn, reads = threading.Event(), 0, []

    def write():
        value, rows = 0, torch.arange(num_rows)
        while not stop.is_set():
            value += 1
            update_rows(table, rows, torch.full((num_rows, width), float(value)), versions=counters)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        index = torch.randint(0, num_rows, (2000,), generator=generator())
        deadline = time.monotonic() + 20
        while len(reads) < 30 or (len(set(reads)) < 2 and time.monotonic() < deadline):
            rows = move_rows(table, torch.empty(2000, width), index=index, versions=counters)
            torn += int((rows != rows[:, :1]).any(1).sum())
            reads.append(float(rows.max()))
    finally:
        stop.set()
        writer.join(timeout=30)
    assert torn == 0
    assert len(set(reads)) > 1, "nothing was written while rows were read"


def test_uniform_values_depend_on_the_row_number_alone(threads):
    whole, low, high = torch.empty(1000, 6), torch.empty(300, 6), torch.empty(700, 6)
    fill_uniform(whole, 0, -2.0, 3.0, 7)
    fill_uniform(low, 0, -2.0, 3.0, 7)
    fill_uniform(high, 300, -2.0, 3.0, 7)
    assert torch.equal(whole, torch.cat([low, high]))
    assert whole.min() >= -2 and whole.max() <= 3 and abs(float(whole.mean()) - 0.5) < 0.1
    assert whole.unique().numel() > 5900
    other = torch.empty(1000, 6)
    fill_uniform(other, 0, -2.0, 3.0, 8)
    assert not torch.equal(whole, other)


def sparse_grad(num_rows: int, ids: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    shape = (num_rows, *grads.shape[1:])
    return torch.sparse_coo_tensor(ids[None], grads, shape, check_invariants=True).coalesce()


def draws(step: int, dim: int = 9):
    ids = torch.randint(0, 200, (500,), generator=generator(step))
    return ids, torch.randn(500, dim, generator=generator(100 + step))


def test_adam_is_torchs_sparse_adam(threads):
    rows = torch.randn(200, 9, generator=generator())
    weight = torch.nn.Parameter(rows.clone())
    oracle = torch.optim.SparseAdam([weight], lr=0.05, betas=(0.8, 0.95), eps=1e-7)
    average, square = torch.zeros_like(rows), torch.zeros_like(rows)
    for step in range(1, 8):
        ids, grads = draws(step)
        weight.grad = sparse_grad(200, ids, grads)
        oracle.step()
        size = 0.05 * (1 - 0.95**step) ** 0.5 / (1 - 0.8**step)
        touched = sparse_adam_step(
            rows, average, square, [ids], [grads], ranks=1, step_size=size, betas=(0.8, 0.95), eps=1e-7,
            versions=[versions(200)] * 1,
        )  # fmt: skip
        assert touched == ids.unique().numel()
    torch.testing.assert_close(rows, weight.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(average, oracle.state[weight]["exp_avg"], rtol=1e-6, atol=1e-7)


def test_adagrad_is_torchs_adagrad_on_sparse_gradients(threads):
    rows = torch.randn(200, 9, generator=generator())
    weight = torch.nn.Parameter(rows.clone())
    oracle = torch.optim.Adagrad([weight], lr=0.1, lr_decay=0.01, eps=1e-8, initial_accumulator_value=0.5)
    sums = torch.full_like(rows, 0.5)
    for step in range(1, 8):
        ids, grads = draws(step)
        weight.grad = sparse_grad(200, ids, grads)
        oracle.step()
        sparse_adagrad_step(rows, sums, [ids], [grads], ranks=1, step_size=0.1 / (1 + (step - 1) * 0.01), eps=1e-8)
    torch.testing.assert_close(rows, weight.detach(), rtol=1e-6, atol=1e-7)


def test_gradients_of_ranks_are_summed_in_order_and_averaged():
    ids, grads = draws(3)
    rows = [torch.zeros(200, 9) for _ in range(3)]
    sums = [torch.zeros(200, 9) for _ in range(3)]
    halves = [ids[:250], ids[250:].int()], [grads[:250], grads[250:]]
    sparse_adagrad_step(rows[0], sums[0], *halves, ranks=2, step_size=0.1, eps=0.0)
    sparse_adagrad_step(rows[1], sums[1], [ids], [grads], ranks=2, step_size=0.1, eps=0.0)
    assert torch.equal(rows[0], rows[1]) and torch.equal(sums[0], sums[1])
    sparse_adagrad_step(rows[2], sums[2], [ids], [grads / 2], ranks=1, step_size=0.1, eps=0.0)
    torch.testing.assert_close(sums[0], sums[2])


def test_steps_with_ids_or_shapes_that_do_not_fit_are_refused():
    table, state, grads = torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(1, 2)
    options = {"ranks": 1, "step_size": 0.1, "eps": 0.0}
    with pytest.raises(ValueError, match=r"ids must be in \[0, 4\), got 4"):
        sparse_adagrad_step(table, state, [torch.tensor([4])], [grads], **options)
    with pytest.raises(ValueError, match="grads must have 2 rows"):
        sparse_adagrad_step(table, state, [torch.tensor([1, 2])], [grads], **options)
    with pytest.raises(ValueError, match="sum must have the table's shape"):
        sparse_adagrad_step(table, torch.zeros(4, 3), [torch.tensor([1])], [grads], **options)
