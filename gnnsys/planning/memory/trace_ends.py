"""Why a trace cannot go on."""


class TraceEnds(ValueError):
    """The message names the operator and the remedy."""
