"""A typed graph (papers, authors, institutions): a SAGE layer per edge type, alone or under torchrun with DDP.

python examples/typed_graph.py                                  # a built-in graph in memory, or one by name or path
gnnsys partition typed-20k --parts 2 --out typed-parts/
torchrun --nproc-per-node 2 examples/typed_graph.py typed-parts/
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.graph import EdgeType
from gnnsys.nn import SAGEConv


class TypedSAGE(nn.Module):
    """Layers of one `SAGEConv` per edge type; what arrives at a node from several types is added. Papers come out."""

    def __init__(self, widths: dict[str, int], edge_types: list[EdgeType], hidden: int, num_layers: int, out: int):
        super().__init__()
        self.edge_types = edge_types
        self.layers = nn.ModuleList()
        for layer in range(num_layers):
            width = out if layer == num_layers - 1 else hidden
            inputs = widths if layer == 0 else dict.fromkeys(widths, hidden)
            self.layers.append(nn.ModuleList(SAGEConv((inputs[s], inputs[d]), width) for s, _, d in edge_types))

    def forward(self, x: dict[str, Tensor], edges: dict[EdgeType, Tensor]) -> Tensor:
        for number, layer in enumerate(self.layers):
            sums: dict[str, Tensor] = {}
            for edge_type, conv in zip(self.edge_types, layer, strict=True):
                src, _, dst = edge_type
                arrived = conv((x[src], x[dst]), edges[edge_type])
                sums[dst] = sums[dst] + arrived if dst in sums else arrived
            x = sums if number == len(self.layers) - 1 else {t: rows.relu() for t, rows in sums.items()}
        return x["paper"]


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", default="typed-20k", help="a directory of parts, a file, or a name")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="seeds per step, of all trainers together")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 5], help="neighbours per hop and edge type")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with gnnsys.init() as session:
        return train(session, args)


def train(session: gnnsys.Session, args: argparse.Namespace) -> float:
    torch.manual_seed(args.seed)
    graph = graph_of(args.graph)
    seeds = gnnsys.split(graph, "train", type="paper")
    loader = gnnsys.NeighborLoader(
        graph, args.fanout, input_nodes=seeds, batch_size=max(1, args.batch_size // session.world_size), shuffle=True
    )
    widths = {node_type: graph.node_data[node_type]["x"].shape[1] for node_type in graph.node_types}
    labels = graph.node_data["paper"]["y"][seeds.ids]
    num_classes = 1 + int(total(torch.cat([labels, labels.new_zeros(1)]).max(), dist.ReduceOp.MAX))
    model: nn.Module = TypedSAGE(widths, graph.edge_types, args.hidden, len(args.fanout), num_classes)
    if session.world_size > 1:
        # The last layer's rows of authors and institutions are not used, so its weights into them get no gradient.
        # Without this DDP ends the second step with "Expected to have finished reduction in the prior iteration".
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss, _ = loss_of(model, batch)
            loss.backward()
            optimizer.step()
        if session.rank == 0:
            print(f"epoch {epoch + 1:3d}  loss {loss.item():.3f}")
    loader.close()
    test = accuracy(model, graph, args)
    if session.rank == 0:
        print(f"test accuracy {test:.3f}")
    return test


def graph_of(name: str) -> gnnsys.Graph | gnnsys.DistGraph:
    """A directory of parts, a saved graph or a file by its path, or a dataset by its name."""
    path = Path(name)
    if (path / "part-0000").is_dir():
        return gnnsys.open(path)
    return gnnsys.graph.load(path) if path.exists() else gnnsys.graph.dataset(name)


def loss_of(model: nn.Module, batch: gnnsys.Batch) -> tuple[Tensor, Tensor]:
    """The mean over the batch's papers, 0 of none, so that every rank takes every step; and how many are right."""
    papers = batch["paper"]
    out = model(batch.x_dict, batch.edge_index_dict)[: papers.batch_size]
    y = papers.y[: papers.batch_size]
    return F.cross_entropy(out, y, reduction="sum") / max(1, y.numel()), (out.argmax(1) == y).sum()


@torch.no_grad()
def accuracy(model: nn.Module, graph: gnnsys.Graph, args: argparse.Namespace) -> float:
    model.eval()
    model = getattr(model, "module", model)
    seeds = gnnsys.split(graph, "test", type="paper")
    loader = gnnsys.NeighborLoader(graph, args.fanout, input_nodes=seeds, batch_size=args.batch_size)
    right = torch.zeros(2, dtype=torch.int64)
    for batch in loader:
        right += torch.stack([loss_of(model, batch)[1], torch.tensor(batch["paper"].batch_size)])
    loader.close()
    right = total(right, dist.ReduceOp.SUM)
    return float(right[0] / right[1])


def total(value: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    """Of all trainers; as it is where there is one."""
    if dist.is_initialized():
        dist.all_reduce(value, op=how)
    return value


if __name__ == "__main__":
    main()
