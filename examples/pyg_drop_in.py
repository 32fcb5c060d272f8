"""A PyG script with one import changed: PyG's data, PyG's model, PyG's loop, and our NeighborLoader.

PyG's own loader needs pyg-lib or torch-sparse, built for exactly this torch; ours needs neither.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from gnnsys.graph import sbm
from gnnsys.pyg import NeighborLoader  # was: from torch_geometric.loader import NeighborLoader


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden_channels)
        self.conv2 = SAGEConv(hidden_channels, out_channels)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x, edge_index).relu()
        return self.conv2(F.dropout(x, 0.3, self.training), edge_index)


def some_data(num_nodes: int) -> Data:
    """Stands for your dataset: any `Data` with x, y, edge_index and masks."""
    graph = sbm(num_nodes, num_classes=5, homophily=0.7)
    return Data(edge_index=graph.edge_index(), **graph.node_data["node"])


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = some_data(args.nodes)
    model = SAGE(data.num_features, 64, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_loader = NeighborLoader(data, [10, 10], input_nodes=data.train_mask, batch_size=128, shuffle=True)
    test_loader = NeighborLoader(data, [10, 10], input_nodes=data.test_mask, batch_size=512)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.3f}")

    model.eval()
    num_right = num_seen = 0
    with torch.no_grad():
        for batch in test_loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            num_right += int((out.argmax(1) == batch.y[: batch.batch_size]).sum())
            num_seen += batch.batch_size
    print(f"test accuracy {num_right / num_seen:.3f}")
    return num_right / num_seen


if __name__ == "__main__":
    main()
