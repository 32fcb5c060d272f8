"""Samplers: from seeds to the structure of a batch, on a graph in memory or in parts."""

from gnnsys.sampling.blocks import InEdges, sample_from_blocks, sample_neighbors, to_block
from gnnsys.sampling.cluster_sampler import ClusterSampler, cluster
from gnnsys.sampling.dist_graph import DistGraph, loader_context
from gnnsys.sampling.draw_rule import DrawRule, RuleSeeds, RuleSource
from gnnsys.sampling.edge_filter import (
    MESSAGE,
    SUPERVISION,
    TEST,
    VAL,
    EdgeFilter,
    LinkFilter,
    as_filter,
    check_reverse_mask,
    find_filter,
    reverse_of,
)
from gnnsys.sampling.edges_within import WithinRequest, edges_within, inner_edges
from gnnsys.sampling.fanouts import check_fanouts, check_no_idle_hop, idle_hop, is_fanout, seeds_alone
from gnnsys.sampling.guided import FILLS, GuidedSampler, GuideVersion, main_part
from gnnsys.sampling.induced import induced, with_edges
from gnnsys.sampling.kept_edges import KeptEdges, kept_edge_ids
from gnnsys.sampling.labor import LaborSampler
from gnnsys.sampling.layer_wise import FastGCNSampler, LadiesSampler, LayerWiseSampler
from gnnsys.sampling.lookups import Asked
from gnnsys.sampling.neighbor import NeighborSampler
from gnnsys.sampling.neighborhoods import AnyGraph, HopRequest, neighborhoods, to_device
from gnnsys.sampling.node_scores import NodeScores
from gnnsys.sampling.owners import part_bounds
from gnnsys.sampling.part_view import core_csc
from gnnsys.sampling.pinsage import PinSAGESampler, Visited, most_visited
from gnnsys.sampling.place import PLACES, Placed, check_place
from gnnsys.sampling.rules import RULES, find_rule
from gnnsys.sampling.saint import SaintEdgeSampler, SaintNodeSampler, SaintSampler, SaintWalkSampler
from gnnsys.sampling.sample import Block, Sample
from gnnsys.sampling.sampler import SampleKey, Sampler
from gnnsys.sampling.select import Mask, PartMasks, count_true, mask_column, select_true
from gnnsys.sampling.serialize import (
    check_sample,
    load_sample,
    sample_from_arrays,
    sample_from_bytes,
    sample_to_arrays,
    sample_to_bytes,
    save_sample,
)
from gnnsys.sampling.service import GraphService
from gnnsys.sampling.shadow import ShadowSampler
from gnnsys.sampling.subgraph_sampler import SubgraphSampler
from gnnsys.sampling.tables import graph_tables, part_rows
from gnnsys.sampling.visits import batch_visits, degree_visits, expected_visits, presampled_visits, sample_batches
from gnnsys.sampling.walks import metapath_walks, random_walks

__all__ = [
    "FILLS",
    "MESSAGE",
    "PLACES",
    "RULES",
    "SUPERVISION",
    "TEST",
    "VAL",
    "AnyGraph",
    "Asked",
    "Block",
    "ClusterSampler",
    "DistGraph",
    "DrawRule",
    "EdgeFilter",
    "FastGCNSampler",
    "GraphService",
    "GuideVersion",
    "GuidedSampler",
    "HopRequest",
    "InEdges",
    "KeptEdges",
    "LaborSampler",
    "LadiesSampler",
    "LayerWiseSampler",
    "LinkFilter",
    "Mask",
    "NeighborSampler",
    "NodeScores",
    "PartMasks",
    "PinSAGESampler",
    "Placed",
    "RuleSeeds",
    "RuleSource",
    "SaintEdgeSampler",
    "SaintNodeSampler",
    "SaintSampler",
    "SaintWalkSampler",
    "Sample",
    "SampleKey",
    "Sampler",
    "ShadowSampler",
    "SubgraphSampler",
    "Visited",
    "WithinRequest",
    "as_filter",
    "batch_visits",
    "check_fanouts",
    "check_no_idle_hop",
    "check_place",
    "check_reverse_mask",
    "check_sample",
    "cluster",
    "core_csc",
    "count_true",
    "degree_visits",
    "edges_within",
    "expected_visits",
    "find_filter",
    "find_rule",
    "graph_tables",
    "idle_hop",
    "induced",
    "inner_edges",
    "is_fanout",
    "kept_edge_ids",
    "load_sample",
    "loader_context",
    "main_part",
    "mask_column",
    "metapath_walks",
    "most_visited",
    "neighborhoods",
    "part_bounds",
    "part_rows",
    "presampled_visits",
    "random_walks",
    "reverse_of",
    "sample_batches",
    "sample_from_arrays",
    "sample_from_blocks",
    "sample_from_bytes",
    "sample_neighbors",
    "sample_to_arrays",
    "sample_to_bytes",
    "save_sample",
    "seeds_alone",
    "select_true",
    "to_block",
    "to_device",
    "with_edges",
]
