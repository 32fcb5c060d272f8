"""What is saved, sorted by who saves it: rank 0 for all ranks, each rank for itself, or the shards that hold the rows.

A module, an optimizer or a scheduler is shared: DDP keeps it the same on every rank, so rank 0's is saved, and beside
it the entries in which another rank differs (`rank_differences`). Anything else with a state_dict, such as a loader,
belongs to its rank. Embeddings inside modules and optimizers are found without being named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gnnsys.checkpoint.tables import graph_of, rows_of
from gnnsys.store import DistEmbedding, DistTensor, SparseOptimizer, Store

if TYPE_CHECKING:
    from gnnsys.session import Session

_SHARED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    SparseOptimizer,
)


@dataclass
class States:
    """What `resume` was given. `tables`: by their names in a checkpoint.

    `reached`: for each table all names under which it can be found, including that one. `places`: those of them that
    are positions in an optimizer's list, such as `sparse.0`.
    """

    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, DistTensor] = field(default_factory=dict)
    reached: dict[str, list[str]] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)

    def names(self) -> dict[str, list[str]]:
        """The names that must be the same on every rank and in a checkpoint."""
        return {"shared": sorted(self.shared), "own": sorted(self.own), "tables": sorted(self.tables)}

    def optimizers(self) -> dict[str, str]:
        """The class of each dense optimizer, which its state_dict does not tell. Sparse ones tell theirs."""
        return {
            name: type(each).__name__
            for name, each in self.shared.items()
            if isinstance(each, torch.optim.Optimizer) and not isinstance(each, SparseOptimizer)
        }

    def saved_tables(self, saved: Mapping[str, Mapping[str, Any]], session: Session | None = None) -> dict[str, str]:
        """The name that each table has in a checkpoint whose tables are `saved`; those that it lacks are left out.

        It may be another one than here: earlier versions took the first in the order of `resume`'s arguments. A place
        in an optimizer's list says less than the table's own name and its graph: the list may be in another order now.
        Tables of two graphs may have one name, and the place tells them apart where nothing else does.
        """
        found: dict[str, str] = {}
        fits: list[tuple[tuple[bool, bool, bool], str, str]] = []  # how badly, a table's name here, a place
        for name, table in self.tables.items():
            known = [other for other in self.reached.get(name, [name]) if other in saved]
            if known and known[0] in self.places:
                graph = _graph_in(rows_of(table, graph_of(table, session)))
                for place in sorted(self.places & saved.keys()):
                    is_other = saved[place]["spec"]["name"] != table.name
                    if not is_other or place == known[0]:
                        is_elsewhere = _graph_in(saved[place].get("rows")) != graph
                        fits.append(((is_other, is_elsewhere, place != known[0]), name, place))
            elif known and known[0] not in found.values():
                found[name] = known[0]
        for _, name, place in sorted(fits):  # the best first; a place belongs to one table
            if name not in found and place not in found.values():
                found[name] = place
        return found

    def stores(self) -> list[Store]:
        return list({id(table.store): table.store for table in self.tables.values()}.values())


def sort_states(given: Mapping[str, Any]) -> States:
    """Sorts the arguments of `resume`. ValueError names what cannot be saved."""
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
    found = [each for name, value in sorted(given.items()) for each in _embeddings_in(name, value)]
    states.places = {name for name, _, is_place in found if is_place}
    for name, embedding, _ in sorted(found, key=lambda each: each[2]):  # modules first; never the arguments' order
        known = next((known for known, table in states.tables.items() if _same(embedding.table, table)), name)
        states.tables.setdefault(known, embedding.table)
        states.reached.setdefault(known, [known])
        if name != known:
            states.reached[known].append(name)
    return states


def _add_table(states: States, name: str, value: DistEmbedding | DistTensor) -> None:
    table = value.table if isinstance(value, DistEmbedding) else value
    if not table.mutable:
        raise ValueError(f"{name} is the table {table.name!r}, which never changes: there is nothing to save of it")
    twin = next((other for other, known in states.tables.items() if _same(table, known)), None)
    if twin is not None:
        raise ValueError(f"{name} and {twin} are one table, {table.name!r}: name it once")
    states.tables[name] = table
    states.reached[name] = [name]


def _embeddings_in(name: str, value: Any) -> Iterator[tuple[str, DistEmbedding, bool]]:
    """Embeddings inside a module or an optimizer: (name, embedding, whether the name is a position in a list)."""
    if isinstance(value, DistEmbedding):
        return
    if isinstance(value, nn.Module):
        for inner, found in unwrapped(value).named_modules():
            if isinstance(found, DistEmbedding):
                yield f"{name}.{inner}", found, False
    elif isinstance(value, SparseOptimizer):
        for number, found in enumerate(value.embeddings):
            yield f"{name}.{number}", found, True


def unwrapped(value: Any) -> Any:
    """The module inside DDP: a checkpoint does not depend on whether there is one."""
    return value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value


def _graph_in(rows: Mapping[str, Any] | None) -> str | None:
    """The graph of a table's rows (see `rows_of`)."""
    return None if rows is None else rows["graph"]


def _same(table: DistTensor, other: DistTensor) -> bool:
    return table.store is other.store and table.name == other.name
