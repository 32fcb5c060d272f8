"""Models as people change them, beside the plain modules on the whole graph: the same rows and gradients, or a refusal.

The oracle calls the very modules, one after the other, on all nodes and all edges. A case is right if rows and the
gradients of the input and of every parameter agree to 1e-10, in float32 to 1e-4, or if it is refused with ValueError.

Where they agree less, they must agree to ten times what rounding makes of the plain modules' own results: what these
are off from the results in float64, and from those of rows that are moved by a few roundings between layers. Where
large numbers cancel, rounding is more than any share of what is left. And the gradient of a ReLU jumps at zero: batch
normalisation of equal rows gives zeros, or the rounding of their mean, whose sign then decides.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, HybridParallel, JoinKept, Keep, Packing, infer
from gnnsys.fullgraph.run.call_layer import arguments
from gnnsys.graph import Graph
from tests.fullgraph.dense import random_graph
from tests.fullgraph.thread_ranks import run_ranks

TOLERANCE = 1e-10
ROUNDING = 1e-12  # of numbers about 1 in float64: all there is where batch normalisation is given equal rows
NUM_NUDGED = 4  # results of nudged rows: each finds half of the signs that rounding decides
N, WIDTH, OUT, FEATURES, TYPES = 40, 6, 4, 3, 3
Layers = list[nn.Module]


def draws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_graph(num_nodes: int = N, num_edges: int = 180, seed: int = 1) -> Graph:
    """Directed, with repeated edges, loops and isolated nodes; with weights, features and types of edges."""
    edges = random_graph(num_nodes, num_edges, seed).edge_index()
    count = edges.shape[1]
    data = {
        "w": draws(count, seed=seed + 4).abs() + 0.1,
        "e": draws(count, FEATURES, seed=seed + 5),
        "t": torch.randint(TYPES, (count,), generator=torch.Generator().manual_seed(seed + 6)),
    }
    return Graph.from_edge_index(edges, num_nodes, {}, data)


@dataclass
class Case:
    """Layers on a graph: `edges` is what they are told, `change` what is done to them after a first pass, if anything
    is; `options` are HybridParallel's."""

    layers: Layers
    graph: Graph
    edges: dict[str, str] = field(default_factory=dict)
    world_size: int = 1
    ranks: Tensor | None = None
    change: Callable[[Any], object] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    x_grad: bool = True
    seed: int = 3

    @property
    def x(self) -> Tensor:
        return draws(self.graph.num_nodes(), WIDTH, seed=self.seed).to(_dtype(self.layers))


