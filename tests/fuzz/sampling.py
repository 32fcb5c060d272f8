"""Random graphs through random loaders: against plain invariants, against parts, and through states saved in mid-epoch.

    python -m tests.fuzz.sampling --seconds 600 --seed 0
    python -m tests.fuzz.sampling --seed 123456 --one    # the case that a run ended with, again

A case follows from its number alone, which a failure prints. What a loader refuses must be refused on parts too.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EDGE, EdgeType, Graph, NodeType
from gnnsys.loader import Batch, LinkNeighborLoader, NeighborLoader
from gnnsys.sampling import DistGraph
from tests.fuzz.sampling_oracle import check_batch, check_links
from tests.loader.test_dist_links import assert_same_batch
from tests.sampling.machines import machines

HOLDERS = {
    "torch": lambda ids: ids,
    "int32": lambda ids: ids.int(),
    "numpy": lambda ids: ids.numpy(),
    "list": lambda ids: ids.tolist(),
    "tuple": lambda ids: tuple(ids.tolist()),
}


class Case:
    """One graph, one loader's options, and its inputs by original ids."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.random = random.Random(number)
        self.torch = torch.Generator().manual_seed(number)
        self.graph = self._graph()
        self.options: dict[str, Any] = {}
        self.is_links = self.random.random() < 0.4
        self._choose_sampling()
        (self._choose_links if self.is_links else self._choose_nodes)()

    # -- graphs --------------------------------------------------------------------------------------------------------

    def _graph(self) -> Graph:
        r = self.random
        if r.random() < 0.5:
            sizes: dict[NodeType, int] = {"node": r.choice([1, 7, 40, 120])}
            types = [EDGE]
        else:
            sizes = {t: r.choice([0, 1, 6, 50]) for t in "abc"[: r.randint(1, 3)]}
            sizes["a"] = max(sizes["a"], 3)
            names = list(sizes)
            types = [(r.choice(names), f"r{i}", r.choice(names)) for i in range(r.randint(1, 4))]
        index = {}
        for t in types:
            num_edges = r.choice([0, 1, 30, 300]) if sizes[t[0]] and sizes[t[2]] else 0
            ends = [torch.randint(0, max(1, sizes[n]), (num_edges,), generator=self.torch) for n in (t[0], t[2])]
            if t[0] == t[2] and num_edges and r.random() < 0.5:
                ends[1][::5] = ends[0][::5]  # self loops
            index[t] = torch.stack(ends)
        node_data = {t: self._node_data(size) for t, size in sizes.items()}
        edge_data = {t: self._edge_data(index[t].shape[1]) for t in types}
        return Graph.from_edge_indices(index, sizes, node_data, edge_data)

    def _node_data(self, size: int) -> dict[str, Tensor]:
        popularity = torch.rand(size, generator=self.torch)
        popularity[1::2] = 0
        data = {"x": torch.randn(size, 3, generator=self.torch), "popularity": popularity}
        if self.random.random() < 0.6:
            data["t"] = torch.randint(0, 20, (size,), generator=self.torch)
        return data

    def _edge_data(self, size: int) -> dict[str, Tensor]:
        data = {"number": torch.arange(size)}
        if self.random.random() < 0.7:
            kept = torch.rand(size, generator=self.torch) < 0.8
            data["w"] = torch.rand(size, generator=self.torch) * kept
        if self.random.random() < 0.7:
            data["et"] = torch.randint(0, 20, (size,), generator=self.torch)
        return data

    # -- options -------------------------------------------------------------------------------------------------------

    def _choose_sampling(self) -> None:
        r, options = self.random, self.options
        hops = r.randint(1, 3)
        values = [0, -1, 1, 2, 3, 10, 10**8]

        def fanouts() -> list[int]:
            return [r.choice(values) for _ in range(hops)]

        self.num_neighbors: Any = fanouts()
        if r.random() < 0.3:
            self.num_neighbors = {t: fanouts() for t in self.graph.edge_types}
        lists = list(self.fanouts().values())
        for hop in range(hops):  # one without neighbours among others is refused
            if not any(each[hop] for each in lists):
                for each in lists:
                    each[hop] = 2
        options["batch_size"] = r.choice([1, 3, 8, 100])
        options["shuffle"] = r.random() < 0.5
        options["drop_last"] = r.random() < 0.2
        options["seed"] = r.choice([0, 1, -5, 2**40])
        options["replace"] = r.random() < 0.25 and 10**8 not in self.all_fanouts()
        options["disjoint"] = r.random() < 0.25
        kind = r.choice(["plain"] * 3 + ["weight", "node time", "edge time"])
        if kind == "weight":
            options["weight_attr"] = "w"
        elif kind != "plain":
            options["time_attr"] = "t" if kind == "node time" else "et"
            options["temporal_strategy"] = r.choice(["uniform", "last"])
        if r.random() < 0.15:
            options["expand"] = "frontier"
        elif r.random() < 0.2:
            options["subgraph_type"] = r.choice(["induced", *(["bidirectional"] if self.graph.is_homogeneous else [])])

    def all_fanouts(self) -> list[int]:
        lists = self.num_neighbors.values() if isinstance(self.num_neighbors, dict) else [self.num_neighbors]
        return [fanout for each in lists for fanout in each]

    def fanouts(self) -> dict[EdgeType, list[int]]:
        if isinstance(self.num_neighbors, dict):
            return self.num_neighbors
        return dict.fromkeys(self.graph.edge_types, self.num_neighbors)

    def _times(self, count: int) -> Tensor:
        return torch.randint(0, 25, (count,), generator=self.torch)

    def _choose_nodes(self) -> None:
        r = self.random
        self.node_type = r.choice([t for t in self.graph.node_types if self.graph.num_nodes(t)])
        size = self.graph.num_nodes(self.node_type)
        count = r.randint(1, min(40, size))
        self.ids = torch.randperm(size, generator=self.torch)[:count]
        if r.random() < 0.15:
            self.ids = torch.cat([self.ids, self.ids[:3]])
        self.seed_time: Tensor | None = None
        time = self.options.get("time_attr")
        if time is not None and (time not in self.graph.node_data[self.node_type] or r.random() < 0.5):
            self.seed_time = self.options["input_time"] = self._times(self.ids.numel())
        elif time is not None:
            self.seed_time = self.graph.node_data[self.node_type][time][self.ids]

    def _choose_links(self) -> None:
        r, graph = self.random, self.graph
        usable = [t for t in graph.edge_types if graph.num_nodes(t[0]) and graph.num_nodes(t[2])]
        if not usable:
            self.is_links = False
            return self._choose_nodes()
        self.edge_type = r.choice(usable)
        count = r.randint(1, 30)
        ends = [torch.randint(0, graph.num_nodes(n), (count,), generator=self.torch) for n in self.edge_type[::2]]
        self.links = torch.stack(ends)
        if graph.num_edges(self.edge_type) and r.random() < 0.6:
            chosen = torch.randint(0, graph.num_edges(self.edge_type), (count,), generator=self.torch)
            self.links = graph.edge_index(self.edge_type)[:, chosen]
        self.options["exclude_supervision"] = r.random() < 0.7
        mode = r.choice([None, "binary", "triplet"])
        if mode is not None:
            weights = {name: r.choice([None, "popularity", "tensor"]) for name in ("src_weight", "dst_weight")}
            rows = {"src_weight": graph.node_data[self.edge_type[0]], "dst_weight": graph.node_data[self.edge_type[2]]}
            given = {n: rows[n]["popularity"] if w == "tensor" else w for n, w in weights.items()}
            self.options["neg_sampling"] = {"mode": mode, "amount": r.choice([1, 2]), **given}
        if mode != "triplet" and r.random() < 0.3:
            self.options["edge_label"] = torch.randint(0, 4, (count,), generator=self.torch)
        if "time_attr" in self.options:
            self.options["edge_label_time"] = self._times(count)

    # -- loaders -------------------------------------------------------------------------------------------------------

    def loader(self, graph: Graph | DistGraph, num_threads: int = 0, **changed: Any) -> Any:
        """The loader of the case on the graph or on parts of it; inputs are held by whatever the case says."""
        num_neighbors = changed.pop("num_neighbors", self.num_neighbors)
        options = {**self.options, "num_threads": num_threads, **changed}
        hold = HOLDERS[random.Random(self.number + num_threads).choice(list(HOLDERS))]
        if not self.is_links:
            ids = options.pop("ids", self.ids)
            held = hold(ids)
            nodes = (
                graph.from_original(held, self.node_type) if isinstance(graph, DistGraph) else (self.node_type, held)
            )
            return NeighborLoader(graph, num_neighbors, input_nodes=nodes, **options)
        links = options.pop("links", self.links)
        held = links.numpy() if self.number % 3 == 0 else links
        if isinstance(graph, DistGraph):
            held = graph.from_original(held, self.edge_type)
        return LinkNeighborLoader(graph, num_neighbors, edge_label_index=(self.edge_type, held), **options)


