"""Which rows modules are given now, and dropout whose mask depends on them: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from gnnsys.ops import dropout_rows, stream_key


class KeyedRows(NamedTuple):
    """Which rows a stage works on now: the nodes' original ids, and what their random numbers depend on besides."""

    ids: Tensor
    key: int


@dataclass
class DrawContext:
    """A stage at work on rows of some nodes; each use of dropout in it has a number. `by_type`: their ids by type."""

    rows: KeyedRows
    by_type: Mapping[str, Tensor] | None = None
    num_drops: int = 0


_NOW: ContextVar[DrawContext | None] = ContextVar("gnnsys_rows", default=None)


@contextmanager
def working_on(rows: KeyedRows, by_type: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside it modules are given rows of these nodes."""
    before = _NOW.set(DrawContext(rows, by_type))
    try:
        yield
    finally:
        _NOW.reset(before)


@contextmanager
def working_on_type(node_type: str) -> Iterator[None]:
    """Inside it modules are given rows of those of the nodes that are of one type."""
    now = _NOW.get()
    if now is None or now.by_type is None:
        yield
    else:
        with working_on(KeyedRows(now.by_type[node_type], now.rows.key)):
            yield


class Dropout(nn.Dropout):
    """Dropout whose mask depends on seed, step, layer, node and column alone: the same on any number of ranks.

    `HybridParallel` makes every `nn.Dropout` of its list one of these. Elsewhere it is torch's own.
    """

    def forward(self, rows: Tensor) -> Tensor:
        now = _NOW.get()
        if now is None or not self.training or self.p == 0:
            return super().forward(rows)
        if rows.shape[0] != now.rows.ids.numel():
            raise ValueError(
                f"dropout of {rows.shape[0]} rows where the bin has {now.rows.ids.numel()} nodes: drop its output"
            )
        now.num_drops += 1
        if self.p == 1:
            return rows * 0
        return dropout_rows(rows, now.rows.ids, self.p, stream_key(now.rows.key, now.num_drops))


def draw_context() -> DrawContext | None:
    """That of the stage whose modules are being called, None outside of a pass."""
    return _NOW.get()


def keyed(module: nn.Module) -> nn.Module:
    """The module; torch's dropout becomes ours, in its place, so that whoever has it can still switch it."""
    if type(module) is nn.Dropout:
        module.__class__ = Dropout
    return module
