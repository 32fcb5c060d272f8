"""Hosts without ranks over the lives of a job: nothing of the life before is left; what cannot start is one line."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import gnnsys
from gnnsys.comm import CURVE, Client, Group, Keys, Kind, RequestContext
from gnnsys.planning import LaunchPlan, PlacedSampler, PlannedHost
from gnnsys.session.assist import Assistant
from gnnsys.session.assistants import ASSISTANTS, Assistants, AssistedJob
from gnnsys.session.sampler_processes import SAMPLERS_REMEDY, SamplerProcesses, peers_of, start_planned
from gnnsys.store import Store
from tests.session.test_plan import make_parts
from tests.support.processes import run_ranks

SAMPLER = PlacedSampler(host="h1", trainer=0)


def plan_of(*samplers: PlacedSampler) -> LaunchPlan:
    return LaunchPlan(
        hosts=(
            PlannedHost(name="h1", num_ranks=1, parts=(0,)),
            PlannedHost(name="h2", num_ranks=0, parts=(1, 2), samplers=samplers),
        )
    )


@contextmanager
def assisting(plan: LaunchPlan) -> Iterator[tuple[Assistant, Assistants, Client]]:
    """h2 in this process, which is machine 1, and a client of rank 0."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # kept until the server has it: nobody else gets it
        place.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{place.getsockname()[1]}"
        assistants = Assistants.with_new_key({"h2": where})
        assistant = Assistant(plan, assistants, "h2")
        assistant.server.start()
    client = Client({1: where}, sender=0, incarnation=1, keys=assistants.keys, timeout=60)
    try:
        yield assistant, assistants, client
    finally:
        client.close()
        assistant.close()


def serve(assistants: Assistants, client: Client, path: Path, **job) -> tuple[dict[str, list[str]], str | None]:
    return assistants.serve(client, 1, str(path), [0, 1, 1], False, 60.0, AssistedJob(**job).to_json())


def test_tables_of_the_life_before_are_gone_when_parts_are_opened_again(tmp_path: Path) -> None:
    path = make_parts(tmp_path / "parts", 3)
    with assisting(plan_of()) as (_, assistants, client):
        assert serve(assistants, client, path) == ({"h2": []}, None)
        for width in (2, 3):  # the script was changed between the two lives
            store = Store(machine_of_part=[1, 1, 1], machine=0, client=client, rank=0, world_size=1)
            assert store.create("mine", 30, (width,)).pull(torch.arange(3)).shape == (3, width)
            store.close()
            assert serve(assistants, client, path) == ({"h2": []}, None)


def test_a_graph_that_could_not_be_opened_is_open_on_no_host(tmp_path: Path) -> None:
    path, other = make_parts(tmp_path / "parts", 3), make_parts(tmp_path / "other", 3, seed=1)
    with assisting(plan_of()) as (_, assistants, client):
        for each in (path, other):
            assert serve(assistants, client, each)[1] is None
            told = client.request(1, Kind.STATUS).result().options
            assert (told["path"], told["parts"]) == (str(each.resolve()), [1, 2])
        assert assistants.forget(client, 1) is None
        assert client.request(1, Kind.STATUS).result().options["path"] is None


def test_samplers_that_do_not_start_are_one_line_each_time_and_none_is_left(tmp_path, monkeypatch) -> None:
    path, closed = make_parts(tmp_path / "parts", 3), []

    def fail(self, count, first):
        raise RuntimeError("planted")

    monkeypatch.setattr(SamplerProcesses, "start", fail)
    monkeypatch.setattr(SamplerProcesses, "close", lambda self: closed.append(self))
    with assisting(plan_of(SAMPLER)) as (assistant, assistants, client):
        for number in (1, 2):  # the job starts again
            found, problem = serve(assistants, client, path)
            assert found == {} and problem == f"h2: planted: {SAMPLERS_REMEDY}"
            assert len(closed) == number and assistant._samplers is None
        monkeypatch.setattr(SamplerProcesses, "start", lambda self, count, first: ["tcp://127.0.0.1:1"] * count)
        assert serve(assistants, client, path) == ({"h2": ["tcp://127.0.0.1:1"]}, None)


def test_what_a_session_says_of_lost_ranks_and_encryption_reaches_servers_and_samplers(tmp_path, monkeypatch) -> None:
    path, made = make_parts(tmp_path / "parts", 3), []

    def start(self, count, first):
        made.append((self._lost_after, self._keys.encrypts))
        return ["tcp://127.0.0.1:1"] * count

    monkeypatch.setattr(SamplerProcesses, "start", start)
    with assisting(plan_of(SAMPLER)) as (assistant, assistants, client):
        for job in ({"lost_after": 7.0}, {"lost_after": 7.0}, {"lost_after": 9.0, "encrypts": CURVE}):
            assert serve(assistants, client, path, **job)[1] is None
        assert made == [(7.0, True), (9.0, CURVE)]  # those that fit go on
        assert assistant.server._life.lost_after == 9.0
        for wrong in ({"lost_after": 0}, {"lost_after": "x"}, {"encrypts": False}):
            found = assistants.serve(client, 1, str(path), [0, 1, 1], False, 60.0, wrong)
            assert found[1] is not None and found[1].startswith("h2: ") and "\n" not in found[1]


