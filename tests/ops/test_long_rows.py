"""Float32 sums over rows of a hundred thousand edges keep their digits; shorter rows have the bits they always had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import CSC, edge_softmax, gat_aggregate, sddmm, spmm, spmm_add

LONG = 120_001  # many blocks of kBlock (csrc/cpu/block_sum.h), and a rest
NUM_NODES = 50
WIDTHS = (1, 7, 64)
TOLERANCE = 2e-5  # plain float32 sums were off by 1.6e-4; the kernels of a GPU are by 1.1e-5


def graph(long: int = LONG, turned: bool = False) -> CSC:
    """One row of `long` in-edges beside short ones and an empty one; turned: one column of as many out-edges."""
    g = torch.Generator().manual_seed(1)
    dst = torch.cat([torch.full((long,), 3), torch.randint(0, NUM_NODES - 1, (500,), generator=g)])
    src = torch.randint(0, NUM_NODES, (dst.numel(),), generator=g)
    return CSC.from_edge_index(torch.stack([dst, src] if turned else [src, dst]), NUM_NODES)


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Of one sign: then what each addition loses adds up."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def error(got: Tensor, expected: Tensor) -> float:
    """Relative to the largest value of each row."""
    scale = expected.abs().amax(tuple(range(1, expected.dim())), keepdim=True) if expected.dim() > 1 else expected.abs()
    return float(((got.double() - expected).abs() / scale.clamp_min(1e-30)).max())


def summed(csc: CSC, messages: Tensor) -> Tensor:
    return messages.new_zeros(csc.num_dst, *messages.shape[1:]).index_add(0, csc.dst(), messages)


def attention(csc: CSC, x: Tensor, score_src: Tensor, score_dst: Tensor) -> Tensor:
    raw = score_src[csc.indices.long()] + score_dst[csc.dst()]
    weight = torch.nn.functional.leaky_relu(raw, 0.2).exp()
    alpha = weight / summed(csc, weight)[csc.dst()]
    return summed(csc, alpha.unsqueeze(2) * x[csc.indices.long()])


@pytest.mark.parametrize("turned", [False, True], ids=["long rows", "long columns"])
def test_sums_means_and_weighted_sums_and_their_gradients(turned: bool):
    csc = graph(turned=turned)
    for width in WIDTHS:
        x, weight = positive(NUM_NODES, width), positive(csc.num_edges, seed=2)
        grad = positive(NUM_NODES, width, seed=3)
        degree = csc.in_degrees().clamp_min(1).double().unsqueeze(1)
        wide = x.double()[csc.indices.long()]
        plain = summed(csc, wide)
        weighted = summed(csc, wide * weight.double().unsqueeze(1))
        assert error(spmm(csc, x), plain) < TOLERANCE
        assert error(spmm(csc, x, reduce="mean"), plain / degree) < TOLERANCE
        assert error(spmm(csc, x, weight), weighted) < TOLERANCE
        assert error(spmm_add(csc, x, torch.zeros(NUM_NODES, width), weight), weighted) < TOLERANCE
        leaf = x.clone().requires_grad_()
        spmm(csc, leaf, weight).backward(grad)
        terms = grad.double()[csc.dst()] * weight.double().unsqueeze(1)
        expected = terms.new_zeros(NUM_NODES, width).index_add(0, csc.indices.long(), terms)
        assert leaf.grad is not None and error(leaf.grad, expected) < TOLERANCE


@pytest.mark.parametrize("turned", [False, True], ids=["long rows", "long columns"])
def test_attention_and_its_gradients(turned: bool):
    csc = graph(turned=turned)
    for heads, width in ((1, 1), (2, 16), (4, 33)):
        shapes = [(NUM_NODES, heads, width), (NUM_NODES, heads), (NUM_NODES, heads)]
        given = [positive(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        wide = [t.detach().double().requires_grad_() for t in given]
        grad = positive(NUM_NODES, heads, width, seed=9)
        out, expected = gat_aggregate(csc, *given), attention(csc, *wide)
        assert error(out.detach(), expected.detach()) < TOLERANCE
        out.backward(grad)
        expected.backward(grad.double())
        assert error(given[0].grad, wide[0].grad) < TOLERANCE
        for mine, theirs in zip(given[1:], wide[1:], strict=True):  # sums of both signs that nearly cancel
            terms = grad.abs().sum() / NUM_NODES
            assert float((mine.grad.double() - theirs.grad).abs().max() / terms) < 10 * TOLERANCE


def test_edge_softmax_and_its_gradient():
    csc = graph()
    for heads in (1, 3):
        scores = positive(csc.num_edges, heads).requires_grad_()
        wide = scores.detach().double().requires_grad_()
        grad = positive(csc.num_edges, heads, seed=5)
        weight = wide.exp()
        expected = weight / summed(csc, weight)[csc.dst()]
        alpha = edge_softmax(csc, scores)
        assert float(((alpha.double() - expected) / expected).detach().abs().max()) < TOLERANCE
        alpha.backward(grad)
        expected.backward(grad.double())
        scale = expected.detach().abs()
        assert float(((scores.grad.double() - wide.grad).abs() / scale).max()) < TOLERANCE


def test_the_sums_do_not_depend_on_the_number_of_threads():
    csc, threads = graph(long=5000), torch.get_num_threads()
    x, score = positive(NUM_NODES, 2, 9), positive(NUM_NODES, 2)
    weight = positive(csc.num_edges, 2)
    calls = [
        lambda: spmm(csc, x, weight),
        lambda: gat_aggregate(csc, x, score, score),
        lambda: edge_softmax(csc, weight),
        lambda: sddmm(csc, x, x),
    ]
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append([call() for call in calls])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_of_one_block_are_summed_in_the_order_of_their_edges():
    csc = graph(long=200)
    x = positive(NUM_NODES, 3)
    one_by_one = torch.zeros(NUM_NODES, 3)
    for v, row in enumerate(csc.indices.split(csc.in_degrees().tolist())):
        for u in row.tolist():
            one_by_one[v] += x[u]
    assert torch.equal(spmm(csc, x), one_by_one)
