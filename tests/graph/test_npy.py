"""Headers that lie: each reader of .npy and .npz names the file and the remedy, and allocates nothing for the lie."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnsys.graph import Graph, external_graph, load, save
from gnnsys.graph.manifest import MANIFEST, manifest_checksum
from gnnsys.graph.npy import load_npy, load_npz_arrays, map_npy
from gnnsys.partition import open_parts, partition_graph
from tests.support.grid import grid

ROWS = np.arange(12, dtype=np.int64)
GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, {"x": torch.arange(12).view(3, 4)})


def npy(
    shape: str = "(12,)",
    descr: str = "'<i8'",
    order: str = "False",
    version: bytes = b"\x01\x00",
    data: bytes = ROWS.tobytes(),
    header: str | None = None,
) -> bytes:
    """A `.npy` whose header says whatever is wanted, 128 bytes long as ours are."""
    text = header or f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    assert len(text) < 118
    return b"\x93NUMPY" + version + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n" + data


LIES = {
    "more than there is": npy("(13,)"),
    "less than there is": npy("(11,)"),
    "gigabytes": npy("(400000000,)"),
    "more than any memory": npy(f"({2**50},)"),
    "more than fits in 64 bits": npy(f"({2**62}, {2**62})"),
    "a product that overflows to the right size": npy(f"({2**62 + 3}, 4)"),
    "negative": npy("(-1,)"),
    "negative twice": npy("(-3, -4)"),
    "a truth": npy("(True, 12)"),
    "objects": npy(descr="'|O'"),
    "no such dtype": npy(descr="'<q9'"),
    "another version": npy(version=b"\x09\x00"),
    "no dictionary": npy(header="[1, 2"),
    "a call": npy(header="{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (12,)}"),
    "cut in the header": npy()[:60],
    "cut in the magic": npy()[:4],
    "cut in the data": npy()[:-8],
    "empty": b"",
    "text": b"1 2 3\n",
}


def test_the_honest_file_that_the_lies_are_made_of_is_read(tmp_path: Path):
    (tmp_path / "a.npy").write_bytes(npy())
    for read in (load_npy, map_npy):
        assert read(tmp_path / "a.npy").tolist() == ROWS.tolist()


def archive_of(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def plain(array: np.ndarray) -> bytes:
    np.save(stream := io.BytesIO(), array)
    return stream.getvalue()


@grid(lie=list(LIES))
def test_every_reader_of_a_users_file_refuses_the_lie_by_name_and_allocates_nothing(lie: str, tmp_path: Path):
    content = LIES[lie]
    single = tmp_path / "parts.npy"
    single.write_bytes(content)
    edges = plain(np.zeros((2, 3), np.int64))
    packed = archive_of(tmp_path / "g.npz", {"edge_index": edges, "year": content})
    assigned = archive_of(tmp_path / "parts.npz", {"node": content})
    readers = {
        "g.npz": [lambda: load(packed), lambda: external_graph(packed, tmp_path / "out", memory_limit=64 << 20)],
        "parts.npy": [
            lambda: load_npy(single),
            lambda: partition_graph(GRAPH, 2, tmp_path / "out", method=f"assignment={single}"),
        ],
        "parts.npz": [lambda: partition_graph(GRAPH, 2, tmp_path / "out", method=f"assignment={assigned}")],
    }
    for name, reads in readers.items():
        for read in reads:
            tracemalloc.start()
            try:
                with pytest.raises(ValueError, match=rf"{name} cannot be read.*; write it again with numpy\.save"):
                    read()
                assert tracemalloc.get_traced_memory()[1] < 16 << 20
            finally:
                tracemalloc.stop()
    assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"g.npz", "parts.npy", "parts.npz"}


FORTRAN = npy("(3, 4)", order="True")


@pytest.mark.parametrize("lie", [*LIES, "Fortran order"])
@pytest.mark.parametrize("kind", ["graph", "parts"])
def test_a_mapped_array_is_refused_by_name_though_its_checksum_is_not_compared(lie: str, kind: str, tmp_path: Path):
    """Its manifest says the lie as well: whoever can write the one can write the other."""
    folder = tmp_path / "data"
    if kind == "graph":
        save(GRAPH, folder)
    else:
        partition_graph(GRAPH, 1, folder, method="chunk")
    manifest = json.loads((folder / MANIFEST).read_text())
    name = next(name for name, entry in manifest["files"].items() if entry["shape"] == [3, 4])
    content = LIES.get(lie, FORTRAN)
    (folder / name).write_bytes(content)
    manifest["files"][name]["bytes"] = len(content)
    del manifest["crc32"]
    (folder / MANIFEST).write_text(json.dumps({**manifest, "crc32": manifest_checksum(manifest)}))
    with pytest.raises(ValueError, match=rf"{name} (is not an array of ours|holds).*; copy the directory again"):
        load(folder, verify=False) if kind == "graph" else open_parts(folder, verify=False).part(0).node_data


def test_an_archive_that_says_it_holds_more_than_it_can_is_refused(tmp_path: Path):
    path = archive_of(tmp_path / "g.npz", {"edge_index": npy("(400000000,)", data=bytes(64))})
    content = path.read_bytes()
    small, huge = len(npy(data=bytes(64))), 128 + 8 * 400_000_000
    (tmp_path / "g.npz").write_bytes(content.replace(small.to_bytes(4, "little"), huge.to_bytes(4, "little")))
    with pytest.raises(ValueError, match=r"g.npz cannot be read.*edge_index: .* bytes of the file cannot hold"):
        load(path)


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "g.npz", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("edge_index.npy", npy())
        archive.writestr("edge_index.npy", npy())
    with pytest.raises(ValueError, match=r"g.npz cannot be read.*edge_index is there twice"):
        load(tmp_path / "g.npz")


def test_rows_in_fortran_order_are_the_users_own_and_are_read(tmp_path: Path):
    rows = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 2]]), x=rows)
    external_graph(tmp_path / "g.npz", tmp_path / "out", memory_limit=64 << 20)
    for graph in (load(tmp_path / "g.npz"), load(tmp_path / "out")):
        assert graph.node_data["node"]["x"].tolist() == rows.tolist()


DTYPES = ["?", "|i1", "|u1", "<i2", ">i4", "<i8", "<u8", "<f2", "<f4", ">f8", "<c8", "|S3", "<U5", "<M8[ns]", "<i4,<f8"]


@grid(dtype=DTYPES, order=["C", "F"], version=[(1, 0), (2, 0)])
def test_what_numpy_wrote_is_read_as_numpy_reads_it(dtype: str, order: str, version: tuple[int, int], tmp_path: Path):
    path = tmp_path / "a.npy"
    for shape in [(), (0,), (1,), (7,), (3, 4), (4, 0, 2), (2, 3, 4)]:
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        array = np.array(
            values.astype("i4,f8" if "," in dtype else dtype.split("[")[0].replace("M8", "i8")), order=order
        )
        array = array.astype(dtype) if "," not in dtype else array
        with open(path, "wb") as stream:
            np.lib.format.write_array(stream, array, version)
        expected = np.load(path)
        for found in (load_npy(path), map_npy(path)):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.flags.f_contiguous == expected.flags.f_contiguous and np.array_equal(found, expected)


@pytest.mark.parametrize("save_arrays", [np.savez, np.savez_compressed])
def test_arrays_of_an_archive_are_in_memory_once_while_they_are_read(save_arrays, tmp_path: Path):
    saved = np.arange(256).repeat(4096)  # quick to compress
    save_arrays(tmp_path / "a.npz", rows=saved)
    tracemalloc.start()
    try:
        rows = load_npz_arrays(tmp_path / "a.npz")["rows"]
        assert rows.nbytes < tracemalloc.get_traced_memory()[1] < rows.nbytes + (4 << 20)
    finally:
        tracemalloc.stop()
    assert np.array_equal(rows, saved)


@pytest.mark.parametrize("dtype", ["U0", "S0", "V0"])
def test_arrays_of_empty_text_are_read_as_numpy_reads_them(dtype: str, tmp_path: Path):
    """numpy writes them where a field of a table is empty."""
    array = np.zeros((3, 2), [("name", dtype), ("value", "f4")])["name"]
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", names=array, values=ROWS)
    expected = np.load(tmp_path / "a.npy")
    arrays = load_npz_arrays(tmp_path / "a.npz")
    for found in (load_npy(tmp_path / "a.npy"), map_npy(tmp_path / "a.npy"), arrays["names"]):
        assert (found.dtype, found.shape, found.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    assert arrays["values"].tolist() == ROWS.tolist()


def test_plain_arrays_do_not_need_pythons_parser_which_threads_cannot_share(tmp_path: Path, monkeypatch):
    np.save(tmp_path / "a.npy", ROWS.reshape(3, 4))
    np.savez_compressed(tmp_path / "a.npz", one=ROWS, two=ROWS.astype(np.float32), three=np.float64(3))

    def parse(*_: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch (before=54, after=50)")

    monkeypatch.setattr("ast.literal_eval", parse)
    with pytest.raises(SystemError):
        np.load(tmp_path / "a.npy")
    assert load_npy(tmp_path / "a.npy").tolist() == map_npy(tmp_path / "a.npy").tolist() == ROWS.reshape(3, 4).tolist()
    arrays = load_npz_arrays(tmp_path / "a.npz")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "one": [*range(12)],
        "two": [*range(12)],
        "three": 3,
    }
