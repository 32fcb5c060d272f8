"""A graph in memory: schema, CSC, rows, where it comes from and how one is made up."""

from gnnsys.graph.expected import ExpectedAccuracy, expected_accuracy
from gnnsys.graph.generate import rmat, sbm, typed
from gnnsys.graph.graph import Graph, as_ids
from gnnsys.graph.rows import check_weight
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType, edge_type_key

__all__ = [
    "EDGE",
    "NODE",
    "EdgeType",
    "ExpectedAccuracy",
    "Graph",
    "NodeType",
    "as_ids",
    "check_weight",
    "edge_type_key",
    "expected_accuracy",
    "rmat",
    "sbm",
    "typed",
]
