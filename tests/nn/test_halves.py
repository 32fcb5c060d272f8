"""A layer's halves make the rows that a call of it makes, in both orders; a layer that was changed states none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnnsys.nn import GATConv, GCNConv, GINConv, GraphLayer, Halves, RGCNConv, SAGEConv
from gnnsys.ops import CSC, spmm

N, WIDE, NARROW = 30, 9, 4
LAYERS = {
    "SAGE": lambda i, o: SAGEConv(i, o),
    "SAGE of sums, normalised, without own rows": lambda i, o: SAGEConv(
        i, o, aggr="sum", normalize=True, root_weight=False
    ),
    "SAGE without a bias": lambda i, o: SAGEConv(i, o, bias=False),
    "GCN": lambda i, o: GCNConv(i, o),
    "GCN as it is": lambda i, o: GCNConv(i, o, normalize=False, bias=False),
    "GIN": lambda i, o: GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU()), eps=0.3, train_eps=True),
}


def graph() -> CSC:
    edges = torch.randint(N, (2, 150), generator=torch.Generator().manual_seed(1))
    return CSC.from_edge_index(edges, N)


def rows(width: int) -> Tensor:
    return torch.randn(N, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def sums(halves: Halves, csc: CSC, x: Tensor) -> Tensor:
    if halves.reduce == "gcn":
        return GCNConv(1, 1).aggregate(csc, x)
    return spmm(csc, x, reduce=halves.reduce)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_sums_that_are_combined_are_a_call(name: str):
    for widths in ((WIDE, NARROW), (NARROW, WIDE)):
        conv, csc, x = LAYERS[name](*widths).double(), graph(), rows(widths[0])
        halves = conv.halves()
        assert halves is not None
        close(halves.combine(sums(halves, csc, x), x), conv(x, csc))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "GIN"])
def test_the_dense_half_may_go_first_where_it_makes_rows_narrower(name: str):
    assert LAYERS[name](NARROW, WIDE).halves().narrow_first is None
    conv, csc, x = LAYERS[name](WIDE, NARROW).double(), graph(), rows(WIDE)
    halves = conv.halves()
    order = halves.narrow_first
    out = order.combine.work(sums(halves, csc, order.transform.work(x)))
    out = out if order.add_own is None else order.add_own.work(out, x)
    close(out if order.finish is None else order.finish.work(out), conv(x, csc))
    parts = [each for each in (order.transform, order.combine, order.add_own, order.finish) if each is not None]
    used = [p for each in parts for p in each.uses() if p is not None]
    assert {id(p) for p in used} == {id(p) for p in conv.parameters()} and len(used) == len(list(conv.parameters()))


def test_layers_that_are_no_sums_and_changed_ones_state_no_halves():
    class Own(SAGEConv):
        pass

    hooked, patched, linear = SAGEConv(4, 2), GCNConv(4, 2), SAGEConv(4, 2)
    hooked.register_forward_hook(lambda *args: None)
    patched.aggregate = lambda *args: None
    linear.lin_l.register_forward_hook(lambda *args: None)
    others: list[GraphLayer] = [
        GATConv(4, 2),
        RGCNConv(4, 2, 3),
        SAGEConv(4, 2, aggr="max"),
        GCNConv(4, 2, improved=True),
    ]
    for conv in (Own(4, 2), hooked, patched, linear, *others):
        assert conv.halves() is None, conv


def test_layers_state_no_halves_while_somebody_has_another_call_for_all_modules(monkeypatch):
    """Tools do so to see every call: one that is taken apart would not be seen."""
    layers = [GINConv(nn.Identity()), GINConv(nn.Linear(4, 2)), SAGEConv(4, 2), GCNConv(4, 2)]
    call = nn.Module.__call__
    with monkeypatch.context() as patches:
        patches.setattr(nn.Module, "__call__", lambda self, *args, **kwargs: call(self, *args, **kwargs))
        assert [conv.halves() for conv in layers] == [None] * len(layers)
    assert None not in [conv.halves() for conv in layers]
