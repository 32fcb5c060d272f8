"""What is computed: losses of the examples' training steps, layers, full-graph passes, trained embeddings."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnnsys
from gnnsys.fullgraph import Dropout, HybridParallel, Packing, Residual, Schedule, infer, share_of
from gnnsys.graph import save, sbm
from gnnsys.graph import typed as typed_papers
from gnnsys.nn import GAT, GCN, GIN, RGCN, GATConv, GCNConv, GINConv, GraphSAGE, RGCNConv, SAGEConv
from gnnsys.sampling import NeighborSampler
from gnnsys.store import DistEmbedding, Shard, SparseAdagrad, SparseAdam, Store
from tests.golden.case import Case, Values
from tests.golden.graphs import NUM_NODES, SEEDS, parts_of, plain
from tests.golden.loaders import KEY

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# -- examples ----------------------------------------------------------------------------------------------------------


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def losses() -> Iterator[list[float]]:
    """Collects every training loss. Torch's dropout is left out: its draws differ between builds of torch."""
    found: list[float] = []

    def noting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = function(*args, **kwargs)
            if torch.is_grad_enabled():
                found.append(loss.item())
            return loss

        return call

    names = ("cross_entropy", "binary_cross_entropy_with_logits")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(F, name, noting(getattr(F, name))))
        stack.enter_context(mock.patch.object(F, "dropout", lambda x, *args, **kwargs: x))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield found


def saved(name: str, folder: Path) -> str:
    """A small graph on disk, of one type or of several."""
    path = folder / f"{name}.graph"
    if not path.exists():
        graph = typed_papers(300, num_features=16) if name == "typed" else sbm(400, num_features=16, avg_degree=8)
        save(graph, path)
    return str(path)


def example_losses(name: str, options: str, graph: str | None, folder: Path) -> Values:
    arguments = [*([] if graph is None else [saved(graph, folder)]), *options.split()]
    with losses() as found:
        example(name).main(arguments)
    return {"losses": found}


def example_on_parts(name: str, options: str, folder: Path) -> Values:
    path = folder / "sbm-parts"
    if not path.exists():
        gnnsys.partition.partition_graph(gnnsys.graph.load(saved("sbm", folder)), 2, path, method="chunk")
    with losses() as found:
        example(name).main([str(path), *options.split()])
    return {"losses": found}


def example_resumed(folder: Path) -> Values:
    """Losses of a run that goes on from the last checkpoint of another."""
    with tempfile.TemporaryDirectory(dir=folder) as checkpoints:
        options = [saved("sbm", folder), *SAMPLED.split(), "--save-every", "3", "--checkpoints", checkpoints]
        with losses():
            example("node_classification").main([*options, "--epochs", "4"])
        with losses() as found:
            example("node_classification").main([*options, "--epochs", "8"])
    return {"losses": found}


SAMPLED = "--hidden 16 --batch-size 8 --fanout 5 3"  # 40 nodes to train on: five steps an epoch
WHOLE = "--hidden 16 --epochs 50"

# -- layers ------------------------------------------------------------------------------------------------------------


def seeded(make: Any) -> Any:
    torch.manual_seed(1)
    return make()


