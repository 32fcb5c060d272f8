"""Samplers: from seeds to the structure of a batch, on a graph in memory or in parts."""

from gnnsys.sampling.blocks import InEdges, sample_from_blocks, sample_neighbors, to_block
from gnnsys.sampling.dist_graph import DistGraph, loader_context
from gnnsys.sampling.draw_rule import RULES, DrawRule, RuleSource, find_rule
from gnnsys.sampling.fanouts import check_fanouts
from gnnsys.sampling.labor import LaborSampler
from gnnsys.sampling.layer_wise import FastGCNSampler, LadiesSampler, LayerWiseSampler
from gnnsys.sampling.neighbor import NeighborSampler
from gnnsys.sampling.neighborhoods import AnyGraph, HopRequest, neighborhoods, to_device
from gnnsys.sampling.owners import part_bounds
from gnnsys.sampling.part_view import core_csc
from gnnsys.sampling.place import PLACES, Placed, check_device, check_place, ranks_on_device
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
from gnnsys.sampling.tables import graph_tables, part_rows
from gnnsys.sampling.visits import batch_visits, degree_visits, expected_visits, presampled_visits, sample_batches

__all__ = [
    "PLACES",
    "RULES",
    "AnyGraph",
    "Block",
    "DistGraph",
    "DrawRule",
    "FastGCNSampler",
    "GraphService",
    "HopRequest",
    "InEdges",
    "LaborSampler",
    "LadiesSampler",
    "LayerWiseSampler",
    "Mask",
    "NeighborSampler",
    "PartMasks",
    "Placed",
    "RuleSource",
    "Sample",
    "SampleKey",
    "Sampler",
    "batch_visits",
    "check_device",
    "check_fanouts",
    "check_place",
    "check_sample",
    "core_csc",
    "count_true",
    "degree_visits",
    "expected_visits",
    "find_rule",
    "graph_tables",
    "load_sample",
    "loader_context",
    "mask_column",
    "neighborhoods",
    "part_bounds",
    "part_rows",
    "presampled_visits",
    "ranks_on_device",
    "sample_batches",
    "sample_from_arrays",
    "sample_from_blocks",
    "sample_from_bytes",
    "sample_neighbors",
    "sample_to_arrays",
    "sample_to_bytes",
    "save_sample",
    "select_true",
    "to_block",
    "to_device",
]
