"""The operators of a training step, and the sizes that they are asked about.

An operator's `quantities` are what takes time (`quantities.py`). A cost is a sum of some of them, with coefficients
that are never negative. Which ones, the leave-one-out errors of a machine's own measurements decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gnnsys.planning.costs import quantities as q
from gnnsys.planning.costs.quantities import LINE, SECTOR, CostContext, Quantities, Sizes

__all__ = ["BUS", "CORES", "LINE", "OPERATORS", "SECTOR", "CostContext", "Operator", "find_operator"]

CORES, BUS = "cores", "bus"


@dataclass(frozen=True)
class Operator:
    """`sizes` must be given, `optional` ones have values for whoever does not know.

    `basic` quantities are summed where there are too few points to choose. `shares` are what several ranks of a machine
    have in common. `by_width` is the size that kernels have code of their own for some values of.
    """

    name: str
    sizes: tuple[str, ...]
    quantities: Callable[[Sizes, CostContext], Quantities]
    basic: tuple[str, ...]
    optional: Mapping[str, float] = field(default_factory=dict)
    shares: frozenset[str] = frozenset()
    by_width: str | None = None

    def checked(self, given: Sizes) -> dict[str, float]:
        """All sizes, with what was left out; ValueError for unknown, missing and negative ones."""
        unknown = [name for name in given if name not in self.sizes and name not in self.optional]
        missing = [name for name in self.sizes if name not in given]
        if unknown or missing:
            what = f"has no size {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
            known = ", ".join((*self.sizes, *(f"{name}={value:g}" for name, value in self.optional.items())))
            raise ValueError(f"{self.name!r} {what}: its sizes are {known}")
        for name, value in given.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} of {self.name!r} must be a number that is not negative, got {value!r}")
        return {**self.optional, **given}


_OF_GRAPH = {"graph_bytes": 1e15}  # more than any cache has
_OF_TABLE: dict[str, float] = {"table_rows": 0}
_OF_SPMM: dict[str, float] = {"itemsize": 4, "sources": 0}
_HITS = {"hit_rate": 0.0}
_BOTH_GRADIENTS: dict[str, float] = {"input_gradient": 1}
_SAMPLES, _ROWS, _SUMS = ("edges", "nodes", "hops"), ("rows", "row_bytes"), ("edges", "destinations", "width")
_PRODUCT = ("rows", "inner", "width")
_HOST, _CARRIED = frozenset({CORES}), frozenset({BUS})


def _host_cache(context: CostContext) -> float:
    return context.last_cache


def _core_cache(context: CostContext) -> float:
    return context.core_cache


def _device_cache(context: CostContext) -> float:
    return context.device_cache


def _no_cache(context: CostContext) -> float:
    return 0.0


_EACH, _BYTES, _MACS = ("hops", "edges", "nodes"), ("call", "bytes"), ("call", "macs", "read")
_ALL = (
    Operator("sample/host", _SAMPLES, q.sampling(_host_cache, _core_cache), _EACH, _OF_GRAPH, _HOST),
    Operator("sample/device", _SAMPLES, q.sampling(_device_cache, _device_cache), _EACH, _OF_GRAPH),
    Operator("sample/pinned", _SAMPLES, q.sampling(_no_cache, _device_cache), _EACH, _OF_GRAPH, _CARRIED),
    Operator("gather/host", _ROWS, q.host_gather, ("call", "rows", "bytes"), _OF_TABLE, _HOST, by_width="row_bytes"),
    Operator("gather/device", _ROWS, q.device_gather, ("call", "rows", "bytes"), _OF_TABLE, by_width="row_bytes"),
    Operator("gather/bus", _ROWS, q.bus_gather, ("call", "rows", "bytes"), {}, _CARRIED, by_width="row_bytes"),
    Operator("gather/cached", _ROWS, q.cached_gather, ("call", "hit bytes", "missed bytes"), _HITS, _CARRIED),
    Operator("copy/up", ("bytes",), q.copy, _BYTES, {}, _CARRIED),
    Operator("copy/down", ("bytes",), q.copy, _BYTES, {}, _CARRIED),
    Operator("copy/pageable", ("bytes",), q.pageable_copy, _BYTES, {}, _HOST | _CARRIED),
    Operator("compact/device", ("nodes", "edges"), q.compacting, ("call", "edges")),
    Operator("spmm/host", _SUMS, q.host_spmm, ("call", "edges", "elements"), _OF_SPMM, _HOST, by_width="width"),
    Operator("spmm/device", _SUMS, q.device_spmm, ("call", "edges", "bytes"), _OF_SPMM, by_width="width"),
    Operator("product/host", _PRODUCT, q.host_product, ("call", "macs", "far bytes"), {}, _HOST),
    Operator("product/device", _PRODUCT, q.device_product, _MACS),
    Operator("backward/host", _PRODUCT, q.host_backward, _MACS, _BOTH_GRADIENTS, _HOST),
    Operator("backward/device", _PRODUCT, q.device_backward, _MACS, _BOTH_GRADIENTS),
    Operator("optimizer/host", ("parameters",), q.host_optimizer, ("call", "parameters"), {}, _HOST),
    Operator("optimizer/device", ("parameters",), q.device_optimizer, ("call", "parameters")),
    Operator("launch/device", ("calls",), q.launch, ("calls",)),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}


def find_operator(name: str) -> Operator:
    """ValueError where there is none of this name."""
    if name not in OPERATORS:
        raise ValueError(f"there is no operator {name!r}: there are {', '.join(OPERATORS)}")
    return OPERATORS[name]
