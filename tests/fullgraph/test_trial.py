"""Where plans are made, and the small graph on which layers are tried before them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gnnsys.fullgraph import HybridParallel
from gnnsys.fullgraph.plan.layer_trial import _sample
from gnnsys.nn import SAGEConv
from tests.fullgraph.changed import GRAPH, RANKS, seeded, x
from tests.fullgraph.customised import WIDTH, bins
from tests.fullgraph.thread_ranks import run_ranks


def test_a_default_device_of_torchs_is_not_where_plans_are_made():
    """On the meta device nothing has values: whatever is made there by default fails."""

    def work(rank, group):
        mine = copy.deepcopy(layers)
        with torch.device("meta"):
            model = HybridParallel(mine, GRAPH, ranks=RANKS, group=group, timeout=60, **bins(2))
            own = rows[model.nodes].requires_grad_()
            out = model(own)
            (out * out).sum().backward()
            assert model.total(1.0) == 2.0 and len(model.describe(own)) > 0 and model.byte_matrix(3).sum() > 0
        return out.detach(), model.nodes, own.grad

    layers = seeded(lambda: SAGEConv(WIDTH, 4), lambda: nn.BatchNorm1d(4), nn.ELU, lambda: SAGEConv(4, 3))
    rows = x()
    whole = rows.clone().requires_grad_()
    want = layers[3](layers[2](layers[1](layers[0](whole, GRAPH.csc()))), GRAPH.csc())
    (want * want).sum().backward()
    for out, nodes, grad in run_ranks(2, work):
        assert torch.allclose(out, want[nodes]) and torch.allclose(grad, whole.grad[nodes])


def test_layers_are_tried_on_loops_of_which_no_node_has_several():
    """Of several loops PyG keeps the weight of one, on a device of any of them."""
    csc = _sample(torch.Generator().manual_seed(0), None)
    edges = torch.stack([csc.indices.long(), csc.dst()])
    loops, counts = edges[0, edges[0] == edges[1]].unique(return_counts=True)
    assert len(loops) > 0 and int(counts.max()) == 1
    assert edges.unique(dim=1).shape[1] < edges.shape[1] and int(csc.in_degrees().min()) == 0
