"""A user's own `sample` or `sample_blocks`, in a subclass of a sampler of ours: called in the threads of our loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl
import torch
from dgl.frame import LazyFeature
from torch import Tensor

from gnnsys.dgl.parts import PLAIN_EDGE, PLAIN_NODE
from gnnsys.dgl.sampler import NeighborSampler
from gnnsys.graph import EDGE, NODE, NodeType
from gnnsys.loader import Batch
from gnnsys.sampling import AnyGraph, DistGraph, Sample, SampleKey

_METHODS = ("sample", "sample_blocks", "assign_lazy_features")  # what DGL's own DataLoader calls


def overridden_method(sampler: Any) -> str | None:
    """The first method of DGL's samplers that is a user's own; None if all are ours.

    It may be defined in a subclass, or assigned to the object or to a class of ours.
    """
    for name in _METHODS:
        owner = next((kind for kind in type(sampler).__mro__ if name in vars(kind)), None)
        if name in vars(sampler) or (owner is not None and not _is_ours(owner, vars(owner)[name])):
            return name
    return None


def _is_ours(owner: type, method: Any) -> bool:
    """Whether both the class and the method are of gnnsys or DGL. `functools.wraps` copies a method's `__module__`, but
    not its globals."""
    modules = owner.__module__, getattr(method, "__globals__", {}).get("__name__", "")
    return all(module.partition(".")[0] in ("dgl", "gnnsys") for module in modules)


class CalledSampler:
    """Calls the user's `sample` for each batch: a sample function of `gnnsys.NeighborLoader`.

    What ours draw meanwhile follows from the loader's seed, the epoch and the batch, whichever thread calls. The result
    is passed on as the only block of a sample, from which `batch_of` takes it.
    """

    def __init__(self, g: Any, sampler: NeighborSampler, is_by_type: bool) -> None:
        self._g, self._sampler, self._is_by_type = g, sampler, is_by_type

    def __call__(self, graph: AnyGraph, seeds: dict[NodeType, Tensor], key: SampleKey) -> Sample:
        idtype = torch.int64 if isinstance(self._g, DistGraph) else self._g.idtype
        types = {t: PLAIN_NODE if t == NODE and graph.is_homogeneous else t for t in seeds}
        given: Any = {types[t]: ids.to(idtype) for t, ids in seeds.items() if ids.numel() or len(seeds) == 1}
        if not self._is_by_type:
            (given,) = given.values()
        with self._sampler.drawing(key):
            made = _without_promises(self._g, self._sampler.sample(self._g, given))
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return Sample(dict.fromkeys(graph.node_types, none), {}, {}, {}, {}, {}, blocks=[made])

    @staticmethod
    def batch_of(batch: Batch) -> Any:
        """The last stage of the loader: what the user's sampler returned."""
        return batch.blocks[0]


def _without_promises(g: Any, made: Any) -> Any:
    """Reads the features that a sampler has named as lazy, in all graphs of what it returned."""
    if isinstance(made, Mapping):
        return {key: _without_promises(g, value) for key, value in made.items()}
    if isinstance(made, (list, tuple)):
        return type(made)(_without_promises(g, value) for value in made)
    if isinstance(made, dgl.DGLGraph):
        for types, frames, ids in (
            (made.ntypes, made._node_frames, dgl.NID),
            (made.canonical_etypes, made._edge_frames, dgl.EID),
        ):
            for t, frame in zip(types, frames, strict=True):
                for name, column in list(frame._columns.items()):
                    if isinstance(column, LazyFeature):
                        at = frame[ids] if column.id_ is None else column.id_
                        frame[name] = _rows(g, t, column.name or name, at.long())
    return made


def _rows(g: Any, t: Any, name: str, ids: Tensor) -> Tensor:
    is_edge = isinstance(t, tuple)
    if isinstance(g, DistGraph):
        ours = {PLAIN_NODE: NODE, PLAIN_EDGE: EDGE}.get(t, t) if g.is_homogeneous else t
        return (g.edge_data if is_edge else g.node_data)[ours][name][ids]
    return (g.edges if is_edge else g.nodes)[t].data[name][ids]
