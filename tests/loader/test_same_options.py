"""Ranks that share seeds find out that their loaders differ, and a loader that one rank alone has holds nobody up."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from gnnsys.graph import sbm
from gnnsys.loader import NeighborLoader, same_options
from gnnsys.loader.same_options import SameOptions
from gnnsys.partition import Placement
from gnnsys.seeds import Ranks, split
from tests.support.processes import run_ranks

GRAPH = sbm(200, seed=1)


@pytest.fixture
def job(monkeypatch):
    """Ranks of this process, in one store. Each calls `SameOptions` from where its test does."""
    store = dist.HashStore()
    monkeypatch.setattr(same_options, "_store_of", lambda ranks: store)
    monkeypatch.setattr(same_options, "_waited_in_vain", set())
    counts = threading.local()

    def numbered(place):  # every rank counts for itself, as in its own process
        known = counts.__dict__.setdefault("places", {})
        known[place] = known.get(place, 0) + 1
        return f"{place}/{known[place]}"

    monkeypatch.setattr(same_options, "numbered", numbered)
    return monkeypatch


def ranks_of(rank, world_size=2, what="train"):
    seeds = split(GRAPH, what, placement=Placement(rank, (0,) * world_size, ()))
    return Ranks(GRAPH, seeds, None), seeds.largest


def on_ranks(work, world_size=2):
    """What `work(rank)` returns or raises on every rank, each in a thread."""

    def run(rank):
        try:
            return work(rank)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def patient(job):
    job.setattr(same_options, "_WAIT_SECONDS", 120.0)


def hasty(job):
    job.setattr(same_options, "_WAIT_SECONDS", 0.0)


def test_ranks_with_other_options_are_all_refused_with_one_line(job):
    patient(job)

    def work(rank):
        same = SameOptions(*ranks_of(rank, 3))
        same.check({"batch_size": 64 if rank == 2 else 128, "num_neighbors": [15, 10]})

    told = on_ranks(work, 3)
    assert len(set(told)) == 1 and "\n" not in told[0]
    assert all(text in told[0] for text in ("different options: batch_size=", "128 on rank", "64 on rank 2"))
    assert "num_neighbors" not in told[0]


def test_ranks_that_are_alike_go_on_and_are_not_compared_again(job):
    patient(job)

    def work(rank):
        same = SameOptions(*ranks_of(rank))
        same.check({"batch_size": 64, "num_neighbors": (15, 10)})
        return same.is_over

    assert on_ranks(work) == [True, True]


def test_the_last_to_come_knows_at_once_that_all_are_alike(job):
    hasty(job)
    job.setattr(same_options, "numbered", lambda place: f"{place}/1")
    loaders = [SameOptions(*ranks_of(rank)) for rank in range(2)]
    for same in loaders:  # the first has waited in vain at this place, so nobody waits there again
        same.check({"batch_size": 64})
    assert [same.is_over for same in loaders] == [False, True]
    loaders[0].check({"batch_size": 64})
    assert loaders[0].is_over


def test_a_rank_that_is_alone_waits_once_and_goes_on(job):
    job.setattr(same_options, "_WAIT_SECONDS", 0.05)
    waits = []
    wait = same_options._Meeting.wait
    job.setattr(same_options._Meeting, "wait", lambda self, seconds: waits.append(seconds) or wait(self, seconds))
    for _ in range(3):  # of one place in the program
        same = SameOptions(*ranks_of(0))
        for _ in range(20):
            same.check({"batch_size": 64})
        assert same.is_over, "it does not look for ever"
    assert waits == [0.05]


def test_who_went_on_is_told_when_its_next_epoch_begins(job):
    hasty(job)
    loaders = [SameOptions(*ranks_of(rank)) for rank in range(2)]
    loaders[0].check({"batch_size": 64})
    same_options._waited_in_vain.clear()
    job.setattr(same_options, "numbered", lambda place: f"{place}/1")
    with pytest.raises(ValueError, match="batch_size=64 on rank 0 and 32 on rank 1"):
        loaders[1].check({"batch_size": 32})
    for _ in range(2):
        with pytest.raises(ValueError, match="batch_size=64 on rank 0 and 32 on rank 1"):
            loaders[0].check({"batch_size": 64})


def test_a_loader_of_one_rank_is_compared_with_none_of_the_others(job):
    """Rank 0 tries a batch of its share by itself, before the loader that all ranks train with."""
    hasty(job)

    def work(rank):
        if rank == 0:
            SameOptions(*ranks_of(rank)).check({"batch_size": 4096, "num_neighbors": [-1]})
        same = SameOptions(*ranks_of(rank))
        same.check({"batch_size": 64, "num_neighbors": [15, 10]})

    assert [work(rank) for rank in (0, 1)] == [None, None]


def test_a_function_that_makes_loaders_makes_them_for_several_callers(job):
    hasty(job)

    def make(rank, batch_size):
        SameOptions(*ranks_of(rank)).check({"batch_size": batch_size})

    def work(rank):
        if rank == 1:
            make(rank, 4096)
        make(rank, 64)

    assert [work(rank) for rank in (0, 1)] == [None, None]


def test_other_seeds_are_other_loaders(job):
    hasty(job)
    for rank, what in enumerate(("train", "val")):
        SameOptions(*ranks_of(rank, what=what)).check({"batch_size": rank})


def test_ids_that_are_no_share_are_not_compared(job):
    job.setattr(same_options, "_store_of", None)  # it is not asked for
    for rank in range(2):
        ranks, _ = ranks_of(rank)
        same = SameOptions(ranks, None)
        assert same.is_over
        same.check({"batch_size": rank})


class _Gone:
    def compare_set(self, *given):
        raise RuntimeError("connection reset")


class _Stuck:
    def __init__(self):
        self.answers = threading.Event()

    def compare_set(self, *given):
        self.answers.wait()
        return b""


def test_a_store_that_is_gone_or_does_not_answer_is_not_waited_for(job):
    job.setattr(same_options, "_ANSWER_SECONDS", 0.05)
    stuck = _Stuck()
    for store in (_Gone(), stuck):
        job.setattr(same_options, "_store_of", lambda ranks, store=store: store)
        same = SameOptions(*ranks_of(0))
        began = time.monotonic()
        same.check({"batch_size": 1})
        assert same.is_over and time.monotonic() - began < 30
    stuck.answers.set()


FACES = {
    "native": "gnnsys.NeighborLoader(graph, [3] * hops, input_nodes=seeds, batch_size=size, shuffle=True, seed=rank)",
    "links": "gnnsys.LinkNeighborLoader(graph, [3] * hops, edge_label_index=links, batch_size=size)",
    "pyg": "gnnsys.pyg.NeighborLoader(graph, [3] * hops, input_nodes=seeds, batch_size=size, shuffle=True)",
    "dgl": "gnnsys.dgl.DataLoader(graph, seeds, gnnsys.dgl.NeighborSampler([3] * hops), batch_size=size)",
}
PROGRAM = """
import importlib, json, sys, torch, gnnsys
import gnnsys.loader.same_options as same_options
face, code = sys.argv[2:4]
if face in ("pyg", "dgl"):
    importlib.import_module("gnnsys." + face)
