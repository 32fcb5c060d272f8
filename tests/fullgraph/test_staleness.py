"""One-epoch staleness against a dense simulation of it, and what becomes of messages that are under way."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing, Staleness
from gnnsys.fullgraph.run import approximate
from tests.fullgraph.dense import adjacency, random_graph
from tests.fullgraph.mixed import LR, LateHalo, agree, check_evaluation, inputs, train
from tests.fullgraph.ranks import DEADLINE
from tests.fullgraph.ranks import run_ranks as run_gloo_ranks
from tests.fullgraph.test_exact import WIDTH, N, close, gcn, gin, loss_of, normed, random_ranks, seeded, unequal_sage
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_value
from tests.support.processes import processes, start_ranks
from tests.support.processes import run_ranks as run_processes


def expected(layers, graph, ranks, x, target, gamma, passes, x_grad):
    """Losses and gradients of gradient descent with the halo of the pass before."""
    layers, a, halo = copy.deepcopy(list(layers)), adjacency(graph), LateHalo(ranks, gamma)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, LR)
    x = x.clone().requires_grad_(x_grad)
    losses, grads, x_grads = [], [], []
    for _ in range(passes):
        optimizer.zero_grad()
        x.grad = None
        out, used = halo.forward(layers, x, a)
        loss = loss_of(out, target)
        halo.backward(loss, used)
        losses.append(loss.item())
        grads.append([None if p.grad is None else p.grad.clone() for p in parameters])
        x_grads.append(x.grad)
        optimizer.step()
    return losses, grads, x_grads


def check(make, world_size, gamma=0.0, *, empty=None, x_grad=False, tolerance=None, passes=4, **options):
    graph, ranks, layers = random_graph(N, 300, 1), random_ranks(world_size, empty=empty), seeded(make)
    x, target = inputs(graph, 4 if make is gcn else 3)
    want = expected(layers, graph, ranks, x, target, gamma, passes, x_grad)
    policy = Staleness(gamma=gamma)
    found = train(layers, graph, ranks, world_size, x, target, policy, passes=passes, x_grad=x_grad, **options)
    agree(found, want[0], want[1], want[2] if x_grad else None, tolerance)


@every_value(make=[unequal_sage, gcn, gin, normed], world_size=[1, 2, 3], gamma=[0.0, 0.7])
def test_losses_and_gradients_are_those_of_a_dense_computation_with_a_late_halo(make, world_size, gamma):
    check(make, world_size, gamma)


@pytest.mark.parametrize("make", [unequal_sage, pytest.param(gcn, marks=pytest.mark.long)])
def test_features_that_train_are_never_late(make):
    """Over gloo's connections."""
    check(make, 3, x_grad=True, passes=3, run=run_gloo_ranks)


@every_value(
    packing={"bins of one node": Packing(bin_nodes=1), "four bins": Packing(num_bins=4), "one bin": Packing()},
    intra=[True, False],
    inter=[False, True],
)
def test_every_schedule_and_size_of_bins_gives_the_late_halo(intra, inter, packing):
    schedule = BinSchedule(intra_layer=intra, inter_layer=inter, packing=packing)
    check(unequal_sage, 3, passes=3, schedule=schedule)  # of the third, rows and gradients are of a late pass


def test_recomputed_bins_see_the_late_halo_that_they_saw_on_the_way_there():
    check(unequal_sage, 2, recompute=True, schedule=BinSchedule(packing=Packing(num_bins=4)))
    check(unequal_sage, 2, memory_budget=20_000)


def test_a_rank_without_nodes_takes_part_in_late_passes():
    check(unequal_sage, 3, empty=1)


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_late_rows_may_travel_as_bfloat16(gamma):
    """Eight bits of a row survive: losses and gradients stay within two hundredths of the largest."""
    check(unequal_sage, 2, gamma, wire_dtype=torch.bfloat16, tolerance=2e-2)


