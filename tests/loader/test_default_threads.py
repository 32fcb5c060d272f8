"""How many threads a loader has where nobody says."""

from __future__ import annotations

import itertools

import pytest
import torch

from gnnsys import NeighborLoader
from gnnsys.graph import sbm
from gnnsys.loader import LoadingWork, default_threads
from gnnsys.loader.default_threads import choose_num_threads
from gnnsys.pipeline import Stage

BEFORE = {  # threads of the versions that did not look at the machine
    LoadingWork.HOST: 1,
    LoadingWork.IN_ORDER: 1,
    LoadingWork.DEVICE: 1,
    LoadingWork.BUS: 2,
    LoadingWork.SUMS: 3,
    LoadingWork.MACHINES: 3,
    LoadingWork.DEVICE_MACHINES: 3,
}


def chosen(work: LoadingWork, cores: int, ranks: int = 1, training: int = 1) -> int:
    return choose_num_threads(work, num_cores=cores, num_local_ranks=ranks, num_training_threads=training)


def test_on_any_machine_there_are_never_fewer_threads_than_without_looking_at_it():
    for work, cores, ranks, training in itertools.product(LoadingWork, range(1, 70), (1, 2, 8, 100), (1, 2, 64)):
        assert BEFORE[work] <= chosen(work, cores, ranks, training) <= 6


def test_threads_and_training_fit_the_cores_of_a_rank_where_more_than_the_fewest_are_taken():
    for work, cores, ranks, training in itertools.product(LoadingWork, range(1, 70), (1, 2, 8, 100), (1, 2, 64)):
        threads = chosen(work, cores, ranks, training)
        assert threads == BEFORE[work] or (threads + training) * ranks <= cores


def test_more_cores_are_never_fewer_threads_and_more_ranks_are_never_more():
    for work, training in itertools.product(LoadingWork, (1, 4)):
        by_cores = [chosen(work, cores, 2, training) for cores in range(1, 70)]
        by_ranks = [chosen(work, 64, ranks, training) for ranks in range(1, 70)]
        assert by_cores == sorted(by_cores) and by_ranks == sorted(by_ranks, reverse=True)


def test_six_host_threads_feed_a_gpu_on_a_large_machine_and_one_beside_training_on_two_cores():
    assert chosen(LoadingWork.HOST, cores=16) == 6
    assert chosen(LoadingWork.HOST, cores=16, ranks=4) == 3
    assert chosen(LoadingWork.HOST, cores=2, training=2) == chosen(LoadingWork.HOST, cores=2) == 1
    assert chosen(LoadingWork.HOST, cores=16, training=16) == 1  # torch's own threads have them all


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(default_threads, "num_usable_cores", lambda: 16)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    yield
    torch.set_num_threads(threads)  # what host products gave back was 4


def test_a_loader_says_what_was_chosen(sixteen_cores, monkeypatch):
    graph = sbm(200)
    loader = NeighborLoader(graph, [3], batch_size=50, device="cpu")
    assert repr(loader) == ("NeighborLoader(200 inputs, 4 batches per epoch, 6 loading threads, batches on cpu)")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "4 loading threads," in repr(NeighborLoader(graph, [3], batch_size=50, device="cpu"))
    assert "1 loading thread," in repr(NeighborLoader(graph, [3], batch_size=50, num_threads=1))
    assert "no loading threads," in repr(NeighborLoader(graph, [3], batch_size=50, num_threads=0))


def test_what_the_user_runs_in_loading_threads_sees_batches_in_order(sixteen_cores):
    graph, seen = sbm(400), []

    def note(batch):
        seen.append(int(batch.input_id[0]))
        return batch

    for options in ({"transform": note}, {"stages": [Stage("note", note, threads=0, after="compact")]}):
        loader = NeighborLoader(graph, [5], batch_size=10, device="cpu", **options)
        assert loader.num_threads == 1
        seen.clear()
        taken = [int(batch.input_id[0]) for batch in loader]
        assert seen[: len(taken)] == taken == list(range(0, 400, 10))
        loader.close()


def test_the_default_makes_the_batches_of_one_thread(sixteen_cores):
    graph = sbm(300)
    many, one = (NeighborLoader(graph, [4, 3], batch_size=20, shuffle=True, num_threads=n) for n in (None, 1))
    assert many.num_threads == 6
    for ours, theirs in zip(many, one, strict=True):
        assert torch.equal(ours.n_id, theirs.n_id) and torch.equal(ours.edge_index, theirs.edge_index)
        assert torch.equal(ours.x, theirs.x)


def test_the_faces_of_pyg_and_dgl_take_the_same_default(sixteen_cores):
    dgl = pytest.importorskip("dgl")
    geometric = pytest.importorskip("torch_geometric.data")
    from gnnsys import dgl as gdgl
    from gnnsys import pyg

    edges = torch.randint(0, 100, (2, 400))
    data = geometric.Data(x=torch.rand(100, 4), edge_index=edges, num_nodes=100)
    loader = pyg.NeighborLoader(data, [3], batch_size=10)
    assert loader.own_threads == 6 and len(list(loader)) == 10
    sampler = gdgl.NeighborSampler([3])
    blocks = gdgl.DataLoader(dgl.graph((edges[0], edges[1]), num_nodes=100), torch.arange(100), sampler, batch_size=10)
    assert blocks._loader.num_threads == 6 and len(list(blocks)) == 10
