"""Loaders with a guide: batches by masks of the model as it trains, the same again where that was asked for."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import gnnsys
from gnnsys.explain import Guide, Masks
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from gnnsys.session import init
from tests.explain.guided_training import MODEL, SECONDS, make_loader, train
from tests.explain.models import CLASSES, WIDTH, sage, wider
from tests.sampling.machines import machines, typed
from tests.support.forked_popen import forking
from tests.support.processes import alive, await_true, processes, run_ranks

STEPS = 30
PROGRAM = """
import dataclasses, json, sys, gnnsys
from tests.support.spare_servers import keep_spare_explainers
keep_spare_explainers(1)
from tests.explain.guided_training import train
path, options = sys.argv[1], json.loads(sys.argv[2])
with gnnsys.init(timeout=60) as session:
    told = train(session, gnnsys.open(path), **options)
    session.barrier(120)
    print(json.dumps(dataclasses.asdict(told)))
"""
RESTARTED = """
import os, signal, sys, time, gnnsys
from tests.support.spare_servers import keep_spare_explainers
keep_spare_explainers(2)
from gnnsys.explain import Explaining, Guide
from tests.explain.models import sage
with gnnsys.init():
    explaining = Explaining(gnnsys.open(sys.argv[1]), sage(), Guide(model="tests.explain.models:slow", pools=2))
    first = explaining.pid
    os.kill(first, signal.SIGKILL)
    while explaining.pid == first:
        time.sleep(0.01)
    explaining.give(sage(), 0)
    print(explaining.pid, flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guided") / "parts"
    partition_graph(sbm(600, num_classes=CLASSES, num_features=WIDTH, avg_degree=12), 2, folder)
    return folder


@pytest.fixture(scope="module")
def session():
    with forking(sys.modules["gnnsys.explain.explaining"]), init() as session:
        yield session


@pytest.fixture(scope="module")
def graph(session, parts: Path):
    return session.open(parts)


@pytest.fixture(scope="module")
def unbroken(session, graph):
    return train(session, graph, steps=STEPS)


def await_masks(guide: Guide, model: torch.nn.Module) -> None:
    """Not by reading batches, which takes the processor from who explains."""

    def have_come() -> bool:
        guide.update(model)
        return guide.status()["begins_at"] >= 0

    await_true(have_come, "masks")


def test_masks_are_used_as_they_come_and_a_resumed_loader_has_the_same_batches(graph) -> None:
    guide = Guide(model=MODEL, pools=4, every=1, num_features=0.5)
    loader = make_loader(graph, guide)
    model, deadline = sage(), time.monotonic() + SECONDS
    for batch in loader:  # an epoch without masks is whole
        assert torch.equal(batch.x, graph.node_data["node"]["x"][batch.n_id])
    await_masks(guide, model)
    while guide.status()["guided_batches"] < 20:
        assert time.monotonic() < deadline
        for _ in loader:
            guide.update(model)
    state, status = loader.state_dict(), guide.status()
    rest = list(loader)
    loader.close()
    guide.close()
    assert status["num_columns"] == WIDTH // 2 and status["begins_at"] > 0 and status["age"] >= 0
    assert status["bytes_saved_by_nodes"] > 0 and status["row_bytes"] > 0 and status["seconds"] > 0
    own = graph.book.part_range(guide._sampler().requester)
    is_other = [(batch.n_id < own.start) | (batch.n_id >= own.stop) for batch in rest]
    whole = [graph.node_data["node"]["x"][batch.n_id] for batch in rest]
    for batch, others, rows in zip(rest, is_other, whole, strict=True):
        assert torch.equal(batch.x[~others], rows[~others])
        differs = (batch.x[others] != rows[others]).any(0)
        assert not bool(others.any()) or int(differs.sum()) == WIDTH - WIDTH // 2
    again = make_loader(graph, dataclasses.replace(guide))
    again.load_state_dict(state)
    repeated = list(again)
    again.close()
    assert len(repeated) == len(rest) > 0
    for ours, theirs in zip(repeated, rest, strict=True):
        assert torch.equal(ours.n_id, theirs.n_id) and torch.equal(ours.x, theirs.x)


def test_exact_runs_are_equal_bit_by_bit_and_versions_begin_where_they_should(session, graph, unbroken) -> None:
    again = train(session, graph, steps=STEPS)
    assert again.weights == unbroken.weights and again.batches == unbroken.batches
    assert again.versions == unbroken.versions
    per_epoch = len(make_loader(graph, Guide(model=MODEL)))
    begins = [epoch * per_epoch + batch for epoch, batch, *_ in unbroken.versions]
    assert begins and all((begin - 12) % 5 == 0 for begin in begins)
    assert unbroken.status["guided_batches"] > 0
    uniform = train(session, graph, steps=STEPS, every=1000)
    assert uniform.weights != unbroken.weights and uniform.batches[:17] == unbroken.batches[:17]


def test_an_explaining_process_that_is_killed_changes_nothing(session, graph, unbroken) -> None:
    killed = train(session, graph, steps=STEPS, kill_explainer_at=15)
    assert killed.status["restarts"] == 1
    assert killed.weights == unbroken.weights and killed.batches == unbroken.batches


def test_slices_of_rows_beyond_the_budget_are_exact_as_well(session, graph, tmp_path: Path) -> None:
    options = {"steps": 31, "row_bytes": 60 * WIDTH * 4, "every": 3}
    first = train(session, graph, **options)
    resumed = [train(session, graph, **(options | {"steps": s}), checkpoints=str(tmp_path / "c")) for s in (16, 31)]
    assert resumed[1].weights == first.weights and resumed[1].batches == first.batches[14:]


def test_trainers_on_one_machine_and_on_two_end_with_the_same_weights_whoever_is_killed(parts: Path, tmp_path: Path):
    """Two machines lose their servers, the trainers of one machine are killed and go on from a checkpoint."""

    def run(trainers: list[int], check: bool = True, **options):
        text = json.dumps({"steps": STEPS, "num_features": 0.6, **options})
        ended = run_ranks(PROGRAM, trainers, parts, text, timeout=3 * SECONDS, check=check)
        return [json.loads(each.stdout) for each in ended] if check else ended

    apart, folder = [1, 1], str(tmp_path / "checkpoints")
    whole, without_servers = run(apart), run(apart, kill_server_at=20)
    ended = run([2], check=False, checkpoints=folder, kill_at=23)
    assert all(each.returncode != 0 for each in ended)
    resumed = run([2], checkpoints=folder)
    assert [each["batches"] for each in without_servers] == [each["batches"] for each in whole]
    assert len({each["weights"] for each in (*whole, *without_servers, *resumed)}) == 1
    for ours, theirs in zip(resumed, whole, strict=True):
        assert 0 < len(ours["batches"]) < STEPS and ours["batches"] == theirs["batches"][-len(ours["batches"]) :]
        assert ours["status"]["guided_batches"] > 0 and theirs["status"]["bytes_saved_by_columns"] > 0
    assert whole[0]["batches"] != whole[1]["batches"]


def test_a_stopped_explainer_keeps_nobody_waiting_and_a_late_one_of_an_exact_run_is_named(session, graph) -> None:
    guide = Guide(model=MODEL, pools=2, every=1)
    loader = make_loader(graph, guide)
    model = sage()
    guide.update(model)
    os.kill(guide._sampler()._explaining.pid, signal.SIGSTOP)
    for _ in loader:
        guide.update(model)
    assert guide.status()["begins_at"] == -1
    guide._sampler()._explaining.close(timeout=0.1)
    guide.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        guide.update(model)
    exact = Guide(model=MODEL, pools=2, every=5, exact=True, ahead=12, timeout=0.1)
    loader = make_loader(graph, exact)
    exact._sampler().start()
    os.kill(exact._sampler()._explaining.pid, signal.SIGSTOP)  # however slow trainers are, it is slower
    with pytest.raises(TimeoutError, match="no masks of position 0"):
        for _ in range(STEPS):
            for _ in loader:
                exact.update(model)
    exact._sampler()._explaining.close(timeout=0.1)
    exact.close()
    loader.close()


def test_the_weights_of_a_round_are_in_a_checkpoint_or_it_is_refused(graph) -> None:
    guide = Guide(model=MODEL, pools=2, every=2, exact=True)
    loader = make_loader(graph, guide)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="were not handed over"):
        loader.state_dict()
    guide.update(sage())
    assert loader.state_dict()["sampler"]["versions"][0][3] >= 0
    next(batches)
    loader.state_dict()
    loader.close()
    guide.close()


