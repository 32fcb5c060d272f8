"""Embeddings are trained by both sides on the same batches, and what was updated is counted."""

import json

import pytest
import torch

from gnnsys.bench import SuiteOptions, peers, run_suite
from gnnsys.bench.dist.phase import BEGIN, END, FIGURES, READY, go_file
from gnnsys.bench.dist.run_job import prepare_phases
from gnnsys.bench.typed.embedding_task import SKEWED, UNIFORM, draw
from gnnsys.bench.typed.embeddings import KINDS, WARM, EmbeddingSettings, bytes_of, embeddings, make_parts, run_distdgl
from gnnsys.bench.workload import Sizes, Workload
from gnnsys.lab import available
from tests.bench.verdicts import judged
from tests.support.processes import module_code, run_ranks

TINY = EmbeddingSettings(num_rows=3000, dim=16, batch_size=400, steps=4)


def check_ranks(ranks: list[dict], kind: str) -> None:
    """Counts of all ids after the warm-up, and losses that fall."""
    assert len(ranks) == 2
    for number, rank in enumerate(ranks):
        batches = draw(TINY.task, kind, number, WARM + TINY.steps)[WARM:]
        assert (rank["steps"], rank["seeds"]) == (TINY.steps, sum(ids.numel() for ids in batches))
        assert len(rank["losses"]) == WARM + TINY.steps and rank["losses"][-1] < rank["losses"][0]


def test_ids_of_a_batch_are_distinct_and_skewed_ones_have_favourites_on_both_hosts():
    task = EmbeddingSettings(num_rows=100_000, batch_size=1000).task
    counts = {}
    for kind in KINDS:
        batches = draw(task, kind, 0, 200)
        assert all(ids.unique().numel() == ids.numel() > 900 for ids in batches)
        assert all(torch.equal(one, same) for one, same in zip(batches, draw(task, kind, 0, 200), strict=True))
        assert not torch.equal(batches[0], draw(task, kind, 1, 1)[0])
        counts[kind] = torch.cat(batches).bincount(minlength=task.num_rows)
    assert counts[UNIFORM].max() < 15  # 2 are expected of each
    favourites = counts[SKEWED].topk(task.num_rows // 1000).indices
    assert 0.05 < float(counts[SKEWED][favourites].sum() / counts[SKEWED].sum()) < 0.11
    assert 0.3 < float((favourites < task.num_rows // 2).double().mean()) < 0.7


def test_trainers_update_the_rows_of_their_batches_and_tell_how_many(tmp_path):
    """On two machines that are processes of this host; in the lab they have links and rates."""
    TINY.task.save(tmp_path)
    prepare_phases(tmp_path, TINY.phases)
    for phase in TINY.phases:
        for word in (READY, BEGIN):
            go_file(tmp_path, word, phase.name).touch()
    train = module_code("gnnsys.bench.typed.embedding_train")
    first, second = run_ranks(train, [1, 1], tmp_path, make_parts(tmp_path))
    lines = [line.split(maxsplit=2) for line in first.stdout.splitlines() if line.startswith("phase-")]
    assert [line[:2] for line in lines] == [[word, kind] for kind in KINDS for word in (READY, BEGIN, END, FIGURES)]
    for line, kind in zip(lines[3::4], KINDS, strict=True):
        check_ranks(json.loads(line[2]), kind)
    assert "phase-" not in second.stdout


@pytest.mark.long  # a peer's job: its trainers go through the loop of ours, which the test before runs
@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.skipif("dgl" in peers.missing("dgl"), reason=str(peers.missing("dgl").get("dgl")))
def test_distdgl_updates_the_same_rows_on_two_hosts(tmp_path):
    found = run_distdgl(tmp_path, TINY)
    assert list(found) == list(KINDS)
    for kind, figures in found.items():
        check_ranks(figures.ranks, kind)
        assert 0.9 * TINY.least_bytes < bytes_of(figures) < 3 * TINY.least_bytes


def test_updates_have_a_target_and_a_missing_lab_is_a_reason(monkeypatch):
    with Workload(Sizes(2_000, 20_000)) as work:
        cases = list(embeddings(work))
    ways = [f"{kind}{how}" for kind in KINDS for how in ("", ", in the clear")]
    assert judged(cases) == {(f"embeddings/{way}/updates", 3.0) for way in ways}
    monkeypatch.setattr("gnnsys.bench.lab_jobs.available", lambda: "the lab needs root")
    report = run_suite("typed", [embeddings], SuiteOptions(quick=True), show=lambda line: None)
    assert {(row.ours, row.reason) for row in report.rows} == {(None, "the lab needs root")}
    assert report.failures() == []


@pytest.mark.parametrize(
    ("settings", "message"), [({"rate": "fast"}, "a rate must look like"), ({"rounds": 0}, "rounds must be at least 1")]
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingSettings(**settings)
