"""The operators of a training step, the sizes that they are asked about, and what physics says that they do.

An operator's `quantities` are what takes time: bytes from each level of memory, multiply-adds, rows, edges, launches.
A cost is a sum of some of them, with coefficients that are never negative. Which ones, the leave-one-out errors of a
machine's own measurements decide.
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
_PAGE, _PAGES_PER_LINE = 4096, 8  # of the host's memory; entries of a page table in a line
_LONG_ROW = 1000  # bytes, from which fewer rows are asked for ahead
_FRESH = 32 << 20  # bytes: larger results are in new pages every time, smaller ones where others were
_LANES = 16  # columns of a product that a processor's vectors make at a time
_COMMON_TABLE = 1 << 30  # bytes, of features that nobody has told the number of
_TABLE_BYTES = 32  # of a table of ids, per id
_TILE_ROWS, _TILE_COLUMNS = 128, 64  # of a product, that a GPU's multiprocessor makes at a time
CORES, BUS = "cores", "bus"


@dataclass(frozen=True)
class CostContext:
    """What a machine's sizes are, as far as costs bend there. Bytes of caches: a core's own, the processor's last, and
    the GPU's; of the vectors that our host kernels use."""

    threads: int = 1
    core_cache: int = 1 << 20
    last_cache: int = 32 << 20
    device_cache: int = 32 << 20
    multiprocessors: int = 1
    vector_bytes: int = 16


@dataclass(frozen=True)
class Operator:
    """`sizes` must be given, `optional` ones have values for whoever does not know.

    `basic` quantities are summed where there are too few points to choose. `shares` are what several ranks of a machine
    have in common. `by_width` is the size that kernels have code of their own for some values of.
    """

    name: str
    sizes: tuple[str, ...]
    quantities: Callable[[Sizes, CostContext], dict[str, float]]
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


def _beyond(cache: float, num_bytes: float) -> float:
    """The share of random reads of so many bytes that a cache does not have."""
    return max(0.0, 1.0 - cache / num_bytes) if num_bytes > 0 else 0.0


def _lines(row_bytes: float, line: int) -> float:
    """Lines of memory that a row touches, on average: rows begin anywhere, unless a row is whole lines."""
    return row_bytes / line if row_bytes % line == 0 else (row_bytes + line - 4) / line


def _idle(context: CostContext, shares: float) -> float:
    """By how much work takes longer where it has fewer shares than there are threads."""
    return context.threads / min(context.threads, max(1.0, math.floor(shares)))


def _sampling(
    cache: Callable[[CostContext], float], near: Callable[[CostContext], float]
) -> Callable[[Sizes, CostContext], dict[str, float]]:
    """`cache` may hold the graph, `near` the table of the nodes that were found."""

    def quantities(s: Sizes, context: CostContext) -> dict[str, float]:
        far, table = _beyond(cache(context), s["graph_bytes"]), _TABLE_BYTES * s["nodes"]
        return {
            "call": 1.0,
            "hops": s["hops"],
            "edges": s["edges"],
            "far edges": s["edges"] * far,
            "nodes": s["nodes"],
            "looked up": s["edges"] * _beyond(near(context), table),
            "far nodes": s["nodes"] * _beyond(cache(context), table),
        }

    return quantities


def _page_lines(rows: float, row_bytes: float, table: float) -> float:
    """Lines of the page table behind random rows of a table of so many bytes: each is read from memory once."""
    lines = table / (_PAGE * _PAGES_PER_LINE)
    return -lines * math.expm1(-rows * max(1.0, row_bytes / _PAGE) / lines) if lines > 0 else 0.0


def _table_bytes(s: Sizes) -> float:
    return s["table_rows"] * s["row_bytes"] or _COMMON_TABLE


