"""Layers and reference models on our ops: PyG's names, parameters and results, on an edge_index, a CSC or a block.

Every layer exposes its two halves: `transform`, dense and per row, and `aggregate`, sparse and over edges.
"""

from gnnsys.nn.gat import GATConv
from gnnsys.nn.gcn import GCNConv, whole_scales
from gnnsys.nn.gin import GINConv
from gnnsys.nn.models import GAT, GCN, GIN, RGCN, GraphSAGE, Stack, hop_prefixes
from gnnsys.nn.plain import has_hooks, is_bare_linear, is_bare_product, runs_as
from gnnsys.nn.rgcn import RGCNConv
from gnnsys.nn.sage import SAGEConv
from gnnsys.nn.structure import resolve

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "RGCN",
    "GATConv",
    "GCNConv",
    "GINConv",
    "GraphSAGE",
    "RGCNConv",
    "SAGEConv",
    "Stack",
    "has_hooks",
    "hop_prefixes",
    "is_bare_linear",
    "is_bare_product",
    "resolve",
    "runs_as",
    "whole_scales",
]
