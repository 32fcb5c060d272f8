"""Attention over in-edges equals the same thing written with a message per edge in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from gnnsys.ops import CSC, edge_softmax, gat_aggregate, spmm
from gnnsys.ops._library import native
from tests.ops.graphs import GRAPHS, gradients_are_right, random_csc
from tests.support.grid import grid

ALL_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=GRAPHS, ids=str)
def csc(request) -> CSC:
    return GRAPHS[request.param]()


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = False) -> torch.Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.requires_grad_(grad)


def inputs_of(csc: CSC, heads: int, width: int, grad: bool = False, dtype: torch.dtype = torch.float64):
    return (
        randn(csc.num_src, heads, width, dtype=dtype, grad=grad),
        randn(csc.num_src, heads, dtype=dtype, seed=1, grad=grad),
        randn(csc.num_dst, heads, dtype=dtype, seed=2, grad=grad),
        randn(csc.num_edges, heads, dtype=dtype, seed=3, grad=grad),
    )


def softmax_by_row(csc: CSC, scores: torch.Tensor) -> torch.Tensor:
    rows = scores.split(csc.in_degrees().tolist()) if csc.num_dst else []
    return torch.cat([scores[:0], *(row.softmax(0) for row in rows)])


def attention_by_edge(csc: CSC, x, score_src, score_dst, edge_score, slope: float) -> torch.Tensor:
    src, dst = csc.indices.long(), csc.dst()
    scores = score_src[src] + score_dst[dst]
    scores = scores if edge_score is None else scores + edge_score
    alpha = softmax_by_row(csc, F.leaky_relu(scores, slope))
    return x.new_zeros(csc.num_dst, *x.shape[1:]).index_add(0, dst, alpha[:, :, None] * x[src])


@grid(heads=[(), (1,), (3,), (8,)])
def test_edge_softmax_equals_softmax_row_by_row(csc, heads):
    scores = randn(csc.num_edges, *heads)
    torch.testing.assert_close(edge_softmax(csc, scores), softmax_by_row(csc, scores))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_edge_softmax_is_as_exact_as_its_dtype(dtype):
    csc = random_csc(50, 20, 5000)
    scores = (randn(5000, 4) * 10).to(dtype)
    expected = softmax_by_row(csc, scores.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(edge_softmax(csc, scores).double(), expected, rtol=max(4 * eps, 4e-6), atol=eps**2)


def test_edge_softmax_survives_scores_of_any_size():
    csc = CSC(torch.tensor([0, 3, 6]), torch.tensor([0, 0, 0, 0, 0, 0]), 1)
    scores = torch.tensor([3e38, -3e38, 3e38, -float("inf"), -1e4, -1e4])
    assert edge_softmax(csc, scores).tolist() == [0.5, 0.0, 0.5, 0.0, 0.5, 0.5]


def test_edge_softmax_hands_a_nan_to_its_own_row_only():
    csc = CSC(torch.tensor([0, 2, 4]), torch.tensor([0, 0, 0, 0]), 1)
    out = edge_softmax(csc, torch.tensor([float("nan"), 0.0, 0.0, 0.0]))
    assert out[:2].isnan().all() and out[2:].tolist() == [0.5, 0.5]


def test_edge_softmax_has_the_right_gradient(csc):
    for heads in ((), (2,)):
        assert gradients_are_right(lambda s: edge_softmax(csc, s), (randn(csc.num_edges, *heads, grad=True),))


@grid(heads=[1, 2, 5], width=[1, 3, 8, 33, 64])
def test_gat_aggregate_equals_attention_by_edge(csc, width, heads):
    x, score_src, score_dst, edge_score = inputs_of(csc, heads, width)
    for edge in (None, edge_score):
        out = gat_aggregate(csc, x, score_src, score_dst, edge, negative_slope=0.3)
        torch.testing.assert_close(out, attention_by_edge(csc, x, score_src, score_dst, edge, 0.3))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_gat_aggregate_works_in_every_dtype(dtype):
    csc = random_csc(30, 10, 2000)
    x, score_src, score_dst, edge_score = inputs_of(csc, 4, 20, dtype=dtype)
    out = gat_aggregate(csc, x, score_src, score_dst, edge_score)
    assert out.dtype == dtype
    expected = attention_by_edge(csc, *(t.double() for t in (x, score_src, score_dst, edge_score)), 0.2)
    torch.testing.assert_close(out, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@grid(dropout=[0.0, 0.4])
def test_gat_aggregate_has_the_right_gradients(csc, dropout):
    inputs = inputs_of(csc, 2, 3, grad=True)
    assert gradients_are_right(lambda *i: gat_aggregate(csc, *i, dropout=dropout, key=7), inputs)
    assert gradients_are_right(lambda *i: gat_aggregate(csc, *i, dropout=dropout, key=7), inputs[:3])


def test_only_the_gradients_that_are_asked_for_are_made():
    csc = random_csc(13, 9, 60)
    x, score_src, score_dst, edge_score = inputs_of(csc, 2, 3)
    score_dst.requires_grad_()
    gat_aggregate(csc, x, score_src, score_dst, edge_score).sum().backward()
    assert score_dst.grad is not None and x.grad is None and score_src.grad is None


def masks(csc: CSC, heads: int, dropout: float, key: int) -> torch.Tensor:
    """The factors [num_edges, heads] that dropout applied: edge e is the only in-edge of e, and x is one."""
    n = csc.num_edges
    alone = CSC(torch.arange(n + 1), torch.zeros(n, dtype=torch.int64), 1)
    return gat_aggregate(
        alone, torch.ones(1, heads, 1), torch.zeros(1, heads), torch.zeros(n, heads), dropout=dropout, key=key
    )[:, :, 0]


def test_dropout_drops_with_its_probability_and_keeps_the_mean():
    kept = masks(random_csc(9, 9, 40_000), 5, 0.3, key=11)
    assert set(kept.unique().tolist()) == {0.0, kept.max().item()}
    assert kept.max().item() == pytest.approx(1 / 0.7)
    # 200,000 draws: six standard deviations of the share are 0.0062
    assert (kept == 0).double().mean().item() == pytest.approx(0.3, abs=0.0062)
    for head in range(1, 5):
        agree = ((kept[:, 0] == 0) == (kept[:, head] == 0)).double().mean().item()
        assert agree == pytest.approx(0.3**2 + 0.7**2, abs=0.015)


def test_dropout_is_a_function_of_key_position_and_head():
    csc = random_csc(40, 30, 300)
    x, score_src, score_dst, edge_score = inputs_of(csc, 3, 4)
    scores = F.leaky_relu(score_src[csc.indices] + score_dst[csc.dst()] + edge_score, 0.2)
    kept = masks(csc, 3, 0.5, key=5).double()
    out = gat_aggregate(csc, x, score_src, score_dst, edge_score, dropout=0.5, key=5)
    torch.testing.assert_close(out, spmm(csc, x, edge_softmax(csc, scores) * kept))
    assert not torch.equal(kept, masks(csc, 3, 0.5, key=6).double())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_results_have_the_same_bits_for_any_threads_and_index_type(index_dtype):
    def run(dtype: torch.dtype, threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            csc = random_csc(2000, 3000, 40_000, dtype)
            inputs = inputs_of(csc, 3, 9, grad=True, dtype=torch.float32)
            out = gat_aggregate(csc, *inputs, dropout=0.2, key=3)
            grads = torch.autograd.grad(out, inputs, randn(3000, 3, 9, dtype=torch.float32))
            alpha = edge_softmax(csc, inputs[3])
            return [out, *grads, alpha, *torch.autograd.grad(alpha, inputs[3], inputs[3])]
        finally:
            torch.set_num_threads(before)

    for a, b in zip(run(torch.int64, 1), run(index_dtype, 2), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c, x, s, d, e: gat_aggregate(c, x[:, 0], s, d, e), "x"),
        (lambda c, x, s, d, e: gat_aggregate(c, x[:-1], s, d, e), "x"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s[:-1], d, e), "score_src"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s, d[:-1], e), "score_dst"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s, d[:, :1], e), "score_dst"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s, d.float(), e), "score_dst"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s, d, e[1:]), "edge_score"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s, d, e, dropout=1.0), "dropout"),
        (lambda c, x, s, d, e: gat_aggregate(c, x, s, d, e, dropout=-0.1), "dropout"),
        (lambda c, x, s, d, e: edge_softmax(c, e[1:]), "indptr"),
        (lambda c, x, s, d, e: edge_softmax(c, e.long()), "scores"),
        (lambda c, x, s, d, e: edge_softmax(c, e[:, :, None]), "scores"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    csc = random_csc(13, 9, 60)
    with pytest.raises(ValueError, match=name):
        call(csc, *inputs_of(csc, 2, 3))


def test_nothing_of_the_size_of_edges_times_features_is_ever_stored():
    csc = random_csc(100, 100, 200_000)  # messages would take 51 MB, scores take 1.6 MB
    inputs = inputs_of(csc, 2, 32, grad=True, dtype=torch.float32)
    csc.transpose()
    with torch.profiler.profile(profile_memory=True) as profile:
        gat_aggregate(csc, *inputs).sum().backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < 8_000_000


def test_the_ops_obey_torch_library_and_compile():
    csc = random_csc(13, 9, 60)
    inputs = inputs_of(csc, 2, 3, grad=True)
    t = csc.transpose()
    torch.library.opcheck(native.edge_softmax, (csc.indptr, inputs[3]))
    torch.library.opcheck(
        native.gat_aggregate, (csc.indptr, csc.indices, *inputs, 0.2, 0.5, 3, t.indptr, t.indices, t.edge_ids)
    )
    compiled = torch.compile(lambda *i: gat_aggregate(csc, *i).sum(), fullgraph=True, backend="aot_eager")
    compiled(*inputs).backward()
    expected = torch.autograd.grad(gat_aggregate(csc, *inputs).sum(), inputs)
    torch.testing.assert_close([i.grad for i in inputs], list(expected))