class OneRank:
    """A group of one."""

    rank = local_rank = 0
    is_leader, timeout, incarnation = True, 1.0, 1

    def agree(self, name, problem, timeout):
        assert problem is None

    def gather(self, name, value):
        return [value]


def test_a_host_whose_samplers_do_not_listen_is_named_on_every_rank(monkeypatch) -> None:
    monkeypatch.setenv("GNNSYS_LAUNCH_HOST", "h1")
    group: Group = OneRank()  # type: ignore[assignment]
    processes = SamplerProcesses("/nowhere", 0, "127.0.0.1", Keys.generate(), 30.0)
    for others in ({}, {"h2": []}):
        with pytest.raises(ValueError, match="h2: 0 of 1 samplers of the plan listen: see what that host printed"):
            start_planned(processes, group, plan_of(SAMPLER), others)
    assert start_planned(processes, group, plan_of(SAMPLER), {"h2": ["tcp://h2:1"]}) == ["tcp://h2:1"]


SAMPLERS_DIFFER = """
import sys, gnnsys
with gnnsys.init(timeout=120, process_group=False) as session:
    try:
        gnnsys.open(sys.argv[1], samplers=session.rank)
    except ValueError as error:
        print(error)
"""


def test_another_number_of_samplers_on_one_rank_is_the_same_error_on_all(tmp_path) -> None:
    ended = run_ranks(SAMPLERS_DIFFER, 2, make_parts(tmp_path / "parts", 2))
    assert [rank.stdout for rank in ended] == ["samplers must be the same on all ranks: rank 0 has 0, rank 1 1\n"] * 2


FAILS_TO_START = """
import sys, gnnsys
from gnnsys.session.sampler_processes import SamplerProcesses

start, tries = SamplerProcesses.start, []

def fail_once(self, count, first):
    tries.append(self)
    if session.rank == 1 and len(tries) == 1:
        raise RuntimeError("planted")
    return start(self, count, first)

SamplerProcesses.start = fail_once
with gnnsys.init(timeout=120, process_group=False) as session:
    for _ in range(2):
        try:
            graph = gnnsys.open(sys.argv[1], samplers=1)
        except ValueError as error:
            print(error)
    print(graph.samplers is not None, len(session._graphs.samplers.pids))
    session.barrier()
"""


def test_samplers_that_failed_to_start_are_started_when_the_graph_is_opened_again(tmp_path) -> None:
    path = make_parts(tmp_path / "parts", 2)
    ended = run_ranks(FAILS_TO_START, 2, path, environment={"SPARE_SERVERS": "4"})
    assert [rank.stdout for rank in ended] == ["rank 1 on machine 0: planted\nTrue 1\n"] * 2


def test_priority_and_path_of_a_graph_are_those_of_its_samplers_too(tmp_path) -> None:
    with gnnsys.init(process_group=False) as session:
        graph = session.open(make_parts(tmp_path / "parts", 2))
        kept: list[Client] = []
        context = RequestContext(priority=-3, path=5)
        peers = peers_of(["tcp://127.0.0.1:1"], graph, session.group, Keys.generate(), 5.0, 7.0, context, kept.append)
        assert peers.client is kept[0] and kept[0].context == context
        assert {key: peers.opening[key] for key in ("priority", "path", "lost_after")} == {
            "priority": -3, "path": 5, "lost_after": 7.0,
        }  # fmt: skip
        kept[0].close()


ENCRYPTS = """
import sys, torch, gnnsys
encrypt = {"True": True, "False": False, "curve": "curve"}[sys.argv[2]]
try:
    with gnnsys.init(timeout=120, process_group=False, encrypt=encrypt, lost_after=50) as session:
        graph = gnnsys.open(sys.argv[1])
        rows = graph.node_data[graph.node_types[0]]["x"][torch.arange(graph.num_nodes())]
        loader = gnnsys.NeighborLoader(graph, [4], batch_size=200, samplers=True)
        next(iter(loader))
        print(session.client._keys.encrypts, len(rows), loader.counters()["sample"].counts["own"])
        loader.close()
        session.barrier()
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("encrypt", [CURVE, False])  # True: test_plan_hosts.py
def test_a_job_with_hosts_without_ranks_encrypts_as_its_session_says_or_not_at_all(tmp_path, encrypt) -> None:
    path, plan = make_parts(tmp_path / "parts", 3), plan_of(SAMPLER)
    with assisting(plan) as (assistant, assistants, _):
        told = {ASSISTANTS: assistants.text(), "GNNSYS_PLAN": plan.line_for_ranks(), "GNNSYS_LAUNCH_HOST": "h1"}
        (ended,) = run_ranks(ENCRYPTS, 1, path, str(encrypt), environment=told)
        if encrypt is False:
            assert ended.stdout.startswith("encrypt=False, and h2, which has no ranks, encrypts: leave encrypt away")
        else:
            assert ended.stdout.split() == [str(encrypt), "120", "0"]
            assert assistant.server._life.lost_after == 50 and assistant._sampling is not None
            assert assistant._sampling[1] == AssistedJob(lost_after=50, encrypts=encrypt)
