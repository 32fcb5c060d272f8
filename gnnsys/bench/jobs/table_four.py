"""The jobs of CoGNN: its eleven graphs in their sizes (Table IV), and a model of ours or PyG's on one of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import gnnsys.nn
from gnnsys.bench.workload import SEED
from gnnsys.planning import TrainingJob

KINDS, HIDDEN, HEADS = ("GCN", "GraphSAGE", "GAT", "GIN"), 64, 8
LIBRARIES, LAYERS = ("gnnsys", "pyg"), (4, 6, 8, 10)


class GraphSize(NamedTuple):
    """A graph of Table IV."""

    nodes: int
    edges: int
    features: int
    classes: int


GRAPHS = {
    "CR": GraphSize(2_708, 10_858, 1_433, 7),
    "CT": GraphSize(3_327, 9_464, 3_703, 6),
    "PB": GraphSize(19_717, 88_676, 500, 3),
    "PR": GraphSize(43_471, 162_088, 29, 2),
    "AT": GraphSize(50_515, 1_638_396, 100, 12),
    "SB": GraphSize(88_784, 2_093_195, 128, 39),
    "DD": GraphSize(334_925, 1_686_092, 98, 2),
    "AM": GraphSize(410_236, 4_878_875, 96, 22),
    "TW": GraphSize(580_768, 1_435_116, 1_323, 2),
    "YS": GraphSize(1_714_644, 3_636_546, 74, 2),
    "OV": GraphSize(1_890_931, 3_946_402, 66, 2),
}
SMALL = {"small": GraphSize(300, 1_200, 50, 7)}


class GridJob(NamedTuple):
    """One job of the grid."""

    library: str
    kind: str
    graph: str
    layers: int
    size: GraphSize

    @property
    def name(self) -> str:
        return f"{self.library}/{self.kind}, {self.graph}{self.layers}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `whole_graph_job`."""
        return {"library": self.library, "kind": self.kind, "layers": self.layers, **self.size._asdict()}


def grid(is_full: bool, libraries: tuple[str, ...] = LIBRARIES) -> Iterator[GridJob]:
    """Every kind of model on every graph in every depth; one small graph where it is not the full one."""
    graphs, depths = (GRAPHS, LAYERS) if is_full else (SMALL, (2,))
    for library in libraries:
        for kind in KINDS:
            for graph, size in graphs.items():
                for layers in depths:
                    yield GridJob(library, kind, graph, layers, size)


def whole_graph_job(
    library: str, kind: str, nodes: int, edges: int, features: int, classes: int, layers: int, device: str = "cpu"
) -> TrainingJob:
    """One of CoGNN's jobs. Rows have no values: nothing of memory depends on them."""
    draw = torch.Generator("cpu").manual_seed(SEED)
    edge_index = torch.randint(nodes, (2, edges), generator=draw, device="cpu").to(device)
    labels = torch.randint(classes, (nodes,), generator=draw, device="cpu").to(device)
    models: Any = importlib.import_module("torch_geometric.nn") if library == "pyg" else gnnsys.nn
    more = {"heads": HEADS} if kind == "GAT" else {}
    model = getattr(models, kind)(features, HIDDEN, layers, classes, **more).to(device)
    return TrainingJob(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=lambda model, graph: F.cross_entropy(model(graph.x, graph.edge_index), labels),
        rows=torch.empty(nodes, features, device=device),
        edge_index=edge_index,
    )
