"""R-GCN on a typed graph: a weight per edge type, inputs of every node type, alone or under torchrun with DDP.

python examples/rgcn.py                                       # a generated graph, whose authors have no features
python examples/rgcn.py aifb.npz --one-hot --hidden 16 --fanout -1 -1 --dropout 0 --weight-decay 0 --epochs 50
python examples/rgcn.py dblp_hetero.npz --split 60            # authors, papers, conferences and terms
gnnsys partition typed-20k --parts 2 --out typed-parts/
torchrun --nproc-per-node 2 examples/rgcn.py typed-parts/ --embed author --device cuda

Each relation has a weight of its own for the mean over its edges, and what arrives from all of them is added up
(Schlichtkrull et al. 2018). Types without features have a learnable row per node; of parts these rows lie where their
nodes do, and a sparse optimizer trains them there. With --one-hot they have a row per node and relation, as in the
paper: more accurate, and too large for large graphs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.metrics import F1
from gnnsys.nn import RGCN, InputEncoder

AnyGraph = gnnsys.Graph | gnnsys.DistGraph


class TypedClassifier(nn.Module):
    """Rows of every type, layers with a weight per edge type, and classes of the nodes of one type."""

    def __init__(self, graph: AnyGraph, target: str, num_classes: int, args: argparse.Namespace) -> None:
        super().__init__()
        bare = [t for t in graph.node_types if "x" not in graph.node_data[t]]
        self.target, hidden, num_layers = target, args.hidden, len(args.fanout)
        one_hot = bare if args.one_hot else []
        embed = [t for t in dict.fromkeys([*bare, *args.embed]) if t not in one_hot]
        self.encoder = InputEncoder(graph, hidden, embed=embed, ids=one_hot)
        widths = {t: None if t in one_hot else hidden for t in graph.node_types}
        options = {"metadata": graph, "targets": [target], "num_bases": args.bases, "dropout": args.dropout}
        self.layers = RGCN(widths, hidden, num_layers, num_classes, **options)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, batch: gnnsys.Batch) -> Tensor:
        """[seeds, classes]"""
        x_dict = {t: self.dropout(x) if x.is_floating_point() else x for t, x in self.encoder(batch).items()}
        out = self.layers(x_dict, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)
        return out[self.target][: batch[self.target].batch_size]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", nargs="?", help="a directory of parts, an .npz file, a saved graph, or a name")
    parser.add_argument("--split", default="60", help="which of the splits of an .npz file that has several")
    parser.add_argument(
        "--train-on-val", action="store_true", help="trains on validation nodes, too: settings are chosen"
    )
    parser.add_argument("--embed", nargs="*", default=[], help="types that have a learnable row beside their features")
    parser.add_argument(
        "--one-hot", action="store_true", help="a learnable row per node and relation where a type has no features"
    )
    parser.add_argument("--bases", type=int, help="weights of relations are mixed from so many, for many relations")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="seeds per step, of all trainers together")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--fanout", type=int, nargs="+", default=[10, 10], help="neighbours per hop and edge type")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default this rank's GPU, the CPU where there is none")
    args = parser.parse_args(argv)
    with gnnsys.init(device=args.device) as session:
        return train(session, args)


def train(session: gnnsys.Session, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(args.seed)
    graph = graph_of(args, session.device)
    target = next(node_type for node_type in graph.node_types if "y" in graph.node_data[node_type])
    seeds = gnnsys.split(graph, "trainval" if args.train_on_val else "train", type=target)
    labels = graph.node_data[target]["y"][seeds.ids].cpu().long()  # a share may be empty
    num_classes = 1 + int(largest(torch.cat([labels, labels.new_zeros(1)]).max()))
    model = TypedClassifier(graph, target, num_classes, args).to(session.device)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    ]
    if model.encoder.embeddings:  # of parts; in memory they are parameters
        optimizers.append(gnnsys.SparseAdam(model.encoder.embeddings, lr=args.lr))
    trained: nn.Module = model
    if session.world_size > 1:  # a type that no seed's neighbourhood leads to has no gradient
        trained = DistributedDataParallel(model, find_unused_parameters=True)
    size = max(1, args.batch_size // session.world_size)
    options = {"batch_size": size, "shuffle": True, "seed": args.seed, "device": session.device}
    loader = gnnsys.NeighborLoader(graph, args.fanout, input_nodes=seeds, **options)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in loader:
            y = batch[target].y[: batch[target].batch_size].long()
            loss = F.cross_entropy(trained(batch), y, reduction="sum") / max(1, y.numel())
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        if session.rank == 0 and (epoch % 5 == 0 or epoch == args.epochs):
            print(f"epoch {epoch:3d}  loss {loss.item():.3f}", flush=True)
    loader.close()
    found: dict[str, float] = {}
    for which in ("val", "test"):
        found |= {f"{which} {how}": f1 for how, f1 in scores(model, graph, which, num_classes, args).items()}
    if session.rank == 0:
        print("  ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return found


@torch.no_grad()
def scores(
    model: TypedClassifier, graph: AnyGraph, which: str, num_classes: int, args: argparse.Namespace
) -> dict[str, float]:
    """Micro-F1, which is accuracy here, and macro-F1, with all neighbours; each trainer takes its share."""
    model.eval()
    seeds = gnnsys.split(graph, which, type=model.target)
    loader = gnnsys.NeighborLoader(graph, [-1] * len(args.fanout), input_nodes=seeds, batch_size=args.batch_size)
    found = {"micro": F1(num_classes, average="micro"), "macro": F1(num_classes, average="macro")}
    for batch in loader:
        out, y = model(batch), batch[model.target].y[: batch[model.target].batch_size].long()
        for f1 in found.values():
            f1.update(out.argmax(1), y)
    loader.close()
    return {how: f1.compute() for how, f1 in found.items()}  # type: ignore[misc]


def largest(value: Tensor) -> Tensor:
    """Of all trainers."""
    if dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


def graph_of(args: argparse.Namespace, device: torch.device | None = None) -> AnyGraph:
    """Parts, a file or a saved graph by its path, or a dataset by its name; without any, a generated one."""
    if args.graph is not None and (Path(args.graph) / "part-0000").is_dir():
        return gnnsys.open(args.graph, device=device)
    if args.graph is None:
        graph = gnnsys.graph.dataset("typed-20k")
        del graph.node_data["author"]["x"]
    elif args.graph.endswith(".npz"):
        graph = read_typed(args.graph, args.split)
    else:
        graph = gnnsys.graph.load(args.graph) if Path(args.graph).exists() else gnnsys.graph.dataset(args.graph)
    return graph if device is None else graph.to(device)


def read_typed(path: str, split: str = "60") -> gnnsys.Graph:
    """A typed graph of an .npz file, with reverses of all edge types.

    `edge_index` and `edge_type` with `relation_names`, or `edge_type_names` and `node_type_names` with their offsets;
    features `x_TYPE`, dense or as CSR; `train_idx`, `val_idx` and `test_idx`, or the same with `_SPLIT` behind. Where
    there is no `val_idx`, every fifth of the nodes to train on is one to validate on.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    types = [str(name) for name in arrays.get("node_type_names", ["entity"])]
    offsets = arrays.get("node_type_offsets", np.array([0, arrays["y"].size]))
    edges, edge_type = arrays["edge_index"].astype(np.int64), arrays["edge_type"]
    relations: dict[tuple[str, str, str], Tensor] = {}
    for number, name in enumerate(arrays["edge_type_names" if "edge_type_names" in arrays else "relation_names"]):
        src, relation, dst = str(name).split("|") if "edge_type_names" in arrays else (types[0], str(name), types[0])
        ends = edges[:, edge_type == number] - offsets[[types.index(src), types.index(dst)], None]
        relations[src, relation.strip("<>").replace("#", "/").split("/")[-1] + f"_{number}", dst] = torch.from_numpy(
            ends
        )
    data: dict[str, dict[str, Tensor]] = {t: features(arrays, t) for t in types}
    target = str(arrays.get("target_type", types[0]))
    data[target] |= {"y": torch.from_numpy(arrays["y"]).long()} | masks(arrays, split)
    num_nodes = {t: int(b - a) for t, a, b in zip(types, offsets, offsets[1:], strict=False)}
    return gnnsys.Graph.from_edge_indices(relations, num_nodes, data).add_reverse()


