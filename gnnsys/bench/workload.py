"""What the benchmarks of one run share: sizes, graphs, folders and processes, each made once and ended with the run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from gnnsys.graph import Graph, rmat
from gnnsys.ops import CSC

SEED = 1
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """The power-law graph of issue-sized runs, and of quick ones that only show that everything works."""

    num_nodes: int
    num_edges: int
    dim: int = 128
    num_seeds: int = 1024
    fanout: tuple[int, ...] = (15, 10, 5)
    epoch_batches: int = 20


FULL = Sizes(1_000_000, 20_000_000)
QUICK = Sizes(20_000, 400_000, dim=32, num_seeds=256, epoch_batches=4)


class Workload:
    """Graphs, rows and whatever else is dear, made when first asked for and then kept for the run.

    What takes minutes to make lies in `cache`, a folder that outlives the run, where one was given. `settings` are the
    suite's own. `selects` says of a case's name whether it will run. Processes end at `close`, or at the end of a
    `with`.
    """

    def __init__(
        self, sizes: Sizes = FULL, *, cache: Path | None = None, settings: Mapping[str, str] | None = None,
        selects: Callable[[str], bool] = lambda name: True,
    ) -> None:  # fmt: skip
        self.selects = selects
        self.sizes, self.cache, self.settings = sizes, cache, dict(settings or {})
        self._kept: dict[str, Any] = {}
        self._stack = ExitStack()

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returned when `name` was first asked for. What failed then fails again, without a second try."""
        if name not in self._kept:
            try:
                self._kept[name] = make(), None
            except Exception as error:
                self._kept[name] = None, error
        made, failure = self._kept[name]
        if failure is not None:
            raise failure
        return made

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enters something that is left when the run ends: a server, a folder."""
        return self._stack.enter_context(context)

    @cached_property
    def folder(self) -> Path:
        """Where files of this run go: the cache, or a temporary folder."""
        if self.cache is not None:
            self.cache.mkdir(parents=True, exist_ok=True)
            return self.cache.resolve()
        return Path(self.enter(tempfile.TemporaryDirectory(prefix="gnnsys-bench-")))

    def close(self) -> None:
        self._kept.clear()
        self._stack.close()

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @cached_property
    def graph(self) -> Graph:
        """RMAT at full size: 1M nodes, 20M edges, a power law."""
        return rmat(self.sizes.num_nodes, self.sizes.num_edges, seed=SEED)

    @cached_property
    def small_graph(self) -> Graph:
        """An eighth of it, for peers that make a tensor per edge and feature (10 GB at full size)."""
        return rmat(self.sizes.num_nodes // 8, self.sizes.num_edges // 8, seed=SEED)

    @property
    def csc(self) -> CSC:
        return self.graph.csc()

    def rows(self, num_rows: int, *shape: int) -> Tensor:
        """float32 rows, the same ones for every side."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(num_rows, *shape, generator=generator)

    def seeds(self, count: int) -> Tensor:
        """int64 ids of different nodes that have in-edges (in RMAT almost half have none)."""
        nodes = self.csc.in_degrees().nonzero().view(-1)
        return nodes[self.ids(count, nodes.numel())]

    def ids(self, count: int, below: int) -> Tensor:
        """int64 ids drawn without replacement."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randperm(below, generator=generator)[:count]
