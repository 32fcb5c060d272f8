"""A pytest plugin: every native call that the tests make is made again with its arguments damaged.

The first calls of every op with small arguments are kept while the tests run. At the end each is repeated many times
with one argument made wrong: extreme numbers among its ids and offsets, arrays cut, emptied, lengthened or of another
dtype. An op may refuse (ValueError, RuntimeError) or answer; under AddressSanitizer and UBSan it may not read or write
what is not its own, nor overflow on the way to refusing.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from typing import Any

import torch

import gnnsys.ops  # noqa: F401 - the modules whose calls are kept

CALLS_PER_OP = 4
MOST_VALUES = 4096
DAMAGES_PER_CALL = int(os.environ.get("GNNSYS_DAMAGES", "60"))
EXTREMES = [-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]
REFUSALS = (ValueError, RuntimeError, IndexError, TypeError, NotImplementedError, OverflowError)
# Numbers that say how much work to do or memory to take: any value is allowed, and large ones take for ever.
AMOUNTS = {"rounds", "passes", "work", "num_parts", "num_nodes", "num_src", "num_dst", "num_clusters", "fanout"}
LEFT_ALONE = {"versions"}  # a row that is being written is waited for, for ten seconds
AMOUNTS |= {"log2_slots", "num_classes", "limit", "src_skew", "dst_skew"}


class Recorder:
    """Stands in for torch.ops.gnnsys and keeps the first small calls of every op."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: list[tuple[str, tuple, dict]] = []
        self.kept: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.kept[name] < CALLS_PER_OP and is_plain((args, kwargs)):
                self.kept[name] += 1
                self.calls.append((name, copied(args), copied(kwargs)))
            return op(*args, **kwargs)

        call.default = op.default  # type: ignore[attr-defined]
        return call


def is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() <= MOST_VALUES
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    return all(map(is_plain, value.values())) if isinstance(value, dict) else True


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(map(copied, value))
    return {name: copied(item) for name, item in value.items()} if isinstance(value, dict) else value


def damaged(value: Any, name: str, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value if name in AMOUNTS else draw.choice(EXTREMES)
    if isinstance(value, float):
        return draw.choice([0.0, -1.0, float("nan"), float("inf"), 1e308, -1e308])
    if isinstance(value, (list, tuple)) and value:
        at = draw.randrange(len(value))
        changed = list(value)
        if draw.random() < 0.2:
            del changed[at]
        else:
            changed[at] = damaged(changed[at], name, draw)
        return changed
    return damaged_tensor(value, draw) if isinstance(value, torch.Tensor) else value


def damaged_tensor(value: torch.Tensor, draw: random.Random) -> torch.Tensor:
    way = draw.randrange(10)
    if way < 6 and value.numel() and value.dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        changed = value.clone()
        for _ in range(draw.choice([1, 1, 2, 4])):
            place = draw.randrange(value.numel())
            if value.dtype.is_floating_point:
                changed.view(-1)[place] = draw.choice([float("nan"), float("inf"), -1.0, 1e38])
            else:
                info = torch.iinfo(value.dtype)
                near = int(changed.view(-1)[place]) + draw.choice([-1, 1])
                extreme = draw.choice([*EXTREMES, near])
                changed.view(-1)[place] = min(max(extreme, info.min), info.max)
        return changed
    if way == 6 and value.dim():
        return value[: draw.randrange(value.shape[0] + 1)].clone()
    if way == 7 and value.dim() and value.shape[0]:
        return torch.cat([value, value[: draw.randrange(value.shape[0] + 1)]])
    if way == 8:
        return value.to(draw.choice([torch.int32, torch.int64, torch.float32, torch.float16, torch.uint8]))
    return draw.choice([value.new_empty(0), value.unsqueeze(0), value.reshape(-1)])


def damage_calls(recorder: Recorder) -> str:
    """Repeats the kept calls; what kinds of answers there were."""
    draw = random.Random(0)
    answers: Counter[str] = Counter()
    for name, args, kwargs in recorder.calls:
        op = getattr(recorder.ops, name)
        names = [argument.name for argument in op.default._schema.arguments]
        for trial in range(DAMAGES_PER_CALL):
            again, named = list(copied(args)), copied(kwargs)
            if not again:
                break
            at = draw.randrange(len(again))
            if names[at] in LEFT_ALONE:
                continue
            again[at] = damaged(again[at], names[at], draw)
            note(f"{name}: argument {names[at]}, damage {trial}")
            try:
                op(*again, **named)
                answers["answered"] += 1
            except REFUSALS as refusal:
                answers[type(refusal).__name__] += 1
    ops = len({name for name, _, _ in recorder.calls})
    return f"{sum(answers.values())} damaged calls of {ops} ops: {dict(answers)}"


def note(what: str) -> None:
    """What was tried last, for the reader of a report."""
    path = os.environ.get("GNNSYS_DAMAGE_LOG")
    if path:
        with open(path, "w") as log:
            log.write(f"{what}\n")


recorder = Recorder(torch.ops.gnnsys)
for module_name, module in list(sys.modules.items()):
    if module_name.startswith("gnnsys.ops.") and module_name != "gnnsys.ops._library" and hasattr(module, "native"):
        module.native = recorder  # type: ignore[attr-defined]


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    print(f"\n{damage_calls(recorder)}", file=sys.stderr, flush=True)