def features(arrays: dict[str, np.ndarray], node_type: str) -> dict[str, Tensor]:
    name = f"x_{node_type}"
    if name in arrays:
        return {"x": torch.from_numpy(arrays[name])}
    if f"{name}_data" not in arrays:
        return {}
    indptr, indices, values = (arrays[f"{name}_{of}"] for of in ("indptr", "indices", "data"))
    dense = np.zeros(arrays[f"{name}_shape"], np.float32)
    dense[np.repeat(np.arange(indptr.size - 1), np.diff(indptr)), indices] = values
    return {"x": torch.from_numpy(dense / dense.sum(1, keepdims=True).clip(min=1))}


def masks(arrays: dict[str, np.ndarray], split: str) -> dict[str, Tensor]:
    suffix = "" if "train_idx" in arrays else f"_{split}"
    train, test = np.sort(arrays[f"train_idx{suffix}"]), arrays[f"test_idx{suffix}"]
    val = arrays.get(f"val_idx{suffix}", train[::5])
    chosen = {"train": np.setdiff1d(train, val), "val": val, "trainval": np.union1d(train, val), "test": test}
    found = {}
    for which, ids in chosen.items():
        mask = torch.zeros(arrays["y"].size, dtype=torch.bool)
        mask[torch.from_numpy(ids).long()] = True
        found[f"{which}_mask"] = mask
    return found


if __name__ == "__main__":
    main()
