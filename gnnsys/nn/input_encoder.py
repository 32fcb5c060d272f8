"""InputEncoder: rows of one width for every node type, from features, from learnable rows, or from both.

Typed models need rows of all node types. Types have features of different widths, and some have none: those get an
embedding. Of a graph in parts it is a `DistEmbedding`, whose rows lie where their nodes do and which a sparse optimizer
trains (`encoder.embeddings`); of a graph in memory it is a parameter like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnnsys.graph import Graph, NodeType, check_ours, did_you_mean, some
from gnnsys.loader import Batch
from gnnsys.nn.typed_inputs import module_key
from gnnsys.sampling import DistGraph
from gnnsys.store import DistEmbedding


class InputEncoder(nn.Module):
    """`x_dict` of `dim` values per row, from a batch: a linear layer on the features of each type that has them.

    `embed` names the node types that have a learnable row per node: by default those without features; a type that is
    named and has features gets the sum of both; () is none. Types in `ids` get neither: their rows are int64 node ids,
    for a model with no width for them, `RGCN({"author": None, ...})`. `name` is what features are called, and
    `embedding_name` what embeddings of a graph in parts are: tables "node/TYPE/input". `sparse` is nn.Embedding's: of a
    graph in memory, too, a step then touches the batch's rows alone, by torch.optim.SparseAdam on
    `encoder.tables.parameters()`. Every rank makes it with the same arguments.

    >>> encoder = InputEncoder(graph, 64)  # doctest: +SKIP
    >>> sparse = SparseAdam(encoder.embeddings, lr=0.01)  # of a graph in parts with such types  # doctest: +SKIP
    >>> out = model(encoder(batch), batch.edge_index_dict)  # doctest: +SKIP
    """

    def __init__(
        self,
        graph: Graph | DistGraph,
        dim: int,
        *,
        embed: Iterable[NodeType] | Literal["featureless"] = "featureless",
        ids: Iterable[NodeType] = (),
        sparse: bool = False,
        name: str = "x",
        embedding_name: str = "input",
    ) -> None:
        super().__init__()
        check_ours(graph)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be a whole number of at least 1, got {dim!r}")
        self.dim, self.name = dim, name
        types, self.ids = list(graph.node_types), [ids] if isinstance(ids, str) else list(ids)
        unknown = [t for t in self.ids if t not in types]
        if unknown:
            raise ValueError(f"ids: there are no nodes of {unknown[0]!r}, only of {some(types)}")
        others = [t for t in types if t not in self.ids]
        with_features = [t for t in others if name in graph.node_data[t]]
        if isinstance(embed, str) and embed != "featureless":
            raise ValueError(f"embed must be a list of node types, or 'featureless', got {embed!r}")
        embedded = [t for t in others if t not in with_features] if embed == "featureless" else list(embed)
        _check_types(others, with_features, embedded, name)
        self._types = types
        self.linears = nn.ModuleDict({module_key(t): _linear(graph, t, name, dim) for t in with_features})
        self.tables = nn.ModuleDict(
            {module_key(t): _embedding(graph, t, dim, embedding_name, sparse) for t in embedded}
        )

    @property
    def embeddings(self) -> list[DistEmbedding]:
        """What a sparse optimizer trains: the embeddings of a graph in parts. Those in memory are parameters."""
        return [table for table in self.tables.values() if isinstance(table, DistEmbedding)]

    def forward(self, batch: Any) -> dict[NodeType, Tensor]:
        """Rows of every node of the batch, [nodes, dim] by node type; of all nodes where a graph in memory is given.

        A batch is ours, or the `HeteroData` of a loader of PyG's or of `gnnsys.pyg`.
        """
        given = _values_by_type(batch)
        unknown = [t for t in given if t not in self._types]
        if unknown:
            raise ValueError(f"the batch has nodes of {some(unknown)}, and the encoder is for {some(self._types)}")
        return {t: self._encode(t, values, batch) for t, values in given.items()}

    def _encode(self, node_type: NodeType, values: Any, batch: Any) -> Tensor:
        if node_type in self.ids:
            return _ids(node_type, values, batch)
        key, parts = module_key(node_type), []
        if key in self.linears:
            if self.name not in values:
                raise ValueError(
                    f"the batch has no {self.name!r} of {node_type!r}, only {some(values, most=20)}: have the loader "
                    f"fetch it"
                )
            linear = self.linears[key]
            parts.append(linear(values[self.name].to(linear.weight.dtype)))  # type: ignore[arg-type]
        if key in self.tables:
            parts.append(self.tables[key](_ids(node_type, values, batch)))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _values_by_type(batch: Any) -> Mapping[NodeType, Any]:
    if isinstance(batch, (Graph, Batch)):
        return batch.node_data if isinstance(batch, Graph) else batch.nodes
    if hasattr(batch, "node_stores"):  # PyG's
        if not hasattr(batch, "node_types"):
            raise ValueError(
                f"PyG's {type(batch).__name__} has no node types, and rows are given by node type: pass a batch of "
                "gnnsys.NeighborLoader, or gnnsys.graph.from_pyg(data) of a whole graph"
            )
        return {t: batch[t] for t in batch.node_types}
    raise ValueError(
        f"InputEncoder takes a batch of a loader, or a graph in memory, got {type(batch).__name__}: pass the batch "
        "itself, which knows its nodes"
    )


def _ids(node_type: NodeType, values: Any, batch: Any) -> Tensor:
    if isinstance(batch, Graph):
        return torch.arange(batch.num_nodes(node_type), device=batch.device)
    if "n_id" not in values:
        raise ValueError(
            f"{node_type!r} is looked up by node id, and this {type(batch).__name__} has no 'n_id' of it: pass a "
            "loader's batch, or gnnsys.graph.from_pyg(data) of a whole graph"
        )
    return values["n_id"].long()


def _check_types(types: list[NodeType], with_features: list[NodeType], embedded: list[NodeType], name: str) -> None:
    for node_type in embedded:
        if node_type not in types:
            there = f"{some(types, near=node_type)}{did_you_mean(node_type, types)}"
            raise ValueError(f"embed: there are no nodes of {node_type!r}, only of {there}")
    bare = [t for t in types if t not in with_features and t not in embedded]
    if bare:
        raise ValueError(
            f"node type {bare[0]!r} has no {name!r} and no embedding, so nothing can be computed from it: add it to "
            f"embed=[{', '.join(map(repr, [*embedded, *bare]))}], or give the graph features of it with "
            f"graph.set_node_data({name!r}, rows, {bare[0]!r})"
        )


def _linear(graph: Graph | DistGraph, node_type: NodeType, name: str, dim: int) -> nn.Linear:
    shape = tuple(graph.node_data[node_type][name].shape)
    if len(shape) != 2 or not shape[1]:
        raise ValueError(
            f"{name!r} of {node_type!r} has shape {list(shape)}: features are [nodes, width], with at least one column"
        )
    return nn.Linear(shape[1], dim)


def _embedding(graph: Graph | DistGraph, node_type: NodeType, dim: int, name: str, sparse: bool) -> nn.Module:
    if isinstance(graph, DistGraph):
        return DistEmbedding(graph, dim=dim, node_type=node_type, name=name)
    table = nn.Embedding(graph.num_nodes(node_type), dim, sparse=sparse)
    nn.init.uniform_(table.weight, -(dim**-0.5), dim**-0.5)
    return table
