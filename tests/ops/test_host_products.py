"""Products of rows that stay in a table, and the gradients of their weights: as dense products are."""

import threading

import pytest
import torch

from gnnsys.ops import HostMultiplier, MultipliedRows, RowsOnHost, host_products

FEATURES = 10


def made(num_ids, dtype=torch.float64, threads=None):
    torch.manual_seed(1)
    table = torch.randn(40, FEATURES, dtype=dtype)
    return HostMultiplier(table, threads), torch.randint(0, 40, (num_ids,))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize(
    "num_ids, counts", [(300, (300, 130)), (300, (300, 300)), (300, (0, 7)), (1, (1, 0)), (0, (0, 0))]
)
def test_products_and_gradients_are_those_of_gathered_rows(monkeypatch, num_ids, counts, threads, chunk_bytes):
    monkeypatch.setattr(host_products, "_CHUNK_BYTES", chunk_bytes)
    multiplier, ids = made(num_ids, threads=threads)
    weights = [torch.randn(width, FEATURES, dtype=torch.float64) for width in (3, 5)]
    rows = multiplier.table[ids]
    products = multiplier.products(ids, weights, counts)
    for product, weight, count in zip(products, weights, counts, strict=True):
        torch.testing.assert_close(product, rows[:count] @ weight.t(), rtol=1e-12, atol=1e-12)
    grads = [torch.randn_like(product) for product in products]
    for found, grad, count in zip(multiplier.gradients(ids, grads, counts), grads, counts, strict=True):
        torch.testing.assert_close(found, grad.t() @ rows[:count], rtol=1e-12, atol=1e-12)
    multiplier.close()


def test_a_thread_of_its_own_leaves_torch_the_threads_that_it_had():
    before = torch.get_num_threads()
    multiplier, ids = made(20, threads=before + 1)
    seen = multiplier.submit(lambda: (torch.get_num_threads(), threading.current_thread())).result()
    assert seen[0] == before + 1 and seen[1].name.startswith("gnnsys-products")
    assert torch.get_num_threads() == before
    multiplier.close()
    multiplier.close()
    assert not seen[1].is_alive()
    assert multiplier.products(ids, [torch.ones(2, FEATURES, dtype=torch.float64)], [20])[0].shape == (20, 2)
    multiplier.close()


def test_an_id_that_is_none_is_an_error_of_who_asks():
    for threads in (None, 1):
        multiplier, _ = made(1, threads=threads)
        with pytest.raises(IndexError):
            multiplier.products(torch.tensor([40]), [torch.ones(2, FEATURES, dtype=torch.float64)], [1])
        multiplier.close()


def test_a_table_that_trains_or_is_no_table_is_refused():
    for table in (torch.zeros(3, 2, requires_grad=True), torch.zeros(3)):
        with pytest.raises(ValueError, match="a constant table"):
            HostMultiplier(table)


def rows_of(multiplier, ids):
    host = RowsOnHost(multiplier, ids, lambda: None)
    return MultipliedRows(host, torch.device("cpu"), lambda: multiplier.table[ids])


def test_gradients_of_gradients():
    multiplier, ids = made(30)
    weights = [torch.randn(w, FEATURES, dtype=torch.float64, requires_grad=True) for w in (2, 3)]

    def products(*weights):
        return rows_of(multiplier, ids).times(weights, (30, 11))

    assert torch.autograd.gradcheck(products, weights)
    assert torch.autograd.gradgradcheck(products, weights)


def test_only_weights_that_train_have_gradients():
    multiplier, ids = made(30)
    fixed = torch.randn(2, FEATURES, dtype=torch.float64)
    trains = torch.randn(3, FEATURES, dtype=torch.float64, requires_grad=True)
    a, b = rows_of(multiplier, ids).times([fixed, trains], (30, 30))
    (a.sum() + b.sum()).backward()
    assert fixed.grad is None
    torch.testing.assert_close(trains.grad, multiplier.table[ids].sum(0).expand(3, -1))


def test_rows_are_asked_for_where_products_would_not_be_the_same():
    multiplier, ids = made(30)
    weight = torch.randn(2, FEATURES, dtype=torch.float64)
    assert rows_of(multiplier, ids).times([weight.float()], [30]) is None
    assert rows_of(multiplier, ids).times([weight[:, 1:]], [30]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert rows_of(multiplier, ids).times([weight], [30]) is None
    rows = rows_of(multiplier, ids)
    first = rows.first_rows(4)
    assert first.shape == (4, FEATURES) and not rows.is_gathered
    assert torch.equal(first + 0, multiplier.table[ids][:4]) and rows.is_gathered
    assert rows.times([weight], [30]) is None
