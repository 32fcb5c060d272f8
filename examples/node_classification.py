"""Node classification with GraphSAGE and sampled neighbourhoods, on a built-in graph or a dataset by name.

python examples/node_classification.py
python examples/node_classification.py --dataset pubmed --epochs 30 --dropout 0.5
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.graph.datasets import dataset
from gnnsys.nn import GraphSAGE


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="sbm-20k", help='a name like "cora", or a generated graph like "sbm-100k"')
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--fanout", type=int, nargs="+", default=[15, 10], help="neighbours per hop, one layer each")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    graph = dataset(args.dataset)
    rows = graph.node_data["node"]
    loader = gnnsys.NeighborLoader(
        graph,
        args.fanout,
        input_nodes=rows["train_mask"],
        batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
    )
    num_classes = int(rows["y"].max()) + 1
    model = GraphSAGE(rows["x"].shape[1], args.hidden, len(args.fanout), num_classes, dropout=args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 5 == 0 or epoch == args.epochs:
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}  val {accuracy(model, graph, 'val_mask'):.3f}")
    test = accuracy(model, graph, "test_mask")
    print(f"test accuracy {test:.3f}")
    return test


@torch.no_grad()
def accuracy(model: torch.nn.Module, graph: gnnsys.Graph, mask: str) -> float:
    """On all nodes of a mask, with all their neighbours: the whole graph at once, as CSC."""
    model.eval()
    rows = graph.node_data["node"]
    right = model(rows["x"], graph.csc()).argmax(1) == rows["y"]
    return float(right[rows[mask]].float().mean())


if __name__ == "__main__":
    main()
