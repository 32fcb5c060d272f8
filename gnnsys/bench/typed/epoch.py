"""An epoch of RGCN on a graph like MAG, one thread, beside DGL's loader and model; loading, training and all.

With a GPU also with everything on it, beside the same batches made before.

Four node types, five relations and their reverses. Papers have wide features, fields narrow ones, authors and
institutions none: both sides train an embedding of these with torch.optim.SparseAdam. DGL's model is that of its RGCN
examples: a HeteroGraphConv of GraphConvs, a weight per relation, one for the nodes' own rows, and a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys import ops
from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, milliseconds, of_peer
from gnnsys.bench.typed.layers import skewed
from gnnsys.bench.workload import Workload
from gnnsys.graph import EdgeType, Graph
from gnnsys.loader import Batch, NeighborLoader
from gnnsys.nn import TypedRGCN
from gnnsys.ops import BY_DESTINATION, STRUCTURES

SHARES = {"paper": 0.45, "author": 0.5, "institution": 0.005, "field": 0.045}  # of all nodes
RELATIONS: dict[EdgeType, float] = {  # edges per node of the graph
    ("author", "writes", "paper"): 1.5,
    ("author", "affiliated_with", "institution"): 0.5,
    ("paper", "cites", "paper"): 2.5,
    ("paper", "has_topic", "field"): 2.0,
    ("field", "part_of", "field"): 0.1,
}
WIDER, NARROW = 6, 64  # papers have 6 times the workload's features, which is 768 at full size
HIDDEN, NUM_CLASSES, FANOUT = 64, 47, (10, 10)
LIMIT = "products and copies alone"
PRE_MADE, WITHIN = "batches pre-made", 1.15  # an epoch on a GPU may take this much longer than compute alone


def mag_like(work: Workload) -> Graph:
    generator = torch.Generator().manual_seed(0)
    num_nodes = {t: max(int(share * work.sizes.num_nodes), 10) for t, share in SHARES.items()}
    edges = {}
    for (src, name, dst), per_node in RELATIONS.items():
        count = int(per_node * work.sizes.num_nodes)
        forward = torch.stack([skewed(count, num_nodes[src], generator), skewed(count, num_nodes[dst], generator)])
        edges[src, name, dst], edges[dst, f"rev_{name}", src] = forward, forward.flip(0)
    papers = num_nodes["paper"]
    data = {
        "paper": {"x": work.rows(papers, WIDER * work.sizes.dim), "y": torch.arange(papers) % NUM_CLASSES},
        "field": {"x": work.rows(num_nodes["field"], NARROW)},
    }
    return Graph.from_edge_indices(edges, num_nodes, data)


def seeds_of(work: Workload, num_batches: int) -> Tensor:
    num_papers = int(SHARES["paper"] * work.sizes.num_nodes)
    return work.ids(min(num_batches * work.sizes.num_seeds, num_papers), num_papers)


def epoch(work: Workload) -> Iterator[Case]:
    """One thread does everything on either side: ours loads in `next`, DGL's has no workers.

    `rgcn`: relations have weights for the features as they are. `rgcn, projected`: features go through a linear layer
    first, as wide as the hidden ones, for every node of the batch. That product is most of an epoch on either side.
    """
    for name, is_projected in (("rgcn", False), ("rgcn, projected", True)):

        def sides(is_projected: bool = is_projected) -> dict[str, Side]:
            graph = work.once("mag-like graph", lambda: mag_like(work))
            seeds = seeds_of(work, max(work.sizes.epoch_batches // 5, 1))
            ours = LoaderTraining(graph, seeds, work.sizes.num_seeds, is_projected, num_threads=0)
            held = list(ours.loader)
            limit = LeastWork(held, is_projected)
            calls: dict[str, Callable[[], Any]] = {
                OURS: lambda: for_each(ours.step, ours.loader),
                "loading alone": lambda: for_each(lambda batch: None, ours.loader),
                "compute alone": lambda: for_each(ours.step, held),
                LIMIT: limit.run,
            }
            found = {name: Side(call) for name, call in calls.items()}
            if "dgl" not in peers.missing("dgl"):
                found["dgl"] = of_peer(lambda: dgl_epoch(graph, seeds, work.sizes.num_seeds, is_projected))
            return found

        yield Case(
            f"epoch/{name}/1t", milliseconds(), sides,
            (Versus(("dgl",), 3.0), Versus(("loading alone",)), Versus(("compute alone",))),
            limit=LIMIT, repeats=3, missing=peers.missing("dgl"),
        )  # fmt: skip


def epoch_on_device(work: Workload) -> Iterator[Case]:
    """The graph, its rows and the model on the GPU, with what a user gets who says no more than that.

    Batches made before are shown to the model as new tensors, so that it builds its structures as for any other.
    """
    if not (torch.cuda.is_available() and ops.HAS_CUDA_KERNELS):
        return
    for name, is_projected in (("rgcn", False), ("rgcn, projected", True)):

        def sides(is_projected: bool = is_projected) -> dict[str, Side]:
            graph = work.once("mag-like graph", lambda: mag_like(work)).to("cuda")
            seeds = seeds_of(work, 5 * work.sizes.epoch_batches)
            ours = LoaderTraining(graph, seeds, work.sizes.num_seeds, is_projected, across_epochs=False)
            held = [(batch, known_edges(batch)) for batch in ours.loader]
            calls: dict[str, Callable[[], Any]] = {
                OURS: lambda: for_each(ours.step, ours.loader),
                PRE_MADE: lambda: for_each(ours.step, (seen_anew(*each) for each in held)),
                "loading alone": lambda: for_each(lambda batch: None, ours.loader),
            }
            return {name: Side(call, clock="synced") for name, call in calls.items()}

        versus = (Versus((PRE_MADE,), 1 / WITHIN), Versus(("loading alone",)))
        yield Case(f"epoch/{name}/cuda", milliseconds(), sides, versus, repeats=5)


BENCHMARKS: list[Benchmark] = [epoch, epoch_on_device]


def known_edges(batch: Batch) -> dict[EdgeType, Any]:
    """What the loader knows of a batch's edges, as long as it has not been forgotten."""
    return {t: STRUCTURES.find(edges, key=BY_DESTINATION) for t, edges in batch.edge_index_dict.items()}


