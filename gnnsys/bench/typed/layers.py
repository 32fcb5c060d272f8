"""One step of a layer of 45 relations, forward and backward: RGCN and RGAT of one node type, HGT of four.

Edges are in no order; some relations and some nodes have many more than others. PyG's FastRGCNConv and RGATConv copy a
weight per edge, so cases with them are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys import ops
from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Clock, Side, Versus, milliseconds, of_peer, value
from gnnsys.bench.measure import peak_extra_bytes
from gnnsys.bench.workload import FULL, Workload
from gnnsys.nn import HGTConv, RGATConv, RGCNConv

RELATIONS = 45
WIDTH = 64
HEADS = 4
NODE_TYPES = ["paper", "author", "field", "venue"]
MOST_MEMORY = 1.2  # of inputs and outputs


@dataclass(frozen=True)
class TypedSize:
    nodes: int
    edges: int

    def here(self, work: Workload) -> TypedSize:
        return self if work.sizes == FULL else TypedSize(self.nodes // 10, self.edges // 10)


LARGE, PER_EDGE, MEMORY = TypedSize(20_000, 200_000), TypedSize(4_000, 20_000), TypedSize(50_000, 500_000)
MANY_LINEARS = TypedSize(5_000, 50_000)  # for PyG's HGTConv, which takes seconds
ON_GPU, GPU_MEMORY = TypedSize(200_000, 2_000_000), TypedSize(2_000_000, 20_000_000)


def skewed(count: int, most: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(count, generator=generator) ** 2 * most).long()


def edges_of(size: TypedSize, device: str) -> tuple[Tensor, Tensor]:
    """(edge_index, edge_type)."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(size.nodes, (size.edges,), generator=generator), skewed(size.edges, size.nodes, generator)
    return torch.stack([src, dst]).to(device), skewed(size.edges, RELATIONS, generator).to(device)


def step_of(layer: nn.Module, x: Any, *arguments: Any) -> Callable[[], Tensor]:
    """A step that gives rows and their gradient, one after the other."""
    rows = [each.requires_grad_() for each in (x.values() if isinstance(x, dict) else [x])]

    def step() -> Tensor:
        found = layer(x, *arguments)
        outs = list(found.values()) if isinstance(found, dict) else [found]
        inputs = [*rows, *layer.parameters()]
        grads = torch.autograd.grad([out.sum() for out in outs], inputs, allow_unused=True)
        return torch.cat([*(out.detach().flatten() for out in outs), *(g.flatten() for g in grads[: len(rows)])])

    return step


def places() -> list[tuple[str, str, Clock]]:
    """(suffix of the case's name, device, clock)."""
    on_host: list[tuple[str, str, Clock]] = [("1t", "cpu", "host")]
    has_device = torch.cuda.is_available() and ops.HAS_CUDA_KERNELS
    return [*on_host, ("cuda", "cuda", "synced")] if has_device else on_host


def beside(
    make: Callable[[], nn.Module], of_pyg: dict[str, Callable[[Any], nn.Module]], inputs: tuple[Any, ...], clock: Clock
) -> dict[str, Side]:
    """Ours, and PyG's with our weights."""
    ours = make()
    found = {OURS: Side(step_of(ours, *inputs), clock=clock)}
    if "pyg" in peers.missing("pyg"):
        return found

    def built(kind: Callable[[Any], nn.Module]) -> Callable[[], Tensor]:
        import torch_geometric.nn

        layer = kind(torch_geometric.nn).to(next(ours.parameters()).device)
        layer.load_state_dict(ours.state_dict(), strict=False)
        return step_of(layer, *inputs)

    return {**found, **{name: of_peer(partial(built, kind), clock=clock) for name, kind in of_pyg.items()}}


def rgcn(work: Workload) -> Iterator[Case]:
    for suffix, device, clock in places():
        for name, size, per_edge in (
            ("large", ON_GPU if device == "cuda" else LARGE, False),
            ("small", PER_EDGE, True),
        ):
            kinds: dict[str, Callable[[Any], nn.Module]] = {"pyg": lambda lib: lib.RGCNConv(WIDTH, WIDTH, RELATIONS)}
            if per_edge:
                kinds["pyg fast"] = lambda lib: lib.FastRGCNConv(WIDTH, WIDTH, RELATIONS)

            def sides(
                size: TypedSize = size, kinds: Any = kinds, device: str = device, clock: Clock = clock
            ) -> dict[str, Side]:
                here = size.here(work)
                x = torch.randn(here.nodes, WIDTH).to(device)
                make = lambda: RGCNConv(WIDTH, WIDTH, RELATIONS).to(device)  # noqa: E731
                return beside(make, kinds, (x, *edges_of(here, device)), clock)

            yield Case(
                f"rgcn/{name}/{suffix}", milliseconds(), sides, (Versus(tuple(kinds), target=3.0),), agree=1e-3,
                missing={name: why for name in kinds for why in peers.missing("pyg").values()},
            )  # fmt: skip


