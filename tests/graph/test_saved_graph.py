"""Saved graphs: what comes back, what is refused, and what a crash leaves behind."""

from __future__ import annotations

import json
import os
import zlib

import numpy as np
import pytest
import torch

from gnnsys.graph import Graph, load, rmat, save, sbm, typed_graph
from tests.support.processes import run_code

WRITES = ("author", "writes", "paper")


def assert_same(left: Graph, right: Graph) -> None:
    assert left.node_types == right.node_types and left.edge_types == right.edge_types and left.info == right.info
    for edge_type in left.edge_types:
        a, b = left.csc(edge_type), right.csc(edge_type)
        assert a.num_src == b.num_src
        assert torch.equal(a.indptr, b.indptr) and torch.equal(a.indices, b.indices)
        assert (a.edge_ids is None) == (b.edge_ids is None)
        assert a.edge_ids is None or (a.edge_ids.dtype == b.edge_ids.dtype and torch.equal(a.edge_ids, b.edge_ids))
        assert_same_rows(left.edge_data[edge_type], right.edge_data[edge_type])
    for node_type in left.node_types:
        assert left.num_nodes(node_type) == right.num_nodes(node_type)
        assert_same_rows(left.node_data[node_type], right.node_data[node_type])


def assert_same_rows(left, right) -> None:
    assert list(left) == list(right)
    for name in left:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("make", [lambda: rmat(300, 2000), lambda: sbm(300), lambda: typed_graph(300)])
def test_a_graph_comes_back_as_it_was_saved(make, tmp_path):
    graph = make()
    save(graph, tmp_path / "graph")
    assert_same(load(tmp_path / "graph"), graph)
    assert_same(load(tmp_path / "graph", verify=False), graph)
    assert sorted(os.listdir(tmp_path)) == ["graph"]  # nothing else is left behind


def test_every_dtype_odd_names_and_empty_types_come_back(tmp_path):
    types = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    types += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    rows = {f"../{dtype}/ü": torch.arange(6).view(3, 2).to(dtype) for dtype in types}
    rows["not contiguous"] = torch.rand(2, 3).t()
    graph = Graph.from_edge_indices(
        {WRITES: torch.empty(2, 0, dtype=torch.int64)}, {"author": 0, "paper": 3}, {"paper": rows}
    )
    save(graph, tmp_path / "graph")
    assert_same(load(tmp_path / "graph"), graph)


def test_a_loaded_graph_is_memory_mapped_and_writing_to_it_spares_the_file(tmp_path):
    save(sbm(300), tmp_path / "graph")
    graph = load(tmp_path / "graph")
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            assert str(tmp_path / "graph") in maps.read()
    graph.node_data["node"]["x"].zero_()
    assert float(load(tmp_path / "graph").node_data["node"]["x"].abs().sum()) > 0


def stored_arrays(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".npy"))


@pytest.mark.parametrize("which", [0, 3, -1])
@pytest.mark.parametrize("damage", ["cut", "alter", "remove"])
def test_a_damaged_file_is_named_when_the_graph_is_opened(which, damage, tmp_path):
    save(sbm(300), tmp_path / "graph")
    name = stored_arrays(tmp_path / "graph")[which]
    file = tmp_path / "graph" / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "alter":
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(ValueError, match=f"{name} (has|does not match|is missing)"):
        load(tmp_path / "graph")


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda text: text[:-3], "cut or altered"),
        (lambda text: text.replace('"num_nodes": 300', '"num_nodes": 301'), "does not match its checksum"),
        (lambda text: text.replace("gnnsys-graph", "something"), "does not describe a gnnsys-graph"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "has version 99, this gnnsys reads version 1"),
        (lambda text: "[]", "does not describe"),
    ],
)
def test_a_damaged_manifest_is_refused(change, message, tmp_path):
    save(sbm(300), tmp_path / "graph")
    manifest = tmp_path / "graph" / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "graph")


def test_a_manifest_cannot_point_outside_its_directory(tmp_path):
    save(sbm(300), tmp_path / "graph")
    np.save(tmp_path / "secret.npy", np.zeros(300))
    file = tmp_path / "graph" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    manifest["files"]["../secret.npy"] = manifest["files"]["0000.npy"]
    manifest["nodes"][0]["data"]["x"] = "../secret.npy"
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    file.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not a file of this directory"):
        load(tmp_path / "graph")


def test_an_array_of_python_objects_is_never_unpickled(tmp_path):
    save(sbm(300), tmp_path / "graph")
    file = tmp_path / "graph" / "0000.npy"
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"0000\.npy"):
        load(tmp_path / "graph")


def test_only_a_saved_graph_is_overwritten(tmp_path):
    save(sbm(300), tmp_path / "graph")
    with pytest.raises(ValueError, match="exists: choose another, or overwrite it"):
        save(sbm(200), tmp_path / "graph")
    save(sbm(200), tmp_path / "graph", overwrite=True)
    assert load(tmp_path / "graph").num_nodes() == 200 and os.listdir(tmp_path) == ["graph"]
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match="only a saved graph is overwritten"):
        save(sbm(200), tmp_path / "photos", overwrite=True)


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    graph = sbm(300)
    graph.info["callback"] = len
    with pytest.raises(ValueError, match=r"graph.info must hold plain JSON values"):
        save(graph, tmp_path / "graph")
    assert os.listdir(tmp_path) == []


def test_numbers_as_keys_of_info_come_back_as_text(tmp_path):
    graph = sbm(300)
    graph.info["names"] = {9: "nine", 10: "ten"}
    save(graph, tmp_path / "graph")
    assert load(tmp_path / "graph").info["names"] == {"9": "nine", "10": "ten"}


def test_a_save_killed_half_way_never_looks_like_a_graph(tmp_path):
    """The process ends, without any clean-up, while the second array is being written."""
    program = """
import os, sys
import numpy as np
from gnnsys.graph import save, sbm
write, calls = np.lib.format.write_array_header_1_0, []
def write_once(*args, **kwargs):
    calls.append(1)
    if len(calls) == 2:
        os._exit(9)
    write(*args, **kwargs)
np.lib.format.write_array_header_1_0 = write_once
save(sbm(300), sys.argv[1])
"""
    target = tmp_path / "graph"
    assert run_code(program, target).returncode == 9
    assert not target.exists()
    with pytest.raises(ValueError, match="does not exist"):
        load(target)
    save(sbm(300), target)
    assert load(target).num_nodes() == 300
