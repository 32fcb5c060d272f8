"""The explaining process beside a trainer: masks come, the same for the same weights, and its troubles are its own."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnnsys.explain import Explaining, Guide, MaskReader, Masks, explain_part, pool_part
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from gnnsys.session import init
from tests.explain.models import CLASSES, WIDTH, Failing, sage
from tests.support.forked_popen import forking
from tests.support.processes import alive, processes, run_ranks

PROGRAM = """
import json, os, sys, torch, gnnsys
from gnnsys.explain import Explaining, Guide
from tests.support.spare_servers import keep_spare_explainers
if os.environ["RANK"] == "1":
    keep_spare_explainers()
from tests.explain.models import sage
torch.manual_seed(5)
model = sage()
with gnnsys.init(timeout=60) as session:
    graph = gnnsys.open(sys.argv[1])
    with Explaining(graph, model, Guide(model="tests.explain.models:sage", pools=4)) as explaining:
        explaining.give(model, 0)
        masks = explaining.wait(0, 120)
        print(json.dumps({
            "masks": {each.requester: [each.ids.tolist(), each.sn.tolist()] for each in masks},
            "counters": explaining.counters(),
        }))
        session.barrier(120)
"""
TRAINER = """
import signal, sys, gnnsys
from tests.support.spare_servers import keep_spare_explainers
keep_spare_explainers()
from gnnsys.explain import Explaining, Guide
from tests.explain.models import sage
with gnnsys.init():
    explaining = Explaining(gnnsys.open(sys.argv[1]), sage(), Guide(model="tests.explain.models:sage", pools=2))
    print(explaining.pid, flush=True)
    signal.pause()
