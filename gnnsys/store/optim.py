"""Optimizers of DistEmbeddings. They hold no state: it lies beside the rows, and is updated with them.

Every rank calls `step()` once per step, whether it has gradients or not. It returns when the step was applied on every
shard: what is pulled next holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gnnsys.store.embedding import DistEmbedding
from gnnsys.store.optimize import check_optimizer


class SparseOptimizer:
    """What the optimizers have in common. `lr` may be changed between steps, alike on every rank."""

    def __init__(self, embeddings: Iterable[DistEmbedding], lr: float) -> None:
        self.embeddings = list(embeddings)
        if not self.embeddings or not all(isinstance(e, DistEmbedding) for e in self.embeddings):
            raise ValueError("pass a list of DistEmbeddings, at least one")
        self.lr = lr
        check_optimizer(self.options())

    def options(self) -> dict[str, Any]:
        """What a shard is told."""
        raise NotImplementedError

    def step(self, timeout: float | None = None) -> None:
        """Applies the gradients of all ranks; TimeoutError names the ranks that did not take part."""
        options = self.options()
        check_optimizer(options)
        pending = [e.store.step(e.name, *e.take_gradients(), options, timeout=timeout) for e in self.embeddings]
        for step in pending:
            step.result()

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer is; its moments lie beside the rows and are saved with them."""
        return self.options()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes learning rate and the rest from `state`; ValueError for an optimizer of another kind."""
        check_optimizer(state)
        if state["kind"] != self.options()["kind"]:
            raise ValueError(f"the state is of {state['kind']!r}, this optimizer is {self.options()['kind']!r}")
        self._set_options(state)

    def _set_options(self, options: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that were not applied. `step` takes them away by itself."""
        for embedding in self.embeddings:
            embedding.take_gradients()


class SparseAdam(SparseOptimizer):
    """torch.optim.SparseAdam: moments of a row change only in steps that have a gradient for it."""

    def __init__(
        self,
        embeddings: Iterable[DistEmbedding],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.betas, self.eps = betas, eps
        super().__init__(embeddings, lr)

    def options(self) -> dict[str, Any]:
        return {"kind": "adam", "lr": self.lr, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}

    def _set_options(self, options: Mapping[str, Any]) -> None:
        self.lr, self.betas, self.eps = options["lr"], (options["beta1"], options["beta2"]), options["eps"]


class SparseAdagrad(SparseOptimizer):
    """torch.optim.Adagrad on sparse gradients."""

    def __init__(
        self,
        embeddings: Iterable[DistEmbedding],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        self.lr_decay, self.initial, self.eps = lr_decay, initial_accumulator_value, eps
        super().__init__(embeddings, lr)

    def options(self) -> dict[str, Any]:
        return {"kind": "adagrad", "lr": self.lr, "lr_decay": self.lr_decay, "initial": self.initial, "eps": self.eps}

    def _set_options(self, options: Mapping[str, Any]) -> None:
        self.lr, self.lr_decay = options["lr"], options["lr_decay"]
        self.initial, self.eps = options["initial"], options["eps"]
