"""`python -m tests.fullgraph.accuracy [GRAPH ...]`: test accuracy of full-graph training beside PyG's, over seeds.

Mean and standard deviation of five seeds each for PyG in one process and `HybridParallel` on two ranks, from the same
initial parameters, and of their differences; dropout masks differ. The graphs are those that `gnnsys.graph.datasets`
finds.
"""

from __future__ import annotations

import sys
from statistics import mean, stdev

import torch
import torch_geometric.nn as pyg

from gnnsys.graph.datasets import dataset
from gnnsys.nn import GATConv, GCNConv, SAGEConv
from tests.fullgraph.test_accuracy import by_pyg, by_ranks, layers_of

KINDS = {"GCN": (GCNConv, pyg.GCNConv), "SAGE": (SAGEConv, pyg.SAGEConv), "GAT": (GATConv, pyg.GATConv)}
EPOCHS, SEEDS = 60, 5


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print("| graph | layer | PyG | two ranks | difference |\n|---|---|---|---|---|")
    for name in names:
        graph = dataset(name)
        for kind, (ours, theirs) in KINDS.items():
            alone, ranks = [], []
            for seed in range(SEEDS):
                peer, own = layers_of(theirs, graph, seed), layers_of(ours, graph, seed)
                for layer, other in zip(own, peer, strict=True):
                    layer.load_state_dict(other.state_dict())
                ranks.append(by_ranks(own, graph, 2, seed, EPOCHS))
                alone.append(by_pyg(peer, graph, EPOCHS))
            differences = [a - b for a, b in zip(ranks, alone, strict=True)]
            told = [f"{mean(scores):.4f} ± {stdev(scores):.4f}" for scores in (alone, ranks, differences)]
            print(f"| {name} | {kind} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["cora", "pubmed"])
