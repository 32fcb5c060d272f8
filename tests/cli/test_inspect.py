"""`gnnsys inspect`: what is printed, what is written, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gnnsys.cli import main
from gnnsys.graph import save
from gnnsys.partition import inspect_parts, write_parts
from tests.partition.part_graphs import alter, homogeneous, random_assignment, stored_name


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    graph = homogeneous(60, 400)
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts")
    save(graph, tmp_path / "graph")
    return tmp_path / "parts"


def test_it_prints_the_table_and_writes_plot_and_numbers(parts, tmp_path, capsys):
    plot, numbers = tmp_path / "plot.svg", tmp_path / "numbers.json"
    arguments = ["--fanouts", "4,2", "--batch-size", "8", "--plot", str(plot), "--json", str(numbers)]
    assert main(["inspect", str(parts), *arguments]) == 0
    shown = capsys.readouterr()
    expected = inspect_parts(parts, fanouts=[4, 2], batch_size=8)
    assert shown.out == f"{expected}\n"
    assert all(line.startswith("inspect [") for line in shown.err.splitlines()), "progress, where it takes its time"
    assert json.loads(numbers.read_text()) == json.loads(json.dumps(expected.to_json()))
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_verify_says_what_the_parts_agree_with(parts, tmp_path, capsys):
    assert main(["inspect", str(parts), "--verify"]) == 0
    assert "3 parts agree with the fingerprints of the source: 60 nodes, 400 edges" in capsys.readouterr().out
    assert main(["inspect", str(parts), "--against", str(tmp_path / "graph")]) == 0
    assert "3 parts agree with the source, bit for bit: 60 nodes, 400 edges" in capsys.readouterr().out


def test_a_changed_row_is_a_problem_and_exit_code_1(parts, capsys):
    def change(rows):
        rows[0, 0] += 1

    alter(parts, stored_name(parts, 1, "nodes", 0, "data", "x"), change)
    assert main(["inspect", str(parts)]) == 0  # every file is as its manifest says
    capsys.readouterr()
    assert main(["inspect", str(parts), "--verify"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "problem: 'node': rows of 'x' are not those of the source\n" and shown.out == ""


def test_parts_of_another_graph_are_a_problem_and_exit_code_1(parts, tmp_path, capsys):
    save(homogeneous(60, 400, 1), tmp_path / "other")
    assert main(["inspect", str(parts), "--against", str(tmp_path / "other")]) == 1
    assert "problem: part 0: degrees of ('node', 'to', 'node') differ from the source\n" in capsys.readouterr().err


def test_a_file_that_was_cut_is_named_on_one_line(parts, capsys):
    file = parts / stored_name(parts, 2, "edges", 0, "indices")
    file.write_bytes(file.read_bytes()[:-4])
    assert main(["inspect", str(parts)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(file) in error and "cut or altered" in error
    assert main(["inspect", str(parts), "--verify"]) == 1
    assert f"problem: {file} has" in capsys.readouterr().err


def test_a_byte_that_changed_is_found_by_verify(parts, capsys):
    file = parts / stored_name(parts, 0, "nodes", 0, "data", "x")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["inspect", str(parts), "--verify"]) == 1
    assert capsys.readouterr().err.startswith(f"problem: {file} does not match its checksum: it was altered; copy")


@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_what_is_not_a_directory_of_parts_is_a_users_error(verify, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "file"):
        assert main(["inspect", str(path), *verify]) == 2
        error = f"gnnsys inspect: error: {str(path)!r} is not a directory of parts: it has no manifest.json; make "
        assert capsys.readouterr().err.startswith(error)


def test_a_saved_graph_is_not_parts(parts, tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "graph")]) == 2
    assert "does not describe a gnnsys-parts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--fanouts", "15,x"], "--fanouts must be whole numbers with commas, such as 15,10,5, got '15,x'"),
        (["--fanouts", "-3"], "fanouts must be a whole number per hop"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--plot", "plot.gif"], "a plot must end in .svg or .png, got 'plot.gif'"),
        (["--json", "nowhere/numbers.json"], "the folder nowhere does not exist"),
        (["--against", "no-such-graph"], "dataset 'no-such-graph' is not there"),
    ],
)
def test_arguments_that_cannot_be_are_one_line_and_exit_code_2(arguments, error, parts, capsys):
    option, value = arguments
    assert main(["inspect", str(parts), f"{option}={value}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and error in shown.err and shown.out == ""
