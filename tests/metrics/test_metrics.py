"""Accuracy, F1 and areas under curves are those of plain definitions, and one number for any number of ranks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from gnnsys.metrics import AUC, F1, Accuracy, AveragePrecision, Ranking
from tests.fullgraph.ranks import run_ranks


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_classes(seed: int = 0, size: int = 300, num_classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Class 4 is never a label, and class 3 never predicted."""
    labels = torch.randint(num_classes - 1, (size,), generator=numbers(seed))
    predicted = torch.where(torch.rand(size, generator=numbers(seed + 1)) < 0.6, labels, 4)
    return torch.where(predicted == 3, 0, predicted), labels


def some_scores(seed: int = 0, size: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Many ties."""
    labels = torch.rand(size, generator=numbers(seed)) < 0.3
    return ((torch.randn(size, generator=numbers(seed + 1)) + labels.float()) * 4).round() / 4, labels


def plain_auc(scores: list[float], labels: list[bool]) -> float:
    positive = [s for s, is_one in zip(scores, labels, strict=True) if is_one]
    negative = [s for s, is_one in zip(scores, labels, strict=True) if not is_one]
    twice = sum(2 * (p > n) + (p == n) for p in positive for n in negative)
    return float(Fraction(twice, 2 * len(positive) * len(negative)))


def test_accuracy_is_the_share_of_labels_predicted_from_classes_and_from_scores():
    predicted, labels = some_classes()
    by_class, by_score = Accuracy(), Accuracy()
    for part in range(0, 300, 70):
        by_class.update(predicted[part : part + 70], labels[part : part + 70])
        by_score.update(torch.nn.functional.one_hot(predicted, 5)[part : part + 70].float(), labels[part : part + 70])
    want = sum(p == y for p, y in zip(predicted.tolist(), labels.tolist(), strict=True)) / 300
    assert by_class.compute() == by_score.compute() == want
    assert math.isnan(Accuracy().compute())


def test_f1_by_its_definition_of_classes_and_of_several_labels_a_sample():
    predicted, labels = some_classes()
    by_class, by_label = F1(5, None), F1(5, None)
    by_class.update(predicted, labels)
    by_label.update(*(torch.nn.functional.one_hot(each, 5).bool() for each in (predicted, labels)))
    pairs = list(zip(predicted.tolist(), labels.tolist(), strict=True))
    for number, found in enumerate(by_class.compute()):
        tp = sum(p == y == number for p, y in pairs)
        wrong = sum((p == number) != (y == number) for p, y in pairs)
        assert found == (2 * tp / (2 * tp + wrong) if tp else 0)
    assert by_class.compute() == by_label.compute()
    micro, macro = F1(5), F1(5, "macro")
    for each in (micro, macro):
        each.update(predicted, labels)
    assert micro.compute() == sum(p == y for p, y in pairs) / len(pairs)  # one class a sample: the accuracy
    assert macro.compute() == sum(by_class.compute()) / 5
    assert by_class.compute()[3] == by_class.compute()[4] == 0


def test_auc_is_the_share_of_pairs_in_order_with_ties_counted_half():
    scores, labels = some_scores()
    auc = AUC()
    for part in range(0, 400, 90):
        auc.update(scores[part : part + 90], labels[part : part + 90].long())
    assert auc.compute() == plain_auc(scores.tolist(), labels.tolist())
    constant = AUC()
    constant.update(torch.zeros(10), torch.arange(10) < 3)
    assert constant.compute() == 0.5
    only_one_class = AUC()
    only_one_class.update(torch.ones(3), torch.ones(3))
    assert math.isnan(only_one_class.compute()) and math.isnan(AUC().compute())


def test_average_precision_takes_equal_scores_together():
    scores, labels = some_scores(3)
    precision = AveragePrecision()
    precision.update(scores, labels)
    total, want = int(labels.sum()), 0.0
    for value in sorted(set(scores.tolist()), reverse=True):
        taken = scores >= value
        want += int((labels & (scores == value)).sum()) / total * int((labels & taken).sum()) / int(taken.sum())
    assert precision.compute() == pytest.approx(want, rel=1e-12)
    assert math.isnan(AveragePrecision().compute())


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_has_the_same_bits_however_samples_are_shared_out(world_size):
    predicted, labels = some_classes(5)
    scores, is_one = some_scores(6)
    places = torch.randint(1, 2000, (500,), generator=numbers(7)) / 2 + 0.5

    def computed(part, group):
        made = [Accuracy(), F1(5, "macro"), AUC(), AveragePrecision(), Ranking()]
        made[0].update(predicted[part], labels[part])
        made[1].update(predicted[part], labels[part])
        made[2].update(scores[part], is_one[part])
        made[3].update(scores[part], is_one[part])
        made[4].update(places[part])
        return [each.compute(group) for each in made]

    everything, last = torch.arange(300), world_size - 1  # the last rank has no samples at all
    shares = [everything[rank::last] if rank < last else everything[:0] for rank in range(world_size)]
    alone = computed(torch.cat(shares), None)
    assert run_ranks(world_size, lambda rank, group: computed(shares[rank], group)) == [alone] * world_size


def test_nonsense_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="num_classes must be a whole number"):
        F1(0)
    with pytest.raises(ValueError, match="average must be 'micro', 'macro' or None"):
        F1(2, "weighted")
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\), got -1 to 2: leave samples without a label out"):
        F1(2).update(torch.tensor([0, 1]), torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="scores have one column"):
        Accuracy().update(torch.rand(2, 1), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="write `scores > 0` for logits"):
        F1(2).update(torch.rand(3, 2), torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"predictions must be classes \[2\] or scores"):
        Accuracy().update(torch.rand(2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="labels must be whole numbers"):
        Accuracy().update(torch.tensor([0, 1]), torch.rand(2))
    with pytest.raises(ValueError, match="a score is nan"):
        AUC().update(torch.tensor([0.0, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="labels must be 0 and 1"):
        AUC().update(torch.tensor([0.0, 1.0]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="scores and labels must be 1-d and alike"):
        AUC().update(torch.zeros(2), torch.zeros(3))
