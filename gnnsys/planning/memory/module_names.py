"""Which module of a model is at work, in the forward pass and on the way back.

Calls of modules keep a stack of names. Hooks would too, but our layers, and others', compute in another order where a
module has hooks: what is watched must run as it does alone. Autograd numbers its nodes in the order in which they are
made, so the numbers that a module used in the forward pass tell whose node runs in the backward pass.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ModuleNames:
    """`here()` is the name of the module at work, "" outside of any, and whether a forward pass is running."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._numbers: list[int] = []  # of autograd's next node, when the module at work changed
        self._at_work: list[str] = []

    def here(self) -> tuple[str, bool]:
        if self._stack:
            return self._stack[-1], True
        node = torch._C._current_autograd_node()
        if node is None or not self._numbers:
            return "", False
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._at_work[place] if place >= 0 else ""), False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls of modules by this thread are noted."""
        plain_call, thread = nn.Module._call_impl, threading.get_ident()

        def noted_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return plain_call(module, *args, **kwargs)
            self._enter(module)
            try:
                return plain_call(module, *args, **kwargs)
            finally:
                self._leave()

        nn.Module._call_impl = noted_call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module._call_impl = plain_call  # type: ignore[method-assign]

    def _enter(self, module: nn.Module) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._note()

    def _leave(self) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._at_work.append(self._stack[-1] if self._stack else "")
