"""Gradients of an embedding's rows, from the backward passes until a step takes them.

`EmbeddingHandle` stands for an embedding among the `params` of a torch optimizer: what torch asks of a parameter there
(GradScaler its `grad`, a scheduler its group) is answered from here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gnnsys.store.embedding import DistEmbedding


class Gradients:
    """The gradients of one embedding's rows. As with torch's `grad`, none is something else than one without rows."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._entries: list[tuple[int, Tensor, Tensor]] = []  # forward pass, ids, gradients of their rows
        self._were_taken = False  # since the last `clear`: torch would still have them
        self._lock = threading.Lock()
        self.found_inf: Tensor | None = None  # where a GradScaler counts overflows of these, once it has looked

    @property
    def exist(self) -> bool:
        """Whether there was a backward pass since the last step."""
        return bool(self._entries)

    def add(self, forward: int, ids: Tensor, grads: Tensor) -> None:
        with self._lock:
            self._entries.append((forward, ids, grads))

    def take(self) -> tuple[Tensor, Tensor]:
        """Row numbers and gradients on the CPU, in the order of the forward passes; they are gone from here then.

        Those of a GPU are added up there first, so that each row is copied and sent once.
        """
        with self._lock:
            taken, self._entries = sorted(self._entries, key=lambda entry: entry[0]), []
            self._were_taken = self._were_taken or bool(taken)
            self.found_inf = None
        if not taken:
            return self._no_rows()
        if len(taken) > 1 and any(grads.is_cuda for _, _, grads in taken):
            ids, total = _added(taken)
            return ids, total.cpu()
        if len(taken) == 1:
            return taken[0][1], taken[0][2].cpu()
        return torch.cat([ids for _, ids, _ in taken]), torch.cat([grads.cpu() for _, _, grads in taken])

    def clear(self, *, set_to_none: bool) -> None:
        """Forgets gradients. Without `set_to_none`, what had some has one without rows, as torch's would be zero."""
        with self._lock:
            had_some = self._were_taken or bool(self._entries)
            self._entries = [(-1, *self._no_rows())] if had_some and not set_to_none else []
            self._were_taken, self.found_inf = False, None

    def values(self) -> GradientValues:
        """The gradients as one tensor that may be changed in place, one row for each id; no rows where there are none.

        Those of several backward passes are added here, so that a norm of them is that of their sum.
        Not None then: a rank without gradients takes part in a step, and a GradScaler must not stumble over it.
        """
        with self._lock:
            entries = sorted(self._entries, key=lambda entry: entry[0])
            if len(entries) > 1:
                self._entries = [(entries[0][0], *_added(entries))]
            plain = self._entries[0][2] if self._entries else self._no_rows()[1]
        values = plain.as_subclass(GradientValues)
        values.of = self
        return values

    def _no_rows(self) -> tuple[Tensor, Tensor]:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, self._dim, device="cpu")


def _added(entries: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The ids of all entries, each once, on the CPU, and the sums of their gradients, in the order of the entries."""
    device = next((grads.device for _, ids, grads in entries if ids.numel()), entries[0][2].device)
    ids, places = torch.cat([ids for _, ids, _ in entries]).to(device).unique(return_inverse=True)
    total = torch.zeros(ids.numel(), entries[0][2].shape[1], device=device)
    for place, (_, _, grads) in zip(places.split([ids.numel() for _, ids, _ in entries]), entries, strict=True):
        total[place] += grads.to(device)  # an entry has an id once: nothing is left to chance on a GPU
    return ids.cpu(), total


class GradientValues(Tensor):
    """Gradients as a GradScaler sees them. They note where it counts overflows: see `SparseOptimizer.step`."""

    of: Gradients

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            grads, found_inf, _ = args
            for values in grads:
                if isinstance(values, cls):
                    values.of.found_inf = found_inf
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class EmbeddingHandle(Tensor):
    """An embedding, as an optimizer's parameter: its shape, without memory for it, and the gradients of its rows."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    embedding: DistEmbedding

    @staticmethod
    def of(embedding: DistEmbedding) -> EmbeddingHandle:
        shape = torch.empty(embedding.num_rows, embedding.dim, device="meta")
        handle: EmbeddingHandle = torch.Tensor._make_subclass(EmbeddingHandle, shape)
        handle.embedding = embedding
        return handle

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self.embedding.gradients.values()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError(f"gradients of embedding {self.embedding.name!r} come from its backward passes alone")
        self.embedding.gradients.clear(set_to_none=True)

    def __reduce_ex__(self, _: Any) -> Any:
        return self.embedding.__getstate__()  # says how embeddings are saved

    def __deepcopy__(self, _: Any) -> Any:
        return self.embedding.__getstate__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EmbeddingHandle({self.embedding.name!r}, {list(self.shape)})"


def not_finite(name: str, ids: Tensor, grads: Tensor) -> str | None:
    """Says which gradients are infinite or NaN; None where none is."""
    if not grads.numel() or bool(torch.isfinite(grads.sum())):  # one pass without a copy: finite, as long as all are
        return None
    rows = ids[~torch.isfinite(grads).flatten(1).all(1)].unique()
    if not rows.numel():
        return None  # their sum alone is not
    return f"gradients of table {name!r} are not finite, for {rows.numel()} rows, the first of them {int(rows[0])}"
