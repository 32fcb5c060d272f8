"""Whole commands at small sizes: what a user types and what comes back."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gnnsys.bench import peers
from gnnsys.cli import main
from gnnsys.cli.commands import demo
from tests.support.processes import AGENT, Ended, run_code


def run_forked(command: Sequence[object], *, env: Mapping[str, str], timeout: float) -> Ended:
    """`subprocess.run` of torchrun, from a process that has imported torch; what is printed is printed here."""
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    ended = run_code(AGENT, *command[3:], timeout=timeout, environment=env)
    print(ended.stdout, end="")
    print(ended.stderr, end="", file=sys.stderr)
    return ended


def test_demo_trains_beyond_what_features_alone_allow(capfd: pytest.CaptureFixture[str], monkeypatch):
    """Under an agent that is forked, as its ranks are; `make demo` is the same with fresh ones."""
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run_forked))
    assert main(["demo", "--nodes", "3000", "--epochs", "5", "--batch-size", "64"]) == 0
    shown = capfd.readouterr()
    lines = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    reached = float(lines["accuracy"].split()[1].rstrip("%"))
    from_features = next(float(line.split("%")[0]) for line in shown.out.splitlines() if "own features" in line)
    assert reached > from_features + 5
    assert "nodes per second" in lines["throughput"]
    assert "epoch 5/5" in shown.err


def test_demo_refuses_no_epochs(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--epochs", "0"]) == 2
    assert capsys.readouterr().err == "gnnsys demo: error: --epochs must be at least 1, got 0\n"


def test_bench_writes_its_rows_and_passes_the_check_in_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("dgl")
    target = tmp_path / "rows.json"
    assert main(["bench", "ops", "--quick", "--only", "sample_neighbors/", "--json", str(target), "--check"]) == 0
    written = json.loads(target.read_text())
    assert [row["name"] for row in written["rows"]] == ["sample_neighbors/1t", "sample_neighbors/2t"]
    assert all(row["ratio"] > 0 and row["met"] is None for row in written["rows"])
    assert "sample_neighbors/1t" in capsys.readouterr().out


def test_bench_check_fails_when_a_required_peer_is_missing(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(peers.PEERS, "dgl", ("no_such_dgl", "dgl"))
    peers.find.cache_clear()
    try:
        assert main(["bench", "ops", "--quick", "--only", "sddmm/1t", "--check"]) == 1
    finally:
        peers.find.cache_clear()
    assert "sddmm/1t beside dgl: dgl is not installed" in capsys.readouterr().err


def test_an_only_that_matches_nothing_is_a_users_error(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "ops", "--only", "nothing-like-it"]) == 2
    assert "matches none of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["store", "--set", "cpu=0.5"], "`bench jobs` and `bench flows`: store has no settings"),
        (["dist", "--set", "cpu"], "--set cpu: write NAME=VALUE"),
        (["dist", "--set", "speed=1"], "there is no setting 'speed'"),
        (["links", "--quick", "--set", "speed=1"], "there is no setting 'speed', only num_nodes"),
        (["links", "--quick", "--set", "rate=fast"], "or 500kbit, got 'fast'"),
    ],
)
def test_a_setting_of_no_use_is_a_users_error(arguments, message, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_does_not_load_torch():
    code = "import sys; from gnnsys.cli.main import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
