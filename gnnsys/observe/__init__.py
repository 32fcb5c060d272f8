"""What ran, when, and how much it moved: records that planners and reports read."""

from gnnsys.observe.trace import BatchTrace, Trace

__all__ = ["BatchTrace", "Trace"]
