"""Calls of the native core whose memory is counted; run as a program by test_workspace.py, below a malloc that counts.

Every op that tells its workspace on the CPU is called here with what needs it most: rows of many edges, draws that
find the most that shapes allow, arrays that are a little longer than a power of two and so were grown at once before.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import num_versions, workspace_bytes
from gnnsys.ops._library import native

GROWN = (1 << 16) + 8  # entries of an array that has just grown
EDGES = 300_000
NODES = 20_000


class MeasuredCall(NamedTuple):
    """Arguments of an op; `threads` that it runs on, and what its statement is told beside them."""

    arguments: tuple[Any, ...]
    threads: int = 1
    hints: dict[str, int] = {}  # noqa: RUF012 - not changed


def csc(num_dst: int, degree: int, num_src: int = NODES, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Columns of one degree, the sources of each in no order."""
    places = torch.arange(num_dst * degree)
    return torch.arange(num_dst + 1) * degree, (places * 7919 % num_src).to(dtype)


def hubs(num_dst: int, degree: int) -> tuple[Tensor, Tensor]:
    """Columns without edges but for the first and the last: with two threads each has one."""
    sizes = torch.zeros(num_dst, dtype=torch.int64)
    sizes[0] = sizes[-1] = degree
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return indptr, torch.arange(2 * degree) % NODES


