"""The operators of a training step, the sizes that they are asked about, and what physics says that they do.

An operator's `quantities` are what takes time: bytes from each level of memory, multiply-adds, rows, edges, launches.
A cost is a sum of some of them with coefficients that are never negative. `term_sets` are the sums that are tried, the
simple ones first; the leave-one-out error of a machine's own measurements decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Sizes = Mapping[str, float]

LINE = 64  # bytes that a processor's memory gives at least
SECTOR = 32  # bytes that a GPU's memory and the bus give at least
_CHUNK_WORK = 1 << 14  # rows and edges of spmm that one host thread takes at a time
_THREAD_BYTES = 1 << 17  # of gathered rows, below which a second host thread does not pay
_TABLE_BYTES = 32  # of a table of ids, per id
_TILE_ROWS, _TILE_COLUMNS = 128, 64  # of a product, that a GPU's multiprocessor makes at a time
CORES, BUS = "cores", "bus"


@dataclass(frozen=True)
class CostContext:
    """What a machine's sizes are, as far as costs bend there. Bytes of caches: a core's own, the processor's last, and
    the GPU's; 0 where it is not known."""

    threads: int = 1
    core_cache: int = 1 << 20
    last_cache: int = 32 << 20
    device_cache: int = 32 << 20
    multiprocessors: int = 1


@dataclass(frozen=True)
class Operator:
    """`sizes` must be given, `optional` ones have values for whoever does not know. `shares` are what several ranks of
    a machine have in common."""

    name: str
    sizes: tuple[str, ...]
    quantities: Callable[[Sizes, CostContext], dict[str, float]]
    term_sets: tuple[tuple[str, ...], ...]
    optional: Mapping[str, float] = field(default_factory=dict)
    shares: frozenset[str] = frozenset()

    def checked(self, given: Sizes) -> dict[str, float]:
        """All sizes, with what was left out; ValueError for unknown, missing and negative ones."""
        unknown = [name for name in given if name not in self.sizes and name not in self.optional]
        missing = [name for name in self.sizes if name not in given]
        if unknown or missing:
            what = f"has no size {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
            known = ", ".join((*self.sizes, *(f"{name}={value:g}" for name, value in self.optional.items())))
            raise ValueError(f"{self.name!r} {what}: its sizes are {known}")
        for name, value in given.items():
            if not value >= 0:
                raise ValueError(f"{name} of {self.name!r} must be a number that is not negative, got {value!r}")
        return {**self.optional, **given}


def _beyond(cache: float, num_bytes: float) -> float:
    """The share of random reads of so many bytes that a cache does not have."""
    return max(0.0, 1.0 - cache / num_bytes) if num_bytes > 0 else 0.0


def _lines(row_bytes: float, line: int) -> float:
    """Lines of memory that a row touches, on average: rows begin anywhere, unless a row is whole lines."""
    return row_bytes / line if row_bytes % line == 0 else (row_bytes + line - 4) / line


def _idle(context: CostContext, shares: float) -> float:
    """By how much work takes longer where it has fewer shares than there are threads."""
    return context.threads / min(context.threads, max(1.0, math.floor(shares)))


def _sampling(cache: Callable[[CostContext], float]) -> Callable[[Sizes, CostContext], dict[str, float]]:
    def quantities(s: Sizes, context: CostContext) -> dict[str, float]:
        far = _beyond(cache(context), s["graph_bytes"])
        return {
            "call": 1.0,
            "hops": s["hops"],
            "edges": s["edges"],
            "far edges": s["edges"] * far,
            "nodes": s["nodes"],
            "far nodes": s["nodes"] * _beyond(cache(context), _TABLE_BYTES * s["nodes"]),
        }

    return quantities


