"""Losses of link prediction: scores of positive links beside those of their negatives.

`positive` has [links] scores and `negative` [links, negatives] of the same links, or [links] of one negative each. Each
is a mean over links, and 0 where there are none: a rank without links changes nothing. `weight` [links] multiplies what
a link and its negatives add, as torch's losses have it: the sum is divided by the number of links, not by weights.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def binary_link_loss(positive: Tensor, negative: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Binary cross-entropy; the negatives of a link count together as much as the link."""
    negative = _by_link(positive, negative)
    return _mean(F.softplus(-positive) + F.softplus(negative).mean(1), weight) / 2


def softmax_link_loss(positive: Tensor, negative: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy of picking the link among itself and its negatives (InfoNCE)."""
    negative = _by_link(positive, negative)
    return _mean(negative.logsumexp(1).logaddexp(positive) - positive, weight)


def margin_link_loss(
    positive: Tensor, negative: Tensor, margin: float = 1.0, *, weight: Tensor | None = None
) -> Tensor:
    """max(0, margin - positive + negative), the mean over negatives (Bordes et al. 2013)."""
    negative = _by_link(positive, negative)
    return _mean((margin - positive.unsqueeze(1) + negative).clamp(min=0).mean(1), weight)


def self_adversarial_link_loss(
    positive: Tensor,
    negative: Tensor,
    margin: float = 0.0,
    temperature: float = 1.0,
    *,
    weight: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy around a margin, in which negatives weigh by softmax(temperature * score) (Sun et al. 2019).

    - (log sigmoid(margin + positive) + sum of shares * log sigmoid(-margin - negative)) / 2; the shares, the softmax of
    a link's negatives, get no gradient. Distances are negative scores, so a margin of 9 or so makes near ones likely;
    products want 0.
    """
    negative = _by_link(positive, negative)
    share = (temperature * negative.detach()).softmax(1)
    return _mean(F.softplus(-margin - positive) + (share * F.softplus(margin + negative)).sum(1), weight) / 2


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """In the type of the scores, whatever that of the weights is."""
    if weight is not None and not isinstance(weight, Tensor):
        raise ValueError(
            f"weight must be a tensor of one number per link, {list(values.shape)}, got {type(weight).__name__}"
        )
    if weight is not None and weight.shape != values.shape:
        raise ValueError(f"weight must have one entry per link, {values.numel()}, got {list(weight.shape)}")
    weighted = values if weight is None else values * weight
    return (weighted.sum() / max(1, values.numel())).to(values.dtype)


def _by_link(positive: Tensor, negative: Tensor) -> Tensor:
    """Scores of negatives, [links, negatives]; ValueError where they do not belong to these links."""
    if positive.dim() == 1 and negative.shape == positive.shape:
        return negative.unsqueeze(1)
    if positive.dim() != 1 or negative.dim() != 2 or negative.shape[0] != positive.shape[0] or not negative.shape[1]:
        raise ValueError(
            "scores must be [links] of positive links and [links, negatives] of at least one negative each, got "
            f"{list(positive.shape)} and {list(negative.shape)}"
        )
    return negative
