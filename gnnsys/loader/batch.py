"""Batch: what a loader yields, the structure of a sampled subgraph joined with its rows.

Reads like PyG's `Data` when the graph is homogeneous (`batch.x`, `batch.edge_index`), like its `HeteroData` when it is
not (`batch["paper"].x`, `batch["author", "writes", "paper"].edge_index`, `batch.x_dict`), and needs nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType, did_you_mean, some
from gnnsys.observe import BatchTrace
from gnnsys.ops import CSC
from gnnsys.sampling import Block


class TypeValues(dict[str, Any]):
    """The named values of one node or edge type; `store.x` is `store["x"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            there = some(self, near=name, most=20)
            raise AttributeError(f"no {name!r} here, only {there}{did_you_mean(name, self)}") from None

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"no {name!r} here, only {some(self, near=name, most=20)}{did_you_mean(name, self)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Batch:
    """Stores per node type and per edge type.

    A name that is looked up on the batch itself is found in its only node and edge type (homogeneous), or in the type
    the seeds are of (`batch.batch_size`, `batch.input_id`); `NAME_dict` collects a name over all types that have it.
    A name that nodes and edges both have is a ValueError there: `batch.nodes[type]` and `batch.edges[type]` have them.
    """

    def __init__(
        self,
        nodes: Mapping[NodeType, TypeValues],
        edges: Mapping[EdgeType, TypeValues],
        *,
        is_homogeneous: bool,
        input_type: NodeType | EdgeType | None = None,
        blocks: list[Block] | None = None,
        record: BatchTrace | None = None,
        position: int = -1,
    ) -> None:
        self.__dict__.update(
            _record=record,
            _position=position,
            nodes=dict(nodes),
            edges=dict(edges),
            is_homogeneous=is_homogeneous,
            input_type=input_type,
            blocks=blocks or [],
            extra=TypeValues(),
        )

    nodes: dict[NodeType, TypeValues]
    edges: dict[EdgeType, TypeValues]
    is_homogeneous: bool
    input_type: NodeType | EdgeType | None
    blocks: list[Block]
    extra: TypeValues
    _record: BatchTrace | None  # of its way through the loader, where records are kept
    _position: int  # counted across epochs

    # -- access ------------------------------------------------------------------------------------------------------

    @property
    def node_types(self) -> list[NodeType]:
        return list(self.nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        return list(self.edges)

    @overload
    def __getitem__(self, key: str) -> Any: ...

    @overload
    def __getitem__(self, key: tuple[str, str, str]) -> TypeValues: ...

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            if key in self.edges:
                return self.edges[key]
            there = some(self.edge_types, near=key)
            raise KeyError(f"no edge type {key!r}, the batch has {there}{did_you_mean(key, self.edge_types)}")
        if key in self.nodes and not self.is_homogeneous:
            return self.nodes[key]
        try:
            return getattr(self, key)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        store = self._holder(name)
        if store is not None:
            return store[name]
        if name.endswith("_dict"):
            found = self.collect(name[: -len("_dict")])
            if found:
                return found
        names = [*self.keys(), *([] if self.is_homogeneous else self.node_types)]
        types = "" if self.is_homogeneous else f" and the node types {some(self.node_types, near=name)}"
        there = f"{some(self.keys(), near=name, most=20)}{types}{did_you_mean(name, names)}"
        raise AttributeError(f"the batch has no {name!r}, only {there}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
            return
        store = self._holder(name)
        (self.extra if store is None else store)[name] = value

    def __contains__(self, name: str) -> bool:
        return any(name in store for store in self._visible())

    def keys(self) -> list[str]:
        """Names that can be looked up on the batch itself."""
        return [name for store in self._visible() for name in store]

    def collect(self, name: str) -> dict[Any, Any]:
        """`name` of every node and edge type that has it."""
        return {t: store[name] for t, store in self._stores() if name in store}

    def _visible(self) -> list[TypeValues]:
        if self.is_homogeneous:
            return [self.extra, *self.nodes.values(), *self.edges.values()]
        seeds: Mapping[Any, TypeValues] = self.edges if isinstance(self.input_type, tuple) else self.nodes
        return [self.extra, seeds[self.input_type]] if self.input_type in seeds else [self.extra]

    def _holder(self, name: str) -> TypeValues | None:
        """Where a name that is looked up on the batch itself is; ValueError where nodes and edges both have it."""
        having = [store for store in self._visible() if name in store]
        if len(having) > 1 and having[0] is not self.extra:
            node_type, edge_type = next(iter(self.nodes)), next(iter(self.edges))
            raise ValueError(
                f"nodes and edges both have {name!r}: write batch.nodes[{node_type!r}][{name!r}] or "
                f"batch.edges[{edge_type!r}][{name!r}]"
            )
        return having[0] if having else None

    def _stores(self) -> Iterator[tuple[Any, TypeValues]]:
        yield from self.nodes.items()
        yield from self.edges.items()

    # -- size --------------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return sum(store["n_id"].numel() for store in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(store["edge_index"].shape[1] for store in self.edges.values() if "edge_index" in store)

    @property
    def device(self) -> torch.device:
        """Where the batch is: that of its node ids."""
        return next((store["n_id"].device for store in self.nodes.values() if "n_id" in store), torch.device("cpu"))

    # -- moving ------------------------------------------------------------------------------------------------------

    def apply(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """A batch of the same shape with `function` applied to every tensor."""

        def through(store: TypeValues) -> TypeValues:
            return TypeValues({k: apply_to(v, function) for k, v in store.items()})

        out = Batch(
            {t: through(s) for t, s in self.nodes.items()},
            {t: through(s) for t, s in self.edges.items()},
            is_homogeneous=self.is_homogeneous,
            input_type=self.input_type,
            blocks=[apply_to_block(block, function) for block in self.blocks],
            record=self._record,
            position=self._position,
        )
        out.extra.update(through(self.extra))
        return out

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the batch; one that is there under two names comes twice."""
        for store in (*self.nodes.values(), *self.edges.values(), self.extra):
            yield from tensors_of(store)
        for block in self.blocks:
            yield from tensors_of_block(block)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self.apply(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self.apply(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the device's allocator that `stream` uses the batch."""

        for tensor in self.tensors():
            tensor.record_stream(stream)

    def __repr__(self) -> str:
        def brief(store: TypeValues) -> str:
            return ", ".join(f"{k}={list(v.shape) if isinstance(v, Tensor) else v}" for k, v in store.items())

        if self.is_homogeneous:
            return f"Batch({', '.join(brief(s) for s in self._visible() if s)})"
        lines = [f"  {t}: {brief(s)}" for t, s in self._stores()]
        return "\n".join(["Batch(", *lines, ")"])


_PLAIN = frozenset({int, float, bool, str, type(None)})  # most of what is no tensor: told by one look


def apply_to(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` of a tensor, and of the tensors in lists, tuples and dicts; anything else as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        if not any(isinstance(v, (Tensor, list, tuple, Mapping)) for v in value if type(v) not in _PLAIN):
            return value
        values = [apply_to(v, function) for v in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return {k: apply_to(v, function) for k, v in value.items()} if isinstance(value, Mapping) else value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors that `apply_to` gives its function."""
    if isinstance(value, Tensor):
        yield value
        return
    inside = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, Mapping) else ()
    for each in inside:
        if isinstance(each, Tensor):
            yield each
        elif type(each) not in _PLAIN:
            yield from tensors_of(each)


def tensors_of_block(block: Block) -> Iterator[Tensor]:
    for csc in block.csc.values():
        yield from (csc.indptr, csc.indices)
        if csc.edge_ids is not None:
            yield csc.edge_ids
    yield from (block.edge_weight or {}).values()


def apply_to_block(block: Block, function: Callable[[Tensor], Tensor]) -> Block:
    """The same block with `function` applied to every tensor."""

    def through(csc: CSC) -> CSC:
        edge_ids = None if csc.edge_ids is None else function(csc.edge_ids)
        return CSC(function(csc.indptr), function(csc.indices), csc.num_src, edge_ids)

    weights = None if block.edge_weight is None else {t: function(rows) for t, rows in block.edge_weight.items()}
    return Block({t: through(c) for t, c in block.csc.items()}, block.num_src, block.num_dst, weights)
