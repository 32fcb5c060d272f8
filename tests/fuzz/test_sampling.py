"""Minutes of it are `python -m tests.fuzz.sampling`; here are a few fixed cases, and that its judgement can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnnsys.graph import Graph
from tests.fuzz import sampling
from tests.fuzz.sampling_oracle import check_batch


def test_random_loaders_keep_what_holds_of_every_batch(tmp_path: Path) -> None:
    told = [sampling.run(number, tmp_path / str(number) if number % 12 == 0 else None) for number in range(24)]
    assert told.count("sampled") > 16 and told.count("refused") > 0


def test_the_oracle_finds_batches_that_are_wrong() -> None:
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 3]])
    graph = Graph.from_edge_index(edges, 4, {"x": torch.arange(4.0)})
    fanouts = {t: [2] for t in graph.edge_types}
    for name, wrong in (
        ("x", lambda store: store.update(x=store["x"] + 1)),
        ("edge_index", lambda store: store.update(edge_index=store["edge_index"].flip(0))),
        ("e_id", lambda store: store.update(e_id=store["e_id"].flip(0))),
    ):
        batch = next(iter(sampling.NeighborLoader(graph, [2], batch_size=4, num_threads=0)))
        check_batch(graph, batch, {}, fanouts)
        for store in (*batch.nodes.values(), *batch.edges.values()):
            if name in store:
                wrong(store)
        with pytest.raises(AssertionError):
            check_batch(graph, batch, {}, fanouts)
    batch = next(iter(sampling.NeighborLoader(graph, [2], batch_size=4, num_threads=0)))
    with pytest.raises(AssertionError, match="more than the fanout 1"):
        check_batch(graph, batch, {}, {t: [1] for t in graph.edge_types})
