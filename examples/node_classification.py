"""Node classification with sampled neighbourhoods: GraphSAGE, GCN or GAT, alone or under torchrun, on plain DDP.

python examples/node_classification.py                          # a built-in graph in memory, or a dataset by name
gnnsys partition sbm-20k --parts 2 --out parts/
torchrun --nproc-per-node 2 examples/node_classification.py parts/
torchrun --nproc-per-node 2 examples/node_classification.py parts/ --device cuda  # a GPU each, or one for both
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.nn import GAT, GCN, GraphSAGE

MODELS = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT}


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", default="sbm-20k", help="a directory of parts, a file, or a name")
    parser.add_argument("--model", choices=MODELS, default="sage")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512, help="seeds per step, of all trainers together")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--fanout", type=int, nargs="+", default=[15, 10], help="neighbours per hop, one layer each")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default this rank's GPU, the CPU where there is none")
    parser.add_argument("--place", default="auto", help="where the GPU finds parts: see gnnsys.open")
    parser.add_argument("--checkpoints", help="a directory to save to, and to go on from where it has a checkpoint")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args(argv)
    with gnnsys.init(device=args.device) as session:
        return train(session, args)


def train(session: gnnsys.Session, args: argparse.Namespace) -> float:
    torch.manual_seed(args.seed)
    graph = graph_of(args.graph, session.device, args.place)
    seeds = gnnsys.split(graph, "train")
    loader = gnnsys.NeighborLoader(
        graph,
        args.fanout,
        input_nodes=seeds,
        batch_size=max(1, args.batch_size // session.world_size),
        shuffle=True,
        seed=args.seed,
        device=session.device,
    )
    rows = graph.node_data["node"]
    labels = rows["y"][seeds.ids].cpu()  # a share may be empty
    num_classes = 1 + int(total(torch.cat([labels, labels.new_zeros(1)]).max(), "max"))
    model: torch.nn.Module = MODELS[args.model](
        rows["x"].shape[1], args.hidden, len(args.fanout), num_classes, dropout=args.dropout
    ).to(session.device)
    if session.world_size > 1:
        # With checkpoints DDP must keep its first buckets: a resumed run then sums gradients in the same order.
        model = DistributedDataParallel(model, find_unused_parameters=bool(args.checkpoints))
    fused = session.device.type == "cuda"  # one launch instead of thirty
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4, fused=fused)
    saver = None
    if args.checkpoints:
        states = {"model": model, "optimizer": optimizer, "loader": loader}
        saver = gnnsys.resume(args.checkpoints, every=args.save_every, **states)
        if saver.restored is not None and session.rank == 0:
            print(f"resumed from step {saver.steps} (epoch {loader.epoch + 1})")

    loss = None  # resumed at the end of an epoch, the first loop has no batch
    for epoch in range(loader.epoch + 1, args.epochs + 1):
        model.train()
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            # The mean, and 0 of an empty batch: a trainer whose share ran out still takes part in the step.
            loss = F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum") / max(1, batch.batch_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if saver is not None:
                saver.step()
        if epoch % 5 == 0 or epoch == args.epochs:
            val = accuracy(model, graph, "val", args)
            if session.rank == 0:
                last = "" if loss is None else f"  loss {loss.item():.3f}"
                print(f"epoch {epoch:3d}{last}  val {val:.3f}")
    test = accuracy(model, graph, "test", args)
    if session.rank == 0:
        print(f"test accuracy {test:.3f}")
    return test


def graph_of(name: str, device: torch.device | None = None, place: str = "auto") -> gnnsys.Graph | gnnsys.DistGraph:
    """A directory of parts, a saved graph or a file by its path, or a dataset by its name; for `device`."""
    path = Path(name)
    if (path / "part-0000").is_dir():
        return gnnsys.open(path, device=device, place=place)
    graph = gnnsys.graph.load(path) if path.exists() else gnnsys.graph.dataset(name)
    return graph if device is None else graph.to(device)


@torch.no_grad()
def accuracy(model: torch.nn.Module, graph: gnnsys.Graph, which: str, args: argparse.Namespace) -> float:
    """With all neighbours of every node; each trainer takes its share of the nodes."""
    model.eval()
    model = getattr(model, "module", model)  # no gradients to average: plain forward
    num_hops = len(args.fanout) + (args.model == "gcn")  # GCN divides by a neighbour's degree: its in-edges are needed
    loader = gnnsys.NeighborLoader(
        graph, [-1] * num_hops, input_nodes=gnnsys.split(graph, which), batch_size=args.batch_size
    )
    right = torch.zeros(2, dtype=torch.int64)
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += torch.tensor([int((out.argmax(1) == batch.y[: batch.batch_size]).sum()), batch.batch_size])
    loader.close()
    right = total(right, "sum")
    return float(right[0] / right[1])


def total(value: torch.Tensor, how: str) -> torch.Tensor:
    """Of all trainers; as it is where there is one."""
    if dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return value


if __name__ == "__main__":
    main()
