"""`shuffle="adaptive"`: in order up to an epoch that all ranks agree on, shuffled from it on; resumed bit for bit."""

from __future__ import annotations

import json
import threading
from itertools import islice
from typing import Any

import pytest
import torch

import gnnsys
from gnnsys.graph import NODE, sbm
from gnnsys.loader import LinkNeighborLoader, NeighborLoader, SubgraphLoader
from gnnsys.loader.elbow import SETTLED
from gnnsys.partition import Placement
from gnnsys.planning import ExecutionPlan, Way
from gnnsys.sampling import ClusterSampler, cluster
from gnnsys.seeds import split
from tests.sampling.machines import CITES, WRITES, homogeneous, typed
from tests.support.processes import run_ranks

GRAPH, TYPED = homogeneous(), typed()
CLUSTERS = ClusterSampler(GRAPH, cluster(GRAPH, 12))
LINKS = {WRITES: TYPED.edge_index(WRITES)[:, ::5], CITES: TYPED.edge_index(CITES)[:, ::7]}
SWITCH = SETTLED + 1  # the first shuffled epoch, where scores do not rise
EPOCHS = SWITCH + 2


def nodes(shuffle: Any, **options: Any) -> NeighborLoader:
    return NeighborLoader(GRAPH, [3, 2], batch_size=15, seed=5, shuffle=shuffle, **options)


def links(shuffle: Any, **options: Any) -> LinkNeighborLoader:
    return LinkNeighborLoader(
        GRAPH, [2], batch_size=200, seed=5, shuffle=shuffle, neg_sampling="binary", num_threads=2, **options
    )


def typed_links(shuffle: Any, **options: Any) -> LinkNeighborLoader:
    return LinkNeighborLoader(TYPED, [2], edge_label_index=LINKS, batch_size=30, seed=5, shuffle=shuffle, **options)


def clusters(shuffle: Any) -> SubgraphLoader:
    return SubgraphLoader(GRAPH, CLUSTERS, batch_size=2, seed=5, shuffle=shuffle)


