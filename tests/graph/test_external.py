"""Graphs built outside memory, against `load` and `save`: the same files, whatever the memory."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
import torch

from gnnsys.graph import external_graph, load, save
from gnnsys.graph.datasets import find_dataset
from gnnsys.graph.edge_sort import EdgeSort
from gnnsys.graph.tables import table_pieces
from gnnsys.ops import CSC, parse_table
from tests.support.grid import grid
from tests.support.memory_probe import peak_memory
from tests.support.processes import run_code

MEMORY = 64 << 20


def assert_same_files(source, tmp_path, **options) -> None:
    """external_graph() writes the bytes that save(load()) writes."""
    save(load(source, **options), tmp_path / "expected")
    external_graph(source, tmp_path / "built", memory_limit=MEMORY, **options)
    names = sorted(os.listdir(tmp_path / "expected"))
    assert sorted(os.listdir(tmp_path / "built")) == names
    for name in names:
        assert (tmp_path / "built" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name
    leftovers = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert leftovers == []


def random_edges(seed: int, num_nodes: int, num_edges: int, *, ordered: bool = False):
    """Skewed destinations: some nodes have most of the edges, many none."""
    rng = np.random.default_rng(seed)
    dst = (num_nodes * rng.random(num_edges) ** 3).astype(np.int64)
    return rng.integers(0, max(num_nodes, 1), num_edges), np.sort(dst) if ordered else dst


def write_table(path, columns, separator=" ", header=False):
    lines = [separator.join(columns)] if header else []
    lines += [separator.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name,separator", [("e.txt", " "), ("e.edges", "\t"), ("e.csv", ", "), ("e.tsv", "\t")])
def test_a_text_table_gives_the_same_files(name, separator, ordered, tmp_path):
    src, dst = random_edges(1, 500, 3000, ordered=ordered)
    columns = {"src": src, "dst": dst}
    assert_same_files(write_table(tmp_path / name, columns, separator), tmp_path)


def test_a_table_with_weights_times_and_a_header_gives_the_same_files(tmp_path):
    src, dst = random_edges(2, 300, 2000)
    rng = np.random.default_rng(0)
    columns = {"time": rng.integers(0, 2**60, 2000), "dst": dst, "weight": rng.random(2000), "src": src}
    path = write_table(tmp_path / "e.csv", columns, ",", header=True)
    assert_same_files(path, tmp_path, num_nodes=1000)


def test_a_parquet_table_of_several_row_groups_gives_the_same_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    src, dst = random_edges(3, 300, 2000)
    table = pyarrow.table({"src": src, "dst": dst.astype(np.int32), "score": np.random.default_rng(0).random(2000)})
    parquet.write_table(table, tmp_path / "e.parquet", row_group_size=300)
    assert_same_files(tmp_path / "e.parquet", tmp_path)
    parquet.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    assert load(tmp_path / "none.parquet", num_nodes=3).num_edges() == 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_npz_gives_the_same_files(dtype, write, transposed, tmp_path):
    rng = np.random.default_rng(4)
    edges = np.stack(random_edges(4, 900, 12_000)).astype(dtype)
    write(
        tmp_path / "g.npz",
        edge_index=np.ascontiguousarray(edges.T).T if transposed else edges,
        x=rng.random((900, 40), dtype=np.float32),
        y=np.arange(900, dtype=np.int16),
        train_idx=np.array([0, 4]),
        edge_attr=rng.random((12_000, 3)),
        edge_type=rng.integers(0, 5, 12_000).astype(np.int8),
        edge_weight=rng.random(12_000),
        class_names=np.array(["a", "b"]),
    )
    assert_same_files(tmp_path / "g.npz", tmp_path)


@pytest.mark.parametrize("name", ["cora", "dblp_hetero", "aifb"])
def test_real_graphs_typed_or_with_sparse_features_give_the_same_files(name, tmp_path):
    try:
        path = find_dataset(name)
    except ValueError as error:
        pytest.skip(str(error))
    assert_same_files(path, tmp_path)


def test_a_typed_npz_with_an_empty_type_gives_the_same_files(tmp_path):
    np.savez(
        tmp_path / "g.npz",
        edge_index=np.array([[0, 1, 5, 6, 2], [3, 0, 1, 2, 4]], dtype=np.int32),
        edge_type=np.array([0, 0, 1, 1, 0], dtype=np.int8),
        edge_type_names=np.array(["paper|cites|paper", "author|writes|paper", "paper|rev|author"]),
        edge_weight=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
        node_type_names=np.array(["paper", "author"]),
        node_type_offsets=np.array([0, 5, 7]),
        y=np.array([0, 1, 2, 0, 1], dtype=np.int8),
    )
    assert_same_files(tmp_path / "g.npz", tmp_path)


def test_a_saved_graph_gives_the_same_files(tmp_path):
    src, dst = random_edges(5, 200, 900)
    save(load(write_table(tmp_path / "e.txt", {"src": src, "dst": dst})), tmp_path / "graph")
    assert_same_files(tmp_path / "graph", tmp_path)


def test_tables_without_edges_give_the_same_files(tmp_path):
    for i, text in enumerate(["", "# nothing\n", "src,dst,weight\n"]):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "e.csv").write_text(text)
        assert_same_files(folder / "e.csv", folder, num_nodes=3)


@pytest.mark.parametrize("num_nodes,num_edges", [(1, 40), (7, 300), (200, 700), (1000, 100), (5, 0), (0, 0)])
@grid(memory=[50, 1000, 20_000, 1 << 20])
def test_however_little_memory_a_sort_has_the_result_is_the_same(memory, num_nodes, num_edges, tmp_path):
    for ordered in (False, True):
        src, dst = (torch.from_numpy(ids) for ids in random_edges(6, num_nodes, num_edges, ordered=ordered))
        edges = EdgeSort(tmp_path / f"sort-{ordered}", memory, (num_nodes, num_nodes))
        for first in range(0, num_edges, 77):
            edges.add(src[first : first + 77], dst[first : first + 77])
        shares: list[float] = []
        csc = edges.sort(progress=shares.append)
        expected = CSC.from_edge_index(torch.stack([src, dst]), num_nodes, narrow=True)
        assert torch.equal(csc.indptr, expected.indptr) and csc.indices.dtype == expected.indices.dtype
        assert torch.equal(csc.indices, expected.indices)
        assert (csc.edge_ids is None) == (expected.edge_ids is None)
        assert csc.edge_ids is None or torch.equal(csc.edge_ids, expected.edge_ids)
        assert shares == sorted(shares) and (num_edges == 0 or shares[-1] == 1)
        assert sorted(os.listdir(tmp_path / f"sort-{ordered}")) == ["ids", "indices", "indptr"]


def test_a_little_memory_means_many_buckets(tmp_path):
    src, dst = (torch.from_numpy(ids) for ids in random_edges(7, 400, 3000))
    num_placed = {}
    for memory in (5000, 1 << 20):
        edges = EdgeSort(tmp_path / str(memory), memory, (400, 400))
        edges.add(src, dst)
        shares: list[float] = []
        edges.sort(progress=shares.append)
        num_placed[memory] = len(shares)
    assert num_placed[5000] > 20 and num_placed[1 << 20] == 1


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
def test_pieces_of_a_text_file_end_at_lines(piece_bytes, tmp_path):
    text = "# SNAP\nsrc dst weight\n\n10 20 0.5 # why\r\n  3\t4   -1e-3  \n% more\n+5 6 inf\n7 8 9"
    (tmp_path / "e.txt").write_text(text)
    pieces = list(table_pieces(tmp_path / "e.txt", piece_bytes=piece_bytes))
    table = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    assert table["src"].tolist() == [10, 3, 5, 7] and table["dst"].tolist() == [20, 4, 6, 8]
    assert torch.equal(table["weight"], torch.tensor([0.5, -1e-3, float("inf"), 9]))


@pytest.mark.parametrize(
    "line,message",
    [
        ("1,x", "line 3: field 2 must be an integer, got 'x'"),
        ("1", "line 3: expected 2 fields, got 1"),
        ("1,2,3", "line 3: expected 2 fields, got 3"),
        ("1,", "line 3: field 2 must be an integer, got ''"),
        ("0.5,1", "line 3: field 1 must be an integer, got '0.5'"),
        ("1,9223372036854775808", "line 3: field 2 must be an integer, got '9223372036854775808'"),
        ("1 2,3", "line 3: field 1 must be an integer, got '1 2'"),
        ("-1,2", "src must be .*got -1 at position 2"),
    ],
)
def test_a_malformed_line_is_named_by_both_readers(line, message, tmp_path):
    (tmp_path / "e.csv").write_text(f"0,1\n1,0\n{line}\n2,1\n")
    for read in (load, lambda path: external_graph(path, tmp_path / "out", memory_limit=MEMORY)):
        with pytest.raises(ValueError, match=f"e.csv: {message}"):
            read(tmp_path / "e.csv")
    assert os.listdir(tmp_path) == ["e.csv"]


def test_the_first_bad_line_is_named_for_any_number_of_threads_and_pieces(tmp_path):
    lines = [f"{i} {i + 1}" for i in range(200_000)]
    lines[150_001], lines[199_999] = "1 2 3", "x"
    (tmp_path / "e.txt").write_text("\n".join(lines))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for piece_bytes in (1 << 12, 1 << 24):
                with pytest.raises(ValueError, match=r"e.txt: line 150002: expected 2 fields, got 3"):
                    list(table_pieces(tmp_path / "e.txt", piece_bytes=piece_bytes))
    finally:
        torch.set_num_threads(before)


def test_random_numbers_are_parsed_as_python_does():
    rng = np.random.default_rng(8)
    integers = [int(v) for v in rng.integers(-(2**63), 2**63 - 1, 500)] + [0, 2**63 - 1, -(2**63), 10**18, 10**17]
    floats = [float(v) for v in np.frombuffer(rng.bytes(8 * len(integers)), dtype=np.float64)]
    floats = [v if abs(v) < 3e38 else 0.25 for v in floats]
    text = "".join(f"{a}\t {b!r}\n" for a, b in zip(integers, floats, strict=True)).encode()
    first, second = parse_table(text, "if", "\t")
    assert first.tolist() == integers
    assert torch.equal(second, torch.tensor(floats, dtype=torch.float64).float())


def test_bad_arguments_are_refused(tmp_path):
    path = write_table(tmp_path / "e.txt", {"src": [0], "dst": [1]})
    for arguments, message in [
        ((path, tmp_path / "out", 1000), "memory_limit must be at least"),
        ((tmp_path / "none.txt", tmp_path / "out", MEMORY), "does not exist"),
        ((path, tmp_path, MEMORY), "exists: choose another"),
        ((__file__, tmp_path / "out", MEMORY), "ending says nothing"),
    ]:
        with pytest.raises(ValueError, match=message):
            external_graph(arguments[0], arguments[1], memory_limit=arguments[2])
    with pytest.raises(ValueError, match=r"e.txt: dst must be in \[0, 1\), got 1 at position 0"):
        external_graph(path, tmp_path / "out", memory_limit=MEMORY, num_nodes=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_nodes,message", [(None, ">= 0"), ((9, 9), r"in \[0, 9\)"), ((2**31, 9), r"in \[0, 2147")])
def test_a_negative_id_is_named_with_its_position(dtype, num_nodes, message, tmp_path):
    edges = EdgeSort(tmp_path / "sort", MEMORY, num_nodes, id_dtype=dtype)
    edges.add(torch.tensor([3], dtype=dtype), torch.tensor([4], dtype=dtype))
    with pytest.raises(ValueError, match=f"src must be {message}.* got -7 at position 2$"):
        edges.add(torch.tensor([0, -7], dtype=dtype), torch.tensor([0, 1], dtype=dtype))


def test_a_truncated_npz_is_refused_by_name(tmp_path):
    np.savez_compressed(tmp_path / "g.npz", edge_index=np.random.default_rng(0).integers(0, 99, (2, 10_000)))
    content = (tmp_path / "g.npz").read_bytes()
    (tmp_path / "g.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"g.npz cannot be read"):
        external_graph(tmp_path / "g.npz", tmp_path / "out", memory_limit=MEMORY)
    assert os.listdir(tmp_path) == ["g.npz"]


def test_a_build_that_is_killed_never_looks_like_a_graph(tmp_path):
    """The process ends, without any clean-up, in the middle of sorting."""
    src, dst = random_edges(9, 300, 4000)
    path = write_table(tmp_path / "e.txt", {"src": src, "dst": dst})
    program = """
