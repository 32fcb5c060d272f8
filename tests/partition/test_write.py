"""What is written: every invariant of the format against a count in plain Python, and what a dying writer leaves."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from itertools import chain

import pytest
import torch

from gnnsys.graph import NODE, Graph, arrays, load, rmat, save
from gnnsys.ops import CSC, sample_neighbors
from gnnsys.partition import Assignment, array_pieces, open_parts, relabel, verify_parts, write_parts
from tests.partition.part_graphs import CASES, assert_same_graph, homogeneous, random_assignment, written
from tests.support.grid import grid
from tests.support.processes import run_code


class Oracle:
    """Relabelling and halo by sorting and sets."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.assignment = graph, assignment
        self.order = {}  # original id of each global id
        for t in graph.node_types:
            subpart = assignment.subpart[t].tolist()
            self.order[t] = sorted(range(graph.num_nodes(t)), key=lambda v, s=subpart: (s[v], v))
        self.global_of = {t: {v: g for g, v in enumerate(ids)} for t, ids in self.order.items()}
        self.in_edges = {}  # per edge type: destination -> [(source, edge id)] in order
        for t in graph.edge_types:
            csc, columns = graph.csc(t), defaultdict(list)
            ids = list(range(csc.num_edges)) if csc.edge_ids is None else csc.edge_ids.tolist()
            for src, dst, edge in zip(csc.indices.tolist(), csc.dst().tolist(), ids, strict=True):
                columns[dst].append((src, edge))
            self.in_edges[t] = columns
        self.first_edge = {}  # per edge type: global id of the first edge of each global node
        for t in graph.edge_types:
            first, starts = 0, []
            for v in self.order[t[2]]:
                starts.append(first)
                first += len(self.in_edges[t][v])
            self.first_edge[t] = starts

    def part(self, node_type, v) -> int:
        return int(self.assignment.subpart[node_type][v]) // self.assignment.trainers_per_part

    def core(self, node_type, part) -> list[int]:
        return [v for v in self.order[node_type] if self.part(node_type, v) == part]

    def halo(self, part, hops) -> dict[str, list[list[int]]]:
        """Original ids, hop by hop, each ascending by global id."""
        known = {t: set(self.core(t, part)) for t in self.graph.node_types}
        frontier = {t: set(nodes) for t, nodes in known.items()}
        result = {t: [] for t in self.graph.node_types}
        for _ in range(hops):
            found = {t: set() for t in self.graph.node_types}
            for t in self.graph.edge_types:
                for v in frontier[t[2]]:
                    found[t[0]] |= {src for src, _ in self.in_edges[t][v]}
            for t in self.graph.node_types:
                frontier[t] = found[t] - known[t]
                known[t] |= frontier[t]
                result[t].append(sorted(frontier[t], key=self.global_of[t].__getitem__))
        return result


@grid(chosen=written(1, 3))
def test_every_part_holds_what_a_count_in_plain_python_says(chosen, tmp_path):
    case, shape = chosen
    graph, (num_parts, trainers, hops) = CASES[case](), shape
    assignment = random_assignment(graph, num_parts, trainers, seed=hops)
    returned = write_parts(graph, assignment, tmp_path / "parts", halo_hops=hops)
    parts, oracle = open_parts(tmp_path / "parts"), Oracle(graph, assignment)
    assert parts.book.to_json() == returned.to_json()
    assert (parts.num_parts, parts.trainers_per_part, parts.halo_hops) == shape
    for t in graph.node_types:
        for s in range(parts.book.num_subparts):
            ids = [oracle.order[t][g] for g in parts.book.subpart_range(s, t)]
            assert ids == [v for v in range(graph.num_nodes(t)) if int(assignment.subpart[t][v]) == s]
    for index in range(parts.num_parts):
        check_part(parts.part(index), index, oracle, hops)


