"""What operators do, counted: the quantities that a cost is a sum of.

Bytes from each level of memory, multiply-adds, rows, edges, launches, loops that wake threads. Where a kernel takes
another way from some size on (more threads, rows in order, stores past the cache), so do its quantities: the constants
are those of the kernels, and the comment behind each says of which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Sizes = Mapping[str, float]
Quantities = dict[str, float]

LINE = 64  # bytes that a processor's memory gives at least
SECTOR = 32  # bytes that a GPU's memory and the bus give at least
_CHUNK_WORK = 1 << 14  # rows and edges that a host thread takes at a time (csrc/cpu/row_work.h)
_THREAD_BYTES = 1 << 17  # of gathered rows that a host thread is worth (csrc/cpu/row_copy.h)
_STREAMED = 1 << 22  # bytes, from which whole lines are written past the cache (csrc/cpu/row_copy.h)
_CHECKED_IDS, _CHECKED_BOUNDS = 1 << 16, 1 << 15  # that a thread is worth (csrc/common/id_range.h, csrc/cpu/row_work.h)
_TORCH_GRAIN, _ROOT_GRAIN = 1 << 15, 1 << 11  # elements that a thread of torch's is worth; of a square root
_ADAM_TENSORS, _ADAM_ARRAYS = 4, 5  # of the model that is timed; of a tensor: itself, gradient, two means, a root
_PAGE, _PAGES_PER_LINE = 4096, 8  # of the host's memory; entries of a page table in a line
_LONG_ROW = 1000  # bytes, from which fewer rows are asked for ahead
_FRESH = 32 << 20  # bytes: larger results are in new pages every time, smaller ones where others were
_LANES = 16  # columns of a product that a processor's vectors make at a time
_COMMON_TABLE = 1 << 30  # bytes, of features that nobody has told the number of
_TABLE_BYTES = 32  # of a table of ids, per id
_TILES = ((128, 64), (128, 128))  # rows and columns of a product that a multiprocessor makes at a time
_VECTOR, _WARP = 16, 32  # bytes of a row that a lane moves at a time; lanes (csrc/cuda/rows.cuh)
_ORDERED = 8 << 20  # bytes over the bus, from which rows are asked for by id (csrc/cuda/row_order.cuh)
_PUSHED = 1 << 16  # bytes of pageable memory that the driver copies into its commands
_DIGIT_BITS, _ONE_TILE = 8, 4096  # of a sort: bits of a pass; keys that one block sorts by itself


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


def _beyond(cache: float, num_bytes: float) -> float:
    """The share of random reads of so many bytes that a cache does not have."""
    return max(0.0, 1.0 - cache / num_bytes) if num_bytes > 0 else 0.0


def _lines(row_bytes: float, line: int) -> float:
    """Lines of memory that a row touches, on average: rows begin anywhere, unless a row is whole lines."""
    return row_bytes / line if row_bytes % line == 0 else (row_bytes + line - 4) / line


def _team(items: float, grain: float, context: CostContext) -> float:
    """Threads that a loop over `items` gets, each of them worth `grain`."""
    return min(float(context.threads), max(1.0, items // grain))


def _loops(*teams: float) -> Quantities:
    """Loops one after the other, worth so many threads each. One that is worth several wakes all of them."""
    return {"loops": float(sum(team > 1 for team in teams))}


def _busiest(chunks: float, threads: int) -> float:
    """Chunks that the busiest thread has, where whoever is free takes the next one."""
    rounds, left = divmod(chunks, threads)
    return rounds + min(1.0, left)


def _distinct(draws: float, among: float) -> float:
    """How many of `among` are met by so many draws."""
    return -among * math.expm1(-draws / among) if among > 0 else 0.0


def _page_lines(rows: float, row_bytes: float, table: float) -> float:
    """Lines of the page table behind random rows of a table of so many bytes: each is read from memory once."""
    return _distinct(rows * max(1.0, row_bytes / _PAGE), table / (_PAGE * _PAGES_PER_LINE))


def _lane_bytes(row_bytes: float, vectors_per_lane: int = 1) -> float:
    """Bytes of a row with those of lanes that have none of it: a row is moved by 1, 2, 4, ... or 32 lanes at once."""
    vectors = max(1.0, math.ceil(row_bytes / _VECTOR))
    if vectors <= _WARP:
        return _VECTOR * 2.0 ** math.ceil(math.log2(vectors))
    return _VECTOR * _WARP * vectors_per_lane * math.ceil(vectors / (_WARP * vectors_per_lane))


def _passes(keys: float, bound: float) -> float:
    """Of a radix sort of so many keys below `bound`; few keys are sorted by one block at once."""
    bits = max(1.0, math.ceil(math.log2(max(2.0, bound))))
    return 0.0 if keys <= _ONE_TILE else float(math.ceil(bits / _DIGIT_BITS))


# -- sampling --------------------------------------------------------------------------------------------------------


def sampling(
    cache: Callable[[CostContext], float], near: Callable[[CostContext], float]
) -> Callable[[Sizes, CostContext], Quantities]:
    """`cache` may hold the graph, `near` the table of the nodes that were found."""

    def quantities(s: Sizes, context: CostContext) -> Quantities:
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


# -- rows ------------------------------------------------------------------------------------------------------------


def _table_bytes(s: Sizes) -> float:
    return s["table_rows"] * s["row_bytes"] or _COMMON_TABLE


def host_gather(s: Sizes, context: CostContext) -> Quantities:
    """Per thread, and where threads share memory, of all of them."""
    rows, row, table = s["rows"], s["row_bytes"], _table_bytes(s)
    num_bytes, threads, lines = rows * row, context.threads, rows * _lines(row, LINE)
    team = _team(rows, max(1.0, _THREAD_BYTES // max(1.0, row)), context)
    checking = _team(rows, _CHECKED_IDS, context)
    idle, is_split = threads / team, row % LINE != 0
    far = _beyond(context.last_cache, table)
    return {
        "call": 1.0,
        **_loops(checking, team),
        "ids": rows * threads / checking,
        "rows": rows * idle,
        "bytes": num_bytes * idle,
        "split rows": rows * idle * is_split,
        "long rows": rows * idle * (row >= _LONG_ROW),
        "page lines": _page_lines(rows, row, table),
        "far lines": lines * far,
        "kept": num_bytes if is_split else min(num_bytes, _STREAMED),
        "written far": num_bytes * _beyond(context.last_cache, num_bytes),
    }


def device_gather(s: Sizes, context: CostContext) -> Quantities:
    rows, num_bytes = s["rows"], s["rows"] * s["row_bytes"]
    far = _beyond(context.device_cache, _table_bytes(s))
    return {
        "call": 1.0,
        "rows": rows,
        "bytes": num_bytes,
        "lane bytes": rows * _lane_bytes(s["row_bytes"]),
        "far sectors": rows * _lines(s["row_bytes"], SECTOR) * far,
        "written far": num_bytes * _beyond(context.device_cache, num_bytes),
    }


def bus_gather(s: Sizes, context: CostContext) -> Quantities:
    """Many rows are sorted first, and those behind the first few megabytes come faster then."""
    rows, row = s["rows"], s["row_bytes"]
    asked = rows * max(row, SECTOR)
    is_ordered, unsorted = asked >= _ORDERED, min(1.0, _ORDERED / asked) if asked > 0 else 1.0
    return {
        "call": 1.0,
        "sorts": float(is_ordered),
        "sorted": rows * is_ordered,
        "rows": rows,
        "bytes": rows * row,
        "sectors": rows * _lines(row, SECTOR),
        "lines": rows * _lines(row, LINE),
        "unsorted rows": rows * unsorted,
        "unsorted lines": rows * _lines(row, LINE) * unsorted,
        "lane bytes": rows * _lane_bytes(row),
    }


def cached_gather(s: Sizes, context: CostContext) -> Quantities:
    """Rows that the device has, and those that it has not, over the bus; whether these are sorted all rows decide."""
    share, rows, row = min(s["hit_rate"], 1.0), s["rows"], s["row_bytes"]
    asked = bus_gather(s, context)
    of_all = {name: asked[name] for name in ("call", "sorts", "sorted", "rows", "bytes", "lane bytes")}
    missed = {
        f"missed {name}": value * (1 - share)
        for name, value in asked.items()
        if name not in ("call", "sorts", "sorted")
    }
    return of_all | {"hit bytes": rows * share * row} | missed


def copy(s: Sizes, context: CostContext) -> Quantities:
    return {"call": 1.0, "bytes": s["bytes"], "far bytes": s["bytes"] * _beyond(context.last_cache, s["bytes"])}


def pageable_copy(s: Sizes, context: CostContext) -> Quantities:
    """By one core, through a buffer that the bus can read; what is small goes with the command itself."""
    num_bytes = s["bytes"]
    return copy(s, context) | {
        "pushed bytes": min(num_bytes, _PUSHED),
        "near bytes": num_bytes * _beyond(context.core_cache, num_bytes),
        "shared bytes": num_bytes * _beyond(context.last_cache / context.threads, num_bytes),
    }


def compacting(s: Sizes, context: CostContext) -> Quantities:
    """Edges are sorted by source, some bits in each pass."""
    edges, passes = s["edges"], _passes(s["edges"], s["nodes"])
    return {
        "call": 1.0,
        "passes": passes,
        "nodes": s["nodes"],
        "edges": edges,
        "sorted": edges * passes,
        "far edges": edges * _beyond(context.device_cache, 12 * edges),
    }


# -- sums ------------------------------------------------------------------------------------------------------------


def _sources(s: Sizes) -> float:
    """Of the rows that are summed. Of a batch's first layer few are summed twice."""
    return s["sources"] or max(s["edges"], s["destinations"])


