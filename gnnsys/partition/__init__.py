"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.adjacency import first_nodes
from gnnsys.partition.assign import Assigned, PartitionOptions, assign_parts, check_counts, plan_assignment
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.communication import (
    CommunicationResult,
    CommunicationVolume,
    communication_volume,
    refine_communication,
)
from gnnsys.partition.constraints import Constraints, constraints_of
from gnnsys.partition.inspect import Inspection, inspect_parts
from gnnsys.partition.layout import FORMAT, WHAT, original_bounds, part_folder
from gnnsys.partition.levels import finest_level, flat_csc
from gnnsys.partition.memory import (
    LOAD_BYTES_PER_EDGE,
    Estimate,
    MemoryPlan,
    estimate_in_memory,
    estimate_streaming,
    format_size,
    least_memory,
    parse_size,
    plan_memory,
)
from gnnsys.partition.multilevel import multilevel
from gnnsys.partition.part import Part
from gnnsys.partition.partition import Partitioned, check_halo_hops, partition_graph
from gnnsys.partition.partition_book import PartitionBook
from gnnsys.partition.parts_directory import Parts, open_parts
from gnnsys.partition.placement import Placement, place_parts
from gnnsys.partition.plot import check_plot_file, write_plot
from gnnsys.partition.relabel import id_dtype
from gnnsys.partition.remote_share import Remote, expected_remote
from gnnsys.partition.streaming import StreamedParts, stream_assignment
from gnnsys.partition.verify import VerifyReport, verify_parts
from gnnsys.partition.write import write_parts

Options = PartitionOptions  # the old name, kept for one version

__all__ = [
    "FORMAT",
    "LOAD_BYTES_PER_EDGE",
    "WHAT",
    "Assigned",
    "Assignment",
    "CommunicationResult",
    "CommunicationVolume",
    "Constraints",
    "Estimate",
    "Inspection",
    "MemoryPlan",
    "Options",
    "Part",
    "PartitionBook",
    "PartitionOptions",
    "Partitioned",
    "Parts",
    "Placement",
    "Remote",
    "StreamedParts",
    "VerifyReport",
    "assign_parts",
    "check_counts",
    "check_halo_hops",
    "check_plot_file",
    "communication_volume",
    "constraints_of",
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
    "multilevel",
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
