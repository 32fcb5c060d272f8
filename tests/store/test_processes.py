"""Embeddings trained by real processes on two machines end where a process alone ends, and leave nothing behind."""

from __future__ import annotations

import json

import pytest
import torch

import gnnsys
from gnnsys.partition import write_parts
from gnnsys.store import DistEmbedding, SparseAdam
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.processes import await_shared_memory_freed, run_ranks, shared_memory

TRAIN = """
import json, sys, torch, gnnsys
from gnnsys.store import DistEmbedding, SparseAdam
with gnnsys.init(timeout=120) as session:
    graph = gnnsys.open(sys.argv[1])
    embedding = DistEmbedding(graph, graph.num_nodes(), 4, "embedding")
    optimizer = SparseAdam([embedding], lr=0.1)
    for step in range(3):
        ids = torch.arange(step, graph.num_nodes(), 5)[: 30 // session.world_size * session.world_size]
        share = ids.view(session.world_size, -1)[session.rank]
        embedding(share).square().sum(1).mean().backward()
        optimizer.step()
    if session.rank == 0:
        graph.store.save("embedding", sys.argv[2])
    print(json.dumps({
        "rows": embedding.table[:].tolist(),
        "places": sorted({part[0].kind for part in graph.store.candidates("embedding")}),
    }))
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    graph, path = homogeneous(200, 800), tmp_path_factory.mktemp("store") / "parts"
    write_parts(graph, random_assignment(graph, 3, 1), path)
    return path


def test_training_on_two_machines_ends_where_training_alone_ends(parts, tmp_path):
    before = shared_memory()
    ended = run_ranks(TRAIN, [1, 1], parts, tmp_path)
    results = [json.loads(rank.stdout) for rank in ended]
    with gnnsys.init(process_group=False):
        graph = gnnsys.open(parts)
        embedding = DistEmbedding(graph, graph.num_nodes(), 4, "embedding")
        optimizer = SparseAdam([embedding], lr=0.1)
        for step in range(3):
            embedding(torch.arange(step, graph.num_nodes(), 5)[:30]).square().sum(1).mean().backward()
            optimizer.step()
        for result in results:
            assert result["rows"] == results[0]["rows"]
            assert result["places"] == ["shard", "shared"], "own rows through shared memory, others through the shard"
        torch.testing.assert_close(torch.tensor(results[0]["rows"]), embedding.table[:], rtol=1e-5, atol=1e-6)
        restored = graph.store.load("embedding", tmp_path)
        assert restored[:].tolist() == results[0]["rows"]
    await_shared_memory_freed(before)