def with_gradients(out: Tensor, module: nn.Module, x: Tensor | None = None) -> Values:
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    values: Values = {"out": out, **{f"grad {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}}
    return values if x is None or x.grad is None else values | {"grad x": x.grad}


LAYERS: dict[str, Any] = {
    "sage": lambda: SAGEConv(4, 6),
    "sage max": lambda: SAGEConv(4, 6, aggr="max"),
    "gcn": lambda: GCNConv(4, 6),
    "gat": lambda: GATConv(4, 3, heads=2),
    "gin": lambda: GINConv(nn.Linear(4, 6), train_eps=True),
}
MODELS: dict[str, Any] = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT, "gin": GIN}


def layer(name: str, folder: Path) -> Values:
    """On an edge_index, and on the whole graph's CSC."""
    values: Values = {}
    structures = {"edge_index": plain().edge_index().long(), "csc": plain().csc()}
    for kind, structure in structures.items():
        module, x = seeded(LAYERS[name]), plain().node_data["node"]["x"].clone().requires_grad_()
        values |= {f"{kind} {n}": v for n, v in with_gradients(module(x, structure), module, x).items()}
    return values


def relations(folder: Path) -> Values:
    """RGCN, by the number of each edge's relation."""
    model, x = seeded(lambda: RGCNConv(4, 6, 3)), plain().node_data["node"]["x"].clone().requires_grad_()
    edge_type = plain().edge_data["node", "to", "node"]["number"] % 3
    values = with_gradients(model(x, plain().edge_index().long(), edge_type), model, x)
    whole = seeded(lambda: RGCN(4, 8, 2, 3, num_relations=3))
    out = whole(plain().node_data["node"]["x"], plain().edge_index().long(), edge_type=edge_type)
    return values | {f"model {name}": value for name, value in with_gradients(out, whole).items()}


def blocks(name: str, folder: Path) -> Values:
    """A model on a batch: as blocks, and trimmed hop by hop."""
    model = seeded(lambda: MODELS[name](4, 8, 2, 3))
    sample = NeighborSampler(plain(), [4, 3], expand="frontier").sample({"node": SEEDS[:16]}, key=KEY)
    x = plain().node_data["node"]["x"][sample.node["node"].long()]
    structures = [block.csc["node", "to", "node"] for block in sample.blocks]
    values = with_gradients(model(x, structures), model)
    if name == "gcn":  # it needs degrees in the whole batch: not trimmed
        return values
    sample = NeighborSampler(plain(), [4, 3]).sample({"node": SEEDS[:16]}, key=KEY)
    x = plain().node_data["node"]["x"][sample.node["node"].long()]
    edges = torch.stack([sample.row["node", "to", "node"], sample.col["node", "to", "node"]])
    return values | {"trimmed": model(x, edges, num_sampled_nodes=sample.num_sampled_nodes["node"])}


# -- whole graphs ------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "four bins": {"schedule": Schedule(packing=Packing(num_bins=4))},
    "bins of 60 nodes": {"schedule": Schedule(packing=Packing(bin_nodes=60), order="ids")},
    "bins of bytes": {"schedule": Schedule(packing=Packing(bin_bytes=16_000), inter_layer=False, intra_layer=False)},
    "computed again": {"schedule": Schedule(packing=Packing(num_bins=3)), "recompute": True},
    "a budget": {"memory_budget": 120_000},
}


def whole_pass(name: str, folder: Path) -> Values:
    """Two training passes, one that gives x a gradient, and one of evaluation, for every way to cut it into bins."""
    values: Values = {}
    ways = WAYS if name in ("sage", "gat") else {way: WAYS[way] for way in ("as it is", "computed again")}
    for way, options in ways.items():
        layers = seeded(lambda: MODELS[name](4, 8, 2, 5, dropout=0.3, norm="layer"))
        model = HybridParallel(layers, plain(), seed=2, **options)
        x = plain().node_data["node"]["x"].clone()
        model(x).square().mean().backward()
        values |= {f"{way}, {n}": v for n, v in with_gradients(model(x.requires_grad_()), layers, x).items()}
        with torch.no_grad():
            values[f"{way}, evaluated"] = model.eval()(x)
    return values


