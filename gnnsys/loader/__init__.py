"""Loaders, on a graph in memory or spread over machines, and the batches they yield."""

from gnnsys.loader.batch import Batch, TypeValues
from gnnsys.loader.default_threads import LoadingWork, default_num_threads
from gnnsys.loader.device_copy import resolve
from gnnsys.loader.fetch import Fetch, Names
from gnnsys.loader.identity import NAME, check_made_of, check_sampling, checksum, graph_identity, plain
from gnnsys.loader.link_loader import LinkNeighborLoader, edge_index_of, named_links, resolve_inputs
from gnnsys.loader.link_seeds import (
    EdgeInputs,
    LinkReader,
    Links,
    LinkSeeder,
    LinkSeeds,
    make_seeder,
    supervision_edges,
)
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.neighbor_loader import BatchNumbers, LoaderGuide, NeighborLoader, check_times
from gnnsys.loader.options import PipelineOptions
from gnnsys.loader.padding import PadSizes
from gnnsys.loader.sampled import Inputs, Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import induced, reverse_of
from gnnsys.loader.subgraph_loader import SubgraphLoader

# The name of the version before this one.
Store = TypeValues

__all__ = [
    "NAME",
    "Batch",
    "BatchNumbers",
    "EdgeInputs",
    "Fetch",
    "Inputs",
    "LinkNeighborLoader",
    "LinkReader",
    "LinkSeeder",
    "LinkSeeds",
    "Links",
    "LoaderGuide",
    "LoadingWork",
    "Names",
    "NegativeSampling",
    "NeighborLoader",
    "PadSizes",
    "PipelineOptions",
    "Sampled",
    "Schedule",
    "Store",
    "SubgraphLoader",
    "Ticket",
    "TypeValues",
    "check_made_of",
    "check_sampling",
    "check_times",
    "checksum",
    "default_num_threads",
    "edge_index_of",
    "graph_identity",
    "induced",
    "make_seeder",
    "named_links",
    "negative_stream",
    "plain",
    "resolve",
    "resolve_inputs",
    "reverse_of",
    "supervision_edges",
]