def run(number: int, folder: Path | None = None) -> str:
    """'refused' or 'sampled'; AssertionError, or what a loader raised, where something is wrong."""
    case = Case(number)
    try:
        batches = list(case.loader(case.graph))
    except ValueError as error:
        assert str(error), "a refusal says why"
        if folder is not None:
            _check_refusal_on_parts(case, folder)
        return "refused"
    inputs: list[Tensor] = []
    for batch in batches:
        inputs.append(_check(case, batch))
    seen, count = torch.cat(inputs) if inputs else torch.empty(0, dtype=torch.int64), len(case.loader(case.graph))
    total = case.links.shape[1] if case.is_links else case.ids.numel()
    total = seen.numel() if case.options["drop_last"] else total
    assert count == len(batches) and seen.unique().numel() == seen.numel() == total, "inputs are left out or repeated"
    threaded = case.loader(case.graph, num_threads=case.random.randint(1, 3))
    for mine, theirs in zip(threaded, batches, strict=True):
        _same(mine, theirs)
    threaded.close()
    _check_masks(case, batches)
    if batches:
        _check_states(case, batches)
    if folder is not None:
        _check_parts(case, folder, batches)
    return "sampled"


def _check(case: Case, batch: Batch) -> Tensor:
    """The positions of a batch's inputs, once all that must hold of it was found to hold."""
    options = dict(case.options)
    if case.is_links:
        chosen = batch.edges[case.edge_type]["input_id"]
        check_links(case.graph, batch, case.edge_type, case.links, options)
        options |= {"links": True, "seed_time": None}
        if "edge_label_time" in options:
            options["seed_time"] = options["edge_label_time"][chosen]
    else:
        chosen = batch.nodes[case.node_type]["input_id"]
        seeds = batch.nodes[case.node_type]["n_id"][: chosen.numel()]
        assert torch.equal(seeds, case.ids[chosen]), "seeds come first, in their order"
        assert batch.batch_size == chosen.numel()
        options["seed_time"] = None if case.seed_time is None else case.seed_time[chosen]
    check_batch(case.graph, batch, options, case.fanouts())
    return chosen


