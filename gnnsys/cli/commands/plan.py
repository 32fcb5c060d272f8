"""Say how a model is best trained on a machine, without training: every plan, what binds it, the choice and why.

The machine may be this one, or one that is only described: a profile as JSON, or rates of its data sheet. With
--cluster: on which hosts the parts, trainers and samplers of a job go, how long an epoch takes there and what binds.
With --measure: what the hosts of a cluster file can do, found out over ssh and filled in.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gnnsys.cli import plan_measure, plan_placement

if TYPE_CHECKING:
    from gnnsys.graph import Graph
    from gnnsys.planning import BatchSizes, GraphBytes, MachineProfile, ModelShape, PlanComparison

NUM_BATCHES = 4  # that are sampled, for their sizes
_ID = 4  # bytes of an edge's source
_SIZES = {"nodes": None, "edges": None, "features": None, "classes": 50}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DATASET", nargs="?", help="a name, a saved graph or a file of edges")
    parser.add_argument(
        "--sizes", metavar="nodes=N,edges=N,features=N[,classes=N]", help="of a graph that is only described"
    )
    parser.add_argument("--model", metavar="KIND:WIDTHxLAYERS", default="sage:256x3", help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="where the model trains (default: %(default)s)")
    parser.add_argument("--memory", metavar="SIZE", help="4g: of the device, that may be taken (default: what is free)")
    parser.add_argument("--machine", metavar="FILE", type=Path, help="another machine's profile or rates, as JSON")
    parser.add_argument("--fanouts", metavar="N,N,...", help="neighbours per hop (default: 15,10,5, as layers need)")
    parser.add_argument("--batch-size", type=int, default=1024, help="seeds of a batch (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="that share the machine's cores and bus, a GPU each")
    parser.add_argument("--full-graph", action="store_true", help="whole epochs without sampling")
    parser.add_argument("--forward", action="store_true", help="with --full-graph: inference, no backward pass")
    parser.add_argument("--epochs", type=int, default=100, help="with --full-graph, for what is done once")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE; - is standard output")
    plan_placement.add_arguments(parser)
    plan_measure.add_arguments(parser)


class _Described(NamedTuple):
    """A graph as plans need it."""

    nodes: int
    edges: int
    features: int
    classes: int

    @property
    def num_bytes(self) -> GraphBytes:
        from gnnsys.planning import GraphBytes

        return GraphBytes(_ID * self.edges + 8 * (self.nodes + 1), 4 * self.nodes * self.features)


def run(args: argparse.Namespace) -> int:
    from gnnsys.cli.source import opened_source

    if args.measure:
        return plan_measure.run_measure(args)
    plan_measure.check_without_measure(args)
    if args.cluster is not None:
        return plan_placement.run_plan(args)
    plan_placement.check_without_cluster(args)
    _check(args)
    machine, memory = _machine(args).shared_by(args.ranks), _memory(args)
    if args.sizes is not None:
        given = _parse_sizes(args.sizes)
        model = _model(args.model, given)
        sizes = None if args.full_graph else _expected(args, model, given, memory)
    else:
        with opened_source(args.source) as graph:
            given = _describe(graph, args.source)
            model = _model(args.model, given)
            sizes = None if args.full_graph else _sampled(args, graph, model, given, memory)
    compared = _compare(args, machine, model, given, sizes, memory)
    if args.json != "-":
        print(_heading(args, machine, model, given, sizes, memory))
        print(compared.report())
    if args.json is not None:
        asked = {"graph": given._asdict(), "model": [model.kind, *model.widths], "memory": memory}
        told = json.dumps({"machine": machine.machine.source, **asked, **compared.to_json()}, indent=1)
        print(told) if args.json == "-" else Path(args.json).write_text(told + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.source is None) == (args.sizes is None):
        raise ValueError("name a DATASET, or describe one by --sizes nodes=N,edges=N,features=N")
    if args.device.split(":")[0] != "cuda":
        raise ValueError(
            f"--device {args.device}: plans are for a GPU beside a host. Without one, "
            'NeighborLoader(..., execution="auto") divides the cores'
        )
    for name in ("batch_size", "epochs", "ranks"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.forward and not args.full_graph:
        raise ValueError("--forward is for --full-graph")
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: the folder {Path(args.json).parent} does not exist")


def _machine(args: argparse.Namespace) -> MachineProfile:
    from gnnsys.planning import MachineProfile

    if args.machine is None:
        return _own_machine(args.device)
    try:
        found = json.loads(args.machine.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--machine {args.machine}: this is no JSON: {error}") from error
    if not isinstance(found, dict) or "version" in found:
        profile = MachineProfile.load(args.machine)
    else:
        try:
            profile = MachineProfile.from_rates(**found)
        except TypeError as error:
            raise ValueError(f"--machine {args.machine}: neither a profile nor rates: {error}") from error
    if "copy/up" not in profile.costs.operators:
        raise ValueError(f"--machine {args.machine}: this machine has no GPU")
    return profile


def _own_machine(device: str) -> MachineProfile:
    """From the user's cache, or measured now."""
    import torch

    from gnnsys.planning import machine_profile

    if not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU here: describe one by --machine FILE. A job on several hosts needs --cluster FILE"
        )
    return machine_profile(torch.device(device))


