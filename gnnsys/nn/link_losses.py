"""Losses of link prediction: scores of positive links beside those of their negatives.

`positive` has [links] scores and `negative` [links, negatives] of the same links. Each is a mean over links, and 0
where there are none: a rank without links changes nothing.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def binary_link_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Binary cross-entropy; the negatives of a link count together as much as the link."""
    _check(positive, negative)
    return _mean(F.softplus(-positive) + F.softplus(negative).mean(1)) / 2


def softmax_link_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy of picking the link among itself and its negatives (InfoNCE)."""
    _check(positive, negative)
    return _mean(negative.logsumexp(1).logaddexp(positive) - positive)


def margin_link_loss(positive: Tensor, negative: Tensor, margin: float = 1.0) -> Tensor:
    """max(0, margin - positive + negative), the mean over negatives (Bordes et al. 2013)."""
    _check(positive, negative)
    return _mean((margin - positive.unsqueeze(1) + negative).clamp(min=0).mean(1))


def self_adversarial_link_loss(
    positive: Tensor, negative: Tensor, margin: float = 0.0, temperature: float = 1.0
) -> Tensor:
    """Binary cross-entropy around a margin, in which negatives weigh by softmax(temperature * score) (Sun et al. 2019).

    - (log sigmoid(margin + positive) + sum of weights * log sigmoid(-margin - negative)) / 2; the weights get no
    gradient. Distances are negative scores, so a margin of 9 or so makes near ones likely; products want 0.
    """
    _check(positive, negative)
    weight = (temperature * negative.detach()).softmax(1)
    return _mean(F.softplus(-margin - positive) + (weight * F.softplus(margin + negative)).sum(1)) / 2


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(1, values.numel())


def _check(positive: Tensor, negative: Tensor) -> None:
    if positive.dim() != 1 or negative.dim() != 2 or negative.shape[0] != positive.shape[0] or not negative.shape[1]:
        raise ValueError(
            "scores must be [links] of positive links and [links, negatives] of at least one negative each, got "
            f"{list(positive.shape)} and {list(negative.shape)}"
        )
