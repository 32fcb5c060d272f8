"""Batches of gnnsys.NeighborLoader and gnnsys.LinkNeighborLoader under every option, and what samplers draw."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gnnsys
from gnnsys import sampling
from gnnsys.loader import NegativeSampling, PipelineOptions
from gnnsys.pipeline import Stage
from gnnsys.sampling import NeighborSampler, Sample, SampleKey
from tests.golden.case import Case, Values, collect, epochs, named
from tests.golden.graphs import CITES, NUM_NODES, PAPERS, REV_WRITES, SEEDS, WRITES, plain, typed

TIMES = torch.arange(len(SEEDS)) % 29
BY_TYPE = {WRITES: [2, 3], CITES: [-1, 2], REV_WRITES: [4, 0]}
CITED = {WRITES: [0, 0], CITES: [3, 2], REV_WRITES: [0, 0]}
KEY = SampleKey(seed=3, epoch=1, batch=2)

# -- nodes -------------------------------------------------------------------------------------------------------------


def double(batch: gnnsys.Batch) -> gnnsys.Batch:
    batch.x = batch.x * 2
    batch.twice = True
    return batch


def negate(sampled: Any) -> Any:
    sampled.rows["node"]["x"].neg_()
    return sampled


def two_hops_of_all(graph: Any, seeds: Mapping[str, Tensor], key: SampleKey) -> Sample:
    """A user's own sampler."""
    return NeighborSampler(graph, [3, -1]).sample(seeds, key=key)


def blocks_by_hand(graph: Any, seeds: Mapping[str, Tensor], key: SampleKey) -> Sample:
    """A user's own sampler, of blocks."""
    nodes = dict(seeds)
    blocks: list[sampling.Block] = []
    for hop, fanout in enumerate((3, 2)):
        found = sampling.sample_neighbors(graph, nodes, fanout, key=key, hop=hop)
        block, nodes = sampling.to_block(found, nodes)
        blocks.insert(0, block)
    return sampling.sample_from_blocks(graph, blocks, nodes, seeds)


NODES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "all neighbours": {"num_neighbors": [-1, -1]},
    "all then some": {"num_neighbors": [-1, 2]},
    "one seed a batch": {"batch_size": 1, "num_neighbors": [2]},
    "other seed": {"seed": 11},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weights": {"weight_attr": "w"},
    "weights, replace": {"weight_attr": "w", "replace": True},
    "weights, disjoint": {"weight_attr": "w", "disjoint": True},
    "node times": {"time_attr": "time"},
    "given times": {"time_attr": "time", "input_time": TIMES},
    "last by given times": {"time_attr": "time", "input_time": TIMES, "temporal_strategy": "last"},
    "edge times": {"time_attr": "edge_time", "input_time": TIMES},
    "last by edge times": {"time_attr": "edge_time", "input_time": TIMES, "temporal_strategy": "last"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "blocks": {"expand": "frontier"},
    "blocks, weights": {"expand": "frontier", "weight_attr": "w"},
    "shuffle": {"shuffle": True},
    "shuffle, drop_last": {"shuffle": True, "drop_last": True},
    "a mask's name": {"input_nodes": "train"},
    "a mask": {"input_nodes": torch.arange(NUM_NODES) % 4 == 1},
    "all nodes": {"input_nodes": None, "batch_size": 64},
    "repeated seeds": {"input_nodes": [5, 5, 7, 5, 9], "batch_size": 3},
    "fetch": {"fetch": ["y", "w"]},
    "transform": {"transform": double},
    "a stage after fetch": {"stages": [Stage("negate", negate, threads=1, after="fetch")]},
    "a sampler": {"num_neighbors": None, "sampler": two_hops_of_all},
    "a sampler of blocks": {"num_neighbors": None, "sampler": blocks_by_hand},
    "no threads": {"num_threads": 0, "shuffle": True},
    "one thread": {"num_threads": 1, "shuffle": True},
    "two threads": {"num_threads": 2, "prefetch": 4, "shuffle": True},
    "pipeline": {"pipeline": PipelineOptions(threads={"sample": 2}, depths={"sample": 3}), "shuffle": True},
    "not across epochs": {"across_epochs": False, "shuffle": True},
}

