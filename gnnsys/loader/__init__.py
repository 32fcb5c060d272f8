"""Loaders, on a graph in memory or spread over machines, and the batches they yield."""

from gnnsys.loader.batch import Batch, TypeValues
from gnnsys.loader.batch_message import WantedBatch
from gnnsys.loader.batch_negatives import InBatchNegatives, JointNegatives
from gnnsys.loader.batch_service import BatchMaker, BatchService
from gnnsys.loader.batches_elsewhere import SamplerPeers
from gnnsys.loader.default_threads import LoadingWork, default_num_threads
from gnnsys.loader.described_loader import DescribedLoader
from gnnsys.loader.device_copy import resolve
from gnnsys.loader.fetch import Fetch, Names
from gnnsys.loader.given_links import edge_index_of, named_links, resolve_inputs
from gnnsys.loader.hard_negatives import HardNegatives, ScoredNegatives
from gnnsys.loader.identity import NAME, check_made_of, check_sampling, checksum, graph_identity, plain
from gnnsys.loader.in_turn import BatchInTurn, KeptSamples, in_turn
from gnnsys.loader.known_words import knows_words, words_of
from gnnsys.loader.link_inputs import make_seeder
from gnnsys.loader.link_loader import LinkNeighborLoader
from gnnsys.loader.link_seeds import LinkSeeder, LinkSeeds
from gnnsys.loader.links import EdgeInputs, Exclusion, LinkReader, Links, check_link_weights, supervision_edges
from gnnsys.loader.loader_guide import BatchNumbers, LoaderGuide
from gnnsys.loader.local_negatives import LocalNegatives
from gnnsys.loader.negative_kinds import Drawn, LinkEnd, NegativeKind, NegativesWanted, NodeDrawer
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.neighbor_loader import NeighborLoader
from gnnsys.loader.options import PipelineOptions, as_values, check_seed
from gnnsys.loader.padding import PadSizes
from gnnsys.loader.resumable import warn_of_no_batch
from gnnsys.loader.run_trace import RunTrace
from gnnsys.loader.same_options import SameOptions
from gnnsys.loader.sampled import Inputs, Sampled
from gnnsys.loader.sampling_options import check_times
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import induced, reverse_of
from gnnsys.loader.subgraph_loader import SubgraphLoader
from gnnsys.loader.weighted_negatives import DegreeNegatives, UniformNegatives

# The name of the version before this one.
Store = TypeValues

__all__ = [
    "NAME",
    "Batch",
    "BatchInTurn",
    "BatchMaker",
    "BatchNumbers",
    "BatchService",
    "DegreeNegatives",
    "DescribedLoader",
    "Drawn",
    "EdgeInputs",
    "Exclusion",
    "Fetch",
    "HardNegatives",
    "InBatchNegatives",
    "Inputs",
    "JointNegatives",
    "KeptSamples",
    "LinkEnd",
    "LinkNeighborLoader",
    "LinkReader",
    "LinkSeeder",
    "LinkSeeds",
    "Links",
    "LoaderGuide",
    "LoadingWork",
    "LocalNegatives",
    "Names",
    "NegativeKind",
    "NegativeSampling",
    "NegativesWanted",
    "NeighborLoader",
    "NodeDrawer",
    "PadSizes",
    "PipelineOptions",
    "RunTrace",
    "SameOptions",
    "Sampled",
    "SamplerPeers",
    "Schedule",
    "ScoredNegatives",
    "Store",
    "SubgraphLoader",
    "Ticket",
    "TypeValues",
    "UniformNegatives",
    "WantedBatch",
    "as_values",
    "check_link_weights",
    "check_made_of",
    "check_sampling",
    "check_seed",
    "check_times",
    "checksum",
    "default_num_threads",
    "edge_index_of",
    "graph_identity",
    "in_turn",
    "induced",
    "knows_words",
    "make_seeder",
    "named_links",
    "negative_stream",
    "plain",
    "resolve",
    "resolve_inputs",
    "reverse_of",
    "supervision_edges",
    "warn_of_no_batch",
    "words_of",
]
