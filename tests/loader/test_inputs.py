"""What a user may write for seeds, links and positions: a mask is a mask whatever holds it, and floats are no ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gnnsys
from gnnsys.graph import EDGE, Graph, as_ids
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.sampling import DistGraph, NeighborSampler, SampleKey, sample_neighbors
from tests.sampling.machines import homogeneous, machines, typed

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda values: values,
    "numpy": lambda values: values.numpy(),
    "numpy that cannot be written": lambda values: np.frombuffer(values.numpy().tobytes(), values.numpy().dtype),
    "list": lambda values: values.tolist(),
    "tuple": lambda values: tuple(values.tolist()),
    "list of numpy's": lambda values: list(values.numpy()),
    "list of torch's": lambda values: list(values),
    "numpy of objects": lambda values: np.array(values.tolist(), dtype=object),
}


def mask_of(num_nodes: int) -> Tensor:
    return torch.arange(num_nodes) % 3 == 2


def seeds_of(loader: Any) -> list[int]:
    return torch.cat([batch.n_id[: batch.batch_size] for batch in loader]).tolist()


def test_ids_and_masks_mean_the_same_whatever_holds_them() -> None:
    mask = mask_of(30)
    for name, hold in HOLDERS.items():
        ids = as_ids(hold(mask), 30, "seeds")
        assert ids.dtype == torch.int64 and ids.tolist() == mask.nonzero().view(-1).tolist(), name
        assert as_ids(hold(torch.tensor([3, 0, 3])), 30, "seeds").tolist() == [3, 0, 3], name
    assert as_ids(range(2, 9, 3), 30, "seeds").tolist() == [2, 5, 8]
    for nothing in ([], (), np.array([]), torch.empty(0)):
        assert as_ids(nothing, 30, "seeds").tolist() == []


def test_what_is_neither_ids_nor_a_mask_is_refused() -> None:
    for wrong in (
        [0.0, 1.0],
        np.array([1.5]),
        torch.tensor([1.0]),
        [True, 2],
        [1, 2.0],
        ["a"],
        "train",
        None,
        7,
        [[1, 2]],
        np.array([[True]]),
        [True] * 29,
        np.ones(31, dtype=bool),
        (False,),
        [30],
        [-1],
        [2**70],
    ):
        with pytest.raises(ValueError, match="seeds"):
            as_ids(wrong, 30, "seeds")  # type: ignore[arg-type]


def test_loaders_samplers_and_splits_take_masks_whatever_holds_them(tmp_path: Path) -> None:
    graph = homogeneous()
    mask = mask_of(graph.num_nodes())
    expected = mask.nonzero().view(-1).tolist()
    with machines(graph, tmp_path / "parts", 2, machine_of_part=[0, 0]) as (parted,):
        check_masks(graph, parted, mask, expected)


def check_masks(graph: Graph, parted: DistGraph, mask: Tensor, expected: list[int]) -> None:
    for name, hold in HOLDERS.items():
        for where in (graph, parted):
            given = where.from_global(hold(mask))
            loader = NeighborLoader(where, [2], input_nodes=given, batch_size=7, num_threads=0)
            assert seeds_of(loader) == expected, name
            named = NeighborLoader(where, [2], input_nodes=("node", given), batch_size=7, num_threads=0)
            assert seeds_of(named) == expected, name
            assert gnnsys.split(where, given).ids[:].tolist() == expected, name
        given = hold(mask)
        sample = NeighborSampler(graph, [2]).sample({"node": given}, key=SampleKey())
        assert sample.num_sampled_nodes["node"][0] == len(expected), name
        assert sample_neighbors(graph, given, 2).nodes.tolist() == expected, name
        batch = loader(hold(mask_of(len(expected))))
        assert batch.input_id.tolist() == mask_of(len(expected)).nonzero().view(-1).tolist(), name
        picked = loader(hold(torch.tensor([4, 1])))
        assert picked.n_id[:2].tolist() == [expected[4], expected[1]], name


def test_loaders_samplers_and_splits_refuse_floats_and_masks_of_another_length() -> None:
    graph = homogeneous()
    num_nodes = graph.num_nodes()
    loader = NeighborLoader(graph, [2], num_threads=0)
    for wrong in (
        [0.0, 3.0],
        np.array([1.5]),
        torch.tensor([2.0]),
        [True] * (num_nodes - 1),
        np.ones(2, bool),
        [True, 5],
    ):
        calls: list[Callable[[], Any]] = [
            lambda wrong=wrong: NeighborLoader(graph, [2], input_nodes=wrong),
            lambda wrong=wrong: NeighborLoader(graph, [2], input_nodes=("node", wrong)),
            lambda wrong=wrong: gnnsys.split(graph, wrong),
            lambda wrong=wrong: NeighborSampler(graph, [2]).sample({"node": wrong}, key=SampleKey()),
            lambda wrong=wrong: sample_neighbors(graph, wrong, 2),
            lambda wrong=wrong: loader(wrong),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(ValueError):
                call()
                raise AssertionError(f"call {number} took {wrong!r}")


def test_a_mask_given_as_integers_is_refused_when_a_loader_is_made(tmp_path: Path) -> None:
    graph = homogeneous()
    mask = mask_of(graph.num_nodes())
    with machines(graph, tmp_path / "parts", 2, machine_of_part=[0, 0]) as (parted,):
        for where in (graph, parted):
            for given in (mask.long(), mask.int(), mask.long().numpy(), mask.long().tolist()):
                for nodes in (given, ("node", given), {"node": given}):
                    with pytest.raises(ValueError, match=r" holds .* all 0 or 1.*write mask.bool\(\)"):
                        NeighborLoader(where, [2], input_nodes=nodes if where is graph else where.from_original(given))
            few = NeighborLoader(
                where, [2], input_nodes=where.from_global(mask.long()[1:]), num_threads=0
            )  # not one for each: ids
            assert set(seeds_of(few)) == {0, 1}


def test_two_nodes_are_ids_and_bytes_and_floats_are_told_to_become_bools() -> None:
    pair = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    for ids in ([0, 1], [1, 0], [1, 1]):
        assert seeds_of(NeighborLoader(pair, [1], input_nodes=ids, num_threads=0)) == ids
    graph = homogeneous()
    mask = mask_of(graph.num_nodes())
    for given in (mask.byte(), mask.byte().numpy(), mask.float(), mask.float().tolist()):
        with pytest.raises(ValueError, match=r"bools with an entry for each \(\.bool\(\).*or ids .*\.long\(\)"):
            NeighborLoader(graph, [2], input_nodes=given)


def test_a_share_holds_ids() -> None:
    graph = homogeneous()
    assert gnnsys.Seeds(np.array([5, 2]), "node", 2, 2).ids.tolist() == [5, 2]  # type: ignore[arg-type]
    for wrong in (mask_of(graph.num_nodes()), [0.5], [True, False]):
        with pytest.raises(ValueError, match="split"):
            gnnsys.Seeds(wrong, "node", 9, 9)  # type: ignore[arg-type]


LINK_HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda links: links,
    "int32": lambda links: links.int(),
    "numpy": lambda links: links.numpy(),
    "list": lambda links: links.tolist(),
    "tuple": lambda links: tuple(links),
    "tuple of lists": lambda links: tuple(links.tolist()),
}


def test_links_mean_the_same_whatever_holds_them() -> None:
    graph, many = homogeneous(), typed()
    links = torch.tensor([[3, 1, 4], [1, 5, 9]])
    for name, hold in LINK_HOLDERS.items():
        for given in (hold(links), (EDGE, hold(links))):
            batch = next(iter(LinkNeighborLoader(graph, [2], edge_label_index=given, batch_size=3, num_threads=0)))
            assert torch.equal(batch.n_id[batch.edge_label_index], links), name
        edge_type = ("author", "writes", "paper")
        batch = next(iter(LinkNeighborLoader(many, [2], edge_label_index=(edge_type, hold(links)), batch_size=3)))
        assert torch.equal(batch["author"].n_id[batch.edge_label_index[0]], links[0]), name
    for wrong in (links.double(), links.numpy() * 0.5, [[0.5], [1.0]], links > 2, [[True], [False]], links[:1], [1, 2]):
        for given in (wrong, (EDGE, wrong)):
            with pytest.raises(ValueError, match="edge_label_index"):
                LinkNeighborLoader(graph, [2], edge_label_index=given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gnnsys\.split"):  # a mask of edges: a share of them says which
        LinkNeighborLoader(graph, [2], edge_label_index=torch.ones(graph.num_edges(), dtype=torch.bool))


@pytest.mark.parametrize("hold", [hold for name, hold in HOLDERS.items() if name != "numpy of objects"])
def test_values_of_inputs_mean_the_same_whatever_holds_them(hold: Callable[[Tensor], Any]) -> None:
    graph, values = homogeneous(), torch.tensor([7, 8])
    graph.set_node_data("time", torch.zeros(graph.num_nodes(), dtype=torch.int64))
    options: dict[str, Any] = {"time_attr": "time", "batch_size": 2, "num_threads": 0}
    batch = next(iter(NeighborLoader(graph, [2], input_nodes=[4, 5], input_time=hold(values), **options)))
    assert batch.seed_time.tolist() == [7, 8]
    labels = {"edge_label": hold(values), "edge_label_time": hold(values)}
    batch = next(iter(LinkNeighborLoader(graph, [2], edge_label_index=graph.edge_index()[:, :2], **labels, **options)))
    assert batch.edge_label.tolist() == [7, 8]


@pytest.mark.parametrize("given", ["late", 3, ["a"]])
def test_values_of_inputs_that_are_none_are_refused(given: Any) -> None:
    graph = homogeneous()
    with pytest.raises(ValueError, match=r"^input_time must be a tensor with one entry per input, got "):
        NeighborLoader(graph, [2], input_nodes=[4], input_time=given, time_attr="time")
    with pytest.raises(ValueError, match=r"^edge_label must be a tensor with one entry per input, got "):
        LinkNeighborLoader(graph, [2], edge_label=given)
