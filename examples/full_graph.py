"""Full-graph training: GraphSAGE, GCN or GAT on all nodes at once, alone or under torchrun, with the same losses.

python examples/full_graph.py                                   # a built-in graph in memory, or a dataset by name
python examples/full_graph.py typed-20k --model rgcn            # several node and edge types; papers have labels
gnnsys partition sbm-20k --parts 4 --objective communication --out parts/
torchrun --nproc-per-node 4 examples/full_graph.py parts/       # or 2, or 1: the parts are dealt to the ranks
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import gnnsys
from gnnsys.fullgraph import BinSchedule, HybridParallel, Packing, RankShare, share_of
from gnnsys.nn import GAT, GCN, RGCN, GraphSAGE

MODELS = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT, "rgcn": RGCN}
Rows = torch.Tensor | dict[str, torch.Tensor]  # of one type, or by node type


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(argv)
    with gnnsys.init() as session:
        return train(session, args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", default="sbm-20k", help="a directory of parts, a file, or a name")
    parser.add_argument("--model", choices=MODELS, default="sage")
    parser.add_argument("--edge-weight", metavar="NAME", help="of an array of the graph's edge data, for gcn")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.3, help="keyed by node: the same on any number of ranks")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bins", type=int, help="groups of nodes per layer that are computed together")
    parser.add_argument("--no-intra", action="store_true", help="send a layer's rows only when all are computed")
    parser.add_argument("--no-inter", action="store_true", help="begin a layer only when all of its inputs are there")
    parser.add_argument("--recompute", action="store_true", help="less memory: compute bins again on the way back")
    parser.add_argument("--wire-dtype", choices=["float32", "bfloat16"], default="float32", help="what rows travel as")
    parser.add_argument("--checkpoints", help="a directory to save to, and to go on from where it has a checkpoint")
    parser.add_argument("--save-every", type=int, default=10, help="epochs between checkpoints")
    return parser.parse_args(argv)


def train(session: gnnsys.Session, args: argparse.Namespace) -> float:
    torch.manual_seed(args.seed)  # the same on all ranks: they begin with the same parameters
    graph = graph_of(args.graph)
    check_model(args.model, graph)
    share = share_of(graph, session.rank, session.world_size)  # this rank's nodes, and all their in-edges
    labelled = next(t for t in graph.node_types if "y" in graph.node_data[t])
    y = share.rows("y", labelled).to(session.device)
    masks = {which: share.rows(f"{which}_mask", labelled).to(session.device) for which in ("train", "val", "test")}
    x, of_types = features(share, session.device), {}
    if isinstance(x, dict):
        width, of_types = {t: rows.shape[1] for t, rows in x.items()}, {"metadata": graph, "targets": [labelled]}
    else:
        width = x.shape[1]
    layers = MODELS[args.model](width, args.hidden, args.layers, count_classes(y), dropout=args.dropout, **of_types)
    model = HybridParallel(
        layers.to(session.device),
        share,
        edge_data={"edge_weight": args.edge_weight} if args.edge_weight else None,
        schedule=BinSchedule(
            intra_layer=not args.no_intra,
            inter_layer=not args.no_inter,
            packing=Packing(num_bins=args.bins) if args.bins else None,
        ),
        recompute=args.recompute,
        wire_dtype=getattr(torch, args.wire_dtype),
        seed=args.seed,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    saver = None
    if args.checkpoints:
        saver = gnnsys.resume(args.checkpoints, every=args.save_every, model=model, optimizer=optimizer)
        if saver.restored is not None and session.rank == 0:
            print(f"resumed from step {saver.steps}")

    num_labelled = model.total(masks["train"].sum())
    for epoch in range(1 + (saver.steps if saver else 0), args.epochs + 1):
        model.train()
        out = of_labelled(model(x))[masks["train"]]
        # This rank's share of the mean over all ranks: gradients are summed over them.
        loss = F.cross_entropy(out, y[masks["train"]], reduction="sum") / num_labelled
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if saver is not None:
            saver.step()
        whole_loss = model.total(loss.detach())
        if session.rank == 0:
            print(f"epoch {epoch:3d}  loss {whole_loss:.6f}")
    scores = accuracies(model, x, y, masks)
    if session.rank == 0:
        print("accuracy " + "  ".join(f"{which} {score:.4f}" for which, score in scores.items()))
    return scores["test"]


def check_model(model: str, graph: gnnsys.Graph | gnnsys.DistGraph) -> None:
    """Ends the program in one line where a model is for the other kind of graph."""
    is_typed = len(graph.node_types) > 1 or len(graph.edge_types) > 1
    if is_typed and model != "rgcn":
        raise SystemExit(f"error: --model {model} is for graphs of one type, and this one is typed: use --model rgcn")
    if not is_typed and model == "rgcn":
        others = ", ".join(name for name in MODELS if name != "rgcn")
        raise SystemExit(f"error: --model rgcn is for typed graphs, and this one has one type: use one of {others}")


def features(share: RankShare, device: torch.device) -> Rows:
    """This rank's rows; of a typed graph by node type."""
    x = share.rows("x")
    return {t: rows.float().to(device) for t, rows in x.items()} if isinstance(x, dict) else x.float().to(device)


def of_labelled(out: Rows) -> torch.Tensor:
    """The rows of the one type that a typed model makes rows of."""
    return next(iter(out.values())) if isinstance(out, dict) else out


@torch.no_grad()
def accuracies(model: HybridParallel, x: Rows, y: torch.Tensor, masks: dict[str, torch.Tensor]) -> dict:
    """Of the nodes of every mask, over all ranks."""
    model.eval()
    right = of_labelled(model(x)).argmax(1) == y
    return {which: model.total((right & mask).sum()) / model.total(mask.sum()) for which, mask in masks.items()}


def graph_of(name: str) -> gnnsys.Graph | gnnsys.DistGraph:
    """A directory of parts, a saved graph or a file by its path, or a dataset by its name."""
    path = Path(name)
    if (path / "part-0000").is_dir():
        return gnnsys.open(path)
    return gnnsys.graph.load(path) if path.exists() else gnnsys.graph.dataset(name)


def count_classes(y: torch.Tensor) -> int:
    """One more than the largest label of all ranks; a rank may have no nodes."""
    largest = torch.cat([y, y.new_zeros(1)]).max()
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 1 + int(largest)


if __name__ == "__main__":
    main()
