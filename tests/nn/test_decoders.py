"""Decoders are their papers' formulas, from either end and for any shape of candidates; losses are theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gnnsys.nn import (
    Bilinear,
    ComplEx,
    Decoder,
    DistMult,
    Dot,
    RotatE,
    TransE,
    binary_link_loss,
    margin_link_loss,
    self_adversarial_link_loss,
    softmax_link_loss,
)

DIM, KINDS, LINKS = 6, 4, 9


def as_complex(rows: torch.Tensor) -> torch.Tensor:
    return torch.complex(*rows.chunk(2, -1))


FORMULAS = {
    "dot": (lambda: Dot(DIM), lambda d, h, t, r: (h * t).sum(-1)),
    "bilinear": (lambda: Bilinear(DIM), lambda d, h, t, r: torch.einsum("bi,ij,bj->b", h, d.weight[0], t)),
    "rescal": (lambda: Bilinear(DIM, KINDS), lambda d, h, t, r: torch.einsum("bi,bij,bj->b", h, d.weight[r], t)),
    "distmult": (lambda: DistMult(DIM, KINDS), lambda d, h, t, r: (h * d.relation[r] * t).sum(-1)),
    "complex": (
        lambda: ComplEx(DIM, KINDS),
        lambda d, h, t, r: (as_complex(h) * as_complex(d.relation[r]) * as_complex(t).conj()).sum(-1).real,
    ),
    "transe": (lambda: TransE(DIM, KINDS), lambda d, h, t, r: -(h + d.relation[r] - t).abs().sum(-1)),
    "transe l2": (lambda: TransE(DIM, KINDS, p=2), lambda d, h, t, r: -(h + d.relation[r] - t).square().sum(-1).sqrt()),
    "rotate": (
        lambda: RotatE(DIM, KINDS),
        lambda d, h, t, r: -(as_complex(h) * torch.polar(torch.ones(()), d.relation[r]) - as_complex(t)).abs().sum(-1),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_are_the_papers_from_both_ends_and_for_every_shape(name):
    torch.manual_seed(0)
    make, formula = FORMULAS[name]
    decoder = make()
    head, tail, others = torch.randn(LINKS, DIM), torch.randn(LINKS, DIM), torch.randn(5, DIM)
    relation = torch.randint(KINDS, (LINKS,)) if decoder.num_relations else None
    want = formula(decoder, head, tail, relation)
    for wanted in ("tail", "head"):
        torch.testing.assert_close(decoder(head, tail, relation, wanted), want)
        known, true = (head, tail) if wanted == "tail" else (tail, head)
        everything = decoder.score_all(known, torch.cat([others, true]), relation, wanted)
        assert everything.shape == (LINKS, 5 + LINKS)
        torch.testing.assert_close(everything[:, 5:].diagonal(), want, rtol=1e-4, atol=1e-5)
        each = torch.stack([true, others[:1].expand(LINKS, DIM)], 1)  # two candidates per link
        found = decoder(known, each, relation) if wanted == "tail" else decoder(each, known, relation, "head")
        torch.testing.assert_close(found[:, 0], want)
        torch.testing.assert_close(found[:, 1], everything[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_reach_rows_and_relations(name):
    torch.manual_seed(0)
    decoder = FORMULAS[name][0]().double()
    head, tail = (torch.randn(4, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2))
    relation = torch.tensor([0, 2, 2, 1]) if decoder.num_relations else None
    assert torch.autograd.gradcheck(lambda h, t, *_: decoder(h, t, relation), (head, tail, *decoder.parameters()))


def test_turned_rows_that_meet_have_gradients():
    decoder, rows = RotatE(DIM, 1), torch.zeros(3, DIM, requires_grad=True)  # as behind a ReLU
    decoder(rows, rows, torch.zeros(3, dtype=torch.int64)).sum().backward()
    assert bool(rows.grad.isfinite().all()) and bool(decoder.relation.grad.isfinite().all())


@pytest.mark.parametrize("name", FORMULAS)
def test_rows_may_have_two_bytes_a_number(name):
    decoder = FORMULAS[name][0]()
    head, tail = torch.randn(2, LINKS, DIM)
    relation = torch.zeros(LINKS, dtype=torch.int64) if decoder.num_relations else None
    found = decoder.score_all(head.bfloat16(), tail.bfloat16(), relation).float()
    torch.testing.assert_close(found, decoder.score_all(head, tail, relation), rtol=0.1, atol=0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_turned_rows_of_two_bytes_are_compared_whatever_their_squares(dtype):
    """Squares of the first rows are beyond float16, those of the last below it."""
    decoder, relation = RotatE(DIM, KINDS).to(dtype), torch.zeros(3, dtype=torch.long)
    head, tail = torch.tensor([300.0, 1.0, 1e-5], dtype=dtype)[:, None].expand(3, DIM), torch.zeros(3, DIM, dtype=dtype)
    expected = decoder.float()(head.float(), tail.float(), relation)
    decoder = decoder.to(dtype)
    for scores in (decoder(head, tail, relation), decoder.score_all(head, tail, relation)[:, 0]):
        assert scores.dtype == dtype
        torch.testing.assert_close(scores.float(), expected, rtol=0.02, atol=0)


def test_a_decoder_of_ones_own_needs_nothing_but_forward():
    class Sum(Decoder):
        def forward(self, head, tail, relation=None, wanted="tail"):
            return (head + tail).sum(-1)

    decoder = Sum(DIM)
    assert decoder(torch.ones(2, DIM), torch.ones(2, DIM)).tolist() == [2.0 * DIM] * 2
    with pytest.raises(NotImplementedError, match="Sum has no query"):
        decoder.score_all(torch.ones(2, DIM), torch.ones(2, DIM))


def test_no_links_are_no_loss_and_change_no_weight():
    positive, negative = torch.empty(0, requires_grad=True), torch.empty(0, 3, requires_grad=True)
    for loss in (binary_link_loss, softmax_link_loss, margin_link_loss, self_adversarial_link_loss):
        found = loss(positive, negative)
        found.backward()
        assert float(found.detach()) == 0


def test_losses_are_their_formulas():
    torch.manual_seed(0)
    positive, negative = torch.randn(7), torch.randn(7, 3)
    labels, scores = torch.cat([torch.ones(7, 1), torch.zeros(7, 3)], 1), torch.cat([positive[:, None], negative], 1)
    weights = torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]).expand(7, 4)
    want = F.binary_cross_entropy_with_logits(scores, labels, weights, reduction="sum") / 14
    torch.testing.assert_close(binary_link_loss(positive, negative), want)
    torch.testing.assert_close(softmax_link_loss(positive, negative), F.cross_entropy(scores, torch.zeros(7).long()))
    spread = positive[:, None].expand(7, 3).reshape(-1)
    want = F.margin_ranking_loss(spread, negative.reshape(-1), torch.ones(21), margin=2.0)
    torch.testing.assert_close(margin_link_loss(positive, negative, 2.0), want)
    by_hand = [
        -(F.logsigmoid(6 + p) + (F.softmax(0.5 * n, 0) * F.logsigmoid(-6 - n)).sum()) / 2
        for p, n in zip(positive, negative, strict=True)
    ]
    torch.testing.assert_close(self_adversarial_link_loss(positive, negative, 6, 0.5), torch.stack(by_hand).mean())


@pytest.mark.parametrize("loss", [binary_link_loss, softmax_link_loss, margin_link_loss, self_adversarial_link_loss])
def test_a_weight_multiplies_what_a_link_adds_and_one_negative_needs_no_column(loss):
    torch.manual_seed(0)
    positive, negative, weight = torch.randn(7), torch.randn(7, 3), torch.rand(7)
    by_link = torch.stack([loss(p[None], n[None]) for p, n in zip(positive, negative, strict=True)])
    torch.testing.assert_close(loss(positive, negative, weight=weight), (weight * by_link).sum() / 7)
    assert torch.equal(loss(positive, negative[:, 0]), loss(positive, negative[:, :1]))
    with pytest.raises(ValueError, match=r"weight must have one entry per link, 7, got \[14\]"):
        loss(positive, negative, weight=torch.ones(14))
    with pytest.raises(ValueError, match=r"weight must be a tensor of one number per link, \[7\], got list"):
        loss(positive, negative, weight=[1.0] * 7)
    double = loss(positive, negative, weight=weight.double())
    assert double.dtype == torch.float32
    torch.testing.assert_close(double, loss(positive, negative, weight=weight))
    half = loss(positive.bfloat16(), negative.bfloat16(), weight=weight)
    assert half.dtype == loss(positive.bfloat16(), negative.bfloat16()).dtype == torch.bfloat16


def test_negatives_of_the_self_adversarial_loss_weigh_without_a_gradient():
    negative = torch.tensor([[0.0, 3.0]], requires_grad=True)
    self_adversarial_link_loss(torch.zeros(1), negative).backward()
    weight = negative.detach().softmax(1)
    torch.testing.assert_close(negative.grad, weight * negative.detach().sigmoid() / 2)


def test_nonsense_is_refused_with_what_to_do():
    rows = torch.randn(3, DIM)
    with pytest.raises(ValueError, match="dim must be even, got 5"):
        ComplEx(5, 2)
    with pytest.raises(ValueError, match="num_relations must be a whole number of at least 1"):
        DistMult(DIM, 0)
    with pytest.raises(ValueError, match="p must be 1 or 2"):
        TransE(DIM, 2, p=3)
    with pytest.raises(ValueError, match=r"made for rows of 4 numbers, but the known end has 6: pass dim=6"):
        Dot(4)(rows, rows)
    with pytest.raises(ValueError, match="called without relations: pass relation"):
        DistMult(DIM, 2)(rows, rows)
    with pytest.raises(ValueError, match=r"relation must be in \[0, 2\), got -1 to 0"):
        DistMult(DIM, 2)(rows, rows, torch.tensor([0, -1, 0]))
    with pytest.raises(ValueError, match=r"relation must be whole numbers \[3\]"):
        DistMult(DIM, 2)(rows, rows, torch.tensor([0]))
    with pytest.raises(ValueError, match="`wanted` names the end of the candidates"):
        Dot(DIM)(torch.randn(3, 3, DIM), rows)
    with pytest.raises(ValueError, match="called with relations: pass num_relations"):
        Dot(DIM)(rows, rows, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="wanted must be 'head' or 'tail'"):
        Dot(DIM)(rows, rows, wanted="both")
    with pytest.raises(ValueError, match="at least one negative each"):
        softmax_link_loss(torch.zeros(3), torch.zeros(3, 0))