def seen_anew(batch: Batch, known: Mapping[EdgeType, Any]) -> Batch:
    """The same tensors as other objects: what layers remember of the first is not there, what the loader knows is."""
    fresh = batch.apply(Tensor.detach)
    for edge_type, edges in fresh.edge_index_dict.items():
        if known[edge_type] is not None:
            STRUCTURES.put(known[edge_type], edges, key=BY_DESTINATION)
    return fresh


def for_each(step: Callable[[Any], None], batches: Iterable[Any]) -> None:
    for batch in batches:
        step(batch)


class MagInputs(nn.Module):
    """Rows of all node types, of either side: features, through a linear layer where asked for, and embeddings."""

    def __init__(self, graph: Graph, is_projected: bool) -> None:
        super().__init__()
        self.widths = {t: x.shape[1] for t, x in features_of(graph).items()}
        linears = {t: nn.Linear(width, HIDDEN) for t, width in self.widths.items()}
        self.linears = nn.ModuleDict(linears if is_projected else {})
        bare = [t for t in graph.node_types if t not in self.widths]
        self.tables = nn.ModuleDict({t: nn.Embedding(graph.num_nodes(t), HIDDEN, sparse=True) for t in bare})
        self.widths = dict.fromkeys(graph.node_types, HIDDEN) | ({} if is_projected else self.widths)

    def forward(self, features: Mapping[str, Tensor], ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = {t: self.linears[t](x) if len(self.linears) else x for t, x in features.items()}
        return rows | {t: table(ids[t]) for t, table in self.tables.items()}


def features_of(graph: Graph) -> dict[str, Tensor]:
    return {t: graph.node_data[t]["x"] for t in graph.node_types if "x" in graph.node_data[t]}


class MagTraining:
    """A model on its inputs, with the optimizers that either side has."""

    def __init__(self, inputs: MagInputs, layers: nn.Module) -> None:
        self.inputs, self.layers = inputs, layers
        dense = [*inputs.linears.parameters(), *layers.parameters()]
        sparse = list(inputs.tables.parameters())
        self.optimizers = [torch.optim.Adam(dense, lr=1e-3), torch.optim.SparseAdam(sparse, lr=1e-3)]

    def learn(self, out: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(out, y)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


class LoaderTraining(MagTraining):
    def __init__(self, graph: Graph, seeds: Tensor, batch_size: int, is_projected: bool, **options: Any) -> None:
        inputs = MagInputs(graph, is_projected).to(graph.device)
        layers = TypedRGCN(inputs.widths, HIDDEN, len(FANOUT), NUM_CLASSES, metadata=graph, targets=["paper"]).to(
            graph.device
        )
        super().__init__(inputs, layers)
        self.loader = NeighborLoader(
            graph, list(FANOUT), input_nodes=("paper", seeds), batch_size=batch_size, shuffle=True, **options
        )

    def step(self, batch: Batch) -> None:
        rows = self.inputs(batch.x_dict, {t: batch[t].n_id for t in batch.node_types})
        out = self.layers(rows, batch.edge_index_dict, num_sampled_nodes=batch.num_sampled_nodes_dict)["paper"]
        self.learn(out, batch["paper"].y[: batch["paper"].batch_size])


# -- the limit ---------------------------------------------------------------------------------------------------------


class DenseProduct(NamedTuple):
    """rows [num_rows, before] @ weight [before, after], the gradient of the weight, and of the rows where wanted."""

    num_rows: int
    before: int
    after: int
    wants_rows: bool


def products_of(batch: Batch, is_projected: bool) -> list[DenseProduct]:
    """Of one step: a product per node that a layer makes, and per (relation, node) that has an edge."""
    found = [DenseProduct(x.shape[0], x.shape[1], HIDDEN, False) for x in batch.x_dict.values() if is_projected]
    widths = dict.fromkeys(batch.node_types, HIDDEN)
    first = widths if is_projected else widths | {t: x.shape[1] for t, x in batch.x_dict.items()}
    for layer, after in enumerate([*[HIDDEN] * (len(FANOUT) - 1), NUM_CLASSES]):
        num_dst = {t: sum(n[: len(FANOUT) - layer]) for t, n in batch.num_sampled_nodes_dict.items()}
        before = first if layer == 0 else widths
        is_learnt = {t: layer > 0 or is_projected or t not in batch.x_dict for t in batch.node_types}
        found += [DenseProduct(n, before[t], after, is_learnt[t]) for t, n in num_dst.items() if n]
        for (src, _, dst), (_, ends) in batch.edge_index_dict.items():
            num_groups = int(ends[ends < num_dst[dst]].unique().numel())
            found.append(DenseProduct(num_groups, before[src], after, is_learnt[src]))
    return found


class LeastWork:
    """What no loader and no sparse kernel saves: features copied once, and dense products, in memory made before."""

    def __init__(self, batches: Sequence[Batch], is_projected: bool) -> None:
        self.copied = [x for batch in batches for x in batch.x_dict.values()]
        self.products = [product for batch in batches for product in products_of(batch, is_projected)]
        largest = max([x.numel() for x in self.copied] + [p.num_rows * max(p.before, p.after) for p in self.products])
        self.scratch = [torch.ones(largest) for _ in range(3)]
        self.weights = [torch.ones(max(p.before * p.after for p in self.products)) for _ in range(2)]

    def run(self) -> None:
        for x in self.copied:
            shaped(self.scratch[0], *x.shape).copy_(x)
        for num_rows, before, after, wants_rows in self.products:
            rows, grad = shaped(self.scratch[0], num_rows, before), shaped(self.scratch[1], num_rows, after)
            weight, of_weight = (shaped(each, before, after) for each in self.weights)
            torch.mm(rows, weight, out=shaped(self.scratch[2], num_rows, after))
            torch.mm(rows.t(), grad, out=of_weight)
            if wants_rows:
                torch.mm(grad, weight.t(), out=shaped(self.scratch[2], num_rows, before))


def shaped(scratch: Tensor, num_rows: int, width: int) -> Tensor:
    return scratch[: num_rows * width].view(num_rows, width)


# -- DGL's way ---------------------------------------------------------------------------------------------------------


def dgl_epoch(graph: Graph, seeds: Tensor, batch_size: int, is_projected: bool) -> Callable[[], Any]:
    """Its sampler fetches features and labels by itself (prefetch_*)."""
    dgl = peers.find("dgl")
    assert not isinstance(dgl, str)
    structures: dict[EdgeType, Any] = {
        t: ("csc", (graph.csc(t).indptr.long(), graph.csc(t).indices.long(), [])) for t in graph.edge_types
    }
    peer = dgl.heterograph(structures, {t: graph.num_nodes(t) for t in graph.node_types}).formats("csc")
    for node_type, x in features_of(graph).items():
        peer.nodes[node_type].data["x"] = x
    peer.nodes["paper"].data["y"] = graph.node_data["paper"]["y"]
    fetched = {t: ["x"] for t in features_of(graph)}
    sampler = dgl.dataloading.NeighborSampler(
        list(FANOUT), prefetch_node_feats=fetched, prefetch_labels={"paper": ["y"]}
    )
    options = {"batch_size": batch_size, "shuffle": True, "num_workers": 0}
    loader = dgl.dataloading.DataLoader(peer, {"paper": seeds}, sampler, **options)
    inputs = MagInputs(graph, is_projected)
    training = MagTraining(inputs, dgl_layers(dgl, graph, inputs.widths))

    def step(batch: Any) -> None:
        input_nodes, _, blocks = batch
        rows = inputs({t: blocks[0].srcdata["x"][t] for t in fetched}, input_nodes)
        for layer, block in zip(training.layers, blocks, strict=True):  # type: ignore[call-overload]
            rows = layer(block, rows)
        training.learn(rows["paper"], blocks[-1].dstdata["y"]["paper"])

    return lambda: for_each(step, loader)


def dgl_layers(dgl: Any, graph: Graph, first: Mapping[str, int]) -> nn.ModuleList:
    class Layer(nn.Module):
        """As RelGraphConvLayer of DGL's examples: means per relation, summed up, a weight of the nodes' own rows."""

        def __init__(self, before: Mapping[str, int], after: int, is_last: bool) -> None:
            super().__init__()
            options = {"norm": "right", "weight": False, "bias": False, "allow_zero_in_degree": True}
            width = {name: before[src] for src, name, _ in graph.edge_types}
            self.conv = dgl.nn.HeteroGraphConv({n: dgl.nn.GraphConv(w, after, **options) for n, w in width.items()})
            self.weight = nn.ParameterDict({n: nn.Parameter(torch.empty(w, after)) for n, w in width.items()})
            self.own = nn.ParameterDict({t: nn.Parameter(torch.empty(w, after)) for t, w in before.items()})
            self.bias = nn.ParameterDict({t: nn.Parameter(torch.zeros(after)) for t in before})
            for parameter in [*self.weight.values(), *self.own.values()]:
                nn.init.xavier_uniform_(parameter)
            self.is_last = is_last

        def forward(self, block: Any, rows: dict[str, Tensor]) -> dict[str, Tensor]:
            own = {t: rows[t][: block.number_of_dst_nodes(t)] for t in block.dsttypes if t in rows}
            arguments = {name: {"weight": weight} for name, weight in self.weight.items()}
            made = self.conv(block, (rows, own), mod_kwargs=arguments)
            out = {t: each + own[t] @ self.own[t] + self.bias[t] for t, each in made.items()}
            return out if self.is_last else {t: each.relu() for t, each in out.items()}

    hidden = dict.fromkeys(graph.node_types, HIDDEN)
    befores = [first, *[hidden] * (len(FANOUT) - 1)]
    afters = [*[HIDDEN] * (len(FANOUT) - 1), NUM_CLASSES]
    last = len(FANOUT) - 1
    return nn.ModuleList(Layer(b, a, at == last) for at, (b, a) in enumerate(zip(befores, afters, strict=True)))