def check_part(part, index, oracle, hops) -> None:
    graph, halo = oracle.graph, oracle.halo(index, hops)
    local = {}  # original ids by local id
    for t in graph.node_types:
        core = oracle.core(t, index)
        local[t] = [*core, *chain(*halo[t])]
        assert part.num_core(t) == len(core) and part.num_halo(t) == len(local[t]) - len(core)
        assert part.hops(t) == [len(core) + sum(map(len, halo[t][:h])) for h in range(hops + 1)]
        assert part.halo(t).tolist() == [oracle.global_of[t][v] for v in local[t][len(core) :]]
        assert part.halo(t).dtype == part.original_ids(t).dtype == torch.int32
        assert part.original_ids(t).tolist() == local[t][: part.hops(t)[-2]]
        share = range(graph.num_nodes(t))[
            slice(*(graph.num_nodes(t) * i // part.book.num_parts for i in (index, index + 1)))
        ]
        assert part.global_of_original(t).tolist() == [oracle.global_of[t][v] for v in share]
        assert part.global_ids(torch.arange(len(local[t])), t).tolist() == [oracle.global_of[t][v] for v in local[t]]
        for name, rows in graph.node_data[t].items():
            assert part.node_data[t][name].dtype == rows.dtype
            assert torch.equal(part.node_data[t][name], rows[torch.tensor(core, dtype=torch.int64)])
    for t in graph.edge_types:
        csc, columns = part.csc(t), local[t[2]][: part.num_columns(t[2])]
        edges = [edge for v in columns for edge in oracle.in_edges[t][v]]
        assert csc.indptr.dtype == torch.int64 and csc.indices.dtype == torch.int32
        assert csc.in_degrees().tolist() == [len(oracle.in_edges[t][v]) for v in columns]
        assert [local[t[0]][i] for i in csc.indices.tolist()] == [src for src, _ in edges]
        ids = torch.tensor([edge for _, edge in edges], dtype=torch.int64)
        positions = torch.arange(csc.num_edges)
        assert part.edge_ids(positions, t).tolist() == ids.tolist()
        assert part.column_edge_ids(0, csc.num_dst, t).tolist() == ids.tolist()
        first = [oracle.first_edge[t][oracle.global_of[t[2]][v]] for v in columns]
        expected = [
            start + rank for start, v in zip(first, columns, strict=True) for rank in range(len(oracle.in_edges[t][v]))
        ]
        assert part.global_edge_ids(positions, t).tolist() == expected
        for name, rows in graph.edge_data[t].items():
            assert torch.equal(part.edge_data[t][name], rows[ids])


@pytest.mark.parametrize("case", ["int64", "edges in order", "typed", "random 7"])
def test_pieces_of_any_size_make_the_same_parts(case, tmp_path, monkeypatch):
    graph = CASES[case]()
    assignment = random_assignment(graph, 3, 2)
    write_parts(graph, assignment, tmp_path / "whole", halo_hops=2)
    monkeypatch.setattr(array_pieces, "PIECE_EDGES", 7)
    monkeypatch.setattr(array_pieces, "PIECE_COLUMNS", 3)
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 40)
    write_parts(graph, assignment, tmp_path / "pieces", halo_hops=2)
    for file in (path for path in (tmp_path / "whole").rglob("*") if path.is_file()):
        assert file.read_bytes() == (tmp_path / "pieces" / file.relative_to(tmp_path / "whole")).read_bytes()
    assert verify_parts(tmp_path / "pieces", graph).problems == []
    assert_same_graph(open_parts(tmp_path / "pieces").merge(), graph)


@pytest.mark.parametrize("case", ["int64", "edges in order", "typed"])
def test_ids_too_large_for_32_bits_are_stored_in_64(case, tmp_path, monkeypatch):
    """The limit is lowered, since no test has 2^31 nodes."""
    monkeypatch.setattr(relabel, "INT32_END", 9)
    graph = CASES[case]()
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts", halo_hops=2)
    parts = open_parts(tmp_path / "parts")
    widest = graph.node_types[0]
    assert parts.part(0).halo(widest).dtype == parts.part(0).original_ids(widest).dtype == torch.int64
    assert verify_parts(tmp_path / "parts", graph).problems == []
    assert_same_graph(parts.merge(), graph)


@pytest.mark.parametrize("case", ["int64", "multi-edges", "isolated nodes", "typed", "random 8"])
def test_sampling_the_nodes_of_a_part_is_sampling_the_whole_graph(case, tmp_path):
    graph = CASES[case]()
    write_parts(graph, random_assignment(graph, 3, 2), tmp_path / "parts", halo_hops=2)
    parts = open_parts(tmp_path / "parts")
    for t in graph.edge_types:
        original = torch.cat([parts.part(i).original_ids(t[0])[: parts.part(i).num_core(t[0])] for i in range(3)])
        for part in map(parts.part, range(3)):
            rng_ids, csc = part.original_ids(t[2]), part.csc(t)
            seeds = torch.arange(part.num_columns(t[2]), dtype=torch.int32)
            for weight in (None, "weight"):
                if weight is not None and weight not in part.edge_data[t]:
                    continue
                whole, here = graph.csc(t), {} if weight is None else {"weight": part.edge_data[t][weight]}
                there = {}
                if weight is not None:
                    ids = torch.arange(whole.num_edges) if whole.edge_ids is None else whole.edge_ids.long()
                    there = {"weight": graph.edge_data[t][weight][ids]}
                ours = sample_neighbors(csc, seeds, 3, key=7, rng_ids=rng_ids, **here)
                theirs = sample_neighbors(whole, rng_ids.to(whole.indices.dtype), 3, key=7, **there)
                assert torch.equal(ours.indptr, theirs.indptr)
                found = original[part.global_ids(ours.ids, t[0])]
                assert found.tolist() == theirs.ids.tolist()


def test_the_bytes_do_not_depend_on_the_number_of_threads(tmp_path):
    graph = rmat(3000, 120_000, num_features=5)
    assignment = random_assignment(graph, 3, 1)
    threads, written = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            write_parts(graph, assignment, tmp_path / str(count), halo_hops=2)
            files = sorted(path for path in (tmp_path / str(count)).rglob("*") if path.is_file())
            written.append({str(path.relative_to(tmp_path / str(count))): path.read_bytes() for path in files})
    finally:
        torch.set_num_threads(threads)
    assert len(written[0]) > 15 and written[0] == written[1]


def test_structure_takes_at_most_4_6_bytes_per_edge_and_16_per_node(tmp_path):
    graph = rmat(50_000, 1_000_000)
    chunk = (torch.arange(50_000) * 8 // 50_000).to(torch.int32)
    write_parts(graph, Assignment(8, 1, {NODE: chunk}), tmp_path / "parts", edge_ids=False)
    stored = open_parts(tmp_path / "parts").stored_bytes()
    on_disk = sum(path.stat().st_size for path in (tmp_path / "parts").glob("part-*/*.npy"))
    assert sum(stored.values()) == on_disk and stored["edge_ids"] == 0
    assert on_disk <= 4.6 * 1_000_000 + 16 * 50_000


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
def test_a_graph_on_disk_is_parted_without_being_copied_into_memory(tmp_path):
    num_nodes, num_edges, width = 40_000, 400_000, 800
    graph = rmat(num_nodes, num_edges)
    graph.set_node_data("x", torch.ones(num_nodes, width))
    save(graph, tmp_path / "graph")
    del graph
    graph, assignment = load(tmp_path / "graph"), None
    assignment = random_assignment(graph, 4, 1)
    high = [0]

    def sample(done, total, what):
        with open("/proc/self/status") as status:
            anonymous = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
        high[0] = max(high[0], anonymous * 1024)

    sample(0, 1, "")
    before = high[0]
    write_parts(graph, assignment, tmp_path / "parts", progress=sample)
    bytes_of_rows = num_nodes * width * 4
    assert high[0] - before < bytes_of_rows // 2, (high[0] - before, bytes_of_rows)


def test_progress_ascends_to_its_total(tmp_path):
    graph, calls = homogeneous(30, 90), []
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts", progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert len({total for _, total, _ in calls}) == 1 and calls[-1][0] == calls[-1][1]
    assert {what for _, _, what in calls} == {"fingerprints", "part 0", "part 1", "part 2"}


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"halo_hops": 0}, "halo_hops must be at least 1"),
        ({"info": {"callback": len}}, "info must hold plain JSON values"),
        ({"assignment": Assignment(2, 1, {NODE: torch.zeros(9, dtype=torch.int32)})}, r"must be int32 \[30\]"),
        ({"assignment": Assignment(2, 1, {NODE: torch.full((30,), 2, dtype=torch.int32)})}, r"must be in \[0, 2\)"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(arguments, message, tmp_path):
    graph = homogeneous(30, 90)
    arguments = {"assignment": random_assignment(graph, 2, 1)} | arguments
    with pytest.raises(ValueError, match=message):
        write_parts(graph, out=tmp_path / "parts", **arguments)
    assert os.listdir(tmp_path) == []


def test_edge_ids_that_name_an_edge_twice_are_refused(tmp_path):
    csc = CSC(torch.tensor([0, 2]), torch.tensor([0, 0]), 1, torch.tensor([1, 1]))
    graph = Graph({NODE: 1}, {("node", "to", "node"): csc})
    with pytest.raises(ValueError, match="must name every edge once"):
        write_parts(graph, random_assignment(graph, 1, 1), tmp_path / "parts")


def test_only_parts_are_overwritten_and_only_when_asked(tmp_path):
    graph = homogeneous(30, 90)
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts")
    with pytest.raises(ValueError, match="exists: choose another, or overwrite it"):
        write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts")
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts", overwrite=True)
    assert open_parts(tmp_path / "parts").num_parts == 3 and os.listdir(tmp_path) == ["parts"]
    save(graph, tmp_path / "graph")
    with pytest.raises(ValueError, match="is not a directory of parts, and only a directory of parts is overwritten"):
        write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "graph", overwrite=True)
    assert load(tmp_path / "graph").num_nodes() == 30


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_writer_leaves_nothing_new(error, tmp_path):
    graph = homogeneous(30, 90)
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "old")

    def interrupt(done, total, what):
        if what == "part 1":
            raise error

    for out, overwrite in (("new", False), ("old", True)):
        with pytest.raises(error):
            write_parts(graph, random_assignment(graph, 3, 1), tmp_path / out, overwrite=overwrite, progress=interrupt)
    assert os.listdir(tmp_path) == ["old"] and open_parts(tmp_path / "old").num_parts == 2