PAPER_SEEDS = ("paper", PAPERS)
TYPED: dict[str, dict[str, Any]] = {
    "uniform": {},
    "by type": {"num_neighbors": BY_TYPE},
    "by type, two threads": {"num_neighbors": BY_TYPE, "num_threads": 2, "shuffle": True},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "node times": {"time_attr": "time"},
    "last by node times": {"time_attr": "time", "temporal_strategy": "last"},
    "weights of one type": {"weight_attr": "w", "num_neighbors": CITED},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "blocks": {"expand": "frontier"},
    "all authors": {"input_nodes": "author", "shuffle": True},
    "a mask's name": {"input_nodes": ("paper", "train")},
    "fetch by type": {"fetch": {"paper": ["x"], WRITES: ["role"]}},
}


def node_loader(graph: Any, options: dict[str, Any], **seeds: Any) -> gnnsys.NeighborLoader:
    defaults: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 16, "seed": 7}
    return gnnsys.NeighborLoader(graph, **defaults | seeds | options)


def nodes(options: dict[str, Any], folder: Path) -> Values:
    return epochs(node_loader(plain(), options, input_nodes=SEEDS))


def typed_nodes(options: dict[str, Any], folder: Path) -> Values:
    return epochs(node_loader(typed(), options, input_nodes=PAPER_SEEDS))


def nodes_of_a_share(folder: Path) -> Values:
    return epochs(node_loader(plain(), {"shuffle": True}, input_nodes=gnnsys.split(plain(), "train")))


def chosen_nodes(folder: Path) -> Values:
    loader = node_loader(plain(), {}, input_nodes=SEEDS)
    return collect([loader([0, 3]), loader(torch.tensor([49, 1, 1]))])


def resumed(make: Any, folder: Path) -> Values:
    """The rest of the second epoch and the third, of a loader that goes on where another one stopped."""
    first = make()
    batches = (batch for _ in range(2) for batch in first)
    for _ in range(len(first) + 2):
        next(batches)
    state = first.state_dict()
    batches.close()
    first.close()
    second = make()
    second.load_state_dict(state)
    return epochs(second)


# -- links -------------------------------------------------------------------------------------------------------------

LINKS = plain().edge_index()[:, 100:140].long()
LINK_TIMES = torch.arange(40) % 30
WEIGHTED = NegativeSampling("binary", 1.5, torch.arange(NUM_NODES).float(), "popularity")
LINK_OPTIONS: dict[str, dict[str, Any]] = {
    "no negatives": {},
    "labels": {"edge_label": torch.arange(40) % 3},
    "binary": {"neg_sampling": "binary"},
    "binary, labels": {"neg_sampling": "binary", "edge_label": torch.arange(40) % 3},
    "half as many": {"neg_sampling": NegativeSampling("binary", 0.5)},
    "by weight": {"neg_sampling": WEIGHTED},
    "triplet": {"neg_sampling": "triplet"},
    "two of each": {"neg_sampling": NegativeSampling("triplet", 2)},
    "triplet by weight": {"neg_sampling": NegativeSampling("triplet", 2, None, "popularity")},
    "disjoint binary": {"neg_sampling": "binary", "disjoint": True},
    "disjoint triplet": {"neg_sampling": "triplet", "disjoint": True},
    "times": {"time_attr": "time", "edge_label_time": LINK_TIMES},
    "times, binary": {"time_attr": "time", "edge_label_time": LINK_TIMES, "neg_sampling": "binary"},
    "times, triplet, last": {
        "time_attr": "time",
        "edge_label_time": LINK_TIMES,
        "neg_sampling": "triplet",
        "temporal_strategy": "last",
    },
    "supervision kept": {"exclude_supervision": False, "neg_sampling": "binary"},
    "replace": {"replace": True},
    "weights": {"weight_attr": "w", "neg_sampling": "binary"},
    "blocks": {"expand": "frontier", "neg_sampling": "binary"},
    "induced": {"subgraph_type": "induced", "neg_sampling": "binary"},
    "bidirectional": {"subgraph_type": "bidirectional", "neg_sampling": "binary"},
    "shuffle, drop_last, two threads": {
        "shuffle": True,
        "drop_last": True,
        "num_threads": 2,
        "neg_sampling": "binary",
    },
    "all edges": {"edge_label_index": None, "batch_size": 400, "shuffle": True, "num_neighbors": [2]},
}
TYPED_LINKS: dict[str, dict[str, Any]] = {
    "a type": {"edge_label_index": WRITES, "batch_size": 100, "num_neighbors": [2, 1]},
    "binary": {"neg_sampling": "binary"},
    "triplet": {"neg_sampling": NegativeSampling("triplet", 2)},
    "disjoint": {"neg_sampling": "binary", "disjoint": True},
    "no reverse": {"neg_sampling": "binary", "reverse_edge_type": CITES},
    "times": {"neg_sampling": "binary", "time_attr": "time", "edge_label_time": torch.arange(40) % 20},
    "by type": {"num_neighbors": BY_TYPE, "shuffle": True},
}


