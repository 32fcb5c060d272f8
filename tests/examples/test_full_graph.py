"""The full-graph example by several processes: the same losses on any number of them, and an end, or a new life, for a
job whose rank is killed in the middle of an epoch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gnnsys.graph import dataset
from gnnsys.partition import partition_graph
from tests.examples.test_examples import EXAMPLES, example
from tests.support.processes import run_ranks

MODELS = ("sage", "gcn", "gat")
GRAPH = "sbm-400:num_classes=4"
EPOCHS = 4
OPTIONS = ["--hidden", "16", "--bins", "4", "--epochs", str(EPOCHS)]
SAVED = ["--save-every", "2", "--checkpoints"]
DEADLINE = 300  # seconds for a job, of which starting its processes takes most

# Trains models in one session, and the first again with checkpoints
PROGRAM = f"""
import functools, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
import full_graph, gnnsys, gnnsys.comm.rank_exchange
gnnsys.comm.rank_exchange._LEAVE_SECONDS = 120  # others that end with a rank may be late

def kill_one():
    # Rank 1 is killed in the fourth epoch from now, when first bins are on their way and the second epoch's checkpoint,
    # which a thread writes, is there; unless this is its second life
    forward, train, epochs, bins = torch.nn.ReLU.forward, full_graph.HybridParallel.train, [0], [0]
    is_mine = os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    @functools.wraps(forward)
    def ends(self, rows):
        bins[0] += epochs[0] == 4
        if is_mine and bins[0] == 3:
            until = time.monotonic() + {DEADLINE / 3}
            while not any(Path(folder).glob("step-*")) and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, rows)
    def counted(self, mode=True):
        epochs[0] += mode
        return train(self, mode)
    torch.nn.ReLU.forward, full_graph.HybridParallel.train = ends, counted

what, parts, folder, *options = sys.argv[1:]
with gnnsys.init() as session:
    for model in dict(whole={MODELS!r}, kill={MODELS[:1]!r}, restart=())[what]:
        print("model", model, flush=True)
        full_graph.train(session, full_graph.parse([parts, "--model", model, *options]))
    if what != "whole":
        kill_one()
    print("model again", flush=True)
    full_graph.train(session, full_graph.parse([parts, *options, *{SAVED!r}, folder]))
"""


def losses(printed: str) -> dict[int, float]:
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"epoch +(\d+)  loss ([\d.]+)", printed)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.glob("step-*"))
    return torch.load(newest / "dense.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full-graph") / "parts"
    partition_graph(dataset(GRAPH), 4, folder, objective="communication")
    return folder


@pytest.fixture(scope="module")
def by_two(parts, tmp_path_factory):
    """Two ranks of a job that is left alone, and where it saved."""
    folder = tmp_path_factory.mktemp("by-two")
    return run_ranks(PROGRAM, 2, "whole", parts, folder, *OPTIONS, timeout=DEADLINE), folder


@pytest.fixture(scope="module")
def by_four(parts, tmp_path_factory):
    """Four ranks of a job, one of which is killed when a model is trained. A hang would take half an hour."""
    folder = tmp_path_factory.mktemp("by-four")
    return run_ranks(PROGRAM, 4, "kill", parts, folder, *OPTIONS, timeout=DEADLINE, check=False)


@pytest.mark.parametrize("number", range(len(MODELS)), ids=MODELS)
def test_one_two_and_four_processes_print_the_same_losses(number, parts, by_two, by_four, capsys):
    score = example("full_graph").main([str(parts), "--model", MODELS[number], *OPTIONS])
    alone = losses(capsys.readouterr().out)
    assert len(alone) == EPOCHS and alone[EPOCHS] < alone[1]
    for rank in (by_two[0][0], *by_four[: number == 0]):  # that four do as two does not depend on the model
        told = rank.stdout.split("model ")[number + 1]
        assert losses(told) == pytest.approx(alone, rel=1e-4), rank
        shown = re.search(r"test ([\d.]+)", told)
        assert shown is not None and abs(float(shown[1]) - score) < 0.005, rank


def test_a_killed_rank_ends_the_others_and_is_named(by_four):
    assert by_four[1].returncode == -9, by_four[1]
    for rank in (0, 2, 3):
        ended = by_four[rank]
        assert ended.returncode in (1, -6), ended  # torch's gloo may abort after the traceback: a thread still waits
        assert "model again" in ended.stdout and "accuracy" not in ended.stdout.split("again")[1]
        assert re.search(r"TrainerLost: rank \d ", ended.stderr), ended  # 1, or another that ended because of it
    assert any("TrainerLost: rank 1 " in by_four[rank].stderr for rank in (0, 2, 3))


def test_a_restarted_job_ends_with_the_weights_of_an_unbroken_one(parts, by_two, tmp_path):
    options = ["--max-restarts", "1"]
    ranks = run_ranks(
        PROGRAM, 2, "restart", parts, tmp_path, *OPTIONS, torchrun=True, options=options, timeout=DEADLINE
    )
    found = losses(ranks[0].stdout)
    assert min(found) == 3, "it went on from the second epoch"
    unbroken = losses(by_two[0][0].stdout.split("model again")[1])
    assert found == {epoch: unbroken[epoch] for epoch in range(3, EPOCHS + 1)}
    want, got = weights(by_two[1]), weights(tmp_path)
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_the_example_goes_on_from_its_last_checkpoint_alone(tmp_path, capsys):
    train, options = example("full_graph").main, [GRAPH, *OPTIONS, *SAVED]
    whole = train([*options, str(tmp_path / "whole")])
    train([*options, str(tmp_path / "cut"), "--epochs", "3"])
    capsys.readouterr()
    assert train([*options, str(tmp_path / "cut")]) == whole
    assert sorted(losses(capsys.readouterr().out)) == [3, 4]


@pytest.mark.parametrize("options", [["--no-intra", "--no-inter"], ["--recompute"], ["--wire-dtype", "bfloat16"]])
def test_the_example_learns_with_every_option(options):
    """On this graph a classifier that knows the generator reaches about 0.52 from a node's own features."""
    assert example("full_graph").main(["sbm-3k", "--epochs", "12", "--bins", "3", *options]) > 0.6


def test_a_model_for_the_other_kind_of_graph_is_refused_in_one_line():
    train = example("full_graph").main
    with pytest.raises(SystemExit, match=r"^error: --model sage is for graphs of one type.*: use --model rgcn$"):
        train(["typed-300"])
    with pytest.raises(SystemExit, match=r"^error: --model rgcn is for typed graphs.*: use one of sage, gcn, gat$"):
        train([GRAPH, "--model", "rgcn"])


def test_a_typed_graph_trains(capsys):
    score = example("full_graph").main(["typed-200", "--model", "rgcn", *OPTIONS, "--dropout", "0"])
    found = losses(capsys.readouterr().out)
    assert len(found) == EPOCHS and found[EPOCHS] < found[1] and score > 1 / 8  # of so many classes
