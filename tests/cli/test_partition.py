"""`gnnsys partition` as a user types it: sources, options, what is printed, what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gnnsys.cli import main
from gnnsys.graph import dataset, load, save
from gnnsys.partition import open_parts, verify_parts


def test_a_generated_graph_is_partitioned_and_comes_back_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "parts"
    name = "sbm-2k:num_classes=4"
    assert (
        main(
            [
                "partition",
                name,
                "--parts",
                "2",
                "--trainers-per-part",
                "2",
                "--balance",
                "train,edges",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "edges between parts" in shown and "edges between subparts" in shown and "train" in shown
    assert verify_parts(out, against=dataset(name)).ok
    parts = open_parts(out)
    assert (parts.num_parts, parts.trainers_per_part) == (2, 2)
    assert parts.info["method"] == "multilevel"
    assert {b["name"] for b in parts.info["balance"]} == {"nodes", "train", "edges"}
    assert all(b["ratio"] <= 1.05 for b in parts.info["balance"])


def test_a_typed_graph_is_balanced_by_type_without_being_asked(tmp_path: Path):
    out = tmp_path / "parts"
    assert main(["partition", "typed-2k", "--parts", "2", "--out", str(out)]) == 0
    names = [b["name"] for b in open_parts(out).info["balance"]]
    assert names == ["nodes", "edges", "train", "ntype:paper", "ntype:author", "ntype:institution"]


def test_a_saved_graph_and_a_file_of_edges_are_sources(tmp_path: Path):
    graph = dataset("sbm-1k:num_features=2")
    save(graph, tmp_path / "saved")
    src, dst = graph.edge_index()
    lines = [f"{a},{b},{i}" for i, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True))]
    (tmp_path / "edges.csv").write_text("\n".join(lines))
    assert main(["partition", str(tmp_path / "saved"), "--parts", "3", "--out", str(tmp_path / "a")]) == 0
    given = ["--columns", "src,dst,weight", "--num-nodes", "1000"]
    assert main(["partition", str(tmp_path / "edges.csv"), "--parts", "3", "--out", str(tmp_path / "b"), *given]) == 0
    assert verify_parts(tmp_path / "a", against=graph).ok
    source = load(tmp_path / "edges.csv", columns=["src", "dst", "weight"], num_nodes=1000)
    assert verify_parts(tmp_path / "b", against=source).ok
    assert torch.equal(open_parts(tmp_path / "b").merge().edge_index(), graph.edge_index())


@pytest.mark.parametrize("method", ["metis", "random", "chunk"])
def test_other_methods_remain(tmp_path: Path, method: str):
    assert main(["partition", "sbm-1k", "--parts", "4", "--method", method, "--out", str(tmp_path / "p")]) == 0
    assert open_parts(tmp_path / "p").info["method"] == method


def test_what_could_not_be_balanced_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "star.txt").write_text("\n".join(f"{i} 0" for i in range(1, 50)))
    assert main(["partition", str(tmp_path / "star.txt"), "--parts", "4", "--out", str(tmp_path / "p")]) == 0
    shown = capsys.readouterr()
    assert "over the limit" in shown.out
    assert "not reached: edges:" in shown.err and "one node has 49 of 49" in shown.err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["sbm-1k", "--parts", "0"], "at least 1"),
        (["sbm-1k", "--parts", "2", "--balance", "colour"], "balance 'colour'"),
        (["sbm-1k", "--parts", "2", "--method", "magic"], "method must be one of"),
        (["no-such-graph", "--parts", "2"], "dataset 'no-such-graph' is not there"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(tmp_path: Path, capsys, arguments, message):
    assert main(["partition", *arguments, "--out", str(tmp_path / "p")]) == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_parts_that_are_there_are_kept_unless_told(tmp_path: Path, capsys):
    out = str(tmp_path / "p")
    assert main(["partition", "sbm-1k", "--parts", "2", "--out", out]) == 0
    assert main(["partition", "sbm-1k", "--parts", "3", "--out", out]) == 2
    assert "exists" in capsys.readouterr().err
    assert open_parts(out).num_parts == 2
    assert main(["partition", "sbm-1k", "--parts", "3", "--out", out, "--overwrite"]) == 0
    assert open_parts(out).num_parts == 3


def test_a_memory_limit_streams_a_file_of_edges_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each edge is there eleven times: two million lines, which do not fit, and which take long to write one by one."""
    edges = dataset("sbm-20k:num_features=1,avg_degree=10").edge_index()
    lines = "".join(f"{a} {b}\n" for a, b in zip(*edges.tolist(), strict=True))
    (tmp_path / "edges.txt").write_text(11 * lines)
    out = tmp_path / "parts"
    given = ["--parts", "4", "--memory-limit", "64M", "--num-nodes", "20000", "--out", str(out)]
    assert main(["partition", str(tmp_path / "edges.txt"), *given]) == 0
    shown = capsys.readouterr().out
    assert "streaming from files" in shown
    assert torch.equal(open_parts(out).merge().edge_index(), edges.repeat(1, 11))
    info = open_parts(out).info
    assert all(b["ratio"] <= 1.05 for b in info["balance"])
    assert "streaming" in info["memory"] and info["memory"] in shown.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.txt", "parts"]


