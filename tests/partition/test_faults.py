"""What a disk, a copy or a stranger does to the files of parts: refused at open, with the file's name."""

from __future__ import annotations

import json

import pytest

from gnnsys.graph.manifest import MANIFEST, manifest_checksum
from gnnsys.partition import open_parts, write_parts
from tests.fuzz.faults import check_all
from tests.partition.part_graphs import homogeneous, random_assignment


def test_faults_of_single_bits_and_cut_files_are_refused_and_crash_nothing(tmp_path):
    """All thousand of them are `make fuzz`."""
    assert check_all(40, 1, tmp_path) == []


@pytest.fixture
def parts(tmp_path):
    graph = homogeneous(40, 100)
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts", info={"scale": 1e30, "name": "é"})
    return tmp_path / "parts"


@pytest.mark.parametrize(("old", "new"), [("1e+30", "1E+30"), ("\\u00e9", "\\u00E9"), ("\n", "\n\n")])
def test_a_manifest_that_says_the_same_in_other_letters_was_altered(parts, old, new):
    text = (parts / MANIFEST).read_text()
    assert old in text
    (parts / MANIFEST).write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"{MANIFEST}.*altered"):
        open_parts(parts)


@pytest.mark.parametrize(
    "name", ["../parts/part-0000/0000.npy", "/etc/passwd", "part-0000/../../x.npy", "part-0000//0000.npy", "", 5, None]
)
def test_a_manifest_cannot_name_a_file_of_another_place(parts, name):
    """Whoever can write the manifest can write its checksum, too."""
    manifest = json.loads((parts / MANIFEST).read_text())
    nodes = manifest["parts"][0]["nodes"][0]
    manifest["files"][str(name)] = manifest["files"][nodes["halo"]]
    nodes["halo"] = name
    del manifest["crc32"]
    (parts / MANIFEST).write_text(json.dumps({**manifest, "crc32": manifest_checksum(manifest)}))
    with pytest.raises(ValueError, match=f"{MANIFEST}.*"):
        open_parts(parts).part(0)
