"""Loaders of links and of subgraphs that plan: the same batches to the last bit, and what is foreseen of their rows."""

from itertools import islice

import pytest
import torch

import gnnsys
from gnnsys.graph import NODE
from gnnsys.loader import NegativeSampling, ScoredNegatives
from gnnsys.loader.planned import make_plan
from gnnsys.sampling import ClusterSampler, LaborSampler, SaintWalkSampler, cluster
from tests.loader.planned_ways import GRAPH, Clock, short, until_chosen, with_ways
from tests.sampling.machines import CITES, WRITES, typed

SECONDS = {0: 3.0, 1: 1.0, 2: 2.0}
TYPED = typed()
CLUSTERS = ClusterSampler(GRAPH, cluster(GRAPH, 24))
WALKS = SaintWalkSampler(GRAPH, 8, 2, num_subgraphs=24, coverage=0)


def _links(graph=GRAPH, **options):
    base = {"edge_label_index": GRAPH.edge_index()[:, ::60], "batch_size": 8, "shuffle": True, "seed": 3}
    return gnnsys.LinkNeighborLoader(graph, [3, 2], **{**base, **options})


def _subgraphs(sampler=CLUSTERS, **options):
    return gnnsys.SubgraphLoader(GRAPH, sampler, **{"shuffle": True, "seed": 3, **options})


def everything(batch):
    """All tensors of a batch, by where they are."""
    stores = {**batch.nodes, **batch.edges, "extra": batch.extra}
    return {(of, name): value for of, store in stores.items() for name, value in store.items()}


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            is_same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
            assert is_same, key


LINKS = {
    "positives": {},
    "binary": {"neg_sampling": "binary"},
    "triplet": {"neg_sampling": ("triplet", 2)},
    "disjoint": {"neg_sampling": "binary", "disjoint": True},
    "of edges": {"edge_label_index": None, "neg_sampling": "binary", "batch_size": 60},
    "labelled": {"edge_label": torch.arange(GRAPH.edge_index()[:, ::60].shape[1]), "neg_sampling": ("binary", 2.0)},
    "weighed": {"edge_label_weight": torch.rand(GRAPH.edge_index()[:, ::60].shape[1])},
}


@pytest.mark.parametrize("case", LINKS)
def test_links_have_the_batches_of_a_loader_without_a_plan(case):
    plain, planning = _links(**LINKS[case]), short(with_ways(make=_links, **LINKS[case]))
    count = planning.plan.trial.turn * 3 + 1
    assert_same(
        [everything(batch) for batch in islice(planning, count)], [everything(batch) for batch in islice(plain, count)]
    )
    assert set(planning.plan.trial.seconds) == {0, 1, 2}
    planning.close()


def test_links_of_several_types_have_the_batches_of_a_loader_without_a_plan():
    links = {WRITES: TYPED.edge_index(WRITES), CITES: TYPED.edge_index(CITES)}

    def make(**options):
        return gnnsys.LinkNeighborLoader(
            TYPED, [2, 2], edge_label_index=links, neg_sampling="binary", batch_size=4, shuffle=True, **options
        )

    plain, planning = make(), short(with_ways(make=make))
    assert_same([everything(b) for b in islice(planning, 10)], [everything(b) for b in islice(plain, 10)])
    planning.close()


@pytest.mark.parametrize("sampler", [CLUSTERS, WALKS])
def test_subgraphs_have_the_batches_of_a_loader_without_a_plan(sampler):
    plain, planning = _subgraphs(sampler), short(with_ways(make=_subgraphs, sampler=sampler))
    assert_same([everything(batch) for batch in planning], [everything(batch) for batch in plain])
    until_chosen(planning)
    planning.close()


@pytest.mark.parametrize("make", [_links, _subgraphs])
def test_the_fastest_way_stays_and_who_resumes_keeps_it(monkeypatch, make):
    clock, loader = Clock(monkeypatch), short(with_ways(make=make))
    epoch = iter(loader)
    for _ in range(5):
        next(epoch)
        clock.train(loader, SECONDS)
    state = loader.state_dict()
    rest = []
    for batch in epoch:
        rest.append(everything(batch))
        clock.train(loader, SECONDS)
    resumed = short(with_ways(make=make))
    resumed.load_state_dict(state)
    ours = []
    for batch in resumed:
        ours.append(everything(batch))
        clock.train(resumed, SECONDS)
    assert_same(ours, rest)
    clock.epochs(resumed, SECONDS, 2)
    assert resumed.plan.chosen == 1
    loader.close()
    resumed.close()


@pytest.mark.parametrize("make", [_links, _subgraphs])
def test_cores_are_divided_unless_the_user_has_said_how_many_threads_load(monkeypatch, make):
    monkeypatch.setattr("gnnsys.loader.planned.num_usable_cores", lambda: 8)
    assert len(make(execution="auto").plan.ways) > 1
    assert "num_threads was given" in make(execution="auto", num_threads=1).plan.report()
    assert "in order" in make(execution="auto", transform=lambda batch: batch).plan.report()
    assert make().plan is None
    with pytest.raises(ValueError, match="execution must be"):
        make(execution="fast")


