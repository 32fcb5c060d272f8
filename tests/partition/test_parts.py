"""Opening parts: what a machine needs, what is refused and how, and the whole graph again."""

from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pytest
import torch

from gnnsys.graph import EDGE, Graph, save
from gnnsys.partition import open_parts, write_parts
from tests.partition import part_graphs
from tests.partition.part_graphs import (
    CASES,
    CITES,
    alter,
    assert_same_graph,
    assert_same_rows,
    heterogeneous,
    homogeneous,
    random_assignment,
    read_manifest,
    stored_name,
    write_manifest,
)
from tests.support.grid import grid


def written(folder, graph=None, num_parts=3, **options):
    graph = homogeneous(30, 120) if graph is None else graph
    write_parts(graph, random_assignment(graph, num_parts, 2), folder, **options)
    return graph


@grid(chosen=part_graphs.written(4))
def test_merged_parts_are_the_source_bit_for_bit(chosen, tmp_path):
    case, (num_parts, trainers, hops) = chosen
    graph = CASES[case]()
    write_parts(graph, random_assignment(graph, num_parts, trainers), tmp_path / "parts", halo_hops=hops)
    assert_same_graph(open_parts(tmp_path / "parts").merge(), graph)


@pytest.mark.parametrize("case", ["int64", "edges in order", "typed", "no types"])
def test_without_edge_ids_edges_come_back_in_the_order_of_the_columns(case, tmp_path):
    graph = CASES[case]()
    written(tmp_path / "parts", graph, edge_ids=False)
    parts = open_parts(tmp_path / "parts")
    merged = parts.merge()
    for t in graph.edge_types:
        a, b = graph.csc(t), merged.csc(t)
        assert torch.equal(a.indptr, b.indptr) and torch.equal(a.indices, b.indices) and b.edge_ids is None
        order = torch.arange(a.num_edges) if a.edge_ids is None else a.edge_ids.long()
        assert_same_rows({name: rows[order] for name, rows in graph.edge_data[t].items()}, merged.edge_data[t])
        assert parts.part(0).edge_ids(torch.arange(1), t) is None


def test_every_dtype_and_odd_names_come_back(tmp_path):
    types = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64]
    types += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint16]
    rows = {f"../{dtype}/ü": torch.arange(12).view(6, 2).to(dtype) for dtype in types}
    rows["no columns"], rows["a matrix each"] = torch.empty(6, 0), torch.rand(6, 2, 3)
    rows["8 bits"] = torch.arange(6).float().to(torch.float8_e4m3fn)
    rows["learned"] = torch.rand(6, 2, requires_grad=True)
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 5], [2, 2, 0]]), 6, rows)
    written(tmp_path / "parts", graph)
    merged = open_parts(tmp_path / "parts").merge().node_data["node"]
    assert list(merged) == list(rows)
    for name, expected in rows.items():
        assert merged[name].dtype == expected.dtype and merged[name].shape == expected.shape
        if expected.numel():
            assert torch.equal(merged[name].view(torch.uint8), expected.detach().view(torch.uint8)), name


def test_infos_come_back(tmp_path):
    graph = written(tmp_path / "parts", info={"method": "random", "cut": 0.5})
    parts = open_parts(tmp_path / "parts")
    assert parts.info == {"method": "random", "cut": 0.5} and parts.graph_info == graph.info
    assert parts.schema.node_types == ["node"] and parts.schema.edge_types == [EDGE]
    assert parts.schema.node_data["node"]["half"].dtype == torch.bfloat16


def test_a_machine_needs_the_manifest_and_its_own_folder_alone(tmp_path):
    written(tmp_path / "parts", heterogeneous())
    whole = open_parts(tmp_path / "parts")
    machine = tmp_path / "machine"
    machine.mkdir()
    shutil.copy(tmp_path / "parts" / "manifest.json", machine)
    shutil.copytree(tmp_path / "parts" / "part-0001", machine / "part-0001")
    part = open_parts(machine).part(1)
    assert torch.equal(part.csc(CITES).indices, whole.part(1).csc(CITES).indices)
    assert_same_rows(part.node_data["paper"], whole.part(1).node_data["paper"])
    with pytest.raises(ValueError, match=r"part-0000/0000\.npy is missing"):
        open_parts(machine).part(0)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads Linux's list of mapped files")