def _memory(args: argparse.Namespace) -> int:
    from gnnsys.observe import parse_size
    from gnnsys.store import MemoryBudget

    if args.memory is not None:
        return parse_size(args.memory)
    if args.machine is not None:
        raise ValueError("say how much memory the device of --machine has: --memory 24g")
    return MemoryBudget.of(args.device).left()


def _parse_sizes(text: str) -> _Described:
    found: dict[str, Any] = dict(_SIZES)
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in found or not number.replace("_", "").isdigit():
            raise ValueError(f"--sizes has {part!r}: nodes=N, edges=N, features=N and classes=N are known")
        found[name] = int(number)
    lacking = [name for name, number in found.items() if not number]
    if lacking:
        raise ValueError(f"--sizes needs {lacking[0]}=N, of 1 or more")
    return _Described(**found)


def _describe(graph: Graph, source: str) -> _Described:
    import torch

    if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
        raise ValueError(f"{source!r} has several types of nodes or edges; plans are for graphs of one")
    data = graph.node_data[graph.node_types[0]]
    if not isinstance(data.get("x"), torch.Tensor):
        raise ValueError(f"{source!r} has no features 'x': describe the graph by --sizes instead")
    labels = data.get("y")
    classes = graph.info.get("num_classes") or (int(labels.max()) + 1 if isinstance(labels, torch.Tensor) else 50)
    return _Described(graph.num_nodes(), graph.num_edges(), data["x"].shape[1], int(classes))


def _model(text: str, given: _Described) -> ModelShape:
    from gnnsys.planning import ModelShape

    kind, _, shape = text.partition(":")
    width, _, layers = shape.partition("x")
    if not (width.isdigit() and layers.isdigit() and int(width) > 0 and int(layers) > 0):
        raise ValueError(f"--model is KIND:WIDTHxLAYERS, such as sage:256x3, got {text!r}")
    return ModelShape(kind, (given.features, *[int(width)] * (int(layers) - 1), given.classes))


def _fanouts(args: argparse.Namespace, model: ModelShape) -> list[int]:
    if args.fanouts is None:
        return ([15, 10, 5] + [5] * model.num_layers)[: model.num_layers]
    try:
        fanouts = [int(fanout) for fanout in args.fanouts.split(",")]
    except ValueError:
        raise ValueError(f"--fanouts are whole numbers with commas, such as 15,10,5, got {args.fanouts!r}") from None
    if len(fanouts) != model.num_layers:
        raise ValueError(f"--fanouts has {len(fanouts)} hops, the model {model.num_layers} layers")
    return fanouts


def _expected(args: argparse.Namespace, model: ModelShape, given: _Described, memory: int) -> BatchSizes:
    """Of random edges; a cache has as many rows of a batch as of all."""
    from dataclasses import replace

    from gnnsys.planning import expected_sizes

    room = given.num_bytes.room_for_cache(memory)
    hit_rate = min(1.0, room / given.num_bytes.rows)
    found = expected_sizes(given.nodes, given.edges, _fanouts(args, model), args.batch_size)
    return replace(found, hit_rate=max(0.0, hit_rate))


