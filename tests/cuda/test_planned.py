"""Plans on a GPU: every way makes the same batches, what fits is tried, and memory of the others is given back."""

import gc

import pytest
import torch

import gnnsys
from gnnsys.graph import NODE, sbm
from gnnsys.planning import ExecutionPlan, TurnClock
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED
from gnnsys.sampling import ClusterSampler, cluster
from gnnsys.store import MemoryBudget
from gnnsys.store.memory_budget import limited
from tests.cuda.places import same_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GRAPH = sbm(20_000, avg_degree=10, num_features=64)


def _loader(graph=GRAPH, **options):
    return gnnsys.NeighborLoader(
        graph, [5, 4], input_nodes=torch.arange(8000), batch_size=64, shuffle=True, device="cuda", **options
    )


def _places(loader):
    """Of its ways, each once."""
    return list(dict.fromkeys(way.place for way in loader.plan.ways))


def _until_chosen(loader):
    """Whole epochs: a trial that is hard to decide takes longer than one."""
    for _ in range(6):
        if loader.plan.chosen is None:
            for _ in loader:
                pass
    assert loader.plan.chosen is not None, loader.plan.report()


def _told(batch):
    return [t.cpu() for t in (batch.x, batch.edge_index, batch.n_id, batch.e_id, batch.y)]


def _are_the_same(loader, plain):
    for ours, theirs in zip(loader, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(_told(ours), _told(theirs), strict=True))


def test_a_graph_that_fits_is_tried_on_the_device_and_batches_stay_the_same():
    loader = _loader(execution="auto")
    assert [way.place for way in loader.plan.ways] == [GIVEN, DEVICE], loader.plan.report()
    assert all(way.predicted > 0 for way in loader.plan.ways)
    _are_the_same(loader, _loader())
    assert len(loader.plan.trial.seconds) == 2, loader.plan.report()
    _are_the_same(loader, _second_epoch())
    _until_chosen(loader)


def _second_epoch():
    plain = _loader()
    for _ in plain:
        pass
    return plain


def test_a_graph_that_does_not_fit_is_tried_in_pinned_memory_with_and_without_a_cache():
    rows = GRAPH.node_data[NODE]["x"].nbytes
    with limited("cuda", 3 * rows // 2):
        loader = _loader(execution="auto")
        assert _places(loader) == [GIVEN, PINNED, CACHED], loader.plan.report()
        _are_the_same(loader, _loader())
        _are_the_same(loader, _second_epoch())
        _until_chosen(loader)
        assert not loader.plan.trial.refused, loader.plan.report()


@pytest.mark.parametrize("place", [GIVEN, PINNED, CACHED])
def test_every_way_by_hand_makes_the_same_batches(place):
    rows = GRAPH.node_data[NODE]["x"].nbytes
    with limited("cuda", 3 * rows // 2):
        plan = _loader(execution="auto").plan
        chosen = [way.place for way in plan.ways].index(place)
        _are_the_same(_loader(execution=ExecutionPlan(plan.ways, made_for=plan.made_for, chosen=chosen)), _loader())


def test_the_cache_of_a_way_that_was_not_chosen_is_given_back():
    rows = GRAPH.node_data[NODE]["x"].nbytes
    with limited("cuda", 3 * rows // 2):
        loader = _loader(execution="auto")
        _until_chosen(loader)
        gc.collect()
        uses = [use.what for use in MemoryBudget.of("cuda").uses()]
        assert uses.count("device cache") == (loader.plan.way.place == CACHED), loader.plan.report()


@pytest.mark.parametrize(("graph", "why"), [(lambda: GRAPH.to("cuda"), "on the device already")])
def test_a_graph_that_is_where_it_should_be_is_left_there(graph, why):
    plan = _loader(graph(), execution="auto").plan
    assert plan.chosen == 0 and why in plan.report()


def test_a_pinned_graph_is_tried_with_a_cache_or_on_the_device():
    pinned = GRAPH.pin_memory()
    assert _places(_loader(pinned, execution="auto")) == [GIVEN, DEVICE]
    with limited("cuda", 3 * GRAPH.node_data[NODE]["x"].nbytes // 2):
        assert _places(_loader(pinned, execution="auto")) == [GIVEN, CACHED]
    assert isinstance(pinned.node_data[NODE]["x"], torch.Tensor), "the user's graph stays as it was"


def test_a_plan_of_another_device_is_refused():
    plan = _loader(execution="auto").plan
    plan.made_for["device"] = "NVIDIA K80"
    with pytest.raises(ValueError, match="another device: 'NVIDIA K80'"):
        _loader(execution=plan)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_that_share_a_device_share_its_memory(monkeypatch, num_ranks):
    sharing = -(-num_ranks // torch.cuda.device_count())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    rows = GRAPH.node_data[NODE]["x"].nbytes
    with limited("cuda", 3 * rows // 2):
        ways = _loader(execution="auto").plan.ways
        taken = [way.device_bytes for way in ways]
        assert max(taken) > 0 and sharing * 2 * max(taken) <= 3 * rows // 2, ways


def test_a_chosen_way_is_watched_without_waiting_for_the_device(monkeypatch):
    loader = _loader(execution="auto")
    _until_chosen(loader)
    marked, mark = [], TurnClock._mark
    monkeypatch.setattr(TurnClock, "_mark", lambda clock: marked.append(mark(clock)) or marked[-1])
    for _ in loader:
        pass
    assert marked and all(isinstance(one, float) for one in marked)
    assert len(loader._execution._watch._windows) > 0


# Links and subgraphs


LINKS = GRAPH.edge_index()[:, ::40]


def _links(graph=GRAPH, **options):
    base = {"edge_label_index": LINKS, "neg_sampling": "binary", "batch_size": 32, "shuffle": True, "device": "cuda"}
    return gnnsys.LinkNeighborLoader(graph, [5, 4], **{**base, **options})


def _are_the_same_links(loader, plain):
    for ours, theirs in zip(loader, plain, strict=True):
        same_batch(ours, theirs)


def test_links_are_tried_on_the_device_and_batches_stay_the_same():
    loader = _links(execution="auto")
    assert [way.place for way in loader.plan.ways][:2] == [GIVEN, DEVICE]
    _are_the_same_links(loader, _links(device="cpu"))
    _until_chosen(loader)
    assert not loader.plan.trial.refused, loader.plan.report()


@pytest.mark.parametrize("place", [GIVEN, PINNED, CACHED])
@pytest.mark.parametrize("neg_sampling", ["binary", ("triplet", 2)])
def test_every_way_by_hand_makes_the_same_batches_of_links(place, neg_sampling):
    rows = GRAPH.node_data[NODE]["x"].nbytes
    with limited("cuda", 3 * rows // 2):
        plan = _links(neg_sampling=neg_sampling, execution="auto").plan
        chosen = [way.place for way in plan.ways].index(place)
        by_hand = ExecutionPlan(plan.ways, made_for=plan.made_for, chosen=chosen)
        loader = _links(neg_sampling=neg_sampling, execution=by_hand)
        _are_the_same_links(loader, _links(neg_sampling=neg_sampling, device="cpu"))
        assert loader.plan.chosen == chosen and not loader.plan.trial.refused, loader.plan.report()


def test_subgraphs_stay_where_their_sampler_reads_them():
    sampler = ClusterSampler(GRAPH, cluster(GRAPH, 20))
    plan = gnnsys.SubgraphLoader(GRAPH, sampler, device="cuda", execution="auto").plan
    assert plan.chosen == 0 and "your own sampler" in plan.report()
