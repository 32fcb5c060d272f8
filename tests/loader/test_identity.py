"""A state goes on in a loader that is made alike, and in no other: what differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnsys
import gnnsys.partition
from gnnsys.graph import EDGE, Graph, to_pyg
from gnnsys.loader import LinkNeighborLoader, NegativeSampling, NeighborLoader
from gnnsys.loader.identity import NAME
from tests.sampling.machines import CITES, WRITES, homogeneous, machines, typed

IDS = torch.arange(0, 60, 2)
LINKS = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0))


def turned(graph: Graph) -> Graph:
    """As many nodes and edges, the other way round."""
    return Graph.from_edge_index(graph.edge_index().flip(0), graph.num_nodes(), *data_of(graph))


def data_of(graph: Graph) -> tuple[Any, Any]:
    return graph.node_data["node"], graph.edge_data[EDGE]


def nodes(graph: Any, **options: Any) -> NeighborLoader:
    given = graph.from_original(IDS) if graph.is_homogeneous else None
    made = {
        "num_neighbors": [3, 2],
        "input_nodes": given,
        "batch_size": 8,
        "shuffle": True,
        "num_threads": 0,
        **options,
    }
    return NeighborLoader(graph, **made)


def links(graph: Any, **options: Any) -> LinkNeighborLoader:
    made = {"num_neighbors": [3], "edge_label_index": LINKS, "batch_size": 8, "num_threads": 0, **options}
    return LinkNeighborLoader(graph, **made)


def state_in_mid_epoch(loader: Any) -> dict[str, Any]:
    batches = iter(loader)
    next(batches), next(batches)
    return loader.state_dict()


def check_refusals(made: Callable[[], Any], others: list[tuple[str, Callable[[], Any]]]) -> None:
    state = state_in_mid_epoch(made())
    made().load_state_dict(state)
    before = {name: value for name, value in state.items() if name != NAME}  # of a version that did not say it
    for match, other in others:
        loader = other()
        at = loader.state_dict()
        with pytest.raises(ValueError, match=match):
            loader.load_state_dict(state)
        assert loader.state_dict() == at
        loader.load_state_dict(before)
        assert loader.state_dict()["batch"] == 2


def test_a_state_is_refused_by_a_loader_of_other_nodes_graph_or_sampling() -> None:
    graph = homogeneous()
    check_refusals(
        lambda: nodes(graph),
        [
            ("inputs", lambda: nodes(graph, input_nodes=IDS + 1)),
            ("inputs", lambda: nodes(graph, input_nodes=IDS.flip(0))),
            ("graph", lambda: nodes(turned(graph))),
            (r"num_neighbors=\[3, 2\], here it is \[2, 3\]", lambda: nodes(graph, num_neighbors=[2, 3])),
            ("replace=False, here it is True", lambda: nodes(graph, replace=True)),
            ("disjoint", lambda: nodes(graph, disjoint=True)),
            ("weight_attr=None, here it is w", lambda: nodes(graph, weight_attr="w")),
            ("time_attr", lambda: nodes(graph, time_attr="t", disjoint=False)),
            ("subgraph_type", lambda: nodes(graph, subgraph_type="induced")),
            ("expand", lambda: nodes(graph, expand="frontier")),
            ("sampler", lambda: nodes(graph, num_neighbors=None, sampler=lambda *_: None)),
        ],
    )
    timed = {"time_attr": "et", "input_time": torch.arange(30)}
    later = {**timed, "input_time": torch.arange(30) + 1}
    check_refusals(lambda: nodes(graph, **timed), [("inputs", lambda: nodes(graph, **later))])


def test_a_state_is_refused_by_a_loader_of_other_links_or_negatives() -> None:
    graph, weight = homogeneous(), torch.arange(120.0)
    other = weight.flip(0)
    check_refusals(
        lambda: links(graph),
        [
            ("inputs", lambda: links(graph, edge_label_index=LINKS.flip(0))),
            ("inputs", lambda: links(graph, edge_label=torch.arange(40))),
            ("graph", lambda: links(turned(graph))),
            ("num_neighbors", lambda: links(graph, num_neighbors=[4])),
            ("neg_sampling", lambda: links(graph, neg_sampling="binary")),
            ("exclude_supervision", lambda: links(graph, exclude_supervision=False)),
        ],
    )
    check_refusals(
        lambda: links(graph, neg_sampling=NegativeSampling("binary", 1, None, weight)),
        [("neg_sampling", lambda: links(graph, neg_sampling=NegativeSampling("binary", 1, None, other)))],
    )


def test_weights_of_negatives_are_told_by_their_values_whatever_holds_them() -> None:
    """A list, an array, a tensor and an array of the graph; another one's state is refused, and none carries them."""
    pyg = pytest.importorskip("gnnsys.pyg")
    from torch_geometric.sampler import NegativeSampling as PyGs

    graph, weight = homogeneous(), torch.rand(120, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    graph.set_node_data("chance", weight)
    graph.set_node_data("other_chance", weight.flip(0))
    data = to_pyg(graph)

    def of_pyg(weights: Any) -> Any:
        negatives = PyGs("triplet", 1, dst_weight=weights)
        return pyg.LinkNeighborLoader(data, [3], edge_label_index=LINKS, batch_size=8, seed=1, neg_sampling=negatives)

    def native(weights: Any) -> Any:
        return links(graph, neg_sampling={"mode": "triplet", "dst_weight": weights})

    holders = [weight, weight.float(), weight.numpy(), weight.tolist(), tuple(weight.tolist()), weight[:, None]]
    others = [weight.flip(0), weight.flip(0).numpy(), weight.flip(0).tolist(), None]
    for make, same, different in (
        (native, [*holders, list(weight.numpy()), "chance"], [*others, "other_chance"]),
        (of_pyg, [weight, weight.float()], [others[0], None]),
    ):
        states = [make(holder).state_dict() for holder in same]
        told = [state[NAME]["sampling"]["neg_sampling"]["dst_weight"] for state in states]
        assert len(set(told)) == 1 and len(told[0]) < 30
        for holder, state in zip(same, states, strict=True):
            make(weight).load_state_dict(state)
            make(holder).load_state_dict(states[0])
        for other in different:
            with pytest.raises(ValueError, match="neg_sampling"):
                make(other).load_state_dict(states[0])


def test_a_state_is_refused_by_a_loader_of_another_type() -> None:
    graph = typed()
    few = torch.arange(0, 40, 2)
    check_refusals(
        lambda: nodes(graph, input_nodes=("paper", few)),
        [("paper, here it is author", lambda: nodes(graph, input_nodes=("author", few)))],
    )
    check_refusals(
        lambda: links(graph, edge_label_index=(CITES, LINKS % 40)),
        [("edge_label_index of type", lambda: links(graph, edge_label_index=(WRITES, LINKS % 40)))],
    )


def test_on_parts_states_are_told_apart_by_ids_parts_and_sampling(tmp_path: Path) -> None:
    graph = homogeneous()
    with (
        machines(graph, tmp_path / "a", 2, machine_of_part=[0, 0]) as (parted,),
        machines(turned(graph), tmp_path / "b", 2, machine_of_part=[0, 0]) as (other,),
    ):
        check_refusals(
            lambda: nodes(parted),
            [
                ("inputs", lambda: nodes(parted, input_nodes=parted.from_original(IDS + 1))),
                ("num_neighbors", lambda: nodes(parted, num_neighbors=[9, 9])),
                ("graph", lambda: nodes(other)),
            ],
        )
        share = gnnsys.split(parted, parted.from_original(IDS))
        check_refusals(
            lambda: nodes(parted, input_nodes=share),
            [("num_neighbors", lambda: nodes(parted, input_nodes=share, num_neighbors=[9, 9]))],
        )
        check_refusals(
            lambda: links(parted, edge_label_index=EDGE),
            [("num_neighbors", lambda: links(parted, edge_label_index=EDGE, num_neighbors=[9]))],
        )


def test_other_numbers_of_ranks_go_on_only_with_the_same_sampling() -> None:
    graph = homogeneous()

    def loader(rank: int, world_size: int, **options: Any) -> NeighborLoader:
        placement = gnnsys.partition.Placement(rank, (0,) * world_size, ())
        return nodes(graph, input_nodes=gnnsys.split(graph, IDS, placement=placement), **options)

    states = [state_in_mid_epoch(loader(rank, 2, batch_size=4)) for rank in range(2)]
    for rank in range(3):
        loader(rank, 3).load_state_dicts(states)
        with pytest.raises(ValueError, match="num_neighbors"):
            loader(rank, 3, num_neighbors=[1, 1]).load_state_dicts(states)


def test_pyg_loaders_tell_graphs_and_sampling_apart_too() -> None:
    pyg = pytest.importorskip("gnnsys.pyg")
    data, other = to_pyg(homogeneous()), to_pyg(turned(homogeneous()))

    def loader(of: Any = data, num_neighbors: Any = (3, 2), **options: Any) -> Any:
        return pyg.NeighborLoader(of, list(num_neighbors), input_nodes=IDS, batch_size=8, seed=1, **options)

    def link_loader(**options: Any) -> Any:
        return pyg.LinkNeighborLoader(data, [3], edge_label_index=LINKS, batch_size=8, seed=1, **options)

    for make, others in (
        (
            loader,
            [
                ("graph", lambda: loader(other)),
                ("num_neighbors", lambda: loader(num_neighbors=(2, 3))),
                ("replace", lambda: loader(replace=True)),
                ("weight_attr", lambda: loader(weight_attr="w")),
            ],
        ),
        (link_loader, [("neg_sampling", lambda: link_loader(neg_sampling="binary"))]),
    ):
        state = state_in_mid_epoch(make())
        make().load_state_dict(state)
        for match, another in others:
            with pytest.raises(ValueError, match=match):
                another().load_state_dict(state)
            another().load_state_dict({name: value for name, value in state.items() if name != NAME})


def test_a_state_can_be_kept_in_a_checkpoint(tmp_path: Path) -> None:
    graph = homogeneous()
    weighted = NegativeSampling("binary", 1.5, torch.ones(120), torch.ones(120))
    for loader in (nodes(graph), links(graph, neg_sampling=weighted), nodes(typed(), input_nodes="paper")):
        state = state_in_mid_epoch(loader)
        torch.save(state, tmp_path / "state.pt")
        loader.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert loader.state_dict() == state
