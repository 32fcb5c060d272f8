"""Attention on the device equals attention on the CPU: sums within rounding, dropout masks and reruns bit for bit."""

import pytest
import torch

from gnnsys.ops import CSC, edge_softmax, gat_aggregate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def csc_of(degrees: list[int], num_src: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> CSC:
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    generator = torch.Generator().manual_seed(seed)
    return CSC(indptr, torch.randint(num_src, (int(indptr[-1]),), generator=generator, dtype=dtype), num_src)


GRAPHS = {
    "ordinary": lambda dtype: csc_of([3, 0, 7, 1, 40, 0, 33], 29, dtype),
    "no edges": lambda dtype: csc_of([0, 0], 3, dtype),
    "no rows": lambda dtype: csc_of([], 3, dtype),
    "one long row": lambda dtype: csc_of([5000], 60, dtype),
    "long rows among short ones": lambda dtype: csc_of([3, 1025, 0, 1024, 2, 4100, 1, 2047, 6], 60, dtype),
    "long rows side by side": lambda dtype: csc_of([1500, 1600, 1700], 2000, dtype),
}


def on_device(csc: CSC) -> CSC:
    return CSC(csc.indptr.cuda(), csc.indices.cuda(), csc.num_src)


def inputs_of(csc: CSC, heads: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 1000 + width)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    return [
        randn(csc.num_src, heads, width),
        randn(csc.num_src, heads),
        randn(csc.num_dst, heads),
        randn(csc.num_edges, heads),
    ]


def assert_near(ours: torch.Tensor, exact: torch.Tensor, on_cpu: torch.Tensor) -> None:
    """As near to the result in float64 as the dtype allows, or as the CPU comes: gradients in 16 bits are made from
    results in 16 bits."""
    assert ours.dtype == on_cpu.dtype and ours.shape == exact.shape
    if not ours.numel():
        return
    allowed = TOLERANCE[ours.dtype] * max(1.0, float(exact.abs().max()))
    allowed = max(allowed, 2 * float((on_cpu.double() - exact).abs().max()))
    torch.testing.assert_close(ours.cpu().double(), exact, rtol=0, atol=allowed)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("heads", [None, 1, 2, 3, 8, 33, 70])
def test_edge_softmax_and_its_gradient_equal_the_cpu(graph, heads, index_dtype):
    csc = GRAPHS[graph](index_dtype)
    shape = (csc.num_edges,) if heads is None else (csc.num_edges, heads)
    for dtype in TOLERANCE:
        scores = (3 * torch.randn(shape, dtype=torch.float64)).to(dtype)
        grad = torch.randn(shape, dtype=torch.float64).to(dtype)

        def run(csc: CSC, scores: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
            scores = scores.detach().requires_grad_()
            alpha = edge_softmax(csc, scores)
            return [alpha.detach(), *torch.autograd.grad(alpha, scores, grad)]

        ours = run(on_device(csc), scores.cuda(), grad.cuda())
        for found in zip(ours, run(csc, scores.double(), grad.double()), run(csc, scores, grad), strict=True):
            assert_near(*found)


def test_edge_softmax_survives_scores_of_any_size_and_keeps_a_nan_in_its_row():
    inf = float("inf")
    scores = torch.tensor([3e38, -3e38, 3e38, -inf, -1e4, -1e4, float("nan"), 0.0, 0.0, 0.0]).cuda()
    csc = on_device(csc_of([3, 3, 2, 2], 1))
    alpha = edge_softmax(csc, scores)
    assert alpha[:6].tolist() == [0.5, 0.0, 0.5, 0.0, 0.5, 0.5] and alpha[8:].tolist() == [0.5, 0.5]
    assert alpha[6:8].isnan().all()
    long = torch.full((3000,), -inf).cuda()
    long[2500] = 1.0
    assert edge_softmax(on_device(csc_of([3000], 1)), long).sum().item() == 1.0
    long[2500] = -100.0
    assert edge_softmax(on_device(csc_of([3000], 1)), long).sum().item() == 1.0


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (2, 3), (4, 32), (3, 33), (8, 8), (1, 256), (2, 300)])
def test_gat_aggregate_and_all_its_gradients_equal_the_cpu(graph, heads, width, dropout):
    csc = GRAPHS[graph](torch.int32)
    for dtype in TOLERANCE:
        inputs = inputs_of(csc, heads, width, dtype)
        grad = torch.randn(csc.num_dst, heads, width, dtype=torch.float64).to(dtype)

        def run(csc: CSC, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
            inputs = [t.detach().requires_grad_() for t in inputs]
            out = gat_aggregate(csc, *inputs, dropout=dropout, key=9)
            return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

        for given in (inputs[:3], inputs):  # without and with a score per edge
            ours = run(on_device(csc), [t.cuda() for t in given], grad.cuda())
            exact = run(csc, [t.double() for t in given], grad.double())
            for found in zip(ours, exact, run(csc, given, grad), strict=True):
                assert_near(*found)


def test_every_run_gives_the_same_bits():
    csc = on_device(csc_of([3, 3000, 0, 5, 9000, 70], 500, torch.int64))
    inputs = [t.cuda().requires_grad_() for t in inputs_of(csc, 4, 16, torch.float32)]

    def run() -> list[torch.Tensor]:
        out = gat_aggregate(csc, *inputs, dropout=0.3, key=5)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_rows_that_are_not_aligned_give_the_same_result():
    csc = csc_of([3, 2, 40], 20)
    x, *scores = inputs_of(csc, 2, 4, torch.float32)
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)
    scores = [s.cuda() for s in scores]
    aligned = gat_aggregate(on_device(csc), x.cuda(), *scores)
    torch.testing.assert_close(gat_aggregate(on_device(csc), shifted, *scores), aligned)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda i: [i[0][:, 0], *i[1:]], "x"),
        (lambda i: [i[0], i[1][:-1], *i[2:]], "score_src"),
        (lambda i: [i[0], i[1], i[2][:, :1], i[3]], "score_dst"),
        (lambda i: [*i[:3], i[3].double()], "edge_score"),
        (lambda i: [i[0], i[1].cpu(), *i[2:]], "score_src"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, name):
    csc = csc_of([3, 2], 4)
    with pytest.raises(ValueError, match=name):
        gat_aggregate(on_device(csc), *change([t.cuda() for t in inputs_of(csc, 2, 3, torch.float32)]))