def _read_rows(s: Sizes) -> tuple[float, float, bool]:
    """How many rows are read for the first time; how many rows are read in no order; and whether these are strewn over
    a table.

    A block's sources have all an edge and are numbered in the order of edges: the first read of each follows the one
    before. Where there are more sources than edges, a table is read straight, and each edge may meet any row.
    """
    sources = _sources(s)
    if sources > s["edges"] + s["destinations"]:
        return _distinct(s["edges"], sources), s["edges"], True
    first = min(sources, s["edges"])
    return first, s["edges"] - first, False


def host_spmm(s: Sizes, context: CostContext) -> Quantities:
    row, edges, destinations = s["width"] * s["itemsize"], s["edges"], s["destinations"]
    chunks, threads = (edges + destinations) / _CHUNK_WORK, context.threads
    idle = threads * _busiest(chunks, threads) / chunks if chunks > 0 else 1.0
    bounds, ids = _team(destinations, _CHECKED_BOUNDS, context), _team(edges, _CHECKED_IDS, context)
    table, lines, written = _sources(s) * row, _lines(row, LINE), destinations * row
    first, random, is_strewn = _read_rows(s)
    strewn, again = (random * lines, 0.0) if is_strewn else (0.0, random * lines * _beyond(context.core_cache, table))
    vectors = math.ceil(4 * s["width"] / context.vector_bytes)
    is_whole = vectors <= 8 or (vectors == 16 and context.vector_bytes != 32)  # the sums stay in registers
    return {
        "call": 1.0,
        **_loops(bounds, bounds, ids, _team(math.ceil(chunks), 1, context)),
        "ids": edges * threads / ids,
        "edges": edges * idle,
        "destinations": destinations * idle,
        "elements": edges * s["width"] * idle,
        "stored edges": edges * idle * (not is_whole),
        "stored lines": edges * lines * idle * (not is_whole),
        "first lines": first * lines * (not is_strewn),
        "lines again": again,
        "lines again, each": again * idle,
        "strewn lines": strewn,
        "strewn lines, each": strewn * idle,
        "far lines": random * lines * _beyond(context.last_cache, table),
        "page lines": _page_lines(random * is_strewn, row, table),
        "written": written,
        "fresh": written * (written > _FRESH),
    }


