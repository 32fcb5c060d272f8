"""Loaders that try given ways, and a clock that says what each takes: for tests of plans."""

import torch

import gnnsys
from gnnsys.graph import sbm
from gnnsys.planning import ExecutionPlan, Way
from gnnsys.planning.execution import turn_clock

GRAPH = sbm(1500, avg_degree=8, num_features=8)
WAYS = [Way(), Way(loading_threads=2), Way(loading_threads=0, compute_threads=1)]


def node_loader(**options):
    base = {"input_nodes": torch.arange(1200), "batch_size": 8, "shuffle": True, "seed": 3}
    return gnnsys.NeighborLoader(GRAPH, [4, 3], **{**base, **options})


def with_ways(ways=WAYS, make=node_loader, **options):
    """A loader that tries these ways, on whatever machine the test runs."""
    made_for = make(**options, execution="auto").plan.made_for
    return make(**options, execution=ExecutionPlan(ways, made_for=made_for))


def short(loader, rounds=1):
    """The same loader, whose trial has turns of three batches."""
    trial = loader.plan.trial
    trial.warm, trial.measured, trial.rounds = 1, 2, rounds
    return loader


def tensors_of(batch):
    return [batch.x, batch.edge_index, batch.n_id, batch.e_id, batch.y]


def are_same(batches, others):
    return all(
        torch.equal(a, b) for one, other in zip(batches, others, strict=True) for a, b in zip(one, other, strict=True)
    )


class Clock:
    """In the place of time: training on a batch takes as long as the way says that made it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(turn_clock.time, "perf_counter", lambda: self.now)

    def train(self, loader, seconds):
        self.now += seconds[loader._execution._current]

    def epochs(self, loader, seconds, num_epochs, until=lambda: False):
        """Trains so many epochs, or until something is so at the end of one; a look at other things lies between."""
        for _ in range(num_epochs):
            for _ in loader:
                self.train(loader, seconds)
            self.now += 1000.0
            if until():
                return


def until_chosen(loader):
    """Whole epochs, until the trial is over: one that is hard to decide takes longer."""
    while loader.plan.chosen is None:
        for _ in loader:
            pass
