"""The examples run as they stand, at tiny sizes, and learn what they set out to learn."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gnnsys.graph import dataset, planted_noise, save, sbm
from gnnsys.partition import partition_graph
from tests.support.open_sessions import close_sessions
from tests.support.processes import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def sessions_end_with_programs() -> Iterator[None]:
    yield
    close_sessions()


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_node_classification_beats_what_features_alone_allow():
    """On this graph a classifier that knows the generator reaches about 0.52 from a node's own features."""
    options = ["sbm-3k", "--epochs", "4", "--batch-size", "64", "--fanout", "10", "5"]
    assert example("node_classification").main(options) > 0.6


# Losses of gat, not on parts, are among those that tests/golden has recorded; it learns more slowly.
@pytest.mark.parametrize("model, epochs", [("gcn", 3), pytest.param("gat", 12, marks=pytest.mark.long)])
def test_node_classification_trains_every_model_on_parts(model, epochs, tmp_path):
    partition_graph(dataset("sbm-3k"), 2, tmp_path / "parts")
    options = ["--model", model, "--epochs", str(epochs), "--batch-size", "64", "--fanout", "10", "5"]
    options = [str(tmp_path / "parts"), *options]
    assert example("node_classification").main(options) > 0.6


def test_node_classification_goes_on_from_its_last_checkpoint(tmp_path, capsys):
    """Four steps an epoch: one checkpoint is of the middle of an epoch, the other of the last step of all."""
    options = ["sbm-1k", "--batch-size", "32", "--fanout", "5", "5", "--checkpoints"]
    train = example("node_classification").main
    to_the_end = [*options, str(tmp_path / "whole"), "--epochs", "2", "--save-every", "4"]
    whole = train(to_the_end)
    train([*options, str(tmp_path / "cut"), "--epochs", "1", "--save-every", "3"])
    assert list((tmp_path / "cut").glob("step-*")), "it has saved"
    assert train([*options, str(tmp_path / "cut"), "--epochs", "2", "--save-every", "3"]) == whole
    assert "resumed from step 3 (epoch 1)" in capsys.readouterr().out
    assert train(to_the_end) == whole
    assert re.search(r"resumed from step 8 \(epoch 2\)\nepoch   2  val 0\.\d+\n", capsys.readouterr().out)


def test_guided_training_reads_less_of_other_machines_and_learns_as_well(tmp_path):
    """Five classes: noise columns and rows say nothing, and a guide leaves some of them out.

    How many bytes come depends on how many rows batches in flight happen to share. What they ask for does not.
    """
    partition_graph(planted_noise(2000, num_classes=5, num_features=32, noise_columns=32), 2, tmp_path / "parts")
    program = (
        "import runpy, sys; from tests.support.spare_servers import keep_spare_explainers; keep_spare_explainers(); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--epochs", "8", "--batch-size", "48", "--fanout", "5", "5", "--columns", "0.6"]
    guide = ["--exact", "--every", "5"]
    first, _ = run_ranks(program, [1, 1], EXAMPLES / "guided.py", tmp_path / "parts", *options, *guide)
    plain, _ = run_ranks(program, [1, 1], EXAMPLES / "guided.py", tmp_path / "parts", *options, "--no-guide")

    def numbers(text: str) -> tuple[int, float]:
        (left_out,) = re.search(r"machines: [\d,]+ bytes; left out: ([\d,]+)", text).groups()
        return int(left_out.replace(",", "")), float(text.split()[-1])

    (left_out, score), (nothing, score_before) = numbers(first.stdout), numbers(plain.stdout)
    by_nodes = re.search(r"'bytes_saved_by_nodes': ([\d.]+)", first.stdout)
    assert nothing == 0 < left_out and by_nodes is not None and float(by_nodes[1]) > 0
    assert score > 0.5 and score > score_before - 0.1


def test_pyg_drop_in_trains_a_pyg_model():
    pytest.importorskip("torch_geometric")
    assert example("pyg_drop_in").main(["--nodes", "1500", "--epochs", "6"]) > 0.75


PROGRAM = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def test_link_prediction_ranks_held_out_links_above_random_pairs(tmp_path):
    """In memory, and by two ranks on parts with negatives of their own part. By chance it would be 0.5."""
    graph = sbm(300, num_classes=5, homophily=0.9)
    save(graph, tmp_path / "saved")
    partition_graph(graph, 2, tmp_path / "parts")
    options = ["--epochs", "2", "--batch-size", "256", "--fanout", "5", "5"]
    assert example("link_prediction").main([str(tmp_path / "saved"), *options]) > 0.7
    program = EXAMPLES / "link_prediction.py"
    first, _ = run_ranks(PROGRAM, 2, program, tmp_path / "parts", *options, "--negatives", "local")
    assert float(first.stdout.split()[-1]) > 0.65