def rows(num_rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(num_rows, *shape, dtype=dtype)


def sampled(structure: tuple[Tensor, Tensor], fanout: int, **options: Any) -> tuple[Any, ...]:
    """Arguments of sample_neighbors for all columns."""
    seeds = torch.arange(structure[0].numel() - 1)
    time = options.get("time")
    return (
        *structure,
        seeds,
        fanout,
        options.get("replace", False),
        7,
        options.get("weight"),
        time,
        False,
        False,
        None if time is None else torch.full_like(seeds, 1 << 40),
        False,
        options.get("exclude"),
        None,
        None,
    )


def calls() -> dict[str, MeasuredCall]:
    wide, hub = csc(2048, 64), hubs(1024, GROWN)
    star = hubs(2, GROWN)  # rows are taken by whoever is free: on one thread
    rising = (torch.tensor([0, GROWN - 1, 2 * GROWN - 1]), star[1][1:])  # a row of one edge more than the one before
    halves_row = rows(1, 50_000, dtype=torch.bfloat16)
    to_one = (torch.tensor([0, 600]), torch.zeros(600, dtype=torch.int64))
    seeds = torch.arange(2048)
    ids = torch.arange(EDGES) * 7919 % NODES
    weight = torch.ones(hub[1].numel())
    gat = (rows(NODES, 4, 8), rows(NODES, 4), rows(2, 4), None, 0.2, 0.0, 0)
    t_star = native.transpose(*star, NODES)
    out, log_total = native.gat_aggregate(*star, *gat, None, None, None)
    many = csc(60_000, 4)
    t_many = native.transpose(*many, NODES)
    of_many = (rows(NODES, 8, 1), rows(NODES, 8), rows(60_000, 8), None, 0.2, 0.0, 0)
    many_out, many_total = native.gat_aggregate(*many, *of_many, None, None, None)
    table = torch.zeros(8 + (2 << 20), dtype=torch.int64)
    native.id_table_init(table, 20, True)
    of_edges = (torch.empty(120_000, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    x64 = rows(NODES, 64)
    best, arg = native.spmm_extreme(*wide, x64, None, False)
    extreme = (*wide, arg, best)
    grads = [torch.ones(EDGES, 4)]
    parts = ([many[0]], [many[1].int()], [torch.arange(60_000)], [torch.empty(0, dtype=torch.int64)])
    bounds = (torch.tensor([0, 60_000]), torch.tensor([0, NODES]), torch.tensor([0, many[1].numel()]))
    inner = (*csc(4000, 32, 500_000), torch.arange(4000), None, torch.arange(499_000, 500_000), None)
    # A table of four ids per edge, which is the largest, and next to nothing found there.
    largest = (*csc(20_000, 32, 2_560_000), torch.arange(20_000), None, torch.tensor([0, 2_559_999]), None)
    few = {"most_degree": 32, "num_found": 2}
    outer = (*csc(4000, 8, 4000), torch.arange(4000))
    # Two relations of 6000 groups of four edges, 12000 destinations in all, whose own rows count too.
    ids32 = torch.arange(6000, dtype=torch.int32).repeat(2)
    fours = csc(12_000, 4)
    conv = ([x64], [rows(2, 64, 32)], [rows(64, 32)], [0], [0, 0, 0, 0, 0, 0, 0, 1])
    groups = ([0, 6000, 12_000], ids32, *fours)
    turned = ([0, 6000, 12_000], ids32, fours[0], fours[1] % 6000, rows(48_000).view(-1))
    halved = ([x64.bfloat16()], *([t.bfloat16() for t in each] for each in conv[1:3]), *conv[3:])
    tree = torch.zeros(4000, dtype=torch.int64)
    return {
        "sample_neighbors": MeasuredCall(sampled(csc(60_000, 4), 2), 2),
        "sample_neighbors: many": MeasuredCall(sampled(csc(512, 3000), 2000), 2),
        "sample_neighbors: weighted": MeasuredCall(sampled(hub, 2, weight=weight), 2, {"most_degree": GROWN}),
        "sample_neighbors: weighted, replaced": MeasuredCall(
            sampled(hub, 2, weight=weight, replace=True), 2, {"most_degree": GROWN}
        ),
        "sample_neighbors: by time": MeasuredCall(sampled(hub, 2, time=weight.long()), 2, {"most_degree": GROWN}),
        "sample_neighbors: but some": MeasuredCall(sampled(csc(GROWN, 4), 2, exclude=torch.arange(10)), 2),
        "sample_parts": MeasuredCall((*parts, *bounds, torch.arange(60_000), 2, False, 3, None, True), 2),
        "sample_guided": MeasuredCall(
            (
                *hub,
                torch.arange(1024),
                GROWN - 1,
                3,
                torch.ones(NODES, dtype=torch.uint8),
                0.0,
                True,
                False,
                None,
                None,
                None,
            ),
            2,
            {"most_degree": GROWN, "num_found": 2 * GROWN},
        ),
        "sample_labor": MeasuredCall((*wide, seeds, NODES, 63, 3, None, None, None), 2, {"most_degree": 64}),
        "sample_labor_importance": MeasuredCall((*wide, seeds, NODES, 63, 1, 3, None), 2, {"most_degree": 64}),
        "sample_labor_importance: by hash": MeasuredCall(
            (*csc(2048, 64, 1 << 20), seeds, 1 << 20, 63, 1, 3, None), 2, {"most_degree": 64}
        ),
        "find_edges": MeasuredCall((*csc(GROWN, 1, GROWN), csc(GROWN, 1, GROWN)[1], torch.arange(GROWN)), 2),
        "most_visited": MeasuredCall((torch.arange(GROWN).view(-1, 8), 8, None), 2),
        "most_visited: many": MeasuredCall((torch.arange(32 * GROWN).view(32, -1), 1, None), 2),
        "edges_within": MeasuredCall((*inner, None), 2, {"most_degree": 32}),
        "edges_within: few found": MeasuredCall((*largest, None), 2, few),
        "edges_within: trees": MeasuredCall((*outer, tree, torch.arange(4000), tree, None), 2, {"most_degree": 8}),
        "induced_coo": MeasuredCall((*inner[:2], None, *inner[2:], None), 2, {"most_degree": 32}),
        "induced_coo: few found": MeasuredCall((*largest[:2], None, *largest[2:], None), 2, few),
        "coo_to_csc": MeasuredCall((ids, ids.flip(0), NODES, NODES, False), 2),
        "coo_to_csc: narrow": MeasuredCall((ids, ids.flip(0), NODES, NODES, True), 2),
        "transpose": MeasuredCall((*csc(3000, 100), NODES), 2),
        "degrees": MeasuredCall((ids, NODES * 5), 2),
        "induced_subgraph": MeasuredCall((*csc(NODES, 4), torch.arange(GROWN) % NODES, None), 2),
        "in_subgraph": MeasuredCall((*csc(NODES, 4), torch.arange(NODES)), 2),
        "bfs_order": MeasuredCall(
            (torch.zeros(4_000_001, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.tensor([0]))
        ),
        "expand_indptr": MeasuredCall((wide[0], 0, torch.empty(wide[1].numel(), dtype=torch.int64)), 2),
        "validate_csc": MeasuredCall((*wide, NODES), 2),
        "bucket_ids": MeasuredCall((ids, torch.tensor([0, 100, NODES])), 2),
        "relabel": MeasuredCall((table, ids), 2),
        "relabel_seeds": MeasuredCall((table, torch.arange(1000)), 2),
        "sample_into_table": MeasuredCall((table, *many, torch.arange(60_000), 2, False, 3, *of_edges), 2),
        "sample_into_table: alone": MeasuredCall((table, *many, torch.arange(60_000), 2, False, 3, *of_edges)),
        "lookup": MeasuredCall((table, ids), 2),
        "id_table_init": MeasuredCall((table, 20, True), 2),
        "compact": MeasuredCall((table, [ids[:1000]], [ids], [0]), 2),
        "stitch": MeasuredCall(
            (torch.arange(EDGES), [torch.ones(EDGES, dtype=torch.int32)], [ids], [ids], [0, 0, EDGES], True), 2
        ),
        "name_neighbors": MeasuredCall(
            (
                wide[0],
                wide[1].int(),
                torch.arange(wide[1].numel()),
                0,
                NODES,
                torch.empty(0, dtype=torch.int64),
                0,
                None,
                True,
                True,
            ),
            2,
        ),
        "gather_rows": MeasuredCall((x64, ids, None), 2),
        "read_rows": MeasuredCall((x64, ids), 2),
        "simd_bytes": MeasuredCall((), 1),
        "gather_rows_out": MeasuredCall((x64, ids, torch.empty(EDGES, 64)), 2),
        "scatter_rows": MeasuredCall((torch.empty(NODES, 4), ids, torch.ones(EDGES, 4)), 2),
        "gather_cached": MeasuredCall(
            (rows(10, 64), torch.full((NODES,), -1, dtype=torch.int32), x64, ids, torch.empty(EDGES, 64), None), 2
        ),
        "gather_parts": MeasuredCall(([x64], [0], ids, torch.tensor([0, NODES]), torch.empty(EDGES, 64), None), 2),
        "move_rows": MeasuredCall((x64, ids, None, torch.empty(EDGES, 64), None, None), 2),
        "update_rows": MeasuredCall((torch.zeros(NODES, 4), None, ids, torch.ones(EDGES, 4), True), 2),
        "fill_uniform": MeasuredCall((torch.empty(NODES, 64), 0, 0.0, 1.0, 3), 2),
        "sparse_adam_step": MeasuredCall(
            (
                *(torch.zeros(EDGES, 4) for _ in range(3)),
                [torch.zeros(num_versions(EDGES), dtype=torch.int32) for _ in range(3)],
                [torch.arange(EDGES).clamp(max=EDGES - 2)],  # one twice: they are hashed
                grads,
                1.0,
                0.1,
                0.9,
                0.99,
                1e-8,
            ),
            2,
        ),
        "sparse_adagrad_step": MeasuredCall(
            (
                *(torch.zeros(EDGES, 4) for _ in range(2)),
                [torch.zeros(num_versions(EDGES), dtype=torch.int32) for _ in range(2)],
                [torch.arange(EDGES).clamp(max=EDGES - 2)],  # one twice: they are hashed
                grads,
                1.0,
                0.1,
                1e-8,
            ),
            2,
        ),
        "spmm": MeasuredCall((*to_one, None, halves_row, *[None] * 6)),
        "spmm_add": MeasuredCall((*to_one, None, rows(1, 50_000), None, None, None, rows(1, 50_000))),
        "spmm_out": MeasuredCall((*to_one, None, halves_row, None, None, None, halves_row.clone())),
        "spmm_extreme": MeasuredCall((*to_one, rows(1, 50_000), None, False, None, None, None)),
        "spmm_extreme_grad_x": MeasuredCall((*extreme, None, NODES, None, None, None), 2),
        "spmm_extreme_grad_weight": MeasuredCall((*extreme, x64), 2),
        "inverse_degrees": MeasuredCall((torch.arange(EDGES), torch.float32), 2),
        "sddmm": MeasuredCall((*wide, None, rows(2048, 64), x64, None, None, None, None, None), 2),
        "relation_conv": MeasuredCall((*conv, [6000], *groups, None, [], None, None, None, None), 2),
        "relation_conv: rounded": MeasuredCall((*halved, [6000], *groups, None, [], None, None, None, None), 1),
        "relation_conv_grad": MeasuredCall(([rows(6000, 32)], *conv, [1], *turned), 2),
        "edge_softmax": MeasuredCall((rising[0], rows(rising[1].numel(), 4)), 1, {"most_degree": GROWN}),
        "edge_softmax_grad": MeasuredCall((torch.tensor([0, 300]), rows(300, 20_000), rows(300, 20_000))),
        "gat_aggregate": MeasuredCall((*rising, *gat, None, None, None), 1, {"most_degree": GROWN}),
        "gat_aggregate_grad": MeasuredCall((many[0], *t_many, *of_many, many_out, many_total, many_out), 1),
        "gat_aggregate_grad: long rows": MeasuredCall((star[0], *t_star, *gat, out, log_total, out)),
        "dropout_rows": MeasuredCall((x64, torch.arange(NODES), 0.5, 3), 2),
        "random_walks": MeasuredCall((*csc(NODES, 4), torch.arange(NODES), [1] * 8, [], 0, None), 2),
        "source_words": MeasuredCall((ids, 3), 2),
        "normalize_rows": MeasuredCall((wide[0], torch.ones(wide[1].numel())), 2),
        "draw_below": MeasuredCall((ids, 10, 3), 2),
        "generate_permutation": MeasuredCall((torch.empty(EDGES, dtype=torch.int64), 3), 2),
        "generate_features": MeasuredCall(
            (torch.empty(NODES, 64), torch.zeros(NODES, dtype=torch.int64), torch.zeros(2, 64), 1.0, 3), 2
        ),
        "generate_rmat": MeasuredCall(
            (
                torch.empty(EDGES, dtype=torch.int64),
                torch.empty(EDGES, dtype=torch.int64),
                torch.arange(1 << 14),
                0.57,
                0.19,
                0.19,
                3,
            ),
            2,
        ),
        "generate_planted": MeasuredCall(
            (
                torch.empty(EDGES, dtype=torch.int64),
                torch.empty(EDGES, dtype=torch.int64),
                torch.arange(NODES),
                torch.arange(NODES),
                4,
                0.8,
                1,
                1,
                False,
                3,
            ),
            2,
        ),
    }


def measure(call: Callable[[], Any], counting: ctypes.CDLL) -> int:
    """The most that a call holds beside its outputs. It is made twice: a first one makes threads and buffers."""
    call()
    before = counting.counting_start()
    result = call()
    most = counting.counting_most() - before
    found = result if isinstance(result, list | tuple) else (result,)
    outputs = [t for each in found for t in (each if isinstance(each, list | tuple) else (each,))]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs if isinstance(t, Tensor)}
    return most - sum(kept.values())


def main() -> None:
    counting = ctypes.CDLL(sys.argv[1])
    counting.counting_start.restype = counting.counting_most.restype = ctypes.c_int64
    probe = measure(lambda: torch.empty(1 << 20, dtype=torch.uint8), counting)
    if abs(probe) > 1 << 16:
        print(json.dumps({"case": "none", "why": "torch's tensors do not come from malloc here"}))
        return
    for case, call in calls().items():
        op = case.split(":")[0]
        torch.set_num_threads(call.threads)
        try:
            stated = workspace_bytes(op, *call.arguments, device="cpu", **call.hints)
            measured = measure(lambda op=op, call=call: getattr(native, op)(*call.arguments), counting)
        except Exception as error:
            raise RuntimeError(f"case {case!r}") from error
        print(json.dumps({"case": case, "op": op, "stated": stated, "measured": measured}))


if __name__ == "__main__":
    main()
