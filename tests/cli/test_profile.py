"""gnnsys profile: a file that planners read, a table for people, and one line for what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnsys.cli.main import main
from gnnsys.planning import JobProfile
from tests.profiling.communities import two_parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_parts(tmp_path_factory.mktemp("profile") / "parts")


SMALL = ["--fanouts", "4,3", "--batch-size", "50", "--hidden", "8", "--batches", "3"]


def test_it_writes_a_profile_and_prints_a_table(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.json"
    assert main(["profile", str(parts), *SMALL, "--trainers", "3", "--out", str(out)]) == 0
    profile = JobProfile.from_file(out)
    assert len(profile.shares) == 3 and profile.batch_size == 50 and profile.about["fanouts"] == [4, 3]
    shown = capsys.readouterr()
    told = shown.out
    assert shown.err.startswith("profile: looks at 3 batches of each share of the seeds, in several ways: makes ")
    assert told.startswith("2 parts,") and f"--profile {out}" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--fanouts", "4,x"], "--fanouts must be whole numbers with commas, such as 15,10,5, got '4,x'"),
        (["--fanouts", "0"], "fanouts must be whole numbers of more than 0, or -1 for all, got [0]"),
        (["--batches", "0"], "num_batches must be at least 1, got 0"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--trainers", "0"], "trainers and num_batches must be at least 1, got 0 and 3"),
        (["--seeds", "test"], "has neither 'test_mask' nor 'test'"),
        (["--against", "job.json"], "--against compares a profile with a run: give the run's traces by --trace"),
        (["--device", "h200"], "--device must be cpu or cuda, got 'h200'; another machine's GPU is --machine FILE"),
        (["--machine", "none.json"], "there is no machine profile none.json"),
        (["--trace", "none.json"], "there is no trace none.json: save one with loader.save_trace(path) on every rank"),
    ],
)
def test_what_is_wrong_is_one_line(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["profile", str(parts), *SMALL, *words, "--out", str(tmp_path / "job.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gnnsys profile: error: ") and told in said and said.count("\n") == 1


def test_a_folder_that_is_not_there_is_told_before_anything_is_counted(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(parts), "--out", str(tmp_path / "none" / "job.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_what_is_not_on_the_disk_is_told_without_torch(tmp_path: Path) -> None:
    """A fresh interpreter is the point: torch takes seconds to import."""
    (tmp_path / "c.json").write_text("[]")
    lines = {
        "there is no plan": ["simulate", "none.json"],
        "there is no cluster file": ["plan", "parts", "--cluster=none.json", "--profile=c.json", "--trainers=2"],
        "there is no profile": ["plan", "parts", "--cluster=c.json", "--profile=none.json", "--trainers=2"],
        "parts has no manifest.json": ["plan", "parts", "--cluster=c.json", "--profile=c.json", "--trainers=2"],
        "there is no folder none": ["profile", "none", "--out", "job.json"],
    }
    code = (
        "import sys\nfrom gnnsys.cli import main\n"
        f"assert all(main(line) == 2 for line in {list(lines.values())!r})\nassert 'torch' not in sys.modules"
    )
    root = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for told, said in zip(lines, ran.stderr.splitlines(), strict=True):
        assert told in said
