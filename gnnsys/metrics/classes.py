"""Metrics of classes: the share of labels that were predicted, and F1."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gnnsys.metrics.merge import add_up


class Accuracy:
    """The share of samples whose predicted class is their label.

    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]))
    >>> round(accuracy.compute(), 3)
    0.667
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device="cpu")  # right, all

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Predicted classes, or scores with one column per class (the first of the highest counts), and labels."""
        predicted = _classes(predicted, labels)
        self._counts += torch.tensor([int((predicted == labels).sum()), labels.numel()], device="cpu")

    def compute(self, group: Any = None) -> float:
        """Over all ranks of the process group, which all call this; nan without samples."""
        right, total = add_up(self._counts, group).tolist()
        return right / total if total else float("nan")


class F1:
    """F1 of several classes, or of several labels per sample.

    With `tp`, `fp` and `fn` of a class, F1 is 2 tp / (2 tp + fp + fn), and 0 without a `tp`. "micro" adds the counts of
    all classes first, "macro" is the mean over classes, None gives one for each.

    >>> f1 = F1(3, average="macro")
    >>> f1.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]))
    >>> round(f1.compute(), 3)
    0.556
    """

    def __init__(self, num_classes: int, average: Literal["micro", "macro"] | None = "micro") -> None:
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
            raise ValueError(f"num_classes must be a whole number of at least 1, got {num_classes!r}")
        if average not in ("micro", "macro", None):
            raise ValueError(f"average must be 'micro', 'macro' or None, got {average!r}")
        self.num_classes, self.average = num_classes, average
        self._counts = torch.zeros(3, num_classes, dtype=torch.int64, device="cpu")  # tp, fp, fn

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Classes or scores and labels, as `Accuracy` takes them. Where labels are boolean [samples, classes], each
        column is a label of its own, and so must predictions be."""
        if labels.dtype == torch.bool:
            found = self._of_columns(predicted, labels)
        else:
            predicted = _classes(predicted, labels)
            for what, values in (("labels", labels), ("predicted classes", predicted)):
                if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < self.num_classes:
                    raise ValueError(
                        f"{what} must be in [0, {self.num_classes}), got {int(values.min())} to {int(values.max())}: "
                        "leave samples without a label out"
                    )
            found = torch.stack(
                [
                    torch.bincount(labels[predicted == labels].long(), minlength=self.num_classes),
                    torch.bincount(predicted[predicted != labels].long(), minlength=self.num_classes),
                    torch.bincount(labels[predicted != labels].long(), minlength=self.num_classes),
                ]
            )
        self._counts += found.to("cpu", torch.int64)

    def compute(self, group: Any = None) -> float | list[float]:
        """Over all ranks of the process group, which all call this."""
        tp, fp, fn = add_up(self._counts, group).tolist()
        if self.average == "micro":
            return _f1(sum(tp), sum(fp), sum(fn))
        each = [_f1(*counts) for counts in zip(tp, fp, fn, strict=True)]
        return each if self.average is None else sum(each) / self.num_classes

    def _of_columns(self, predicted: Tensor, labels: Tensor) -> Tensor:
        wanted = (labels.shape[0], self.num_classes)
        if predicted.dtype != torch.bool or labels.shape != wanted or predicted.shape != wanted:
            raise ValueError(
                f"boolean labels go with boolean predictions of shape {list(wanted)}, got {predicted.dtype} "
                f"{list(predicted.shape)} and labels {list(labels.shape)}: write `scores > 0` for logits"
            )
        return torch.stack([(predicted & labels).sum(0), (predicted & ~labels).sum(0), (~predicted & labels).sum(0)])


def _f1(tp: int, fp: int, fn: int) -> float:
    return 2 * tp / (2 * tp + fp + fn) if tp else 0.0


def _classes(predicted: Tensor, labels: Tensor) -> Tensor:
    """Predicted classes, from themselves or from scores."""
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(f"labels must be whole numbers, one per sample, got {labels.dtype} {list(labels.shape)}")
    if predicted.dim() == 2 and predicted.shape[1] == 1:
        raise ValueError("scores have one column, the score of class 1: pass classes, `(scores > 0).long().view(-1)`")
    if predicted.dim() == 2:
        predicted = predicted.argmax(1)
    if predicted.shape != labels.shape or predicted.is_floating_point():
        raise ValueError(
            f"predictions must be classes [{labels.numel()}] or scores [{labels.numel()}, classes], got "
            f"{predicted.dtype} {list(predicted.shape)}"
        )
    return predicted
