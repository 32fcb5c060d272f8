"""Importance of remote nodes and columns: masks that are trained (GNNExplainer), and guides that cost one pass or none.

All have one method, `importance(model, graph)`. The model is any module whose forward pass takes (x, edge_index) and
can be differentiated; it is put into evaluation mode and its parameters get no gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gnnsys.explain.explanation_graph import ExplanationGraph, log_probabilities
from gnnsys.explain.masks import Masks, make_masks

_TINY = 1e-9


class Explainer(Protocol):
    """What makes masks of a model and an explanation graph."""

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
        """Masks of version 0 for the graph's requester."""


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

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
        num_pools = graph.num_pools
        generator = torch.Generator().manual_seed(self.seed)
        nodes, columns = (
            (0.01 * torch.randn(size, generator=generator, device="cpu")).requires_grad_()
            for size in (graph.num_remote, graph.num_features)
        )
        weight = node_weights(graph)
        deviation = graph.x[num_pools:] - graph.mean_row
        target = graph.target.clamp(min=_TINY).log().log_softmax(1)
        optimizer = torch.optim.Adam([nodes, columns], lr=self.learning_rate)
        divergence = torch.zeros((), device="cpu")
        with frozen(model):
            with torch.no_grad():
                offset = target - _scores(model, graph.x, graph)
            for step in range(self.num_steps):
                s, f = nodes.sigmoid(), columns.sigmoid()
                x = torch.cat([graph.x[:num_pools], graph.mean_row + deviation * s[:, None] * f])
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

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
        deviation = graph.x[graph.num_pools :] - graph.mean_row
        nodes = torch.zeros(graph.num_remote, device="cpu")
        columns = torch.zeros(graph.num_features, device="cpu")
        with frozen(model):
            x = graph.x.clone().requires_grad_()
            scores = _scores(model, x, graph).sum(0)
            for index in range(scores.numel()):
                (gradient,) = torch.autograd.grad(scores[index], x, retain_graph=index + 1 < scores.numel())
                influence = gradient[graph.num_pools :].mul_(deviation)  # in place: arrays of all remote rows are large
                nodes += influence.sum(1).square_()
                columns += influence.square_().sum(0)
        return make_masks(
            graph.requester, graph.ids, nodes.sqrt() / node_weights(graph).clamp(min=_TINY), columns.sqrt()
        )


@dataclass(frozen=True, kw_only=True)
class MixedMasks:
    """Nodes as one explainer has them, columns as another."""

    nodes: Explainer
    columns: Explainer

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
        by_nodes, by_columns = (each.importance(model, graph) for each in (self.nodes, self.columns))
        return replace(by_columns, sn=by_nodes.sn)


@dataclass(frozen=True, kw_only=True)
class ColumnNorms:
    """Norms of the first layer's columns; of a node, the length of its row's deviation from the mean, so weighted.

    The first layer is every matrix of the model with one column per feature. ValueError where there is none.
    """

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
        width = graph.num_features
        found = [p.detach() for p in model.parameters() if p.dim() == 2 and p.shape[1] == width]
        if not found:
            raise ValueError(
                f"no parameter of {type(model).__name__} has a column for each of {width} features: use "
                "explainer='gradient'"
            )
        norms = torch.cat(found).float().norm(dim=0)
        deviation = graph.x[graph.num_pools :] - graph.mean_row
        return make_masks(graph.requester, graph.ids, (deviation * norms).norm(dim=1), norms)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Edges of a node into the core; all columns alike."""

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
        columns = torch.ones(graph.num_features, device="cpu")
        return make_masks(graph.requester, graph.ids, graph.degree, columns)


@dataclass(frozen=True, kw_only=True)
class RandomMasks:
    """Uniform numbers: what a guide has to beat."""

    seed: int = 0

    def importance(self, model: nn.Module, graph: ExplanationGraph) -> Masks:
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
