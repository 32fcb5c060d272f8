"""Node classification on parts with a guide: less is read of other parts, as an explanation of the model says.

gnnsys partition planted-20k --parts 4 --out parts/
torchrun --nproc-per-node 4 examples/guided.py parts/
torchrun --nproc-per-node 4 examples/guided.py parts/ --no-guide   # to compare with
python examples/guided.py                                          # a planted graph in two parts, alone

Bytes are saved between machines. Parts of one machine get the same batches, and read all rows from memory.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.explain import Guide
from gnnsys.graph import planted_noise
from gnnsys.nn import GraphSAGE
from gnnsys.partition import partition_graph


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="?", help="a directory of parts; by default a planted graph is cut into two")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="seeds per step, of all trainers together")
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--columns", type=float, default=0.85, help="share of columns that rows of other parts keep")
    parser.add_argument("--every", type=int, default=30, help="steps from one explanation to the next")
    parser.add_argument("--exact", action="store_true", help="wait for masks, so that two runs are the same")
    parser.add_argument("--no-guide", action="store_true")
    parser.add_argument("--checkpoints", help="a directory to save to, and to go on from")
    args = parser.parse_args(argv)
    with gnnsys.init() as session, tempfile.TemporaryDirectory() as folder:
        if args.parts is None:
            args.parts = str(Path(folder) / "parts")
            partition_graph(planted_noise(20_000, num_features=32, noise_columns=32), 2, args.parts)
        return train(session, gnnsys.open(args.parts), args)


def train(session: gnnsys.Session, graph: gnnsys.DistGraph, args: argparse.Namespace) -> float:
    torch.manual_seed(0)
    rows, num_classes = graph.node_data["node"], 1 + int(graph.node_data["node"]["y"][:].max())
    arguments = {
        "in_channels": rows["x"].shape[1], "hidden_channels": 16, "num_layers": len(args.fanout),
        "out_channels": num_classes,
    }  # fmt: skip
    model: torch.nn.Module = GraphSAGE(**arguments).to(session.device)
    guide = None
    if not args.no_guide:  # another process makes the same model, by the name of what makes it
        guide = Guide(
            model="gnnsys.nn:GraphSAGE", arguments=arguments, num_features=args.columns, every=args.every,
            exact=args.exact,
        )  # fmt: skip
    loader = gnnsys.NeighborLoader(
        graph, args.fanout, input_nodes=gnnsys.split(graph, "train"), shuffle=True, guide=guide,
        batch_size=max(1, args.batch_size // session.world_size), device=session.device,
    )  # fmt: skip
    if session.world_size > 1:
        model = DistributedDataParallel(model, find_unused_parameters=bool(args.checkpoints))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    saver = None
    if args.checkpoints:
        saver = gnnsys.resume(args.checkpoints, every=50, model=model, optimizer=optimizer, loader=loader)
        if saver.restored is not None and session.rank == 0:
            print(f"resumed from step {saver.steps} (epoch {loader.epoch + 1})")
    for _ in range(loader.epoch, args.epochs):
        model.train()
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum") / max(1, batch.batch_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if guide is not None:
                guide.update(model)  # weights go to the explaining process now and then, and masks come back
            if saver is not None:
                saver.step()
    test, counts = accuracy(model, graph, args), loader.counters()["fetch"].counts
    if session.rank == 0:
        print(f"rows of other machines: {counts['bytes_remote']:,} bytes; left out: {counts['bytes_left_out']:,}")
        if guide is not None:
            print({name: round(value, 3) for name, value in guide.status().items()})
        print(f"test accuracy {test:.3f}")
    return test


@torch.no_grad()
def accuracy(model: torch.nn.Module, graph: gnnsys.DistGraph, args: argparse.Namespace) -> float:
    """With all neighbours and whole rows."""
    model = getattr(model, "module", model).eval()
    right = torch.zeros(2, dtype=torch.int64)
    seeds = gnnsys.split(graph, "test")
    for batch in gnnsys.NeighborLoader(graph, [-1] * len(args.fanout), input_nodes=seeds, batch_size=512):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += torch.tensor([int((out.argmax(1) == batch.y[: batch.batch_size]).sum()), batch.batch_size])
    if dist.is_initialized():
        dist.all_reduce(right)
    return float(right[0] / right[1])


if __name__ == "__main__":
    main()
