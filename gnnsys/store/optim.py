"""Optimizers of DistEmbeddings. They hold no state: it lies beside the rows, and is updated with them.

Every rank calls `step()` once per step, whether it has gradients or not. It returns when the step was applied on every
shard: what is pulled next holds it. They are torch optimizers: schedulers, GradScalers and hooks take them as such.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.store.embedding import DistEmbedding
from gnnsys.store.gradients import EmbeddingHandle, not_finite
from gnnsys.store.push import PendingPush
from gnnsys.store.row_optimizers import check_optimizer

_WANTED = "pass a list of DistEmbeddings, at least one, such as encoder.embeddings: they have no parameters()"
Embeddings = Iterable[DistEmbedding] | Iterable[Mapping[str, Any]]


class _Option:
    """An option of an optimizer: the first group's, and set in all of them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: SparseOptimizer, owner: type) -> Any:
        return optimizer.param_groups[0][self._name]

    def __set__(self, optimizer: SparseOptimizer, value: Any) -> None:
        for group in optimizer.param_groups:
            group[self._name] = value


class SparseOptimizer(torch.optim.Optimizer, ABC):
    """What the optimizers have in common. `lr` and the rest may be changed between steps, alike on every rank.

    `embeddings` is a list of them, or of groups: {"params": [embedding, ...], "lr": ...}. `reduction` is what becomes
    of a row's gradients on several ranks: their "mean", as DDP has it, where each rank's loss is the mean over its own
    batch, or their "sum", where it is a share of one loss, as in full-graph training.
    """

    _step_supports_amp_scaling = True  # a GradScaler leaves it to `step` whether to skip: all ranks must alike
    kind: str
    lr = _Option()

    def __init__(self, embeddings: Embeddings, defaults: dict[str, Any]) -> None:
        given: list[Any] = list(embeddings) if isinstance(embeddings, Iterable) else []
        if not given:
            raise ValueError(_WANTED)
        super().__init__(given if all(isinstance(group, Mapping) for group in given) else [{"params": given}], defaults)

    @property
    def embeddings(self) -> list[DistEmbedding]:
        return [handle.embedding for group in self.param_groups for handle in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds embeddings with options of their own, as torch's optimizers do."""
        given = param_group["params"]
        given = [given] if isinstance(given, DistEmbedding) else list(given)
        if not given or not all(isinstance(embedding, DistEmbedding) for embedding in given):
            raise ValueError(_WANTED)
        tables = [(id(embedding.store), embedding.name) for embedding in [*self.embeddings, *given]]
        twice = next((name for store, name in tables if tables.count((store, name)) > 1), None)
        if twice is not None:
            raise ValueError(
                f"table {twice!r} is among the embeddings more than once, and would be stepped as often: name it once"
            )
        group = {**self.defaults, **param_group}
        check_optimizer(self.options(group))
        _is_sum(group)
        super().add_param_group({**param_group, "params": [EmbeddingHandle.of(embedding) for embedding in given]})

    @abstractmethod
    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What a shard is told of a group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, timeout: float | None = None) -> Any:  # type: ignore[override]
        """Applies the gradients of all ranks; TimeoutError names the ranks that did not take part.

        Embeddings without a gradient on any rank are left alone, as torch leaves a parameter whose `grad` is None. A
        gradient that is not finite is a ValueError on every rank, and nothing was changed; under a GradScaler that has
        found one, on whatever rank, all ranks skip.
        """
        try:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            counted = [e.gradients.found_inf for e in self.embeddings if e.gradients.found_inf is not None]
            if self._finish([*self._begin(timeout)]):
                self._tell_scaler(counted)
            return loss
        except BaseException:
            for told in ("grad_scale", "found_inf"):  # a GradScaler takes them back only after a step that returns
                vars(self).pop(told, None)
            raise

    def _begin(self, timeout: float | None) -> Iterable[PendingPush]:
        """Sends what this rank has for each embedding: all of it, or that no rank may apply theirs."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        skip = found_inf is not None and bool(found_inf)  # a GradScaler's, for this call
        work, problem = [], None
        for group in self.param_groups:
            options = self.options(group)
            check_optimizer(options)
            is_sum = _is_sum(group)
            for handle in group["params"]:
                embedding: DistEmbedding = handle.embedding
                exist = embedding.gradients.exist
                ids, grads = embedding.take_gradients()
                if scale is not None and not skip:
                    grads *= scale.double().reciprocal().float().cpu()  # as torch does it
                if is_sum:
                    grads *= embedding.store.world_size  # shards divide by it
                problem = problem or (None if skip else not_finite(embedding.name, ids, grads))
                work.append((embedding, ids, grads.neg_() if group["maximize"] else grads, options, exist))
        for embedding, ids, grads, options, exist in work:
            if skip or problem is not None:
                ids, grads = ids[:0], grads[:0]
            yield embedding.store.step(
                embedding.name, ids, grads, options, timeout=timeout, is_gradient=exist, skip=skip, problem=problem
            )

    @staticmethod
    def _finish(pending: list[PendingPush]) -> bool:
        """Waits for every embedding's step; raises the first error, or says whether the ranks have skipped."""
        failed: Exception | None = None
        for step in pending:
            try:
                step.result()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return any(step.is_skipped for step in pending)

    def _tell_scaler(self, counted: list[Tensor]) -> None:
        """Has this rank's scaler count an overflow that another rank has found: all must come to the same scale."""
        found_inf = getattr(self, "found_inf", None)
        if not counted and not bool(found_inf):
            raise RuntimeError(
                "another rank has skipped this step because of an overflow, and this one has no GradScaler to be told: "
                "call scaler.step(optimizer) on every rank"
            )
        for found in counted:
            found.fill_(1.0)

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer is; its moments lie beside the rows and are saved with them."""
        return {**super().state_dict(), "kind": self.kind, "tables": self._tables()}

    def _tables(self) -> list[list[str]]:
        """The tables of each group."""
        return [[handle.embedding.name for handle in group["params"]] for group in self.param_groups]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Takes learning rates and the rest from a state, group by group.

        ValueError for an optimizer of another kind, and where a table was in another group than it is now: it would
        get that one's options. Groups are not put in another order, as schedulers know them by their numbers.
        """
        kind = state_dict.get("kind")
        if kind != self.kind:
            raise ValueError(f"the state is of {kind!r}, this optimizer is {self.kind!r}")
        if "param_groups" not in state_dict:  # one that was saved when optimizers had no groups
            check_optimizer(state_dict)
            self._set_options(state_dict)
            return
        saved, here = _groups_of(state_dict.get("tables", [])), _groups_of(self._tables())
        for table in sorted(saved.keys() & here.keys()):
            if saved[table] != here[table]:
                raise ValueError(
                    f"table {table!r} is in group {_listed(here[table])} of this optimizer, and was in group "
                    f"{_listed(saved[table])} of the one that was saved: list the groups as they were then, "
                    f"{state_dict['tables']}"
                )
        for group in state_dict["param_groups"]:
            check_optimizer(self.options({**self.defaults, **group}))
            _is_sum(group)
        reductions = [group.get("reduction", "mean") for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, reduction in zip(self.param_groups, reductions, strict=True):
            group.setdefault("reduction", reduction)  # of a state of the time when there was no choice

    def _set_options(self, options: Mapping[str, Any]) -> None:
        """Takes what `options` said of the one group that there was. Needed by states of that time alone."""
        raise NotImplementedError(f"{type(self).__name__} does not read states of the time before groups")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that were not applied. `step` takes them away by itself."""
        for embedding in self.embeddings:
            embedding.gradients.clear(set_to_none=set_to_none)


class SparseAdam(SparseOptimizer):
    """torch.optim.SparseAdam: moments of a row change only in steps that have a gradient for it."""

    kind = "adam"
    betas, eps = _Option(), _Option()

    def __init__(
        self,
        embeddings: Embeddings,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        maximize: bool = False,
        reduction: str = "mean",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(embeddings, {**defaults, "maximize": maximize, "reduction": reduction})

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {"kind": "adam", "lr": _number(group["lr"]), "beta1": beta1, "beta2": beta2, "eps": group["eps"]}

    def _set_options(self, options: Mapping[str, Any]) -> None:
        self.lr, self.betas, self.eps = options["lr"], (options["beta1"], options["beta2"]), options["eps"]


class SparseAdagrad(SparseOptimizer):
    """torch.optim.Adagrad on sparse gradients."""

    kind = "adagrad"
    lr_decay, initial_accumulator_value, eps = _Option(), _Option(), _Option()

    def __init__(
        self,
        embeddings: Embeddings,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        reduction: str = "mean",
    ) -> None:
        initial = initial_accumulator_value
        defaults = {"lr": lr, "lr_decay": lr_decay, "initial_accumulator_value": initial, "eps": eps}
        super().__init__(embeddings, {**defaults, "maximize": maximize, "reduction": reduction})

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        initial, decay = group["initial_accumulator_value"], group["lr_decay"]
        return {
            "kind": self.kind,
            "lr": _number(group["lr"]),
            "lr_decay": decay,
            "initial": initial,
            "eps": group["eps"],
        }

    def _set_options(self, options: Mapping[str, Any]) -> None:
        self.lr, self.lr_decay = options["lr"], options["lr_decay"]
        self.initial_accumulator_value, self.eps = options["initial"], options["eps"]


class RowWiseAdagrad(SparseAdagrad):
    """Adagrad with one accumulator per row, which grows by the mean of the squared gradient of the row.

    So its state takes 4 bytes a row, whatever the dimension: 1 / dim of `SparseAdagrad`'s, 1 / (2 dim) of
    `SparseAdam`'s.
    """

    kind = "row_adagrad"


class SparseSGD(SparseOptimizer):
    """torch.optim.SGD on sparse gradients, without momentum. It keeps no state."""

    kind = "sgd"

    def __init__(
        self, embeddings: Embeddings, lr: float = 1e-2, *, maximize: bool = False, reduction: str = "mean"
    ) -> None:
        super().__init__(embeddings, {"lr": lr, "maximize": maximize, "reduction": reduction})

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": self.kind, "lr": _number(group["lr"])}

    def _set_options(self, options: Mapping[str, Any]) -> None:
        self.lr = options["lr"]


def _number(lr: Any) -> Any:
    """A learning rate as a number: torch's may be tensors of one."""
    return lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr


def _is_sum(group: Mapping[str, Any]) -> bool:
    """Whether a group's gradients are summed over the ranks; an optimizer of one's own need not say."""
    reduction = group.get("reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    return bool(reduction == "sum")


def _groups_of(tables: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    """The numbers of the groups that have each table; two stores may have tables of one name."""
    found: dict[str, list[int]] = {}
    for number, names in enumerate(tables):
        for name in names:
            found.setdefault(name, []).append(number)
    return found


def _listed(groups: list[int]) -> str:
    return " and ".join(map(str, groups))
