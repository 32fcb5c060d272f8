"""The ways to train that take turns, each with weights of its own that begin alike: an epoch is one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gnnsys.bench.fullgraph.closure import make_closure
from gnnsys.bench.fullgraph.variant import Variant
from gnnsys.fullgraph import HybridParallel, Packing, Schedule, share_of
from gnnsys.graph import Graph
from gnnsys.nn import GraphSAGE

WAIT_SECONDS = 600.0
LEARNING_RATE = 0.05


@dataclass
class Spent:
    """What an epoch was spent on, where a trainer can tell: seconds, and payload bytes sent."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    num_bytes: float = 0.0


class VariantTrainer(Protocol):
    def epoch(self) -> Tensor:
        """This rank's share of the loss."""

    def spent(self) -> Spent:
        """Of the last epoch."""

    def facts(self) -> dict[str, float]:
        """Of this rank, for those who want to know why."""


def make_trainer(variant: Variant, graph: Graph, ranks: Tensor, hidden: int) -> VariantTrainer:
    torch.manual_seed(0)
    num_classes = graph.info["num_classes"]
    model = GraphSAGE(variant.num_features, hidden, variant.num_layers, num_classes)
    make = Replicated if variant.replicate else Hybrid
    return make(variant, graph, ranks, model)


class Hybrid:
    """`HybridParallel` with the variant's schedule."""

    def __init__(self, variant: Variant, graph: Graph, ranks: Tensor, model: GraphSAGE) -> None:
        packing = Packing(num_bins=variant.num_bins) if variant.num_bins > 1 else Packing()
        schedule = Schedule(
            intra_layer=variant.intra_layer,
            inter_layer=variant.inter_layer,
            order=variant.order,
            packing=None if variant.num_bins == 0 else packing,
        )
        self._model = HybridParallel(model, graph, ranks=ranks, schedule=schedule, timeout=WAIT_SECONDS)
        share = self._model.share
        self._x = share.rows("x")[:, : variant.num_features].contiguous()
        self._y, self._train = share.rows("y"), share.rows("train_mask")
        self._count = self._model.total(self._train.sum())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)

    def epoch(self) -> Tensor:
        out = self._model(self._x)
        loss = F.cross_entropy(out[self._train], self._y[self._train], reduction="sum") / self._count
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    def spent(self) -> Spent:
        times = self._model.times
        return Spent(times.compute, times.wait, times.send, times.num_bytes)

    def facts(self) -> dict[str, float]:
        plan = self._model.plan
        return {
            "nodes": plan.num_core,
            "edges": plan.csc.num_edges,
            "boundary": plan.num_boundary,
            "halo": plan.num_halo,
            "rows_sent": sum(plan.rows_to()),
        }


class Replicated:
    """Every rank computes what its nodes depend on, features of all of it being there; gradients are summed."""

    def __init__(self, variant: Variant, graph: Graph, ranks: Tensor, model: GraphSAGE) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = share_of(graph, rank, world_size, ranks).original_ids
        self._model, self._closure = model, make_closure(graph.csc(), own, variant.num_layers)
        data = graph.node_data[graph.node_types[0]]
        nodes = self._closure.nodes
        self._x = torch.as_tensor(data["x"][nodes])[:, : variant.num_features].contiguous()
        self._y, self._train = torch.as_tensor(data["y"][own]), torch.as_tensor(data["train_mask"][own])
        count = self._train.sum(dtype=torch.float64)
        dist.all_reduce(count)
        self._count = float(count)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def epoch(self) -> Tensor:
        out = self._model(self._x, self._closure.blocks)
        loss = F.cross_entropy(out[self._train], self._y[self._train], reduction="sum") / self._count
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(piece.view_as(grad))
        self._optimizer.step()
        return loss.detach()

    def spent(self) -> Spent:
        return Spent()

    def facts(self) -> dict[str, float]:
        nodes, own = self._closure.nodes.numel(), self._y.numel()
        edges = sum(block.num_edges for block in self._closure.blocks)
        return {"nodes": own, "features": nodes - own, "computed": self._closure.num_computed(), "edges": edges}
