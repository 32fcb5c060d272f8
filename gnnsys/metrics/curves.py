"""Areas under curves of binary scores: of the ROC (AUC) and of precision over recall (average precision).

Both need every score, so all ranks gather them: 9 bytes per sample. Ties are counted, never broken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.metrics.merge import gather


class _Scores:
    """Scores and labels as they come."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Scores of any floating type and, for each, whether it is of the positive class: bool, or 0 and 1."""
        if scores.shape != labels.shape or scores.dim() != 1:
            raise ValueError(f"scores and labels must be 1-d and alike, got {list(scores.shape)}, {list(labels.shape)}")
        if bool(scores.isnan().any()):
            raise ValueError("a score is nan, which is above or below nothing: look for a loss that was nan before")
        if labels.dtype != torch.bool and bool(((labels != 0) & (labels != 1)).any()):
            raise ValueError("labels must be 0 and 1, or boolean")
        self._scores.append(scores.detach().to("cpu", torch.float64))
        self._labels.append(labels.to("cpu", torch.bool))

    def _counts(self, group: Any) -> tuple[Tensor, Tensor]:
        """Positive and negative samples at each score, from the highest score to the lowest: int64."""
        none = torch.empty(0, device="cpu")
        scores = gather(torch.cat([none.double(), *self._scores]), group)
        is_positive = gather(torch.cat([none.bool(), *self._labels]).to(torch.uint8), group)
        _, place = (-scores).unique(return_inverse=True)
        size = int(place.max()) + 1 if place.numel() else 0
        positive = torch.zeros(size, dtype=torch.int64, device="cpu").index_add_(0, place, is_positive.long())
        total = torch.bincount(place, minlength=size) if size else positive
        return positive, total - positive


class AUC(_Scores):
    """How often a positive sample scores above a negative one; ties count half.

    >>> auc = AUC()
    >>> auc.update(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 1, 0, 0]))
    >>> auc.compute()
    0.875
    """

    def compute(self, group: Any = None) -> float:
        """Over all ranks of the process group, which all call this; nan where one of the classes has no samples."""
        positive, negative = self._counts(group)
        pairs = int(positive.sum()) * int(negative.sum())
        below = negative.sum() - negative.cumsum(0)
        twice = int((positive * (2 * below + negative)).sum())  # whole numbers up to 2^63
        return twice / (2 * pairs) if pairs else float("nan")


class AveragePrecision(_Scores):
    """The mean over positive samples of the precision at their score: samples with equal scores are taken together.

    >>> precision = AveragePrecision()
    >>> precision.update(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]))
    >>> round(precision.compute(), 4)
    0.8333
    """

    def compute(self, group: Any = None) -> float:
        """Over all ranks of the process group, which all call this; nan without positive samples."""
        positive, negative = self._counts(group)
        found = positive.cumsum(0)
        total = int(positive.sum())
        precision = found.double() / (found + negative.cumsum(0)).double()
        one_by_one = (positive.double() * precision).cumsum(0)  # a sum's order would depend on the number of threads
        return float(one_by_one[-1]) / total if total else float("nan")
