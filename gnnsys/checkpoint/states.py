"""What is saved, sorted by how: once for all ranks, once for each, or by the shards that have the rows.

A module, an optimizer or a scheduler is taken to be the same on every rank, as DDP keeps it, and rank 0's is saved.
Whatever else has a state_dict (a loader, above all) belongs to its rank. Embeddings inside modules and optimizers are
found by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gnnsys.store import DistEmbedding, DistTensor, Store
from gnnsys.store.optim import SparseOptimizer

_SHARED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    SparseOptimizer,
)


@dataclass
class States:
    """What `resume` was given. `tables` are by the name they have in a checkpoint."""

    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, DistTensor] = field(default_factory=dict)

    def names(self) -> dict[str, list[str]]:
        """What every rank must have alike, and a checkpoint too."""
        return {"shared": sorted(self.shared), "own": sorted(self.own), "tables": sorted(self.tables)}

    def stores(self) -> list[Store]:
        return list({id(table.store): table.store for table in self.tables.values()}.values())


def sort_states(given: Mapping[str, Any]) -> States:
    """Sorts what `resume` was given; ValueError names what cannot be saved."""
    states = States()
    for name, value in given.items():
        if isinstance(value, (DistEmbedding, DistTensor)):
            _add_table(states, name, value)
        elif not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
            raise ValueError(
                f"{name} is a {type(value).__name__}, which has no state_dict() and load_state_dict(): pass modules, "
                "optimizers, schedulers, loaders, embeddings and tables"
            )
        elif isinstance(value, _SHARED):
            states.shared[name] = value
        else:
            states.own[name] = value
    for name, value in given.items():
        for inner, embedding in _embeddings_in(name, value):
            if not any(_same(embedding.table, known) for known in states.tables.values()):
                states.tables[inner] = embedding.table
    return states


def _add_table(states: States, name: str, value: DistEmbedding | DistTensor) -> None:
    table = value.table if isinstance(value, DistEmbedding) else value
    if not table.mutable:
        raise ValueError(f"{name} is the table {table.name!r}, which never changes: there is nothing to save of it")
    twin = next((other for other, known in states.tables.items() if _same(table, known)), None)
    if twin is not None:
        raise ValueError(f"{name} and {twin} are one table, {table.name!r}: name it once")
    states.tables[name] = table


def _embeddings_in(name: str, value: Any) -> Iterator[tuple[str, DistEmbedding]]:
    if isinstance(value, DistEmbedding):
        return
    if isinstance(value, nn.Module):
        module = value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value
        for inner, found in module.named_modules():
            if isinstance(found, DistEmbedding):
                yield f"{name}.{inner}", found
    elif isinstance(value, SparseOptimizer):
        for number, found in enumerate(value.embeddings):
            yield f"{name}.{number}", found


def _same(table: DistTensor, other: DistTensor) -> bool:
    return table.store is other.store and table.name == other.name
