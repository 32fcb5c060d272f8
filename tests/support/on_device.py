"""Runs tests that were written for the CPU on a device: `pytest --device cuda tests/ops tests/nn tests/loader ...`.

Tensors of a test stay on the host. What is under test is moved there and its answer back: every native op that has a
CUDA kernel, every sampler and loader of a graph in memory. Without the option nothing of this is even imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gnnsys.graph import Graph
from gnnsys.loader.batch import apply_to_block
from gnnsys.loader.link_loader import LinkNeighborLoader
from gnnsys.loader.loader import Loader
from gnnsys.loader.neighbor_loader import NeighborLoader
from gnnsys.ops import CSC, IdTable
from gnnsys.sampling import NeighborSampler, Sample, find_rule

# What these tests are about does not survive being moved: tracing, arguments that share memory, batches on a device,
# the order of the CPU's sums.
HOST_ONLY = (
    "obey_torch_library",
    "is_traceable",
    "compiles_into_one_graph",
    "read_and_written_at_once",
    "arrive_on_the_device",
    "blocks_travel_with_the_batch",
    "where_bytes_came_from",
    "without_a_search_in_a_view",
    "summed_in_the_order_of_their_edges",
    "the_default_makes_the_batches_of_one_thread",
    "had_no_memory_for",
    "answers_of_any_pieces",  # on a device each piece is one segment: tests/cuda/test_stitch.py
)


def to(device: str) -> Callable[[Any], Any]:
    return lambda values: tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, values)


class NativeOps(TorchDispatchMode):
    """Native ops on host tensors run on the device. What the host refuses is not even asked there: some faults of a
    kernel end the process's use of the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._there = to(device)
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        tree_map(lambda v: tensors.append(v) if isinstance(v, Tensor) else None, (args, kwargs))
        is_traced = any(isinstance(t, (FakeTensor, FunctionalTensor)) for t in tensors)
        if func.namespace != "gnnsys" or is_traced or not _has_kernel(func):
            return func(*args, **kwargs)
        if all(t.is_cpu for t in tensors):
            func(*tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, args), **kwargs)
        there = _with_transpose(func, self._there(args))
        out = func(*there, **self._there(kwargs))
        # The arguments that are not given have their defaults.
        for argument, value, moved in zip(func._schema.arguments, args, there, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and value.is_cpu:
                value.copy_(moved)
        self.num_calls += 1
        return to("cpu")(out)


def _has_kernel(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"))


def _with_transpose(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of max and min reads the transpose on a device; rows that are on the host are not given it."""
    if func.name() != "gnnsys::spmm_extreme_grad_x" or any(a is not None for a in args[6:]):
        return args
    indptr, indices, *_, num_src = args[:6]
    turned = CSC(indptr, indices, num_src).transpose()
    return (*args[:6], turned.indptr, turned.indices, turned.edge_ids)


@contextmanager
def ops_on(device: str) -> Iterator[None]:
    defaults = IdTable.__init__.__defaults__
    assert defaults is not None and defaults[-1] == "cpu"
    IdTable.__init__.__defaults__ = (*defaults[:-1], device)  # a table is a device's own from the start
    try:
        with NativeOps(device):
            yield
    finally:
        IdTable.__init__.__defaults__ = defaults


def _sample_to_host(sample: Sample) -> Sample:
    names = ("node", "row", "col", "edge", "tree", "edge_weight", "node_weight")
    moved = {name: to("cpu")(getattr(sample, name)) for name in names}
    return replace(sample, **moved, blocks=[apply_to_block(block, Tensor.cpu) for block in sample.blocks])


def loaders_on(device: str, patch: pytest.MonkeyPatch) -> None:
    """Graphs in memory are put on the device where a loader is made of them, and its batches are brought back."""
    iterate, call = Loader.__iter__, Loader.__call__
    for kind in (NeighborLoader, LinkNeighborLoader):
        patch.setattr(kind, "__init__", _moving_its_graph(kind.__init__, device))
    patch.setattr(Loader, "__iter__", lambda self: (batch.to("cpu") for batch in iterate(self)))
    patch.setattr(Loader, "__call__", lambda self, index: call(self, index).to("cpu"))


def samplers_on(device: str, patch: pytest.MonkeyPatch) -> None:
    """The same of samplers. They keep saying that they are of the test's graph, which its loaders are given."""
    sample, find_edges = NeighborSampler.sample, NeighborSampler.find_edges
    make = _moving_its_graph(NeighborSampler.__init__, device)

    @functools.wraps(make)
    def init(self: NeighborSampler, graph: Any, *args: Any, **kwargs: Any) -> None:
        make(self, graph, *args, **kwargs)
        self.graph = graph

    patch.setattr(NeighborSampler, "__init__", init)
    patch.setattr(NeighborSampler, "sample", lambda self, *args, **kw: _sample_to_host(sample(self, *args, **kw)))
    patch.setattr(NeighborSampler, "find_edges", lambda self, *args: find_edges(self, *args).cpu())


def _draws_there(options: dict[str, Any]) -> bool:
    """Not by rules that draw on the host, nor for a sampler that was made for the graph where it is."""
    rule, sampler = options.get("rule"), options.get("sampler")
    return (rule is None or find_rule(rule).draws_on_devices) and sampler is None


def _moving_its_graph(make: Callable[..., None], device: str) -> Callable[..., None]:
    @functools.wraps(make)
    def init(self: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        is_on_host = isinstance(graph, Graph) and kwargs.get("device") is None and graph.device.type == "cpu"
        make(self, graph.to(device) if is_on_host and _draws_there(kwargs) else graph, *args, **kwargs)

    return init
