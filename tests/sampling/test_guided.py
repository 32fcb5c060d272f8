"""Guided draws on parts: the same on every machine and in one process, by versions that begin where it was said."""

import pytest
import torch

from gnnsys.graph import EDGE, NODE, edge_type_key
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.ops import sample_guided, stream_key
from gnnsys.sampling import GuidedSampler, NeighborSampler, NodeScores, SampleKey, main_part
from gnnsys.sampling.node_scores import MOST_VERSIONS
from tests.sampling.machines import homogeneous, machines, to_global, typed

KEY = SampleKey(3, 1, 4)
SEEDS = {NODE: torch.tensor([7, 11, 80, 3, 80, 119])}
FANOUTS = [3, 2]


def some_scores(graph, requester: int, seed: int = 0) -> NodeScores:
    g = torch.Generator().manual_seed(seed)
    own = graph.book.part_range(requester, NODE)
    ids = torch.tensor([i for i in range(graph.num_nodes(NODE)) if i not in own and i % 3], dtype=torch.int64)
    return NodeScores(requester, ids, torch.randint(1, 256, ids.shape, generator=g).to(torch.uint8))


@pytest.fixture(scope="module")
def whole():
    return homogeneous()


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long), 4])
def parted(request, tmp_path, whole):
    with machines(whole, tmp_path / "parts", request.param) as graphs:
        yield graphs


def original(graph, sample):
    """Everything in original ids."""
    edges = None if sample.blocks else graph.original_edge_ids(sample.edge[EDGE], EDGE)
    weight = None if sample.edge_weight is None else sample.edge_weight[EDGE]
    return graph.original_ids(sample.node[NODE], NODE), edges, weight


def expected_first_hop(whole, graph, scores, seeds, deviation):
    """The draws of hop 0 on the graph as it was before it was cut."""
    requester = graph.book.part_range(scores.requester, NODE)
    ids = graph.global_ids(torch.arange(whole.num_nodes(NODE)), NODE)
    table = torch.full_like(ids, scores.median, dtype=torch.uint8)
    known = dict(zip(scores.ids.tolist(), scores.scores.tolist(), strict=True))
    for node, number in enumerate(ids.tolist()):
        table[node] = 0 if number in requester else known.get(number, scores.median)
    csc = whole.csc(EDGE)
    key = stream_key(*KEY, 0, edge_type_key(EDGE))
    found = sample_guided(csc, seeds.to(csc.indices.dtype), FANOUTS[0], key=key, score=table, deviation=deviation)
    return csc.edge_ids[found.positions] if csc.edge_ids is not None else found.positions


@pytest.mark.parametrize("options", [{}, {"unbiased": True}, {"split": "proportional"}, {"disjoint": True}])
def test_every_machine_draws_for_a_requester_what_one_process_draws(parted, whole, tmp_path, options):
    requester = len(parted) - 1
    with machines(whole, tmp_path / "one", len(parted), machine_of_part=[0] * len(parted)) as (alone,):
        answers = []
        for graph in (alone, *parted):
            sampler = GuidedSampler(graph, FANOUTS, requester=requester, deviation=0.4, **options)
            sampler.use(some_scores(graph, requester), at=(0, 0))
            answers.append(original(graph, sampler.sample(to_global(graph, SEEDS), key=KEY)))
        for answer in answers[1:]:
            for ours, theirs in zip(answer, answers[0], strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)
        assert (answers[0][2] is not None) == ("unbiased" in options)


def test_draws_are_those_of_the_graph_before_it_was_cut(parted, whole):
    for graph in parted:
        sampler = GuidedSampler(graph, FANOUTS, requester=0, deviation=0.4)
        scores = some_scores(graph, 0)
        sampler.use(scores, at=(0, 0))
        sample = sampler.sample(to_global(graph, SEEDS), key=KEY)
        wanted = expected_first_hop(whole, graph, scores, SEEDS[NODE], 0.4)
        found = graph.original_edge_ids(sample.edge[EDGE], EDGE)[: sample.num_sampled_edges[EDGE][0]]
        assert torch.equal(found, wanted)


def test_until_the_first_version_draws_are_uniform(parted, whole):
    plain = NeighborSampler(whole, FANOUTS).sample(SEEDS, key=KEY)
    for graph in parted:
        sampler = GuidedSampler(graph, FANOUTS, deviation=0.4)
        assert torch.equal(original(graph, sampler.sample(to_global(graph, SEEDS), key=KEY))[0], plain.node[NODE])


@pytest.fixture
def two(tmp_path, whole):
    with machines(whole, tmp_path / "parts", 2) as graphs:
        yield graphs


def test_own_nodes_come_first_so_fewer_rows_are_remote(two, whole):
    for number, graph in enumerate(two):
        own = graph.book.part_range(number, NODE)
        seeds = {NODE: torch.arange(own.start, own.stop)}
        guided = GuidedSampler(graph, [2], deviation=0.0)
        guided.use(some_scores(graph, number), at=(0, 0))
        remote = [
            int(((nodes < own.start) | (nodes >= own.stop)).sum())
            for nodes in (s.sample(seeds, key=KEY).node[NODE] for s in (guided, NeighborSampler(graph, [2])))
        ]
        assert remote[0] < 0.5 * remote[1]
        assert main_part(graph, seeds[NODE]) == number


