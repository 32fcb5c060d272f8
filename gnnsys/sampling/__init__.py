"""Samplers: from seeds to the structure of a batch, on a graph in memory or in parts."""

from gnnsys.sampling.blocks import InEdges, sample_from_blocks, sample_neighbors, to_block
from gnnsys.sampling.dist_graph import DistGraph
from gnnsys.sampling.neighbor import NeighborSampler, SampleKey
from gnnsys.sampling.neighborhoods import AnyGraph, neighborhoods
from gnnsys.sampling.sample import Block, Sample
from gnnsys.sampling.service import GraphService
from gnnsys.sampling.sources import check_fanouts
from gnnsys.sampling.tables import graph_tables, part_rows
from gnnsys.sampling.visits import degree_visits, expected_visits, presampled_visits, sample_batches

__all__ = [
    "AnyGraph",
    "Block",
    "DistGraph",
    "GraphService",
    "InEdges",
    "NeighborSampler",
    "Sample",
    "SampleKey",
    "check_fanouts",
    "degree_visits",
    "expected_visits",
    "graph_tables",
    "neighborhoods",
    "part_rows",
    "presampled_visits",
    "sample_batches",
    "sample_from_blocks",
    "sample_neighbors",
    "to_block",
]
