"""Importance of remote nodes and columns: masks that are trained (GNNExplainer), and guides that cost one pass or none.

All have one method, `importance(model, graph)`. The model is any module whose forward pass takes (x, edge_index) and
can be differentiated; it is put into evaluation mode and its parameters get no gradients. Arrays of all remote rows are
large: what is not the model's own is done in pieces that fit a processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnnsys.explain.explanation_graph import ExplanationGraph, log_probabilities
from gnnsys.explain.masks import Masks, make_masks

_TINY = 1e-9
_PIECE_VALUES = 1 << 17  # of rows that are handled at once


def _go_on() -> None:
    """No pause."""


class Explainer(Protocol):
    """What makes masks of a model and an explanation graph."""

    @property
    def needs_target(self) -> bool:
        """Whether the graph must have the core's predictions."""

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        """Masks of version 0 for the graph's requester. `pause` is called between pieces of work."""


@dataclass(frozen=True, kw_only=True)
class TrainedMasks:
    """GNNExplainer (Ying et al. 2019; thesis Eq. 3.5 and Algorithm 1) on the pools of an explanation graph.

    With masks s of nodes and f of columns, both sigmoids, remote row x_u becomes mean + s_u f (x_u - mean). This is
    minimised:
        KL(target || softmax(model(masked) - model(whole) + log target)) + sizes + entropies,
    the divergence of the pooled prediction from what the masks leave of it. A model's answer to a mean row is not the
    mean of its answers: without the difference of scores, masks would be trained to make up for that instead. A node's
    size and entropy count in proportion to its weight in the pools' means, so that hubs do not come first whatever
    their rows say. Trained for `num_steps`, or until the divergence is below `threshold`.
    """

    num_steps: int = 50
    threshold: float = 0.01
    learning_rate: float = 0.1
    node_size: float = 0.2
    column_size: float = 0.05
    entropy: float = 0.0
    min_steps: int = 10  # masks that begin at one half may be below the threshold before they say anything
    seed: int = 0
    needs_target = True

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        generator = torch.Generator().manual_seed(self.seed)
        nodes, columns = (
            (0.01 * torch.randn(size, generator=generator, device="cpu")).requires_grad_()
            for size in (graph.num_remote, graph.num_features)
        )
        weight = node_weights(graph)
        target = graph.target.clamp(min=_TINY).log().log_softmax(1)
        optimizer = torch.optim.Adam([nodes, columns], lr=self.learning_rate)
        divergence = torch.zeros((), device="cpu")
        with frozen(model):
            with torch.no_grad():
                offset = target - _scores(model, graph.x, graph)
            for step in range(self.num_steps):
                pause()
                s, f = nodes.sigmoid(), columns.sigmoid()
                x = _MaskedRows.apply(s, f, graph)
                left = log_probabilities(_scores(model, x, graph) + offset)
                divergence = (target.exp() * (target - left)).sum(1).mean()
                if float(divergence.detach()) < self.threshold and step >= self.min_steps:
                    break
                size = self.node_size * (weight * s).sum() + self.column_size * f.mean()
                entropy = self.entropy * ((weight * _entropy(s)).sum() + _entropy(f).mean())
                optimizer.zero_grad()
                (divergence + size + entropy).backward()
                optimizer.step()
        node_mask, column_mask = nodes.detach().sigmoid(), columns.detach().sigmoid()
        return make_masks(graph.requester, graph.ids, node_mask, column_mask, float(divergence.detach()))


@dataclass(frozen=True, kw_only=True)
class GradientInput:
    """First-order influence: the change of each pool's scores, by gradients, if a row or a column became the mean.

    Of a node, the squared length over classes, per weight that it has in the pools' means; of a column, summed over
    nodes. One backward pass per class.
    """

    needs_target = False

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        nodes = torch.zeros(graph.num_remote, device="cpu")
        columns = torch.zeros(graph.num_features, device="cpu")
        with frozen(model):
            x = graph.x.detach().requires_grad_()
            scores = _scores(model, x, graph).sum(0)
            for index in range(scores.numel()):
                pause()
                (gradient,) = torch.autograd.grad(scores[index], x, retain_graph=index + 1 < scores.numel())
                for piece, deviation in _deviations(graph):
                    influence = deviation.mul_(gradient[graph.num_pools :][piece])
                    nodes[piece] += influence.sum(1).square_()
                    columns += influence.square_().sum(0)
                del gradient  # before the next one is made
        return make_masks(
            graph.requester, graph.ids, nodes.sqrt() / node_weights(graph).clamp(min=_TINY), columns.sqrt()
        )


