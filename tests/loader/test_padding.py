"""Padded batches: without their padding they are the batches without, and training on them gives the same results."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.graph import Graph, sbm
from gnnsys.loader import Batch, LinkNeighborLoader, NeighborLoader, PadSizes
from gnnsys.nn import GCN, GIN, GraphSAGE
from tests.cuda.places import homogeneous, typed
from tests.support.grid import every_value

FANOUTS = [6, 4, 3]


def loaders(graph: Graph, fanouts: Any = FANOUTS, pad: Any = True, **options: Any) -> tuple[NeighborLoader, ...]:
    """Without padding and with it."""
    options = {"batch_size": 64, "shuffle": True, "num_threads": 0, **options}
    return NeighborLoader(graph, fanouts, **options), NeighborLoader(graph, fanouts, pad=pad, **options)


def hops(counts: list[int], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Where what is no padding lies, and what is padding as a mask."""
    place, real = 0, []
    for count, size in zip(counts, sizes, strict=True):
        assert count <= size
        real.append(torch.arange(place, place + count))
        place += size
    is_padding = torch.ones(place, dtype=torch.bool)
    is_padding[torch.cat(real)] = False
    return torch.cat(real), is_padding


def check_batch(plain: Batch, padded: Batch) -> None:
    """The padded batch without its padding is the plain one, and its padding keeps to itself."""
    assert padded.batch_size == plain.batch_size
    assert torch.equal(padded.input_id, plain.input_id)
    real: dict[str, Tensor] = {}
    is_padding: dict[str, Tensor] = {}
    for node_type, store in plain.nodes.items():
        there = padded.nodes[node_type]
        counts, sizes = store["num_sampled_nodes"], there["num_sampled_nodes"]
        real[node_type], is_padding[node_type] = hops(counts, sizes)
        assert there["n_id"].numel() == sum(sizes)
        for name, rows in store.items():
            if isinstance(rows, Tensor) and name not in ("input_id", "seed_time"):
                assert torch.equal(there[name][real[node_type]], rows), name
    seeds = padded.nodes[str(padded.input_type)]
    assert seeds["seed_mask"].tolist() == [i < plain.batch_size for i in range(seeds["num_sampled_nodes"][0])]
    for (src, relation, dst), store in plain.edges.items():
        there = padded.edges[src, relation, dst]
        counts, sizes = store["num_sampled_edges"], there["num_sampled_edges"]
        own, of_padding = hops(counts, sizes)
        edges = there["edge_index"]
        assert edges.shape[1] == sum(sizes)
        expected = torch.stack([real[src][store["edge_index"][0]], real[dst][store["edge_index"][1]]])
        assert torch.equal(edges[:, own], expected)
        assert torch.equal(there["e_id"][own], store["e_id"])
        rows, cols = edges[:, of_padding]
        assert is_padding[src][rows].all() and is_padding[dst][cols].all()
        assert (edges[1].diff() >= 0).all()
        begins = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        ends = torch.tensor(there_nodes(padded, dst)).cumsum(0).tolist()
        for hop, end in enumerate(ends[:-1]):  # hop h ends where its destinations do
            assert int((edges[1] < end).sum()) == begins[hop + 1]


