"""The native core called by several Python threads at once: what a store, its servers and a pipeline's stages do.

Each test has an answer of its own; under ThreadSanitizer (`make sanitize`) a race on the way to it is found too.
"""

from __future__ import annotations

import threading

import torch

from gnnsys.ops import (
    move_rows,
    num_versions,
    sample_neighbors,
    sparse_adam_step,
    spmm,
    update_rows,
)
from tests.ops.graphs import random_csc

THREADS = 4
DEADLINE_SECONDS = 120


def together(*calls) -> None:
    """Starts all of them at one moment; an error of one is raised here."""
    start, errors = threading.Barrier(len(calls)), []

    def run(call) -> None:
        try:
            start.wait(timeout=DEADLINE_SECONDS)
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_pulls_beside_pushes_see_whole_rows_and_no_push_is_lost():
    rows = torch.zeros(300, 33, dtype=torch.int64)
    versions = torch.zeros(num_versions(300), dtype=torch.int32)
    index = torch.arange(300).repeat(5)

    def push() -> None:
        for _ in range(20):
            update_rows(rows, index, torch.ones(1500, 33, dtype=torch.int64), add=True, versions=versions)

    def pull() -> None:
        for _ in range(20):
            seen = move_rows(rows, torch.empty(1500, 33, dtype=torch.int64), index=index, versions=versions)
            assert torch.equal(seen.amin(1), seen.amax(1))

    together(push, push, pull, pull)
    assert torch.equal(rows, torch.full_like(rows, 2 * 20 * 5))


def test_pulls_beside_steps_see_whole_rows():
    rows, average, square = (torch.zeros(200, 48) for _ in range(3))
    versions = [torch.zeros(num_versions(200), dtype=torch.int32) for _ in range(3)]
    ids = [torch.arange(200), torch.arange(100)]
    gradients = [torch.ones(200, 48), torch.full((100, 48), 2.0)]

    def step() -> None:
        for _ in range(20):
            sparse_adam_step(
                rows, average, square, ids, gradients, ranks=2, step_size=0.1, betas=(0.9, 0.99), eps=1e-8,
                versions=versions,
            )  # fmt: skip

    def pull() -> None:
        for _ in range(40):
            seen = move_rows(rows, torch.empty(400, 48), index=torch.arange(200).repeat(2), versions=versions[0])
            assert torch.equal(seen.amin(1), seen.amax(1))

    together(step, pull, pull)
    assert torch.equal(rows[:100], rows[:1].expand(100, -1)) and (rows < 0).all()


def test_threads_that_sample_one_graph_get_the_answer_of_one_thread_alone():
    graph, seeds = random_csc(2000, 2000, 30000), torch.arange(0, 2000, 3)
    weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(1))
    alone = [sample_neighbors(graph, seeds, 5, key=7), sample_neighbors(graph, seeds, 5, key=7, weight=weight)]

    def sample() -> None:
        for _ in range(5):
            plain = sample_neighbors(graph, seeds, 5, key=7)
            weighted = sample_neighbors(graph, seeds, 5, key=7, weight=weight)
            for got, expected in zip((plain, weighted), alone, strict=True):
                assert torch.equal(got.indptr, expected.indptr)
                assert torch.equal(got.positions, expected.positions)

    together(*[sample] * THREADS)


def test_threads_that_aggregate_over_one_graph_get_the_answer_of_one_thread_alone():
    graph = random_csc(3000, 3000, 60000)
    x = torch.randn(3000, 32, generator=torch.Generator().manual_seed(2))
    alone = spmm(graph, x, reduce="mean")

    def aggregate() -> None:
        for _ in range(3):
            assert torch.equal(spmm(graph, x, reduce="mean"), alone)

    together(*[aggregate] * THREADS)