def whole(
    layers: Sequence[nn.Module],
    x: Tensor,
    graph: Graph,
    edges: dict[str, str],
    nudge: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """Each module called on the whole graph, by itself, with rows that `nudge` changes first."""
    data = graph.edge_data[graph.edge_types[0]]
    kept: dict[str, Tensor] = {}
    for layer in layers:
        x = nudge(x)
        if isinstance(layer, Keep):
            kept[layer.name] = x
        elif isinstance(layer, JoinKept):
            x = layer(x, kept[layer.name])
        elif takes_edges(layer):
            takes = arguments(layer)
            told = {name: data[array] for name, array in edges.items() if name in takes}
            is_ours = "edge_index" not in takes and not told
            x = layer(x, graph.csc() if is_ours else graph.edge_index(), **told)
        else:
            x = layer(x)
    return x


def nudge_of(seed: int) -> Callable[[Tensor], Tensor]:
    """Moves every number by a few roundings of its type; zeros stay zeros."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(rows: Tensor) -> Tensor:
        noise = torch.randn(rows.shape, dtype=rows.dtype, generator=generator)
        return rows * (1 + 4 * torch.finfo(rows.dtype).eps * noise)

    return nudge


def takes_edges(layer: nn.Module) -> bool:
    return any(name in arguments(layer) for name in ("edges", "edge_index", "csc"))


def loss_of(out: Tensor) -> Tensor:
    """Of rows of any width; a sum, so that ranks add up to the whole."""
    return (out * out * 0.5 + out * torch.linspace(-1, 1, out.shape[1], dtype=out.dtype, device=out.device)).sum()


@dataclass
class Seen:
    """What a pass gave: rows by original id, the gradient of x, and those of parameters by name."""

    rows: Tensor
    x_grad: Tensor | None
    grads: dict[str, Tensor | None]
    rounded_otherwise: Callable[[], list[Seen]] = list  # computes the same with other roundings

    @cached_property
    def others(self) -> list[Seen]:
        return self.rounded_otherwise()

    def rounding(self, what: Callable[[Seen], Tensor | None]) -> float:
        """How far something of it is from the same with other roundings, at most."""
        mine, others = what(self), [what(other) for other in self.others]
        if mine is None or not mine.numel():
            return 0.0
        return max([float((mine - other).abs().max()) for other in others if other is not None], default=0.0)


def expected(case: Case, change: bool, dtype: torch.dtype | None = None, nudge: int | None = None) -> Seen:
    """By the plain modules, computed in `dtype`, by default their own; `nudge` is a seed for moving rows between."""
    layers = nn.ModuleList(copied(case.layers))
    if change and case.change is not None:
        case.change(layers)
    layers.to(dtype)
    x = case.x.to(dtype or case.x.dtype).requires_grad_(case.x_grad)
    nudges = () if nudge is None else (nudge_of(nudge),)
    out = whole(list(layers), x, case.graph, case.edges, *nudges)
    if out.requires_grad:
        loss_of(out).backward()
    return Seen(out.detach(), x.grad, {name: p.grad for name, p in layers.named_parameters()})


def wanted(case: Case, change: bool) -> Seen:
    """By the plain modules; with what other roundings make of it, for the few cases in which they matter."""
    want = expected(case, change)

    def rounded_otherwise() -> list[Seen]:
        others = [expected(case, change, nudge=seed) for seed in range(NUM_NUDGED)]
        if want.rows.dtype != torch.float64:
            with contextlib.suppress(RuntimeError):  # of copies whose own forward is bound to the first module's type
                others.append(expected(case, change, torch.float64))
        return others

    want.rounded_otherwise = rounded_otherwise
    return want


def copied(layers: Sequence[nn.Module]) -> Layers:
    """Copies, also of modules that hold values which hooks made of parameters; one that is there twice stays one."""
    memo: dict[int, Any] = {}
    for module in nn.ModuleList(layers).modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return [copy.deepcopy(layer, memo) for layer in layers]


def found(case: Case) -> list[list[Seen]]:
    """Per rank the passes: one, and where there is a change a second one after it."""

    def work(rank: int, group: Any) -> list[Seen]:
        mine, ranks = copied(case.layers), case.ranks
        model = HybridParallel(
            mine, case.graph, ranks=ranks, edge_data=case.edges or None, group=group, timeout=60, **case.options
        )
        passes = []
        for number in range(1 if case.change is None else 2):
            if number:
                assert case.change is not None
                case.change(model.layers)
            model.zero_grad(set_to_none=True)
            x = case.x[model.nodes].requires_grad_(case.x_grad)
            out = model(x)
            if out.requires_grad:
                loss_of(out).backward()
            names = {name.removeprefix("layers."): p.grad for name, p in model.named_parameters()}
            passes.append(Seen(out.detach(), x.grad, names))
        return [*passes, model.nodes]

    if case.world_size == 1:
        return [work(0, None)]
    return run_ranks(case.world_size, work)


VOID = "the plain modules fail: "


def check(case: Case) -> str:
    """Nothing where all passes are right, or the refusal; AssertionError where neither is so.

    Where the plain modules cannot do it there is nothing to compare with, and VOID is said.
    """
    try:
        wants = [wanted(case, change) for change in ([False] if case.change is None else [False, True])]
    except Exception as error:
        return f"{VOID}{error}"
    try:
        seen = found(case)
    except ValueError as error:
        return str(error)
    except AssertionError as error:
        if isinstance(error.__cause__, ValueError):
            return str(error.__cause__)
        raise
    for *passes, nodes in seen:
        for number, (got, want) in enumerate(zip(passes, wants, strict=True)):
            compare(got, want, nodes, f"pass {number}")
    return ""


def compare(got: Seen, want: Seen, nodes: Tensor, where: str) -> None:
    near(got.rows, want.rows[nodes], want.rows, f"{where}: rows", lambda: want.rounding(lambda seen: seen.rows))
    largest = max([float(g.abs().max()) for g in want.grads.values() if g is not None and g.numel()], default=0.0)
    if want.x_grad is not None:
        assert got.x_grad is not None or not len(nodes), f"{where}: x has no gradient"
        if got.x_grad is not None:
            of, rounding = want.x_grad, lambda: want.rounding(lambda seen: seen.x_grad)
            near(got.x_grad, of[nodes], of, f"{where}: gradient of x", rounding)
    assert list(got.grads) == list(want.grads), where
    for name, wanted in want.grads.items():
        given = got.grads[name]
        if wanted is None:
            assert given is None or not given.any(), f"{where}: {name} has a gradient"
        else:
            assert given is not None or not wanted.any(), f"{where}: {name} has no gradient"
            if given is not None:
                within(
                    float((given - wanted).abs().max()),
                    tolerance_of(wanted) * largest,
                    lambda name=name: want.rounding(lambda seen: seen.grads[name]),
                    f"{where}: gradient of {name} is",
                )


def near(got: Tensor, want: Tensor, of: Tensor, what: str, rounding: Callable[[], float] = float) -> None:
    assert got.shape == want.shape, f"{what}: {list(got.shape)} instead of {list(want.shape)}"
    if want.numel():
        limit = tolerance_of(of) * float(of.abs().max())
        within(float((got - want).abs().max()), limit, rounding, f"{what} are")


def within(difference: float, limit: float, rounding: Callable[[], float], what: str) -> None:
    """`rounding` costs several passes of the plain modules: it is only asked where the limit is not kept."""
    if not difference <= limit + ROUNDING:
        assert difference <= limit + 10 * rounding() + ROUNDING, f"{what} off by {difference}"


def tolerance_of(rows: Tensor) -> float:
    return TOLERANCE if rows.dtype == torch.float64 else 1e-4


def _dtype(layers: Sequence[nn.Module]) -> torch.dtype:
    return next((p.dtype for layer in layers for p in layer.parameters()), torch.float64)


def bins(count: int) -> dict[str, Any]:
    return {"schedule": BinSchedule(packing=Packing(num_bins=count))}


def check_infer(case: Case) -> str:
    """The same of inference: rows alone, of modules in evaluation."""
    layers = nn.ModuleList(copied(case.layers)).eval()
    with torch.no_grad():
        want = whole(list(layers), case.x, case.graph, case.edges)
    try:
        nodes, rows = infer(copied(case.layers), case.graph, case.x, edge_data=case.edges or None, **case.options)
    except ValueError as error:
        return str(error)
    near(rows, want[nodes], want, "rows of infer")
    return ""
