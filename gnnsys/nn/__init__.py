"""Layers and reference models on our ops: PyG's names, parameters and results, on an edge_index, a CSC or a block.

Every layer exposes its two halves: `transform`, dense and per row, and `aggregate`, sparse and over edges. `GraphLayer`
says what a layer has; docs/layers.md how to add one. Decoders score links from the rows of their ends.
"""

from gnnsys.nn.convert_batch import to_homogeneous, to_typed
from gnnsys.nn.decoders import Bilinear, ComplEx, Decoder, DistMult, Dot, RotatE, TransE
from gnnsys.nn.gat import GATConv
from gnnsys.nn.gcn import GCNConv, whole_scales
from gnnsys.nn.gin import GINConv
from gnnsys.nn.halves import Dense, Halves, NarrowFirst, RowWeights
from gnnsys.nn.hetero import HeteroConv
from gnnsys.nn.hgt import HGTConv
from gnnsys.nn.input_encoder import InputEncoder
from gnnsys.nn.layer import GraphLayer
from gnnsys.nn.layer_inputs import resolve
from gnnsys.nn.link_losses import (
    binary_link_loss,
    margin_link_loss,
    self_adversarial_link_loss,
    softmax_link_loss,
)
from gnnsys.nn.models import GAT, GCN, GIN, RGCN, GraphSAGE
from gnnsys.nn.plain import (
    HOOKS,
    has_hooks,
    is_bare_linear,
    is_bare_product,
    is_batch_norm,
    is_untouched,
    methods_of,
    runs_as,
    why_whole,
)
from gnnsys.nn.rgat import RGATConv
from gnnsys.nn.rgcn import RGCNConv
from gnnsys.nn.sage import SAGEConv
from gnnsys.nn.stack import Stack, hop_prefixes
from gnnsys.nn.typed_inputs import module_key, resolve_typed
from gnnsys.nn.typed_models import HGT, RGAT, HeteroGAT, HeteroSAGE, TypedRGCN
from gnnsys.nn.typed_rgcn import TypedRGCNConv
from gnnsys.nn.typed_stack import TypedStack

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "HGT",
    "HOOKS",
    "RGAT",
    "RGCN",
    "Bilinear",
    "ComplEx",
    "Decoder",
    "Dense",
    "DistMult",
    "Dot",
    "GATConv",
    "GCNConv",
    "GINConv",
    "GraphLayer",
    "GraphSAGE",
    "HGTConv",
    "Halves",
    "HeteroConv",
    "HeteroGAT",
    "HeteroSAGE",
    "InputEncoder",
    "NarrowFirst",
    "RGATConv",
    "RGCNConv",
    "RotatE",
    "RowWeights",
    "SAGEConv",
    "Stack",
    "TransE",
    "TypedRGCN",
    "TypedRGCNConv",
    "TypedStack",
    "binary_link_loss",
    "has_hooks",
    "hop_prefixes",
    "is_bare_linear",
    "is_bare_product",
    "is_batch_norm",
    "is_untouched",
    "margin_link_loss",
    "methods_of",
    "module_key",
    "resolve",
    "resolve_typed",
    "runs_as",
    "self_adversarial_link_loss",
    "softmax_link_loss",
    "to_homogeneous",
    "to_typed",
    "whole_scales",
    "why_whole",
]
