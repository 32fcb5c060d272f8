"""Layers and reference models on our ops: PyG's names, parameters and results, on an edge_index, a CSC or a block.

Every layer exposes its two halves: `transform`, dense and per row, and `aggregate`, sparse and over edges.
"""

from gnnsys.nn.gat import GATConv
from gnnsys.nn.gcn import GCNConv
from gnnsys.nn.gin import GINConv
from gnnsys.nn.models import GAT, GCN, GIN, RGCN, GraphSAGE
from gnnsys.nn.rgcn import RGCNConv
from gnnsys.nn.sage import SAGEConv

__all__ = ["GAT", "GCN", "GIN", "RGCN", "GATConv", "GCNConv", "GINConv", "GraphSAGE", "RGCNConv", "SAGEConv"]