def custom_layers(folder: Path) -> Values:
    """A list of layers: weights of edges, a residual, batch normalisation, dropout of ours; on parts; inference."""

    def make() -> nn.ModuleList:
        inner = Residual(SAGEConv(8, 8), nn.ReLU())
        return nn.ModuleList([GCNConv(4, 8), nn.BatchNorm1d(8), nn.ReLU(), Dropout(0.2), inner, GATConv(8, 4)])

    values: Values = {}
    with gnnsys.init(process_group=False):
        graphs: dict[str, Any] = {"memory": plain(), "parts": gnnsys.open(parts_of("plain", folder))}
        for where, graph in graphs.items():
            layers = seeded(make)
            model = HybridParallel(list(layers), graph, edge_data={"edge_weight": "w"}, seed=2)
            x = model.share.rows("x").float()
            values[f"{where}, nodes"] = model.nodes
            values |= {f"{where}, {n}": v for n, v in with_gradients(model(x), layers).items()}
            values[f"{where}, inferred"] = infer(layers, share_of(graph, 0, 1), edge_data={"edge_weight": "w"})[1]
    return values


# -- embeddings --------------------------------------------------------------------------------------------------------


def embeddings(folder: Path) -> Values:
    """Rows and moments after ten steps, in a store of its own and in that of an opened graph."""
    values: Values = {}
    with (
        gnnsys.init(process_group=False),
        contextlib.closing(Store(machine_of_part=[0, 0, 0], local=Shard(0))) as store,
    ):
        graph = gnnsys.open(parts_of("plain", folder))
        for where, home in {"store": store, "graph": graph.store}.items():
            for kind in (SparseAdam, SparseAdagrad):
                name = kind.__name__
                table = DistEmbedding(home, NUM_NODES, 4, f"rows of {name}", init=("uniform", -1.0, 1.0, 7))
                optimizer = kind([table], lr=0.1)
                found = []
                for step in range(10):
                    ids = torch.arange(step, NUM_NODES, 3 + step).repeat(2)
                    loss = (table(ids) - ids[:, None] / NUM_NODES).square().mean()
                    found.append(loss.item())
                    loss.backward()
                    optimizer.step()
                values[f"{where}, {name}, losses"] = found
                values[f"{where}, {name}, rows"] = table(torch.arange(NUM_NODES)).detach()
            values[f"{where}, moments"] = home.tensor("rows of SparseAdam/exp_avg")[torch.arange(NUM_NODES)]
    return values


def _computed(make: Any, needs: str | None = None) -> Case:
    return Case(make, is_computed=True, needs=needs)


CASES: dict[str, Case] = {
    **{
        f"example, node_classification, {model}": _computed(
            partial(example_losses, "node_classification", f"{SAMPLED} --epochs 10 --model {model}", "sbm")
        )
        for model in ("sage", "gcn", "gat")
    },
    "example, node_classification, parts": _computed(
        partial(example_on_parts, "node_classification", f"{SAMPLED} --epochs 10")
    ),
    "example, node_classification, resumed": _computed(example_resumed),
    **{
        f"example, full_graph, {model}": _computed(
            partial(example_losses, "full_graph", f"{WHOLE} --model {model}", "sbm")
        )
        for model in ("sage", "gcn", "gat")
    },
    "example, full_graph, bins": _computed(
        partial(example_losses, "full_graph", f"{WHOLE} --bins 3 --recompute --epochs 20", "sbm")
    ),
    "example, full_graph, parts": _computed(partial(example_on_parts, "full_graph", WHOLE)),
    "example, typed_graph": _computed(
        partial(example_losses, "typed_graph", "--hidden 16 --batch-size 18 --fanout 4 3 --epochs 5", "typed")
    ),
    "example, link_prediction": _computed(
        partial(example_losses, "link_prediction", "--epochs 5 --batch-size 400 --hidden 16", "sbm")
    ),
    "example, pyg_drop_in": _computed(
        partial(example_losses, "pyg_drop_in", "--nodes 400 --epochs 50", None), needs="torch_geometric"
    ),
    **{f"layer, {name}": _computed(partial(layer, name)) for name in LAYERS},
    "layer, rgcn": _computed(relations),
    **{f"model on blocks, {name}": _computed(partial(blocks, name)) for name in MODELS},
    **{f"whole graph, {name}": _computed(partial(whole_pass, name)) for name in MODELS},
    "whole graph, a list of layers": _computed(custom_layers),
    "embeddings": _computed(embeddings),
}
