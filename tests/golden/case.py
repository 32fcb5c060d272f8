"""A golden case: a function whose results are recorded, and how batches of every kind become named values.

Only public names of gnnsys are used in this folder: a refactoring moves modules, and must not touch these files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

import gnnsys
from gnnsys.sampling import Block, Sample

Values: TypeAlias = dict[str, Any]
"""Tensors, numbers, texts, or lists of them, by name."""


@dataclass(frozen=True)
class Case:
    """`make(folder)` gives the values; `folder` is shared by all cases of a run, for graphs on disk.

    `is_computed`: floats are results of arithmetic, equal to rounding between machines; else they are copied rows,
    equal bit for bit. `is_portable`: False for what only one and the same machine repeats. `needs`: a library.
    """

    make: Callable[[Path], Values]
    is_computed: bool = False
    is_portable: bool = True
    needs: str | None = None


def collect(batches: Iterable[Any]) -> Values:
    """The values of all batches, by name: a list with an entry for each batch."""
    values: Values = {"num_batches": 0}
    for batch in batches:
        values["num_batches"] += 1
        for name, value in named(batch):
            values.setdefault(name, []).append(value)
    return values


def epochs(loader: Any, num_epochs: int = 2) -> Values:
    """All batches of the next epochs; the loader is closed."""
    try:
        return collect(batch for _ in range(num_epochs) for batch in loader)
    finally:
        if hasattr(loader, "close"):
            loader.close()


def named(batch: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a batch: ours, PyG's or DGL's, or of a sample."""
    if isinstance(batch, gnnsys.Batch):
        stores: dict[Any, Any] = {"extra": batch.extra} | dict(batch.nodes) | dict(batch.edges)
        yield from _of_stores(stores)
        yield from _of_blocks(batch.blocks)
    elif isinstance(batch, Sample):
        names = ("node", "row", "col", "edge", "num_sampled_nodes", "num_sampled_edges", "tree")
        yield from _of_stores({name: getattr(batch, name) or {} for name in names})
        yield from _of_blocks(batch.blocks)
    elif isinstance(batch, tuple):
        yield from _of_dgl(*batch)
    else:
        yield from _of_stores({store._key or "": store for store in batch.stores})


def _of_stores(stores: Mapping[Any, Mapping[Any, Any]]) -> Iterator[tuple[str, Any]]:
    for key, store in stores.items():
        for name, value in store.items():
            yield f"{_text(key)} {_text(name)}".strip(), value


def _of_blocks(blocks: Iterable[Block]) -> Iterator[tuple[str, Any]]:
    for number, block in enumerate(blocks):
        yield f"block {number} sizes", [list(block.num_src.values()), list(block.num_dst.values())]
        for edge_type, csc in block.csc.items():
            for name in ("indptr", "indices", "edge_ids"):
                yield f"block {number} {_text(edge_type)} {name}", getattr(csc, name)


def _of_dgl(input_nodes: Any, output_nodes: Any, blocks: list[Any]) -> Iterator[tuple[str, Any]]:
    for name, ids in (("input_nodes", input_nodes), ("output_nodes", output_nodes)):
        yield from _of_stores({name: ids if isinstance(ids, Mapping) else {"": ids}})
    for number, block in enumerate(blocks):
        for edge_type in block.canonical_etypes:
            ends = dict(zip(("src", "dst"), block.edges(etype=edge_type), strict=True))
            rows = {**ends, **block.edges[edge_type].data}
            yield from _of_stores({f"block {number} {_text(edge_type)}": rows})
        for node_type in block.srctypes:
            yield from _of_stores({f"block {number} src {node_type}": dict(block.srcnodes[node_type].data)})
            yield from _of_stores({f"block {number} dst {node_type}": dict(block.dstnodes[node_type].data)})


def _text(key: Any) -> str:
    return "|".join(key) if isinstance(key, tuple) else str(key)


def leaves(value: Any) -> Iterator[Any]:
    """The tensors, numbers and texts of a value that may be a list."""
    if isinstance(value, (list, tuple)) and any(isinstance(each, (Tensor, list, tuple)) for each in value):
        for each in value:
            yield from leaves(each)
    else:
        yield value
