"""Loaders on an in-memory graph, and the batches they yield."""

from gnnsys.loader.batch import Batch, Store
from gnnsys.loader.link import LinkNeighborLoader
from gnnsys.loader.negatives import NegativeSampling
from gnnsys.loader.neighbor import NeighborLoader

__all__ = ["Batch", "LinkNeighborLoader", "NegativeSampling", "NeighborLoader", "Store"]
