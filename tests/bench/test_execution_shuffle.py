"""What runs of shuffling modes share and how they are judged; batches in part order read fewer rows of a real graph."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from gnnsys.bench.execution.shuffle import (
    ADAPTIVE,
    MODES,
    OFF,
    ON,
    QUICK_TASK,
    ShuffleRun,
    centre,
    part_order,
    project,
    run_modes,
    shuffle_cases,
)
from gnnsys.graph import NODE, available_datasets, dataset, sbm
from gnnsys.loader import NeighborLoader
from tests.bench.verdicts import judged


@pytest.mark.parametrize("learning_rate", [0.01, 0.0])
def test_adaptive_is_off_until_it_switches_and_reads_as_many_rows_as_on_from_then(learning_rate):
    """Without learning scores are flat, and the switch is where that is settled."""
    graph = sbm(400, num_features=16)
    runs = run_modes(graph, part_order(graph, 4), replace(QUICK_TASK, learning_rate=learning_rate), 0)
    on, off, adaptive = (runs[mode] for mode in MODES)
    switch = len(off.test) if adaptive.switch is None else adaptive.switch
    assert (switch == 6 if not learning_rate else switch >= 6) and (on.switch, off.switch) == (0, None)
    for figure in ("validation", "test", "rows"):
        assert getattr(adaptive, figure)[:switch] == getattr(off, figure)[:switch]
    assert adaptive.rows[switch:] == on.rows[switch:] and min(on.rows) > max(off.rows)
    assert (adaptive.validation[:switch] == on.validation[:switch]) == (not learning_rate)
    assert len(adaptive.validation) == QUICK_TASK.num_epochs and (adaptive.longer is None) == (adaptive.switch is None)
    live = {run.live_units for run in (on, off, adaptive)}
    assert live <= set(range(QUICK_TASK.hidden + 1)) and (learning_rate or len(live) == 1), "the same first weights"


def test_accuracy_is_that_of_the_epoch_which_was_best_in_validation():
    assert ShuffleRun(validation=[0.1, 0.6, 0.5], test=[0.9, 0.25, 0.8]).accuracy == 25.0


def test_what_is_allowed_is_judged_and_figures_are_means_of_seeds():
    def of(*accuracies, switch=None):
        return [ShuffleRun([1.0], [each], [10.0], [2.0], switch) for each in accuracies]

    found = {ON: of(0.8, 0.82), OFF: of(0.7, 0.72), ADAPTIVE: of(0.8, 0.816, switch=4)}
    found[ADAPTIVE][0].longer = 81.0  # of two seeds one was shuffled, and went on
    found[ADAPTIVE][0].live_units, found[ON][1].live_units = 3, 5
    cases = {case.name: case for case in shuffle_cases("a", lambda: found)}
    figures = {name: {side: of.call() for side, of in case.sides().items()} for name, case in cases.items()}
    assert figures["shuffle/a/accuracy"] == pytest.approx({ON: 81.0, OFF: 71.0, ADAPTIVE: 80.8})
    assert figures["shuffle/a/accuracy, allowed"] == pytest.approx(
        {ADAPTIVE: 80.8, f"{ON}, less 0.4": 80.6, f"{OFF}, less noise": 71.0 - 0.4}
    )
    assert figures["shuffle/a/accuracy, as many shuffled epochs"] == pytest.approx({ADAPTIVE: 81.3, ON: 81.0})
    assert figures["shuffle/a/hidden units in use"] == {ADAPTIVE: 1.5, ON: 2.5, OFF: 0.0}
    assert figures["shuffle/a/epochs in order"] == {ADAPTIVE: 4.0}
    assert judged(cases.values()) == {("shuffle/a/accuracy, allowed", 1.0)}
    assert judged(shuffle_cases("a", lambda: found, is_judged=False)) == set()


def test_a_projection_keeps_distances():
    graph = sbm(50, num_features=400)
    before = torch.cdist(*[graph.node_data[NODE]["x"]] * 2)
    project(graph, 128)
    after = torch.cdist(*[graph.node_data[NODE]["x"]] * 2)
    others = ~torch.eye(50, dtype=torch.bool)
    assert graph.node_data[NODE]["x"].shape == (50, 128)
    assert (after[others] / before[others] - 1).abs().mean() < 0.1


def test_centred_columns_have_no_mean_and_the_same_distances():
    graph = sbm(50, num_features=20)
    before = graph.node_data[NODE]["x"] + 3.0
    graph.set_node_data("x", before)
    centre(graph)
    after = graph.node_data[NODE]["x"]
    assert torch.allclose(after.mean(0), torch.zeros(20), atol=1e-5)
    assert torch.allclose(after[1:] - after[:-1], before[1:] - before[:-1], atol=1e-5)


def test_batches_in_the_order_of_parts_read_fewer_rows_of_a_real_graph():
    if "pubmed" not in available_datasets():
        pytest.skip("pubmed is not there: set GNNSYS_DATA to the folder that has pubmed.npz")
    graph = dataset("pubmed")
    order = part_order(graph, 32)
    assert torch.equal(order.sort().values, torch.arange(graph.num_nodes()))
    loaders = [NeighborLoader(graph, [10, 10], input_nodes=order, batch_size=256, shuffle=on) for on in (False, True)]
    in_order, shuffled = (sum(batch.n_id.numel() for batch in islice(loader, 10)) for loader in loaders)
    assert in_order < 0.7 * shuffled