def _host_gather(s: Sizes, context: CostContext) -> dict[str, float]:
    rows, num_bytes, table = s["rows"], s["rows"] * s["row_bytes"], _table_bytes(s)
    idle = _idle(context, num_bytes / _THREAD_BYTES)
    is_split = s["row_bytes"] % LINE != 0
    return {
        "call": 1.0,
        "rows": rows * idle,
        "bytes": num_bytes * idle,
        "split rows": rows * idle * is_split,
        "split bytes": num_bytes * is_split,
        "long rows": rows * idle * (s["row_bytes"] >= _LONG_ROW),
        "page lines": _page_lines(rows, s["row_bytes"], table),
        "far lines": rows * _lines(s["row_bytes"], LINE) * _beyond(context.last_cache, table),
        "written far": num_bytes * _beyond(context.last_cache, num_bytes),
    }


def _device_gather(s: Sizes, context: CostContext) -> dict[str, float]:
    rows, num_bytes = s["rows"], s["rows"] * s["row_bytes"]
    far = _beyond(context.device_cache, _table_bytes(s))
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


def _random_rows(s: Sizes) -> tuple[float, bool]:
    """How many rows are read in no order, and whether they are strewn over a table.

    A block's sources have all an edge and are numbered in the order of edges: the first read of each follows the one
    before. Where there are more sources than edges, a table is read straight, and each edge may meet any row.
    """
    sources = _sources(s)
    if sources > s["edges"] + s["destinations"]:
        return s["edges"], True
    return s["edges"] - min(sources, s["edges"]), False


def _host_spmm(s: Sizes, context: CostContext) -> dict[str, float]:
    row = s["width"] * s["itemsize"]
    idle = _idle(context, math.ceil((s["edges"] + s["destinations"]) / _CHUNK_WORK))
    table, lines, written = _sources(s) * row, _lines(row, LINE), s["destinations"] * row
    random, is_strewn = _random_rows(s)
    vectors = math.ceil(4 * s["width"] / context.vector_bytes)
    is_whole = vectors <= 8 or (vectors == 16 and context.vector_bytes != 32)  # the sums stay in registers
    return {
        "call": 1.0,
        "edges": s["edges"] * idle,
        "destinations": s["destinations"] * idle,
        "elements": s["edges"] * s["width"] * idle,
        "stored edges": s["edges"] * idle * (not is_whole),
        "stored lines": s["edges"] * lines * idle * (not is_whole),
        "random rows": random * idle * _beyond(context.core_cache, table),
        "random lines": random * lines * _beyond(context.core_cache, table),
        "far rows": random * _beyond(context.last_cache, table),
        "far lines": random * lines * _beyond(context.last_cache, table),
        "page lines": _page_lines(random * is_strewn, row, table),
        "written": written,
        "fresh": written * (written > _FRESH),
    }


