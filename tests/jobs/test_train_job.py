"""A job that is cut anywhere and begun again from its checkpoint ends with the bits of one that was not."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnsys.jobs.job_spec import JobSpec, make_spec
from gnnsys.jobs.train_job import JobFiles, run_alone, train, weights_digest
from tests.jobs.queue_jobs import FOLDER, NAME


class Cut(Exception):
    pass


def spec_of(kind: str, **options: Any) -> JobSpec:
    return make_spec(
        f"{NAME}:job", {"kind": kind, "epochs": 2 if kind == "loader" else 8}, folder=FOLDER, seed=3, **options
    )


def run(
    spec: JobSpec, files: JobFiles | None = None, cut_after: int | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    sys.modules.pop(NAME, None)  # as a worker does

    def on_step(steps: int) -> None:
        if steps == cut_after:
            raise Cut

    return train(spec, "cpu", files, on_step, on_wait)


@pytest.mark.parametrize("kind", ["whole", "loader", "torch"])
def test_a_job_that_was_cut_gives_the_bits_of_one_that_was_not(kind: str, tmp_path: Path):
    whole = run(spec_of(kind))
    steps = int(whole["steps"])
    assert steps >= 6 and whole == run(spec_of(kind))
    for cut_after in (3, 6):  # in the middle of an epoch of the loader's, and behind its last batch
        files = JobFiles(results=tmp_path / f"{cut_after}", checkpoints=tmp_path / f"c{cut_after}")
        spec = spec_of(kind, checkpoint_steps=2)
        with pytest.raises(Cut):
            run(spec, files, cut_after)
        assert run(spec, files) == whole
        losses = json.loads((tmp_path / f"{cut_after}" / "losses.json").read_text())
        assert len(losses) == steps and losses[-1] == whole["loss"]
        weights = torch.load(tmp_path / f"{cut_after}" / "model.pt", weights_only=True)
        assert weights_digest(weights) == whole["weights"]


def test_a_checkpoint_that_is_due_by_the_clock_is_written(tmp_path: Path):
    files = JobFiles(checkpoints=tmp_path)
    with pytest.raises(Cut):
        run(spec_of("whole", checkpoint_seconds=0.0), files, 4)
    assert [path.name for path in tmp_path.glob("step-*")] != []
    assert run(spec_of("whole", checkpoint_seconds=0.0), files) == run(spec_of("whole"))


def test_seeds_differ_and_the_job_is_told_its_own():
    assert run(spec_of("whole")) != train_with_seed(4)


def train_with_seed(seed: int) -> dict[str, Any]:
    sys.modules.pop(NAME, None)
    return train(make_spec(f"{NAME}:job", {"kind": "whole", "epochs": 8}, folder=FOLDER, seed=seed))


def test_what_was_trained_waits_for_room_on_a_full_disk(tmp_path: Path, monkeypatch):
    spec = spec_of("whole")
    waits, save = 0, torch.save
    monkeypatch.setattr("gnnsys.jobs.train_job._ROOM_SECONDS", 0.0)

    def no_save(state: object, file: object) -> None:
        if waits < 2:
            raise RuntimeError("unexpected pos")  # which is all that torch says
        save(state, file)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_wait() -> None:
        nonlocal waits
        waits += 1

    monkeypatch.setattr(torch, "save", no_save)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    found = run(spec, JobFiles(results=tmp_path / "results"), on_wait=on_wait)
    assert waits == 2 and found == run(spec)
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["losses.json", "model.pt"]


def test_a_checkpoint_without_room_is_left_out(tmp_path: Path, monkeypatch):
    spec = spec_of("whole", checkpoint_steps=1)
    tries = 0

    def no_room(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gnnsys.checkpoint.Saver._write_files", no_room)
    assert run(spec, JobFiles(checkpoints=tmp_path / "checkpoints")) == run(spec) and tries > 1


def test_the_page_about_jobs_shows_what_its_script_gives(tmp_path: Path, monkeypatch):
    page = (FOLDER / "docs" / "jobs.md").read_text()
    (tmp_path / "train_of_page.py").write_text(page.partition("# train.py\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [line.split() for line in page.splitlines() if " done " in line and line[0].isdigit()]
    assert len(rows) >= 2
    for _, _, hidden, lr, seed, loss, accuracy, _ in rows:
        found = run_alone("train_of_page:job", {"hidden": int(hidden), "lr": float(lr)}, seed=int(seed))
        assert found["loss"] == pytest.approx(float(loss), rel=1e-3)
        assert found["accuracy"] == pytest.approx(float(accuracy), abs=0.002)
