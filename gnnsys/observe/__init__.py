"""What ran, when, and how much it moved: records that planners and reports read."""

from gnnsys.observe.cores import num_local_ranks, num_usable_cores
from gnnsys.observe.trace import BatchTrace, PassTrace, Span, Trace

__all__ = ["BatchTrace", "PassTrace", "Span", "Trace", "num_local_ranks", "num_usable_cores"]
