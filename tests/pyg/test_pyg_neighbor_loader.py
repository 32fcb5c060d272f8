"""gnnsys.pyg.NeighborLoader against PyG's contract: attributes, order, dtypes, workers, randomness, state."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import time

import pytest
import torch
from torch import Tensor

tg = pytest.importorskip("torch_geometric")

from torch_geometric.data import Data  # noqa: E402
from torch_geometric.utils import k_hop_subgraph, subgraph, to_undirected  # noqa: E402

import gnnsys  # noqa: E402
from gnnsys.comm import BatchLoop, RequestContext, current_context  # noqa: E402
from gnnsys.pyg import LinkNeighborLoader, NeighborLoader, NeighborSampler  # noqa: E402
from tests.support.grid import every_value  # noqa: E402
from tests.support.processes import run_code  # noqa: E402

NUM_NODES, NUM_EDGES = 200, 1600


@pytest.fixture
def data() -> Data:
    stream = torch.Generator().manual_seed(0)
    nodes = torch.arange(NUM_NODES)
    return Data(
        x=nodes[:, None].float().expand(-1, 600).contiguous(),
        y=nodes.clone(),
        train_mask=nodes % 3 == 0,
        edge_index=torch.randint(NUM_NODES, (2, NUM_EDGES), generator=stream),
        edge_attr=torch.arange(NUM_EDGES)[:, None].float(),
        edge_weight=torch.rand(NUM_EDGES, generator=stream),
        name="graph",
        scale=0.5,
    )


def check(batch: Data, data: Data) -> None:
    assert torch.equal(batch.n_id[batch.edge_index.long()].long(), data.edge_index[:, batch.e_id].long())
    for name in ("x", "y", "train_mask"):
        assert torch.equal(batch[name], data[name][batch.n_id.long()])
    for name in ("edge_attr", "edge_weight"):
        assert torch.equal(batch[name], data[name][batch.e_id])
    assert batch.name == "graph" and batch.scale == 0.5


def same(a: Data, b: Data) -> bool:
    first, second = a.to_dict(), b.to_dict()
    return first.keys() == second.keys() and all(
        torch.equal(v, second[k]) if isinstance(v, Tensor) else v == second[k] for k, v in first.items()
    )


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _know_others() -> None:
    """Threads that other tests of this process have left are none of a loader's here."""
    _others.clear()
    _others.update(threading.enumerate())


def pipeline_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gnnsys-") and t not in _others]


def assert_no_threads_soon() -> None:
    """Without a garbage collection; a step that is under way may hold its loader for as long as it takes."""
    gc.disable()
    try:
        deadline = time.monotonic() + 120
        while pipeline_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pipeline_threads() == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(NeighborLoader, tg.loader.NeighborLoader), (LinkNeighborLoader, tg.loader.LinkNeighborLoader)],
)
def test_signatures_are_pygs_with_keyword_only_additions(ours: type, theirs: type) -> None:
    expected = inspect.signature(theirs.__init__).parameters
    got = inspect.signature(ours.__init__).parameters
    added = {"seed", "exclude_supervision", "fetch", "wire_dtype", "edge_label_weight"}
    assert [n for n in got if n not in added] == list(expected)
    assert all(got[n].default == expected[n].default and got[n].kind == expected[n].kind for n in expected)
    assert all(got[n].kind is inspect.Parameter.KEYWORD_ONLY for n in added & set(got))
    assert issubclass(ours, theirs) and issubclass(ours, torch.utils.data.DataLoader)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_hold_what_pygs_hold(data: Data, num_workers: int) -> None:
    loader = NeighborLoader(data, [4, 3], batch_size=32, shuffle=True, num_workers=num_workers)
    assert str(loader) == "NeighborLoader()"
    assert len(loader) == 7
    seeds = []
    for batch in loader:
        assert type(batch) is Data
        check(batch, data)
        assert type(batch.edge_index) is Tensor and batch.edge_index.dtype == torch.int64
        assert set(batch.keys()) == set(data.keys()) | {
            "n_id", "e_id", "input_id", "batch_size", "num_sampled_nodes", "num_sampled_edges",
        }  # fmt: skip
        assert isinstance(batch.batch_size, int) and batch.batch_size == batch.input_id.numel()
        assert isinstance(batch.num_sampled_nodes, list) and len(batch.num_sampled_nodes) == 3
        assert len(batch.num_sampled_edges) == 2
        assert sum(batch.num_sampled_nodes) == batch.num_nodes and sum(batch.num_sampled_edges) == batch.num_edges
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert bool((batch.edge_index[1].diff() >= 0).all())
        assert batch.e_id.unique().numel() == batch.e_id.numel()
        seeds.append(batch.input_id)
    assert torch.equal(torch.cat(seeds).sort().values, torch.arange(NUM_NODES))
    assert pipeline_threads() == []


