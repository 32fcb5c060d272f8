"""Link loaders with a guide: what node loaders promise, with negatives and without the batch's own links."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.explain import Guide
from gnnsys.graph import EDGE, sbm
from gnnsys.loader.loader import Loader
from gnnsys.partition import partition_graph
from gnnsys.sampling import DistGraph, NeighborSampler
from tests.explain.guided_training import MODEL
from tests.explain.lockstep import Job, trainers
from tests.explain.models import CLASSES, WIDTH
from tests.support.forked_popen import forking

STEPS, HALF = 15, 8


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("links") / "parts"
    partition_graph(sbm(400, num_classes=CLASSES, num_features=WIDTH, avg_degree=8), 2, folder)
    return folder


class LinkJob(Job):
    def make_loader(self, graph: DistGraph, guide: Guide) -> Loader:
        links = gnnsys.split(graph, None, type=EDGE)
        options: dict[str, Any] = {"neg_sampling": "binary", "batch_size": 6, "shuffle": True}
        return gnnsys.LinkNeighborLoader(
            graph, [4, 4], edge_label_index=links, num_threads=self.num_threads, guide=guide, **options
        )

    def loss(self, batch: Any) -> torch.Tensor:
        src, dst = self.model(batch.x, batch.edge_index)[batch.edge_label_index]
        own = batch.edge_label_index[:, batch.edge_label > 0].T.tolist()
        assert len(own) >= 5 and not {tuple(link) for link in own} & {tuple(e) for e in batch.edge_index.T.tolist()}
        return F.binary_cross_entropy_with_logits((src * dst).sum(1), batch.edge_label.float())


def test_exact_batches_of_links_repeat_from_a_state_and_on_other_machines(parts: Path) -> None:
    with forking(sys.modules["gnnsys.explain.explaining"]):
        with trainers(parts, (0, 0)) as graphs:
            whole = LinkJob(graphs, num_features=0.5).run(HALF)
            state = whole.state()
            assert state["loaders"][1]["sampler"]["versions"]
            whole.run(STEPS - HALF)
            told = [guide.status() for guide in whole.guides]
            columns = [guide._sampler().newest.columns for guide in whole.guides]
            assert [guide._sampler().requester for guide in whole.guides] == [0, 1]
            assert all(each["guided_batches"] > 0 and each["num_columns"] == WIDTH // 2 for each in told)
            assert all(choice is not None for choice in columns)
            whole.close()
        with trainers(parts, (0, 1)) as graphs:
            apart = LinkJob(graphs, num_features=0.5).load(state).run(STEPS - HALF)
            assert apart.batches == whole.batches[2 * HALF :] and apart.weights == whole.weights
            assert apart.guides[0].status()["bytes_saved_by_columns"] > 0
            apart.close()


def test_rows_of_the_other_part_are_read_by_the_columns_of_the_guide(parts: Path) -> None:
    with forking(sys.modules["gnnsys.explain.explaining"]), trainers(parts, (0, 0)) as graphs:
        job = LinkJob(graphs, num_features=0.5).run(6)  # guided from batch 5 on
        sampler, batch = job.guides[0]._sampler(), next(job.endless[0])
        choice, rows = sampler.newest.columns, graphs[0].node_data["node"]["x"][batch.n_id]
        assert choice is not None
        own = choice.is_own(batch.n_id)
        assert torch.equal(batch.x[own], rows[own]) and not bool(own.all())
        assert torch.equal(batch.x[~own][:, choice.columns], rows[~own][:, choice.columns])
        assert torch.equal(batch.x[~own][:, choice.dropped], choice.fill[choice.dropped].expand(int((~own).sum()), -1))
        job.close()


def test_bad_use_says_what_to_do(parts: Path) -> None:
    guide, graph = Guide(model=MODEL), sbm(100)
    with pytest.raises(ValueError, match="a guide is for a graph in parts"):
        gnnsys.LinkNeighborLoader(graph, [2], guide=guide)
    for options in (
        {"replace": True},
        {"disjoint": True},
        {"weight_attr": "w"},
        {"subgraph_type": "induced"},
        {"time_attr": "t", "edge_label_time": torch.zeros(3, dtype=torch.int64)},
        {"sampler": NeighborSampler(graph, [2])},
    ):
        with pytest.raises(ValueError, match="a guide decides how neighbours are drawn"):
            gnnsys.LinkNeighborLoader(graph, [2], guide=guide, **options)
    with pytest.raises(ValueError, match="guide must be a"):
        gnnsys.LinkNeighborLoader(graph, [2], guide="gradient")  # type: ignore[arg-type]
    with trainers(parts, (0, 1)) as graphs, pytest.raises(ValueError, match="most seeds of this trainer are of part 1"):
        links = graphs[0].from_global(torch.full((2, 3), graphs[0].book.part_range(1).start))
        gnnsys.LinkNeighborLoader(graphs[0], [2], edge_label_index=links, batch_size=1, guide=guide)


def test_pygs_loaders_name_the_loader_that_takes_a_guide(parts: Path) -> None:
    pytest.importorskip("torch_geometric")
    from gnnsys.pyg import LinkNeighborLoader, NeighborLoader

    with trainers(parts, (0, 0)) as graphs:
        for loader in (NeighborLoader, LinkNeighborLoader):
            with pytest.raises(ValueError, match=r"use gnnsys.NeighborLoader or gnnsys.LinkNeighborLoader"):
                loader(graphs[0], [2], guide=Guide(model=MODEL))