@dataclass(frozen=True, kw_only=True)
class MixedMasks:
    """Nodes as one explainer has them, columns as another."""

    nodes: Explainer
    columns: Explainer

    @property
    def needs_target(self) -> bool:
        return self.nodes.needs_target or self.columns.needs_target

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        by_nodes, by_columns = (each.importance(model, graph, pause) for each in (self.nodes, self.columns))
        return replace(by_columns, sn=by_nodes.sn)


@dataclass(frozen=True, kw_only=True)
class ColumnNorms:
    """Norms of the first layer's columns; of a node, the length of its row's deviation from the mean, so weighted.

    The first layer is every matrix of the model with one column per feature. ValueError where there is none.
    """

    needs_target = False

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        width = graph.num_features
        found = [p.detach() for p in model.parameters() if p.dim() == 2 and p.shape[1] == width]
        if not found:
            raise ValueError(
                f"no parameter of {type(model).__name__} has a column for each of {width} features: use "
                "explainer='gradient'"
            )
        norms = torch.cat(found).float().norm(dim=0)
        nodes = torch.zeros(graph.num_remote, device="cpu")
        for piece, deviation in _deviations(graph):
            nodes[piece] = deviation.mul_(norms).norm(dim=1)
        return make_masks(graph.requester, graph.ids, nodes, norms)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Edges of a node into the core; all columns alike."""

    needs_target = False

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        columns = torch.ones(graph.num_features, device="cpu")
        return make_masks(graph.requester, graph.ids, graph.degree, columns)


@dataclass(frozen=True, kw_only=True)
class RandomMasks:
    """Uniform numbers: what a guide has to beat."""

    seed: int = 0
    needs_target = False

    def importance(self, model: nn.Module, graph: ExplanationGraph, pause: Callable[[], None] = _go_on) -> Masks:
        generator = torch.Generator().manual_seed(self.seed)
        nodes, columns = (
            torch.rand(size, generator=generator, device="cpu") for size in (graph.num_remote, graph.num_features)
        )
        return make_masks(graph.requester, graph.ids, nodes, columns)


def node_weights(graph: ExplanationGraph) -> Tensor:
    """The share of each remote node in the means over the in-edges of the pools, float32, adding up to 1."""
    src, dst = graph.edge_index
    in_degree = torch.bincount(dst, minlength=graph.num_pools).float()
    weight = torch.zeros(graph.x.shape[0], device="cpu").index_add_(0, src, 1 / in_degree[dst])[graph.num_pools :]
    return weight / weight.sum().clamp(min=_TINY)


def _deviations(graph: ExplanationGraph) -> Iterator[tuple[slice, Tensor]]:
    """Remote rows less the mean row, piece by piece: which rows, and a copy that may be changed."""
    rows = graph.x[graph.num_pools :]
    count = max(1, _PIECE_VALUES // max(1, graph.num_features))
    for first in range(0, graph.num_remote, count):
        piece = slice(first, min(first + count, graph.num_remote))
        yield piece, rows[piece] - graph.mean_row


class _MaskedRows(torch.autograd.Function):
    """The graph's rows, remote ones as masks of nodes `s` and of columns `f` leave them: mean + s_u f (x_u - mean).

    Rows and gradients are the only arrays of their size: neither is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, f: Tensor, graph: ExplanationGraph) -> Tensor:
        ctx.save_for_backward(s, f)
        ctx.graph = graph
        masked = torch.empty_like(graph.x)
        masked[: graph.num_pools] = graph.x[: graph.num_pools]
        for piece, deviation in _deviations(graph):
            masked[graph.num_pools :][piece] = deviation.mul_(s[piece, None]).mul_(f).add_(graph.mean_row)
        return masked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (s, f), graph = ctx.saved_tensors, ctx.graph
        by_row = gradients[0][graph.num_pools :]
        of_s, of_f = torch.zeros_like(s), torch.zeros_like(f)
        for piece, deviation in _deviations(graph):
            deviation.mul_(by_row[piece])
            of_s[piece] = deviation @ f
            of_f += s[piece] @ deviation
        return of_s, of_f, None


def _scores(model: nn.Module, x: Tensor, graph: ExplanationGraph) -> Tensor:
    """Scores of the pools, one column per class."""
    scores = model(x, graph.edge_index)[: graph.num_pools]
    if scores.shape[1] == 1:  # the score of the second of two classes
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
    return scores  # type: ignore[no-any-return]


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=_TINY).log() + (1 - p) * (1 - p).clamp(min=_TINY).log())


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients of its parameters, as it was before afterwards."""
    was_training = [module for module in model.modules() if module.training]
    had_gradients = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in had_gradients:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module in was_training:
            module.training = True
        for parameter in had_gradients:
            parameter.requires_grad_(True)
