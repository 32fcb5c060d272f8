"""Our sparse optimizers are torch's own on `nn.Embedding(sparse=True)`, whatever a training loop does with them.

A case says what every rank looks up in every step, and how the loop around it goes. Ours runs it alone, and on
two ranks of two machines; torch's runs it in one process with the mean of the ranks' losses.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnnsys.store import (
    DistEmbedding,
    RowWiseAdagrad,
    SparseAdagrad,
    SparseAdam,
    SparseOptimizer,
    SparseSGD,
    Store,
)
from tests.store.cluster import alone, cluster, random_ids, random_rows
from tests.support.grid import every_value

ROWS, DIM, STEPS = 40, 4, 6
ADAM = (SparseAdam, torch.optim.SparseAdam, {"lr": 0.05, "betas": (0.8, 0.9)})
SGD = (SparseSGD, torch.optim.SGD, {"lr": 0.05})
ADAGRAD = (SparseAdagrad, torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.3, "initial_accumulator_value": 0.1})


class PlainRowWise(torch.optim.Optimizer):
    """Row-wise Adagrad as it is written down, on sparse gradients."""

    def __init__(self, params: Any, lr: float, initial_accumulator_value: float, maximize: bool = False) -> None:
        super().__init__(params, {"lr": lr, "initial": initial_accumulator_value, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                grad = weight.grad.to_dense() * (-1 if group["maximize"] else 1)
                state = self.state[weight]
                sums = state.setdefault("sum", torch.full((weight.shape[0],), group["initial"]))
                sums += grad.square().mean(1)
                weight -= group["lr"] * grad / (sums.sqrt() + 1e-10).unsqueeze(1)
        return loss


ROW_WISE = (RowWiseAdagrad, PlainRowWise, {"lr": 0.05, "initial_accumulator_value": 0.1})

Batch = list[tuple[int, Tensor]]  # what one loss looks up: which embedding, which rows


def some_ids(step: int, rank: int, count: int = 12, bound: int = ROWS) -> Tensor:
    return random_ids(count, bound, seed=100 * step + rank)


def one_batch(step: int, rank: int) -> list[Batch]:
    return [[(0, some_ids(step, rank))]]


@dataclass
class Case:
    """How a loop goes. `batches(step, rank)` has one entry for each backward pass; `scaled` has a GradScaler."""

    name: str
    batches: Callable[[int, int], list[Batch]] = one_batch
    num_embeddings: int = 1
    set_to_none: bool = True
    frozen: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    overflows: tuple[tuple[int, int], ...] | None = None  # (step, rank) of losses that are infinite
    unscales: bool = False
    autocast: torch.dtype | None = None
    with_closure: bool = False
    new_optimizer_at: int | None = None  # from this step on another one, with the state_dict of the first
    world_sizes: tuple[int, ...] = (1, 2)
    late: bool = False  # the last embedding is added by add_param_group, after two steps


def often(step: int, rank: int) -> list[Batch]:
    return [[(0, torch.cat([some_ids(step, rank, 30, bound=5), torch.tensor([step, step])]))]]


def not_always(step: int, rank: int) -> list[Batch]:
    return [] if step in (0, 2, 3) else one_batch(step, rank)


def not_everywhere(step: int, rank: int) -> list[Batch]:
    return [] if step % 2 == rank % 2 else one_batch(step, rank)


def sometimes_empty(step: int, rank: int) -> list[Batch]:
    return [[(0, torch.empty(0, dtype=torch.int64))]] if step % 2 else one_batch(step, rank)


def decay(step: int) -> float:
    return 0.5**step


def by_turns(step: int, rank: int) -> list[Batch]:
    return [[(i, some_ids(step, rank + 7 * i)) for i in range(3) if (step + i) % 2 or i == 2]]


CASES = [
    Case("ids that repeat in a batch and over steps", often),
    Case("no gradient in some steps", not_always),
    Case("no gradient in some steps, grads kept as zeros", not_always, set_to_none=False),
    Case("gradients on one rank and not on the other", not_everywhere),
    Case("gradients without rows", sometimes_empty),
    Case("two backward passes", lambda step, rank: one_batch(step, rank) + one_batch(step + 50, rank)),
    Case("several embeddings by turns", by_turns, num_embeddings=3),
    Case("one of them frozen", by_turns, num_embeddings=3, frozen=(2,)),
    Case("a group of its own", by_turns, num_embeddings=3, late=True),
    Case("maximize", options={"maximize": True}),
    Case("gradients summed over the ranks", often, reduction="sum"),
    Case("closures", with_closure=True),
    Case("StepLR", scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3)),
    Case("LambdaLR", by_turns, 3, late=True, scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, decay)),
    Case("another optimizer with its state", one_batch, new_optimizer_at=3),
    Case("a scaler", overflows=()),
    Case("a scaler, overflow on rank 0", overflows=((2, 0), (3, 0))),
    Case("a scaler, overflow on the last rank", by_turns, 3, overflows=((1, 1), (1, 0), (4, 1))),
    Case("a scaler, grads unscaled first", overflows=((2, 0),), unscales=True),
    Case("a scaler, no gradients on a rank", not_everywhere, overflows=((2, 0), (3, 0)), world_sizes=(2,)),
    Case("bf16", autocast=torch.bfloat16),
    Case("fp16 with a scaler", autocast=torch.float16, overflows=((3, 0),)),
]  # fmt: skip
ONE_CYCLE = Case(
    "OneCycleLR changes betas too",
    scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, STEPS + 1, base_momentum=0.5, max_momentum=0.8),
)


class Loop:
    """The training loop of a case: the same lines for ours, on one rank, and for torch's, which plays all ranks."""

    def __init__(self, case: Case, embeddings: list[nn.Module], make: Callable[..., Any], ranks: list[int], share: int):
        self.case, self.embeddings, self.ranks, self.share = case, embeddings, ranks, share
        self._make = make
        for i in case.frozen:
            embeddings[i].requires_grad_(False)
        self.optimizer = make(embeddings[:-1] if case.late else embeddings)
        self.scheduler = case.scheduler(self.optimizer) if case.scheduler else None
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if case.overflows is not None else None
        )
        self.weight = random_rows(DIM, DIM, seed=5) / 50

    def run(self) -> list[float]:
        """All steps; the scales after each, if there is a scaler."""
        scales = []
        for step in range(STEPS):
            if self.case.late and step == 2:
                self.optimizer.add_param_group(_group(self.optimizer, self.embeddings[-1]))
                self.scheduler = self.case.scheduler(self.optimizer) if self.case.scheduler else None
            if step == self.case.new_optimizer_at:
                state, self.optimizer = self.optimizer.state_dict(), self._make(self.embeddings, lr=7.0)
                self.optimizer.load_state_dict(state)
            self._step(step)
            self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
            if self.scheduler is not None:
                self.scheduler.step()
            scales.append(self.scaler.get_scale() if self.scaler else 0.0)
        return scales

    def _step(self, step: int) -> None:
        scaler = self.scaler
        if self.case.with_closure:
            loss = self.optimizer.step(lambda: self._backward(step))
            assert loss is not None and loss.requires_grad
            return
        self._backward(step)
        if scaler is None:
            self.optimizer.step()
            return
        scaler.scale(torch.ones(()))  # a rank without a loss makes its scale too
        if self.case.unscales:
            scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()

    def _backward(self, step: int) -> Tensor | None:
        loss = None
        for rank in self.ranks:
            for batch in self.case.batches(step, rank):
                loss = self._loss(batch) / self.share
                if self.case.overflows is not None and (step, rank) in self.case.overflows:
                    loss = loss * torch.inf
                scaled = self.scaler.scale(loss) if self.scaler else loss
                if scaled.requires_grad:
                    scaled.backward()
        return loss

    def _loss(self, batch: Batch) -> Tensor:
        context = torch.autocast("cpu", self.case.autocast) if self.case.autocast else contextlib.nullcontext()
        with context:
            found = [nn.functional.linear(self.embeddings[i](ids), self.weight) for i, ids in batch]
        return sum(((rows.float() - 0.3).square().sum() / 8 for rows in found), torch.zeros(()))