def link_loader(graph: Any, options: dict[str, Any], **links: Any) -> gnnsys.LinkNeighborLoader:
    defaults: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 12, "seed": 7}
    return gnnsys.LinkNeighborLoader(graph, **defaults | links | options)


def links(options: dict[str, Any], folder: Path) -> Values:
    return epochs(link_loader(plain(), options, edge_label_index=LINKS))


def typed_links(options: dict[str, Any], folder: Path) -> Values:
    return epochs(link_loader(typed(), options, edge_label_index=(WRITES, typed().edge_index(WRITES)[:, :40])))


# -- samplers ----------------------------------------------------------------------------------------------------------


def samples(folder: Path) -> Values:
    """Of samplers themselves, in memory: excluded edges, shuffled batches, in-edges of nodes."""
    sampler = NeighborSampler(plain(), [4, 3])
    excluded = sampler.find_edges(("node", "to", "node"), *LINKS)
    sample = sampler.sample({"node": SEEDS[:20]}, key=KEY, exclude={("node", "to", "node"): excluded})
    shuffled = collect(islice(sampling.sample_batches(sampler, SEEDS, 20, seed=4), 5))
    found = sampling.sample_neighbors(plain(), SEEDS, 3, key=KEY, hop=1, weight="w")
    in_edges = {name: getattr(found, name) for name in ("nodes", "indptr", "ids", "edge_ids")}
    excluding = {f"excluding {name}": value for name, value in named(sample)}
    return {"found edges": excluded, **excluding, **shuffled, **in_edges}


def typed_samples(folder: Path) -> Values:
    sampler = NeighborSampler(typed(), BY_TYPE, expand="frontier")
    seeds = {"paper": PAPERS[:10], "author": torch.tensor([3, 1])}
    return collect([sampler.sample(seeds, key=KEY), NeighborSampler(typed(), [2, 2]).sample(seeds, key=KEY)])


def visits(folder: Path) -> Values:
    csc = plain().csc()
    sampler = NeighborSampler(plain(), [4, 3])
    batches = sampling.sample_batches(sampler, SEEDS, 20)
    return {
        "expected": sampling.expected_visits(csc, [4, 3], SEEDS, batch_size=16),
        "expected with replacement": sampling.expected_visits(csc, [4, -1], SEEDS, batch_size=16, replace=True),
        "by degree": sampling.degree_visits(csc),
        "presampled": sampling.presampled_visits(batches, 10, num_nodes=NUM_NODES),
    }


SHUFFLED = {"shuffle": True, "num_threads": 1}
CASES: dict[str, Case] = {
    **{f"nodes, {name}": Case(partial(nodes, options)) for name, options in NODES.items()},
    "nodes, a share": Case(nodes_of_a_share),
    "nodes, chosen by position": Case(chosen_nodes),
    "nodes, resumed": Case(partial(resumed, lambda: node_loader(plain(), SHUFFLED, input_nodes=SEEDS))),
    **{f"typed nodes, {name}": Case(partial(typed_nodes, options)) for name, options in TYPED.items()},
    "typed nodes, resumed": Case(partial(resumed, lambda: node_loader(typed(), SHUFFLED, input_nodes=PAPER_SEEDS))),
    **{f"links, {name}": Case(partial(links, options)) for name, options in LINK_OPTIONS.items()},
    "links, resumed": Case(
        partial(
            resumed,
            lambda: link_loader(plain(), SHUFFLED | {"neg_sampling": "binary"}, edge_label_index=LINKS),
        )
    ),
    **{f"typed links, {name}": Case(partial(typed_links, options)) for name, options in TYPED_LINKS.items()},
    "samples": Case(samples),
    "typed samples": Case(typed_samples),
    "visits": Case(visits, is_computed=True),
}