def _same(mine: Batch, theirs: Batch) -> None:
    for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), "threads changed a batch"


def _check_masks(case: Case, batches: list[Batch]) -> None:
    """A mask, whatever holds it, is its ids in ascending order."""
    if case.is_links or case.seed_time is not None or case.ids.unique().numel() != case.ids.numel():
        return
    mask = torch.zeros(case.graph.num_nodes(case.node_type), dtype=torch.bool)
    mask[case.ids] = True
    as_ids = case.loader(case.graph, ids=case.ids.sort().values)
    options = {**case.options, "num_threads": 0}
    held = case.random.choice([mask, mask.numpy(), mask.tolist(), tuple(mask.tolist())])
    as_mask = NeighborLoader(case.graph, case.num_neighbors, input_nodes=(case.node_type, held), **options)
    for mine, theirs in zip(as_mask, as_ids, strict=True):
        _same(mine, theirs)


def _check_states(case: Case, batches: list[Batch]) -> None:
    """A state goes on with the next batch, in a loader made alike; others refuse it."""
    loader = case.loader(case.graph)
    stop = case.random.randint(0, len(batches))
    running = iter(loader)
    for _ in range(stop):
        next(running)
    state = loader.state_dict()
    again = case.loader(case.graph, num_threads=case.random.choice([0, 2]))
    again.load_state_dict(state)
    for mine, theirs in zip(again, batches[stop:], strict=True):
        _same(mine, theirs)
    again.close()
    others: list[dict[str, Any]] = [{"replace": not case.options["replace"]}]
    others.append({"num_neighbors": {t: [abs(f) + 1 for f in fanouts] for t, fanouts in case.fanouts().items()}})
    if case.is_links and not torch.equal(case.links.flip(1), case.links):
        others.append({"links": case.links.flip(1)})
    elif not case.is_links and not torch.equal(case.ids.flip(0), case.ids):
        others.append({"ids": case.ids.flip(0)})
    for changed in others:
        if 10**8 in case.all_fanouts() and "replace" in changed:
            continue
        other = case.loader(case.graph, **changed)
        try:
            other.load_state_dict(state)
        except ValueError:
            continue
        raise AssertionError(f"a loader with {list(changed)} changed took the state")


def _check_parts(case: Case, folder: Path, batches: list[Batch]) -> None:
    num_parts = case.random.randint(1, 3)
    owners = case.random.choice([None, [0] * num_parts])
    with machines(case.graph, folder, num_parts, machine_of_part=owners) as graphs:
        loader = case.loader(graphs[-1], num_threads=case.random.choice([0, 2]))
        for mine, theirs in zip(loader, batches, strict=True):
            assert_same_batch(mine, theirs, graphs[-1])
        loader.close()


def _check_refusal_on_parts(case: Case, folder: Path) -> None:
    with machines(case.graph, folder, 2, machine_of_part=[0, 0]) as graphs:
        try:
            list(case.loader(graphs[0]))
        except ValueError:
            return
    raise AssertionError("options that are refused in memory are taken on parts")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", action="store_true", help="the case of this number alone")
    parser.add_argument("--parts-every", type=int, default=4, help="how many cases to one that runs on parts too")
    given = parser.parse_args(arguments)
    told: collections.Counter[str] = collections.Counter()
    until, number = time.monotonic() + given.seconds, given.seed
    while given.one or time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            on_parts = given.one or number % given.parts_every == 0
            try:
                told[run(number, Path(folder) / "parts" if on_parts else None)] += 1
            except Exception:
                case = Case(number)
                print(
                    f"case {number} failed: {'links' if case.is_links else 'nodes'}, {case.num_neighbors}, "
                    f"{case.options}"
                )
                print(f"again: python -m tests.fuzz.sampling --seed {number} --one", flush=True)
                raise
        if given.one:
            break
        number += 1
    print(f"cases {given.seed} to {number}: {dict(told)}, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
