"""Guide: how a loader is guided, with the defaults of the thesis (§3.4), and the user's model made from a name."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gnnsys.explain.explainers import (
    ColumnNorms,
    Degrees,
    Explainer,
    GradientInput,
    MixedMasks,
    RandomMasks,
    TrainedMasks,
)
from gnnsys.graph import did_you_mean
from gnnsys.loader import BatchNumbers
from gnnsys.sampling import FILLS

if TYPE_CHECKING:
    from gnnsys.explain.explained_sampler import ExplainedSampler

ROW_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NOT_DECIDING = ("timeout", "share", "record", "replay")  # options that masks do not depend on
EXPLAINERS = ("gradient", "trained", "mixed", "norms", "degree", "random")


@dataclass(frozen=True, kw_only=True)
class Guide:
    """What decides masks, guided draws and the columns that rows of other parts are read by.

    >>> guide = Guide(model="my_models:make")  # doctest: +SKIP
    >>> loader = gnnsys.NeighborLoader(graph, [10, 10], input_nodes=seeds, guide=guide)  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     ...                  # a step
    ...     guide.update(model)  # hands weights over every `every` steps, takes masks as they come, waits for nothing

    `model`: an importable function or class that makes the model, "package.module:function"; `arguments`: what it is
    called with, by name, as JSON has it.
    `eps`: the share of a draw that is moved from local to remote neighbours. `nodes`: False leaves draws uniform.
    `num_features` (N_f): the share of columns that rows of other parts are read by, 1.0 for whole rows. `fill`: what
    the others become, the "mean" over the own part or "zero". `column_gain`: columns are changed only where the new
    ones are worth so much more, as a share of what the old ones are worth now.
    `every` (T_ex): steps from one explanation to the next. `num_steps` (T_E) and
    `threshold` (L): how long masks are trained. `pools`: nodes that the core of a part is pooled into, 1 as in the
    thesis. `explainer`: one of EXPLAINERS. "trained" is the thesis, "mixed" trains the mask of columns and takes that
    of nodes from gradients; the default is what finds the noise of a planted graph best (docs/explanation.md).
    `features`: the rows of nodes that the model reads. `row_bytes`: remote rows that are kept for explanations of a
    part; where there are more, slices take turns. `row_dtype`: the type in which they are fetched and kept, "bfloat16"
    or "float32". `round_rows`: remote nodes of a part that are explained in one round, the first one excepted, which
    explains all that it has rows of; where there are more, they take turns. Without `nodes` no more are ever fetched.
    `share`: of the processors' time that explaining takes at most while no core is to spare, once there are masks.

    `exact`: masks of the weights of step n are used from batch n + every + ahead on, and `update` waits for them,
    `timeout` seconds at most: two runs are then the same bit by bit. `ahead` must be more than the batches that a
    loader has in flight. Else masks are used as soon as they are there, and what happened is in the loader's state.
    `record` keeps all of it, for `save_record`; `replay`, a folder that it was saved to, has it happen again.
    """

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    eps: float = 0.1
    nodes: bool = True
    num_features: float = 0.85
    fill: Literal["mean", "zero"] = "mean"
    column_gain: float = 0.02
    every: int = 30
    num_steps: int = 50
    threshold: float = 0.01
    pools: int = 128
    explainer: str = "gradient"
    features: str = "x"
    row_bytes: int = 256 << 20
    row_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    round_rows: int = 4096
    share: float = 0.05
    seed: int = 0
    exact: bool = False
    ahead: int = 32
    timeout: float = 300.0
    record: bool = False
    replay: str | os.PathLike[str] | None = None
    _samplers: list[ExplainedSampler] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.num_features <= 1:
            raise ValueError(
                f"num_features is the share of columns to pull and must be in (0, 1], got {self.num_features}: "
                "write 1.0 for all of them"
            )
        if not 0 <= self.eps <= 1:
            raise ValueError(f"eps is the share of a draw that is moved and must be in [0, 1], got {self.eps}")
        if not self.nodes and self.num_features == 1:
            raise ValueError(
                "nodes=False with num_features=1 guides nothing: leave nodes out, or keep fewer columns, 0.85 say"
            )
        if self.fill not in FILLS:
            raise ValueError(f"fill must be one of {', '.join(FILLS)}, got {self.fill!r}")
        if not self.column_gain >= 0:
            raise ValueError(f"column_gain must be at least 0, got {self.column_gain}: 0 takes any better columns")
        if not self.timeout > 0:
            raise ValueError(f"timeout is the seconds that exact=True waits for masks, got {self.timeout}")
        if self.row_dtype not in ROW_DTYPES:
            raise ValueError(f"row_dtype must be one of {', '.join(ROW_DTYPES)}, got {self.row_dtype!r}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is of the processors' time and must be in (0, 1], got {self.share}")
        for name in ("every", "num_steps", "pools", "row_bytes", "round_rows", "ahead"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be at least 0, got {self.threshold}: 0 trains masks for all num_steps")
        if self.explainer not in EXPLAINERS:
            raise ValueError(
                f"explainer must be one of {', '.join(EXPLAINERS)}, got {self.explainer!r}"
                f"{did_you_mean(self.explainer, EXPLAINERS)}"
            )
        if self.replay is not None and self.exact:
            raise ValueError("exact=True repeats a run without a record of it: leave replay or exact away")
        module, colon, function = self.model.partition(":")
        if not (module and colon and function) or module == "__main__":
            raise ValueError(
                f"model must be an importable function as 'package.module:function', got {self.model!r}: put the "
                "function into a module of its own, since another process imports it"
            )

        try:
            json.dumps(dict(self.arguments))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"arguments of the model go to another process as JSON, and these cannot: {error}. Pass numbers, text "
                "and lists of them, by name"
            ) from error

    def options(self) -> dict[str, Any]:
        """What it was made of."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def digest(self) -> int:
        """Of what decides masks, 62 bits: trainers of a machine that share masks have the same."""
        told = {name: value for name, value in self.options().items() if name not in NOT_DECIDING}
        text = json.dumps(told | {"arguments": dict(self.arguments)}, sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2

    # -- at work -----------------------------------------------------------------------------------------------------

    def make_sampler(self, graph: Any, num_neighbors: Any, seeds: Tensor, batches: BatchNumbers) -> ExplainedSampler:
        """The sampler of a loader that is given this guide; a guide is for one loader."""
        from gnnsys.explain.explained_sampler import ExplainedSampler

        if self._samplers and not self._samplers[0].is_watched:  # the loader that it was made for was refused
            self._samplers.pop().close()
        if self._samplers:
            raise ValueError("this guide guides another loader: make one for each, dataclasses.replace(guide) say")
        made = ExplainedSampler(graph, num_neighbors, self, seeds=seeds, batches=batches)
        self._samplers.append(made)
        return made

    def watch(self, counts: Callable[[], Mapping[str, int]], made_of: Callable[[], Mapping[str, Any]]) -> None:
        """Is told what the loader's fetch stage counts, and what the loader is made of: a record is of one like it."""
        self._sampler().watch(counts, made_of)

    def update(self, model: nn.Module) -> None:
        """Called after every step, and before a checkpoint is saved. Without `exact` it waits for nothing.

        Hands the model's weights over every `every` steps, and has batches that nobody has begun guided by masks that
        have come.
        """
        self._sampler().update(model)

    def save_record(self, folder: str | os.PathLike[str]) -> Path:
        """Writes what guided the batches until now, every rank its own, for `Guide(replay=folder)`: see `record`."""
        return self._sampler().save_record(folder)

    def status(self) -> dict[str, float]:
        """What guiding does and costs: see docs/explanation.md."""
        return self._sampler().status()

    def close(self) -> None:
        """Ends the explaining process; batches go on as they are guided now. A session does this when it is closed."""
        for sampler in self._samplers:
            sampler.close()

    def _sampler(self) -> ExplainedSampler:
        if not self._samplers:
            raise ValueError("this guide guides no loader: give it to one, NeighborLoader(graph, ..., guide=guide)")
        return self._samplers[0]

    def rows_as(self, stored: torch.dtype) -> torch.dtype:
        """The type in which rows to explain with are fetched and kept; never a wider one than they are stored in."""
        wanted = ROW_DTYPES[self.row_dtype]
        return wanted if wanted.itemsize < stored.itemsize else stored

    # -- what it makes -----------------------------------------------------------------------------------------------

    def make_model(self) -> nn.Module:
        """Calls the function; ValueError where it cannot be imported or makes no module."""
        function = imported(self.model)
        try:
            with torch.random.fork_rng(devices=[]):  # the user's own model is drawn as it is without a guide
                made = function(**self.arguments)
        except Exception as error:  # of the user's code, whatever it is
            raise ValueError(
                f"model={self.model!r} cannot make a model of {dict(self.arguments)}: {error!r}. Pass `arguments` that "
                "it takes, or a function of yours that takes none"
            ) from error
        if not isinstance(made, nn.Module):
            raise ValueError(f"model={self.model!r} must return a torch.nn.Module, got {type(made).__name__}")
        return made

    def make_explainer(self) -> Explainer:
        """What makes the masks."""
        trained = TrainedMasks(num_steps=self.num_steps, threshold=self.threshold, seed=self.seed)
        makers: dict[str, Explainer] = {
            "mixed": MixedMasks(nodes=GradientInput(), columns=trained),
            "trained": trained,
            "gradient": GradientInput(),
            "norms": ColumnNorms(),
            "degree": Degrees(),
            "random": RandomMasks(seed=self.seed),
        }
        return makers[self.explainer]


def imported(name: str) -> Callable[..., Any]:
    """The function "package.module:function"."""
    module, _, function = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model={name!r} cannot be imported: {error}. Write 'package.module:function' of a module that "
            "`python -c 'import package.module'` finds"
        ) from error
    if not callable(found):
        raise ValueError(f"model={name!r} is {type(found).__name__}, not a function that makes the model")
    return found  # type: ignore[no-any-return]