def _host_gather(s: Sizes, context: CostContext) -> dict[str, float]:
    rows, num_bytes = s["rows"], s["rows"] * s["row_bytes"]
    idle = _idle(context, num_bytes / _THREAD_BYTES)
    far = _beyond(context.last_cache, s["table_rows"] * s["row_bytes"])
    lines = rows * _lines(s["row_bytes"], LINE)
    return {
        "call": 1.0,
        "rows": rows,
        "busy rows": rows * idle,
        "bytes": num_bytes,
        "busy bytes": num_bytes * idle,
        "far lines": lines * far,
        "written far": num_bytes * _beyond(context.last_cache, num_bytes),
    }


def _device_gather(s: Sizes, context: CostContext) -> dict[str, float]:
    rows, num_bytes = s["rows"], s["rows"] * s["row_bytes"]
    far = _beyond(context.device_cache, s["table_rows"] * s["row_bytes"])
    return {
        "call": 1.0,
        "rows": rows,
        "bytes": num_bytes,
        "far sectors": rows * _lines(s["row_bytes"], SECTOR) * far,
        "written far": num_bytes * _beyond(context.device_cache, num_bytes),
    }


def _bus_gather(s: Sizes, context: CostContext) -> dict[str, float]:
    rows = s["rows"]
    return {
        "call": 1.0,
        "rows": rows,
        "bytes": rows * s["row_bytes"],
        "sectors": rows * _lines(s["row_bytes"], SECTOR),
        "lines": rows * _lines(s["row_bytes"], LINE),
    }


def _cached_gather(s: Sizes, context: CostContext) -> dict[str, float]:
    share = min(s["hit_rate"], 1.0)
    missed = {f"missed {name}": value * (1 - share) for name, value in _bus_gather(s, context).items()}
    missed.pop("missed call")
    hit_bytes = s["rows"] * share * s["row_bytes"]
    return {"call": 1.0, "rows": s["rows"], "bytes": s["rows"] * s["row_bytes"], "hit bytes": hit_bytes, **missed}


def _copy(s: Sizes, context: CostContext) -> dict[str, float]:
    return {"call": 1.0, "bytes": s["bytes"], "far bytes": s["bytes"] * _beyond(context.last_cache, s["bytes"])}


def _compacting(s: Sizes, context: CostContext) -> dict[str, float]:
    return {
        "call": 1.0,
        "nodes": s["nodes"],
        "edges": s["edges"],
        "far edges": s["edges"] * _beyond(context.device_cache, 12 * s["edges"]),
    }


def _sources(s: Sizes) -> float:
    """Of the rows that are summed. Of a batch's first layer few are summed twice."""
    return s["sources"] or max(s["edges"], s["destinations"])


def _host_spmm(s: Sizes, context: CostContext) -> dict[str, float]:
    row = s["width"] * s["itemsize"]
    idle = _idle(context, math.ceil((s["edges"] + s["destinations"]) / _CHUNK_WORK))
    table = _sources(s) * row
    lines = s["edges"] * _lines(row, LINE)
    return {
        "call": 1.0,
        "edges": s["edges"] * idle,
        "destinations": s["destinations"] * idle,
        "elements": s["edges"] * s["width"] * idle,
        "written": s["destinations"] * row,
        "core lines": lines * _beyond(context.core_cache, table) * idle,
        "far lines": lines * _beyond(context.last_cache, table),
        "written far": s["destinations"] * row * _beyond(context.last_cache, s["destinations"] * row),
    }


def _device_spmm(s: Sizes, context: CostContext) -> dict[str, float]:
    row = s["width"] * s["itemsize"]
    sectors = s["edges"] * _lines(row, SECTOR)
    return {
        "call": 1.0,
        "edges": s["edges"],
        "destinations": s["destinations"],
        "bytes": s["edges"] * row,
        "written": s["destinations"] * row,
        "far sectors": sectors * _beyond(context.device_cache, _sources(s) * row),
        "sources": _sources(s) * row,
    }