session = gnnsys.init()
rank = session.rank
torch.manual_seed(rank)
graph = gnnsys.open(sys.argv[1])
seeds = gnnsys.split(graph, "train")
links = gnnsys.split(graph, None, type=graph.edge_types[0])
same_options._WAIT_SECONDS = 120.0
for size, hops in [(16, 2), (8, 2), (16, 1)]:
    if rank == 0:
        size, hops = 16, 2
    loader = eval(code)
    try:
        told = sum(1 for batch in loader)
    except ValueError as error:
        told = str(error)
    print("told", json.dumps(told))
session.close()
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    from gnnsys.partition import partition_graph

    folder = tmp_path_factory.mktemp("parts") / "parts"
    partition_graph(sbm(400, seed=1), 2, folder)
    return folder


@pytest.mark.parametrize("face", FACES)
def test_ranks_of_a_job_are_told_when_the_first_epoch_begins(parts, face):
    if face in ("pyg", "dgl"):
        pytest.importorskip("torch_geometric" if face == "pyg" else "dgl")
    told = []
    for ended in run_ranks(PROGRAM, [1, 1], parts, face, FACES[face]):
        lines = [line for line in ended.stdout.splitlines() if line.startswith("told ")]
        told.append([json.loads(line.removeprefix("told ")) for line in lines])
    assert told[0] == told[1]
    num_batches, cut, hops = told[0]
    assert num_batches > 0
    assert all(text in cut for text in ("batch_size=", "16 on rank 0", "8 on rank 1")) and "num_neighbors" not in cut
    assert all(text in hops for text in ("num_neighbors=", "[3, 3] on rank 0", "[3] on rank 1")) and "\n" not in hops


def test_an_iteration_compares_before_anything_is_loaded(job):
    def refuse(self, options):
        assert options["batch_size"] == 4 and options["num_neighbors"] == [2]
        raise ValueError("they differ")

    job.setattr(SameOptions, "check", refuse)
    seeds = split(GRAPH, "train", placement=Placement(0, (0, 0), ()))
    loader = NeighborLoader(GRAPH, [2], input_nodes=seeds, batch_size=4)
    with pytest.raises(ValueError, match="they differ"):
        iter(loader)
    assert not loader.counters()
