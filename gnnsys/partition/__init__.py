"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification.

For users: `partition_graph` does all of it; `assign_parts` (with `PartitionOptions`) and `write_parts` are its two
halves. `open_parts` reads a directory of parts, `verify_parts` proves it, `inspect_parts` and `write_plot` describe it.

For other rooms: `Parts`, `Part` and `PartitionBook` say what is where (sampling, session), `place_parts` who serves it
(session). Names that begin with `check_`, `estimate_` and `plan_`, and those about memory, are for the command line;
the steps of a partitioner (`finest_level`, `multilevel_assignment`, `stream_assignment`) are for benchmarks.
"""

from gnnsys.observe import format_size, parse_size
from gnnsys.partition.adjacency import first_nodes
from gnnsys.partition.assign import Assigned, PartitionOptions, assign_parts, check_part_counts, plan_assignment
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.clusters import ClusterBook, Clustering, check_clusters, cut_clusters
from gnnsys.partition.communication import (
    CommunicationResult,
    CommunicationVolume,
    communication_volume,
    refine_communication,
)
from gnnsys.partition.constraints import Constraints, constraints_of
from gnnsys.partition.inspect import Inspection, inspect_parts
from gnnsys.partition.layout import check_parts_target, original_bounds, part_folder
from gnnsys.partition.levels import finest_level, flat_csc
from gnnsys.partition.memory import (
    LOAD_BYTES_PER_EDGE,
    MemoryEstimate,
    MemoryPlan,
    estimate_in_memory,
    estimate_streaming,
    least_memory,
    plan_memory,
)
from gnnsys.partition.multilevel import multilevel_assignment
from gnnsys.partition.part import Part
from gnnsys.partition.partition import Partitioned, check_halo_hops, partition_graph
from gnnsys.partition.partition_book import PartitionBook
from gnnsys.partition.parts_directory import Parts, open_parts
from gnnsys.partition.placement import Placement, place_parts
from gnnsys.partition.plot import check_plot_file, write_plot
from gnnsys.partition.relabel import id_dtype
from gnnsys.partition.remote_share import RemoteShare, expected_remote
from gnnsys.partition.streaming import StreamedParts, stream_assignment
from gnnsys.partition.verify import VerifyReport, verify_parts
from gnnsys.partition.write import write_parts

Options = PartitionOptions  # the old name, kept for one version

__all__ = [
    "LOAD_BYTES_PER_EDGE",
    "Assigned",
    "Assignment",
    "ClusterBook",
    "Clustering",
    "CommunicationResult",
    "CommunicationVolume",
    "Constraints",
    "Inspection",
    "MemoryEstimate",
    "MemoryPlan",
    "Options",
    "Part",
    "PartitionBook",
    "PartitionOptions",
    "Partitioned",
    "Parts",
    "Placement",
    "RemoteShare",
    "StreamedParts",
    "VerifyReport",
    "assign_parts",
    "check_clusters",
    "check_halo_hops",
    "check_part_counts",
    "check_parts_target",
    "check_plot_file",
    "communication_volume",
    "constraints_of",
    "cut_clusters",
    "estimate_in_memory",
    "estimate_streaming",
    "expected_remote",
    "finest_level",
    "first_nodes",
    "flat_csc",
    "format_size",
    "id_dtype",
    "inspect_parts",
    "least_memory",
    "multilevel_assignment",
    "open_parts",
    "original_bounds",
    "parse_size",
    "part_folder",
    "partition_graph",
    "place_parts",
    "plan_assignment",
    "plan_memory",
    "refine_communication",
    "stream_assignment",
    "verify_parts",
    "write_parts",
    "write_plot",
]