def test_arrays_are_mapped_and_writing_to_them_spares_the_files(tmp_path):
    graph = written(tmp_path / "parts")
    part = open_parts(tmp_path / "parts").part(1)
    names = {stored_name(tmp_path / "parts", 1, "edges", 0, role) for role in ("indptr", "indices")}
    names |= {stored_name(tmp_path / "parts", 1, "nodes", 0, role) for role in ("halo", "original_ids")}
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    assert all(str(tmp_path / "parts" / name) in mapped for name in names)
    part.node_data["node"]["x"].zero_()
    assert_same_graph(open_parts(tmp_path / "parts").merge(), graph)


def test_what_is_asked_of_a_part_by_a_wrong_name_or_number_is_refused(tmp_path):
    written(tmp_path / "parts", heterogeneous())
    parts = open_parts(tmp_path / "parts")
    with pytest.raises(ValueError, match=r"part must be in \[0, 3\), got 3"):
        parts.part(3)
    part = parts.part(0)
    with pytest.raises(ValueError, match="node type must be one of"):
        part.halo()
    with pytest.raises(ValueError, match="edge type must be one of"):
        part.csc(("paper", "writes", "paper"))
    with pytest.raises(ValueError, match=r"local ids must be in \[0, "):
        part.global_ids(torch.tensor([10_000]), "paper")
    with pytest.raises(ValueError, match=r"local ids of part 0 must be in \[0, "):
        part.global_edge_ids(torch.tensor([10_000]), CITES)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 4, -1])
@pytest.mark.parametrize("damage", ["cut", "alter", "remove"])
def test_a_damaged_file_is_named_when_its_part_is_opened(which, damage, tmp_path):
    written(tmp_path / "parts")
    file = sorted((tmp_path / "parts" / "part-0001").iterdir())[which]
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "alter":
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    parts = open_parts(tmp_path / "parts")
    parts.part(0)
    with pytest.raises(ValueError, match=rf"part-0001/{file.name} (has|does not match|is missing)"):
        parts.part(1)
    if damage == "alter":
        open_parts(tmp_path / "parts", verify=False).part(2)
    else:
        with pytest.raises(ValueError, match=rf"part-0001/{file.name} (has|is missing)"):
            open_parts(tmp_path / "parts", verify=False).part(1)


def first(value):
    def change(array):
        array[0] = value

    return change


def swap_ends(array):
    array[[0, -1]] = array[[-1, 0]]


@pytest.mark.parametrize(
    "kind,role,change,message",
    [
        ("edges", "indices", first(1 << 20), r"indices must be in \[0, "),
        ("edges", "indices", first(-1), r"indices must be in \[0, "),
        ("edges", "indices", lambda a: a[:-1], "indptr must run from 0"),
        ("edges", "indices", lambda a: a.astype(np.int64), "expected torch.int32"),
        ("edges", "indptr", first(1), "indptr must run from 0"),
        ("edges", "indptr", lambda a: a.__setitem__(1, 1 << 40), "indptr must never decrease"),
        ("edges", "indptr", lambda a: a[:-1], "expected torch.int64"),
        ("edges", "edge_ids", first(-5), "edge ids must be in"),
        ("nodes", "halo", first(-1), r"global ids must be in \[0, 30\)"),
        ("nodes", "halo", swap_ends, "must ascend"),
        ("nodes", "halo", lambda a: a[:-1], "expected"),
        ("nodes", "original_ids", first(30), r"original ids must be in \[0, 30\)"),
        ("nodes", "original_ids", lambda a: a.astype(np.float64), "it was altered"),
    ],
)
def test_ids_that_lead_outside_are_refused_with_the_name_of_the_file(kind, role, change, message, tmp_path):
    written(tmp_path / "parts")
    name = stored_name(tmp_path / "parts", 1, kind, 0, role)
    alter(tmp_path / "parts", name, change)
    if message == "expected torch.int32":
        manifest = read_manifest(tmp_path / "parts")
        manifest["files"][name]["dtype"] = "int64"
        write_manifest(tmp_path / "parts", manifest)
    for verify in (True, False):
        with pytest.raises(ValueError, match=rf"{re.escape(name)}.*{message}"):
            open_parts(tmp_path / "parts", verify=verify).part(1)


def test_an_own_node_in_the_halo_is_refused(tmp_path):
    written(tmp_path / "parts")
    own = open_parts(tmp_path / "parts").book.part_range(1)
    name = stored_name(tmp_path / "parts", 1, "nodes", 0, "halo")

    def change(halo):
        after = int((halo < own.start).sum())
        halo[after] = own.start  # the first halo id behind the own range: the table still ascends

    alter(tmp_path / "parts", name, change)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: holds ids of part 1 itself"):
        open_parts(tmp_path / "parts").part(1)


