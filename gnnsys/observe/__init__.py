"""What ran, when, and how much it moved: records that planners and reports read; cores and sizes as they are told."""

from gnnsys.observe.cores import num_local_ranks, num_usable_cores, shorten_spinning, usable_core_time
from gnnsys.observe.rates import UNLIMITED, bytes_per_second, format_rate
from gnnsys.observe.sizes import format_size, parse_size
from gnnsys.observe.trace import BatchFlow, BatchTrace, PassTrace, Span, Trace
from gnnsys.observe.unique_keys import unique_keys

__all__ = [
    "UNLIMITED",
    "BatchFlow",
    "BatchTrace",
    "PassTrace",
    "Span",
    "Trace",
    "bytes_per_second",
    "format_rate",
    "format_size",
    "num_local_ranks",
    "num_usable_cores",
    "parse_size",
    "shorten_spinning",
    "unique_keys",
    "usable_core_time",
]
