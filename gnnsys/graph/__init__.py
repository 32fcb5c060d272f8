"""A graph in memory: schema, CSC, rows, where it comes from and how one is made up.

For users: `Graph`; `dataset` and `available_datasets`; `load`, `save` and `external_graph` (larger than memory);
`from_pyg`, `from_dgl`, `from_ogb`, `to_pyg`; `GraphIds`, which carry their numbering; `rmat`, `sbm`,
`planted_noise` and `typed_graph`, which are generated.

For other rooms: the words of a schema (`NODE`, `EDGE`, `NodeType`, `EdgeType`), ids and rows as users give them
(`as_ids`, `ids_of`, `numbered_ids`, `check_data`), names in error messages (`some`, `in_words`, `did_you_mean`),
and files that are whole or not there: arrays (`ArrayWriter`, `ArrayReader`), manifests (`staged`, `write_manifest`,
`read_manifest`), room on a disk; a graph in one block of memory that processes share (`pack_plan`, `unpack`).
"""

from gnnsys.graph.arrays import (
    ArrayReader,
    ArrayStream,
    ArrayWriter,
    chunk_rows,
    dtype_name,
    dtype_named,
    file_checksum,
)
from gnnsys.graph.best_accuracy import ExpectedAccuracy, expected_accuracy
from gnnsys.graph.convert import as_graph, check_ours, from_dgl, from_pyg, to_pyg
from gnnsys.graph.datasets import available_datasets, dataset, find_dataset, is_generated
from gnnsys.graph.disk_room import check_room, room_for
from gnnsys.graph.edge_sort import EdgeSort, RawFile
from gnnsys.graph.external import MIN_MEMORY, external_graph
from gnnsys.graph.files import load
from gnnsys.graph.generate import planted_noise, rmat, sbm, typed_graph
from gnnsys.graph.graph import Graph
from gnnsys.graph.graph_ids import (
    ORIGINAL,
    GraphIds,
    ambiguous_rows,
    check_numbering,
    check_order,
    check_rows_of_inputs,
    make_graph_ids,
    numbered_ids,
)
from gnnsys.graph.manifest import (
    MANIFEST,
    PARTS_FORMAT,
    check_target,
    manifest_checksum,
    read_manifest,
    staged,
    sync_folder,
    write_manifest,
)
from gnnsys.graph.names_in_errors import did_you_mean, in_words, some
from gnnsys.graph.npy import load_npy, load_npz_arrays, map_npy
from gnnsys.graph.ogb import from_ogb, from_ogb_dict
from gnnsys.graph.packed_graph import PackPlan, pack_plan, unpack
from gnnsys.graph.row_checks import UnfitRows, check_data, check_weight, is_source, unfit_rows, warn_of_unfit_rows
from gnnsys.graph.saved_graph import save
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType, edge_type_key
from gnnsys.graph.sparse_rows import sparse_rows_in
from gnnsys.graph.user_ids import IdsLike, as_ids, as_integers, as_links, chosen_ids, ids_of, ids_or_mask, is_column

# The old names, kept for one version.
available, typed = available_datasets, typed_graph

__all__ = [
    "EDGE",
    "MANIFEST",
    "MIN_MEMORY",
    "NODE",
    "ORIGINAL",
    "PARTS_FORMAT",
    "ArrayReader",
    "ArrayStream",
    "ArrayWriter",
    "EdgeSort",
    "EdgeType",
    "ExpectedAccuracy",
    "Graph",
    "GraphIds",
    "IdsLike",
    "NodeType",
    "PackPlan",
    "RawFile",
    "UnfitRows",
    "ambiguous_rows",
    "as_graph",
    "as_ids",
    "as_integers",
    "as_links",
    "available",
    "available_datasets",
    "check_data",
    "check_numbering",
    "check_order",
    "check_ours",
    "check_room",
    "check_rows_of_inputs",
    "check_target",
    "check_weight",
    "chosen_ids",
    "chunk_rows",
    "dataset",
    "did_you_mean",
    "dtype_name",
    "dtype_named",
    "edge_type_key",
    "expected_accuracy",
    "external_graph",
    "file_checksum",
    "find_dataset",
    "from_dgl",
    "from_ogb",
    "from_ogb_dict",
    "from_pyg",
    "ids_of",
    "ids_or_mask",
    "in_words",
    "is_column",
    "is_generated",
    "is_source",
    "load",
    "load_npy",
    "load_npz_arrays",
    "make_graph_ids",
    "manifest_checksum",
    "map_npy",
    "numbered_ids",
    "pack_plan",
    "planted_noise",
    "read_manifest",
    "rmat",
    "room_for",
    "save",
    "sbm",
    "some",
    "sparse_rows_in",
    "staged",
    "sync_folder",
    "to_pyg",
    "typed",
    "typed_graph",
    "unfit_rows",
    "unpack",
    "warn_of_unfit_rows",
    "write_manifest",
]