def _product(s: Sizes, passes: float = 1.0) -> dict[str, float]:
    rows, inner, width = s["rows"], s["inner"], s["width"]
    return {
        "call": passes,
        "rows": passes * rows,
        "macs": passes * rows * inner * width,
        "read": passes * 4 * rows * inner,
        "written": passes * 4 * rows * width,
        "weights": passes * 4 * inner * width,
    }


def _host_product(s: Sizes, context: CostContext) -> dict[str, float]:
    found = _product(s)
    num_bytes = 4 * (s["rows"] * s["inner"] + s["rows"] * s["width"])
    found["far bytes"] = num_bytes * _beyond(context.last_cache, num_bytes)
    return found


def _device_product(s: Sizes, context: CostContext) -> dict[str, float]:
    tiles = math.ceil(s["rows"] / _TILE_ROWS) * math.ceil(s["width"] / _TILE_COLUMNS)
    waves = math.ceil(tiles / max(1, context.multiprocessors))
    tile_macs = _TILE_ROWS * _TILE_COLUMNS * s["inner"]
    padded = tiles * tile_macs
    return _product(s) | {"padded macs": padded, "wave macs": waves * context.multiprocessors * tile_macs}


def _backward(s: Sizes, context: CostContext) -> dict[str, float]:
    """Of the weights, a product as large as the forward one; where it is asked for, of the rows one more."""
    return _product(s, 1.0 + min(s["input_gradient"], 1.0))


def _optimizer(s: Sizes, context: CostContext) -> dict[str, float]:
    return {"call": 1.0, "parameters": s["parameters"]}


def _launch(s: Sizes, context: CostContext) -> dict[str, float]:
    return {"calls": s["calls"]}


_BIG = 1e15  # rows or bytes: more than any cache has
_OF_GRAPH = {"graph_bytes": _BIG}
_OF_TABLE = {"table_rows": _BIG}
_OF_SPMM: dict[str, float] = {"itemsize": 4, "sources": 0}
_BOTH_GRADIENTS: dict[str, float] = {"input_gradient": 1}
_SAMPLES, _ROWS, _SUMS = ("edges", "nodes", "hops"), ("rows", "row_bytes"), ("edges", "destinations", "width")
_PRODUCT = ("rows", "inner", "width")
_SAMPLE_SETS = (
    ("call", "edges"),
    ("hops", "edges", "nodes"),
    ("hops", "edges", "far edges", "nodes"),
    ("hops", "edges", "nodes", "far nodes"),
    ("hops", "edges", "far edges", "nodes", "far nodes"),
)
_PRODUCT_SETS = (
    ("call", "macs"),
    ("call", "macs", "read"),
    ("call", "macs", "read", "written"),
    ("call", "rows", "macs", "read", "written"),
    ("call", "macs", "read", "written", "weights"),
)
_HOST, _CARRIED, _NONE = frozenset({CORES}), frozenset({BUS}), frozenset[str]()


def _host_cache(context: CostContext) -> float:
    return context.last_cache


def _core_cache(context: CostContext) -> float:
    return context.core_cache


def _device_cache(context: CostContext) -> float:
    return context.device_cache


def _no_cache(context: CostContext) -> float:
    return 0.0


