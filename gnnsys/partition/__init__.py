"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assignment import Assignment
from gnnsys.partition.communication import (
    CommunicationResult,
    CommunicationVolume,
    communication_volume,
    refine_communication,
)

__all__ = [
    "Assignment",
    "CommunicationResult",
    "CommunicationVolume",
    "communication_volume",
    "refine_communication",
]