class First(nn.Module):
    """The first columns of its rows, however many there are."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :WIDTH].contiguous()


def test_a_loaded_state_and_rows_of_another_width_begin_with_an_exact_pass():
    graph, ranks = random_graph(N, 300, 2), random_ranks(3)
    layers = seeded(lambda: [First(), *unequal_sage()])
    x, target = inputs(graph, 3)
    wide = torch.cat([x, x], dim=1)
    a = adjacency(graph)
    plan = [(x, False), (x, False), (wide, False), (wide, False), (wide, True), (wide, False), (x, False)]

    def oracle():
        mine, halo, before, losses = copy.deepcopy(layers), LateHalo(ranks), None, []
        optimizer = torch.optim.SGD([p for layer in mine for p in layer.parameters()], LR)
        for rows, is_loaded in plan:
            if is_loaded:
                for layer, old in zip(mine, layers, strict=True):
                    layer.load_state_dict(old.state_dict())
            halo = LateHalo(ranks) if is_loaded or rows is not before else halo
            before = rows
            optimizer.zero_grad()
            out, used = halo.forward(mine, rows, a)
            loss = loss_of(out, target)
            halo.backward(loss, used)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=Staleness()
        )
        first = copy.deepcopy(model.state_dict())
        optimizer, losses = torch.optim.SGD(model.parameters(), LR), []
        for rows, is_loaded in plan:
            if is_loaded:
                model.load_state_dict(first)
            optimizer.zero_grad()
            loss = loss_of(model(rows[model.nodes]), target[model.nodes])
            loss.backward()
            optimizer.step()
            losses.append(model.total(loss.detach()))
        return losses

    want = oracle()
    for found in run_ranks(3, work):
        for got, exact in zip(found, want, strict=True):
            assert abs(got - exact) <= 1e-10 * exact


def test_a_pass_whose_gradients_nobody_asks_for_counts_for_rows_alone():
    graph, ranks, layers = random_graph(N, 300, 3), random_ranks(2), seeded(unequal_sage)
    x, target = inputs(graph, 3)
    backward = [False, True, False, True, True]

    def oracle():
        mine, halo, a, grads = copy.deepcopy(layers), LateHalo(ranks), adjacency(graph), []
        parameters = [p for layer in mine for p in layer.parameters()]
        optimizer = torch.optim.SGD(parameters, 1e-2)
        for goes_back in backward:
            optimizer.zero_grad()
            out, used = halo.forward(mine, x, a)
            if goes_back:
                halo.backward(loss_of(out, target), used)
                grads.append([p.grad.clone() for p in parameters])
                optimizer.step()
        return grads

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=Staleness()
        )
        optimizer, grads = torch.optim.SGD(model.parameters(), 1e-2), []
        for goes_back in backward:
            optimizer.zero_grad()
            loss = loss_of(model(x[model.nodes]), target[model.nodes])
            if goes_back:
                loss.backward()
                grads.append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
        return grads

    want = oracle()
    for found in run_ranks(2, work):
        for got, exact in zip(found, want, strict=True):
            for one, other in zip(got, exact, strict=True):
                close(one, other)


def test_a_pass_does_not_wait_for_what_is_sent_in_it():
    """Rank 1 holds back all it sends in the second pass until rank 0 has done that pass, there and back."""
    graph, ranks, layers = random_graph(N, 300, 4), random_ranks(2), seeded(unequal_sage)
    x, target = inputs(graph, 3)
    is_done, held = threading.Event(), []

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=Staleness()
        )
        own, losses = x[model.nodes], []
        peers = model._runner.train_exchange.__self__.peers
        send = peers.send
        for n in range(4):
            if rank == 1 and n == 1:
                peers.send = lambda *message: held.append(message)
            loss = loss_of(model(own), target[model.nodes])
            loss.backward()
            losses.append(loss.item())
            if n == 1 and rank == 0:
                is_done.set()
            elif n == 1:
                assert is_done.wait(DEADLINE)
                peers.send = send
                for message in held:
                    send(*message)
        return losses

    delayed = run_ranks(2, work)
    assert len(held) > 2
    assert delayed == alone(layers, graph, ranks, x, target)


def alone(layers, graph, ranks, x, target):
    """Four passes of each rank without an optimizer, and with every rank's own loss."""

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=Staleness()
        )
        losses = []
        for _ in range(4):
            loss = loss_of(model(x[model.nodes]), target[model.nodes])
            loss.backward()
            losses.append(loss.item())
        return losses

    return run_ranks(2, work)


