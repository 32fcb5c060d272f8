"""Every message of a batch names the batch, counted across epochs, its kind, hop and loader.

The oracle of the number is the order of things: without threads all that the servers are asked between two batches is
asked for the second one. The oracle of the hop is the key of the draws, which are what they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnsys.comm import Kind, Request, RequestContext, current_context, use_context
from gnnsys.comm.urgency import user_of
from gnnsys.graph import EDGE, NODE, edge_type_key
from gnnsys.loader import LinkNeighborLoader, NeighborLoader, PipelineOptions
from gnnsys.ops import stream_key
from gnnsys.sampling import DistGraph, Sample, sample_from_blocks, sample_neighbors, to_block
from gnnsys.sampling.hop_message import PartsRequest
from gnnsys.seeds import split
from gnnsys.store import DeviceCache, DistEmbedding
from tests.sampling.machines import homogeneous, machines

SEED = 5
FANOUTS = [4, 3]
NUM_EPOCHS = 2
BATCH_SIZE = 16
PLAIN = PipelineOptions(share=False, keep=0)  # every batch asks for all its rows


def own_sampler(graph: Any, seeds: Any, key: Any) -> Sample:
    """A user's: it knows nothing of numbers across epochs."""
    block, nodes = to_block(sample_neighbors(graph, seeds, 3, key=key), seeds)
    return sample_from_blocks(graph, [block], nodes, seeds)


def links(graph: DistGraph, **options: Any) -> LinkNeighborLoader:
    share = split(graph, graph.from_global(range(0, graph.num_edges(), 18), EDGE))  # ends are looked up batch by batch
    return LinkNeighborLoader(
        graph, FANOUTS, edge_label_index=share, batch_size=BATCH_SIZE, seed=SEED,
        neg_sampling="binary", **options,
    )  # fmt: skip


def nodes(graph: DistGraph, *, num_neighbors: Any = FANOUTS, **options: Any) -> NeighborLoader:
    ids = graph.from_global(range(60))
    return NeighborLoader(
        graph, num_neighbors, input_nodes=ids, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, **options
    )


CASES = {
    "nodes": (nodes, {}, {Kind.SAMPLE, Kind.PULL}),
    "induced": (nodes, {"subgraph_type": "induced"}, {Kind.SAMPLE, Kind.PULL, Kind.INDUCED}),
    "bidirectional": (nodes, {"subgraph_type": "bidirectional"}, {Kind.SAMPLE, Kind.PULL, Kind.EDGE_ENDS}),
    "in time": (nodes, {"time_attr": "t"}, {Kind.SAMPLE, Kind.PULL}),
    "a user's sampler": (nodes, {"num_neighbors": None, "sampler": own_sampler}, {Kind.SAMPLE, Kind.PULL}),
    "links": (links, {}, {Kind.SAMPLE, Kind.PULL, Kind.FIND_EDGES, Kind.EDGE_ENDS}),
}


@contextmanager
def graph_and_messages(folder: Path) -> Iterator[tuple[DistGraph, list[Request]]]:
    seen: list[Request] = []
    with machines(homogeneous(), folder, 2, seen=seen) as graphs:
        yield graphs[0], seen


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DistGraph, list[Request]]]:
    with graph_and_messages(tmp_path_factory.mktemp("parts") / "p") as found:
        yield found


def content(request: Request) -> tuple[Any, ...]:
    """What was asked, and what the header says of whose it is."""
    asked = tuple(rows.contiguous().view(torch.uint8).numpy().tobytes() for rows in request.arrays)
    return (request.kind, request.batch, request.layer, request.loader, asked)


@pytest.mark.parametrize("name", CASES)
def test_every_message_of_two_epochs_names_its_batch_kind_hop_and_loader(name: str, parted: Any) -> None:
    graph, seen = parted
    make, options, kinds = CASES[name]
    loader = make(graph, num_threads=0, pipeline=PLAIN, **options)
    seen.clear()
    number, asked = 0, []
    for _ in range(NUM_EPOCHS):
        for _ in loader:
            # What a loader of an earlier test had asked for ahead may still arrive.
            of_batch = [request for request in seen if request.loader == loader._context.loader]
            asked += of_batch
            assert {request.batch for request in of_batch} == {number}
            assert {request.loader for request in seen if request.batch == number} == {loader._context.loader}
            seen.clear()
            number += 1
        assert not any(request.loader == loader._context.loader for request in seen), "nothing between two epochs"
    assert number == NUM_EPOCHS * len(loader) > 4
    assert {Kind(request.kind) for request in asked} == kinds
    check_hops(asked, len(loader), induced=options.get("subgraph_type") == "induced")
    loader.close()
    # Threads that load ahead, into the third epoch, say the same.
    threaded = make(graph, num_threads=2, prefetch=1, pipeline=PLAIN, **options)
    for _ in range(NUM_EPOCHS):
        list(threaded)
    threaded.close()
    ours = Counter((*said[:3], said[4]) for said in map(content, asked))
    said_by = [content(request) for request in seen if request.loader == threaded._context.loader]
    theirs = Counter((*said[:3], said[4]) for said in said_by if said[1] < number)
    assert ours == theirs
    assert threaded._context.loader not in (0, loader._context.loader)


