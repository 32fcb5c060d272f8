"""A grid of arguments, as `lr=.1,.01 hidden=64,256`, and the jobs that it stands for."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_JOBS = 100_000


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["lr=.1,.01"]` is `{"lr": [0.1, 0.01]}`. What is no number and no other JSON is text.

    >>> parse_grid(["lr=.1,.01", "kind=gcn,sage", "sizes=[[5,5],[10,5]]"])
    {'lr': [0.1, 0.01], 'kind': ['gcn', 'sage'], 'sizes': [[5, 5], [10, 5]]}
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier() or not values:
            raise ValueError(f"a grid is NAME=VALUE,VALUE such as lr=.1,.01, got {text!r}")
        if name in grid:
            raise ValueError(f"{name} is given twice: write all its values in one, as {name}=1,2")
        whole = _value(values)
        grid[name] = whole if isinstance(whole, list) else [_value(value) for value in values.split(",")]
    return grid


def combinations(grid: Mapping[str, Sequence[Any]], seeds: int) -> list[tuple[dict[str, Any], int]]:
    """(arguments, seed) of all jobs, the first name slowest and the seed quickest."""
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds must be a whole number, at least 1, got {seeds!r}")
    for name, values in grid.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name} of a grid must be a list of values, got {values!r}")
    count = math.prod(map(len, grid.values())) * seeds
    if count > _MOST_JOBS:
        raise ValueError(
            f"a sweep has at most {_MOST_JOBS:,} jobs, this one has {count:,}: leave out some values or seeds"
        )
    rows = [dict(zip(grid, row, strict=True)) for row in itertools.product(*grid.values())]
    return [(row, seed) for row in rows for seed in range(seeds)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return float(text) if text.lower() not in ("nan", "inf", "-inf", "infinity") else text
    except ValueError:
        return text
