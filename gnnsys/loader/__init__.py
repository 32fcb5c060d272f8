"""Loaders, on a graph in memory or spread over machines, and the batches they yield."""

from gnnsys.loader.batch import Batch, Store
from gnnsys.loader.join import Inputs, Sampled
from gnnsys.loader.link import LinkNeighborLoader
from gnnsys.loader.negatives import NegativeSampling
from gnnsys.loader.neighbor import NeighborLoader
from gnnsys.loader.options import PipelineOptions

__all__ = [
    "Batch",
    "Inputs",
    "LinkNeighborLoader",
    "NegativeSampling",
    "NeighborLoader",
    "PipelineOptions",
    "Sampled",
    "Store",
]
