"""A graph in memory: schema, CSC, rows, where it comes from and how one is made up."""

from gnnsys.graph.graph import Graph, as_ids
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType, edge_type_key

__all__ = ["EDGE", "NODE", "EdgeType", "Graph", "NodeType", "as_ids", "edge_type_key"]
