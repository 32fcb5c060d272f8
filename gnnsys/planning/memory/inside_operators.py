"""What operators hold that is no tensor of the trace: cuBLAS's workspaces, native operators' own, scratch of torch's.

Native operators tell theirs from shapes (`gnnsys.ops.workspace_bytes`); torch's were measured on the kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.ops import allocation_order, told_workspaces, workspace_bytes
from gnnsys.planning.memory.device_profile import DeviceProfile
from gnnsys.planning.memory.fake_rows import PRODUCTS, op_name
from gnnsys.planning.memory.ledger import StorageLedger
from gnnsys.planning.memory.onednn_scratch import ONEDNN, onednn_scratch
from gnnsys.planning.memory.reduction_scratch import REDUCTIONS, bytes_of_converted

_PRODUCTS = frozenset(map(op_name, PRODUCTS))
_Ended = Callable[[], None]


class InsideOperators:
    """`before` is the dispatch mode's: told of an operator, it says what to do when that has ended.

    Results are allocated first, scratch after them: so it is entered when the operator ends, and freed at once.
    """

    def __init__(self, ledger: StorageLedger, device_type: str, profile: DeviceProfile | None) -> None:
        self._ledger, self._device_type, self._profile = ledger, device_type, profile
        self._statements = told_workspaces()
        self._has_workspace: set[tuple[bool, bool]] = set()  # (of the backward thread, of products with a bias)
        self.told_ops = REDUCTIONS | ONEDNN | (frozenset() if profile is None else profile.ops)
        self.unknown: set[str] = set()
        self.most_scratch = 0  # of a native op on the CPU: much of it no tensors, and told apart

    def before(self, name: str, arguments: Sequence[Any]) -> _Ended | None:
        namespace, _, op = name.partition("::")
        if namespace == "gnnsys":
            return self._native(op, arguments)
        if name in ONEDNN:
            if self._device_type != "cpu":  # there cuDNN has them
                self.unknown.add(name)
                return None
            num_bytes = onednn_scratch(name, arguments)
            return (lambda: self._pulse(name, num_bytes)) if num_bytes else None
        if self._profile is None:
            blocks = [bytes_of_converted(name, arguments, self._device_type != "cpu")]
        elif name in _PRODUCTS:
            return lambda: self._product(self._profile, name, arguments)  # type: ignore[arg-type]
        else:
            blocks = self._profile.blocks(name, arguments)
        return (lambda: self._pulse(name, *blocks)) if any(blocks) else None

    def _native(self, op: str, arguments: Sequence[Any]) -> _Ended | None:
        if (op, self._device_type) not in self._statements:
            self.unknown.add(op)
            return None
        num_bytes = workspace_bytes(op, *arguments, device=self._device_type)
        steps = allocation_order(op, arguments, self._device_type)
        if self._device_type == "cpu":
            self.most_scratch = max(self.most_scratch, num_bytes)
        if steps is not None:
            first = self._ledger.num_changes
            return lambda: self._ledger.reorder(first, steps, f"gnnsys::{op}")
        if self._device_type == "cpu":
            return None
        return self._ledger.workspace(num_bytes, f"gnnsys::{op}") if num_bytes else None

    def _product(self, profile: DeviceProfile, name: str, arguments: Sequence[Any]) -> None:
        """A backward pass has a thread, a handle and a workspace of its own."""
        is_backward = torch._C._current_graph_task_id() != -1
        self._keep(is_backward, False, profile.backward_workspace if is_backward else profile.product_workspace)
        first = arguments[0] if arguments else None
        if name == "aten::addmm" and isinstance(first, Tensor) and first.dim() == 1:
            self._keep(is_backward, True, profile.linear_workspace)
            if profile.linear_scratch:
                self._pulse(name, profile.linear_scratch)

    def _keep(self, is_backward: bool, adds_bias: bool, num_bytes: int) -> None:
        if num_bytes and (is_backward, adds_bias) not in self._has_workspace:
            self._has_workspace.add((is_backward, adds_bias))
            self._ledger.workspace(num_bytes, "cuBLAS")

    def _pulse(self, name: str, *blocks: int) -> None:
        for give_back in [self._ledger.workspace(num_bytes, name) for num_bytes in blocks]:
            give_back()