def test_a_rank_without_seeds_and_a_process_that_cannot_begin_keep_nobody_from_training(graph, monkeypatch) -> None:
    guide = Guide(model=MODEL, pools=2, every=1)
    none = gnnsys.Seeds(graph.from_original([]), "node", largest=24, total=24)
    loader = make_loader(graph, guide, input_nodes=none)
    model, deadline = sage(), time.monotonic() + SECONDS
    for _ in loader:
        guide.update(model)
    await_masks(guide, model)
    while guide.status()["guided_batches"] < 2:  # it explains all the same: other trainers of the machine read masks
        assert time.monotonic() < deadline
        for batch in loader:
            assert batch.batch_size == 0 and batch.n_id.numel() == 0
            guide.update(model)
    assert guide._sampler().requester in graph.parts_here
    loader.close()
    guide.close()

    def no_memory(*_: object) -> None:
        raise ValueError("no shared memory today")

    monkeypatch.setattr(sys.modules["gnnsys.explain.explaining"].Mailbox, "create", no_memory)
    for exact in (False, True):
        guide = Guide(model=MODEL, pools=2, every=1, exact=exact)
        loader = make_loader(graph, guide)
        if exact:
            with pytest.raises(ValueError, match="no shared memory today"):
                next(iter(loader))
        else:
            for _ in loader:
                guide.update(sage())
            assert guide.status()["begins_at"] == -1
        loader.close()
        guide.close()


