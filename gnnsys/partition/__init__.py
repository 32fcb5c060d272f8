"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assignment import Assignment

__all__ = ["Assignment"]
