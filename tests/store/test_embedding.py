"""A sharded embedding trains as torch's own would, on any number of ranks and machines."""

import pytest
import torch
from torch import nn

from gnnsys.store import DistEmbedding, Pull, SparseAdagrad, SparseAdam, Store
from tests.store.cluster import alone, cluster, random_ids, random_rows

ROWS, DIM, BATCH = 120, 8, 32


def model() -> nn.Module:
    head = nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():  # without torch's own generator, which the ranks' threads share
        head.weight.copy_(random_rows(1, DIM) / 50)
    return head


def train(store: Store, steps: int, optimizer=SparseAdam, first: int = 0) -> torch.Tensor:
    """Trains on this rank's share of each global batch; every rank returns all rows."""
    embedding, head = DistEmbedding(store, ROWS, DIM, "emb"), model()
    sparse = optimizer([embedding], lr=0.05)
    for step in range(first, first + steps):
        ids = random_ids(BATCH, ROWS, seed=step).view(store.world_size, -1)[store.rank]
        head(embedding(ids)).square().mean().backward()
        sparse.step()
    return embedding.table[:]


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_training_alone_is_torchs_sparse_training(optimizer):
    ours, theirs = {
        "adam": (SparseAdam, torch.optim.SparseAdam),
        "adagrad": (SparseAdagrad, torch.optim.Adagrad),
    }[optimizer]
    with alone(3) as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        oracle = nn.Embedding.from_pretrained(embedding.table[:].clone(), freeze=False, sparse=True)
        mine, other = ours([embedding], lr=0.05), theirs(oracle.parameters(), lr=0.05)
        head = model()
        for step in range(8):
            ids = random_ids(40, ROWS, seed=step).view(5, 8)
            for rows in (embedding(ids), oracle(ids)):
                assert rows.shape == (5, 8, DIM)
                head(rows).square().sum().backward()
            mine.step()
            other.step()
            other.zero_grad()
        torch.testing.assert_close(embedding.table[:], oracle.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ids", [[7, 3, 90], [[7, 3], [90, 11]], [7, 3, 7]], ids=["distinct", "two dims", "repeated"])
def test_rows_may_be_changed_in_place_and_gradients_are_nobody_elses(ids):
    """A step negates what it maximizes, in place: what a hook was shown stays as it was."""
    with alone(3) as store:
        embedding, shown = DistEmbedding(store, ROWS, DIM, "emb"), []
        oracle = nn.Embedding.from_pretrained(embedding.table[:].clone(), freeze=False)
        for rows in (embedding(torch.tensor(ids)), oracle(torch.tensor(ids))):
            rows.register_hook(shown.append)
            rows.mul_(2).square().sum().backward()
        touched, grads = embedding.gradients._entries[0][1:]
        assert torch.equal(grads, oracle.weight.grad[touched])
        before = [grad.clone() for grad in shown]
        SparseAdam([embedding], lr=0.05, maximize=True).step()
        assert len(shown) == 2 and all(torch.equal(*pair) for pair in zip(shown, before, strict=True))


@pytest.mark.parametrize(("layout", "ranks"), [([0], 1), ([0, 0], 2), ([0, 1], 2), ([0, 1, 1], 4)])
def test_the_same_global_batch_gives_the_same_rows_on_any_number_of_ranks(layout, ranks):
    with alone() as store:
        expected = train(store, 6)
    runs = []
    for _ in range(2):
        with cluster(layout, ranks) as c:
            results = c.on_ranks(lambda store: train(store, 6))
        assert all(torch.equal(results[0], other) for other in results)
        runs.append(results[0])
    torch.testing.assert_close(runs[0], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(runs[0], runs[1]), "not the same from run to run"


def test_a_rank_without_gradients_takes_part():
    def body(store: Store) -> torch.Tensor:
        embedding = DistEmbedding(store, ROWS, DIM, "emb", init=1.0)
        optimizer = SparseAdagrad([embedding], lr=0.1)
        if store.rank == 0:
            embedding(torch.tensor([3, 3, 7])).sum().backward()
        optimizer.step()
        return embedding.table[torch.tensor([3, 7, 8])]

    with cluster([0, 1], 2) as c:
        found = c.on_ranks(body)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], torch.tensor([[0.9], [0.9], [1.0]]).expand(3, DIM))


