"""Loaders, on a graph in memory or spread over machines, and the batches they yield."""

from gnnsys.loader.batch import Batch, Store
from gnnsys.loader.device import resolve
from gnnsys.loader.fetch import Fetch, Names
from gnnsys.loader.identity import NAME, check_made_of, check_sampling, checksum, graph_identity, plain
from gnnsys.loader.join import Inputs, Sampled
from gnnsys.loader.link import LinkNeighborLoader, edge_index_of, named_links, resolve_inputs
from gnnsys.loader.links import EdgeInputs, LinkReader, Links, LinkSeeder, LinkSeeds, make_seeder, supervision_edges
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.neighbor import NeighborLoader, check_times
from gnnsys.loader.options import PipelineOptions
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import induced, reverse_of

__all__ = [
    "NAME",
    "Batch",
    "EdgeInputs",
    "Fetch",
    "Inputs",
    "LinkNeighborLoader",
    "LinkReader",
    "LinkSeeder",
    "LinkSeeds",
    "Links",
    "Names",
    "NegativeSampling",
    "NeighborLoader",
    "PipelineOptions",
    "Sampled",
    "Schedule",
    "Store",
    "Ticket",
    "check_made_of",
    "check_sampling",
    "check_times",
    "checksum",
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
