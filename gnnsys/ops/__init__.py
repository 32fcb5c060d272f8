"""The Python face of csrc/: typed functions, autograd and fake kernels over `torch.ops.gnnsys.*`."""

from gnnsys.ops.aggregate import sddmm, spmm, spmm_add
from gnnsys.ops.attention import edge_softmax, gat_aggregate
from gnnsys.ops.bucket import Buckets, bucket_ids
from gnnsys.ops.buffers import BufferPool
from gnnsys.ops.cached import gather_cached
from gnnsys.ops.csc import CSC, WEIGHT, EdgeData, WholeDegrees, WholeWeights
from gnnsys.ops.dropout import dropout_rows
from gnnsys.ops.generate import class_features, planted_edges, planted_labels, random_permutation, rmat_edges
from gnnsys.ops.parse import parse_table
from gnnsys.ops.parted import PartedCSC, sample_parts
from gnnsys.ops.raw import as_bytes
from gnnsys.ops.relabel import IdTable, compact, compact_scratch
from gnnsys.ops.rows import gather_rows, scatter_rows
from gnnsys.ops.sampling import Neighbors, find_edges, sample_hops, sample_neighbors, stream_key
from gnnsys.ops.stitch import Piece, name_neighbors, stitch
from gnnsys.ops.store import (
    fill_uniform,
    gather_parts,
    move_rows,
    num_versions,
    sparse_adagrad_step,
    sparse_adam_step,
    update_rows,
)
from gnnsys.ops.stream import NodeRun, PairTable, drop_pages, stream_cluster, stream_cut, stream_refine
from gnnsys.ops.structure import bfs_order, degrees, expand_indptr, in_subgraph, induced_subgraph

__all__ = [
    "CSC",
    "WEIGHT",
    "Buckets",
    "BufferPool",
    "EdgeData",
    "IdTable",
    "Neighbors",
    "NodeRun",
    "PairTable",
    "PartedCSC",
    "Piece",
    "WholeDegrees",
    "WholeWeights",
    "as_bytes",
    "bfs_order",
    "bucket_ids",
    "class_features",
    "compact",
    "compact_scratch",
    "degrees",
    "drop_pages",
    "dropout_rows",
    "edge_softmax",
    "expand_indptr",
    "fill_uniform",
    "find_edges",
    "gat_aggregate",
    "gather_cached",
    "gather_parts",
    "gather_rows",
    "in_subgraph",
    "induced_subgraph",
    "move_rows",
    "name_neighbors",
    "num_versions",
    "parse_table",
    "planted_edges",
    "planted_labels",
    "random_permutation",
    "rmat_edges",
    "sample_hops",
    "sample_neighbors",
    "sample_parts",
    "scatter_rows",
    "sddmm",
    "sparse_adagrad_step",
    "sparse_adam_step",
    "spmm",
    "spmm_add",
    "stitch",
    "stream_cluster",
    "stream_cut",
    "stream_key",
    "stream_refine",
    "update_rows",
]