def test_columns_change_only_where_that_is_worth_it() -> None:
    sf = torch.tensor([1.0, 0.9, 0.5, 0.4])
    masks = Masks(1, 0, torch.arange(0), torch.zeros(0, dtype=torch.uint8), sf)
    best, other = torch.tensor([0, 1]), torch.tensor([0, 2])
    assert torch.equal(masks.better_columns(0.5, None, 0.1), best)
    assert masks.better_columns(0.5, other, 0.3) is other
    assert torch.equal(masks.better_columns(0.5, other, 0.2), best)
    assert masks.better_columns(0.5, best, 0.0) is best
    assert torch.equal(masks.better_columns(0.75, best, 9.0), torch.tensor([0, 1, 2]))


def test_bad_use_says_what_to_do(graph, tmp_path: Path) -> None:
    guide = Guide(model=MODEL)
    with pytest.raises(ValueError, match="guides no loader"):
        guide.update(sage())
    with pytest.raises(ValueError, match="a guide is for a graph in parts"):
        gnnsys.NeighborLoader(sbm(100), [2], guide=guide)
    with machines(typed(), tmp_path / "typed", 2) as graphs, pytest.raises(ValueError, match="one node type and one"):
        gnnsys.NeighborLoader(graphs[0], [2], input_nodes="paper", guide=guide)
    for options in ({"replace": True}, {"expand": "frontier"}, {"weight_attr": "w"}, {"subgraph_type": "induced"}):
        with pytest.raises(ValueError, match="a guide decides how neighbours are drawn"):
            make_loader(graph, guide, **options)
    with pytest.raises(ValueError, match="pad=True"):
        make_loader(graph, guide, pad=True)
    with pytest.raises(ValueError, match="guide must be a"):
        make_loader(graph, "gradient")
    for bad, told in (
        ({"num_features": 0}, r"must be in \(0, 1\]"),
        ({"num_features": 1.1}, r"must be in \(0, 1\]"),
        ({"nodes": False, "num_features": 1.0}, "guides nothing"),
        ({"fill": "last"}, "fill must be one of"),
        ({"column_gain": -1.0}, "column_gain must be"),
        ({"timeout": 0}, "timeout is the seconds"),
        ({"ahead": 0}, "ahead must be a whole number"),
    ):
        with pytest.raises(ValueError, match=told):
            Guide(**{"model": MODEL, **bad})
    with pytest.raises(ValueError, match="cannot be imported"):
        make_loader(graph, Guide(model="tests.explain.models:nobody"))
    with pytest.raises(ValueError, match="no model today"):
        make_loader(graph, Guide(model="tests.explain.models:broken"))
    with pytest.raises(ValueError, match="Pass `arguments` that"):
        make_loader(graph, Guide(model="gnnsys.nn:GraphSAGE", arguments={"width": 3}))
    with pytest.raises(ValueError, match="go to another process as JSON"):
        Guide(model="gnnsys.nn:GraphSAGE", arguments={"in_channels": torch.tensor(3)})
    make_loader(graph, guide)
    assert guide._sampler()._explaining is None  # until there is a batch: who was refused has started nothing
    with pytest.raises(ValueError, match="guides another loader"):
        make_loader(graph, guide)
    with pytest.raises(ValueError, match="makes another model"):
        guide.update(wider())
    narrow = Guide(model=MODEL, exact=True, every=1, ahead=1, timeout=SECONDS)
    loader = make_loader(graph, narrow, prefetch=8)
    with pytest.raises(ValueError, match="ahead=1 is less"):
        for _ in loader:
            narrow.update(sage())
    loader.close()
    narrow.close()


def test_a_process_that_was_started_again_ends_with_its_trainer(parts: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    with processes() as running:
        running.start_code("trainer", RESTARTED, parts, environment={"SLOW_MODEL": str(began)})
        pid = int(running.await_output(0, "\n"))
        await_true(began.exists, "the middle of a round")
        os.kill(running.pid(0), signal.SIGKILL)
        await_true(lambda: not alive(pid), "the end of the explaining process")
