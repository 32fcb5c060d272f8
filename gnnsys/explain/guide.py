"""Guide: how samplers are guided, with the defaults of the thesis (§3.4), and the user's model made from a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

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

EXPLAINERS = ("gradient", "trained", "mixed", "norms", "degree", "random")


@dataclass(frozen=True, kw_only=True)
class Guide:
    """What decides masks and guided draws.

    `model`: an importable function without arguments that makes the model, "package.module:function".
    `eps`: the share of a draw that is moved from local to remote neighbours, for `GuidedSampler(deviation=)`.
    `num_features` (N_f): the share of columns that is kept, for `Masks.columns`; loaders fetch whole rows.
    `every` (T_ex): steps from one explanation to the next. `num_steps` (T_E) and
    `threshold` (L): how long masks are trained. `pools`: nodes that the core of a part is pooled into, 1 as in the
    thesis. `explainer`: one of EXPLAINERS. "trained" is the thesis, "mixed" trains the mask of columns and takes that
    of nodes from gradients; the default is what finds the noise of a planted graph best (docs/explanation.md).
    `features`: the rows of nodes that the model reads. `row_bytes`: remote rows that are kept for explanations, in all;
    where there are more, slices take turns.
    """

    model: str
    eps: float = 0.1
    num_features: float = 0.85
    every: int = 30
    num_steps: int = 50
    threshold: float = 0.01
    pools: int = 128
    explainer: str = "gradient"
    features: str = "x"
    row_bytes: int = 256 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.num_features <= 1:
            raise ValueError(
                f"num_features is the share of columns to pull and must be in (0, 1], got {self.num_features}: "
                "write 1.0 for all of them"
            )
        if not 0 <= self.eps <= 1:
            raise ValueError(f"eps is the share of a draw that is moved and must be in [0, 1], got {self.eps}")
        for name in ("every", "num_steps", "pools", "row_bytes"):
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
        module, colon, function = self.model.partition(":")
        if not (module and colon and function) or module == "__main__":
            raise ValueError(
                f"model must be an importable function as 'package.module:function', got {self.model!r}: put the "
                "function into a module of its own, since another process imports it"
            )

    def make_model(self) -> nn.Module:
        """Calls the function; ValueError where it cannot be imported or makes no module."""
        made = imported(self.model)()
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


def imported(name: str) -> Callable[[], Any]:
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
