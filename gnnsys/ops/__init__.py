"""The Python face of csrc/: typed functions, autograd and fake kernels over `torch.ops.gnnsys.*`.

For users: `CSC` and what computes on one (`spmm`, `sddmm`, `edge_softmax`, `gat_aggregate`, `sample_neighbors`,
`sample_hops`, `in_subgraph`, `induced_subgraph`), `gather_rows` and `scatter_rows`, `compact` (relabelling).

For other rooms, by who uses them: `cluster_nodes`, `contract_clusters`, `refine_cut`, `stream_*`, `*_volume`,
`fingerprint_*` and `mark_*` (partition); `*_edges`, `planted_labels`, `parse_table` (graph); `PartedCSC`,
`PartNeighbors`, `HopStructure`, `JoinedParts`, `stitch_neighbors`, `bucket_ids`, `sample_guided` (sampling);
`move_rows`, `update_rows`, `widen_rows`, `fill_columns`, `sparse_*_step`, `gather_cached`, `read_table`, `PageLock`
(store); `BufferPool`, `DeviceReads` (loader); `STRUCTURES` (what layers derive from a structure), `relation_conv` and
`RelationGroups` (typed layers); `simulate_training` and `longest_training_path` (planning).
`native` is the library itself, for ops that have no typed face; `workspace_bytes` tells what an op takes beside its
outputs, for those who plan memory (store, fullgraph).
"""

from gnnsys.ops._allocation_order import AllocationStep, allocation_order
from gnnsys.ops._features import sum_dtype
from gnnsys.ops._library import HAS_CUDA_KERNELS, SIMD_LEVEL, WHY_NO_KERNELS, native
from gnnsys.ops._workspace import told_workspaces, workspace_bytes
from gnnsys.ops.aggregate import (
    inverse_degrees,
    narrow_weights,
    scaled_spmm,
    sddmm,
    spmm,
    spmm_add,
    spmm_and_own,
    spmm_out,
)
from gnnsys.ops.attention import edge_softmax, gat_aggregate
from gnnsys.ops.bucket import Buckets, bucket_ids
from gnnsys.ops.buffers import BufferPool
from gnnsys.ops.cached_rows import gather_cached
from gnnsys.ops.copies_together import to_host_together
from gnnsys.ops.csc import (
    CSC,
    WEIGHT,
    EdgeData,
    WholeDegrees,
    WholeWeights,
    check_edge_index,
    is_captured,
    sorted_structures,
)
from gnnsys.ops.device_kind import ASK_DOCTOR, as_if_on, check_device, device_kind, planned_kind
from gnnsys.ops.device_reads import DeviceReads
from gnnsys.ops.dropout import dropout_rows
from gnnsys.ops.generate import class_features, planted_edges, planted_labels, random_permutation, rmat_edges
from gnnsys.ops.guided import sample_guided
from gnnsys.ops.hops import HopRelation, HopStructure, JoinedParts, hop_workspaces, sample_hops
from gnnsys.ops.host_products import HostMultiplier, whole_table
from gnnsys.ops.induced import InnerEdges, draw_below, edges_within, induced_coo
from gnnsys.ops.labor import normalize_rows, sample_labor, sample_labor_importance, source_words
from gnnsys.ops.late_rows import LateRows
from gnnsys.ops.memo import BY_DESTINATION, IN_REPLAYS, NOT_KNOWN, STRUCTURES, ReplayedEdges
from gnnsys.ops.multilevel import (
    Level,
    Neighbors32,
    RefinedCut,
    both_directions,
    cluster_nodes,
    contract_clusters,
    refine_cut,
)
from gnnsys.ops.multiplied_rows import MultipliedRows, RowsOnHost
from gnnsys.ops.narrow_rows import fill_columns, widen_rows
from gnnsys.ops.page_lock import PageLock
from gnnsys.ops.parse import parse_table
from gnnsys.ops.part_structure import (
    Halo,
    add_fingerprints,
    collect_halo,
    empty_bits,
    fingerprint_edge_rows,
    fingerprint_edges,
    fingerprint_rows,
    local_columns,
    mark_halo,
    mark_ids,
)
from gnnsys.ops.parted_csc import PartedCSC, sample_parts
from gnnsys.ops.partition_volume import VolumeSearch, even_out_volume, refine_volume, traffic_matrix
from gnnsys.ops.placement import WALK_COSTS, PlacementWalk, placement_bounds, walk_placements
from gnnsys.ops.raw import as_bytes
from gnnsys.ops.relabel import IdTable, compact, compact_scratch
from gnnsys.ops.relation_groups import RelationGroups, group_by_type, group_structures, owners_of, pairs_of
from gnnsys.ops.relation_sums import Relation, relation_conv
from gnnsys.ops.rows import gather_rows, read_rows, scatter_rows
from gnnsys.ops.sampling import Neighbors, find_edges, sample_neighbors, stream_key
from gnnsys.ops.small_rows import Bounds, MessageFront, RawRows, address_of, gather_bytes, place_bytes, split_ids
from gnnsys.ops.stitch import PartNeighbors, name_neighbors, stitch_neighbors
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
from gnnsys.ops.summed_rows import SUMMED, SummedRows, SumsOf
from gnnsys.ops.table_rows import read_table
from gnnsys.ops.training_jobs import SimulatedTimes, longest_training_path, simulate_training
from gnnsys.ops.walks import COIN_SIDES, MAX_WALKS, count_visits, random_walks

