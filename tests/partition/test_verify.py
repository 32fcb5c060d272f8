"""Verification: parts as written pass, and every change to them is found, however well the checksums fit."""

from __future__ import annotations

import json
import random
import zlib

import numpy as np
import pytest
import torch

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.ops import CSC
from gnnsys.ops.part_structure import add_fingerprints, fingerprint_edge_rows, fingerprint_edges, fingerprint_rows
from gnnsys.partition import open_parts, verify_parts, write_parts
from tests.partition.part_graphs import (
    CASES,
    alter,
    heterogeneous,
    homogeneous,
    random_assignment,
    read_manifest,
    stored_name,
    write_manifest,
    written,
)
from tests.support.grid import grid


@grid(chosen=written(0))
def test_parts_as_written_pass_with_and_without_their_source(chosen, tmp_path):
    case, (num_parts, trainers, hops) = chosen
    graph = CASES[case]()
    assignment = random_assignment(graph, num_parts, trainers)
    write_parts(graph, assignment, tmp_path / "parts", halo_hops=hops, edge_ids=len(case) % 2 == 0)
    assert verify_parts(tmp_path / "parts").problems == []
    report = verify_parts(tmp_path / "parts", graph)
    assert report.ok and report.with_source and report.num_parts == num_parts
    assert report.num_nodes == sum(map(graph.num_nodes, graph.node_types))
    assert report.num_edges == sum(map(graph.num_edges, graph.edge_types))


