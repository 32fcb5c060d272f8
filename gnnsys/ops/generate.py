"""Random edges and features, each a pure function of (key, its index): the typed face of csrc/cpu/generate.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import takes_outputs_only

_INT32_MAX = 2**31 - 1


def _edges(num_edges: int, *num_nodes: int) -> Tensor:
    if num_edges < 0:
        raise ValueError(f"num_edges must be >= 0, got {num_edges}")
    dtype = torch.int32 if max(num_nodes) <= _INT32_MAX else torch.int64
    return torch.empty(2, num_edges, dtype=dtype, device="cpu")


def random_permutation(size: int, key: int) -> Tensor:
    """[0, size) in an order that depends on `key` alone; int32 where it fits."""
    if size < 0:
        raise ValueError(f"size must be >= 0, got {size}")
    order = torch.empty(size, dtype=torch.int32 if size <= _INT32_MAX else torch.int64, device="cpu")
    native.generate_permutation(order, key)
    return order


def rmat_edges(order: Tensor, num_edges: int, a: float, b: float, c: float, key: int) -> Tensor:
    """[2, num_edges] RMAT edges among the nodes in `order`, hubs first; repeated edges and loops are kept."""
    edges = _edges(num_edges, order.numel())
    native.generate_rmat(edges[0], edges[1], order, a, b, c, key)
    return edges


def planted_edges(
    src_order: Tensor,
    dst_order: Tensor,
    num_edges: int,
    *,
    num_classes: int,
    homophily: float,
    skew: tuple[int, int] = (1, 1),
    loops: bool = True,
    key: int,
) -> Tensor:
    """[2, num_edges] edges that join nodes of one class with probability `homophily`.

    The classes are equal runs of `src_order` and `dst_order` (`planted_labels`). Inside a class, node i of n is an
    endpoint with probability ((i+1)/n)^(1/s) - (i/n)^(1/s), s the skew of its side: 1 for all alike, s > 1 for
    degrees that follow a power law with exponent 1 + s/(s-1). Without `loops` both orders must be the same.
    """
    edges = _edges(num_edges, src_order.numel(), dst_order.numel())
    native.generate_planted(
        edges[0], edges[1], src_order, dst_order, num_classes, homophily, skew[0], skew[1], loops, key
    )
    return edges


def planted_labels(order: Tensor, num_classes: int) -> Tensor:
    """The class of each node, int64: class c holds order[c*n//num_classes : (c+1)*n//num_classes]."""
    size = order.numel()
    places = torch.arange(1, size + 1, dtype=torch.int64, device="cpu")
    labels = torch.empty(size, dtype=torch.int64, device="cpu")
    labels[order.long()] = (places * num_classes - 1) // max(size, 1)
    return labels


def class_features(labels: Tensor, means: Tensor, noise: float, key: int) -> Tensor:
    """float32 [num_nodes, dim]: means[labels] plus independent normal noise."""
    rows = torch.empty(labels.numel(), means.shape[1], dtype=torch.float32, device="cpu")
    native.generate_features(rows, labels, means.contiguous(), noise, key)
    return rows


@torch.library.register_fake("gnnsys::generate_permutation")
@torch.library.register_fake("gnnsys::generate_rmat")
@torch.library.register_fake("gnnsys::generate_planted")
@torch.library.register_fake("gnnsys::generate_features")
def _fills_its_outputs(*args: object) -> None:
    return None


takes_outputs_only(
    "generate_permutation", "generate_rmat", "generate_planted", "generate_features", device_types=["cpu"]
)