def device_spmm(s: Sizes, context: CostContext) -> Quantities:
    row, edges = s["width"] * s["itemsize"], s["edges"]
    sectors, (first, random, _) = _lines(row, SECTOR), _read_rows(s)
    return {
        "call": 1.0,
        "edges": edges,
        "destinations": s["destinations"],
        "bytes": edges * row,
        "lane bytes": edges * _lane_bytes(row, 2),
        "sectors": edges * sectors,
        "first sectors": first * sectors,
        "far sectors": random * sectors * _beyond(context.device_cache, _sources(s) * row),
        "split sectors": edges * sectors * (row % 128 != 0),
        "written": s["destinations"] * row,
    }


def _product(s: Sizes) -> Quantities:
    rows, inner, width = s["rows"], s["inner"], s["width"]
    return {
        "call": 1.0,
        "rows": rows,
        "macs": rows * inner * width,
        "read": 4 * rows * inner,
        "written": 4 * rows * width,
        "weights": 4 * inner * width,
    }


def host_product(s: Sizes, context: CostContext) -> Quantities:
    found = _product(s)
    num_bytes, written = found["read"] + found["written"], found["written"]
    return found | {
        "lane macs": s["rows"] * s["inner"] * _LANES * math.ceil(s["width"] / _LANES),
        "near bytes": num_bytes * _beyond(context.threads * context.core_cache, num_bytes),
        "far bytes": num_bytes * _beyond(context.last_cache, num_bytes),
        "fresh": written * (written > _FRESH),
    }