def _device_spmm(s: Sizes, context: CostContext) -> dict[str, float]:
    row = s["width"] * s["itemsize"]
    sectors, (random, _) = _lines(row, SECTOR), _random_rows(s)
    return {
        "call": 1.0,
        "edges": s["edges"],
        "destinations": s["destinations"],
        "bytes": s["edges"] * row,
        "sectors": s["edges"] * sectors,
        "far sectors": random * sectors * _beyond(context.device_cache, _sources(s) * row),
        "split sectors": s["edges"] * sectors * (row % 128 != 0),
        "written": s["destinations"] * row,
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
    written = 4 * s["rows"] * s["width"]
    return found | {
        "lane macs": s["rows"] * s["inner"] * _LANES * math.ceil(s["width"] / _LANES),
        "far bytes": num_bytes * _beyond(context.last_cache, num_bytes),
        "fresh": written * (written > _FRESH),
    }


def _tile_macs(s: Sizes, context: CostContext) -> dict[str, float]:
    """Multiply-adds with those of tiles that stick out, and with those of multiprocessors that have none left."""
    tiles = math.ceil(s["rows"] / _TILE_ROWS) * math.ceil(s["width"] / _TILE_COLUMNS)
    processors = max(1, context.multiprocessors)
    each = _TILE_ROWS * _TILE_COLUMNS * s["inner"]
    return {"padded macs": tiles * each, "wave macs": math.ceil(tiles / processors) * processors * each}


def _device_product(s: Sizes, context: CostContext) -> dict[str, float]:
    return _product(s) | _tile_macs(s, context)


def _host_backward(s: Sizes, context: CostContext) -> dict[str, float]:
    """Of the weights, a product as large as the forward one; where it is asked for, of the rows one more."""
    return _product(s, 1.0 + min(s["input_gradient"], 1.0))


def _device_backward(s: Sizes, context: CostContext) -> dict[str, float]:
    """The same. Of the weights few tiles are made, and each over all rows."""
    weights = _tile_macs({"rows": s["inner"], "inner": s["rows"], "width": s["width"]}, context)
    rows = _tile_macs({"rows": s["rows"], "inner": s["width"], "width": s["inner"]}, context)
    asked = min(s["input_gradient"], 1.0)
    padded = {name: weights[name] + asked * rows[name] for name in weights}
    return _product(s, 1.0 + asked) | {"first read": 4 * s["rows"] * (s["inner"] + s["width"])} | padded


def _optimizer(s: Sizes, context: CostContext) -> dict[str, float]:
    return {"call": 1.0, "parameters": s["parameters"]}


def _launch(s: Sizes, context: CostContext) -> dict[str, float]:
    return {"calls": s["calls"]}


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
    Operator("sample/host", _SAMPLES, _sampling(_host_cache, _core_cache), _EACH, _OF_GRAPH, _HOST),
    Operator("sample/device", _SAMPLES, _sampling(_device_cache, _device_cache), _EACH, _OF_GRAPH),
    Operator("sample/pinned", _SAMPLES, _sampling(_no_cache, _device_cache), _EACH, _OF_GRAPH, _CARRIED),
    Operator("gather/host", _ROWS, _host_gather, ("call", "rows", "bytes"), _OF_TABLE, _HOST, by_width="row_bytes"),
    Operator("gather/device", _ROWS, _device_gather, ("call", "rows", "bytes"), _OF_TABLE, by_width="row_bytes"),
    Operator("gather/bus", _ROWS, _bus_gather, ("call", "rows", "bytes"), {}, _CARRIED, by_width="row_bytes"),
    Operator("gather/cached", _ROWS, _cached_gather, ("call", "hit bytes", "missed bytes"), _HITS, _CARRIED),
    Operator("copy/up", ("bytes",), _copy, _BYTES, {}, _CARRIED),
    Operator("copy/down", ("bytes",), _copy, _BYTES, {}, _CARRIED),
    Operator("copy/pageable", ("bytes",), _copy, _BYTES, {}, _HOST | _CARRIED),
    Operator("compact/device", ("nodes", "edges"), _compacting, ("call", "edges")),
    Operator("spmm/host", _SUMS, _host_spmm, ("call", "edges", "elements"), _OF_SPMM, _HOST, by_width="width"),
    Operator("spmm/device", _SUMS, _device_spmm, ("call", "edges", "bytes"), _OF_SPMM, by_width="width"),
    Operator("product/host", _PRODUCT, _host_product, ("call", "macs", "far bytes"), {}, _HOST),
    Operator("product/device", _PRODUCT, _device_product, _MACS),
    Operator("backward/host", _PRODUCT, _host_backward, _MACS, _BOTH_GRADIENTS, _HOST),
    Operator("backward/device", _PRODUCT, _device_backward, _MACS, _BOTH_GRADIENTS),
    Operator("optimizer/host", ("parameters",), _optimizer, ("call", "parameters"), {}, _HOST),
    Operator("optimizer/device", ("parameters",), _optimizer, ("call", "parameters")),
    Operator("launch/device", ("calls",), _launch, ("calls",)),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}


def find_operator(name: str) -> Operator:
    """ValueError where there is none of this name."""
    if name not in OPERATORS:
        raise ValueError(f"there is no operator {name!r}: there are {', '.join(OPERATORS)}")
    return OPERATORS[name]