KILLED = """
import os, random, signal, sys, threading, time
import torch
torch.set_num_threads(1)  # before any thread exists: this process forks
from gnnsys.graph import rmat
from gnnsys.partition import Assignment, write_parts
graph = rmat(4000, 60_000, num_features=16)
target, seed = sys.argv[1], int(sys.argv[2])
def write(num_parts, overwrite):
    chunk = (torch.arange(4000) * num_parts // 4000).to(torch.int32)
    write_parts(graph, Assignment(num_parts, 1, {"node": chunk}), target, overwrite=overwrite)
took = []
for again in (False, True, True):
    start = time.perf_counter()
    write(2, again)
    took.append(time.perf_counter() - start)
whole = min(took)  # the others may have been held up: most writers would end before they are killed
random.seed(seed)
for trial in range(12):
    pid = os.fork()
    if pid == 0:
        delay = random.Random(seed * 100 + trial).uniform(0, 1.2 * whole)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        write(3 + trial, True)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    print(trial, sorted(os.listdir(os.path.dirname(target))), flush=True)
    if not os.path.exists(target):  # killed between the two renames: the old one is whole under another name
        write(2, False)
"""


def test_what_is_left_of_a_writer_killed_at_any_moment_is_whole_or_does_not_open(tmp_path):
    target = tmp_path / "parts"
    result = run_code(KILLED, target, 1, timeout=120)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 12, str(result)
    assert verify_parts(target).problems == []
    left = [path for path in tmp_path.iterdir() if path != target]
    assert left, "no writer was killed while it wrote"
    for path in left:
        assert path.name.startswith(".parts-")
        report = verify_parts(path)
        assert report.ok or re.search("has no manifest.json|manifest.json is cut", report.problems[0])
