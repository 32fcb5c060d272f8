"""The base of our loaders for PyG whose batches are subgraphs: clusters, GraphSAINT, shaDow.

A subclass makes a batch of the chosen inputs and a key. Threads, the order of inputs and state are those of
`ThreadedLoader`: under one `torch.manual_seed` inputs come in the order that PyG's loaders have.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput

from gnnsys.loader import NAME as MADE_OF
from gnnsys.loader import plain
from gnnsys.pyg.arguments import check_kwargs, warn_of_unfit_features
from gnnsys.pyg.iterator import BatchRequest
from gnnsys.pyg.stores import graph_of
from gnnsys.pyg.structure import check_adjacency
from gnnsys.pyg.threaded_loader import ThreadedLoader
from gnnsys.sampling import SampleKey


class InducedLoader(ThreadedLoader):
    """Batches of induced subgraphs, made whole in one step."""

    transform = None
    transform_sampler_output = None
    filter_per_worker = True

    def _open(self, data: Data, inputs: Tensor, seed: int | None, kwargs: dict[str, Any]) -> None:
        """Makes the DataLoader. `inputs`: of each of its inputs a number, which a saved state is checked by."""
        for name in ("dataset", "collate_fn"):  # Lightning passes them
            kwargs.pop(name, None)
        check_kwargs(kwargs)
        self._prepare(data, None, seed, kwargs)
        self.data = data
        self.input_data = NodeSamplerInput(None, inputs)
        torch.utils.data.DataLoader.__init__(self, range(inputs.numel()), collate_fn=self.collate_fn, **kwargs)  # type: ignore[arg-type]
        self._untie()

    @abstractmethod
    def make_batch(self, index: Tensor, key: SampleKey) -> Any:
        """The batch of the inputs with these numbers. Called from several threads at once."""

    def _joined(self, node: Tensor, row: Tensor, col: Tensor, edge: Tensor) -> Data:
        """The user's data with the rows of these nodes and edges alone."""
        return self._join(SamplerOutput(node, row, col, edge))

    # -- what ThreadedLoader asks for ----------------------------------------------------------------------------------

    def sample_step(self, request: BatchRequest) -> Any:
        return self.make_batch(self._checked(request.index), request.key)

    def join_step(self, out: Any) -> Any:
        return out

    def collate_fn(self, index: Any) -> Any:
        return self.make_batch(self._checked(index), self._key())

    @property
    def samples_ahead(self) -> bool:
        return True

    @property
    def joins_ahead(self) -> bool:
        return True

    def _sampling(self) -> dict[str, Any]:
        """What decides a batch besides its inputs and key, by the names that users give it."""
        return {}

    def _made_of(self) -> dict[str, Any]:
        return {MADE_OF: {"graph": None, "inputs": None, "sampling": plain(self._sampling())}}


def check_data(data: Any, name: str, native: str) -> Data:
    """ValueError for anything but a `Data` with edges; `native` is what to use on parts. Warns of NaN in features."""
    if graph_of(data) is not None:
        raise ValueError(f"{name} takes a torch_geometric Data: for what gnnsys.open returns use {native}")
    if not isinstance(data, Data):
        raise ValueError(f"{name} takes a torch_geometric Data, of one node and edge type, got {type(data).__name__}")
    check_adjacency(data, "data")
    if data.edge_index is None:
        raise ValueError(f"{name} needs data.edge_index: store the edges")
    if data.num_nodes is None:
        raise ValueError(f"{name} needs data.num_nodes: set it, or give the nodes features")
    warn_of_unfit_features(data)
    return data


def edges_of(data: Data) -> Tensor:
    """`edge_index` as plain int64 on the host."""
    return data.edge_index.as_subclass(Tensor).cpu().long()
