"""Rows from GPU to GPU: order, agreement and loss, tried on the host and over gloo."""

from __future__ import annotations

import copy
import random
import threading

import pytest
import torch

from gnnsys.comm import TrainerLost
from gnnsys.comm.rank_exchange import RankExchange
from gnnsys.fullgraph import BinSchedule, BoundarySampling, HybridParallel, Packing, Staleness
from gnnsys.graph import sbm
from gnnsys.nn import SAGEConv
from tests.fullgraph.ranks import run_ranks
from tests.support.processes import run_ranks as run_processes

CPU = torch.device("cpu")


def rows_of(sender: int, receiver: int, tag: int, turn: int) -> torch.Tensor:
    return torch.full((1 + tag % 7, 3), float(1000 * sender + 100 * receiver + 10 * tag + turn))


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_whole_whatever_orders_they_are_sent_and_expected_in(seed):
    """Two exchanges share a link, every tag is used twice, and nobody takes any before all has been sent."""
    size, tags, turns = 3, list(range(12)), 2

    def work(rank, group):
        own = random.Random(100 * seed + rank)
        first = RankExchange(group, timeout=120)
        exchanges = [first, first.another()]
        first.agree_on_route(CPU, suits_all=True)
        assert first.route.link_of(CPU) is not None and exchanges[1].route is first.route
        got = {}
        acts = []
        for number, peers in enumerate(exchanges):
            for peer in (other for other in range(size) if other != rank):
                for tag in tags:
                    acts += [(False, peers, peer, 100 * number + tag), (True, peers, peer, 100 * number + tag)]
        for turn in range(turns):
            own.shuffle(acts)
            for is_sent, peers, peer, tag in acts:
                if is_sent:
                    peers.send(peer, tag, rows_of(rank, peer, tag, turn))
                else:
                    got[peer, tag, turn] = torch.empty_like(rows_of(peer, rank, tag, turn))
                    peers.expect(peer, tag, got[peer, tag, turn], (peer, tag, turn))
        for peers in exchanges:
            arrived = [peers.next_arrival() for _ in range(turns * (size - 1) * len(tags))]
            assert len(set(arrived)) == len(arrived)
            peers.flush()
            assert peers.messages_sent == [0 if peer == rank else turns * len(tags) for peer in range(size)]
        for (peer, tag, turn), rows in got.items():
            assert torch.equal(rows, rows_of(peer, rank, tag, turn))
        return len(got)

    assert run_ranks(size, work, linked=True) == [2 * turns * 2 * len(tags)] * size


def test_nothing_leaves_before_the_receiver_is_ready_and_the_sender_does_not_wait():
    sent = threading.Event()

    def work(rank, group):
        peers = RankExchange(group, timeout=120)
        peers.agree_on_route(CPU, suits_all=True)
        if rank == 0:
            for tag in range(5):
                peers.send(1, tag, torch.full((1 << 20,), float(tag)))
            sent.set()  # though nobody has asked for any of it
            peers.flush()
            return []
        assert sent.wait(120)
        rows = {tag: torch.empty(1 << 20) for tag in (3, 0, 4, 2, 1)}
        for tag, each in rows.items():
            peers.expect(0, tag, each, tag)
        assert sorted(peers.next_arrival() for _ in rows) == list(range(5))
        return [tag for tag, each in rows.items() if bool((each == tag).all())]

    assert run_ranks(2, work, linked=True)[1] == [3, 0, 4, 2, 1]


def test_a_rank_that_never_asks_for_what_it_was_sent_is_named():
    over = threading.Event()

    def work(rank, group):
        peers = RankExchange(group, timeout=2)
        peers.agree_on_route(CPU, suits_all=True)
        if rank == 1:
            return over.wait(120)
        peers.send(1, 5, torch.ones(3))
        with pytest.raises(TrainerLost, match="rank 1 was lost, or was not heard of for"):
            peers.flush()
        over.set()
        return True

    assert run_ranks(2, work, linked=True) == [True, True]


