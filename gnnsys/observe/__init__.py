"""What ran, when, and how much it moved: records that planners and reports read."""

from gnnsys.observe.trace import BatchTrace, PassTrace, Span, Trace

__all__ = ["BatchTrace", "PassTrace", "Span", "Trace"]