def test_a_knowledge_graph_is_learnt_and_two_ranks_do_what_one_does(tmp_path):
    """By chance a true end would have an MRR of 0.03. Ranks draw the same links and negatives, and share them."""
    options = ["--dim", "16", "--epochs", "3", "--batch-size", "128", "--negatives", "50", "--lr", "0.1"]
    alone = example("knowledge_graph").main(options)
    assert alone > 0.25
    first, _ = run_ranks(PROGRAM, 2, EXAMPLES / "knowledge_graph.py", *options)
    found = float(re.search(r"test mrr ([\d.]+)", first.stdout)[1])
    assert abs(found - alone) < 0.01


@pytest.mark.long
def test_every_decoder_trains_on_a_knowledge_graph():
    sizes = ["--dim", "16", "--epochs", "6", "--batch-size", "256", "--negatives", "20"]
    for model in ("distmult", "transe", "rotate"):
        options = ["--model", model, *sizes, "--margin", "3", "--lr", "0.1"]
        assert example("knowledge_graph").main(options) > 0.05, model


def test_knowledge_graphs_and_typed_graphs_are_read_from_files_of_arrays(tmp_path):
    arrays = {"edge_index": np.array([[0, 1, 2], [1, 2, 0]], np.int32), "edge_type": np.array([0, 1, 0], np.int16)}
    np.savez(tmp_path / "links.npz", **arrays, edge_split=np.array([0, 1, 2], np.uint8))
    links = example("knowledge_graph").read_links(str(tmp_path / "links.npz"))
    assert links.num_entities == 3 and [each.tolist() for each in links.of(2)] == [[2], [0], [0]]
    typed = {
        "edge_index": np.array([[2, 3, 2], [0, 1, 4]], np.int32),  # papers 2 and 3 to authors 0 and 1, and to term 4
        "edge_type": np.array([0, 0, 1], np.int8),
        "edge_type_names": np.array(["paper|by|author", "paper|has|term"]),
        "node_type_names": np.array(["author", "paper", "term"]),
        "node_type_offsets": np.array([0, 2, 4, 5]),
        "target_type": np.array("author"),
        "y": np.array([1, 0], np.int8),
        "x_term": np.ones((1, 3), np.float32),
        "x_author_data": np.array([3, 1], np.uint8),
        "x_author_indices": np.array([0, 2], np.int32),
        "x_author_indptr": np.array([0, 2, 2], np.int32),
        "x_author_shape": np.array([2, 3]),
        "train_idx_60": np.array([1]),
        "val_idx_60": np.array([0]),
        "test_idx_60": np.array([0]),
    }
    np.savez(tmp_path / "typed.npz", **typed)
    graph = example("rgcn").read_typed(str(tmp_path / "typed.npz"))
    assert graph.num_nodes("paper") == 2 and len(graph.edge_types) == 4
    assert graph.edge_index(("paper", "by_0", "author")).tolist() == [[0, 1], [0, 1]]
    author = graph.node_data["author"]
    assert author["x"].tolist() == [[0.75, 0.0, 0.25], [0.0, 0.0, 0.0]] and author["trainval_mask"].all()


def test_rgcn_learns_alone_and_by_two_ranks_that_train_rows_where_their_nodes_are(tmp_path):
    """Authors have no features, of parts theirs are embeddings. By chance it would be a quarter or less."""
    graph = dataset("typed-1k")
    del graph.node_data["author"]["x"]
    save(graph, tmp_path / "saved")
    partition_graph(graph, 2, tmp_path / "parts")
    options = ["--epochs", "2", "--batch-size", "64", "--fanout", "5", "5", "--hidden", "32"]
    for more in ([], ["--one-hot", "--bases", "3"]):
        assert example("rgcn").main([str(tmp_path / "saved"), *options, *more])["test micro"] > 0.5, more
    first, _ = run_ranks(PROGRAM, 2, EXAMPLES / "rgcn.py", tmp_path / "parts", *options)
    assert float(re.search(r"test micro ([\d.]+)", first.stdout)[1]) > 0.5


def test_a_typed_graph_is_learnt_alone_and_by_two_ranks_with_ddp(tmp_path):
    """Some of the model's parameters lead to no loss, at which DDP stops unless it is told."""
    options = ["--epochs", "2", "--batch-size", "64", "--fanout", "5", "5"]
    assert example("typed_graph").main(["typed-1k", *options]) > 0.5
    partition_graph(dataset("typed-1k"), 2, tmp_path / "parts")
    first, _ = run_ranks(PROGRAM, 2, EXAMPLES / "typed_graph.py", tmp_path / "parts", *options)
    assert float(first.stdout.split()[-1]) > 0.5


def test_examples_take_a_file_of_edges_a_saved_graph_and_a_name(tmp_path):
    graph = dataset("sbm-1k")
    save(graph, tmp_path / "saved")
    partition_graph(graph, 2, tmp_path / "parts")
    for name in ("node_classification", "full_graph", "typed_graph"):
        found = [example(name).graph_of(str(given)) for given in ("sbm-1k", tmp_path / "saved", tmp_path / "parts")]
        assert [one.num_nodes("node") for one in found] == [1000] * 3
