"""Our own graph on disk: a directory with `manifest.json` and one `.npy` per array, opened memory-mapped.

Written beside its destination and renamed, so that a directory either is a whole graph or is not there. The manifest
names every file with its size and CRC-32; a file that was cut or altered is named when the graph is opened. No pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.graph import Graph
from gnnsys.graph.schema import EdgeType, NodeType
from gnnsys.ops import CSC

FORMAT, VERSION = "gnnsys-graph", 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 24

# numpy has no bfloat16: stored as the same bits, and named in the manifest.
_AS_BITS = {torch.bfloat16: torch.int16}


def save(graph: Graph, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes `graph` to the directory `path`, which must not exist unless `overwrite`."""
    target = Path(path)
    if target.exists() and not overwrite:
        raise ValueError(f"path {str(target)!r} exists: choose another or pass overwrite=True")
    if target.exists() and not (target / MANIFEST).is_file():
        raise ValueError(f"path {str(target)!r} is not a saved graph, and only a saved graph is overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(graph, staging)
        _replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _replace(staging: Path, target: Path) -> None:
    """Between the two renames of an overwrite the old graph is `<name>.old`: never half of one, never neither."""
    if target.exists():
        old = target.with_name(f"{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        staging.rename(target)
        shutil.rmtree(old)
    else:
        staging.rename(target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Makes the names in a directory last through a power cut, as fsync does a file's content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(graph: Graph, folder: Path) -> None:
    writer = _Writer(folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "info": graph.info,
        "nodes": [
            {
                "type": node_type,
                "num_nodes": graph.num_nodes(node_type),
                "data": {name: writer.add(rows) for name, rows in graph.node_data[node_type].items()},
            }
            for node_type in graph.node_types
        ],
        "edges": [
            {
                "type": list(edge_type),
                "indptr": writer.add(graph.csc(edge_type).indptr),
                "indices": writer.add(graph.csc(edge_type).indices),
                "edge_ids": writer.add(graph.csc(edge_type).edge_ids),
                "data": {name: writer.add(rows) for name, rows in graph.edge_data[edge_type].items()},
            }
            for edge_type in graph.edge_types
        ],
        "files": writer.files,
    }
    try:
        manifest["crc32"] = _manifest_checksum(manifest)
    except TypeError as error:
        raise ValueError(f"graph.info must hold plain JSON values: {error}") from error
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


class _Writer:
    """Writes arrays under numbers (names are the user's and need not be file names) and remembers what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}

    def add(self, rows: Tensor | None) -> str | None:
        if rows is None:
            return None
        name = f"{len(self.files):04d}.npy"
        stored = rows.detach().contiguous()
        bits = _AS_BITS.get(stored.dtype)
        array = stored.view(bits).numpy() if bits else stored.numpy()
        with open(self.folder / name, "wb") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = {
            "bytes": (self.folder / name).stat().st_size,
            "crc32": _checksum(self.folder / name),
            "dtype": str(rows.dtype).removeprefix("torch."),
        }
        return name


def load_saved(path: str | os.PathLike[str], *, verify: bool = True) -> Graph:
    """Opens a graph written by `save`; its arrays are memory maps, private to the process where written to.

    With `verify` every file is read once and compared with its checksum; without, sizes alone are compared.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    reader = _Reader(folder, manifest["files"], verify)
    num_nodes: dict[NodeType, int] = {}
    node_data: dict[NodeType, dict[str, Tensor]] = {}
    csc: dict[EdgeType, CSC] = {}
    edge_data: dict[EdgeType, dict[str, Tensor]] = {}
    try:
        for entry in manifest["nodes"]:
            num_nodes[entry["type"]] = int(entry["num_nodes"])
            node_data[entry["type"]] = {name: reader.array(file) for name, file in entry["data"].items()}
        for entry in manifest["edges"]:
            src, relation, dst = entry["type"]
            edge_ids = None if entry["edge_ids"] is None else reader.array(entry["edge_ids"])
            csc[src, relation, dst] = CSC(
                reader.array(entry["indptr"]), reader.array(entry["indices"]), num_nodes[src], edge_ids
            )
            edge_data[src, relation, dst] = {name: reader.array(file) for name, file in entry["data"].items()}
        info = dict(manifest["info"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST} is malformed: {error!r}") from error
    return Graph(num_nodes, csc, node_data, edge_data, info)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} is not a saved graph: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is cut or altered: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a {FORMAT}")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{file} has version {manifest.get('version')}, this gnnsys reads version {VERSION}")
    if manifest.pop("crc32", None) != _manifest_checksum(manifest):
        raise ValueError(f"{file} does not match its checksum: it was altered")
    return manifest


class _Reader:
    """Maps the files a manifest names, after comparing them with it."""

    def __init__(self, folder: Path, files: dict[str, Any], verify: bool) -> None:
        self.folder = folder
        self.files = files
        self.verify = verify

    def array(self, name: str) -> Tensor:
        entry, file = self.files[name], self.folder / name
        if Path(name).name != name:
            raise ValueError(f"{self.folder / MANIFEST} names {name!r}, which is not a file of this directory")
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{file} has {size} bytes, {MANIFEST} says {entry['bytes']}: it was cut or altered")
        if self.verify and _checksum(file) != entry["crc32"]:
            raise ValueError(f"{file} does not match its checksum: it was altered")
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.folder / MANIFEST}: {name} has unknown dtype {entry['dtype']!r}")
        array = np.load(file, mmap_mode="c", allow_pickle=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # empty arrays cannot be mapped and come read-only
            rows = torch.from_numpy(np.asarray(array))
        return rows.view(dtype) if dtype in _AS_BITS else rows


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
