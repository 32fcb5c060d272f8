"""Ranks that share seeds find out that they cut them differently, and no loader holds anybody up."""

import json
import threading
import time
from collections import Counter

import pytest
import torch.distributed as dist

from gnnsys.graph import sbm
from gnnsys.loader import NeighborLoader, same_options
from gnnsys.loader.same_options import SameOptions
from gnnsys.partition import Placement
from gnnsys.seeds import Ranks, split
from tests.support.processes import run_ranks

GRAPH = sbm(200, seed=1)


def ranks_of(rank, what="train"):
    seeds = split(GRAPH, what, placement=Placement(rank, (0, 0), ()))
    return Ranks(GRAPH, seeds, None), seeds.largest


@pytest.fixture
def made(monkeypatch):
    """Makes the comparison of a loader of a rank. All ranks are in this process, and in one store."""
    store, count = dist.HashStore(), Counter()
    rank_now = [0]

    def numbered(place):  # every rank counts for itself, as in its own process
        count[rank_now[0], place] += 1
        return f"{place}/{count[rank_now[0], place]}"

    def make(rank, what="train"):
        rank_now[0] = rank
        return SameOptions(*ranks_of(rank, what))

    monkeypatch.setattr(same_options, "_store_of", lambda ranks: store)
    monkeypatch.setattr(same_options, "numbered", numbered)
    return make


def test_who_comes_later_with_another_batch_size_is_refused_in_one_line_whenever_it_begins(made):
    first, late = [made(rank) for rank in range(2)]
    first.check({"batch_size": 128, "drop_last": False})
    assert first.is_over
    for _ in range(2):
        with pytest.raises(ValueError, match="batch_size=128 on rank 0 and 64 on rank 1") as told:
            late.check({"batch_size": 64, "drop_last": False})
        assert "\n" not in str(told.value) and "drop_last" not in str(told.value) and not late.is_over


def test_ranks_that_are_alike_go_on_and_are_not_compared_again(made):
    for same in [made(rank) for rank in range(2)]:
        same.check({"batch_size": 64})
        assert same.is_over
        same.check({"batch_size": 32})


def test_loaders_that_one_line_makes_are_told_apart_by_when_they_were_made_not_by_when_they_are_used(made):
    loaders = [[(made(rank), size) for size in (16, 32)] for rank in range(2)]
    for rank, order in ((0, (0, 1)), (1, (1, 0))):
        for number in order:
            same, size = loaders[rank][number]
            same.check({"batch_size": size})


def test_a_loader_of_one_rank_is_compared_with_none_of_the_others(made):
    """Rank 0 tries a batch of its share by itself, before the loader that all ranks train with."""
    for rank in range(2):
        if rank == 0:
            made(rank).check({"batch_size": 4096})
        made(rank).check({"batch_size": 64})


def test_a_function_that_makes_loaders_makes_them_for_several_callers(made):
    def make(rank, batch_size):
        made(rank).check({"batch_size": batch_size})

    for rank in range(2):
        if rank == 1:
            make(rank, 4096)
        make(rank, 64)


def test_other_seeds_are_other_loaders(made):
    for rank, what in enumerate(("train", "val")):
        made(rank, what).check({"batch_size": rank})


def test_ids_that_are_no_share_are_not_compared(made, monkeypatch):
    monkeypatch.setattr(same_options, "_store_of", None)  # it is not asked for
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


def test_a_store_that_is_gone_or_does_not_answer_is_not_waited_for(made, monkeypatch):
    monkeypatch.setattr(same_options, "_ANSWER_SECONDS", 0.05)
    stuck = _Stuck()
    for store in (_Gone(), stuck):
        monkeypatch.setattr(same_options, "_store_of", lambda ranks, store=store: store)
        same = made(0)
        began = time.monotonic()
        same.check({"batch_size": 1})
        assert same.is_over and time.monotonic() - began < 30
    stuck.answers.set()


FACES = {
    "native": "gnnsys.NeighborLoader(graph, [3] * hops, input_nodes=seeds, batch_size=size, shuffle=True, seed=rank)",
    "pyg": "gnnsys.pyg.NeighborLoader(graph, [3] * hops, input_nodes=seeds, batch_size=size, shuffle=True)",
    "dgl": "gnnsys.dgl.DataLoader(graph, seeds, gnnsys.dgl.NeighborSampler([3] * hops), batch_size=size)",
}
PROGRAM = """
import importlib, json, sys, torch, gnnsys
face, code = sys.argv[2:4]
if face in ("pyg", "dgl"):
    importlib.import_module("gnnsys." + face)
session = gnnsys.init()
rank = session.rank
torch.manual_seed(rank)
graph = gnnsys.open(sys.argv[1])
seeds = gnnsys.split(graph, "train")
for size, hops in [(16, 2), (8, 2), (16, 1)]:
    if rank == 0:
        size, hops = 16, 2
    loader = eval(code)
    try:
        next(iter(loader))
        told = len(loader)
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
def test_the_rank_of_a_job_that_comes_later_is_refused_when_its_first_epoch_begins(parts, face):
    if face in ("pyg", "dgl"):
        pytest.importorskip("torch_geometric" if face == "pyg" else "dgl")
    told = []
    for ended in run_ranks(PROGRAM, [1, 1], parts, face, FACES[face]):
        lines = [line for line in ended.stdout.splitlines() if line.startswith("told ")]
        told.append([json.loads(line.removeprefix("told ")) for line in lines])
    alike, cut, hops = zip(*told, strict=True)
    assert alike[0] == alike[1] > 0 and hops == alike
    (refusal,) = [answer for answer in cut if isinstance(answer, str)]
    assert all(text in refusal for text in ("batch_size=", "16 on rank 0", "8 on rank 1")) and "\n" not in refusal


def test_an_iteration_compares_before_anything_is_loaded(monkeypatch):
    def refuse(self, options):
        assert options == {"batch_size": 4, "drop_last": False}
        raise ValueError("they differ")

    monkeypatch.setattr(SameOptions, "check", refuse)
    seeds = split(GRAPH, "train", placement=Placement(0, (0, 0), ()))
    loader = NeighborLoader(GRAPH, [2], input_nodes=seeds, batch_size=4)
    with pytest.raises(ValueError, match="they differ"):
        iter(loader)
    assert not loader.counters()
