"""What a store and its optimizers hold, against a plain torch model of the same, through anything that changes either.

    python -m tests.fuzz.state --seconds 600 --seed 1
    python -m tests.fuzz.state --seed 17 --one

A case is a random sequence of training steps (with or without gradients, under a GradScaler or not, with overflows),
saves and loads, snapshots and restores, pushes, new optimizers, drops, and closing and opening again, all of which
follow from its seed. After each of them rows and moments must be those of `nn.Embedding(sparse=True)` and torch's own
optimizers, whose states are copied when ours are saved. Cases have the seeds SEED, SEED + 1, ...; who fails is named.

Gradients are small multiples of powers of two, so that sums are exact in any order: what differs is a fault.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.store import DistEmbedding, Shard, SparseAdagrad, SparseAdam, Store
from gnnsys.store.saved import load_part

ROWS, DIM = 23, 3
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}
OURS: dict[str, Any] = {"adam": SparseAdam, "adagrad": SparseAdagrad}
TORCHS: dict[str, Any] = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}


class Pair:
    """An optimizer of each side, over the same embeddings."""

    def __init__(self, kind: str, members: list[int], options: dict[str, Any]) -> None:
        self.kind, self.members, self.options = kind, members, options
        self.ours: Any = None
        self.torchs: Any = None


class Case:
    """One case: both sides, and what was done to them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance, self.draws = random.Random(seed), torch.Generator().manual_seed(seed)
        self.folder, self.done = folder, list[str]()
        self.saved: dict[str, tuple[int, Any]] = {}  # by folder: the embedding, and the model's copy of it
        self.num_embeddings = self.chance.randint(1, 3)
        self.num_parts = self.chance.randint(1, 3)
        self.shard, self.store = self._open()
        self.embeddings = [self._make(i) for i in range(self.num_embeddings)]
        self.models = [
            nn.Embedding.from_pretrained(e.table[:].clone(), freeze=False, sparse=True) for e in self.embeddings
        ]
        self.pairs = self._make_pairs()
        self.scalers = [
            torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3, enabled=True) for _ in range(2)
        ]

    # The two sides

    def _open(self) -> tuple[Shard, Store]:
        shard = Shard(0)
        return shard, Store(machine_of_part=[0] * self.num_parts, local=shard)

    def _make(self, i: int) -> DistEmbedding:
        return DistEmbedding(self.store, ROWS, DIM, f"emb{i}", init=("uniform", -1.0, 1.0, i))

    def _make_pairs(self) -> list[Pair]:
        members: dict[str, list[int]] = {}
        for i in range(self.num_embeddings):
            members.setdefault(self.chance.choice(["adam", "adagrad"]), []).append(i)
        pairs = []
        for kind, those in members.items():
            options: dict[str, Any] = {"lr": self.chance.choice([0.01, 0.1]), "maximize": self.chance.random() < 0.2}
            if kind == "adam":
                options["betas"] = self.chance.choice([(0.9, 0.999), (0.5, 0.75)])
            else:
                options |= {"lr_decay": self.chance.choice([0.0, 0.3]), "eps": 1e-6}
                options["initial_accumulator_value"] = self.chance.choice([0.0, 0.5])
            pairs.append(Pair(kind, those, options))
            self._make_optimizers(pairs[-1])
        return pairs

    def _make_optimizers(self, pair: Pair, state: Any = None) -> None:
        pair.ours = OURS[pair.kind]([self.embeddings[i] for i in pair.members], **pair.options)
        pair.torchs = TORCHS[pair.kind]([self.models[i].weight for i in pair.members], **pair.options)
        if state is not None:
            pair.torchs.load_state_dict(state)

    def pair_of(self, i: int) -> Pair:
        return next(pair for pair in self.pairs if i in pair.members)

    def _copy(self, i: int) -> Any:
        """What torch has of an embedding: rows and the optimizer's state."""
        weight = self.models[i].weight
        return weight.detach().clone(), copy.deepcopy(self.pair_of(i).torchs.state.get(weight, {}))

    def _put_back(self, i: int, kept: Any) -> None:
        weight, optimizer = self.models[i].weight, self.pair_of(i).torchs
        with torch.no_grad():
            weight.copy_(kept[0])
        optimizer.state[weight] = copy.deepcopy(kept[1])

    # What may be done

    def run(self, num_actions: int) -> None:
        actions: list[tuple[Callable[[], str], int]] = [
            (self.train, 10), (self.collect, 3), (self.clear, 2), (self.idle, 2), (self.not_finite, 1), (self.push, 1),
            (self.save, 3), (self.load, 3), (self.restore, 2), (self.reopen, 1), (self.drop, 1), (self.freeze, 1),
            (self.new_optimizer, 2), (self.new_rate, 1),
        ]  # fmt: skip
        for _ in range(num_actions):
            action = self.chance.choices([a for a, _ in actions], [w for _, w in actions])[0]
            self.done.append(action.__name__)
            self.done[-1] = f"{action.__name__} {action()}"
            self.compare()

    def collect(self, scaled: bool = False, factor: float = 1.0) -> str:
        """Backward passes of some embeddings, or of none."""
        told = []
        for i in range(self.num_embeddings):
            for _ in range(self.chance.choice([0, 1, 1, 1, 2])):
                ids = torch.randint(0, ROWS, (self.chance.choice([0, 1, 5, 12]),), generator=self.draws)
                weight = torch.randint(-8, 9, (len(ids), DIM), generator=self.draws) / 8 * factor
                for side, module in enumerate((self.embeddings[i], self.models[i])):
                    loss = (module(ids) * weight).sum()
                    loss = self.scalers[side].scale(loss) if scaled else loss
                    if loss.requires_grad:
                        loss.backward()
                told.append(f"emb{i}[{len(ids)}]")
        return " ".join(told)

    def train(self) -> str:
        """A step of some optimizers, with a scaler or without; gradients forgotten in either way, or left."""
        self._forget_gradients()  # scaled and plain ones do not mix
        scaled = self.chance.random() < 0.5
        overflows = scaled and self.chance.random() < 0.3
        told = self.collect(scaled, torch.inf if overflows else 1.0)
        unscales, stepped = self.chance.random() < 0.3, False
        for pair in self.chance.sample(self.pairs, self.chance.randint(1, len(self.pairs))):
            if scaled and not any(self.models[i].weight.grad is not None for i in pair.members):
                continue  # torch refuses those, ours must not: its ranks may
            stepped = True
            for side, optimizer in enumerate((pair.ours, pair.torchs)):
                if scaled and unscales:
                    self.scalers[side].unscale_(optimizer)
                self.scalers[side].step(optimizer) if scaled else optimizer.step()
        if stepped and scaled:
            for scaler in self.scalers:
                scaler.update()
        self._zero_grad()
        return f"{told}{' scaled' * scaled}{' overflow' * overflows}{' unscaled' * (scaled and unscales)}"

    def idle(self) -> str:
        """A step of what was collected before, which is often nothing."""
        pair = self.chance.choice(self.pairs)
        pair.ours.step()
        pair.torchs.step()
        self._zero_grad()
        return pair.kind

    def not_finite(self) -> str:
        """A plain step with an infinite gradient: ours changes nothing and says so, torch's is not asked."""
        self._forget_gradients()
        pair = self.chance.choice(self.pairs)
        i = self.chance.choice(pair.members)
        if not self.embeddings[i].requires_grad:
            return "frozen"
        (self.embeddings[i](torch.tensor([1])) * torch.inf).sum().backward()
        try:
            pair.ours.step()
        except ValueError as error:
            assert "not finite" in str(error), error
        else:
            raise AssertionError("an infinite gradient was applied")
        self._forget_gradients()  # of which torch has none that could be set to zero
        return f"emb{i}"

    def clear(self) -> str:
        return self._zero_grad()

    def _zero_grad(self) -> str:
        set_to_none = self.chance.random() < 0.7
        for pair in self.pairs:
            pair.ours.zero_grad(set_to_none=set_to_none)
            pair.torchs.zero_grad(set_to_none=set_to_none)
        return f"set_to_none={set_to_none}"

    def _forget_gradients(self) -> None:
        for pair in self.pairs:
            pair.ours.zero_grad()
            pair.torchs.zero_grad()

    def push(self) -> str:
        i, mode = self.chance.randrange(self.num_embeddings), self.chance.choice(["write", "add"])
        ids = torch.randperm(ROWS, generator=self.draws)[: self.chance.randint(0, 9)]
        rows = torch.randint(-8, 9, (len(ids), DIM), generator=self.draws) / 4
        self.store.push(f"emb{i}", ids, rows, mode)
        with torch.no_grad():
            weight = self.models[i].weight
            weight[ids] = rows if mode == "write" else weight[ids] + rows
        return f"emb{i} {mode}"

    def save(self) -> str:
        i, folder = self.chance.randrange(self.num_embeddings), str(self.folder / str(len(self.saved)))
        if self.chance.random() < 0.3:
            self.store.snapshot(f"emb{i}", 0, folder, f"token{len(self.saved)}", copy=self.chance.random() < 0.5)
            self.store.written(0, f"token{len(self.saved)}")
        else:
            self.store.save(f"emb{i}", folder)
        self.saved[folder] = (i, self._copy(i))
        return f"emb{i} to {len(self.saved) - 1}"

    def load(self) -> str:
        if not self.saved:
            return "nothing"
        folder = self.chance.choice(list(self.saved))
        i, kept = self.saved[folder]
        self.store.load(f"emb{i}", folder)
        self._put_back(i, kept)
        return f"emb{i} from {Path(folder).name}"

    def restore(self) -> str:
        """As a checkpoint does it: the table is made ready, then rows and states are pushed."""
        if not self.saved:
            return "nothing"
        folder = self.chance.choice(list(self.saved))
        i, kept = self.saved[folder]
        parts = [load_part(folder, f"emb{i}", part) for part in range(self.num_parts)]
        steps, states = max(parts[0].step_counts.values(), default=0), sorted(parts[0].states)
        self.store.begin_restore(f"emb{i}", steps, states)
        self.store.push(f"emb{i}", torch.arange(ROWS), torch.cat([part.rows for part in parts]))
        for state in states:
            self.store.push(f"emb{i}/{state}", torch.arange(ROWS), torch.cat([part.states[state] for part in parts]))
        self._put_back(i, kept)
        return f"emb{i} from {Path(folder).name}"

    def reopen(self) -> str:
        """Another process, in effect: everything saved, closed, made anew and loaded."""
        folder = str(self.folder / f"all{len(self.done)}")
        trained = [embedding.requires_grad for embedding in self.embeddings]
        for i in range(self.num_embeddings):
            self.store.save(f"emb{i}", folder)
        self.store.close()
        self.shard, self.store = self._open()
        self.embeddings = [self._make(i).requires_grad_(trained[i]) for i in range(self.num_embeddings)]
        for pair in self.pairs:
            state = pair.ours.state_dict()
            pair.ours = OURS[pair.kind]([self.embeddings[i] for i in pair.members])
            pair.ours.load_state_dict(state)
            pair.torchs.zero_grad()
        for i in range(self.num_embeddings):
            self.store.load(f"emb{i}", folder)
        return ""

    def drop(self) -> str:
        """A table dropped and made anew: it is as at first."""
        i = self.chance.randrange(self.num_embeddings)
        trained = self.embeddings[i].requires_grad
        self.store.drop(f"emb{i}")
        self.embeddings[i] = self._make(i).requires_grad_(trained)
        pair, weight = self.pair_of(i), self.models[i].weight
        with torch.no_grad():
            weight.copy_(self.embeddings[i].table[:])
        state = pair.ours.state_dict()
        pair.ours = OURS[pair.kind]([self.embeddings[i] for i in pair.members])
        pair.ours.load_state_dict(state)
        weight.grad = None
        fresh = TORCHS[pair.kind]([weight], **pair.options)
        pair.torchs.state[weight] = fresh.state.get(weight, {})
        return f"emb{i}"

    def freeze(self) -> str:
        i = self.chance.randrange(self.num_embeddings)
        train = not self.embeddings[i].requires_grad
        self.embeddings[i].requires_grad_(train)
        self.models[i].requires_grad_(train)
        return f"emb{i} {train}"

    def new_optimizer(self) -> str:
        """Others in their place, with their state_dicts. The rates of ours are in it, its moments beside the rows."""
        pair = self.chance.choice(self.pairs)
        ours, torchs = copy.deepcopy(pair.ours.state_dict()), pair.torchs.state_dict()
        pair.ours = OURS[pair.kind]([self.embeddings[i] for i in pair.members], lr=77.0)
        pair.ours.load_state_dict(ours)
        pair.torchs = TORCHS[pair.kind]([self.models[i].weight for i in pair.members], lr=77.0)
        pair.torchs.load_state_dict(torchs)
        return pair.kind

    def new_rate(self) -> str:
        pair, rate = self.chance.choice(self.pairs), self.chance.choice([0.0, 0.02, 0.2])
        for optimizer in (pair.ours, pair.torchs):
            for group in optimizer.param_groups:
                group["lr"] = rate
        return f"{pair.kind} {rate}"

    # What must hold

    def compare(self) -> None:
        for i, model in enumerate(self.models):
            self._check(f"rows of emb{i}", self.store.tensor(f"emb{i}")[:], model.weight.detach())
            table, pair = self.shard.table(f"emb{i}"), self.pair_of(i)
            state = pair.torchs.state.get(model.weight, {})
            steps = int(state.get("step", 0))
            assert table.steps == steps, f"emb{i} has made {table.steps} steps, torch's {steps}"
            for name in MOMENTS[pair.kind] if steps else ():
                self._check(f"emb{i}/{name}", self.store.tensor(f"emb{i}/{name}")[:], state[name])
        scales = [scaler.get_scale() for scaler in self.scalers]
        assert scales[0] == scales[1], f"scales {scales}"

    @staticmethod
    def _check(what: str, found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def run_case(seed: int, num_actions: int = 40) -> str | None:
    """Runs one case; what was done and what went wrong, if anything did."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(seed, Path(folder))
        try:
            case.run(num_actions)
        except Exception:
            lines = [f"{number:3d} {what}" for number, what in enumerate(case.done)]
            return "\n".join(
                [*lines, traceback.format_exc(), f"repeat it: python -m tests.fuzz.state --seed {seed} --one"]
            )
        finally:
            case.store.close()
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="this seed alone")
    options = parser.parse_args(arguments)
    until, seed, failed = time.monotonic() + options.seconds, options.seed, 0
    while True:
        told = run_case(seed)
        if told is not None:
            failed += 1
            print(f"seed {seed} fails:\n{told}", flush=True)
        seed += 1
        if options.one or failed >= 3 or time.monotonic() > until:
            break
    print(f"{seed - options.seed} cases from seed {options.seed} on, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
