"""Our own graph on disk: a directory with `manifest.json` and one `.npy` per array, opened memory-mapped.

Written beside its destination and renamed, so that a directory either is a whole graph or is not there. The manifest
names every file with its size and CRC-32; a file that was cut or altered is named when the graph is opened. No pickle.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from gnnsys.graph.arrays import ArrayReader, ArrayWriter
from gnnsys.graph.convert import as_graph
from gnnsys.graph.graph import Graph
from gnnsys.graph.manifest import GRAPH_FORMAT, MANIFEST, read_manifest, staged, write_manifest
from gnnsys.graph.schema import EdgeType, NodeType
from gnnsys.ops import CSC

FORMAT, VERSION = GRAPH_FORMAT, 1


def save(graph: Graph, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes `graph` (or a PyG or DGL one) to the directory `path`, which must not exist unless `overwrite`."""
    graph = as_graph(graph)
    graph.check_in_memory("saving a graph")
    with staged(path, overwrite=overwrite, format=FORMAT, what="a saved graph") as folder:
        _write(graph, folder)


def _write(graph: Graph, folder: Path) -> None:
    writer = ArrayWriter(folder)
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
        write_manifest(folder, manifest)
    except ValueError as error:
        raise ValueError(f"graph.{error}") from error


def load_saved(path: str | os.PathLike[str], *, verify: bool = True) -> Graph:
    """Opens a graph written by `save`; its arrays are memory maps, private to the process where written to.

    With `verify` every file is read once and compared with its checksum; without, sizes alone are compared.
    """
    folder = Path(path)
    manifest = read_manifest(folder, format=FORMAT, version=VERSION, what="a saved graph")
    reader = ArrayReader(folder, manifest["files"], verify)
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
