"""What the user changes between two loaders over the same data: the second one has it, or refuses.

Every loader of the face x every kind of array x the ways to change one. The oracle is a loader over new data with the
same values.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gnnsys.pyg
from gnnsys.pyg import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    LinkNeighborLoader,
    NeighborLoader,
    NeighborSampler,
    ShaDowKHopSampler,
)
from tests.support.grid import grid
from tests.support.pyg_parts import plain_parts

NUM_NODES, NUM_EDGES = 30, 120
CITES = ("a", "cites", "a")
SIZES: dict[str, Any] = {"batch_size": 40, "seed": 1}


def make_data() -> Data:
    stream = torch.Generator().manual_seed(0)
    return Data(
        x=torch.rand(NUM_NODES, 4, generator=stream),
        y=torch.arange(NUM_NODES),
        train_mask=torch.arange(NUM_NODES) % 3 == 0,
        time=torch.arange(NUM_NODES),
        edge_index=torch.randint(NUM_NODES, (2, NUM_EDGES), generator=stream),
        edge_attr=torch.rand(NUM_EDGES, 2, generator=stream),
        edge_weight=torch.rand(NUM_EDGES, generator=stream),
        edge_time=torch.arange(NUM_EDGES),
        edge_label=torch.arange(NUM_EDGES) % 4,
    )


ARRAYS = list(make_data().to_dict())
FEATURES = [name for name in ARRAYS if name != "edge_index"]


def typed(data: Data) -> HeteroData:
    """The same tensors as data of one type with a name."""
    result = HeteroData()
    for name, rows in data.to_dict().items():
        result["a" if data.is_node_attr(name) else CITES][name] = rows
    return result


def stores(data: Data) -> tuple[MyFeatureStore, MyGraphStore]:
    features, edges = MyFeatureStore(), MyGraphStore()
    for name in FEATURES:
        features.put_tensor(data[name], group_name=None, attr_name=name, index=None)
    edges.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(NUM_NODES, NUM_NODES))
    return features, edges


# -- ways to change an array -------------------------------------------------------------------------------------------


def assign(data: Data, name: str, rows: Tensor) -> None:
    data[name] = rows


def write(data: Data, name: str, rows: Tensor) -> None:
    data[name].copy_(rows)


def write_by_numpy(data: Data, name: str, rows: Tensor) -> None:
    view: np.ndarray[Any, Any] = data[name].numpy()
    view[:] = rows.numpy()


def write_by_data(data: Data, name: str, rows: Tensor) -> None:
    data[name].data = rows


WAYS = {"assigned": assign, "in place": write, "through numpy": write_by_numpy, "through .data": write_by_data}
Change = Callable[[Data, str, Tensor], None]


def other(data: Data, name: str) -> Tensor:
    rows = data[name]
    return ~rows if rows.dtype == torch.bool else rows.flip(-1 if name == "edge_index" else 0)


# -- loaders -----------------------------------------------------------------------------------------------------------


def weighted(data: Data, folder: Path) -> Any:
    return NeighborLoader(data, [3, 2], data.train_mask, weight_attr="edge_weight", **SIZES)


def links_in_time(data: Data, folder: Path) -> Any:
    times = {"time_attr": "time", "edge_label_time": data.edge_time}
    return LinkNeighborLoader(data, [3, 2], edge_label=data.edge_label, exclude_supervision=True, **times, **SIZES)


def saint(data: Data, folder: Path) -> Any:
    return GraphSAINTNodeSampler(data, 9, 2, sample_coverage=3, seed=1)


LOADERS: dict[str, Callable[[Data, Path], Any]] = {
    "nodes by weight": weighted,
    "nodes in time": lambda data, _: NeighborLoader(data, [3, 2], time_attr="time", **SIZES),
    "nodes by times of edges": lambda data, _: NeighborLoader(
        data, [3, 2], input_time=data.time + 60, time_attr="edge_time", **SIZES
    ),
    "links in time": links_in_time,
    "all links": lambda data, _: LinkNeighborLoader(data, [3], neg_sampling="binary", **SIZES),
    "nodes of a type": lambda data, _: NeighborLoader(
        typed(data), [3, 2], ("a", data.train_mask), weight_attr="edge_weight", **SIZES
    ),
    "links of a type": lambda data, _: LinkNeighborLoader(typed(data), [3], edge_label_index=CITES, **SIZES),
    "nodes of stores": lambda data, _: NeighborLoader(
        stores(data), [3, 2], data.time, data.y, time_attr="time", **SIZES
    ),
    "clusters": lambda data, _: ClusterLoader(ClusterData(data, 4, log=False), batch_size=2),
    "GraphSAINT by nodes": saint,
    "GraphSAINT by edges": lambda data, _: GraphSAINTEdgeSampler(data, 9, 2, seed=1),
    "GraphSAINT by walks": lambda data, _: GraphSAINTRandomWalkSampler(data, 9, 2, 2, seed=1),
    "ShaDow": lambda data, _: ShaDowKHopSampler(data, 2, 3, **SIZES),
}


def assert_fresh(make: Callable[[Data, Path], Any], data: Data, folder: Path) -> None:
    """A loader of `data` has the batches of one over a copy of it."""
    anew = Data(**{name: rows.clone() for name, rows in data.to_dict().items()})
    for got, want in zip(make(data, folder), make(anew, folder / "anew"), strict=True):
        ours, theirs = ([store.to_dict() for store in batch.stores] for batch in (got, want))
        for mine, expected in zip(ours, theirs, strict=True):
            assert mine.keys() == expected.keys()
            for name, rows in expected.items():
                same = torch.equal(mine[name], rows) if isinstance(rows, Tensor) else mine[name] == rows
                assert same, f"{name} is old"


@grid(make=LOADERS, change=WAYS)
def test_a_second_loader_has_what_was_changed(
    make: Callable[[Data, Path], Any], change: Change, tmp_path: Path
) -> None:
    data = make_data()
    next(iter(make(data, tmp_path)))
    for name in ARRAYS:
        change(data, name, other(data, name))
    assert_fresh(make, data, tmp_path)


# -- what holds a copy -------------------------------------------------------------------------------------------------


def by_sampler(**options: Any) -> Callable[[Data], Callable[[Data, Path], Any]]:
    def made_of(data: Data) -> Callable[[Data, Path], Any]:
        sampler = NeighborSampler(data, [3, 2], **options)
        return lambda now, _: NeighborLoader(
            now, [3, 2], neighbor_sampler=sampler if now is data else NeighborSampler(now, [3, 2], **options), **SIZES
        )

    return made_of


def links_by_sampler(data: Data) -> Callable[[Data, Path], Any]:
    sampler = NeighborSampler(data, [3])
    return lambda now, _: LinkNeighborLoader(
        now, [3], neighbor_sampler=sampler if now is data else NeighborSampler(now, [3]), **SIZES
    )


def of_clusters(data: Data) -> Callable[[Data, Path], Any]:
    clusters = ClusterData(data, 4, log=False)
    return lambda now, _: ClusterLoader(clusters if now is data else ClusterData(now, 4, log=False), batch_size=2)


def of_saved_clusters(data: Data) -> Callable[[Data, Path], Any]:
    return lambda now, folder: ClusterLoader(ClusterData(now, 4, save_dir=str(folder), log=False), batch_size=2)


def of_saved_norms(data: Data) -> Callable[[Data, Path], Any]:
    return lambda now, folder: GraphSAINTNodeSampler(now, 9, 2, sample_coverage=3, save_dir=str(folder), seed=1)


HELD: dict[str, tuple[Callable[[Data], Callable[[Data, Path], Any]], list[str]]] = {
    "sampler": (by_sampler(), ["edge_index"]),
    "sampler by weight": (by_sampler(weight_attr="edge_weight"), ["edge_index", "edge_weight"]),
    "sampler in time": (by_sampler(time_attr="time"), ["edge_index", "time"]),
    "sampler of links": (links_by_sampler, ["edge_index"]),
    "clusters": (of_clusters, ARRAYS),
    "saved clusters": (of_saved_clusters, ["edge_index"]),
    "saved norms": (of_saved_norms, ["edge_index"]),
}


@grid(held=HELD, change=WAYS)
def test_a_copy_of_what_was_changed_is_refused_and_all_else_is_new(
    held: tuple[Callable[[Data], Callable[[Data, Path], Any]], list[str]], change: Change, tmp_path: Path
) -> None:
    made_of, copied = held
    data = make_data()
    make = made_of(data)
    next(iter(make(data, tmp_path)))
    for name in set(ARRAYS) - set(copied):
        change(data, name, other(data, name))
    assert_fresh(make, data, tmp_path)
    for name in copied:
        kept = data[name].clone()
        change(data, name, other(data, name))
        with pytest.raises(
            ValueError, match=rf"^data\.{name} has changed since|another graph: remove|other edges: remove"
        ):
            make(data, tmp_path)
        change(data, name, kept)
        make(data, tmp_path)  # by content: the old values are as good as before


def test_what_cannot_differ_is_not_refused() -> None:
    data = make_data()
    sampler, clusters = NeighborSampler(data, [3]), ClusterData(data, 4, log=False)
    data.more, data.x, data.edge_index = torch.rand(NUM_NODES), data.x.clone(), data.edge_index.clone()
    del data.y
    for again in (sampler, copy.copy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert len(list(NeighborLoader(data, [3], neighbor_sampler=again, batch_size=10))) == 3
    assert len(ClusterLoader(clusters)) == 4
    clusters.data.x = clusters.data.x + 1  # the copy is the user's as well
    assert float(next(iter(ClusterLoader(clusters))).x.min()) >= 1
    del data
    assert len(ClusterLoader(clusters)) == 4


@grid(level=["a", CITES], name=["time", "edge_index"])
def test_a_sampler_of_several_types_names_what_has_changed(level: Any, name: str) -> None:
    data = typed(make_data())
    del data["a"].time
    data[level].time = torch.arange(data[level].num_nodes if level == "a" else NUM_EDGES)
    sampler = NeighborSampler(data, [3], time_attr="time")
    store, where = (data[CITES], CITES) if name == "edge_index" else (data[level], level)
    store[name].numpy()[..., 0] += 1
    with pytest.raises(ValueError) as told:
        NeighborLoader(data, [3], "a", neighbor_sampler=sampler, time_attr="time")
    assert str(told.value).startswith(f"data[{where!r}].{name} has changed")


def test_rows_that_are_set_on_parts_are_those_of_the_next_loader(tmp_path: Path) -> None:
    with plain_parts(tmp_path / "parts") as (_, (graph, *_)):
        for rows in (torch.rand(120, 2), torch.rand(120, 2)):
            graph.set_node_data("mine", rows, order="global")
            for change in (lambda rows: None, lambda rows: rows.mul_(2), lambda rows: rows.numpy().__iadd__(1)):
                change(rows)
                for batch in gnnsys.pyg.NeighborLoader(graph, [3], graph.from_global(torch.arange(20)), batch_size=10):
                    assert torch.equal(batch.mine, rows[batch.n_id])
