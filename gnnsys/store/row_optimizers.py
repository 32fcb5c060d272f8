"""Sparse optimizers where the rows live: what a step does to a table, and the state it keeps beside it.

State is a table of its own in the same shard ("NAME/exp_avg"), made when the first step needs it, saved and dropped
with the table it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.ops import compact, sparse_adagrad_step, sparse_adam_step, update_rows
from gnnsys.store.part_rows import PartRows

# The states of an optimizer, by the last part of their table's name.
STATES: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "row_adagrad": ("row_sum",),
    "sgd": (),
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "adam": ("lr", "beta1", "beta2", "eps"),
    "adagrad": ("lr", "lr_decay", "initial", "eps"),
    "row_adagrad": ("lr", "lr_decay", "initial", "eps"),
    "sgd": ("lr",),
}
_ONE_VALUE = ("row_sum",)  # states with one value per row; the others have a row's shape


def state_names(table: str) -> list[str]:
    """The tables that optimizers may keep beside one."""
    return [f"{table}/{state}" for states in STATES.values() for state in states]


def state_row_shape(state: str, row_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a state's rows, beside rows of `row_shape`."""
    return () if state in _ONE_VALUE else tuple(row_shape)


Step = Callable[[PartRows, Sequence[PartRows], Sequence[Tensor], Sequence[Tensor]], int]


def check_optimizer(options: Mapping[str, Any]) -> None:
    """ValueError unless `options` describe an optimizer: its kind, its learning rate and what else it takes."""
    kind = options.get("kind")
    if kind not in STATES:
        raise ValueError(f"the optimizer must be one of {list(STATES)}, got {kind!r}")
    numbers = _OPTIONS[kind]
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
    kind = options["kind"]
    if kind == "adam":
        beta1, beta2 = options["beta1"], options["beta2"]
        step_size = options["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)

        def adam(rows: PartRows, states: Sequence[PartRows], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> int:
            return sparse_adam_step(
                rows.rows, states[0].rows, states[1].rows, ids, grads, ranks=ranks, step_size=step_size,
                betas=(beta1, beta2), eps=options["eps"], versions=_versions(rows, *states),
            )  # fmt: skip

        return adam
    if kind == "sgd":

        def sgd(rows: PartRows, states: Sequence[PartRows], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> int:
            touched, gradient = _averaged(ids, grads, ranks)
            rows.update(touched, gradient.mul_(-options["lr"]), add=True)
            return touched.numel()

        return sgd
    step_size = options["lr"] / (1 + (step - 1) * options["lr_decay"])
    if kind == "row_adagrad":

        def by_row(rows: PartRows, states: Sequence[PartRows], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> int:
            """s += mean of g^2 over a row; row -= step_size g / (sqrt(s) + eps)."""
            touched, gradient = _averaged(ids, grads, ranks)
            sums = states[0].rows[touched] + gradient.double().square().view(touched.numel(), -1).mean(1).float()
            states[0].update(touched, sums, add=False)
            divisor = (sums.sqrt() + options["eps"]).view(-1, *[1] * (gradient.dim() - 1))
            rows.update(touched, gradient.div_(divisor).mul_(-step_size), add=True)
            return touched.numel()

        return by_row

    def adagrad(rows: PartRows, states: Sequence[PartRows], ids: Sequence[Tensor], grads: Sequence[Tensor]) -> int:
        return sparse_adagrad_step(
            rows.rows, states[0].rows, ids, grads, ranks=ranks, step_size=step_size, eps=options["eps"],
            versions=_versions(rows, *states),
        )  # fmt: skip

    return adagrad


def _versions(*rows: PartRows) -> list[Tensor]:
    return [r.versions for r in rows if r.versions is not None]


def _averaged(ids: Sequence[Tensor], grads: Sequence[Tensor], ranks: int) -> tuple[Tensor, Tensor]:
    """The rows that some rank has a gradient for, each once, and its sum over ranks, in their order, over `ranks`."""
    joined = torch.cat([each.long() for each in ids])
    (touched,), (place,) = compact([joined[:0]], [joined], [0])
    total = torch.zeros(touched.numel(), *grads[0].shape[1:], dtype=torch.float32, device="cpu")
    for places, gradient in zip(place.split([each.numel() for each in ids]), grads, strict=True):
        update_rows(total, places, gradient, add=True)
    return touched, total.div_(ranks)
