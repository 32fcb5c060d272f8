"""How requests and answers describe tables: their names, where they are cut, what they begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Request
from gnnsys.store.message_plan import named_array, read_plan
from gnnsys.store.part_rows import PartRows
from gnnsys.store.rounds import Contribution
from gnnsys.store.spec import TableSpec

_MAX_PARTS = 1 << 20


def filler(init: dict[str, Any]) -> Callable[[PartRows], object]:
    """What fills the rows of a new table; ValueError where `init` describes nothing."""
    try:
        if init["kind"] == "zeros":
            return lambda rows: None
        if init["kind"] == "constant":
            value = init["value"]
            return lambda rows: rows.rows.fill_(value)
        if init["kind"] == "uniform":
            low, high, seed = float(init["low"]), float(init["high"]), int(init["seed"])
            return lambda rows: rows.fill_uniform(low, high, seed)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"init is not one: {init}: {error!r}") from error
    raise ValueError(f"init must be zeros, constant or uniform, got {init['kind']!r}")


def name_in(request: Request) -> str:
    """The table that a request names."""
    name = request.options.get("name")
    if not isinstance(name, str):
        raise ValueError("malformed request: it names no table")
    return name


def bounds_in(array: Tensor) -> list[int]:
    """Where a request wants a table cut."""
    if array.dtype != torch.int64 or array.dim() != 1 or array.numel() > _MAX_PARTS:
        raise ValueError(f"malformed request: bounds must be int64, one more than parts, got {list(array.shape)}")
    return array.tolist()


def described(spec: TableSpec) -> dict[str, Any]:
    """What a table is, but for its bounds, which travel as an array."""
    values = {key: value for key, value in spec.to_json().items() if key != "bounds"}
    return {"spec": values, "generation": spec.generation}


def spec_in(options: Mapping[str, Any], arrays: Sequence[Tensor]) -> TableSpec:
    """The table that an answer describes."""
    return TableSpec.from_json(options["spec"], arrays[0].tolist(), options["generation"])


def contribution_in(request: Request) -> tuple[int, Contribution]:
    """The number of a table and what a rank brings to a step of it; ValueError where the request is none.

    Gradients in memory that the rank has lent are not looked at here.
    """
    arrays, options = request.arrays, request.options
    numbers: list[Any] = [options.get(name) for name in ("table", "step", "world_size")]
    is_gradient, skip, problem = options.get("is_gradient", True), options.get("skip", False), options.get("problem")
    if not all(type(n) is int for n in numbers) or not isinstance(options.get("optimizer"), dict):
        raise ValueError("malformed request: a step has a table, a number, a world_size and an optimizer")
    if type(is_gradient) is not bool or type(skip) is not bool or not isinstance(problem, str | None):
        raise ValueError("malformed request: is_gradient and skip are true or false, a problem is text")
    number, step, world_size = numbers
    sent = [] if "memory" in options else read_plan(arrays, 3)
    found = [(part, named_array(arrays, ids), named_array(arrays, grads)) for part, ids, grads in sent]
    new = Contribution(request.sender, world_size, options["optimizer"], found, request.incarnation, step)
    new.is_gradient, new.skip, new.problem = is_gradient, skip, problem
    return number, new
