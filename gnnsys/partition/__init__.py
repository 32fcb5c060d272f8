"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assign import Assigned, Options, assign_parts
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.book import PartitionBook
from gnnsys.partition.inspect import Inspection, inspect_parts
from gnnsys.partition.part import Part
from gnnsys.partition.partition import Partitioned, partition_graph
from gnnsys.partition.parts import Parts, open_parts
from gnnsys.partition.plot import write_plot
from gnnsys.partition.remote import Remote, expected_remote
from gnnsys.partition.verify import VerifyReport, verify_parts
from gnnsys.partition.write import write_parts

__all__ = [
    "Assigned",
    "Assignment",
    "Inspection",
    "Options",
    "Part",
    "PartitionBook",
    "Partitioned",
    "Parts",
    "Remote",
    "VerifyReport",
    "assign_parts",
    "expected_remote",
    "inspect_parts",
    "open_parts",
    "partition_graph",
    "verify_parts",
    "write_parts",
    "write_plot",
]