def test_a_version_begins_where_nobody_was_and_a_batch_keeps_its_draws(two):
    graph = two[0]
    sampler, seeds = GuidedSampler(graph, FANOUTS), to_global(graph, SEEDS)
    before = original(graph, sampler.sample(seeds, key=SampleKey(0, 2, 5)))
    first, second = some_scores(graph, 0), some_scores(graph, 0, seed=1)
    assert 0 < first.version != second.version > 0
    assert sampler.use(first) == (2, 6)
    assert [sampler.version_at(at) for at in ((2, 5), (2, 6), (3, 0))] == [0, first.version, first.version]
    assert torch.equal(original(graph, sampler.sample(seeds, key=SampleKey(0, 2, 5)))[1], before[1])
    for at in ((2, 5), (2, 6)):
        with pytest.raises(ValueError, match="was begun already, or has a version"):
            sampler.use(second, at=at)
    assert sampler.use(second, at=(4, 0)) == (4, 0)
    assert sampler.version_at((3, 9)) == first.version and sampler.version_at((4, 0)) == second.version


def test_a_resumed_loader_draws_by_the_versions_it_had(two):
    graph = two[0]

    def make():
        sampler = GuidedSampler(graph, FANOUTS, deviation=0.2)
        return sampler, NeighborLoader(graph, sampler=sampler, batch_size=10, fetch=["x"], num_threads=2, shuffle=True)

    sampler, loader = make()
    seen = []
    for number, batch in enumerate(loader):
        if number == 2:
            sampler.use(some_scores(graph, 0))
        if number == 5:
            state = loader.state_dict()
        seen.append(batch.n_id)
    assert state["sampler"]["versions"][0][2] == some_scores(graph, 0).version
    loader.close()
    again, resumed = make()
    resumed.load_state_dict(state)
    rest = [batch.n_id for batch in resumed]
    resumed.close()
    assert again.state_dict()["versions"] == sampler.state_dict()["versions"]
    assert len(rest) == len(seen) - 6 and all(torch.equal(a, b) for a, b in zip(rest, seen[6:], strict=True))


def test_an_owner_that_has_lost_the_scores_is_sent_them_again(tmp_path, whole):
    with machines(whole, tmp_path / "parts", 2) as graphs:
        graph = graphs[0]
        sampler = GuidedSampler(graph, FANOUTS, deviation=0.4)
        sampler.use(some_scores(graph, 0), at=(0, 0))
        seeds = to_global(graph, SEEDS)
        before = original(graph, sampler.sample(seeds, key=KEY))
        for other in range(1, MOST_VERSIONS + 3):  # those of other trainers of the part have displaced it
            graph._send_scores(some_scores(graph, 0, seed=other))
        after = original(graph, sampler.sample(seeds, key=KEY))
        assert all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_scores_that_a_batch_needs_are_there_however_many_came_since(two):
    graph = two[0]
    first, second = GuidedSampler(graph, FANOUTS, deviation=0.4), GuidedSampler(graph, FANOUTS, deviation=0.4)
    first.use(some_scores(graph, 0), at=(0, 0))
    seeds = to_global(graph, SEEDS)
    before = original(graph, first.sample(seeds, key=KEY))
    for number in range(1, MOST_VERSIONS + 3):
        second.use(some_scores(graph, 0, seed=number), at=(0, number))
    after = original(graph, first.sample(seeds, key=KEY))
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for number in range(1, MOST_VERSIONS + 3):
        assert second.version_at((0, number)) == some_scores(graph, 0, seed=number).version
        second.sample(seeds, key=SampleKey(0, 0, number))


def test_what_no_batch_needs_any_more_is_forgotten_and_old_batches_say_so(two):
    graph = two[0]
    sampler = GuidedSampler(graph, FANOUTS)
    for number in range(4):
        sampler.use(some_scores(graph, 0, seed=number), at=(0, 10 * number))
    sampler.consumed((0, 25))
    state = sampler.state_dict()
    assert [entry[:2] for entry in state["versions"]] == [[0, 20], [0, 30]] and len(state["scores"]) == 2
    assert sampler.version_at((0, 25)) == some_scores(graph, 0, seed=2).version
    with pytest.raises(ValueError, match="its scores are forgotten"):
        sampler.version_at((0, 5))
    assert sampler.use(some_scores(graph, 0, seed=9)) == (0, 31)


