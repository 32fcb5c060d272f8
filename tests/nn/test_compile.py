"""Models under torch.compile, on batches of any size, train as they do without it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import sbm
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GAT, GraphSAGE
from gnnsys.ops import CSC


@pytest.mark.parametrize(
    ("make", "trimmed", "backend"),
    [(lambda: GraphSAGE(8, 8, 2, 3), True, "inductor"), (lambda: GAT(8, 8, 2, 3, heads=2), False, "aot_eager")],
    ids=["sage, trimmed, inductor", "gat"],
)
def test_a_compiled_model_has_the_losses_and_gradients_of_the_plain_one(
    make: Callable[[], nn.Module], trimmed: bool, backend: str
):
    """inductor has kernels of its own, the other runs torch's; tests/cuda/test_layers.py has all by inductor."""
    graph = sbm(400, num_classes=3, avg_degree=8, num_features=8, seed=1)
    losses, gradients = [], []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        call = torch.compile(model, backend=backend, dynamic=True) if is_compiled else model
        losses.append([])
        for batch in islice(NeighborLoader(graph, [4, 3], batch_size=32, seed=2), 2):
            given = {"num_sampled_nodes": batch.num_sampled_nodes} if trimmed else {}
            out = call(batch.x, batch.edge_index, **given)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            losses[-1].append(loss.detach())
        gradients.append([p.grad for p in model.parameters()])
    torch._dynamo.reset()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_compiled_sorted_edges_are_found_without_a_search_in_a_view():
    """inductor's searchsorted (torch 2.11, on a device) takes a row of edge_index for the beginning of its storage."""
    generator = torch.Generator().manual_seed(1)
    seen: list[str] = []

    def look(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))
        return module.forward

    def structure(edge_index: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
        csc = CSC.from_sorted(edge_index, num_src, num_dst)
        return csc.indptr, csc.indices

    compiled = torch.compile(structure, backend=look, dynamic=True, fullgraph=True)
    for num_edges, num_src, num_dst in [(50, 9, 7), (0, 3, 2), (80, 5, 12)]:
        src = torch.randint(num_src, (num_edges,), generator=generator)
        dst = torch.randint(num_dst, (num_edges,), generator=generator).sort().values
        for edges in (torch.stack([src, dst]), torch.stack([src, dst], 1).t()):
            found = [work(edges, num_src, num_dst) for work in (compiled, structure)]
            assert all(torch.equal(got, expected) for got, expected in zip(*found, strict=True))
    torch._dynamo.reset()
    assert any("degrees" in name for name in seen) and not any("searchsorted" in name for name in seen)
