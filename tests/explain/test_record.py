"""Runs that waited for nothing, again: what guided their batches was recorded, and is replayed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import gnnsys
from gnnsys.explain import Guide
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from tests.explain.guided_training import MODEL
from tests.explain.lockstep import Job, trainers
from tests.explain.models import CLASSES, WIDTH
from tests.support.forked_popen import forking
from tests.support.processes import await_true

WHERE = (0, 0)


class Recorded(NamedTuple):
    """A run on parts, the folder of its record, its state at some time, and what it was like in the end."""

    parts: Path
    folder: Path
    steps: int
    state: dict[str, Any]
    state_at: int
    versions: list[Any]
    batches: list[str]
    weights: str


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Recorded:
    """Guided as masks came, until there were three versions and batches of each."""
    folder = tmp_path_factory.mktemp("record")
    parts, steps, states = folder / "parts", 1, []
    partition_graph(sbm(400, num_classes=CLASSES, num_features=WIDTH, avg_degree=8), 2, parts)
    with forking(sys.modules["gnnsys.explain.explaining"]), trainers(parts, WHERE) as graphs:
        job = Job(graphs, num_threads=2, exact=False, record=True, every=1)

        def is_guided(times: int) -> bool:
            nonlocal steps
            job.run(1)
            steps += 1
            return all(guide.status()["guided_batches"] > 4 and len(versions(guide)) >= times for guide in job.guides)

        job.run(1)
        lead = job.guides[0]._sampler()._explaining
        await_true(lambda: all(box.newest for box in lead._mask_boxes.values()), "the first masks")
        await_true(lambda: is_guided(1), "the first version")
        states.append((job.state(), steps))
        await_true(lambda: is_guided(3), "more versions")
        job.run(10)
        for guide in job.guides:
            guide.save_record(folder / "record")
        told = [versions(guide) for guide in job.guides]
        job.close()
    return Recorded(parts, folder / "record", steps + 10, *states[0], told, job.batches, job.weights)


def versions(guide: Guide) -> list[Any]:
    return guide._sampler().state_dict()["versions"]


@pytest.mark.parametrize(("num_threads", "where"), [(0, (0, 0)), (3, (0, 1))])
def test_a_recorded_run_is_repeated_bit_by_bit(run: Recorded, num_threads: int, where: tuple[int, ...]) -> None:
    with trainers(run.parts, where) as graphs:
        job = Job(graphs, num_threads=num_threads, exact=False, replay=run.folder).run(run.steps)
        assert job.batches == run.batches and job.weights == run.weights
        assert all(guide.status()["guided_batches"] > 0 for guide in job.guides)
        job.close()


def test_a_replay_goes_on_from_a_state_of_the_recorded_run_and_ends_where_it_ended(run: Recorded, tmp_path) -> None:
    with trainers(run.parts, WHERE) as graphs:
        job = Job(graphs, exact=False, replay=str(run.folder)).load(run.state).run(run.steps - run.state_at)
        assert job.batches == run.batches[2 * run.state_at :] and job.weights == run.weights
        for guide in job.guides:
            guide.save_record(tmp_path)
        with pytest.raises(ValueError, match="the record that is replayed ends with epoch"):
            job.run(1000)
        job.close()
        again = Job(graphs, exact=False, replay=tmp_path)
        assert [versions(guide) for guide in again.guides] == run.versions
        again.close()


def test_a_record_of_another_loader_is_refused(run: Recorded, tmp_path: Path) -> None:
    """Its numbers of batches would mean other batches."""
    other_graph = tmp_path / "parts"
    partition_graph(sbm(400, num_classes=CLASSES, num_features=WIDTH, avg_degree=8, seed=9), 2, other_graph)
    with trainers(run.parts, WHERE) as graphs, trainers(other_graph, WHERE) as others:

        def make(graph: Any = graphs[0], **options: Any) -> None:
            seeds = gnnsys.split(graph, None)
            named = {"input_nodes": seeds, "num_neighbors": [4, 4], "batch_size": 12, "shuffle": True} | options
            guide = Guide(model=MODEL, replay=run.folder)
            gnnsys.NeighborLoader(graph, **named, num_threads=0, guide=guide).close()
            guide.close()

        make()  # as it was recorded
        half = gnnsys.split(graphs[0], graphs[0].from_global(torch.arange(400) % 2 == 0))
        for name, value in {
            "batch_size": 5, "seed": 1, "shuffle": False, "drop_last": True, "num_neighbors": [4, 3]
        }.items():  # fmt: skip
            with pytest.raises(ValueError, match=rf"of another loader, .*{name}=.* \(recorded: "):
                make(**{name: value})
        with pytest.raises(ValueError, match=r"inputs=.* \(recorded: "):
            make(input_nodes=half)
        with pytest.raises(ValueError, match=r"graph=.* \(recorded: "):
            make(others[0])


def test_a_record_that_is_damaged_or_of_another_run_is_refused(run: Recorded, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(run.folder, folder)
    whole = (folder / "rank-0.guide").read_bytes()
    with trainers(run.parts, WHERE) as graphs:

        def refused(told: str, data: bytes = whole, **options: Any) -> None:
            (folder / "rank-0.guide").write_bytes(data)
            with pytest.raises(ValueError, match=told):
                Job(graphs, **{"exact": False, "replay": folder, **options})

        for at in (0, 20, 60, len(whole) // 2, len(whole) - 1):
            refused("was damaged", whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        for size in (0, 10, 40, len(whole) - 1):
            refused("was damaged", whole[:size])
        refused(r"deviation=0.3 \(recorded: 0.1\)", eps=0.3)
        refused("fill='zero'", fill="zero")
        refused("is of rank 1 of 2", (folder / "rank-1.guide").read_bytes())
        refused("has no record of rank 0", replay=tmp_path / "nothing")
        refused("leave replay or exact away", exact=True)
        job = Job(graphs, exact=False, replay=run.folder)
        other = {**run.state["loaders"][0]["sampler"]}
        other["versions"] = [[epoch, batch + 1, *rest] for epoch, batch, *rest in other["versions"]]
        with pytest.raises(ValueError, match="not of the run that replay="):
            job.loaders[0].load_state_dict({**run.state["loaders"][0], "sampler": other})
        job.close()
        alone = Job(graphs, exact=False)
        with pytest.raises(ValueError, match="record=True"):
            alone.guides[0].save_record(tmp_path)
        alone.close()
    with pytest.raises(ValueError, match="guides no loader"):
        Guide(model=MODEL, record=True).save_record(tmp_path)