def _tile_macs(rows: float, inner: float, width: float, context: CostContext) -> Quantities:
    """Multiply-adds with those of tiles that stick out, and with those of multiprocessors that have none left."""
    found, processors = {}, max(1, context.multiprocessors)
    for tile_rows, tile_columns in _TILES:
        tiles = math.ceil(rows / tile_rows) * math.ceil(width / tile_columns)
        each, name = tile_rows * tile_columns * inner, f"{tile_rows}x{tile_columns}"
        found[f"padded {name}"] = tiles * each
        found[f"waves {name}"] = math.ceil(tiles / processors) * processors * each
    return found


def device_product(s: Sizes, context: CostContext) -> Quantities:
    return _product(s) | _tile_macs(s["rows"], s["inner"], s["width"], context)


def host_backward(s: Sizes, context: CostContext) -> Quantities:
    """Of the weights, a product as large as the forward one; where it is asked for, of the rows one more."""
    forward, asked = _product(s), min(s["input_gradient"], 1.0)
    both = {name: (1 + asked) * value for name, value in forward.items()}
    num_bytes, made = forward["read"] + forward["written"], asked * forward["read"]
    return both | {
        "asked": asked,
        "asked macs": asked * forward["macs"],
        "asked lane macs": asked * s["rows"] * s["width"] * _LANES * math.ceil(s["inner"] / _LANES),
        "near bytes": num_bytes * _beyond(context.threads * context.core_cache, num_bytes),
        "far bytes": num_bytes * _beyond(context.last_cache, num_bytes),
        "fresh": made * (made > _FRESH),
    }


def device_backward(s: Sizes, context: CostContext) -> Quantities:
    """The same. Of the weights few tiles are made, and each over all rows."""
    forward, asked, (rows, inner, width) = (
        _product(s),
        min(s["input_gradient"], 1.0),
        (s["rows"], s["inner"], s["width"]),
    )
    both = {name: (1 + asked) * value for name, value in forward.items()}
    of_weights, of_rows = _tile_macs(inner, rows, width, context), _tile_macs(rows, width, inner, context)
    padded = {name: value + asked * of_rows[name] for name, value in of_weights.items()}
    return (
        both
        | padded
        | {
            "first read": forward["read"] + forward["written"],
            "asked macs": asked * forward["macs"],
            "asked": asked,
        }
    )


# -- the rest --------------------------------------------------------------------------------------------------------


def host_optimizer(s: Sizes, context: CostContext) -> Quantities:
    """A dozen passes over each tensor, each by as many threads as it is worth: roots by more than the others."""
    each, threads = s["parameters"] / _ADAM_TENSORS, context.threads
    team, rooting = (min(threads, max(1, math.ceil(each / grain))) for grain in (_TORCH_GRAIN, _ROOT_GRAIN))
    num_bytes = 4 * _ADAM_ARRAYS * each
    return {
        "call": 1.0,
        "loops": float(team > 1),
        "root loops": float(rooting > 1),
        "parameters": s["parameters"] * threads / team,
        "roots": s["parameters"] * threads / rooting,
        "near": s["parameters"] * threads / team * _beyond(context.core_cache, num_bytes / team),
        "far": s["parameters"] * _beyond(context.last_cache, num_bytes * _ADAM_TENSORS),
    }


def device_optimizer(s: Sizes, context: CostContext) -> Quantities:
    far = _beyond(context.device_cache, 4 * _ADAM_ARRAYS * s["parameters"])
    return {"call": 1.0, "parameters": s["parameters"], "far": s["parameters"] * far}


def launch(s: Sizes, context: CostContext) -> Quantities:
    return {"calls": s["calls"]}
