"""Models under torch.compile, on batches of any size, train as they do without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import sbm
from gnnsys.loader import Batch, NeighborLoader
from gnnsys.nn import GAT, GraphSAGE
from gnnsys.ops import CSC

SAGE, GAT_TWO_HEADS = (lambda: GraphSAGE(8, 8, 2, 3)), (lambda: GAT(8, 8, 2, 3, heads=2))
GAT_ONE_LAYER = lambda: GAT(8, 8, 1, 3, heads=2)  # noqa: E731


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was compiled by another run is not what this code compiles to."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batches(num_hops: int = 2) -> Iterator[Batch]:
    graph = sbm(400, num_classes=3, avg_degree=8, num_features=8, seed=1)
    return islice(NeighborLoader(graph, [4, 3][:num_hops], batch_size=32, seed=2), 2)


@pytest.mark.parametrize(
    ("make", "trimmed", "backend"),
    [
        pytest.param(SAGE, True, "eager", id="sage, trimmed"),
        pytest.param(SAGE, True, "aot_eager", id="sage, trimmed, aot_eager", marks=pytest.mark.long),
        pytest.param(GAT_ONE_LAYER, False, "aot_eager", id="gat, one layer", marks=pytest.mark.long),
        pytest.param(GAT_TWO_HEADS, True, "aot_eager", id="gat, trimmed", marks=pytest.mark.long),
        pytest.param(SAGE, True, "inductor", id="sage, trimmed, inductor", marks=pytest.mark.long),
        pytest.param(GAT_TWO_HEADS, False, "aot_eager", id="gat", marks=pytest.mark.long),
    ],
)
def test_a_compiled_model_has_the_losses_and_gradients_of_the_plain_one(
    make: Callable[[], nn.Module], trimmed: bool, backend: str
):
    """inductor has kernels of its own, the others run torch's; tests/cuda/test_layers.py has all by inductor.

    The long cases trace what the backward pass does as well. `opcheck` does so with every op, in tests/ops.
    """
    losses, gradients = [], []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        call = torch.compile(model, backend=backend, dynamic=True) if is_compiled else model
        losses.append([])
        for batch in batches(len(model.convs)):
            given = {"num_sampled_nodes": batch.num_sampled_nodes} if trimmed else {}
            out = call(batch.x, batch.edge_index, **given)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            losses[-1].append(loss.detach())
        gradients.append([p.grad for p in model.parameters()])
    assert [len(each) for each in losses] == [2, 2]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.long  # the test before traces the same layers and has their fake kernels; only torch's kernels differ
def test_inductors_kernels_give_the_rows_of_the_plain_model_on_trimmed_batches():
    """Forward alone, which takes half of the kernels; training with them is a long test."""
    torch.manual_seed(0)
    model = SAGE()
    compiled = torch.compile(model, backend="inductor", dynamic=True)
    with torch.no_grad():
        found = [
            [call(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes) for batch in batches()]
            for call in (compiled, model)
        ]
    assert [len(each) for each in found] == [2, 2]
    torch.testing.assert_close(*found)


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
    assert any("degrees" in name for name in seen) and not any("searchsorted" in name for name in seen)