_ALL = (
    Operator("sample/host", _SAMPLES, _sampling(_host_cache), _SAMPLE_SETS, _OF_GRAPH, _HOST),
    Operator("sample/device", _SAMPLES, _sampling(_device_cache), _SAMPLE_SETS, _OF_GRAPH),
    Operator("sample/pinned", _SAMPLES, _sampling(_no_cache), _SAMPLE_SETS[:2], _OF_GRAPH, _CARRIED),
    Operator(
        "gather/host", _ROWS, _host_gather,
        (("call", "bytes"), ("call", "rows", "bytes"), ("call", "busy rows", "busy bytes"),
         ("call", "rows", "bytes", "far lines"), ("call", "busy rows", "busy bytes", "far lines"),
         ("call", "busy rows", "busy bytes", "far lines", "written far")), _OF_TABLE, _HOST,
    ),
    Operator(
        "gather/device", _ROWS, _device_gather,
        (("call", "bytes"), ("call", "rows", "bytes"), ("call", "rows", "bytes", "far sectors"),
         ("call", "rows", "bytes", "far sectors", "written far")), _OF_TABLE,
    ),
    Operator(
        "gather/bus", _ROWS, _bus_gather,
        (("call", "bytes"), ("call", "sectors"), ("call", "rows", "sectors"), ("call", "rows", "bytes"),
         ("call", "rows", "lines")), {}, _CARRIED,
    ),
    Operator(
        "gather/cached", _ROWS, _cached_gather,
        (("call", "bytes", "missed bytes"), ("call", "hit bytes", "missed sectors"),
         ("call", "rows", "hit bytes", "missed sectors"),
         ("call", "rows", "hit bytes", "missed rows", "missed bytes"),
         ("call", "rows", "hit bytes", "missed rows", "missed lines")), {"hit_rate": 0.0}, _CARRIED,
    ),
    Operator("copy/up", ("bytes",), _copy, (("call", "bytes"), ("call", "bytes", "far bytes")), {}, _CARRIED),
    Operator("copy/down", ("bytes",), _copy, (("call", "bytes"), ("call", "bytes", "far bytes")), {}, _CARRIED),
    Operator(
        "copy/pageable", ("bytes",), _copy, (("call", "bytes"), ("call", "bytes", "far bytes")), {}, _HOST | _CARRIED
    ),
    Operator(
        "compact/device", ("nodes", "edges"), _compacting,
        (("call", "edges"), ("call", "nodes", "edges"), ("call", "nodes", "edges", "far edges")),
    ),
    Operator(
        "spmm/host", _SUMS, _host_spmm,
        (("call", "elements"), ("call", "edges", "elements"), ("call", "edges", "elements", "far lines"),
         ("call", "edges", "destinations", "elements", "far lines"),
         ("call", "edges", "elements", "core lines", "far lines"),
         ("call", "edges", "destinations", "elements", "core lines", "far lines", "written far")), _OF_SPMM, _HOST,
    ),
    Operator(
        "spmm/device", _SUMS, _device_spmm,
        (("call", "bytes"), ("call", "edges", "bytes"), ("call", "edges", "bytes", "written"),
         ("call", "edges", "bytes", "far sectors"),
         ("call", "edges", "destinations", "bytes", "far sectors", "written"),
         ("call", "edges", "bytes", "sources", "written")), _OF_SPMM,
    ),
    Operator(
        "product/host", _PRODUCT, _host_product, (*_PRODUCT_SETS, ("call", "macs", "far bytes"),
        ("call", "rows", "macs", "written", "far bytes")), {}, _HOST,
    ),
    Operator(
        "product/device", _PRODUCT, _device_product,
        (*_PRODUCT_SETS, ("call", "padded macs", "read", "written"), ("call", "wave macs", "read", "written"),
         ("call", "macs", "wave macs", "read", "written")),
    ),
    Operator("backward/host", _PRODUCT, _backward, _PRODUCT_SETS, _BOTH_GRADIENTS, _HOST),
    Operator("backward/device", _PRODUCT, _backward, _PRODUCT_SETS, _BOTH_GRADIENTS),
    Operator("optimizer/host", ("parameters",), _optimizer, (("call", "parameters"),), {}, _HOST),
    Operator("optimizer/device", ("parameters",), _optimizer, (("call", "parameters"),)),
    Operator("launch/device", ("calls",), _launch, (("calls",),)),
)  # fmt: skip
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}


def find_operator(name: str) -> Operator:
    """ValueError where there is none of this name."""
    if name not in OPERATORS:
        raise ValueError(f"there is no operator {name!r}: there are {', '.join(OPERATORS)}")
    return OPERATORS[name]