def test_verification_reports_progress_and_what_it_saw(tmp_path):
    graph, calls = homogeneous(30, 90), []
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts")
    report = verify_parts(tmp_path / "parts", graph, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] and [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert str(report).startswith("3 parts agree with the source, bit for bit: 30 nodes, 90 edges, ")


# -- malformed manifests -----------------------------------------------------------------------------------------------


def places(value, path=()):
    """Where every value inside a JSON value is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(manifest, path, value):
    *outer, last = path
    for key in outer:
        manifest = manifest[key]
    manifest[last] = value


@pytest.mark.parametrize(
    "path,value,message",
    [
        (("parts", 0), None, "manifest.json is malformed: part 0: "),
        (("parts", 1, "edges", 0, "indices"), 5, "manifest.json names 5, which is not a file of part-0001/"),
        (("parts", 1, "nodes", 0, "data"), [], "manifest.json is malformed: part 1: "),
        (("files",), {}, "manifest.json is malformed: part 0: 'part-0000/"),
        (("files", "part-0001/0000.npy"), None, "manifest.json is malformed: part 1: "),
        (("files", "part-0001/0000.npy", "bytes"), float("inf"), "manifest.json says inf"),
        (("halo_hops",), float("inf"), "manifest.json is malformed: OverflowError"),
        (("book",), None, "manifest.json is malformed: "),
    ],
)
def test_a_malformed_manifest_is_a_problem_that_names_it(path, value, message, tmp_path):
    graph, folder = homogeneous(30, 90), tmp_path / "parts"
    write_parts(graph, random_assignment(graph, 2, 1), folder)
    manifest = read_manifest(folder)
    put(manifest, path, value)
    write_manifest(folder, manifest)
    for source in (None, graph):
        problems = verify_parts(folder, source).problems
        assert problems and message in problems[0], problems


def test_no_value_anywhere_in_a_manifest_makes_verification_raise(tmp_path):
    graph, folder, rng = heterogeneous(), tmp_path / "parts", random.Random(0)
    write_parts(graph, random_assignment(graph, 2, 1), folder, halo_hops=2)
    original = json.dumps(read_manifest(folder))
    everywhere = list(places(json.loads(original)))
    found = 0
    for path in [*rng.sample(everywhere, 40), ("parts", 0, "edges", 0, "global_starts")]:
        manifest = json.loads(original)
        put(manifest, path, rng.choice([None, 5, -1, "x", [], {}, float("inf"), 10**30, [None]]))
        write_manifest(folder, manifest)
        report = verify_parts(folder)
        assert all(isinstance(problem, str) and problem for problem in report.problems)
        found += not report.ok
    assert found > 25  # some values, such as those of `info`, say nothing about the parts


# -- alterations, with every checksum made to fit ----------------------------------------------------------------------


def swap(i, j):
    def change(array):
        array[[i, j]] = array[[j, i]]

    return change


def flip_byte(array):
    array.reshape(-1).view(np.uint8)[-1] ^= 1


def other_halo_id(halo):
    """Another id that keeps the table ascending and remote: only the edges can tell."""
    for i in range(len(halo)):
        following = halo[i + 1] if i + 1 < len(halo) else 30
        if halo[i] + 1 < following and not 10 <= halo[i] + 1 < 20:
            halo[i] += 1
            return
    raise AssertionError("no room in this halo")


def repeat_first(array):
    array[1] = array[0]


ALTERATIONS = {
    "two edges swapped": ("edges", "indices", None, swap(0, -1)),
    "an edge to another source": ("edges", "indices", None, lambda a: a.__setitem__(3, (a[3] + 1) % 10)),
    "an edge moved to the next column": ("edges", "indptr", None, lambda a: a.__setitem__(1, a[1] + 1)),
    "two edge ids swapped": ("edges", "edge_ids", None, swap(2, 5)),
    "a byte of a feature": ("nodes", "data", "x", flip_byte),
    "a mask": ("nodes", "data", "train_mask", flip_byte),
    "a byte of an edge's row": ("edges", "data", "weight", flip_byte),
    "two rows of edges swapped": ("edges", "data", "time", swap(0, 7)),
    "two rows of nodes swapped": ("nodes", "data", "x", swap(0, 1)),
    "a node duplicated, another missing": ("nodes", "original_ids", None, repeat_first),
    "two original ids swapped": ("nodes", "original_ids", None, swap(0, 1)),
    "two global ids swapped": ("nodes", "global_ids", None, swap(0, 1)),
    "a wrong halo id": ("nodes", "halo", None, other_halo_id),
}


def parts_of_ten(folder, **options) -> Graph:
    """Three parts of ten nodes each: part 1 owns global ids 10 to 19. No two edges or rows are equal."""
    graph = homogeneous(30, 60, 3)
    graph.set_edge_data("time", torch.arange(60))
    subpart = torch.tensor([2, 0, 1]).repeat(10).int()
    assignment = random_assignment(graph, 3, 1)
    assignment.subpart[NODE].copy_(subpart)
    write_parts(graph, assignment, folder, **options)
    return graph


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_an_alteration_is_found_though_all_checksums_fit(alteration, tmp_path):
    graph = parts_of_ten(tmp_path / "parts")
    kind, role, name, change = ALTERATIONS[alteration]
    file = stored_name(tmp_path / "parts", 1, kind, 0, role, name)
    before = np.load(tmp_path / "parts" / file)
    alter(tmp_path / "parts", file, change)
    assert not np.array_equal(before, np.load(tmp_path / "parts" / file))
    open_parts(tmp_path / "parts").part(1)  # nothing is wrong with the files as such
    for source in (None, graph):
        report = verify_parts(tmp_path / "parts", source)
        assert not report.ok and len(str(report)) > 20


@pytest.mark.parametrize(
    "hops,edge_ids,in_order",
    [
        (2, True, False),
        (1, False, True),
        pytest.param(1, True, False, marks=pytest.mark.long),
        pytest.param(3, True, True, marks=pytest.mark.long),
    ],
)
def test_any_byte_changed_in_any_array_is_found(hops, edge_ids, in_order, tmp_path):
    graph = homogeneous(30, 120, 4, in_order=in_order)
    folder = tmp_path / "parts"
    write_parts(graph, random_assignment(graph, 2, 2), folder, halo_hops=hops, edge_ids=edge_ids)
    original, rng = read_manifest(folder), random.Random(hops)
    for name in original["files"]:
        content = (folder / name).read_bytes()
        size = np.load(folder / name).nbytes
        for place in rng.sample(range(len(content) - size, len(content)), min(size, 1)):
            altered = bytearray(content)
            altered[place] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(altered)
            manifest = read_manifest(folder)
            manifest["files"][name]["crc32"] = zlib.crc32(altered)
            write_manifest(folder, manifest)
            assert not verify_parts(folder).ok, (name, place)
        (folder / name).write_bytes(content)
        write_manifest(folder, original)
    assert verify_parts(folder).ok


def test_a_node_missing_from_parts_and_book_alike_is_found(tmp_path):
    """The last node has no edges and no rows: nothing but the count can tell."""
    graph, folder = homogeneous(10, 30, num_used=9, rows=False), tmp_path / "parts"
    write_parts(graph, random_assignment(graph, 1, 1), folder)
    alter(folder, stored_name(folder, 0, "nodes", 0, "original_ids"), lambda a: a[:-1])
    alter(folder, stored_name(folder, 0, "nodes", 0, "global_ids"), lambda a: a[:-1])
    alter(folder, stored_name(folder, 0, "edges", 0, "indptr"), lambda a: a[:-1])
    manifest = read_manifest(folder)
    manifest["parts"][0]["nodes"][0]["num_core"] = manifest["book"]["nodes"][0][1][-1] = 9
    write_manifest(folder, manifest)
    assert open_parts(folder).part(0).num_core() == 9
    assert verify_parts(folder).problems == ["'node': the parts have 9 nodes, the source 10"]
    assert not verify_parts(folder, graph).ok


def test_a_duplicated_node_is_named_with_the_one_it_displaced(tmp_path):
    parts_of_ten(tmp_path / "parts")
    alter(tmp_path / "parts", stored_name(tmp_path / "parts", 1, "nodes", 0, "original_ids"), repeat_first)
    text = str(verify_parts(tmp_path / "parts"))
    assert "part 1: 1 nodes of type 'node' are duplicates" in text
    assert "1 nodes of type 'node' are missing, the first is 5" in text


def test_a_halo_node_that_no_edge_needs_is_found(tmp_path):
    folder = tmp_path / "parts"
    graph = Graph.from_edge_index(torch.tensor([[3], [0]]), 4, {})
    assignment = random_assignment(graph, 2, 1)
    assignment.subpart[NODE].copy_(torch.tensor([0, 0, 1, 1]))
    write_parts(graph, assignment, folder)
    name = stored_name(folder, 0, "nodes", 0, "halo")
    assert np.load(folder / name).tolist() == [3]
    alter(folder, name, lambda a: np.array([2, 3], dtype=a.dtype))
    alter(folder, stored_name(folder, 0, "edges", 0, "indices"), lambda a: a + 1)
    manifest = read_manifest(folder)
    manifest["parts"][0]["nodes"][0]["num_halo"] = [2]
    write_manifest(folder, manifest)
    assert verify_parts(folder).problems == [
        "part 0: the halo of type 'node' has 2 nodes up to hop 1, its edges need others"
    ]


def test_another_graph_is_not_the_source(tmp_path):
    graph = parts_of_ten(tmp_path / "parts")
    assert "the source" in str(verify_parts(tmp_path / "parts", heterogeneous()))
    graph.node_data[NODE]["x"][4, 1] += 1
    assert verify_parts(tmp_path / "parts", graph).problems == ["part 0: rows of 'x' of 'node' differ from the source"]


def test_bits_count_where_values_are_equal(tmp_path):
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 2, {"x": torch.tensor([0.0, float("nan")])})
    write_parts(graph, random_assignment(graph, 1, 1), tmp_path / "parts")
    assert verify_parts(tmp_path / "parts", graph).ok  # a NaN is itself
    graph.node_data[NODE]["x"][0] = -0.0
    assert not verify_parts(tmp_path / "parts", graph).ok


def test_every_file_that_is_damaged_is_reported_and_none_raises(tmp_path):
    parts_of_ten(tmp_path / "parts")
    names = ["part-0000/0001.npy", "part-0002/0000.npy"]
    for name in names:
        (tmp_path / "parts" / name).unlink()
    problems = verify_parts(tmp_path / "parts").problems
    assert len(problems) == 2 and all(
        f"{name} is missing" in problem for name, problem in zip(names, problems, strict=True)
    )
    assert "it has no manifest.json" in verify_parts(tmp_path).problems[0]


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_order_or_threads_and_adds_up():
    graph = homogeneous(500, 90_000, 1)
    csc, x = graph.csc(EDGE), graph.node_data[NODE]["x"]
    whole = fingerprint_edges(csc.indptr, csc.indices)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    threads, cut = torch.get_num_threads(), 200
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert fingerprint_edges(csc.indptr, csc.indices) == whole
            assert fingerprint_rows(x[order], order) == fingerprint_rows(x)
    finally:
        torch.set_num_threads(threads)
    parts = [
        fingerprint_edges(csc.indptr[: cut + 1], csc.indices),
        fingerprint_edges(csc.indptr[cut:], csc.indices, torch.arange(cut, 500)),
    ]
    assert add_fingerprints(*parts) == whole and add_fingerprints(whole) == whole


def test_a_fingerprint_tells_multiplicity_rank_and_width():
    indptr = torch.tensor([0, 2, 3])
    edges = [
        fingerprint_edges(indptr, torch.tensor(sources)) for sources in ([1, 2, 1], [2, 1, 1], [1, 1, 2], [1, 1, 1])
    ]
    assert len(set(edges)) == 4
    assert fingerprint_edges(indptr, torch.tensor([1, 2, 1], dtype=torch.int32)) == edges[0]
    rows = torch.arange(10, dtype=torch.uint8).view(2, 5)
    hashes = {
        fingerprint_rows(rows),
        fingerprint_rows(rows.flip(0)),
        fingerprint_rows(rows[:1]),
        fingerprint_rows(rows, first=1),
    }
    assert len(hashes) == 4
    by_edge = fingerprint_edge_rows(torch.tensor([0, 1, 2]), rows)
    assert by_edge == fingerprint_edge_rows(torch.tensor([0, 1, 2]), rows.flip(0), None, torch.tensor([1, 0]))
    assert by_edge != fingerprint_edge_rows(torch.tensor([0, 2, 2]), rows)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: fingerprint_edges(torch.tensor([0, 3]), torch.tensor([0, 1])), r"indptr must lie in \[0, 2\]"),
        (lambda: fingerprint_edges(torch.tensor([1, 0]), torch.tensor([0, 1])), "never decrease"),
        (
            lambda: fingerprint_edges(torch.tensor([0, 1]), torch.tensor([5]), None, torch.tensor([0])),
            "indices must be in",
        ),
        (lambda: fingerprint_edges(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0, 1])), "one id per column"),
        (lambda: fingerprint_rows(torch.rand(3, 2), torch.tensor([0])), "ids must name every row"),
        (lambda: fingerprint_rows(torch.rand(2, 3).t()), "must be contiguous"),
        (
            lambda: fingerprint_edge_rows(torch.tensor([0, 1]), torch.rand(1), None, torch.tensor([1])),
            "order must be in",
        ),
    ],
)
def test_what_cannot_be_fingerprinted_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_csc_that_leads_outside_is_refused_by_every_step_of_cutting():
    from gnnsys.ops.part_structure import collect_halo, empty_bits, local_columns, mark_halo, mark_ids

    csc = CSC(torch.tensor([0, 1, 2]), torch.tensor([1, 7]), 2)
    columns, names, bits = torch.tensor([0, 1]), torch.tensor([0, 1]), empty_bits(2)
    with pytest.raises(ValueError, match="indices and global_ids must be in"):
        mark_halo(csc, columns, names, range(0, 1), bits)
    good = CSC(csc.indptr, torch.tensor([1, 0]), 2)
    with pytest.raises(ValueError, match="columns must be in"):
        mark_halo(good, torch.tensor([2]), names, range(0, 1), bits)
    with pytest.raises(ValueError, match="mask must have 1 words"):
        mark_halo(good, columns, names, range(0, 1), empty_bits(100))
    with pytest.raises(ValueError, match="must be a range of"):
        mark_halo(good, columns, names, range(0, 3), bits)
    with pytest.raises(ValueError, match="mark them first"):
        local_columns(good, columns, names, range(0, 1), [collect_halo(empty_bits(2), [], wide=False)])
    with pytest.raises(ValueError, match="ids must be in"):
        mark_ids(bits, torch.tensor([64]))
    assert mark_ids(empty_bits(5), torch.tensor([1, 1, 4])) == 2
