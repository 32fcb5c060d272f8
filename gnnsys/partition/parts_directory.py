"""Opens a directory of parts: the book and schema at once, each part when it is asked for, memory-mapped.

A machine needs `manifest.json` and the folder of its own part, no more. Every error names the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnsys.graph import MANIFEST, ArrayReader, Graph, read_manifest, some
from gnnsys.partition.clusters import ClusterBook
from gnnsys.partition.fingerprint import Fingerprints
from gnnsys.partition.layout import FORMAT, VERSION, WHAT, Malformed, Schema
from gnnsys.partition.merge import merge_parts
from gnnsys.partition.part import Part
from gnnsys.partition.partition_book import PartitionBook


def open_parts(path: str | os.PathLike[str], *, verify: bool = True) -> Parts:
    """Opens what `write_parts` wrote.

    Sizes, shapes and ids are always checked when a part is opened; with `verify` its files are also read once and
    compared with their checksums. Whether the parts are the graph they were made of is `verify_parts`' question.
    """
    return Parts(Path(path), verify=verify)


class Parts:
    """A parted graph. `info` is what the writer was given, `graph_info` the source graph's own.

    `clusters` are those inside the parts, None where they were not cut. `unfit_rows` says of arrays of features how
    many rows have NaN, and which.
    """

    def __init__(self, folder: Path, *, verify: bool) -> None:
        manifest = read_manifest(folder, format=FORMAT, version=VERSION, what=WHAT)
        self.path = folder
        try:
            self.book = PartitionBook.from_json(manifest["book"])
            self.schema = Schema.from_json(manifest["schema"])
            self.fingerprints = Fingerprints.from_json(manifest["fingerprints"])
            self.halo_hops = int(manifest["halo_hops"])
            self.has_edge_ids = bool(manifest["edge_ids"])
            self.info: dict[str, Any] = dict(manifest["info"])
            self.graph_info: dict[str, Any] = dict(manifest["graph_info"])
            self._entries: list[Mapping[str, Any]] = list(manifest["parts"])
            self._files: dict[str, dict[str, Any]] = dict(manifest["files"])
            self.unfit_rows = {str(where): str(text) for where, text in manifest.get("unfit_rows", {}).items()}
            clusters = manifest.get("clusters")
            self.clusters = None if clusters is None else ClusterBook.from_json(clusters).check(self.book)
            self._check()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{folder / MANIFEST} is malformed: {error}") from error
        self._reader = ArrayReader(folder, self._files, verify)
        self._parts: dict[int, Part] = {}

    def _check(self) -> None:
        if len(self._entries) != self.book.num_parts:
            raise ValueError(f"the book has {self.book.num_parts} parts, and {len(self._entries)} are described")
        if list(self.book.node_offsets) != self.schema.node_types:
            raise ValueError(f"book and schema differ: {some(self.book.node_offsets)}, {some(self.schema.node_types)}")
        if list(self.book.edge_offsets) != self.schema.edge_types:
            raise ValueError(f"book and schema differ: {some(self.book.edge_offsets)}, {some(self.schema.edge_types)}")
        nodes = {t: list(of.data) for t, of in self.fingerprints.nodes.items()}
        edges = {t: list(of.data) for t, of in self.fingerprints.edges.items()}
        if nodes != {t: list(data) for t, data in self.schema.node_data.items()}:
            raise ValueError("schema and fingerprints of nodes differ")
        if edges != {t: list(data) for t, data in self.schema.edge_data.items()}:
            raise ValueError("schema and fingerprints of edges differ")
        if self.halo_hops < 1:
            raise ValueError(f"halo_hops must be at least 1, got {self.halo_hops}")

    @property
    def num_parts(self) -> int:
        return self.book.num_parts

    @property
    def trainers_per_part(self) -> int:
        return self.book.trainers_per_part

    @property
    def has_global_ids(self) -> bool:
        """Whether the global ids of original ids are stored, as they are since there are loaders of links on parts."""
        return all(nodes.get("global_ids") is not None for entry in self._entries for nodes in entry["nodes"])

    def part(self, index: int) -> Part:
        """Part `index`, opened and checked the first time it is asked for."""
        if not 0 <= index < self.num_parts:
            raise ValueError(f"part must be in [0, {self.num_parts}), got {index}")
        if index not in self._parts:
            try:
                self._parts[index] = Part(self, index, self._entries[index], self._reader)
            except (Malformed, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"{self.path / MANIFEST} is malformed: part {index}: {error}") from error
        return self._parts[index]

    def merge(self) -> Graph:
        """The whole graph again, in memory, in original ids: bit-equal to the source.

        Without stored edge ids the user's numbering of the edges is lost: edges are then numbered by position, and
        rows of edge data come in that order.
        """
        return merge_parts(self)

    def stored_bytes(self, index: int | None = None) -> dict[str, int]:
        """Bytes on disk by what they hold (indptr, indices, halo, original_ids, edge_ids, node_data, edge_data).

        Of one part, or of all; from the manifest alone. `original_ids` are both ways between original and global ids.
        """
        total = dict.fromkeys(("indptr", "indices", "halo", "original_ids", "edge_ids", "node_data", "edge_data"), 0)
        for entry in self._entries if index is None else [self._entries[index]]:
            for nodes in entry["nodes"]:
                for role in ("halo", "original_ids"):
                    total[role] += self._size(nodes[role])
                total["original_ids"] += self._size(nodes.get("global_ids"))
                total["node_data"] += sum(map(self._size, nodes["data"].values()))
            for edges in entry["edges"]:
                for role in ("indptr", "indices", "edge_ids"):
                    total[role] += self._size(edges[role])
                total["edge_ids"] += self._size(edges["edge_starts"]) + self._size(edges["global_starts"])
                total["edge_data"] += sum(map(self._size, edges["data"].values()))
        return total

    def _size(self, name: str | None) -> int:
        return 0 if name is None else int(self._files[name]["bytes"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{t}: {self.book.num_ids(t):,}" for t in self.schema.node_types)
        return f"Parts({str(self.path)!r}, {self.num_parts} x {self.trainers_per_part}, nodes {{{sizes}}})"