def told(batch: Any) -> list[torch.Tensor]:
    if len(batch.nodes) == 1:
        return [batch.n_id, batch.edge_index, batch.input_id]
    return [*(batch[t].n_id for t in TYPED.node_types), *(batch[t].input_id for t in LINKS)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def epochs_of(loader: Any, num_epochs: int = EPOCHS, scores: Any = None) -> list[Any]:
    """The batches of epochs, `scores` observed behind each of them."""
    epochs = []
    for epoch in range(loader.epoch, num_epochs):
        epochs.append([told(batch) for batch in loader])
        if scores is not None:
            loader.observe(scores(epoch))
    loader.close()
    return epochs


def flat(epoch: int) -> float:
    return 0.5


def rising(epoch: int) -> float:
    return min(epoch, 1) / 2 + min(epoch, 3) / 1000


@pytest.mark.parametrize(
    "make",
    [
        lambda shuffle: nodes(shuffle, num_threads=0),
        lambda shuffle: nodes(shuffle, num_threads=2, prefetch=12),  # more than an epoch has
        lambda shuffle: nodes(shuffle, across_epochs=False),
        lambda shuffle: nodes(shuffle, drop_last=True, pad=shuffle is not True),
        links,
        typed_links,
        lambda shuffle: typed_links(shuffle, one_type_per_batch=True),
        clusters,
    ],
    ids=["no threads", "far ahead", "not across", "padded", "links", "typed", "in turn", "clusters"],
)
def test_epochs_before_the_switch_are_in_order_and_those_from_it_on_are_shuffled(make, request):
    adaptive = make("adaptive")
    found, off, on = epochs_of(adaptive, scores=flat), epochs_of(make(False), SWITCH), epochs_of(make(True))
    after = on[SWITCH:]
    assert adaptive.shuffled_from == SWITCH
    assert same(found[:SWITCH], off) and not same(off, on[:SWITCH])
    if "padded" not in request.node.name:  # sizes come from the first epoch, which is in order here and shuffled there
        assert same(found[SWITCH:], after)
    else:
        assert [[b[2].tolist() for b in e] for e in found[SWITCH:]] == [[b[2].tolist() for b in e] for e in after]


def test_batches_that_were_loaded_ahead_in_the_old_order_are_not_given_out():
    loaded: list[Any] = []
    is_ahead = threading.Event()

    def note(batch: Any) -> Any:
        loaded.append(batch.input_id.cpu())
        if len(loaded) > SWITCH * 8:
            is_ahead.set()
        return batch

    loader = nodes("adaptive", num_threads=1, prefetch=3, transform=note)
    epochs = [(list(loader), loader.observe(0.5)) for _ in range(SWITCH)]
    assert is_ahead.wait(120) and torch.equal(loaded[len(epochs) * len(loader)], torch.arange(15)), "loaded in order"
    assert same([told(batch) for batch in loader], epochs_of(nodes(True), SWITCH + 1)[SWITCH])
    loader.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_run_that_is_killed_anywhere_and_resumed_gives_the_same_batches(num_threads):
    def make() -> NeighborLoader:
        return nodes("adaptive", num_threads=num_threads)

    whole, length = [b for epoch in epochs_of(make(), scores=rising) for b in epoch], len(make())
    states: list[tuple[int, Any]] = []
    first = make()
    for epoch in range(EPOCHS):
        states.append((epoch * length, first.state_dict()))  # what was observed is in it, though nothing was decided
        for number, _ in enumerate(first, 1):
            states.append((epoch * length + number, first.state_dict()))
            first.observe(-5.0 * epoch)  # the last one of the epoch counts, though the run is broken off in between
        first.observe(rising(epoch))
    switch = first.shuffled_from
    assert switch is not None and SETTLED < switch < EPOCHS
    first.close()
    for seen, state in states[:: 5 if num_threads == 0 else 17]:
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        rest = [b for epoch in epochs_of(resumed, scores=rising) for b in epoch]
        assert same(rest, whole[seen:]) and resumed.shuffled_from == switch


def test_a_loader_that_goes_back_to_an_earlier_state_switches_again():
    loader = nodes("adaptive", num_threads=2)
    epochs = epochs_of(loader, SWITCH - 1, flat)
    state = loader.state_dict()
    later = epochs_of(loader, EPOCHS, flat)
    assert loader.shuffled_from == SWITCH
    loader.load_state_dict(state)
    assert loader.shuffled_from is None
    assert same(epochs_of(loader, EPOCHS, flat), later) and len(epochs) + len(later) == EPOCHS


def test_an_epoch_that_is_left_early_counts_and_the_switch_is_behind_it():
    loader = nodes("adaptive", num_threads=2)
    for _ in range(SWITCH):
        list(islice(loader, 2))
        loader.observe(0.5)  # in mid-epoch, as the loader sees it
    assert same([told(batch) for batch in loader], epochs_of(nodes(True), SWITCH + 1)[SWITCH])
    assert loader.shuffled_from == SWITCH
    loader.close()


def test_of_several_scores_in_an_epoch_the_last_counts_and_those_that_are_no_number_do_not():
    loader = nodes("adaptive", num_threads=0)
    given = [float("nan"), 0.1, 0.4, float("inf"), 0.6, 0.7, 0.71, 0.72, torch.tensor(0.72), 0.73, -float("inf"), 0.73]
    for score in given:
        list(loader)
        loader.observe(99.0)
        loader.observe(score)
    next(iter(loader))
    kept = loader.state_dict()["shuffling"]["scores"]
    finite = [float(score) for score in given if abs(score) != float("inf") and score == score]
    assert kept == pytest.approx(finite[: len(kept)]) and len(kept) > SETTLED
    assert loader.shuffled_from is not None


def test_ways_of_a_plan_switch_together_and_a_trial_begins_again():
    """Turns before the switch and behind it are not of the same batches."""
    options = {"input_nodes": torch.arange(90), "num_threads": None}
    ways = [Way(), Way(loading_threads=2), Way(loading_threads=0)]
    made_for = nodes("adaptive", **options, execution="auto").plan.made_for
    planning = nodes("adaptive", **options, execution=ExecutionPlan(ways, made_for=made_for))
    trial, length = planning.plan.trial, len(planning)
    trial.warm, trial.measured = 5, 8
    found, measured = [], []
    for _ in range(SWITCH + 40):
        found.append([told(batch) for batch in planning])
        planning.observe(0.5)
        pending = len(planning._execution._measured)  # added at the end of a round
        measured.append((planning.shuffled_from, pending + sum(map(len, planning.plan.trial.seconds.values()))))
    before = trial.turn * 2  # batches of two turns
    assert before <= SWITCH * length < trial.turn * len(ways), "the switch is in the middle of the first round"
    assert measured[SWITCH - 1] == (None, SWITCH * length // trial.turn) and measured[SWITCH] == (SWITCH, 0)
    assert planning.plan.chosen is not None and trial.seconds.keys() == set(range(len(ways)))
    planning.close()
    assert same(found, epochs_of(nodes("adaptive", **options), SWITCH + 40, flat))


@pytest.mark.parametrize("switched", [False, True])
def test_what_is_left_of_an_epoch_is_dealt_in_the_order_that_it_had(switched):
    """Of one rank; to as many as there are now."""

    def make(rank: int, world_size: int) -> NeighborLoader:
        share = split(GRAPH, None, type=NODE, placement=Placement(rank, (0,) * world_size, ()))
        return nodes("adaptive", input_nodes=share, num_threads=0)

    old, at = make(0, 1), SWITCH if switched else 1
    epochs_of(old, at, flat)
    seen = [batch.input_id for batch in islice(old, 3)]
    states = json.loads(json.dumps([old.state_dict()]))
    whole = nodes(switched, num_threads=0)
    order = torch.cat([batch[2] for batch in epochs_of(whole, at + 1)[at]])
    assert torch.equal(torch.cat(seen), order[:45])
    left = []
    for rank in range(3):
        loader = make(rank, 3)
        loader.load_state_dicts(states)
        assert loader.shuffled_from == (SWITCH if switched else None)
        if switched:
            left.append(torch.cat([loader.input_ids(batch.input_id) for batch in loader]))
        else:
            with pytest.raises(RuntimeError, match=f"rank {rank} of 3 has no process group of all ranks to agree in"):
                iter(loader)
    if switched:  # segments of the old order, one behind the other
        assert torch.equal(torch.cat(left), order[45:])


RANKS = """
import json, sys
import torch.distributed as dist
import gnnsys
from gnnsys.graph import NODE
from gnnsys.partition import Placement
from tests.sampling.machines import homogeneous

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
graph, states = homogeneous(), json.loads(sys.argv[1])
seeds = gnnsys.split(graph, None, type=NODE, placement=Placement(rank, (0,) * world_size, ()))
loader = gnnsys.NeighborLoader(graph, [3, 2], input_nodes=seeds, batch_size=15, seed=5, shuffle="adaptive")
if states:
    loader.load_state_dicts(states)
told = {"one": [None, 0.5], "all": [0.25, 0.75], "gone": [0.5, None]}[sys.argv[3]][rank]
if sys.argv[3] == "gone":
    store = dist.distributed_c10d._get_default_store()  # whoever leaves does so when the other has joined
    if rank == 1:
        store.wait(["joined"])
        sys.exit()
    store.set("joined", "")
epochs, saved = {}, {}
for epoch in range(loader.epoch, int(sys.argv[2])):
    epochs[epoch] = []
    for batch in loader:
        epochs[epoch].append(loader.input_ids(batch.input_id).tolist())
        saved[f"{epoch}, batch {len(epochs[epoch])}"] = loader.state_dict()
    if told is not None:
        loader.observe(told)
    saved[epoch] = loader.state_dict()
dist.barrier()
print(json.dumps([loader.shuffled_from, epochs, saved]))
dist.destroy_process_group()
"""


def test_all_ranks_switch_with_the_same_epoch_where_one_of_them_observes_and_other_numbers_of_them_go_on():
    """Two ranks begin, one goes on before the switch, and two behind it with what it had seen."""
    ended = run_ranks(RANKS, 2, "[]", SWITCH + 1, "one")
    two = [json.loads(rank.stdout.splitlines()[-1]) for rank in ended]
    assert [start for start, _, _ in two] == [SWITCH, SWITCH]
    for epoch in range(SWITCH + 1):
        seen = [i for _, epochs, _ in two for batch in epochs[str(epoch)] for i in batch]
        assert sorted(seen) == list(range(GRAPH.num_nodes()))
        assert (seen == sorted(seen)) == (epoch < SWITCH)
    for after in (SWITCH - 3, SWITCH - 1):  # what was observed behind the last epoch is not agreed on yet
        share = gnnsys.split(GRAPH, None, type=NODE, placement=Placement(0, (0,), ()))
        one = nodes("adaptive", input_nodes=share, num_threads=0)
        one.load_state_dicts([states[str(after)] for _, _, states in two])
        own = epochs_of(one, SWITCH + 1, flat)
        assert one.shuffled_from == SWITCH
        assert same(own[-1], epochs_of(nodes(True, num_threads=0), SWITCH + 1)[SWITCH])
    for epoch in (SWITCH - 1, SWITCH):  # in mid-epoch: one rank goes on with what two have left, in the order of then
        one.load_state_dicts([states[f"{epoch}, batch 2"] for _, _, states in two])
        rest = [int(i) for batch in one for i in one.input_ids(batch.input_id)]
        assert rest == [i for _, epochs, _ in two for batch in epochs[str(epoch)][2:] for i in batch]
    one.load_state_dicts([states[str(SWITCH - 3)] for _, _, states in two])
    list(one)
    one.observe(0.5)
    ended = run_ranks(RANKS, 2, json.dumps([one.state_dict()]), SWITCH + 1, "all")  # whose mean is what one has said
    again = [json.loads(rank.stdout.splitlines()[-1]) for rank in ended]
    assert [start for start, _, _ in again] == [SWITCH, SWITCH]
    for (_, epochs, _), (_, unbroken, _) in zip(again, two, strict=True):
        assert epochs == {epoch: seeds for epoch, seeds in unbroken.items() if int(epoch) >= SWITCH - 1}
    assert all(states[str(SWITCH)]["shuffling"]["scores"] == [0.5] * SWITCH for _, _, states in again)


def test_a_rank_whose_peers_do_not_begin_the_epoch_is_told_what_they_should_have_done():
    alone, _ = run_ranks(RANKS, 2, "[]", SWITCH + 1, "gone", check=False)
    assert alone.returncode != 0
    assert "rank 0 has begun epoch 0, and other ranks have not come to agree whether to shuffle it" in alone.stderr


@pytest.mark.parametrize("shuffle", ["other", "", None, 2])
def test_what_is_no_shuffle_is_refused(shuffle):
    with pytest.raises(ValueError, match='shuffle must be True, False or "adaptive", got '):
        nodes(shuffle)


@pytest.mark.parametrize("score", ["0.5", None, True, [0.5, 0.6], torch.tensor([0.5, 0.6]), {}, 10**400])
def test_a_score_that_is_no_number_is_refused(score):
    with pytest.raises(ValueError, match="observe takes one number, a validation score of which more is better, got"):
        nodes("adaptive", num_threads=0).observe(score)


@pytest.mark.parametrize("shuffle", [True, False])
def test_scores_are_for_adaptive_loaders_alone(shuffle):
    loader = nodes(shuffle, num_threads=0)
    with pytest.raises(ValueError, match=f'observe is for loaders with shuffle="adaptive", not shuffle={shuffle}'):
        loader.observe(0.5)
    assert loader.shuffled_from == (0 if shuffle else None) and "shuffling" not in loader.state_dict()


def test_states_that_do_not_go_together_are_refused():
    adaptive = nodes("adaptive", num_threads=0)
    with pytest.raises(ValueError, match="shuffle=True, here it is adaptive"):
        adaptive.load_state_dict(nodes(True).state_dict())
    state = adaptive.state_dict()
    with pytest.raises(ValueError, match="not the state of a loader: when it shuffles is"):
        adaptive.load_state_dict({**state, "shuffling": {"scores": ["?"], "observed": None, "start": None}})
    two = [{**state, "rank": rank, "world_size": 2} for rank in range(2)]
    two[1]["shuffling"] = {**state["shuffling"], "scores": [0.5]}
    with pytest.raises(ValueError, match="not of one moment: ranks have seen different scores"):
        adaptive.load_state_dicts(two)


def test_a_graph_of_two_nodes_is_not_too_small():
    loader = NeighborLoader(sbm(20), [2], input_nodes=[3, 4], shuffle="adaptive", num_threads=0)
    assert all(len(epoch) == 2 for epoch in epochs_of(loader, EPOCHS, flat)) and loader.shuffled_from == SWITCH