def check_hops(asked: list[Request], num_batches: int, *, induced: bool) -> None:
    """The draws of a SAMPLE are keyed by (seed, epoch, batch of the epoch, hop), which tell number and hop."""
    num_hops = len(FANOUTS)
    keys = {
        stream_key(SEED, epoch, batch, hop, edge_type_key(EDGE)): (epoch * num_batches + batch, hop)
        for epoch in range(NUM_EPOCHS) for batch in range(num_batches) for hop in range(num_hops)
    }  # fmt: skip
    hops = set()
    for request in asked:
        if request.kind != Kind.SAMPLE:
            assert request.layer == -1, "it is for the whole batch"
            continue
        (draw,) = PartsRequest.from_arrays(request.arrays).draws
        if induced and draw.fanout == -1:
            assert request.layer == -1
            continue
        assert (request.batch, request.layer) == keys[draw.key]
        hops.add(request.layer)
    assert hops and hops <= set(range(num_hops))


def test_what_is_asked_while_a_batch_is_used_is_of_that_batch(tmp_path: Path) -> None:
    """Rows that train are read in the forward pass, and cached ones when the cache has them not."""
    with graph_and_messages(tmp_path / "p") as (graph, seen):
        embedding = DistEmbedding(graph, graph.num_nodes(), 3, "users", init=0.0)
        graph.set_node_data("x", DeviceCache(graph.node_data[NODE]["x"], torch.arange(0, 40), "cpu"))
        train, evaluate = (nodes(graph, num_threads=0, fetch=["x"], pipeline=PLAIN) for _ in range(2))
        seen.clear()
        for epoch in range(NUM_EPOCHS):
            for number, batch in enumerate(train, epoch * len(train)):
                assert {(r.batch, r.loader) for r in seen} == {(number, train._context.loader)}
                assert Kind.PULL in {r.kind for r in seen}, "the cache has not all rows"
                seen.clear()
                embedding(batch.n_id)
                assert {r.batch for r in seen} == {number} and Kind.PULL in {r.kind for r in seen}
                for other in evaluate:
                    embedding(other.n_id)
                seen.clear()
                embedding(batch.n_id)  # behind another loader's epoch
                assert {(r.kind, r.batch, r.loader) for r in seen} == {(Kind.PULL, number, train._context.loader)}
                seen.clear()
        embedding(batch.n_id)
        assert {r.batch for r in seen} == {-1}, "the loop is over"
        train((0, 1))
        assert {r.batch for r in seen} == {-1}, "a batch outside epochs has no number"
        assert current_context() == RequestContext()


def loader_of(face: str, graph: DistGraph) -> Any:
    """One that has no threads, or stops them with each epoch: none of its messages comes later."""
    if face == "pyg":
        pytest.importorskip("torch_geometric")
        from gnnsys.pyg import NeighborLoader as PyGLoader

        return PyGLoader(graph, FANOUTS, input_nodes=graph.from_global(range(60)), batch_size=BATCH_SIZE, seed=SEED)
    return nodes(graph, num_threads=0, pipeline=PLAIN)


def context_of(loader: Any) -> RequestContext:
    return loader._context if isinstance(loader, NeighborLoader) else loader.context


def said(seen: list[Request], *loaders: int) -> set[tuple[int, int]]:
    """Loader and batch of messages of these loaders, or of none; those of earlier tests may still arrive."""
    return {(request.loader, request.batch) for request in seen if request.loader in (0, *loaders)}


@pytest.mark.parametrize("inner_face", ["native", "pyg"])
def test_a_loader_inside_another_ones_loop_names_itself_and_the_loop_goes_on_with_its_own(
    inner_face: str, parted: Any
) -> None:
    graph, seen = parted
    outer, inner = nodes(graph, num_threads=0, pipeline=PLAIN), loader_of(inner_face, graph)
    own, others = outer._context.loader, context_of(inner).loader
    asked = torch.arange(graph.num_nodes())
    for number, _ in enumerate(outer):
        seen.clear()
        first = number * len(inner)  # an epoch of the inner loader per batch of the outer one
        for at, _ in enumerate(inner, first):
            assert current_context() == context_of(inner).at(at)
            sample_neighbors(graph, asked, 2)
        assert said(seen, own, others) == {(others, at) for at in range(first, first + len(inner))}
        seen.clear()
        inner([0, 1])
        assert said(seen, own, others) == {(others, -1)}, (
            "a batch outside epochs has no number, not that of the loop around it"
        )
        seen.clear()
        sample_neighbors(graph, asked, 2)
        assert said(seen, own, others) == {(own, number)}
    assert current_context() == RequestContext()