@pytest.mark.parametrize(
    "name,message",
    [
        ("../secret.npy", "which is not a file of part-0001"),
        ("part-0001/../../secret.npy", "which is not a file of this directory"),
        ("part-0002/0000.npy", "which is not a file of part-0001"),
        ("/etc/hostname", "which is not a file of part-0001"),
        ("part-0001//0000.npy", "which is not a file of this directory"),
        (7, "which is not a file of part-0001"),
    ],
)
def test_a_manifest_cannot_point_outside_the_folder_of_its_part(name, message, tmp_path):
    written(tmp_path / "parts")
    np.save(tmp_path / "secret.npy", np.zeros(30))
    manifest = read_manifest(tmp_path / "parts")
    entry = manifest["parts"][1]["nodes"][0]
    manifest["files"][str(name)] = manifest["files"][entry["halo"]]
    entry["halo"] = name
    write_manifest(tmp_path / "parts", manifest)
    with pytest.raises(ValueError, match=message):
        open_parts(tmp_path / "parts").part(1)


def test_a_link_out_of_the_folder_of_a_part_is_refused_and_a_part_that_is_a_link_is_not(tmp_path):
    parts = tmp_path / "parts"
    written(parts)
    (parts / "part-0001").rename(tmp_path / "elsewhere")
    (parts / "part-0001").symlink_to(tmp_path / "elsewhere")
    open_parts(parts).part(1)
    file = parts / "part-0000" / "0000.npy"
    file.rename(tmp_path / "outside.npy")
    file.symlink_to(tmp_path / "outside.npy")  # the same bytes: only the way is wrong
    with pytest.raises(ValueError, match=re.escape(f"{file} is a link that leads out of its folder")):
        open_parts(parts).part(0)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda text: text[:-3], "cut or altered"),
        (lambda text: text.replace('"halo_hops": 1', '"halo_hops": 2'), "does not match its checksum"),
        (lambda text: text.replace("gnnsys-parts", "something"), "does not describe a gnnsys-parts"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "has version 99, this gnnsys reads version 1"),
        (lambda text: "[]", "does not describe"),
    ],
)
def test_a_damaged_manifest_is_refused(change, message, tmp_path):
    written(tmp_path / "parts")
    manifest = tmp_path / "parts" / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(ValueError, match=message):
        open_parts(tmp_path / "parts")


def every_place(value, path=()):
    """All paths to values inside nested dicts and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from every_place(inner, (*path, key))


@pytest.mark.parametrize(("first", "nonsense"), list(enumerate([None, -1, "x", [], {}, [[1, 2], 3]])))
def test_nonsense_anywhere_in_a_manifest_is_a_value_error_or_harmless(first, nonsense, tmp_path):
    """One place of the manifest after another, with a checksum that fits; each nonsense has its own places."""
    graph = written(tmp_path / "parts", heterogeneous(num_papers=6, num_authors=3, num_edges=9), num_parts=2)
    original, refused = read_manifest(tmp_path / "parts"), 0
    for place in list(every_place(original))[1 + 5 * first :: 29]:
        manifest = read_manifest(tmp_path / "parts")
        holder = manifest
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = nonsense
        write_manifest(tmp_path / "parts", manifest)
        try:
            parts = open_parts(tmp_path / "parts")
            for index in range(parts.num_parts):
                parts.part(index)
        except ValueError as error:
            assert str(tmp_path / "parts") in str(error), place
            refused += 1
        write_manifest(tmp_path / "parts", original)
    assert refused > 5
    assert_same_graph(open_parts(tmp_path / "parts").merge(), graph)


def test_what_is_not_a_directory_of_parts_is_refused(tmp_path):
    save(homogeneous(5, 9), tmp_path / "graph")
    with pytest.raises(ValueError, match="does not describe a gnnsys-parts"):
        open_parts(tmp_path / "graph")
    with pytest.raises(ValueError, match=r"is not a directory of parts: it has no manifest\.json"):
        open_parts(tmp_path)


def test_parts_without_global_ids_of_original_ids_open_and_say_what_they_lack(tmp_path):
    """As they were written before there were loaders of links on parts."""
    graph, folder = homogeneous(30, 90), tmp_path / "parts"
    write_parts(graph, random_assignment(graph, 2, 1), folder)
    assert open_parts(folder).has_global_ids
    manifest = read_manifest(folder)
    for part in manifest["parts"]:
        del part["nodes"][0]["global_ids"]
    write_manifest(folder, manifest)
    parts = open_parts(folder)
    assert not parts.has_global_ids
    assert_same_graph(parts.merge(), graph)
    with pytest.raises(ValueError, match="partition the graph again"):
        parts.part(1).global_of_original()