def test_full_fanout_is_the_k_hop_subgraph(data: Data) -> None:
    batch = next(iter(NeighborLoader(data, [-1, -1], input_nodes=torch.tensor([7, 3]), batch_size=2)))
    nodes, _, _, mask = k_hop_subgraph([7, 3], 2, data.edge_index, num_nodes=NUM_NODES)
    # PyG's function keeps all edges inside the subset; ours only those that messages to the seeds pass over.
    assert torch.equal(batch.n_id.sort().values, nodes)
    inner, _, _, _ = k_hop_subgraph([7, 3], 1, data.edge_index, num_nodes=NUM_NODES)
    needed = torch.isin(data.edge_index[1], inner).nonzero().view(-1)
    assert torch.equal(batch.e_id.sort().values, needed)
    assert bool(mask[needed].all())


def test_induced_is_pygs_subgraph_and_deprecated_directed_means_it(data: Data) -> None:
    with pytest.warns(UserWarning, match="induced"):
        old = NeighborLoader(data, [3, 2], batch_size=20, directed=False, seed=1)
    new = NeighborLoader(data, [3, 2], batch_size=20, subgraph_type="induced", seed=1)
    for batch, other in zip(new, old, strict=True):
        assert same(batch, other)
        check(batch, data)
        expected, _, mask = subgraph(batch.n_id, data.edge_index, return_edge_mask=True, num_nodes=NUM_NODES)
        assert torch.equal(batch.e_id.sort().values, mask.nonzero().view(-1))
        assert expected.shape[1] == batch.num_edges
        assert "num_sampled_nodes" not in batch


def test_bidirectional_is_the_undirected_sample(data: Data) -> None:
    plain = NeighborLoader(data, [3, 2], batch_size=20, seed=1)
    both = NeighborLoader(data, [3, 2], batch_size=20, seed=1, subgraph_type="bidirectional")
    for batch, directional in zip(both, plain, strict=True):
        expected = to_undirected(directional.edge_index, num_nodes=batch.num_nodes)
        order = (batch.edge_index[0] * batch.num_nodes + batch.edge_index[1]).argsort()
        assert torch.equal(batch.edge_index[:, order], expected)
        assert bool((batch.edge_index[1].diff() >= 0).all())
        assert "num_sampled_nodes" not in batch and "num_sampled_edges" not in batch
        assert torch.equal(batch.edge_attr[:, 0], batch.e_id.float())


def test_empty_hops_are_zeros(data: Data) -> None:
    data.edge_index = torch.tensor([[0], [1]])
    data.edge_attr, data.edge_weight = torch.zeros(1, 1), torch.ones(1)
    batch = next(iter(NeighborLoader(data, [3, 3, 3], input_nodes=[1, 5], batch_size=2)))
    assert batch.num_sampled_nodes == [2, 1, 0, 0]
    assert batch.num_sampled_edges == [1, 0, 0]


def test_duplicate_seeds_keep_their_places_and_edges_stay_right(data: Data) -> None:
    batch = next(iter(NeighborLoader(data, [4, 4], input_nodes=torch.tensor([9, 9, 4, 9]), batch_size=4)))
    assert batch.n_id[:4].tolist() == [9, 9, 4, 9]
    assert batch.batch_size == 4
    check(batch, data)


def test_int32_edges_give_int32_batches(data: Data) -> None:
    data.edge_index = data.edge_index.int()
    for subgraph_type in ("directional", "bidirectional", "induced"):
        batch = next(iter(NeighborLoader(data, [3, 2], batch_size=8, subgraph_type=subgraph_type)))
        assert batch.edge_index.dtype == torch.int32 and batch.n_id.dtype == torch.int32
        assert batch.e_id.dtype == torch.int64
        if subgraph_type != "bidirectional":
            check(batch, data)


def test_sorted_edges_need_no_permutation_and_a_false_promise_is_refused(data: Data) -> None:
    with pytest.raises(ValueError, match="is_sorted"):
        NeighborLoader(data, [3], is_sorted=True)
    data = data.sort(sort_by_row=False)
    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=30, is_sorted=True)))
    check(batch, data)


def test_input_id_is_a_position_for_indices_and_a_node_for_masks(data: Data) -> None:
    by_mask = next(iter(NeighborLoader(data, [2], input_nodes=data.train_mask, batch_size=5)))
    assert by_mask.input_id.tolist() == by_mask.n_id[:5].tolist() == [0, 3, 6, 9, 12]
    by_index = next(iter(NeighborLoader(data, [2], input_nodes=[50, 40, 30], batch_size=5)))
    assert by_index.input_id.tolist() == [0, 1, 2] and by_index.n_id[:3].tolist() == [50, 40, 30]
    own = next(iter(NeighborLoader(data, [2], input_nodes=[50, 40], input_id=torch.tensor([8, 9]), batch_size=5)))
    assert own.input_id.tolist() == [8, 9]