__all__ = [
    "ASK_DOCTOR",
    "BY_DESTINATION",
    "COIN_SIDES",
    "CSC",
    "HAS_CUDA_KERNELS",
    "IN_REPLAYS",
    "MAX_WALKS",
    "NOT_KNOWN",
    "SIMD_LEVEL",
    "STRUCTURES",
    "SUMMED",
    "WALK_COSTS",
    "WEIGHT",
    "WHY_NO_KERNELS",
    "AllocationStep",
    "Bounds",
    "Buckets",
    "BufferPool",
    "DeviceReads",
    "EdgeData",
    "Halo",
    "HopRelation",
    "HopStructure",
    "HostMultiplier",
    "IdTable",
    "InnerEdges",
    "JoinedParts",
    "LateRows",
    "Level",
    "MessageFront",
    "MultipliedRows",
    "Neighbors",
    "Neighbors32",
    "NodeRun",
    "PageLock",
    "PairTable",
    "PartNeighbors",
    "PartedCSC",
    "PlacementWalk",
    "RawRows",
    "RefinedCut",
    "Relation",
    "RelationGroups",
    "ReplayedEdges",
    "RowsOnHost",
    "SimulatedTimes",
    "SummedRows",
    "SumsOf",
    "VolumeSearch",
    "WholeDegrees",
    "WholeWeights",
    "add_fingerprints",
    "address_of",
    "allocation_order",
    "as_bytes",
    "as_if_on",
    "bfs_order",
    "both_directions",
    "bucket_ids",
    "check_device",
    "check_edge_index",
    "class_features",
    "cluster_nodes",
    "collect_halo",
    "compact",
    "compact_scratch",
    "contract_clusters",
    "count_visits",
    "degrees",
    "device_kind",
    "draw_below",
    "drop_pages",
    "dropout_rows",
    "edge_softmax",
    "edges_within",
    "empty_bits",
    "even_out_volume",
    "expand_indptr",
    "fill_columns",
    "fill_uniform",
    "find_edges",
    "fingerprint_edge_rows",
    "fingerprint_edges",
    "fingerprint_rows",
    "gat_aggregate",
    "gather_bytes",
    "gather_cached",
    "gather_parts",
    "gather_rows",
    "group_by_type",
    "group_structures",
    "hop_workspaces",
    "in_subgraph",
    "induced_coo",
    "induced_subgraph",
    "inverse_degrees",
    "is_captured",
    "local_columns",
    "longest_training_path",
    "mark_halo",
    "mark_ids",
    "move_rows",
    "name_neighbors",
    "narrow_weights",
    "native",
    "normalize_rows",
    "num_versions",
    "owners_of",
    "pairs_of",
    "parse_table",
    "place_bytes",
    "placement_bounds",
    "planned_kind",
    "planted_edges",
    "planted_labels",
    "random_permutation",
    "random_walks",
    "read_rows",
    "read_table",
    "refine_cut",
    "refine_volume",
    "relation_conv",
    "rmat_edges",
    "sample_guided",
    "sample_hops",
    "sample_labor",
    "sample_labor_importance",
    "sample_neighbors",
    "sample_parts",
    "scaled_spmm",
    "scatter_rows",
    "sddmm",
    "simulate_training",
    "sorted_structures",
    "source_words",
    "sparse_adagrad_step",
    "sparse_adam_step",
    "split_ids",
    "spmm",
    "spmm_add",
    "spmm_and_own",
    "spmm_out",
    "stitch_neighbors",
    "stream_cluster",
    "stream_cut",
    "stream_key",
    "stream_refine",
    "sum_dtype",
    "to_host_together",
    "told_workspaces",
    "traffic_matrix",
    "update_rows",
    "walk_placements",
    "whole_table",
    "widen_rows",
    "workspace_bytes",
]
