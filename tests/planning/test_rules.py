"""Operations of a batch by each rule: multiply-adds and bytes as the layers themselves have them, and what is legal."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gnnsys
from gnnsys import nn
from gnnsys.graph import sbm
from gnnsys.ops import HostMultiplier, MultipliedRows, RowsOnHost
from gnnsys.planning.execution.model_shape import AGGREGATE, PURE, SPLIT, TRANSFORM, LayerSize, ModelShape
from gnnsys.planning.execution.rules import BatchRule, BatchSizes, plan_batch
from gnnsys.planning.scheduling.operations import CORES, DOWN, GPU, UP

GATHERS = 4  # multiply-adds in the time in which an element is summed, as nn/order.py has it for a processor
BUS = BatchRule(PURE, "pinned", "bus")
HOST = BatchRule(PURE, "host", "host")


class CountedWork:
    """A machine on which a multiply-add, a summed element of four, and a byte that is moved take a second each."""

    def seconds(self, operator, **sizes):
        kind = operator.split("/")[0]
        if kind in ("product", "backward"):
            return sizes["rows"] * sizes["inner"] * sizes["width"] * (1 + sizes.get("input_gradient", 0))
        if kind == "spmm":
            return GATHERS * sizes["edges"] * sizes["width"]
        if kind == "copy":
            return sizes["bytes"]
        if kind == "gather":
            return sizes["rows"] * sizes["row_bytes"]
        return 1.0


def _sum_of(graph, *kinds):
    return sum(one.seconds for one in graph.operations if one.operator.split("/")[0] in kinds)


def _sampled(num_seeds=32):
    graph = sbm(800, num_features=24, seed=1)
    loader = gnnsys.NeighborLoader(graph, [5, 4], input_nodes=torch.arange(num_seeds), batch_size=num_seeds)
    batch = next(iter(loader))
    return batch, BatchSizes.of_hops(batch.num_sampled_nodes, batch.num_sampled_edges)


@pytest.mark.parametrize("kind", ["sage", "gcn", "gin"])
@pytest.mark.parametrize("hidden", [4, 64])
def test_pure_gpu_does_the_products_that_torch_counts(kind, hidden):
    batch, sizes = _sampled()
    widths = (24, hidden, 7)
    model = {"sage": nn.GraphSAGE, "gcn": nn.GCN, "gin": nn.GIN}[kind](24, hidden, 2, 7)
    nodes = {"num_sampled_nodes": batch.num_sampled_nodes}
    if kind == "gcn":  # takes whole batches
        nodes, whole = {}, LayerSize(batch.num_nodes, batch.num_nodes, batch.num_edges)
        sizes = BatchSizes((whole, whole), batch.num_edges)
    with FlopCounterMode(display=False) as counter:
        model(batch.x, batch.edge_index, **nodes).square().sum().backward()
    planned = plan_batch(CountedWork(), ModelShape(kind, widths), sizes, BUS)
    assert _sum_of(planned, "product", "backward") == pytest.approx(counter.get_total_flops() / 2)
    assert ModelShape(kind, widths).num_parameters == sum(p.numel() for p in model.parameters())


def test_sums_of_the_host_are_those_of_the_first_layer_and_their_bytes_go_up_once():
    _, sizes = _sampled()
    first = sizes.layers[0]
    planned = plan_batch(CountedWork(), ModelShape("sage", (24, 8, 7)), sizes, BatchRule(AGGREGATE, "host", "host"))
    busy = planned.busy()
    own = 4 * 24 * first.destinations
    assert busy[CORES] == pytest.approx(1 + GATHERS * 24 * first.edges + own), "sampling, sums, own rows"
    assert busy[UP] == pytest.approx(2 * own + 8 * sizes.sampled_edges + 8 * first.sources)
    assert busy[DOWN] == 0
    by_device = plan_batch(CountedWork(), ModelShape("sage", (24, 8, 7)), sizes, BatchRule(AGGREGATE, "pinned", "host"))
    assert by_device.busy()[DOWN] == pytest.approx(8 * first.edges + 8 * first.destinations), "structure for the host"
    own_in_sum = plan_batch(CountedWork(), ModelShape("gcn", (24, 8, 7)), sizes, BatchRule(AGGREGATE, "host", "host"))
    assert own_in_sum.busy()[CORES] == pytest.approx(1 + GATHERS * 24 * (first.edges + first.destinations))


def test_pre_transformed_rows_go_up_their_gradients_down_and_both_products_are_the_hosts():
    _, sizes = _sampled()
    first = sizes.layers[0]
    planned = plan_batch(CountedWork(), ModelShape("gcn", (24, 8, 7)), sizes, BatchRule(TRANSFORM, "host", "host"))
    product, weights = first.sources * 24 * 8, 4 * 24 * 8
    assert planned.busy()[CORES] == pytest.approx(1 + 2 * 4 * 24 * first.sources + 2 * product), "rows are read twice"
    assert planned.busy()[DOWN] == pytest.approx(weights + 4 * 8 * first.sources)
    assert planned.busy()[UP] == pytest.approx(planned.busy()[DOWN] + 8 * sizes.sampled_edges + 8 * first.sources)
    assert [one.operator for one in planned.operations if one.needs_weights] == ["copy/down"]


def test_split_is_pre_aggregate_without_a_cache_and_nothing_for_the_host_with_all_rows_in_it():
    _, sizes = _sampled()
    shape, first = ModelShape("sage", (24, 8, 7)), sizes.layers[0]

    def split(hit_rate):
        cached = BatchSizes(sizes.layers, sizes.sampled_edges, hit_rate=hit_rate)
        return plan_batch(CountedWork(), shape, cached, BatchRule(SPLIT, "pinned", "cached")).busy()

    whole = plan_batch(CountedWork(), shape, sizes, BatchRule(AGGREGATE, "pinned", "host")).busy()
    assert split(0.0) == pytest.approx(whole)
    assert split(1.0)[CORES] == 0 and split(1.0)[UP] == 1 and split(1.0)[DOWN] == 0, "the device does it"
    assert split(1.0)[GPU] - split(0.0)[GPU] == pytest.approx(4 * 24 * first.sources + GATHERS * 24 * first.edges)
    halves = [split(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(a[CORES] > b[CORES] and a[UP] > b[UP] for a, b in itertools.pairwise(halves))


def test_only_linear_layers_of_constant_rows_are_rewritten_and_the_reason_is_said():
    _, sizes = _sampled()
    for shape, why in [
        (ModelShape("gat", (24, 8, 7)), "attention weighs rows"),
        (ModelShape("sage", (24, 8, 7), rows_are_constant=False), "rows train"),
    ]:
        pure = plan_batch(CountedWork(), shape, sizes, HOST)
        linear = plan_batch(CountedWork(), ModelShape("gcn", shape.widths), sizes, HOST)
        assert _sum_of(pure, "spmm") > _sum_of(linear, "spmm") or shape.kind == "sage", (
            "scores are made over edges, too"
        )
        for how in (BatchRule(TRANSFORM, "host", "host"), BatchRule(AGGREGATE, "host", "host")):
            with pytest.raises(ValueError, match=why):
                plan_batch(CountedWork(), shape, sizes, how)
    assert all(
        ModelShape(kind, (24, 8, 7)).why_not(rule) is None
        for kind in ("sage", "gcn", "gin")
        for rule in (AGGREGATE, TRANSFORM)
    )


class MultiplyAdds(TorchDispatchMode):
    """Of products. FlopCounterMode has hooks on all modules, and such a model is not taken apart."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = {"mm": 0, "addmm": 1, "addmm_": 1}.get(function.overloadpacket.__name__)
        if first is not None:
            self.total += args[first].numel() * args[first + 1].shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["sage", "gcn", "gin"])