def test_disjoint_batches_name_their_tree(data: Data) -> None:
    for batch in NeighborLoader(data, [3, 2], batch_size=16, disjoint=True):
        check(batch, data)
        assert torch.equal(*batch.batch[batch.edge_index])
        assert torch.equal(batch.batch[: batch.batch_size], torch.arange(batch.batch_size))


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("level", ["node", "edge"])
def test_temporal_batches_look_only_back(data: Data, strategy: str, level: str) -> None:
    stream = torch.Generator().manual_seed(1)
    data.time = torch.randint(100, (NUM_NODES if level == "node" else NUM_EDGES,), generator=stream)
    seed_time = torch.randint(100, (NUM_NODES,), generator=stream)
    options = {"time_attr": "time", "temporal_strategy": strategy, "batch_size": 25}
    for batch in NeighborLoader(data, [5, 3], input_time=seed_time, **options):
        check(batch, data)
        assert torch.equal(batch.seed_time, seed_time[batch.input_id])
        if level == "node":
            assert bool((batch.time[25:] <= batch.seed_time[batch.batch[25:]]).all())
        else:
            assert bool((batch.time <= batch.seed_time[batch.batch[batch.edge_index[1]]]).all())
    if level == "node":
        for batch in NeighborLoader(data, [5, 3], **options):
            assert bool((batch.time <= batch.time[batch.batch]).all())
            assert "seed_time" not in batch
    else:
        with pytest.raises(ValueError, match="input_time"):
            next(iter(NeighborLoader(data, [5], **options)))


def test_the_last_strategy_takes_the_most_recent(data: Data) -> None:
    data.time = torch.arange(NUM_EDGES)
    options = {"time_attr": "time", "temporal_strategy": "last", "input_time": torch.full((NUM_NODES,), 1000)}
    batch = next(iter(NeighborLoader(data, [2], batch_size=NUM_NODES, **options)))
    for node in range(NUM_NODES):
        candidates = (data.edge_index[1, :1001] == node).nonzero().view(-1)
        got = batch.e_id[batch.edge_index[1] == node]
        assert torch.equal(got.sort().values, candidates[-2:])


def test_weights_decide(data: Data) -> None:
    data.edge_weight = (torch.arange(NUM_EDGES) % 4 == 0).float()
    for batch in NeighborLoader(data, [3, 3], batch_size=50, weight_attr="edge_weight"):
        check(batch, data)
        assert bool((batch.edge_weight == 1).all()) and batch.num_edges > 0


def test_replacement_fills_the_fanout(data: Data) -> None:
    batch = next(iter(NeighborLoader(data, [20], batch_size=NUM_NODES, replace=True)))
    degree = torch.bincount(data.edge_index[1], minlength=NUM_NODES)
    got = torch.bincount(batch.edge_index[1], minlength=NUM_NODES)
    assert torch.equal(got, torch.where(degree > 0, 20, 0))
    check(batch, data)


# -- randomness and state --------------------------------------------------------------------------------------------


def epoch(loader: NeighborLoader) -> list[Data]:
    return list(loader)