def test_several_forward_passes_add_their_gradients_and_unused_ones_leave_nothing():
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        with torch.no_grad():
            assert not embedding(torch.tensor([1])).requires_grad
        embedding(torch.tensor([5]))
        ids = torch.tensor([[1, 2], [2, 2]])
        (embedding(ids).sum() + 2 * embedding(torch.tensor([2])).sum()).backward()
        rows, grads = embedding.take_gradients()
        total = torch.zeros(ROWS, DIM).index_add_(0, rows, grads)
        assert total[1, 0] == 1 and total[2, 0] == 5 and total.sum() == 6 * DIM
        assert embedding.take_gradients()[0].numel() == 0
        embedding(ids).sum().backward()
        optimizer = SparseAdam([embedding], lr=0.1)
        optimizer.zero_grad()
        before = embedding.table[:]
        optimizer.step()
        assert torch.equal(embedding.table[:], before)


def test_a_forward_pass_asks_for_each_row_once(monkeypatch):
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        asked, pull = [], store.pull

        def watch(pulls: list[Pull], **options):
            asked.extend(pulls)
            return pull(pulls, **options)

        monkeypatch.setattr(store, "pull", watch)
        rows = embedding(torch.tensor([4, 9, 4, 4, 0]))
    assert asked[0].ids.tolist() == [4, 9, 0]
    assert torch.equal(rows[0], rows[2]) and not torch.equal(rows[0], rows[1])


def test_the_learning_rate_may_change_between_steps():
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb", init=0.0)
        optimizer = SparseAdagrad([embedding], lr=0.1)
        for lr in (0.1, 0.0):
            optimizer.lr = lr
            embedding(torch.tensor([0])).sum().backward()
            optimizer.step()
        torch.testing.assert_close(embedding.table[torch.tensor([0])], torch.full((1, DIM), -0.1))


@pytest.mark.parametrize("optimizer", [SparseAdam, SparseAdagrad])
def test_a_run_that_was_saved_and_loaded_goes_on_as_if_it_never_stopped(optimizer, tmp_path):
    with cluster([0, 1], 2) as c:
        unbroken = c.on_ranks(lambda store: train(store, 6, optimizer))[0]
    with cluster([0, 1], 2) as c:
        c.on_ranks(lambda store: train(store, 3, optimizer))
        c.stores[1].save("emb", tmp_path)
    with cluster([0, 1], 2) as c:
        c.on_ranks(lambda store: store.create("emb", ROWS, (DIM,), init=("uniform", -(DIM**-0.5), DIM**-0.5, 0)))
        c.stores[0].load("emb", tmp_path)
        resumed = c.on_ranks(lambda store: train(store, 3, optimizer, first=3))[0]
    assert torch.equal(resumed, unbroken)


def test_what_is_no_embedding_or_optimizer_is_refused():
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        with pytest.raises(ValueError, match="list of DistEmbeddings"):
            SparseAdam([nn.Embedding(3, 3)])
        with pytest.raises(ValueError, match="list of DistEmbeddings"):
            SparseAdam([])
        with pytest.raises(ValueError, match="lr must be"):
            SparseAdam([embedding], lr=-1.0)
        with pytest.raises(ValueError, match="dim must be at least 1"):
            DistEmbedding(store, ROWS, 0, "none")
        with pytest.raises(ValueError, match=r"ids must be in \[0, 120\)|index must be in \[0, 120\)"):
            embedding(torch.tensor([120]))