import os, sys
from gnnsys.graph import external_graph
def end(done, total, stage):
    if stage == "sorting":
        os._exit(9)
external_graph(sys.argv[1], sys.argv[2], memory_limit=1 << 26, progress=end)
"""
    assert run_code(program, path, tmp_path / "graph").returncode == 9
    assert not (tmp_path / "graph").exists()
    assert all(name.startswith(".graph-build-") for name in os.listdir(tmp_path) if name != "e.txt")


BUILD = """
import sys
import torch
from gnnsys.graph import external_graph, load, save
torch.set_num_threads(2)
torch.arange(1 << 16).sum()
print("ready", flush=True)
if sys.argv[3] == "external":
    external_graph(sys.argv[1], sys.argv[2], memory_limit=64 << 20)
else:
    save(load(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["npz", pytest.param("txt", marks=pytest.mark.long)])
def test_a_graph_several_times_larger_than_the_limit_is_built_within_it(kind, tmp_path):
    num_nodes, num_edges = 300_000, 4_500_000 if kind == "npz" else 100_000
    src, dst = random_edges(10, num_nodes, num_edges)
    if kind == "npz":
        np.savez(tmp_path / "g.npz", edge_index=np.stack([src, dst]))  # 72 MB
    else:
        lines = "".join(f"{a} {b}\n" for a, b in zip(src.tolist(), dst.tolist(), strict=True))
        (tmp_path / "g.txt").write_text(lines * 10)  # a million edges
        del lines
    del src, dst
    source = tmp_path / f"g.{kind}"
    outside = peak_memory(BUILD, source, tmp_path / "outside", "external")
    assert MEMORY / 8 < outside.anonymous <= MEMORY
    if kind == "npz":
        save(load(source), tmp_path / "inside")
        for name in os.listdir(tmp_path / "inside"):
            command = ["cmp", str(tmp_path / "inside" / name), str(tmp_path / "outside" / name)]
            assert subprocess.run(command).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_the_same_graph_in_memory_takes_more_than_twice_the_limit(tmp_path):
    """The probe of the test before sees what it should see."""
    src, dst = random_edges(10, 300_000, 4_500_000)
    np.savez(tmp_path / "g.npz", edge_index=np.stack([src, dst]))
    assert peak_memory(BUILD, tmp_path / "g.npz", tmp_path / "inside", "memory").anonymous > 2 * MEMORY
