"""Records of passes: rows leave between bins, sums of gradients begin layer by layer, and nothing is kept unasked."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from gnnsys.fullgraph import BinSchedule, HybridParallel
from gnnsys.observe import PassTrace
from tests.fullgraph.dense import random_graph
from tests.fullgraph.test_exact import WIDTH, random_ranks, seeded, unequal_sage
from tests.fullgraph.thread_ranks import run_ranks

NUM_NODES = 300


def traced(passes: int, **options) -> list[tuple[list[PassTrace], int]]:
    graph, layers = random_graph(NUM_NODES, 900, 1), seeded(unequal_sage)

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=random_ranks(2, NUM_NODES), group=group, timeout=60, **options
        )
        x = torch.ones(len(model.nodes), WIDTH, dtype=torch.float64)
        for _ in range(passes):
            model(x).sum().backward()
        return model.trace(), model.times.num_bytes

    return run_ranks(2, work)


@pytest.mark.parametrize("intra_layer", [True, False])
def test_rows_leave_between_bins_or_behind_them_as_the_schedule_says(intra_layer: bool):
    for (_, last), num_bytes in traced(3, trace=2, schedule=BinSchedule(intra_layer=intra_layer)):
        assert last.step == 3
        assert sum(span.num_bytes for span in last.spans if span.what == "send") == num_bytes
        there = [s for s in last.spans if s.what == "forward" and s.step == 0]
        sent = [s for s in last.spans if s.what == "send" and s.step == 1][: len(there)]
        assert len(there) > 2 and sent
        assert (sent[0].began < there[-1].began) == intra_layer
        assert all(span.began <= span.ended for span in last.spans)


def test_sums_of_gradients_begin_while_earlier_layers_are_on_their_way_back():
    for (only,), _ in traced(2, trace=1):
        reduced = [span for span in only.spans if span.what == "reduce"]
        assert [span.step for span in reduced] == sorted((span.step for span in reduced), reverse=True)
        first_layer = [span for span in only.spans if span.what == "backward" and span.step == 0]
        assert reduced[0].began < first_layer[-1].began
        assert json.loads(json.dumps(only.as_dict()))["spans"][0]["what"] in ("forward", "send", "wait")


def test_nothing_is_recorded_unless_it_was_asked_for():
    assert [found for found, _ in traced(1)] == [[], []]
    with pytest.raises(ValueError, match="trace is a number of passes, got -1"):
        HybridParallel(seeded(unequal_sage), random_graph(9, 20, 1), trace=-1)