def rgat(work: Workload) -> Iterator[Case]:
    for suffix, device, clock in places():

        def sides(device: str = device, clock: Clock = clock) -> dict[str, Side]:
            here, per_head = PER_EDGE.here(work), WIDTH // HEADS
            x = torch.randn(here.nodes, WIDTH).to(device)
            kinds = {"pyg": lambda lib: lib.RGATConv(WIDTH, per_head, RELATIONS, heads=HEADS)}
            make = lambda: RGATConv(WIDTH, per_head, RELATIONS, heads=HEADS).to(device)  # noqa: E731
            return beside(make, kinds, (x, *edges_of(here, device)), clock)

        yield Case(
            f"rgat/{suffix}", milliseconds(), sides, (Versus(("pyg",), target=2.0),), agree=1e-3,
            missing=peers.missing("pyg"),
        )  # fmt: skip


def typed_inputs(size: TypedSize, device: str) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    """Rows by node type and edges by edge type; every two types have about as many relations."""
    generator = torch.Generator().manual_seed(0)
    nodes, x, edges = size.nodes // len(NODE_TYPES), {}, {}
    for node_type in NODE_TYPES:
        x[node_type] = torch.randn(nodes, WIDTH, generator=generator).to(device)
    for number in range(RELATIONS):
        count = 2 * size.edges * (RELATIONS - number) // (RELATIONS * (RELATIONS + 1))
        ends = [torch.randint(nodes, (count,), generator=generator), skewed(count, nodes, generator)]
        kind = (NODE_TYPES[number % 4], f"r{number}", NODE_TYPES[number // 4 % 4])
        edges[kind] = torch.stack(ends).to(device)
    return x, edges


def hgt(work: Workload) -> Iterator[Case]:
    for suffix, device, clock in places():

        def sides(device: str = device, clock: Clock = clock) -> dict[str, Side]:
            x, edges = typed_inputs((ON_GPU if device == "cuda" else MANY_LINEARS).here(work), device)
            metadata = (NODE_TYPES, list(edges))
            kinds = {"pyg": lambda lib: lib.HGTConv(WIDTH, WIDTH, metadata, HEADS)}
            make = lambda: HGTConv(WIDTH, WIDTH, metadata, HEADS).to(device)  # noqa: E731
            return beside(make, kinds, (x, edges), clock)

        yield Case(
            f"hgt/{suffix}", milliseconds(), sides, (Versus(("pyg",), target=2.0),), agree=1e-3,
            missing=peers.missing("pyg"),
        )  # fmt: skip


def memory(work: Workload) -> Iterator[Case]:
    """The most that a step of RGCN holds, as a multiple of its inputs and outputs, gradients among them."""
    for suffix, device, _ in places():

        def sides(device: str = device) -> dict[str, Side]:
            here, width = (GPU_MEMORY if device == "cuda" else MEMORY).here(work), 2 * WIDTH
            layer = RGCNConv(width, width, RELATIONS).to(device)
            x = torch.randn(here.nodes, width).to(device).requires_grad_()
            grad = torch.randn(here.nodes, width).to(device)
            edge_index, edge_type = edges_of(here, device)
            parameters = list(layer.parameters())

            def step() -> Any:
                out = layer(x, edge_index, edge_type)
                return out, torch.autograd.grad(out, [x, *parameters], grad)

            made = [x, grad, *parameters]
            out, grads = step()
            made_by = [out, *grads]
            both = [sum(t.numel() * t.element_size() for t in each) for each in (made, made_by)]
            del out, grads, made_by
            return {
                OURS: Side(lambda: (both[0] + held_by(step, device)) / sum(both)),
                "limit": Side(lambda: MOST_MEMORY),
            }

        yield Case(f"rgcn memory/{suffix}", value("x of in + out"), sides, (Versus(("limit",), target=1.0),), repeats=3)


def held_by(step: Callable[[], Any], device: str) -> float:
    """The most bytes that a call adds to what there is, its results among them."""
    if device == "cpu":
        return peak_extra_bytes(step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    del result
    return float(torch.cuda.max_memory_allocated() - before)


BENCHMARKS = [rgcn, rgat, hgt, memory]