def test_the_order_of_seeds_is_torchs_and_manual_seed_repeats_an_epoch(data: Data) -> None:
    loader = NeighborLoader(data, [3, 2], batch_size=32, shuffle=True)
    torch.manual_seed(12)
    first, second = epoch(loader), epoch(loader)
    torch.manual_seed(12)
    again = epoch(loader)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].input_id, second[0].input_id)
    torch.manual_seed(12)
    stock = torch.utils.data.DataLoader(range(NUM_NODES), batch_size=32, shuffle=True)
    assert all(torch.equal(a.input_id, b) for a, b in zip(first, stock, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_threads_do_not_change_an_epoch_nor_disturb_torchs_generator(data: Data, num_workers: int) -> None:
    torch.manual_seed(3)
    expected = epoch(NeighborLoader(data, [3, 2], batch_size=16, shuffle=True))
    after = torch.rand(4)
    torch.manual_seed(3)
    got = epoch(NeighborLoader(data, [3, 2], batch_size=16, shuffle=True, num_workers=num_workers))
    assert torch.equal(torch.rand(4), after)
    assert len(got) == len(expected) and all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_a_seed_fixes_neighbours_but_not_the_order(data: Data) -> None:
    def neighbours(order_seed: int, fixed: int | None) -> list[Tensor]:
        torch.manual_seed(order_seed)
        return [b.e_id for b in NeighborLoader(data, [3], batch_size=64, seed=fixed)]

    assert all(torch.equal(a, b) for a, b in zip(neighbours(0, 5), neighbours(1, 5), strict=True))
    assert not torch.equal(neighbours(0, None)[0], neighbours(1, None)[0])
    loader = NeighborLoader(data, [3], batch_size=64, seed=5)
    assert not torch.equal(epoch(loader)[0].e_id, epoch(loader)[0].e_id)  # epochs differ


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("seen", [1, 4, 7])
def test_a_state_saved_in_mid_epoch_resumes_at_the_next_batch(data: Data, seen: int, own_generator: bool) -> None:
    def make() -> NeighborLoader:
        generator = torch.Generator().manual_seed(4) if own_generator else None
        return NeighborLoader(data, [3, 2], batch_size=30, shuffle=True, generator=generator)

    torch.manual_seed(9)
    loader = make()
    epoch(loader)
    iterator = iter(loader)
    head = [next(iterator) for _ in range(seen)]
    state = loader.state_dict()
    tail = list(iterator)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    resumed = make()
    resumed.load_state_dict(state)
    got = epoch(resumed)
    assert len(got) == len(tail) == 7 - len(head)
    assert all(same(a, b) for a, b in zip(got, tail, strict=True))
    if not own_generator:
        assert torch.equal(torch.get_rng_state(), before)  # resuming is not a draw
    assert len(epoch(resumed)) == 7


def same_epoch(a: list[Data], b: list[Data]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def same_state(a: dict, b: dict) -> bool:
    first, second = dict(a), dict(b)
    x, y = first.pop("generator"), second.pop("generator")
    return first == second and (torch.equal(x, y) if x is not None and y is not None else x is y)


@pytest.mark.parametrize("seen", [0, 3, 7])
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_loaded_state_is_given_back(data: Data, seen: int, own_generator: bool) -> None:
    def make() -> NeighborLoader:
        return NeighborLoader(data, [3], batch_size=30, generator=torch.Generator() if own_generator else None)

    loader = make()
    epoch(loader)
    iterator = iter(loader)
    for _ in range(seen):
        next(iterator)
    middle = loader.state_dict()
    list(iterator)
    for state in (middle, loader.state_dict()):
        resumed = make()
        resumed.load_state_dict(state)
        assert same_state(resumed.state_dict(), state)
        resumed.load_state_dict(resumed.state_dict())
        assert same_state(resumed.state_dict(), state)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_new_epoch_replaces_the_state_of_an_abandoned_one(data: Data, persistent: bool) -> None:
    options = {"batch_size": 30, "shuffle": True, "num_workers": int(persistent), "seed": 2}
    loader = NeighborLoader(data, [3], persistent_workers=persistent, **options)
    abandoned = iter(loader)
    for _ in range(3):
        next(abandoned)
    iterator = iter(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    resumed = NeighborLoader(data, [3], **options)
    resumed.load_state_dict(state)
    assert same_epoch(epoch(resumed), list(iterator))
    assert loader.state_dict()["epoch"] == resumed.state_dict()["epoch"] == 2


@every_value(seen=[0, 1, 4, 7, 8], own_generator=[False, True], num_workers=[0, 2])  # 8: after the end of the epoch
def test_epochs_after_a_resumed_one_are_those_of_the_unbroken_run(
    data: Data, seen: int, own_generator: bool, num_workers: int
) -> None:
    def make() -> NeighborLoader:
        generator = torch.Generator().manual_seed(1) if own_generator else None
        options = {"batch_size": 30, "shuffle": True, "num_workers": num_workers}
        return NeighborLoader(data, [3, 2], generator=generator, **options)

    torch.manual_seed(5)
    loader = make()
    epoch(loader)
    torch.rand(3)  # the model draws too
    iterator = iter(loader)
    for _ in range(seen):
        next(iterator, None)
        torch.rand(3)
    state, random = loader.state_dict(), torch.get_rng_state()
    tail = list(iterator)
    expected = [tail] * (seen < 8) + [epoch(loader), epoch(loader)]

    torch.manual_seed(6)
    resumed = make()
    resumed.load_state_dict(state)
    if not own_generator:
        torch.set_rng_state(random)
    assert all(same_epoch(epoch(resumed), batches) for batches in expected)


# -- the DataLoader around it ----------------------------------------------------------------------------------------


def test_calling_the_loader_gives_a_batch(data: Data) -> None:
    loader = NeighborLoader(data, [3, 2], input_nodes=torch.arange(50, 100), batch_size=8)
    for index in ([0, 3], torch.tensor([0, 3])):
        batch = loader(index)
        check(batch, data)
        assert batch.n_id[:2].tolist() == [50, 53] and batch.batch_size == 2


@pytest.mark.parametrize("index", [[99], [-1], [0, 50], torch.tensor([3, -7])])
def test_calling_the_loader_with_an_index_that_is_not_there_is_refused(data: Data, index: list[int] | Tensor) -> None:
    links = torch.stack([torch.arange(50), torch.arange(50, 100)])
    nodes = NeighborLoader(data, [3, 2], input_nodes=torch.arange(50, 100))
    for loader in (nodes, LinkNeighborLoader(data, [3, 2], edge_label_index=links)):
        with pytest.raises(ValueError, match=rf"\[0, 50\).*got {int(index[-1])}$"):
            loader(index)


def test_lightning_may_make_it_again_with_a_sampler_of_its_own(data: Data) -> None:
    sampler = torch.utils.data.DistributedSampler(range(NUM_NODES), num_replicas=2, rank=1, shuffle=False)
    loader = NeighborLoader(data, [3], batch_size=10, sampler=sampler, dataset=range(3), collate_fn=len, shuffle=False)
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in loader])
    assert seeds.tolist() == list(range(1, NUM_NODES, 2))


def test_batch_samplers_decide_batches(data: Data) -> None:
    loader = NeighborLoader(data, [3], batch_sampler=[[5, 1], [2]])
    assert [b.n_id[: b.batch_size].tolist() for b in loader] == [[5, 1], [2]]
    assert len(loader) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_user_code_runs_where_the_user_expects_it(data: Data, num_workers: int) -> None:
    where: dict[str, set[str]] = {"transform": set(), "output": set()}

    def transform(batch: Data) -> Data:
        where["transform"].add(threading.current_thread().name)
        batch.mark = 1
        return batch

    def output(out):  # type: ignore[no-untyped-def]
        where["output"].add(threading.current_thread().name)
        out.row = out.row.clone()
        return out

    options = {"batch_size": 50, "transform": transform, "transform_sampler_output": output}
    for batch in NeighborLoader(data, [3], num_workers=num_workers, **options):
        check(batch, data)
        assert batch.mark == 1
    in_main = {"MainThread"}
    assert all(names == in_main if num_workers == 0 else names.isdisjoint(in_main) for names in where.values())
    for names in where.values():
        names.clear()
    for _ in NeighborLoader(data, [3], num_workers=num_workers, filter_per_worker=False, **options):
        pass
    assert all(names == in_main for names in where.values())


def test_worker_init_runs_once_per_worker_and_persistent_workers_stay(data: Data) -> None:
    started: list[int] = []
    loader = NeighborLoader(
        data, [3], batch_size=20, num_workers=2, persistent_workers=True, worker_init_fn=started.append, shuffle=True
    )
    for batch in loader:
        check(batch, data)
        break
    names = pipeline_threads()
    seeds = [b.input_id for b in loader]  # the next epoch, untouched by what was in flight
    assert torch.equal(torch.cat(seeds).sort().values, torch.arange(NUM_NODES))
    assert len(epoch(loader)) == 10
    assert sorted(started) == [0, 1]
    assert pipeline_threads() == names and len(names) == 2
    del loader, batch
    assert_no_threads_soon()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_early_break_leaves_no_threads(data: Data, persistent: bool) -> None:
    for _ in NeighborLoader(data, [3], batch_size=2, num_workers=2, persistent_workers=persistent):
        break
    assert_no_threads_soon()


def test_errors_of_user_code_surface(data: Data) -> None:
    def fail(batch: Data) -> Data:
        raise ZeroDivisionError("in transform")

    for num_workers in (0, 1):
        with pytest.raises(ZeroDivisionError, match="in transform"):
            next(iter(NeighborLoader(data, [3], transform=fail, num_workers=num_workers)))


def test_persistent_workers_survive_an_epoch_that_failed(data: Data) -> None:
    calls = iter([1, 0])

    def fail_once(batch: Data) -> Data:
        if next(calls, 0):
            raise ZeroDivisionError
        return batch

    loader = NeighborLoader(data, [3], batch_size=50, transform=fail_once, num_workers=1, persistent_workers=True)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    assert len(list(loader)) == 4


def test_a_slow_worker_is_a_timeout(data: Data) -> None:
    release = threading.Event()
    loader = NeighborLoader(data, [3], transform=lambda b: release.wait(20) and b, num_workers=1, timeout=0.05)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"timeout=0\.05"):
        next(iterator)
    release.set()


def test_pin_memory_without_an_accelerator_warns_like_torch(data: Data) -> None:
    if torch.accelerator.is_available():
        batch = next(iter(NeighborLoader(data, [3], pin_memory=True)))
        assert batch.x.is_pinned()
        return
    with pytest.warns(UserWarning, match="no accelerator"):
        assert next(iter(NeighborLoader(data, [3], pin_memory=True))).num_nodes > 0


def test_pygs_context_managers_work_on_threads(data: Data) -> None:
    loader = NeighborLoader(
        data, [3], batch_size=50, num_workers=1, transform=lambda b: b.update({"t": torch.get_num_threads()})
    )
    assert {batch.t for batch in loader} == {1}
    with loader.enable_multithreading(2):
        assert {batch.t for batch in loader} == {2}
        assert {batch.t for batch in loader._get_iterator()} == {2}  # torch's inner method; PyG's tests call it
    with loader.enable_cpu_affinity(loader_cores=[0]):
        assert len(list(loader)) == 4
    with loader.enable_memory_log():
        assert len(list(loader)) == 4
    with pytest.raises(ValueError, match="at least one worker"), NeighborLoader(data, [3]).enable_multithreading(2):
        pass


def test_a_subclass_may_bring_its_own_filter_fn_and_collate_fn(data: Data) -> None:
    class Filtered(NeighborLoader):
        def filter_fn(self, out):  # type: ignore[no-untyped-def]
            batch = super().filter_fn(out)
            batch.mine = True
            return batch

    class Collated(NeighborLoader):
        def collate_fn(self, index):  # type: ignore[no-untyped-def]
            return {"index": list(index)}

    for num_workers in (0, 1):
        assert all(batch.mine for batch in Filtered(data, [3], batch_size=64, num_workers=num_workers))
        assert next(iter(Collated(data, [3], batch_size=2, num_workers=num_workers))) == {"index": [0, 1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_nodes": [200]}, "input_nodes"),
        ({"input_nodes": [-1]}, "input_nodes"),
        ({"input_nodes": torch.empty(0, dtype=torch.int64)}, "input_nodes is empty"),
        ({"input_nodes": torch.ones(5, dtype=torch.bool)}, "mask"),
        ({"input_time": torch.zeros(200)}, "time_attr"),
        ({"input_time": torch.zeros(200), "time_attr": "y"}, "input_time must hold integers"),
        ({"time_attr": "scores"}, "scores"),
        ({"time_attr": "nope"}, "nope"),
        ({"weight_attr": "nope"}, "nope"),
        ({"time_attr": "y", "weight_attr": "edge_weight"}, "weight_attr"),
        ({"time_attr": "y", "input_time": torch.zeros(3, dtype=torch.int64)}, "input_time must have one entry"),
        ({"subgraph_type": "ego"}, "ego"),
        ({"subgraph_type": "induced", "disjoint": True}, "induced"),
        ({"temporal_strategy": "first"}, "temporal_strategy"),
        ({"num_neighbors": [-3]}, "num_neighbors"),
        ({"num_neighbors": {("a", "b", "c"): [3]}}, "num_neighbors"),
        ({"batch_size": None}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_bad_arguments_are_refused_when_the_loader_is_made(data: Data, arguments: dict, message: str) -> None:
    data.scores = torch.rand(NUM_NODES)
    with pytest.raises(ValueError, match=message):
        NeighborLoader(data, **{"num_neighbors": [3], **arguments})


def test_importing_gnnsys_does_not_import_pyg_and_its_absence_is_explained() -> None:
    script = """
import sys
import gnnsys, gnnsys.loader
assert "torch_geometric" not in sys.modules
sys.modules["torch_geometric"] = None
try:
    import gnnsys.pyg
except ImportError as error:
    assert "pip install torch-geometric" in str(error), error
else:
    raise SystemExit("gnnsys.pyg was imported without PyG")
"""
    ended = run_code(script)  # which has imported all of gnnsys by now
    assert ended.returncode == 0, ended


def test_both_faces_sample_the_same_under_the_same_seed(data: Data) -> None:
    rows = {"x": data.x, "y": data.y, "train_mask": data.train_mask}
    graph = gnnsys.Graph.from_edge_index(data.edge_index, NUM_NODES, rows)
    ours = gnnsys.NeighborLoader(graph, [4, 3], batch_size=32, seed=8)
    theirs = NeighborLoader(data, [4, 3], batch_size=32, seed=8)
    for _ in range(2):
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(a[k], b[k]) for k in ("n_id", "e_id", "edge_index", "x", "input_id"))
    options = {"neg_sampling": "binary", "batch_size": 64, "seed": 8, "exclude_supervision": True}
    for a, b in zip(
        gnnsys.LinkNeighborLoader(graph, [4], **options), LinkNeighborLoader(data, [4], **options), strict=True
    ):
        assert all(torch.equal(a[k], b[k]) for k in ("n_id", "e_id", "edge_label_index", "edge_label"))


def test_the_sampler_works_in_worker_processes_of_a_stock_loader(data: Data) -> None:
    sampler = NeighborSampler(data, [3, 2])
    stock = tg.loader.NeighborLoader(data, [3, 2], neighbor_sampler=sampler, batch_size=50, num_workers=1, timeout=60)
    for batch in stock:
        check(batch, data)


def test_the_sampler_serves_pygs_own_loaders(data: Data) -> None:
    for options in ({}, {"subgraph_type": "bidirectional"}, {"disjoint": True}):
        sampler = NeighborSampler(data, [3, 2], **options)
        stock = tg.loader.NeighborLoader(data, [3, 2], neighbor_sampler=sampler, batch_size=32)
        torch.manual_seed(0)
        for batch in stock:
            assert torch.equal(batch.x, data.x[batch.n_id])
            assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
            if not options.get("subgraph_type"):
                check(batch, data)
        ours = NeighborLoader(data, [3, 2], neighbor_sampler=sampler, batch_size=32)
        torch.manual_seed(5)
        assert set(next(iter(stock)).keys()) == set(next(iter(ours)).keys())
    assert sampler.edge_permutation is None
    sampler.num_neighbors = [1]
    assert len(next(iter(stock)).num_sampled_edges) == 1


def test_pygs_own_names_may_be_set_to_our_loaders(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a script that cannot be edited gets them. Our loaders call PyG's, under whatever name."""
    monkeypatch.setattr(tg.loader, "NeighborLoader", NeighborLoader)
    monkeypatch.setattr(tg.loader, "LinkNeighborLoader", LinkNeighborLoader)
    assert next(iter(tg.loader.NeighborLoader(data, [2], batch_size=5))).batch_size == 5
    links = next(iter(tg.loader.LinkNeighborLoader(data, [2], batch_size=5)))
    assert torch.equal(links.n_id[links.edge_label_index], data.edge_index[:, :5])


def test_a_copy_of_the_sampler_may_have_other_fanouts(data: Data) -> None:
    """Lightning's data modules make one for evaluation, and give both to PyG's NodeLoader."""
    sampler = NeighborSampler(data, [3, 2])
    every = copy.copy(sampler)
    every.num_neighbors = [-1]
    few, all_of_them = (
        next(iter(tg.loader.NodeLoader(data, each, input_nodes=data.train_mask, batch_size=20)))
        for each in (sampler, every)
    )
    assert len(few.num_sampled_edges) == 2 and int(torch.bincount(few.edge_index[1])[:20].max()) == 3
    into = torch.isin(data.edge_index[1], data.train_mask.nonzero().view(-1)[:20])
    assert torch.equal(all_of_them.e_id.sort().values, into.nonzero().view(-1))


def test_a_worker_is_prepared_in_its_own_thread_and_is_no_worker_process_to_torch(data: Data) -> None:
    mine, seen = threading.local(), []

    def begin(number: int) -> None:
        mine.number = number

    def transform(batch: Data) -> Data:
        seen.append((mine.number, torch.utils.data.get_worker_info()))
        return batch

    loader = NeighborLoader(data, [3], batch_size=10, num_workers=2, worker_init_fn=begin, transform=transform)
    assert len(list(loader)) == len(seen) == 20
    assert {number for number, _ in seen} <= {0, 1} and all(info is None for _, info in seen)


def test_a_sampler_of_the_users_own_is_used_as_it_is(data: Data) -> None:
    class Own(tg.sampler.BaseSampler):
        """Samples nothing, in an edge order of its own."""

        threads: set[str] = set()  # noqa: RUF012

        def sample_from_nodes(self, inputs):  # type: ignore[no-untyped-def]
            self.threads.add(threading.current_thread().name)
            row, col = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            out = tg.sampler.SamplerOutput(inputs.node, row, col, torch.tensor([2]))
            out.metadata = (inputs.input_id, inputs.time)
            return out

        def sample_from_edges(self, inputs, neg_sampling=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError

        @property
        def edge_permutation(self) -> Tensor:
            return torch.arange(NUM_EDGES).flip(0)

    own = Own()
    for batch in NeighborLoader(data, [3], neighbor_sampler=own, batch_size=10):
        assert batch.e_id.tolist() == [NUM_EDGES - 3]
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert torch.equal(batch.x, data.x[batch.n_id])
    assert own.threads == {"MainThread"}
    list(NeighborLoader(data, [3], neighbor_sampler=own, batch_size=10, num_workers=2))
    assert len(own.threads) > 1


def test_attributes_on_other_axes_and_numpy_are_filtered(data: Data) -> None:
    class Sideways(Data):
        def __cat_dim__(self, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
            return 1 if key == "wide" else super().__cat_dim__(key, value, *args, **kwargs)

    wide = torch.arange(2 * NUM_NODES).view(2, NUM_NODES)
    own = Sideways(x=data.x, edge_index=data.edge_index, wide=wide, z=data.y.numpy())
    batch = next(iter(NeighborLoader(own, [3, 2], batch_size=16)))
    assert type(batch) is Sideways
    assert torch.equal(batch.wide, wide[:, batch.n_id])
    assert torch.equal(torch.as_tensor(batch.z), data.y[batch.n_id])


def test_pygs_layerwise_inference_accepts_the_loader(data: Data) -> None:
    torch.manual_seed(0)
    data.x = torch.randn(NUM_NODES, 16)
    model = tg.nn.GraphSAGE(16, 8, num_layers=2).eval()
    loader = NeighborLoader(data, [-1], batch_size=64)
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
        assert torch.allclose(model.inference(loader), expected, atol=1e-5)


@pytest.mark.parametrize("trim", [False, True])
def test_full_neighbourhoods_give_the_seeds_what_the_full_graph_gives(data: Data, trim: bool) -> None:
    torch.manual_seed(0)
    data.x = torch.randn(NUM_NODES, 16)
    model = tg.nn.GraphSAGE(16, 8, num_layers=2).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
        for batch in NeighborLoader(data, [-1, -1], batch_size=30, shuffle=True, num_workers=1):
            hops = {}
            if trim:
                hops["num_sampled_nodes_per_hop"] = batch.num_sampled_nodes
                hops["num_sampled_edges_per_hop"] = batch.num_sampled_edges
            out = model(batch.x, batch.edge_index, **hops)[: batch.batch_size]
            assert torch.allclose(out, expected[batch.input_id], atol=1e-5)


def test_num_nodes_follows_the_batch() -> None:
    bare = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=10)
    batch = next(iter(NeighborLoader(bare, [-1, -1], input_nodes=[3])))
    assert batch.num_nodes == 3 and batch.n_id.tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 4}, "with seed=3, here it is 4"),
        ({"batch_size": 20}, "with batch_size=30, here it is 20"),
        ({"shuffle": False}, "with shuffle=True, here it is False"),
        ({"drop_last": True}, "with drop_last=False, here it is True"),
        ({"input_nodes": torch.arange(90)}, "with 100 inputs, here there are 90"),
        ({"input_nodes": torch.arange(100).flip(0)}, "with 100 inputs, but not these"),
    ],
)
def test_a_state_of_another_loader_is_refused_and_says_why(data: Data, other: dict, message: str) -> None:
    options = {"input_nodes": torch.arange(100), "batch_size": 30, "shuffle": True, "seed": 3}
    loader = NeighborLoader(data, [3], **options)
    next(iter(loader))
    state = loader.state_dict()
    NeighborLoader(data, [3], **options).load_state_dict(state)
    resumed = NeighborLoader(data, [3], **{**options, **other})
    with pytest.raises(ValueError, match=f"this state is of a loader {message}"):
        resumed.load_state_dict(state)
    assert resumed.epoch == 0 and len(epoch(resumed)) == len(resumed), "nothing of it was taken"


def test_a_state_of_other_links_is_refused_whatever_differs(data: Data) -> None:
    links, label = data.edge_index[:, :40], torch.zeros(40)

    def make(links: Tensor = links, label: Tensor = label) -> LinkNeighborLoader:
        return LinkNeighborLoader(data, [3], edge_label_index=links, edge_label=label, batch_size=10)

    state = make().state_dict()
    make().load_state_dict(state)
    for others in (make(links.flip(0)), make(label=label + 1)):
        with pytest.raises(ValueError, match="with 40 inputs, but not these"):
            others.load_state_dict(state)
    for name in ("inputs", "batch_size", "seed"):  # an older state does not say
        del state[name]
    make(links.flip(0)).load_state_dict(state)


def test_epochs_that_are_left_early_for_the_next_one_leave_nothing_behind() -> None:
    loader = NeighborLoader(Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2), [1], batch_size=1)
    epoch = iter(loader)
    gc.collect()
    others = sum(type(thing) is BatchLoop for thing in gc.get_objects())
    for _ in range(50):
        next(epoch)
        epoch = iter(loader)
    assert sum(type(thing) is BatchLoop for thing in gc.get_objects()) <= others + 4
    assert len(list(epoch)) == 2
    del epoch
    assert current_context() == RequestContext()