"""
MODEL = "tests.explain.models:sage"
SECONDS = 120.0


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explaining") / "parts"
    partition_graph(sbm(600, num_classes=CLASSES, num_features=WIDTH, avg_degree=6), 2, folder)
    with init() as session:
        yield session.open(folder)


@pytest.fixture(scope="module", autouse=True)
def forked():
    """Processes that need not import torch; that of the first rank of `PROGRAM` is a fresh one."""
    with forking(sys.modules["gnnsys.explain.explaining"]):
        yield


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def in_this_process(graph, model, guide: Guide, part: int) -> Masks:
    """What the process is to find."""
    opened = graph.parts.part(part)
    pooled = pool_part(opened, guide.pools, seed=guide.seed)
    rows = graph.node_data["node"]["x"][pooled.ids].to(guide.rows_as(torch.float32))
    explained = explain_part(pooled, model.eval(), opened.node_data["node"]["x"], rows)
    return guide.make_explainer().importance(model, explained)


@pytest.mark.parametrize("explainer", ["gradient", "trained"])
def test_its_masks_are_those_that_this_process_makes_of_the_same_weights(graph, explainer: str):
    guide = Guide(model=MODEL, pools=4, explainer=explainer)
    model = sage()
    with Explaining(graph, model, guide) as explaining:
        assert explaining.take() is None
        assert explaining.give(model, 7) and not explaining.give(model, 36)
        found = explaining.wait(7, SECONDS)
        assert [masks.requester for masks in found] == [0, 1]
        for part, masks in enumerate(found):
            expected = in_this_process(graph, model, guide, part)
            assert torch.equal(masks.ids, expected.ids) and torch.equal(masks.sn, expected.sn)
            torch.testing.assert_close(masks.sf, expected.sf)
            assert (masks.version, masks.position) == (1, 7) and masks.seconds > 0
        assert explaining.take() is None
        with torch.no_grad():
            model.convs[0].lin_l.weight.mul_(-2)
        assert explaining.give(model, 37)
        later = explaining.wait(37, SECONDS)
        assert [masks.version for masks in later] == [2, 2]
        expected = in_this_process(graph, model, guide, 0)
        assert torch.equal(later[0].sn, expected.sn)
        counters = explaining.counters()
    width = graph.node_data["node"]["x"].shape[1] * 2
    assert counters["row_bytes"] == sum(masks.ids.numel() for masks in found) * width
    assert (counters["version"], counters["age"], counters["masks"], counters["wire_row_bytes"]) == (2, 0, 4, 0)
    assert counters["mask_bytes"] == sum(masks.nbytes for masks in [*found, *later]) and counters["seconds"] > 0


def test_other_trainers_of_the_machine_read_the_masks_too(graph):
    model = sage()
    with Explaining(graph, model, Guide(model=MODEL, pools=2)) as explaining:
        reader = MaskReader(explaining.addresses())
        explaining.give(model, 0)
        mine = explaining.wait(0, SECONDS)
        theirs = [reader.take(), reader.take()]
        assert reader.take() is None
    for left, right in zip(mine, theirs, strict=True):
        assert right is not None and left.requester == right.requester and torch.equal(left.sn, right.sn)


def test_rows_beyond_the_budget_take_turns_until_every_node_was_explained(graph):
    model = sage()
    with Explaining(graph, model, Guide(model=MODEL, pools=2, row_bytes=50 * WIDTH * 2, every=1)) as explaining:
        known: list[int] = []
        for position in range(20):
            explaining.give(model, position)
            masks = explaining.wait(position, SECONDS)[0]
            known.append(masks.ids.numel())
            if known[-1] == known[-2:][0] and len(known) > 1:
                break
        assert known[0] <= 50 < known[-1] and known == sorted(known)
        assert torch.equal(masks.ids, pool_part(graph.parts.part(0), 2).ids)
        slices = [-(-pool_part(graph.parts.part(part), 2).num_remote // 50) for part in (0, 1)]
        assert len(known) >= slices[0] > 1


def test_later_rounds_explain_some_nodes_in_turn_and_the_others_keep_what_they_had(graph):
    model, guide = sage(), Guide(model=MODEL, pools=4, every=1, round_rows=50)
    opened = graph.parts.part(0)
    pooled = pool_part(opened, guide.pools, seed=guide.seed)
    rows = graph.node_data["node"]["x"][pooled.ids].to(guide.rows_as(torch.float32))
    num_turns = -(-pooled.num_remote // 50)
    with Explaining(graph, model, guide) as explaining:
        explaining.give(model, 0)
        known = explaining.wait(0, SECONDS)[0]
        assert torch.equal(known.sn, in_this_process(graph, model, guide, 0).sn) and num_turns > 1
        for position in range(1, num_turns + 1):
            with torch.no_grad():
                model.convs[0].lin_l.weight.mul_(-1.5)
            turn = slice(position % num_turns, None, num_turns)
            explained = explain_part(pooled, model.eval(), opened.node_data["node"]["x"], rows, turn=turn)
            expected = guide.make_explainer().importance(model, explained)
            assert torch.equal(expected.ids, pooled.ids[turn])
            explaining.give(model, position)
            before, known = known, explaining.wait(position, SECONDS)[0]
            assert torch.equal(known.ids, pooled.ids) and torch.equal(known.sn[turn], expected.sn)
            others = torch.ones(pooled.num_remote, dtype=torch.bool)
            others[turn] = False
            assert torch.equal(known.sn[others], before.sn[others])
            torch.testing.assert_close(known.sf, expected.sf.lerp(before.sf, float(others.float().mean())))


def test_without_nodes_columns_are_explained_with_a_sample_of_rows_that_is_fetched_once(graph):
    model = sage()
    options = {"model": MODEL, "pools": 4, "every": 1, "nodes": False, "round_rows": 40}
    with Explaining(graph, model, Guide(**options)) as explaining:
        for position in range(3):
            explaining.give(model, position)
            masks = explaining.wait(position, SECONDS)[0]
        all_ids = pool_part(graph.parts.part(0), 4).ids
        assert torch.equal(masks.ids, all_ids[:: -(-all_ids.numel() // 40)])
        fetched = sum(each.ids.numel() for each in explaining.wait(2, SECONDS))
        assert explaining.counters()["row_bytes"] == fetched * WIDTH * 2


def test_killed_it_is_started_again_and_goes_on_from_the_masks_there_are(graph):
    model = sage()
    with Explaining(graph, model, Guide(model=MODEL, pools=2)) as explaining:
        explaining.give(model, 0)
        explaining.wait(0, SECONDS)
        before = explaining.pid
        os.kill(before, signal.SIGKILL)
        until(lambda: explaining.pid != before)
        explaining.give(model, 30)
        assert [masks.version for masks in explaining.wait(30, SECONDS)] == [2, 2]
        assert explaining.counters()["restarts"] == 1


@pytest.mark.parametrize("missing", ["process", "memory"])
def test_where_it_cannot_be_started_again_who_waits_is_told(graph, monkeypatch, missing: str):
    module, started = sys.modules["gnnsys.explain.explaining"], []

    def none_left(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(f"no {missing} left")

    def start(*command: Any, **options: Any) -> Any:
        started.append(forked_popen(*command, **options))
        return started[-1]

    forked_popen = module.subprocess.Popen
    with Explaining(graph, sage(), Guide(model=MODEL, pools=2)) as explaining:
        popen = none_left if missing == "process" else start
        words = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(module, "subprocess", words)
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
        if missing == "memory":
            monkeypatch.setattr(module.Mailbox, "create", none_left)
        os.kill(explaining.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"cannot be started: .*no {missing} left"):
            explaining.wait(0, SECONDS)
        assert explaining.counters()["restarts"] == 3
        assert len(started) == (0 if missing == "process" else 3)
        assert all(process.poll() is not None for process in started)  # none is left behind


def test_it_is_started_again_once_it_can_be(graph, monkeypatch):
    module = sys.modules["gnnsys.explain.explaining"]
    usual, tried = module.subprocess.Popen, []

    def later(*command: Any, **options: Any) -> Any:
        tried.append(command)
        if len(tried) == 1:
            raise BlockingIOError("no process left")
        return usual(*command, **options)

    model = sage()
    with Explaining(graph, model, Guide(model=MODEL, pools=2)) as explaining:
        words = SimpleNamespace(Popen=later, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(module, "subprocess", words)
        os.kill(explaining.pid, signal.SIGKILL)
        explaining.give(model, 0)
        assert [masks.position for masks in explaining.wait(0, SECONDS)] == [0, 0]
        assert (explaining.counters()["restarts"], explaining.error) == (2, "")
    tried.clear()
    with Explaining(graph, model, Guide(model=MODEL, pools=2)) as explaining:  # not even the first time
        assert explaining.give(model, 0)
        assert [masks.position for masks in explaining.wait(0, SECONDS)] == [0, 0]
        assert (explaining.counters()["restarts"], explaining.error, len(tried)) == (1, "", 2)


def test_stopped_it_keeps_nobody_waiting(graph):
    model = sage()
    with Explaining(graph, model, Guide(model=MODEL, pools=2, every=1)) as explaining:
        explaining.give(model, 0)
        explaining.wait(0, SECONDS)
        os.kill(explaining.pid, signal.SIGSTOP)
        for position in range(1, 2000):  # more than a pipe or a mailbox could keep
            assert explaining.give(model, position)
        assert explaining.take() is None and explaining.counters()["age"] == 1999
        os.kill(explaining.pid, signal.SIGCONT)
        assert explaining.wait(1999, SECONDS)[0].position == 1999
        os.kill(explaining.pid, signal.SIGSTOP)
        explaining.close(timeout=0.1)  # by force
    assert not os.path.exists(f"/proc/{explaining.pid}/exe")


def test_a_model_that_fails_is_reported_and_not_tried_for_ever(graph):
    with Explaining(graph, Failing(), Guide(model="tests.explain.models:failing")) as explaining:
        explaining.give(Failing(), 0)
        until(lambda: explaining.take() is None and bool(explaining.error))
        assert "no forward pass today" in explaining.error
        with pytest.raises(RuntimeError, match="no forward pass today"):  # which no waiting could help
            explaining.wait(0, SECONDS)
    with pytest.raises(ValueError, match="closed"):
        explaining.give(Failing(), 1)


def test_it_ends_when_nobody_has_it_any_more(graph):
    explaining = Explaining(graph, sage(), Guide(model=MODEL, pools=2))
    pid = explaining.pid
    assert alive(pid)
    del explaining
    gc.collect()
    until(lambda: not alive(pid))  # fails where it does not end


def test_a_process_that_does_not_listen_keeps_nobody_waiting(graph, monkeypatch):
    def deaf(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", str(SECONDS)], **options)

    words = SimpleNamespace(Popen=deaf, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(sys.modules["gnnsys.explain.explaining"], "subprocess", words)
    much = {"text": "x" * 200_000}  # that a pipe would not take
    with Explaining(graph, sage(), Guide(model="tests.explain.models:described", arguments=much)) as explaining:
        explaining.give(sage(), 0)
        assert explaining.take() is None


def test_it_ends_with_the_trainer_that_started_it(graph):
    with processes() as running:
        running.start_code("trainer", TRAINER, graph.parts.path)
        pid = int(running.await_output(0, "\n"))
        assert alive(pid)
        os.kill(running.pid(0), signal.SIGKILL)
        until(lambda: not alive(pid))


def test_rows_of_other_machines_come_over_the_wire_and_are_counted(graph):
    results = run_ranks(PROGRAM, [1, 1], graph.parts.path, timeout=2 * SECONDS)
    told = [json.loads(result.stdout) for result in results]
    torch.manual_seed(5)
    model, guide = sage(), Guide(model=MODEL, pools=4)
    for part, each in enumerate(told):
        expected = in_this_process(graph, model, guide, part)
        assert each["masks"] == {str(part): [expected.ids.tolist(), expected.sn.tolist()]}
        assert each["counters"]["wire_row_bytes"] == each["counters"]["row_bytes"] == expected.ids.numel() * WIDTH * 2
