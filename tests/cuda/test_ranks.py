"""Ranks that share the one GPU of a machine, and what ranks with a GPU each do with streams, on one GPU."""

from __future__ import annotations

import json
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import gnnsys
from gnnsys.comm import device_link
from gnnsys.comm.device_link import DeviceLink, DeviceRoute
from gnnsys.comm.rank_exchange import RankExchange
from gnnsys.session.rank_device import NCCL
from tests.fullgraph.ranks import run_ranks as run_threads
from tests.support.processes import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHARED = """
import json, torch, torch.distributed as dist, gnnsys
with gnnsys.init(timeout=60, device="cuda:0") as session:
    assert torch.cuda.current_device() == 0 and session.device == torch.device("cuda", 0)
    torch.manual_seed(session.rank)  # DDP sends rank 0's weights to all
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).to(session.device), device_ids=[0])
    model(torch.full((1, 3), 1.0 + session.rank, device=session.device)).sum().backward()
    weights = [p.detach().tolist() for p in model.parameters()]
    print(json.dumps([dist.get_backend(), model.module.weight.grad.tolist(), weights]))
"""


def test_ddp_trains_with_two_ranks_on_one_gpu_and_rank_0_says_that_it_is_gloo():
    first, second = run_ranks(SHARED, [2], timeout=120)
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert json.loads(first.stdout)[:2] == ["gloo", [[1.5] * 3] * 2]
    assert first.stderr.count("ranks 0 and 1 share one GPU") == 1 and "share one GPU" not in second.stderr


BY_TURNS = """
import torch, gnnsys
with gnnsys.init(timeout=60) as session:
    print(session.device == torch.device("cuda", session.local_rank % torch.cuda.device_count()))
    print(torch.cuda.current_device() == session.device.index)
"""


def test_local_ranks_take_gpus_by_turns_and_make_them_current():
    for ended in run_ranks(BY_TURNS, [2], timeout=120):
        assert ended.stdout.split() == ["True", "True"], ended


def test_a_rank_alone_has_nccl_beside_gloo_and_can_ask_both():
    with gnnsys.init() as session:
        assert session.device.type == "cuda"
        assert str(dist.get_backend_config()) == NCCL
        for device in ("cpu", session.device):
            rows = torch.ones(3, device=device)
            dist.all_reduce(rows)
            assert rows.tolist() == [1.0] * 3
        link = device_link.make_link(dist.group.WORLD, session.device, timedelta(seconds=60))
        assert link.device == session.device


FULL_GRAPH = """
import copy, json, torch, gnnsys
from gnnsys.fullgraph import HybridParallel
from gnnsys.graph import sbm
from gnnsys.nn import SAGEConv
with gnnsys.init(timeout=60, device="cuda:0") as session:
    graph = sbm(400)
    x, y = (graph.node_data["node"][name] for name in ("x", "y"))
    ranks = torch.arange(400) % session.world_size
    torch.manual_seed(0)
    layers, losses = [SAGEConv(x.shape[1], 16), torch.nn.ReLU(), SAGEConv(16, 16)], {}
    for device in ("cpu", "cuda"):
        model = HybridParallel([copy.deepcopy(layer).to(device) for layer in layers], graph, ranks=ranks, timeout=60)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows, labels, losses[device] = x[model.nodes].to(device), y[model.nodes].to(device), []
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(rows), labels, reduction="sum") / 400
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[device].append(model.total(loss.detach()))
        assert model._peers.route.link_of(rows.device) is None  # NCCL takes no two ranks on one GPU
    print(json.dumps([losses["cpu"], losses["cuda"]]))
"""


def test_full_graph_ranks_that_share_a_gpu_exchange_through_the_host():
    for ended in run_ranks(FULL_GRAPH, [2], timeout=180):
        on_cpu, on_gpu = json.loads(ended.stdout)
        assert on_gpu == pytest.approx(on_cpu, rel=1e-4)


class StagedGroup:
    """A process group as NCCL's is to its callers: transfers of CUDA tensors come behind the stream that is current
    when they are begun, run on a stream of their own, and are waited for by streams. Rows go through the host here."""

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self._group, self._stream = group, torch.cuda.Stream()

    def send(self, tensors, peer, tag):
        (rows,) = tensors
        if not rows.is_cuda:
            return self._group.send(tensors, peer, tag)
        with self._behind():
            host = rows.cpu()
        self._group.send([host], peer, tag).wait()
        return self

    def recv(self, tensors, peer, tag):
        (rows,) = tensors
        if not rows.is_cuda:
            return self._group.recv(tensors, peer, tag)
        host = torch.empty(rows.shape, dtype=rows.dtype)
        self._group.recv([host], peer, tag).wait()
        with self._behind():
            rows.copy_(host)
        return self

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def _behind(self):
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


def test_transfers_between_gpus_come_behind_what_makes_rows_and_before_what_reads_them():
    store, device, size = dist.HashStore(), torch.device("cuda", 0), 1 << 20

    def work(rank, group):
        def make(where, limit):
            up, down = (
                StagedGroup(dist.ProcessGroupGloo(dist.PrefixStore(way, store), rank, 2, limit))
                for way in ("up", "down")
            )
            return DeviceLink(up, down, rank, where, limit)

        torch.cuda.set_device(device)
        peers, found = RankExchange(group, timeout=60, route=DeviceRoute(group, make)), []
        with torch.cuda.stream(torch.cuda.Stream()):
            peers.agree_on_route(device, suits_all=True)
            assert peers.route.link_of(device) is not None
            for turn in range(20):
                got = torch.zeros(size, device=device)
                peers.expect(1 - rank, turn, got, turn)
                torch.cuda._sleep(20_000_000)  # the rows are made late
                rows = torch.full((size,), float(100 * rank + turn), device=device)
                peers.send(1 - rank, turn, rows)
                assert peers.next_arrival() == turn
                found.append((got == 100 * (1 - rank) + turn).all())
                peers.flush()
                rows.zero_()  # they have left
        return [bool(each) for each in found]

    with patch.object(device_link, "_are_different", lambda *_: True):
        assert run_threads(2, work) == [[True] * 20] * 2


MEMORY = """
import os
import gnnsys
from gnnsys.comm import place_of
from gnnsys.store import MemoryBudget
on_cpu = os.environ["RANK"] == "2"
with gnnsys.init(timeout=60, device="cpu" if on_cpu else None) as session:
    device = session.device
    print(device, MemoryBudget.of(device).num_ranks, "cpu" if on_cpu else place_of(device).device)
"""


def test_ranks_that_see_one_gpu_share_its_memory_and_a_rank_on_the_cpu_has_none_of_it():
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    first, second, third = (ended.stdout.split() for ended in run_ranks(MEMORY, [3], environment=environment))
    assert first[:2] == ["cuda:0", "2"] and first[2].startswith("GPU-") and second == first
    assert third == ["cpu", "3", "cpu"], "host memory is for all three"