def test_a_memory_limit_that_is_enough_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, limit in (("a", []), ("b", ["--memory-limit", "8G"])):
        assert main(["partition", "sbm-2k", "--parts", "2", "--out", str(tmp_path / name), *limit]) == 0
        assert "in memory" in capsys.readouterr().out
    a, b = open_parts(tmp_path / "a").part(0), open_parts(tmp_path / "b").part(0)
    assert torch.equal(a.original_ids(), b.original_ids())


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("typed-2k", [], "in memory"),
        # The same of a graph of one type is above.
        pytest.param("typed-60k", ["--memory-limit", "64M"], "streaming from files", marks=pytest.mark.long),
    ],
)
def test_the_memory_that_is_printed_is_what_the_parts_record(tmp_path: Path, capsys, name, limit, words):
    arguments = [f"{name}:num_features=1", "--balance", "train,val,edges,ntype,etype", *limit]
    assert main(["partition", *arguments, "--parts", "2", "--out", str(tmp_path / "p")]) == 0
    told = open_parts(tmp_path / "p").info["memory"]
    assert words in told and told in capsys.readouterr().out.splitlines()


def test_metis_does_not_start_with_less_memory_than_it_takes(tmp_path: Path, capsys):
    given = ["--method", "metis", "--memory-limit", "64M"]
    assert main(["partition", "sbm-20k:num_features=1", "--parts", "2", "--out", str(tmp_path / "p"), *given]) == 2
    assert "METIS would take" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--parts", "0"], "at least 1"),
        (["--halo-hops", "0"], "halo_hops must be at least 1"),
        (["--balance", "train,colour"], "balance 'colour'"),
        (["--imbalance", "7"], "imbalance must be in"),
        (["--method", "magic"], "method must be one of"),
        (["--objective", "speed"], "objective must be one of"),
        (["--memory-limit", "lots"], "4G, 512M"),
        (["--parts", "50000"], "parts times trainers per part must be at most 8,192, got 50,000"),
        (["--seed", "9999999999999999999"], "seed must be in"),
        (["--seed", "-1"], "seed must be in"),
        (["--method", "assignment=nowhere.npy"], "'nowhere.npy' does not exist"),
    ],
)
def test_options_are_checked_before_the_source_is_read(tmp_path: Path, capsys, arguments, message):
    (tmp_path / "broken.txt").write_text("this is no edge")
    source = [str(tmp_path / "broken.txt"), "--parts", "2"]
    assert main(["partition", *source, "--out", str(tmp_path / "p"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_is_there_is_named_before_the_source_is_read(tmp_path: Path, capsys):
    (tmp_path / "broken.txt").write_text("this is no edge")
    assert main(["partition", str(tmp_path / "broken.txt"), "--parts", "2", "--out", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--columns", "src,dst"], ["--num-nodes", "2000"]])
@pytest.mark.parametrize("source", ["sbm-1k", "saved", "graph.npz"])
def test_options_of_tables_are_refused_for_other_sources(tmp_path: Path, capsys, source: str, option: list[str]):
    save(dataset("sbm-1k:num_features=1"), tmp_path / "saved")
    np.savez(tmp_path / "graph.npz", edge_index=np.array([[0, 1], [1, 2]]))
    given = source if source == "sbm-1k" else str(tmp_path / source)
    assert main(["partition", given, "--parts", "2", "--out", str(tmp_path / "p"), *option]) == 2
    assert f"{option[0]} is for tables of edges" in capsys.readouterr().err


def test_a_seed_that_would_do_nothing_is_refused(tmp_path: Path, capsys):
    given = ["sbm-100k:num_features=1", "--parts", "2", "--memory-limit", "64M", "--out", str(tmp_path / "p")]
    assert main(["partition", *given, "--seed", "7"]) == 2
    shown = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("partition [")]  # progress
    assert len(shown) == 1 and "leave out seed 7 or raise the limit" in shown[0]


def test_blanks_around_names_of_columns_do_not_matter(tmp_path: Path):
    (tmp_path / "edges.csv").write_text("0,1\n1,2\n2,3\n")
    given = ["--columns", "src, dst", "--parts", "2", "--out", str(tmp_path / "p")]
    assert main(["partition", str(tmp_path / "edges.csv"), *given]) == 0


@pytest.mark.parametrize(
    "arguments,message", [(["--memory-limit", "lots"], "4G, 512M"), (["--memory-limit", "1K"], "is too small")]
)
def test_a_memory_limit_that_cannot_be_is_refused(tmp_path: Path, capsys, arguments, message):
    assert main(["partition", "sbm-20k", "--parts", "2", "--out", str(tmp_path / "p"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_communication_objective_says_how_many_rows_travel(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ["--parts", "3", "--objective", "communication", "--out", str(tmp_path / "p")]
    assert main(["partition", "sbm-2k", *given]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rows between subparts")]
    parts = open_parts(tmp_path / "p")
    received = sum(parts.part(i).num_halo() for i in range(3))
    assert int(line.split()[3].replace(",", "")) == received == parts.info["rows"]["in the end"]


def test_clusters_are_cut_inside_parts_and_their_edges_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "parts"
    given = ["--parts", "2", "--clusters", "9", "--out", str(out)]
    assert main(["partition", "sbm-2k:num_classes=4", *given]) == 0
    assert "edges between clusters" in capsys.readouterr().out
    clusters = open_parts(out).clusters
    assert clusters is not None and clusters.bounds.tolist() == [0, 4, 9]
    assert verify_parts(out, against=dataset("sbm-2k:num_classes=4")).ok
    assert main(["partition", "no-such-source", *given[:3], "1", "--out", str(tmp_path / "q")]) != 0
    assert "at least so many, got 1" in capsys.readouterr().err