def test_a_state_goes_to_the_rank_of_the_same_part_and_nothing_else_is_taken(two):
    graph = two[0]
    mine, other = GuidedSampler(graph, FANOUTS, requester=0), GuidedSampler(graph, FANOUTS, requester=1)
    mine.use(some_scores(graph, 0))
    other.use(some_scores(graph, 1))
    states = [other.state_dict(), mine.state_dict()]
    again = GuidedSampler(graph, FANOUTS, requester=0)
    again.load_state_dicts(states)
    assert again.state_dict()["versions"] == mine.state_dict()["versions"]
    with pytest.raises(ValueError, match="this sampler is for part 0"):
        again.load_state_dict(states[0])
    with pytest.raises(ValueError, match="versions without scores"):
        again.load_state_dict({**states[1], "scores": []})
    with pytest.raises(ValueError, match="out of order"):
        again.load_state_dict({**states[1], "versions": states[1]["versions"] * 2})
    again.load_state_dicts([states[0], states[0]])
    assert again.version_at((9, 9)) == 0


def test_links_keep_their_own_edges_out_of_guided_batches(two, whole):
    graph = two[0]
    sampler = GuidedSampler(graph, [-1], deviation=0.2)
    sampler.use(some_scores(graph, 0), at=(0, 0))
    ids = torch.arange(30)
    src, dst = graph.edge_ends(ids)
    loader = LinkNeighborLoader(
        graph,
        sampler=sampler,
        edge_label_index=graph.from_global(torch.stack([src, dst])),
        batch_size=10,
        fetch=["x"],
        num_threads=0,
    )
    for batch in loader:
        pairs = set(zip(*batch.n_id[batch.edge_index].tolist(), strict=True))
        links = set(zip(*batch.n_id[batch.edge_label_index].tolist(), strict=True))
        assert not pairs & links


def test_bad_use_says_what_to_do(two, whole, tmp_path):
    graph = two[0]
    with pytest.raises(ValueError, match="open parts with"):
        GuidedSampler(whole, FANOUTS)
    with machines(typed(), tmp_path / "typed", 2) as graphs, pytest.raises(ValueError, match="one node and one edge"):
        GuidedSampler(graphs[0], FANOUTS)
    for options, told in (
        ({"requester": 2}, "requester must be a part"),
        ({"deviation": 1.1}, "deviation must be in"),
        ({"split": "even"}, "split must be one of"),
        ({"unbiased": 1}, "unbiased must be"),
    ):
        with pytest.raises(ValueError, match=told):
            GuidedSampler(graph, FANOUTS, **options)
    sampler = GuidedSampler(graph, FANOUTS)
    with pytest.raises(ValueError, match="are of part 1"):
        sampler.use(some_scores(graph, 1))
    sampler.use(some_scores(graph, 0))
    with pytest.raises(ValueError, match="another sampler"):
        sampler.load_state_dict({"seen": 3})
    ids, ones = torch.tensor([3, 5]), torch.ones(2, dtype=torch.uint8)
    wrapped = torch.tensor([2**63 - 1, -(2**63)])
    for bad in (
        (-1, ids, ones),
        (0, ids.flip(0), ones),
        (0, ids, ones * 0),
        (0, ids, ids),
        (0, ids[:1], ones),
        (0, wrapped, ones),
    ):
        with pytest.raises(ValueError, match="scores"):
            NodeScores(*bad)
    with pytest.raises(ValueError, match="ids of scores must be in"):
        graph.add_scores(NodeScores(0, torch.tensor([1000]), torch.ones(1, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="are told deviation"):
        NeighborSampler(graph, FANOUTS, rule="guided:1")


@pytest.mark.parametrize("ids", [range(0), range(7, 8), range(3, 40_000), range(5, 4_000_000, 97), [3, 2**40]])
def test_scores_travel_with_as_few_bytes_as_their_ids_take(ids):
    ids = torch.tensor(list(ids), dtype=torch.int64)
    scores = NodeScores(1, ids, torch.randint(1, 256, ids.shape, generator=torch.Generator().manual_seed(0)).byte())
    arrays = scores.to_arrays()
    again = NodeScores.from_arrays(arrays)
    assert again.version == scores.version and torch.equal(again.ids, ids) and torch.equal(again.scores, scores.scores)
    size = sum(array.nbytes for array in arrays) - 16
    span = int(ids[-1] - ids[0]) + 1 if ids.numel() else 0
    of_ids = min(-(-span // 8), (4 if span <= 2**31 else 8) * ids.numel())
    assert size == ids.numel() + of_ids


def test_damaged_scores_are_refused():
    ids = torch.tensor([4, 6, 9])
    head, bits, scores = NodeScores(0, ids, torch.ones(3, dtype=torch.uint8)).to_arrays()
    assert bits.dtype == torch.uint8
    for bad in (
        [head[:1], bits, scores],
        [torch.tensor([0, -1]), bits, scores],
        [torch.tensor([0, 2**63 - 1]), bits, scores],
        [head, bits, scores[:2]],
        [head, torch.zeros(13, dtype=torch.uint8), scores],  # numbers would be shorter
        [head, bits.float(), scores],
        [head, torch.tensor([-1, 0, 2]), scores],
        [head, torch.tensor([0, 2**63 - 1, 3]), scores],
        [head, bits.view(1, -1), scores],
        [head, bits, scores.view(1, -1)],
    ):
        with pytest.raises(ValueError, match="scores"):
            NodeScores.from_arrays(bad)
