"""What people write first and get wrong: the error comes when the loader is made, in one line, and names the remedy."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnsys
from gnnsys.graph import Graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.pipeline import Pipeline
from gnnsys.sampling import NeighborSampler
from tests.sampling.machines import homogeneous, machines, typed


def masked(*types: str) -> Graph:
    graph = typed()
    for t in types:
        graph.set_node_data("train_mask", torch.arange(graph.num_nodes(t)) % 4 == 0, t)
    return graph


def many_types(count: int = 40) -> Graph:
    edges = {("a", f"likes_{i}", "a"): torch.tensor([[0, 1], [1, 2]]) for i in range(count)}
    return Graph.from_edge_indices(edges, {"a": 3})


def test_a_graph_of_another_library_is_refused_with_what_converts_it() -> None:
    data = pytest.importorskip("torch_geometric.data")
    index = torch.randint(9, (2, 30))
    one, typed_data = data.Data(x=torch.randn(9, 2), edge_index=index), data.HeteroData()
    typed_data["a"].x, typed_data["a", "to", "a"].edge_index = torch.randn(9, 2), index
    for given, said in (
        (one, r"graph is PyG's Data: pass gnnsys.graph.from_pyg\(data\), or take the loaders of gnnsys.pyg"),
        (typed_data, r"graph is PyG's HeteroData: pass gnnsys.graph.from_pyg"),
        (index, "graph is a tensor: pass gnnsys.graph.Graph.from_edge_index"),
        (None, r"^graph must be a Graph, or what gnnsys.open returns, got NoneType: .*$"),
        ([index], r"^graph must be a Graph, or what gnnsys.open returns, got list: .*$"),
        ("parts/", r"graph is the path 'parts/': pass gnnsys.open\('parts/'\) of parts"),
    ):
        for make in (
            lambda g: NeighborLoader(g, [2], input_nodes="a"),
            lambda g: LinkNeighborLoader(g, [2]),
            lambda g: gnnsys.split(g, "train"),
            lambda g: gnnsys.split_links(g),
        ):
            with pytest.raises(ValueError, match=said):
                make(given)


def test_a_masks_name_is_enough_where_one_node_type_has_it(tmp_path: Path) -> None:
    graph = masked("paper")
    expected = graph.node_data["paper"]["train_mask"].nonzero().view(-1)
    for name in ("train", "train_mask", ("paper", "train")):
        loader = NeighborLoader(graph, [2], input_nodes=name, batch_size=100, num_threads=0)
        assert torch.equal(next(iter(loader))["paper"].n_id[: expected.numel()], expected)
    with machines(graph, tmp_path / "parts", 2, machine_of_part=[0, 0]) as (parted,):
        batch = next(iter(NeighborLoader(parted, [2], input_nodes="train", batch_size=100)))
        seeds = parted.original_ids(batch["paper"].n_id[: batch.batch_size], "paper")
        assert torch.equal(seeds.sort().values, expected)


def test_a_masks_name_that_does_not_say_which_type_is_refused_with_what_to_write() -> None:
    for graph, name, match in (
        (masked("paper", "author"), "train", r"'paper', 'author'.*write input_nodes=\('paper', 'train'\)"),
        (typed(), "train", r"no node type 'train'.*\(node type, ids"),
        (typed(), "papr", "did you mean 'paper'"),
        (masked("paper"), ("paper", "trian"), "no mask 'trian', only .*train_mask"),
    ):
        with pytest.raises(ValueError, match=match):
            NeighborLoader(graph, [2], input_nodes=name)


def test_weights_and_times_are_names_of_arrays() -> None:
    graph = homogeneous()
    for option, wrong, match in (
        ("weight_attr", "ww", r"weight_attr: no edge type has an array 'ww', only \[.*'w'"),
        ("weight_attr", torch.ones(900), r"weight_attr must be the name.*graph.set_edge_data"),
        ("time_attr", "tt", "time_attr: no edge or node type has an array 'tt'"),
        ("time_attr", torch.ones(120), "time_attr must be the name"),
    ):
        with pytest.raises(ValueError, match=match):
            NeighborLoader(graph, [2], **{option: wrong})


def test_a_batch_names_what_it_has_where_something_is_asked_that_it_has_not() -> None:
    batch = next(iter(NeighborLoader(homogeneous(), [2], num_threads=0)))
    with pytest.raises(KeyError, match=r"no 'n_ids', only \['x'.*did you mean 'n_id'"):
        batch["n_ids"]
    with pytest.raises(AttributeError, match="did you mean 'edge_index'"):
        batch.edge_indx  # noqa: B018
    many = next(iter(NeighborLoader(typed(), [2], input_nodes="paper", num_threads=0)))
    for key, match in (
        ("papper", r"node types \['paper', 'author', 'venue'\].*did you mean 'paper'"),
        (("author", "write", "paper"), r"no edge type.*did you mean \('author', 'writes', 'paper'\)"),
    ):
        with pytest.raises(KeyError, match=match):
            many[key]
    with pytest.raises(KeyError, match=r"no 'xx' here, only \['x'"):
        many["paper"]["xx"]
    with pytest.raises(AttributeError, match="no 'xx' here"):
        many["paper"].xx  # noqa: B018
    assert many["paper"].get("xx") is None and "xx" not in many["paper"] and not hasattr(many, "xx")


def test_errors_on_graphs_of_many_types_stay_short() -> None:
    graph = many_types()
    batch = next(iter(NeighborLoader(graph, [1], num_threads=0)))
    some_hops = {t: [1] * (1 + (i == 7)) for i, t in enumerate(graph.edge_types)}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (NeighborLoader, {"num_neighbors": {graph.edge_types[0]: [1]}}),
        (NeighborLoader, {"num_neighbors": some_hops}),
        (NeighborLoader, {"num_neighbors": [1], "weight_attr": "w"}),
        (LinkNeighborLoader, {"num_neighbors": [1]}),
        (NeighborSampler, {"num_neighbors": {graph.edge_types[0]: [1]}}),
        (lambda _, **options: batch["a", "likes", "a"], {}),
    ]
    for make, options in calls:
        with pytest.raises((ValueError, KeyError)) as error:
            make(graph, **options)
        assert len(str(error.value)) < 600 and "\n" not in str(error.value), str(error.value)


def test_loaders_say_that_they_cannot_be_sent_to_another_process() -> None:
    loader = NeighborLoader(homogeneous(), [2])
    for _ in loader:
        break
    pipeline = Pipeline(lambda start: range(start, 4), [])
    for thing in (loader, LinkNeighborLoader(homogeneous(), [2]), pipeline):
        with pytest.raises(TypeError, match=r"cannot be sent to another process.*make it there"):
            pickle.dumps(thing)
    loader.close()


def test_no_hops_are_needed_where_there_are_no_edges() -> None:
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 5, {"x": torch.arange(5)})
    batch = next(iter(NeighborLoader(graph, [], batch_size=5, num_threads=0)))
    assert batch.x.tolist() == [0, 1, 2, 3, 4] and batch.edge_index.shape == (2, 0)
    assert batch.num_sampled_nodes == [5] and batch.num_sampled_edges == []
    with pytest.raises(ValueError, match="at least one hop"):
        NeighborLoader(homogeneous(), [])
