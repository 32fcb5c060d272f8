"""Masks find what was planted: columns of noise, and remote nodes whose rows are noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gnnsys.explain import ColumnNorms, Degrees, GradientInput, Guide, RandomMasks, TrainedMasks
from tests.explain.planted import Planted, plant


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More of them take longer together than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=["random", "multilevel"])
def planted(request, tmp_path_factory) -> tuple[str, Planted]:
    return request.param, plant(tmp_path_factory.mktemp("planted"), method=request.param)


def test_the_default_guide_finds_the_planted_columns_and_nodes(planted):
    guide = Guide(model="tests.explain.models:sage")
    nodes, columns = planted[1].auc(guide.make_explainer().importance(planted[1].model, planted[1].explanation(0, 128)))
    assert columns >= 0.95 and nodes >= 0.8


def test_trained_masks_find_the_columns_where_parts_are_random_and_gradients_find_the_nodes_better(planted):
    method, found = planted
    graph = found.explanation(0, 128)
    nodes, columns = found.auc(TrainedMasks().importance(found.model, graph))
    by_gradient = found.auc(GradientInput().importance(found.model, graph))
    assert nodes > 0.6 and by_gradient[0] > nodes
    if method == "random":
        assert columns >= 0.95 and columns > by_gradient[1]
    else:
        assert columns < by_gradient[1]  # an explanation that sees few classes


def test_more_pools_say_more_than_one_where_parts_are_random(planted):
    method, found = planted
    if method == "random":
        one, many = (found.auc(TrainedMasks().importance(found.model, found.explanation(0, c))) for c in (1, 128))
        assert many[0] > one[0] + 0.05 and many[1] > one[1] + 0.05


def test_degrees_and_random_numbers_find_nothing(planted):
    graph = planted[1].explanation(0, 8)
    for explainer in (Degrees(), RandomMasks()):
        nodes, columns = planted[1].auc(explainer.importance(planted[1].model, graph))
        assert 0.4 < nodes < 0.6 and 0.3 < columns < 0.7
    nodes, columns = planted[1].auc(ColumnNorms().importance(planted[1].model, graph))
    assert nodes > 0.7 and columns > 0.6