def _sampled(args: argparse.Namespace, graph: Graph, model: ModelShape, given: _Described, memory: int) -> BatchSizes:
    """Means of a few batches, and what a cache of the rows that are visited most has of them."""
    from dataclasses import replace
    from itertools import islice

    import torch

    from gnnsys.loader import NeighborLoader
    from gnnsys.planning import BatchSizes
    from gnnsys.sampling import batch_visits

    fanouts, node_type = _fanouts(args, model), graph.node_types[0]
    mask = graph.node_data[node_type].get("train_mask")
    seeds = mask.nonzero().flatten() if isinstance(mask, torch.Tensor) else torch.arange(given.nodes, device="cpu")
    visits = batch_visits(graph, fanouts, seeds, batch_size=args.batch_size)[node_type]
    count = int(max(0.0, given.num_bytes.room_for_cache(memory)) // (4 * given.features))
    is_cached = torch.zeros(given.nodes, dtype=torch.bool, device="cpu")
    is_cached[visits.argsort(descending=True)[:count]] = True
    nodes, edges, hits, edge_hits = [], [], 0, 0
    loader = NeighborLoader(graph, fanouts, input_nodes=seeds, batch_size=args.batch_size, shuffle=True, fetch=())
    for batch in islice(loader, NUM_BATCHES):
        nodes.append(torch.tensor(batch.num_sampled_nodes, dtype=torch.float64, device="cpu"))
        edges.append(torch.tensor(batch.num_sampled_edges, dtype=torch.float64, device="cpu"))
        cached = is_cached[batch.n_id]
        hits += int(cached.sum())
        edge_hits += int(cached[batch.edge_index[0]].sum())
    loader.close()
    if not nodes:
        raise ValueError(f"{args.source!r} has no nodes to train on")
    total_nodes, total_edges = float(torch.stack(nodes).sum()), float(torch.stack(edges).sum())
    found = BatchSizes.of_hops(torch.stack(nodes).mean(0).tolist(), torch.stack(edges).mean(0).tolist())
    edge_hit_rate = edge_hits / max(1.0, total_edges)
    return replace(found, hit_rate=hits / total_nodes, edge_hit_rate=edge_hit_rate, num_nodes=given.nodes)


def _compare(
    args: argparse.Namespace, machine: MachineProfile, model: ModelShape, given: _Described, sizes: BatchSizes | None,
    memory: int,
) -> PlanComparison:  # fmt: skip
    from gnnsys.planning import LayerSize, choose_for_batches, choose_for_epochs

    if sizes is not None:
        return choose_for_batches(machine, model, sizes, given.num_bytes, memory)
    whole = LayerSize(given.nodes, given.nodes, given.edges)
    return choose_for_epochs(
        machine, model, whole, given.num_bytes, memory, trains=not args.forward, epochs=args.epochs
    )


def _heading(
    args: argparse.Namespace, machine: MachineProfile, model: ModelShape, given: _Described, sizes: BatchSizes | None,
    memory: int,
) -> str:  # fmt: skip
    from gnnsys.observe import format_size

    facts = machine.machine
    lines = [
        f"graph    {given.nodes:,} nodes, {given.edges:,} edges, {given.features:,} features",
        f"model    {model.kind}, widths {' '.join(map(str, model.widths))}",
        f"machine  {facts.processor}, {facts.threads} threads; {facts.gpu}; {facts.source}{_shared(args.ranks)}",
        f"memory   {format_size(memory)} of the device, half of it for graph and cache",
    ]
    if sizes is not None:
        first, cache = sizes.layers[0], f"; a cache has {sizes.hit_rate:.0%} of the rows" if sizes.hit_rate else ""
        batch = f"{args.batch_size:,} seeds, {first.destinations:,.0f} destinations of {first.edges:,.0f} edges"
        lines.append(f"batch    {batch}, {first.sources:,.0f} rows{cache}")
    lines.append("milliseconds of an epoch" if sizes is None else "milliseconds of a batch, in the long run")
    return "\n".join(lines)


def _shared(ranks: int) -> str:
    return f"; shared by {ranks} ranks" if ranks > 1 else ""
