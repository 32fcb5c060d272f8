"""Models that the explaining process makes by their names."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.nn import GraphSAGE

WIDTH, CLASSES = 24, 4


def sage() -> nn.Module:
    return GraphSAGE(WIDTH, 8, 2, CLASSES)


def described(text: str) -> nn.Module:
    return sage()


def wider() -> nn.Module:
    return GraphSAGE(WIDTH, 16, 2, CLASSES)


class Failing(nn.Module):
    """Refuses to run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        raise RuntimeError("no forward pass today")


def failing() -> nn.Module:
    return Failing()


class Slow(GraphSAGE):
    """Says that it has begun, in the file that SLOW_MODEL names, and takes its time."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        Path(os.environ["SLOW_MODEL"]).touch()
        threading.Event().wait(600)
        return super().forward(*args, **options)


def slow() -> nn.Module:
    return Slow(WIDTH, 8, 2, CLASSES)


def broken() -> nn.Module:
    raise RuntimeError("no model today")


def no_model() -> int:
    return 3


not_a_function = "text"
