"""Random models, changed as people change them, on random graphs: what the plain modules give on the whole graph.

    python -m tests.fuzz.fullgraph --seconds 600 --seed 1
    python -m tests.fuzz.fullgraph --seed 1234 --one      # one case again, with its traceback

Graphs have self loops, repeated edges and isolated nodes; models are stacks of layers of ours and PyG's; ranks are
threads, some without nodes. A case is right if rows and all gradients agree, or if it is refused with ValueError.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gnnsys.fullgraph import JoinKept, Keep
from gnnsys.nn import GATConv, GCNConv, GINConv, RGCNConv, SAGEConv
from tests.fullgraph.customised import FEATURES, TYPES, VOID, WIDTH, Case, bins, check, check_infer, make_graph
from tests.support.customise import CHANGES, OF_THE_LAYER

ALL = CHANGES | OF_THE_LAYER
SLOW = "compiled linears"  # seconds of tracing each: drawn seldom
TOLD = {"edge_weight": "w", "edge_attr": "e", "edge_type": "t"}
Make = Callable[[int, int], nn.Module]


def mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, out))


OURS: dict[str, tuple[Make, str]] = {
    "SAGEConv": (SAGEConv, ""),
    "SAGEConv sum": (lambda a, b: SAGEConv(a, b, aggr="sum", root_weight=False), ""),
    "SAGEConv max": (lambda a, b: SAGEConv(a, b, aggr="max", normalize=True), ""),
    "GCNConv": (GCNConv, "edge_weight"),
    "GCNConv improved": (lambda a, b: GCNConv(a, b, improved=True), "edge_weight"),
    "GCNConv without loops": (lambda a, b: GCNConv(a, b, add_self_loops=False), "edge_weight"),
    "GATConv": (lambda a, b: GATConv(a, b, heads=2, concat=False, edge_dim=FEATURES, residual=True), "edge_attr"),
    "GINConv": (lambda a, b: GINConv(mlp(a, b), train_eps=True), ""),
    "RGCNConv": (lambda a, b: RGCNConv(a, b, TYPES), "edge_type"),
}


def pyg() -> dict[str, tuple[Make, str]]:
    """Layers of PyG's of any widths; none where it is not installed."""
    try:
        from torch_geometric import nn as theirs
    except ImportError:
        return {}
    return {
        "pyg SAGEConv": (theirs.SAGEConv, ""),
        "pyg GCNConv": (theirs.GCNConv, "edge_weight"),
        "pyg GCNConv improved": (lambda a, b: theirs.GCNConv(a, b, improved=True), "edge_weight"),
        "pyg GATConv": (lambda a, b: theirs.GATConv(a, b, edge_dim=FEATURES), "edge_attr"),
        "pyg GATv2Conv": (lambda a, b: theirs.GATv2Conv(a, b, edge_dim=FEATURES), "edge_attr"),
        "pyg GINConv": (lambda a, b: theirs.GINConv(mlp(a, b), train_eps=True), ""),
        "pyg GraphConv": (theirs.GraphConv, "edge_weight"),
        "pyg TransformerConv": (lambda a, b: theirs.TransformerConv(a, b, edge_dim=FEATURES), "edge_attr"),
        "pyg ResGatedGraphConv": (lambda a, b: theirs.ResGatedGraphConv(a, b, edge_dim=FEATURES), "edge_attr"),
        "pyg LEConv": (theirs.LEConv, "edge_weight"),
        "pyg ClusterGCNConv": (theirs.ClusterGCNConv, ""),
        "pyg MFConv": (theirs.MFConv, ""),
        "pyg RGCNConv": (lambda a, b: theirs.RGCNConv(a, b, TYPES), "edge_type"),
    }


def by_rows(draw: random.Random, width: int) -> nn.Module:
    return draw.choice(
        [nn.ELU, nn.Tanh, lambda: nn.LayerNorm(width), lambda: nn.Linear(width, width), lambda: nn.BatchNorm1d(width),
         lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()), lambda: nn.LeakyReLU(0.1, inplace=True)]
    )()  # fmt: skip


def make_case(seed: int) -> tuple[str, Case]:
    """The case of a seed, and what it is in words."""
    draw, layers, words, told = random.Random(seed), [], [], {}
    torch.manual_seed(seed)
    kinds, width = OURS | pyg(), WIDTH
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(list(kinds))
        make, edge = kinds[name]
        out = draw.choice([2, 5, WIDTH, 9])
        layers.append(make(width, out))
        if edge and (edge != "edge_weight" or draw.random() < 0.5):
            told[edge] = TOLD[edge]
        width = out
        words.append(name)
        if draw.random() < 0.6:
            layers.append(by_rows(draw, width))
    if draw.random() < 0.2:
        layers = [Keep("x"), *layers, JoinKept("x", "cat")]
    if draw.random() < 0.15:
        again = [layer for layer in layers if getattr(layer, "in_channels", None) == getattr(layer, "out_channels", 0)]
        layers += again[:1]
    dtype = torch.float64 if draw.random() < 0.8 else torch.float32
    layers = [layer.to(dtype) for layer in layers]
    num_nodes = draw.choice([1, 7, 40, 60])
    graph = make_graph(num_nodes, draw.choice([0, 1, 30, 200]), seed % 1000)
    world_size = draw.choice([1, 1, 2, 3])
    ranks = torch.randint(draw.choice([1, world_size]), (num_nodes,), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = draw.choice([{}, bins(draw.choice([1, 2, 5])), {"memory_budget": 1 << 17}])
    options |= {"recompute": True} if draw.random() < 0.2 else {}
    changes = [_drawn_change(draw, len(layers)) for _ in range(draw.choice([0, 1, 1, 2]))]
    words += [f"{what} of {at}" for what, at in changes]

    def change(them: Any) -> None:
        for what, at in changes:
            ALL[what](them[at])

    after = bool(changes) and draw.random() < 0.5
    if not after:
        change(layers)
    case = Case(
        layers, graph, told, world_size, ranks, change if after else None, options, draw.random() < 0.5, seed % 100
    )
    where = f"{num_nodes} nodes, {graph.num_edges()} edges, {world_size} ranks, {options}, {dtype}, after={after}"
    return f"{' + '.join(words)}; {where}; told {list(told)}", case


def _drawn_change(draw: random.Random, num_layers: int) -> tuple[str, int]:
    what = draw.choice(list(ALL))
    what = draw.choice(list(ALL)) if what == SLOW else what
    return what, draw.randrange(num_layers)


def judge(seed: int) -> str:
    """What came of a case: "right", "refused" or "void"; AssertionError where it is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _, case = make_case(seed)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return "void"  # a change that cannot be done to this layer
        reason = check(case)
        if not reason and case.world_size == 1 and case.change is None:
            reason = check_infer(case)
    return "right" if not reason else "void" if reason.startswith(VOID) else "refused"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="the case of that seed alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        print(make_case(given.seed)[0])
        print(judge(given.seed))
        return 0
    counts: Counter[str] = Counter()
    seed, end = given.seed, time.monotonic() + given.seconds
    while time.monotonic() < end:
        try:
            counts[judge(seed)] += 1
        except Exception:
            counts["wrong"] += 1
            print(f"seed {seed} is wrong: {make_case(seed)[0]}", flush=True)
            print("    " + traceback.format_exc().strip().splitlines()[-1], flush=True)
        seed += 1
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