@pytest.mark.parametrize(
    "approximate",
    [
        pytest.param(None, id="exact"),
        pytest.param(BoundarySampling(0.5), id="bns", marks=pytest.mark.long),
        pytest.param(Staleness(0.3), id="stale"),
    ],
)
def test_training_over_a_link_is_training_through_the_host(approximate):
    graph = sbm(300)
    x, y = (graph.node_data["node"][name] for name in ("x", "y"))

    torch.manual_seed(0)
    layers = [SAGEConv(x.shape[1], 16), torch.nn.ReLU(), SAGEConv(16, 8), torch.nn.ReLU(), SAGEConv(8, 16)]
    options = {"ranks": torch.randint(3, (300,)), "schedule": BinSchedule(packing=Packing(num_bins=3)), "timeout": 120}

    def train(rank, group, is_linked):
        model = HybridParallel(copy.deepcopy(layers), graph, group=group, approximate=approximate, **options)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            out = model(x[model.nodes])
            loss = torch.nn.functional.cross_entropy(out, y[model.nodes], reduction="sum") / len(y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(model.total(loss.detach()))
        assert (model._peers.route.link_of(CPU) is not None) == is_linked
        return losses, model.times.num_bytes, [p.detach().clone() for p in model.parameters()]

    by_host = run_ranks(3, lambda rank, group: train(rank, group, False))
    by_link = run_ranks(3, lambda rank, group: train(rank, group, True), linked=True)
    for host, link in zip(by_host, by_link, strict=True):
        assert host[:2] == link[:2]
        assert all(torch.equal(a, b) for a, b in zip(host[2], link[2], strict=True))


def test_where_one_rank_cannot_all_go_through_the_host():
    graph = sbm(200)
    x = graph.node_data["node"]["x"]

    layers = [SAGEConv(x.shape[1], 4), SAGEConv(4, 2)]

    def work(rank, group):
        model = HybridParallel(copy.deepcopy(layers), graph, ranks=torch.arange(200) % 3, group=group, timeout=120)
        route = model._peers.route
        if rank == 1:
            route.suits = lambda device: False
        first = model(x[model.nodes]).detach()
        assert route.link_of(CPU) is None
        if rank == 1:
            del route.suits
        again = model(x[model.nodes].clone()).detach()
        assert route.link_of(CPU) is not None
        return torch.equal(first, again)

    assert run_ranks(3, work, linked=True) == [True] * 3


MADE = """
import torch, torch.distributed as dist, gnnsys
from gnnsys.comm.device_link import DeviceRoute, make_link
from gnnsys.comm.rank_exchange import RankExchange
cpu = torch.device("cpu")
with gnnsys.init(timeout=60, device="cpu") as session:
    world, others = dist.group.WORLD, [rank for rank in range(3) if rank != session.rank]
    route = DeviceRoute(world, lambda device, limit: make_link(world, device, limit), device_type="cpu")
    peers = RankExchange(timeout=60, route=route)
    for _ in range(2):
        peers.agree_on_route(cpu, suits_all=True)
        rows = {peer: torch.empty(5) for peer in others}
        for peer in others:
            peers.expect(peer, 0, rows[peer], peer)
            peers.send(peer, 0, torch.full((5,), 10.0 * session.rank + peer))
        assert sorted(peers.next_arrival() for _ in others) == others
        peers.flush()
        assert all(rows[peer].eq(10 * peer + session.rank).all() for peer in others)
    print(len(dist.distributed_c10d._world.pg_map))
"""


def test_a_link_is_made_of_the_processes_own_group_once():
    assert [ended.stdout.split() for ended in run_processes(MADE, 3)] == [["3"]] * 3


def test_a_process_group_without_nccl_has_no_link():
    def work(rank, group):
        peers = RankExchange(group, timeout=120)
        return peers.route.suits(CPU), peers.route.suits(torch.device("cuda", 0))

    assert run_ranks(2, work) == [(False, False)] * 2
