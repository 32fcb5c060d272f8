"""Link prediction: GraphSAGE embeds both ends of a link, their dot product says how likely it is.

python examples/link_prediction.py                              # a built-in graph in memory, or a dataset by name
gnnsys partition sbm-20k --parts 2 --out parts/
torchrun --nproc-per-node 2 examples/link_prediction.py parts/ --negatives local
torchrun --nproc-per-node 2 examples/link_prediction.py parts/ --device cuda

Links to validate and test with are held out: no message passes them, in either direction, on parts as in memory. A
batch's own links take no part in its message passing either, so that what is measured is prediction and not memory.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.metrics import AUC
from gnnsys.nn import Dot, GraphSAGE


class LinkScores(nn.Module):
    """Scores of a batch's links and negatives: [links]."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.layers, self.decoder = GraphSAGE(in_channels, hidden, num_layers), Dot(hidden)

    def forward(self, batch: gnnsys.Batch) -> Tensor:
        rows = self.layers(batch.x, batch.edge_index)
        src, dst = batch.edge_label_index.long()
        return self.decoder(rows[src], rows[dst])


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", default="sbm-20k", help="a directory of parts, a file, or a name")
    parser.add_argument("--negatives", default="uniform", help="uniform, degree, joint, in_batch or local")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024, help="links per step, of all trainers together")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 10], help="neighbours per hop, one layer each")
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default this rank's GPU, the CPU where there is none")
    args = parser.parse_args(argv)
    with gnnsys.init(device=args.device) as session:
        return train(session, args)


def train(session: gnnsys.Session, args: argparse.Namespace) -> float:
    torch.manual_seed(args.seed)
    graph = graph_of(args.graph, session.device)
    split = gnnsys.split_links(graph, val=0.05, test=0.1)

    def links(which: str, seed: int) -> gnnsys.LinkNeighborLoader:
        return gnnsys.LinkNeighborLoader(
            graph,
            args.fanout,
            edge_label_index=split.links(which),
            edge_mask=split.messages(which),
            neg_sampling=gnnsys.NegativeSampling("binary", kind=args.negatives if which == "train" else "uniform"),
            batch_size=max(1, args.batch_size // session.world_size),
            shuffle=which == "train",
            seed=seed,
            device=session.device,
        )

    width = graph.node_data["node"]["x"].shape[1]
    model = LinkScores(width, args.hidden, len(args.fanout)).to(session.device)
    trained: nn.Module = DistributedDataParallel(model) if session.world_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = links("train", args.seed)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in loader:
            labels = batch.edge_label.float()
            # The mean, and 0 of an empty batch: a trainer whose share ran out still takes part in the step.
            loss = F.binary_cross_entropy_with_logits(trained(batch), labels, reduction="sum") / max(1, labels.numel())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val = auc_of(model, links("val", args.seed))
        if session.rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}  val AUC {val:.3f}", flush=True)
    loader.close()
    test = auc_of(model, links("test", args.seed))
    if session.rank == 0:
        print(f"test AUC {test:.3f}")
    return test


@torch.no_grad()
def auc_of(model: LinkScores, loader: gnnsys.LinkNeighborLoader) -> float:
    """How often a held-out link scores above a random pair; each trainer takes its share of the links."""
    model.eval()
    auc = AUC()
    for batch in loader:
        auc.update(model(batch), batch.edge_label)
    loader.close()
    return auc.compute()


def graph_of(name: str, device: torch.device | None = None) -> gnnsys.Graph | gnnsys.DistGraph:
    """A directory of parts, a saved graph or a file by its path, or a dataset by its name; for `device`."""
    path = Path(name)
    if (path / "part-0000").is_dir():
        return gnnsys.open(path, device=device)
    graph = gnnsys.graph.load(path) if path.exists() else gnnsys.graph.dataset(name)
    return graph if device is None else graph.to(device)


if __name__ == "__main__":
    main()