def test_what_is_held_does_not_grow_with_the_number_of_passes():
    graph, ranks, layers = random_graph(N, 300, 4), random_ranks(3), seeded(unequal_sage)
    x, target = inputs(graph, 3)

    def work(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=ranks, group=group, timeout=60, approximate=Staleness(gamma=0.5)
        )
        late, held, per_pass = model._runner.train_exchange.__self__, [], 0
        for n in range(8):
            before = sum(late.peers.messages_sent)
            loss_of(model(x[model.nodes]), target[model.nodes]).backward()
            per_pass = sum(late.peers.messages_sent) - before
            if n > 1:
                held.append((len(late.came) + late._num_under_way, len(late._means), len(late.peers._sends)))
        return held, per_pass

    for held, per_pass in run_ranks(3, work):
        messages, means, sends = zip(*held, strict=True)
        assert len(set(means)) == 1 and means[0] > 0
        assert messages == means, "one message of each kind, here or under way"
        assert max(sends) <= 2 * per_pass


def test_a_model_may_be_dropped_with_messages_under_way_and_another_made(monkeypatch):
    """Rank 1 sends what belongs to the last pass when rank 0 has already dropped its model."""
    monkeypatch.setattr(approximate, "_GRACE", 0.5)
    graph, ranks, layers = random_graph(N, 300, 5), random_ranks(2), seeded(unequal_sage)
    x, target = inputs(graph, 3)
    is_dropped, held = threading.Event(), []

    def work(rank, group):
        mine = copy.deepcopy(layers)
        model = HybridParallel(mine, graph, ranks=ranks, group=group, timeout=60, approximate=Staleness())
        own, peers = x[model.nodes], model._runner.train_exchange.__self__.peers
        send = peers.send
        for n in range(2):
            if rank == 1 and n == 1:
                peers.send = lambda *message: held.append(message)
            loss_of(model(own), target[model.nodes]).backward()
        under_way = model._runner.train_exchange.__self__._num_under_way
        if rank == 1:
            assert is_dropped.wait(DEADLINE)
            for message in held:
                send(*message)
        del model, send, peers
        gc.collect()
        if rank == 0:
            is_dropped.set()
        model = HybridParallel(mine, graph, ranks=ranks, group=group, timeout=60)
        check_evaluation(model, mine, own, x, adjacency(graph))
        return under_way

    assert run_ranks(2, work)[0] == len(held) > 2


JOB = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from gnnsys.fullgraph import HybridParallel, Staleness
from gnnsys.nn import SAGEConv
from tests.fullgraph.dense import random_graph
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
graph = random_graph(2000, 20000, 1)
layers = [SAGEConv(8, 64), nn.ReLU(), SAGEConv(64, 64), nn.ReLU(), SAGEConv(64, 3)]
model = HybridParallel(layers, graph, ranks=torch.arange(2000) % 2, approximate=Staleness(), timeout=60)
x = torch.ones(len(model.nodes), 8)
for n in range(2):
    if n == 1 and rank == 1 and sys.argv[1] == "dies":
        model._runner.train_exchange.__self__.peers.send = lambda *message: None
    model(x).sum().backward()
print("trained", flush=True)
if rank == 1:  # and rank 0 just ends
    os._exit(3) if sys.argv[1] == "dies" else dist.destroy_process_group()
"""


def test_a_job_ends_with_messages_under_way():
    for rank in run_processes(JOB, 2, "ends", environment={"PYTHONPATH": "."}):
        assert rank.stdout == "trained\n" and not rank.stderr, str(rank)


def test_a_job_ends_though_a_peer_died_before_it_sent_what_is_waited_for():
    with processes() as running:
        start_ranks(running, JOB, [2], "dies", environment={"PYTHONPATH": "."})
        ended = running.wait()
    assert [rank.returncode for rank in ended] == [0, 3], "\n".join(map(str, ended))
