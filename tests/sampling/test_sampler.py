"""Any sampler goes into the loaders; what it says that edges and nodes weigh comes with the batch, on parts too."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from gnnsys.graph import EDGE, NODE
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.ops import gather_rows, sample_neighbors
from gnnsys.sampling import (
    DrawRule,
    NeighborSampler,
    SampleKey,
    Sampler,
    rules,
    sample_from_arrays,
    sample_to_arrays,
)
from tests.sampling.machines import assert_same_sample, homogeneous, machines, to_global, typed

KEY = SampleKey(3, 1, 2)


class HalfWeights(DrawRule):
    """Uniform draws; an edge weighs what the original ids of its ends add up to."""

    name = "half weights"
    needs_sources = weighs = True

    def draw(self, source, seeds):
        options = {"exclude": seeds.exclude, "tree": seeds.tree, "rng_ids": seeds.original}
        found = sample_neighbors(source.csc, seeds.ids, seeds.fanout, key=seeds.key, **options)
        ids = found.ids if source.source_ids is None else gather_rows(source.source_ids, found.ids)
        ends = torch.repeat_interleave(seeds.ids if seeds.original is None else seeds.original, found.indptr.diff())
        return found._replace(weight=(ids.long() + 1000 * ends.long()).float() / 2)


class Weighted(NeighborSampler):
    gives = ("edge_weight",)

    def __init__(self, graph, fanouts, **options):
        super().__init__(graph, fanouts, rule=HalfWeights.name, **options)
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.fixture(autouse=True)
def rule(monkeypatch):
    monkeypatch.setattr(rules, "RULES", MappingProxyType({HalfWeights.name: HalfWeights()}))


@pytest.mark.parametrize("make, seeds", [(homogeneous, {NODE: [7, 11, 80, 3, 80]}), (typed, {"paper": [5, 60, 2]})])
@pytest.mark.parametrize("options", [{}, {"expand": "frontier"}, {"disjoint": True}])
def test_a_rule_gives_the_same_edges_and_weights_on_parts(tmp_path, make, seeds, options):
    graph, seeds = make(), {t: torch.tensor(ids) for t, ids in seeds.items()}
    whole = Weighted(graph, [4, 3], **options).sample(seeds, key=KEY)
    plain = NeighborSampler(graph, [4, 3], **options).sample(seeds, key=KEY)
    assert all(torch.equal(whole.node[t], plain.node[t]) for t in plain.node)
    for edge_type, weight in (whole.edge_weight or {}).items():
        src, dst = whole.node[edge_type[0]][whole.row[edge_type]], whole.node[edge_type[2]][whole.col[edge_type]]
        assert torch.equal(weight, (src + 1000 * dst).float() / 2)
    for block in whole.blocks:
        for edge_type, weight in block.edge_weight.items():
            csc = block.csc[edge_type]
            dst = whole.node[edge_type[2]][: block.num_dst[edge_type[2]]].repeat_interleave(csc.indptr.diff())
            assert torch.equal(weight, (whole.node[edge_type[0]][csc.indices.long()] + 1000 * dst).float() / 2)
    assert (whole.edge_weight is None) == ("expand" in options)
    with machines(graph, tmp_path / "parts", 3) as graphs:
        for mine in graphs:
            found = Weighted(mine, [4, 3], **options).sample(to_global(mine, seeds), key=KEY)
            assert_same_sample(found, whole, mine)


@pytest.mark.parametrize("options", [{}, {"expand": "frontier"}])
def test_weights_are_stored_and_sent_with_a_sample(options):
    sample = Weighted(homogeneous(), [4, 3], **options).sample({NODE: torch.arange(9)}, key=KEY)
    sample = replace(sample, node_weight={NODE: torch.rand(sample.node[NODE].numel())})
    again = sample_from_arrays(sample_to_arrays(sample))
    assert torch.equal(again.node_weight[NODE], sample.node_weight[NODE])
    for ours, theirs in [(again, sample), *zip(again.blocks, sample.blocks, strict=True)]:
        weights = theirs.edge_weight
        assert (ours.edge_weight is None) == (weights is None)
        assert weights is None or torch.equal(ours.edge_weight[EDGE], weights[EDGE])
    cut = replace(sample, node_weight={NODE: sample.node_weight[NODE][1:]})
    with pytest.raises(ValueError, match="node_weight"):
        sample_from_arrays(sample_to_arrays(cut))


def test_loaders_take_any_sampler_and_batches_have_its_weights():
    graph = homogeneous()
    sampler = Weighted(graph, [4, 3])
    options = {"fetch": ["x"], "seed": 5, "num_threads": 2}
    ours = NeighborLoader(graph, sampler=sampler, input_nodes=range(40), batch_size=8, **options)
    plain = NeighborLoader(graph, [4, 3], input_nodes=range(40), batch_size=8, **options)
    for batch, same in zip(ours, plain, strict=True):
        assert torch.equal(batch.edge_index, same.edge_index) and torch.equal(batch.x, same.x)
        src, dst = batch.n_id[batch.edge_index]
        assert torch.equal(batch.edge_weight, (src + 1000 * dst).float() / 2)
    links = torch.stack([torch.arange(20), torch.arange(20) + 1])
    ours = LinkNeighborLoader(graph, sampler=sampler, edge_label_index=links, batch_size=8, **options)
    plain = LinkNeighborLoader(graph, [4, 3], edge_label_index=links, batch_size=8, **options)
    for batch, same in zip(ours, plain, strict=True):
        assert torch.equal(batch.edge_index, same.edge_index) and batch.edge_weight.numel() == batch.e_id.numel()


def test_a_loader_keeps_what_its_sampler_has_learned():
    graph = homogeneous()
    first, second = Weighted(graph, [4]), Weighted(graph, [4])
    loaders = [NeighborLoader(graph, sampler=s, batch_size=30, fetch=["x"], num_threads=1) for s in (first, second)]
    next(iter(loaders[0]))
    first.seen = 7
    state = loaders[0].state_dict()
    loaders[1].load_state_dict(state)
    assert second.seen == 7
    other = NeighborLoader(graph, sampler=NeighborSampler(graph, [4]), batch_size=30, fetch=["x"], num_threads=1)
    with pytest.raises(ValueError, match="sampler=Weighted, here it is NeighborSampler"):
        other.load_state_dict(state)
    for loader in (*loaders, other):
        loader.close()


class Whole(Sampler):
    """Takes no links."""

    takes_links = False

    def __init__(self, graph):
        self.graph = graph

    def sample(self, seeds, *, key, seed_time=None, tree=None, exclude=None):
        self.refuse(seed_time=seed_time, tree=tree, exclude=exclude)
        return NeighborSampler(self.graph, [-1]).sample(seeds, key=key)


def test_what_does_not_go_together_is_refused_with_the_remedy():
    graph, other = homogeneous(), homogeneous(seed=1)
    sampler = Weighted(graph, [4])
    with pytest.raises(ValueError, match="another graph"):
        NeighborLoader(other, sampler=sampler)
    with pytest.raises(ValueError, match="leave num_neighbors"):
        NeighborLoader(graph, [4], sampler=sampler)
    with pytest.raises(ValueError, match="leave num_neighbors"):
        LinkNeighborLoader(graph, [4], sampler=sampler)
    with pytest.raises(ValueError, match="for links"):
        LinkNeighborLoader(graph, sampler=Whole(graph))
    with pytest.raises(ValueError, match="num_neighbors must be given"):
        LinkNeighborLoader(graph)
    with pytest.raises(ValueError, match="must be a gnnsys"):
        LinkNeighborLoader(graph, sampler=lambda *_: None)
    with pytest.raises(ValueError, match="takes no seed_time and no tree"):
        Whole(graph).sample({NODE: torch.arange(3)}, key=KEY, seed_time={}, tree={})
    graph.set_edge_data("edge_weight", torch.rand(graph.num_edges()))
    with pytest.raises(ValueError, match="'edge_weight', a name that batches use"):
        NeighborLoader(graph, sampler=sampler)
    with pytest.raises(ValueError, match="no rule of drawing is called 'none'"):
        NeighborSampler(graph, [4], rule="none")
    with pytest.raises(ValueError, match="NeighborSampler learns nothing"):
        NeighborSampler(graph, [4]).load_state_dict({"seen": 1})