def test_pre_transform_does_the_products_that_torch_counts_where_the_host_multiplies(kind):
    batch, sizes = _sampled()
    model = {"sage": nn.GraphSAGE, "gcn": nn.GCN, "gin": nn.GIN}[kind](24, 4, 2, 7)
    nodes = {"num_sampled_nodes": batch.num_sampled_nodes}
    if kind == "gcn":
        nodes, whole = {}, LayerSize(batch.num_nodes, batch.num_nodes, batch.num_edges)
        sizes = BatchSizes((whole, whole), batch.num_edges)
    rows = MultipliedRows(
        RowsOnHost(HostMultiplier(batch.x), torch.arange(batch.num_nodes), lambda: None), batch.x.device, batch.x.clone
    )
    with MultiplyAdds() as counter:
        model(rows, batch.edge_index, **nodes).square().sum().backward()
    assert not rows.is_gathered
    how = BatchRule(TRANSFORM, "host", "host")
    planned = plan_batch(CountedWork(), ModelShape(kind, (24, 4, 7)), sizes, how)
    assert _sum_of(planned, "product", "backward") == pytest.approx(counter.total)


def test_batches_and_rules_that_are_none_are_refused():
    _, sizes = _sampled()
    with pytest.raises(ValueError, match="3 layers, a batch 2"):
        plan_batch(CountedWork(), ModelShape("sage", (24, 8, 8, 7)), sizes, HOST)
    with pytest.raises(ValueError, match="one of sage, gcn, gin, gat"):
        ModelShape("mlp", (24, 7))
    for bad in [(SPLIT, "host", "bus"), (AGGREGATE, "host", "cached"), ("guess", "host", "host")]:
        with pytest.raises(ValueError, match=r"rows=|no such rule"):
            BatchRule(*bad)


def test_every_batch_trains_after_the_one_before():
    _, sizes = _sampled()
    rules = [HOST, BUS, BatchRule(TRANSFORM, "host", "host"), BatchRule(AGGREGATE, "pinned", "host"),
             BatchRule(SPLIT, "pinned", "cached"), BatchRule(PURE, "device", "device")]  # fmt: skip
    for how in rules:
        graph = plan_batch(CountedWork(), ModelShape("sage", (24, 8, 7)), sizes, how)
        assert sum(one.needs_weights for one in graph.operations) == 1
        assert graph.operations[-1].operator == "optimizer/device"
