"""What a classifier can reach on an `sbm` graph, computed from the model that generated it.

Three Bayes classifiers that know the model's parameters (class means mu, noise 1, homophily h) and see more and more:
own features; also the neighbours' features; also the neighbours' true labels. A two-layer GNN belongs between the
second and the third, since it also sees two hops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.graph.generate import class_means
from gnnsys.graph.graph import Graph
from gnnsys.ops import in_subgraph, random_permutation


@dataclass(frozen=True)
class ExpectedAccuracy:
    """Accuracy of the Bayes classifier by what it may look at; `num_nodes` nodes were classified."""

    features: float
    neighbor_features: float
    neighbor_labels: float
    num_nodes: int

    @property
    def standard_error(self) -> float:
        """Of each of the three, at most: the estimates are means over `num_nodes` nodes."""
        return 0.5 / max(self.num_nodes, 1) ** 0.5


def expected_accuracy(graph: Graph, max_nodes: int = 20_000) -> ExpectedAccuracy:
    """Bayes accuracy on at most `max_nodes` test nodes of a graph made by `sbm`.

    With one node's log likelihood l(v, c) = x_v . mu_c - |mu_c|^2 / 2 and P(k | c) = h if k = c, else
    (1 - h) / (num_classes - 1), the three scores of class c for node v are
        l(v, c);  ... + sum over neighbours u of log sum_k P(k | c) exp l(u, k);  ... + sum over u of log P(y_u | c).
    """
    if graph.info.get("generator") != "sbm":
        raise ValueError("expected_accuracy needs a graph made by gnnsys.graph.sbm, whose info says how it was made")
    num_classes, homophily = graph.info["num_classes"], graph.info["homophily"]
    x, y = graph.node_data["node"]["x"], graph.node_data["node"]["y"]
    means = class_means(num_classes, x.shape[1], graph.info["separation"], graph.info["seed"])
    nodes = graph.node_data["node"]["test_mask"].nonzero().view(-1)
    nodes = nodes[random_permutation(nodes.numel(), key=0)[:max_nodes].long()]

    other = (1 - homophily) / max(num_classes - 1, 1)
    mixing = torch.full((num_classes, num_classes), other, device="cpu").fill_diagonal_(homophily)  # [c, k] = P(k | c)
    own = _log_likelihood(x[nodes], means)
    around = in_subgraph(graph.csc(), nodes)
    neighbors = around.indices.long()
    by_features = (_log_likelihood(x[neighbors], means).softmax(1) @ mixing.t()).log()
    by_labels = mixing.t()[y[neighbors]].log()
    target = around.dst()
    scores = [own, own.index_add(0, target, by_features), own.index_add(0, target, by_labels)]
    right = [float((score.argmax(1) == y[nodes]).double().mean()) for score in scores]
    return ExpectedAccuracy(right[0], right[1], right[2], nodes.numel())


def _log_likelihood(x: Tensor, means: Tensor) -> Tensor:
    return x @ means.t() - means.square().sum(1) / 2