def _group(optimizer: Any, embedding: nn.Module) -> dict[str, Any]:
    ours = isinstance(embedding, DistEmbedding)
    return {"params": [embedding] if ours else list(embedding.parameters()), "lr": 0.2, "initial_lr": 0.2}


def first_rows(i: int) -> Tensor:
    return random_rows(ROWS, DIM, seed=i) / 50


def ours(case: Case, kind: Any, store: Store, barrier: Barrier) -> tuple[list[Tensor], list[float]]:
    embeddings: list[nn.Module] = []
    for i in range(case.num_embeddings):
        embedding = DistEmbedding(store, ROWS, DIM, f"emb{i}", init=0.0)
        if store.rank == 0:
            embedding.table[:] = first_rows(i)
        embeddings.append(embedding)
    barrier.wait(180)
    options = {**kind[2], **case.options, "reduction": case.reduction}
    loop = Loop(case, embeddings, lambda e, **o: kind[0](e, **{**options, **o}), [store.rank], 1)
    scales = loop.run()
    return [embedding.table[:] for embedding in embeddings], scales


def torchs(case: Case, kind: Any, world_size: int) -> tuple[list[Tensor], list[float]]:
    embeddings: list[nn.Module] = [
        nn.Embedding.from_pretrained(first_rows(i), freeze=False, sparse=True) for i in range(case.num_embeddings)
    ]

    def make(given: list[nn.Module], **options: Any) -> torch.optim.Optimizer:
        return kind[1]([e.weight for e in given], **{**kind[2], **case.options, **options})

    share = 1 if case.reduction == "sum" else world_size
    scales = Loop(case, embeddings, make, list(range(world_size)), share).run()
    return [embedding.weight.detach() for embedding in embeddings], scales


