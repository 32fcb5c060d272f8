"""Sparse optimizers where the rows live: what a step does to a table, and the state it keeps beside it.

State is a table of its own in the same shard ("NAME/exp_avg"), made when the first step needs it, saved and dropped
with the table it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gnnsys.ops import sparse_adagrad_step, sparse_adam_step
from gnnsys.store.part_rows import PartRows

# The states of an optimizer, by the last part of their table's name.
STATES: dict[str, tuple[str, ...]] = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}


def state_names(table: str) -> list[str]:
    """The tables that optimizers may keep beside one."""
    return [f"{table}/{state}" for states in STATES.values() for state in states]


Step = Callable[[PartRows, Sequence[PartRows], Sequence[Tensor], Sequence[Tensor]], int]


def check_optimizer(options: Mapping[str, Any]) -> None:
    """ValueError unless `options` describe an optimizer: its kind, its learning rate and what else it takes."""
    kind = options.get("kind")
    if kind not in STATES:
        raise ValueError(f"the optimizer must be one of {list(STATES)}, got {kind!r}")
    numbers = {"adam": ("lr", "beta1", "beta2", "eps"), "adagrad": ("lr", "lr_decay", "initial", "eps")}[kind]
    if set(options) != {"kind", *numbers}:
        raise ValueError(f"{kind} takes {', '.join(numbers)}, got {', '.join(sorted(options))}")
    for name in numbers:
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    for name in ("beta1", "beta2"):
        if options.get(name, 0.0) >= 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {options[name]}")


def make_step(options: Mapping[str, Any], step: int, ranks: int) -> Step:
    """What step number `step` (from 1) does to the rows of a part and their states, given ids and gradients by rank."""
    if options["kind"] == "adam":
        beta1, beta2 = options["beta1"], options["beta2"]
        step_size = options["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)

        def adam(rows: PartRows, states: Sequence[PartRows], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> int:
            return sparse_adam_step(
                rows.rows, states[0].rows, states[1].rows, ids, grads, ranks=ranks, step_size=step_size,
                betas=(beta1, beta2), eps=options["eps"], versions=_versions(rows, *states),
            )  # fmt: skip

        return adam
    step_size = options["lr"] / (1 + (step - 1) * options["lr_decay"])

    def adagrad(rows: PartRows, states: Sequence[PartRows], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> int:
        return sparse_adagrad_step(
            rows.rows, states[0].rows, ids, grads, ranks=ranks, step_size=step_size, eps=options["eps"],
            versions=_versions(rows, *states),
        )  # fmt: skip

    return adagrad


def _versions(*rows: PartRows) -> list[Tensor]:
    return [r.versions for r in rows if r.versions is not None]
