"""A graph in memory: schema, CSC, rows, where it comes from and how one is made up."""

from gnnsys.graph.convert import as_graph, from_dgl, from_pyg, to_pyg
from gnnsys.graph.datasets import dataset
from gnnsys.graph.expected import ExpectedAccuracy, expected_accuracy
from gnnsys.graph.external import external_graph
from gnnsys.graph.files import load
from gnnsys.graph.generate import rmat, sbm, typed
from gnnsys.graph.graph import Graph
from gnnsys.graph.ids import as_ids, as_integers, as_links, ids_of, ids_or_mask
from gnnsys.graph.listing import some
from gnnsys.graph.ogb import from_ogb, from_ogb_dict
from gnnsys.graph.rows import check_data, check_weight, is_source
from gnnsys.graph.saved import save
from gnnsys.graph.schema import EDGE, NODE, EdgeType, NodeType, edge_type_key

__all__ = [
    "EDGE",
    "NODE",
    "EdgeType",
    "ExpectedAccuracy",
    "Graph",
    "NodeType",
    "as_graph",
    "as_ids",
    "as_integers",
    "as_links",
    "check_data",
    "check_weight",
    "dataset",
    "edge_type_key",
    "expected_accuracy",
    "external_graph",
    "from_dgl",
    "from_ogb",
    "from_ogb_dict",
    "from_pyg",
    "ids_of",
    "ids_or_mask",
    "is_source",
    "load",
    "rmat",
    "save",
    "sbm",
    "some",
    "to_pyg",
    "typed",
]