def test_a_loader_inside_a_stage_of_another_leaves_the_stages_batch_as_it_was(parted: Any) -> None:
    graph, seen = parted
    inner = nodes(graph, num_threads=0, pipeline=PLAIN)
    told = []

    def stage(batch: Any) -> Any:
        around = current_context()
        for _ in inner:
            break
        before = len(seen)
        sample_neighbors(graph, torch.arange(graph.num_nodes()), 2)
        told.append((around, current_context(), said(seen[before:], inner._context.loader, around.loader)))
        return batch

    outer = nodes(graph, num_threads=0, pipeline=PLAIN, transform=stage)
    for number, _ in enumerate(outer):
        around, after, asked = told[number]
        assert around == after == outer._context.at(number)
        assert asked == {(outer._context.loader, number)}


def test_a_loop_inside_another_that_is_left_early_gives_the_thread_back(parted: Any) -> None:
    graph, _ = parted
    outer, inner = (nodes(graph, num_threads=0, pipeline=PLAIN) for _ in range(2))
    for number, _ in enumerate(outer):
        for _ in inner:
            break
        assert current_context() == outer._context.at(number)


def test_loops_that_end_in_any_order_leave_nothing_behind(parted: Any) -> None:
    graph, _ = parted
    for _ in range(2):
        first, second = (nodes(graph, num_threads=0, pipeline=PLAIN) for _ in range(2))
        for number, _ in enumerate(zip(first, second, strict=True)):
            assert current_context() == second._context.at(number)
        assert current_context() == RequestContext()
        with use_context(RequestContext(priority=4)):
            outer, inner = iter(first), iter(second)
            next(outer), next(inner)
            outer.close()  # before the loop that began in it
            assert current_context().loader == second._context.loader
            inner.close()
            assert current_context() == RequestContext(priority=4)
        assert current_context() == RequestContext()


def test_priority_and_path_of_a_loader_are_in_its_messages_and_those_of_a_context_in_all(tmp_path: Path) -> None:
    with graph_and_messages(tmp_path / "p") as (graph, seen):
        loader = nodes(graph, num_threads=2, pipeline=PipelineOptions(priority=-3, path=9))
        seen.clear()
        list(loader)
        loader.close()
        assert {(user_of(r.priority), r.path) for r in seen} == {(-3, 9)}
        seen.clear()
        with use_context(RequestContext(batch=4, priority=2, path=1)):
            sample_neighbors(graph, torch.arange(graph.num_nodes()), 3)
        own = [r for r in seen if r.path != 9]  # what the loader had asked ahead may be answered only now
        assert {(r.kind, r.batch, user_of(r.priority), r.path) for r in own} == {(Kind.SAMPLE, 4, 2, 1)}
        seen.clear()
        assert graph.client is not None
        graph.client.context = RequestContext(priority=7, path=8)
        sample_neighbors(graph, torch.arange(graph.num_nodes()), 3)
        assert {(r.batch, user_of(r.priority), r.path) for r in seen if r.path != 9} == {(-1, 7, 8)}


@pytest.mark.parametrize("field", [{"priority": 1 << 31}, {"path": -1}, {"loader": 1 << 32}, {"batch": -2}])
def test_what_the_header_has_no_room_for_is_refused(field: dict[str, int]) -> None:
    (name,) = field
    with pytest.raises(ValueError, match=name):
        RequestContext(**field)


def test_messages_of_pygs_loaders_name_their_batch_too(parted: Any) -> None:
    pytest.importorskip("torch_geometric")
    from gnnsys.pyg import NeighborLoader as PyGLoader

    graph, seen = parted
    ids = graph.from_global(range(60))
    loaders = [PyGLoader(graph, FANOUTS, input_nodes=ids, batch_size=BATCH_SIZE, seed=SEED) for _ in range(2)]
    for loader in loaders:
        seen.clear()
        for _ in range(NUM_EPOCHS):
            list(loader)
        numbers = set(range(NUM_EPOCHS * len(loader)))
        assert {request.batch for request in seen if request.kind == Kind.SAMPLE} == numbers
        assert {request.batch for request in seen if request.kind == Kind.PULL} <= numbers
        assert {request.loader for request in seen} == {loader.context.loader}
        check_hops(seen, len(loader), induced=False)
    assert loaders[0].context.loader != loaders[1].context.loader
    for _ in loaders[0]:
        assert current_context().batch == NUM_EPOCHS * len(loaders[0])
        break  # an epoch that is left early
    assert current_context() == RequestContext()