@every_value(
    case={case.name: case for case in CASES}, kind={"adam": ADAM, "adagrad": ADAGRAD, "sgd": SGD, "rows": ROW_WISE}
)
def test_a_loop_ends_with_the_rows_and_scales_of_torchs_own(case, kind):
    check(case, kind)


def test_a_scheduler_that_changes_betas_is_followed():
    check(ONE_CYCLE, ADAM)


def check(case: Case, kind: Any) -> None:
    for world_size in case.world_sizes:
        run = partial(ours, case, kind, barrier=Barrier(world_size))
        if world_size == 1:
            with alone(3) as store:
                found = [run(store)]
        else:
            with cluster([0, 1], world_size) as c:
                found = c.on_ranks(run)
        rows, scales = torchs(case, kind, world_size)
        for rank, (mine, my_scales) in enumerate(found):
            assert my_scales == scales, f"rank {rank} of {world_size} has other scales"
            for one, other in zip(mine, rows, strict=True):
                assert not torch.equal(other, torch.zeros_like(other))
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda m: f"{world_size} ranks: {m}")  # noqa: B023


def test_gradients_that_are_not_finite_are_refused_on_every_rank_and_change_nothing():
    """Of one embedding, on one rank, for rows of one machine: no machine applies anything of the step."""

    def body(store: Store, barrier: Barrier) -> list[Tensor]:
        embeddings = [DistEmbedding(store, ROWS, DIM, f"emb{i}") for i in range(2)]
        optimizer = SparseAdam(embeddings, lr=0.1)
        before = [embedding.table[:] for embedding in embeddings]
        barrier.wait(180)
        for bad in (torch.inf, torch.nan):
            for i, embedding in enumerate(embeddings):
                rows = embedding(torch.tensor([3, ROWS - 1]))
                (rows * (bad if (store.rank, i) == (1, 0) else 1.0)).sum().backward()
            words = (
                r"rank 1: gradients of table 'emb0' are not finite, for 2 rows, the first of them 3. Nothing of this"
            )
            with pytest.raises(ValueError, match=words):
                optimizer.step()
            after = [embedding.table[:] for embedding in embeddings]
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        embeddings[0](torch.tensor([3])).sum().backward()
        optimizer.step()
        return [embedding.table[:] for embedding in embeddings]

    with cluster([0, 1], 2) as c:
        found = c.on_ranks(partial(body, barrier=Barrier(2)))
        assert [shard.table("emb0").steps for shard in c.shards] == [1, 1]
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb0")
        embedding(torch.tensor([3])).sum().backward()
        SparseAdam([embedding], lr=0.1).step()
        expected = embedding.table[:]
    for rows in found:
        torch.testing.assert_close(rows[0], expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_whose_sum_alone_overflows_is_applied():
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb", init=0.0)
        (embedding(torch.tensor([1, 2])) * 3e38).sum().backward()
        SparseAdagrad([embedding], lr=0.1).step()
        assert torch.isfinite(embedding.table[:]).all()


def test_a_rank_that_has_no_scaler_is_told_that_another_has_skipped():
    def body(store: Store) -> None:
        embedding = DistEmbedding(store, ROWS, DIM, "emb", init=1.0)
        optimizer = SparseAdam([embedding])
        embedding(torch.tensor([1])).sum().mul(torch.inf if store.rank == 0 else 1.0).backward()
        if store.rank == 0:
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        else:
            with pytest.raises(RuntimeError, match="another rank has skipped this step"):
                optimizer.step()
        assert torch.equal(embedding.table[:], torch.ones(ROWS, DIM))

    with cluster([0], 2) as c:
        c.on_ranks(body)


def test_a_step_that_failed_under_a_scaler_leaves_nothing_to_the_next():
    ids = torch.tensor([1, 2])
    tables = []
    for fails in (False, True):
        with alone() as store:
            embedding = DistEmbedding(store, ROWS, DIM, "emb", init=1.0)
            optimizer = SparseAdagrad([embedding], lr=0.1, eps=1.0)  # with this eps the size of a gradient counts
            for bad in (torch.nan, None) if fails else ():  # a rate that is refused; a Ctrl-C
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                scaler.scale(embedding(ids).sum() * (torch.inf if bad is None else 1.0)).backward()
                optimizer.lr = 0.1 if bad is None else bad
                with pytest.raises(KeyboardInterrupt if bad is None else ValueError):
                    scaler.step(optimizer, *([stop] if bad is None else []))
                assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
                optimizer.zero_grad()
            optimizer.lr = 0.1
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(embedding(ids).sum()).backward()
            scaler.step(optimizer)
            embedding(ids).sum().backward()
            optimizer.step()
            tables.append(embedding.table[:])
    assert torch.equal(*tables)


def stop() -> None:
    raise KeyboardInterrupt


def test_an_embedding_is_named_once_and_what_is_no_group_is_refused():
    with alone() as store:
        embedding, other = (DistEmbedding(store, ROWS, DIM, name) for name in ("emb", "other"))
        again = DistEmbedding(store, ROWS, DIM, "emb")
        for given in ([embedding, embedding], [embedding, again], [{"params": [embedding]}, {"params": [again]}]):
            with pytest.raises(ValueError, match="table 'emb' is among the embeddings more than once"):
                SparseAdam(given)
        optimizer = SparseAdam([embedding])
        with pytest.raises(ValueError, match="table 'emb' is among the embeddings more than once"):
            optimizer.add_param_group({"params": [again]})
        with pytest.raises(ValueError, match="lr must be a finite number"):
            optimizer.add_param_group({"params": [other], "lr": -1.0})
        with pytest.raises(ValueError, match='reduction must be "mean" or "sum", got \'average\''):
            optimizer.add_param_group({"params": [other], "reduction": "average"})
        with pytest.raises(ValueError, match="list of DistEmbeddings"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        for given in (embedding, nn.ModuleDict({"a": embedding}), nn.Linear(2, 2), embedding.parameters()):
            with pytest.raises(ValueError, match="list of DistEmbeddings, at least one, such as"):
                SparseAdam(given)
        assert optimizer.embeddings == [embedding]
        with pytest.raises(ValueError, match="come from its backward passes alone"):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(ROWS, DIM)
        with pytest.raises(ValueError, match="'emb' lives in the shards"):
            copy.deepcopy(optimizer)


def test_an_optimizer_of_ones_own_needs_nothing_but_what_shards_are_told():
    class Plain(SparseOptimizer):
        kind = "sgd"

        def options(self, group):
            return {"kind": "sgd", "lr": group["lr"]}

    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb", init=0.0)
        optimizer = Plain([embedding], {"lr": 0.5, "maximize": False})
        embedding(torch.tensor([3])).sum().backward()
        optimizer.step()
        assert embedding.table[torch.tensor([3])].tolist() == [[-0.5] * DIM]
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(NotImplementedError, match="Plain does not read states of the time before groups"):
            optimizer.load_state_dict({"kind": "sgd", "lr": 0.5})


def test_norms_of_gradients_and_clipping_are_torchs_over_several_backward_passes():
    passes = [torch.tensor(ids) for ids in ([0, 0, 7], [7, 0, 3], [9])]
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb", init=0.0)
        optimizer = SparseAdagrad([embedding], lr=0.1, eps=1.0)
        plain = nn.Embedding.from_pretrained(torch.zeros(ROWS, DIM), freeze=False)
        dense = torch.optim.Adagrad(plain.parameters(), lr=0.1, eps=1.0)
        for most in (1e9, 0.5):
            for module in (embedding, plain):
                for number, ids in enumerate(passes, 1):
                    (number * module(ids).sum()).backward()
            params = optimizer.param_groups[0]["params"]
            torch.testing.assert_close(
                nn.utils.clip_grad_norm_(params, most), nn.utils.clip_grad_norm_(plain.parameters(), most)
            )
            assert params[0].grad.shape == (4, DIM)
            for each in (optimizer, dense):
                each.step()
                each.zero_grad()
            torch.testing.assert_close(embedding.table[:], plain.weight.detach(), rtol=1e-6, atol=1e-7)