def there_nodes(batch: Batch, node_type: str) -> list[int]:
    return batch.nodes[node_type]["num_sampled_nodes"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weight": {"weight_attr": "w"},
    "node time": {"time_attr": "t"},
    "edge time": {"time_attr": "et", "input_nodes": torch.arange(150), "input_time": torch.arange(150) % 97},
    "all neighbours": {"fanouts": [-1, -1]},
    "one hop": {"fanouts": [5]},
    "int64 ids": {"wide": True},
    "few seeds": {"input_nodes": torch.tensor([5, 5, 3])},
    "loading threads": {"num_threads": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_padded_batch_without_its_padding_is_the_batch_without(name: str) -> None:
    options = dict(OPTIONS[name])
    plain, padded = loaders(homogeneous(wide=options.pop("wide", False)), **options)
    for _ in range(2):
        for a, b in zip(plain, padded, strict=True):
            check_batch(a, b)
    padded.close()


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("seeds", ["paper", "author"])
def test_typed_batches_are_padded_per_type(seeds: str, disjoint: bool) -> None:
    plain, padded = loaders(typed(), [4, 3], input_nodes=seeds, batch_size=16, disjoint=disjoint)
    for a, b in zip(plain, padded, strict=True):
        check_batch(a, b)


def test_padding_is_a_tree_of_its_own() -> None:
    plain, padded = loaders(homogeneous(), disjoint=True)
    a, b = next(iter(plain)), next(iter(padded))
    _, is_padding = hops(a.num_sampled_nodes, b.num_sampled_nodes)
    assert (b.batch[is_padding] == b.batch_size).all() and b.batch[~is_padding].max() < b.batch_size


def trained(
    model: nn.Module, batch: Batch, dtype: torch.dtype, trim: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Outputs of the seeds, the loss, and gradients: of rows and of parameters."""
    model.zero_grad()
    x = batch.x.to(dtype).requires_grad_()
    options = {"num_sampled_nodes": batch.num_sampled_nodes} if trim else {}
    out = model(x, batch.edge_index, **options)[: batch.batch_size]
    loss = F.cross_entropy(out, batch.y[: batch.batch_size])
    loss.backward()
    assert x.grad is not None
    return out.detach(), loss.detach(), x.grad, [p.grad for p in model.parameters() if p.grad is not None]


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "sage, mean": (lambda: GraphSAGE(17, 16, 3, 9), True),
    "sage, sum": (lambda: GraphSAGE(17, 16, 3, 9, aggr="sum"), True),
    "sage, max": (lambda: GraphSAGE(17, 16, 3, 9, aggr="max"), True),
    "sage, whole batch": (lambda: GraphSAGE(17, 16, 3, 9), False),
    "sage, layer norm": (lambda: GraphSAGE(17, 16, 3, 9, norm="layer"), True),
    "gin": (lambda: GIN(17, 16, 3, 9), True),
    "gcn": (lambda: GCN(17, 16, 3, 9), False),
}


@every_value(name=MODELS.keys(), dtype=[torch.float32, torch.float64])
def test_losses_and_gradients_are_those_without_padding(name: str, dtype: torch.dtype) -> None:
    """To rounding: a product of matrices may add in another order where one has more rows, as BLAS does on Arm."""
    torch.manual_seed(1)
    make, trim = MODELS[name]
    model = make().to(dtype)
    plain, padded = loaders(homogeneous())
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-14}
    for a, b in zip(plain, padded, strict=True):
        out, loss, rows, parameters = trained(model, a, dtype, trim)
        parameters = [each.clone() for each in parameters]
        padded_out, padded_loss, padded_rows, padded_parameters = trained(model, b, dtype, trim)
        real, is_padding = hops(a.num_sampled_nodes, b.num_sampled_nodes)
        assert not padded_rows[is_padding].any()
        torch.testing.assert_close(padded_out, out, **close)
        torch.testing.assert_close(padded_loss, loss, **close)
        torch.testing.assert_close(padded_rows[real], rows, **close)
        for ours, expected in zip(padded_parameters, parameters, strict=True):
            torch.testing.assert_close(ours, expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_equal_to_the_bit_where_sums_have_no_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = GraphSAGE(17, 8, 2, 4, aggr="sum").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    plain, padded = loaders(homogeneous(), [3, 2], batch_size=16)
    for a, b in zip(plain, padded, strict=True):
        found = []
        for batch in (a, b):
            model.zero_grad()
            x = (batch.x * 4).round().to(dtype).requires_grad_()
            out = model(x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)[: batch.batch_size]
            (out * batch.y[: batch.batch_size, None]).sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert gradients and all(each.any() for each in gradients)
            real = slice(None) if batch is a else hops(a.num_sampled_nodes, b.num_sampled_nodes)[0]
            found.append([out.detach(), x.grad[real], *gradients])
        for ours, expected in zip(found[1], found[0], strict=True):
            assert torch.equal(ours, expected)


def test_a_loss_weighed_by_the_mask_of_seeds_is_that_of_the_seeds() -> None:
    torch.manual_seed(1)
    model = GraphSAGE(17, 16, 3, 9).double()
    for batch in loaders(homogeneous())[1]:
        out = model(batch.x.double(), batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        assert out.shape[0] == batch.seed_mask.numel() > batch.batch_size
        each = F.cross_entropy(out, batch.y[: out.shape[0]], reduction="none")
        loss = (each * batch.seed_mask).sum() / batch.seed_mask.sum()
        expected = F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
        torch.testing.assert_close(loss, expected)


# -- sizes -----------------------------------------------------------------------------------------------------------


def size_of(batch: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(batch.num_sampled_nodes), tuple(batch.num_sampled_edges)


@pytest.fixture(scope="module")
def large() -> Graph:
    return sbm(20_000, avg_degree=15, num_features=4)


def test_sizes_are_few_and_close_to_what_batches_have(large: Graph) -> None:
    plain, padded = loaders(large, [15, 10, 5], input_nodes=torch.arange(8000), batch_size=512, drop_last=True)
    sizes, waste = set(), []
    for _ in range(2):
        for a, b in zip(plain, padded, strict=True):
            sizes.add(size_of(b))
            waste.append((b.num_nodes / a.num_nodes, b.num_edges / a.num_edges))
    assert len(waste) == 30 and len(sizes) <= 2
    assert all(most <= 1.16 for most in map(max, waste))
    assert sum(edges for _, edges in waste) / len(waste) < 1.06


def test_a_size_follows_from_the_batch_alone(large: Graph) -> None:
    options: dict[str, Any] = {"input_nodes": torch.arange(4000), "batch_size": 512, "shuffle": True, "pad": True}
    unbroken = NeighborLoader(large, [15, 10], num_threads=0, **options)
    sizes = [size_of(batch) for _ in range(2) for batch in unbroken]
    broken = NeighborLoader(large, [15, 10], num_threads=2, **options)
    list(islice(broken, 3))
    state = broken.state_dict()
    broken.close()
    resumed = NeighborLoader(large, [15, 10], num_threads=2, **options)
    resumed.load_state_dict(state)
    assert [size_of(batch) for _ in range(2) for batch in resumed] == sizes[3:]
    resumed.close()


def test_a_small_last_batch_has_a_smaller_size(large: Graph) -> None:
    _, padded = loaders(large, [15, 10], input_nodes=torch.arange(1040), batch_size=512)
    *full, last = [batch.num_edges for batch in padded]
    assert last < min(full) / 4


def test_batches_of_any_number_of_inputs_are_padded() -> None:
    plain, padded = loaders(homogeneous())
    for count in (0, 1, 63, 64, 400):
        check_batch(plain(torch.arange(count)), padded(torch.arange(count)))


def test_sizes_can_be_given() -> None:
    given = PadSizes(nodes=[64, 512, 640, 640], edges=[384, 2048, 2048])
    plain, padded = loaders(homogeneous(), pad=given)
    sizes = set()
    for a, b in zip(plain, padded, strict=True):
        check_batch(a, b)
        sizes.add(size_of(b))
    assert len(sizes) == 1 and next(iter(sizes))[1] == (384, 2048, 2048)


def test_a_batch_that_exceeds_given_sizes_has_a_larger_one() -> None:
    plain, padded = loaders(homogeneous(), pad=PadSizes(nodes=[8, 8, 8, 8], edges=[8, 8, 8], growth=2.0))
    for a, b in zip(plain, padded, strict=True):
        check_batch(a, b)


def test_types_without_edges_or_nodes_in_the_samples_get_sizes_of_their_own() -> None:
    given = PadSizes(
        nodes={"author": [0, 0, 0], "paper": [16, 16, 16], "alone": [0, 0, 0]},
        edges={t: [0, 0] for t in typed().edge_types},
    )
    plain, padded = loaders(typed(), [4, 3], pad=given, input_nodes="paper", batch_size=16)
    for a, b in zip(plain, padded, strict=True):
        check_batch(a, b)


def test_a_graph_without_edges_is_padded() -> None:
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 40, {"x": torch.rand(40, 2)})
    plain, padded = loaders(graph, [3, 2], batch_size=16)
    for a, b in zip(plain, padded, strict=True):
        check_batch(a, b)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expand": "frontier"}, "pad=True pads one edge_index, and expand='frontier' makes blocks"),
        ({"subgraph_type": "induced"}, "subgraph_type='induced' has no hops"),
        ({"subgraph_type": "bidirectional"}, "subgraph_type='bidirectional' has no hops"),
        ({"fanouts": None, "sampler": lambda *args: None}, "not with one of your own"),
        ({"pad": 3}, r"pad must be True, False or gnnsys.loader.PadSizes\(...\), got 3"),
        ({"pad": PadSizes(nodes=[1, 2], edges=[3])}, "PadSizes.nodes must have a number for each hop, here 4"),
    ],
)
def test_what_cannot_be_padded_says_so(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        loaders(homogeneous(), **options)[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nodes": [1, 2]}, "nodes and edges"),
        ({"growth": 1.0}, "growth must be above 1"),
        ({"num_samples": 0}, "num_samples must be >= 1"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PadSizes(**options)


def test_an_array_may_not_have_the_masks_name() -> None:
    graph = homogeneous()
    graph.set_node_data("seed_mask", torch.ones(600))
    assert loaders(graph, pad=False)
    with pytest.raises(ValueError, match="'seed_mask', a name that batches use themselves"):
        loaders(graph)


def test_loaders_of_links_do_not_pad() -> None:
    with pytest.raises(TypeError, match="pad"):
        LinkNeighborLoader(homogeneous(), [3], pad=True)  # type: ignore[call-arg]


def test_edges_of_padding_are_spread_over_its_nodes(large: Graph) -> None:
    """One node with all of them would take a GPU longer than the rest of the batch."""
    plain, padded = loaders(large, [15, 10, 5], input_nodes=torch.arange(4096), batch_size=512)
    for a, b in zip(plain, padded, strict=True):
        _, of_padding = hops(a.num_sampled_edges, b.num_sampled_edges)
        for ends in b.edge_index[:, of_padding]:
            assert torch.bincount(ends).max() <= 64
