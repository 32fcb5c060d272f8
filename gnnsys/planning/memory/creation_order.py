"""The order in which a job's function makes its tensors.

What an allocator reserves depends on that order. A function may make weights first, or the graph; a trace meets both
when they are there.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CreationOrder(TorchDispatchMode):
    """Numbers storages as operators make them; `number` of one that was not seen is above all others."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._note(value.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._numbers:
            return

        def gone(_: Any) -> None:
            self._numbers.pop(key, None)

        self._numbers[key] = weakref.ref(storage, gone), self._count
        self._count += 1

    def number(self, storage: torch.UntypedStorage) -> int:
        found = self._numbers.get(storage._cdata)
        return self._count if found is None else found[1]
