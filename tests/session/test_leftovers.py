"""A session that was closed leaves nothing: no descriptor, no mapped table, no thread, no shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

import gnnsys
from gnnsys.partition import write_parts
from gnnsys.store import DistEmbedding, SparseAdam, Store
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.store.cluster import alone, cluster
from tests.support.processes import await_true, shared_memory


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    graph = homogeneous(300, 1200)
    path = tmp_path_factory.mktemp("leftovers") / "parts"
    write_parts(graph, random_assignment(graph, 4, 2), path)
    return path


def leftovers() -> dict[str, int]:
    """What this process has, by kind. Maps of a graph's files, which whoever keeps the graph may read, are "files"."""
    gc.collect()
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            descriptors.append(os.readlink(f"/proc/self/fd/{number}"))
    with open("/proc/self/maps") as maps:
        rows = sum("gnnsys-rows" in line for line in maps)
    is_file = [name.endswith(".npy") for name in descriptors]
    return {
        "files": sum(is_file),
        "descriptors": len(descriptors) - sum(is_file),
        "mapped tables": rows,
        "threads": threading.active_count(),
        "shared memory": len(shared_memory()),
    }


def train(store: Store, name: str) -> DistEmbedding:
    embedding = DistEmbedding(store, 60, 4, name)
    optimizer = SparseAdam([embedding])
    for _ in range(2):
        embedding(torch.arange(0, 60, 7)).square().sum().backward()
        optimizer.step()
    return embedding


def check_flat(run: Callable[[], object], times: int = 10, *, but: str = "") -> dict[str, int]:
    """Runs something so many times, and compares with what there was after the first, which loads and warms things."""
    run()
    first = leftovers()
    for _ in range(times):
        run()
    await_true(
        lambda: all(now <= first[kind] for kind, now in leftovers().items() if kind != but),
        f"{leftovers()}, to be {first} again,",
    )
    return first


def test_ten_sessions_with_embeddings_leave_nothing_whoever_keeps_them(parts, tmp_path):
    kept = []

    def run() -> None:
        with gnnsys.init(process_group=False) as session:
            graph = session.open(parts)
            embedding = train(graph.store, "emb")
            graph.store.save("emb", tmp_path, overwrite=True)
            graph.store.load("emb", tmp_path)
            saver = gnnsys.resume(tmp_path / f"checkpoints{len(kept)}", emb=embedding, session=session)
            saver.save()
        kept.append((session, graph, embedding))

    first = check_flat(run, but="files")
    session, graph, embedding = kept[-1]
    assert session.is_closed
    with pytest.raises(ValueError, match="table 'emb' went with the session it was made in, which is closed"):
        embedding(torch.arange(3))
    with pytest.raises(ValueError, match="which is closed"):
        DistEmbedding(graph, 60, 4, "new")
    with pytest.raises(ValueError, match=r"is closed|does not exist"):
        graph.store.save("emb", tmp_path / "late")
    assert graph.node_data["node"]["x"][torch.arange(5)].shape[0] == 5, "files are still read"
    del kept[1:], session, graph, embedding
    await_true(lambda: leftovers()["files"] <= first["files"], "files of graphs that nobody keeps to close")


def test_ten_clusters_of_servers_and_clients_leave_nothing(tmp_path):
    def run() -> None:
        with cluster([0, 1], 2) as c:
            c.on_ranks(lambda store: train(store, "emb"))
            c.stores[0].save("emb", tmp_path, overwrite=True)
            for store in c.stores:
                store.load("emb", tmp_path)
                store.close()

    check_flat(run, times=5)


def test_rows_that_nobody_drops_are_freed_with_their_last_user():
    def run() -> None:
        with alone(2) as store:  # closed, and not
            train(store, "emb")
        left = Store(machine_of_part=[0, 0], local=gnnsys.store.Shard(0))
        train(left, "emb")
        left.create("other", 10)
        left.drop("other")

    check_flat(run)
