"""Records which parameters an optimizer has, in order: torch's state_dict stores moments by position, without names.

So Adam over [w0, w1] would accept the state of Adam over [w1, w0] if both have the same shape, and train each with the
other's moments. A checkpoint stores names and shapes beside the state, and restoring compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnsys.checkpoint.states import States, unwrapped
from gnnsys.store import SparseOptimizer

Place: TypeAlias = Sequence[Any]  # of one parameter: [name or None, shape or None]
Places: TypeAlias = Sequence[Sequence[Place]]  # of an optimizer, by group
_SHOWN = 3  # differences that an error names


def places_of(states: States) -> dict[str, Places]:
    """The parameters of each dense optimizer, in its order. A name is that in a module which is saved beside it."""
    names: dict[int, str] = {}
    for name, value in sorted(states.shared.items()):
        if isinstance(value, nn.Module):
            for inner, parameter in unwrapped(value).named_parameters():
                names.setdefault(id(parameter), f"{name}.{inner}")
    return {
        # An optimizer made of others may have no groups.
        name: [_group_places(group, names) for group in getattr(value, "param_groups", [])]
        for name, value in states.shared.items()
        if isinstance(value, torch.optim.Optimizer) and not isinstance(value, SparseOptimizer)
    }


def _group_places(group: Mapping[str, Any], names: Mapping[int, str]) -> Sequence[Place]:
    own = group.get("param_names") or [None] * len(group["params"])  # if torch was given named parameters
    return [
        [names.get(id(each), other), _shape(each)] for each, other in zip(group["params"], own, strict=True)
    ]  # fmt: skip


def _shape(parameter: Tensor) -> list[int] | None:
    return None if is_lazy(parameter) else list(parameter.shape)


def check_places(saved: Mapping[str, Places], now: Mapping[str, Places], steps: int) -> None:
    """ValueError, with the names that differ, if an optimizer has other parameters than it was saved with.

    Where a name is not known on both sides only shapes are compared.
    """
    for name, groups in saved.items():
        found = _differences(groups, now.get(name, []))
        if found:
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ValueError(
                f"{name} has other parameters than in the checkpoint of step {steps}: {'; '.join(found[:_SHOWN])}{more}"
                ". Its moments are kept by place: give it the parameters of the checkpoint, in their order, or give "
                "give resume() another folder to start again"
            )


def _differences(saved: Places, now: Places) -> list[str]:
    found = []
    for group, (old, new) in enumerate(zip_longest(saved, now)):
        if old is None or new is None:
            found.append(f"group {group} is {'new' if old is None else 'missing'}")
            continue
        for place, (was, has) in enumerate(zip_longest(old, new)):
            if not _is_alike(was, has):
                found.append(f"place {place} of group {group} had {_described(was)} and has {_described(has)}")
    return found


def _is_alike(was: Place | None, has: Place | None) -> bool:
    if was is None or has is None:
        return False
    return all(one == other for one, other in zip(was, has, strict=True) if one is not None and other is not None)


def _described(place: Place | None) -> str:
    if place is None:
        return "nothing"
    name, shape = place
    words = name or "a parameter of no module that resume() was given"
    return words if shape is None else f"{words} {list(shape)}"