def test_negatives_that_a_function_of_the_users_scores_are_made_as_given():
    def scores(ends, nodes):
        return torch.zeros(len(ends), len(nodes))

    scored = NegativeSampling("triplet", 1, kind=ScoredNegatives(scores, pool=4))
    assert "in order" in _links(neg_sampling=scored, execution="auto").plan.report()


def test_a_plan_of_other_links_or_another_face_is_refused():
    plan = _links(execution="auto").plan
    for make in (lambda **o: _links(neg_sampling="binary", **o), lambda **o: _links(seed=4, **o), _subgraphs):
        with pytest.raises(ValueError, match="another loader"):
            make(execution=plan)


def test_links_of_a_users_own_sampler_have_the_batches_of_a_loader_without_a_plan():
    def make(**options):
        links = GRAPH.edge_index()[:, ::60]
        return gnnsys.LinkNeighborLoader(
            GRAPH, sampler=LaborSampler(GRAPH, [3, 2]), edge_label_index=links, batch_size=2, **options
        )

    plain, planning = make(), short(with_ways(make=make))
    assert_same([everything(b) for b in islice(planning, 10)], [everything(b) for b in islice(plain, 10)])
    planning.close()


# What a cache of rows would be filled by


def _seen(loader, node_types):
    """The share of an epoch's batches that hold each node."""
    counts = {t: torch.zeros(loader.graph.num_nodes(t), dtype=torch.float64) for t in node_types}
    for batch in loader:
        for node_type in node_types:
            counts[node_type][batch.nodes[node_type]["n_id"].unique()] += 1
    return {t: count / len(loader) for t, count in counts.items()}


def _foreseen(monkeypatch, make):
    """What a loader that plans says of its visits, where it has something to say."""
    given = []

    def spying(graph, target, visits, made_for, **options):
        given.append(visits)
        return make_plan(graph, target, visits, made_for, **options)

    monkeypatch.setattr("gnnsys.loader.loader.make_plan", spying)
    make(execution="auto")
    return given[0]


def _hits(seen, scores):
    """Of the rows that batches read, the share that a cache of a fifth of the rows would have."""
    best = scores.sort(descending=True).indices[: len(scores) // 5]
    return float(seen[best].sum() / seen.sum())


@pytest.mark.parametrize(
    "options",
    [
        {"neg_sampling": None},
        {"neg_sampling": "binary"},
        {"neg_sampling": NegativeSampling("triplet", 2, kind="degree")},
        {"neg_sampling": "binary", "disjoint": True},
        {"edge_label_index": GRAPH.edge_index()[:, GRAPH.edge_index()[0] < 100]},
    ],
)
def test_visits_of_links_are_those_of_their_batches(monkeypatch, options):
    def make(**more):
        return _links(**{"batch_size": 16, "edge_label_index": GRAPH.edge_index()[:, ::8], **options, **more})

    foreseen, seen = _foreseen(monkeypatch, make)()[NODE], _seen(make(), [NODE])[NODE]
    assert float(foreseen.sum()) == pytest.approx(float(seen.sum()), rel=0.1)
    assert _hits(seen, foreseen) > 0.85 * _hits(seen, seen)


@pytest.mark.parametrize(
    ("links", "in_turn"), [(WRITES, False), ({WRITES: None, CITES: None}, False), ({WRITES: None, CITES: None}, True)]
)
def test_visits_of_links_of_a_typed_graph_are_those_of_their_batches(monkeypatch, links, in_turn):
    def make(**more):
        return gnnsys.LinkNeighborLoader(
            TYPED, [2, 2], edge_label_index=links, neg_sampling="binary", batch_size=8, shuffle=True,
            one_type_per_batch=in_turn, **more,
        )  # fmt: skip

    foreseen, seen = _foreseen(monkeypatch, make)(), _seen(make(), ["paper", "author"])
    assert foreseen.keys() == {"paper", "author", "venue"} and not foreseen["venue"].numel()
    for node_type, counts in seen.items():
        assert float(foreseen[node_type].sum()) == pytest.approx(float(counts.sum()), rel=0.2)


def test_nothing_is_foreseen_of_a_users_own_sampler_or_of_no_links(monkeypatch):
    def own(**more):
        return gnnsys.LinkNeighborLoader(GRAPH, sampler=LaborSampler(GRAPH, [3]), **more)

    assert _foreseen(monkeypatch, own) is None
    assert _foreseen(monkeypatch, lambda **more: _links(drop_last=True, batch_size=10**6, **more)) is None
    assert _foreseen(monkeypatch, _subgraphs) is None
