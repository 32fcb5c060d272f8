"""Embeddings looked up from a device train as torch's own on that device, under a GradScaler and autocast too."""

import pytest
import torch
from torch import nn

from gnnsys.store import DistEmbedding, SparseAdagrad, SparseAdam
from tests.store.cluster import alone, random_ids, random_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROWS, DIM = 60, 8
KINDS = [
    (SparseAdam, torch.optim.SparseAdam, {"lr": 0.05}),
    (SparseAdagrad, torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.2, "initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["adam", "adagrad"])
def test_a_scaler_on_the_device_unscales_skips_and_grows_as_with_torchs_own(kind, unscales):
    ours, theirs, options = kind
    with alone(2) as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        oracle = nn.Embedding.from_pretrained(embedding.table[:].cuda(), freeze=False, sparse=True)
        pairs = [(embedding, ours([embedding], **options)), (oracle, theirs(oracle.parameters(), **options))]
        scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2) for _ in pairs]
        head = (random_rows(DIM, DIM, seed=3) / 50).cuda()
        for step in range(6):
            ids = random_ids(20, ROWS, seed=step).cuda()
            for (module, optimizer), scaler in zip(pairs, scalers, strict=True):
                with torch.autocast("cuda", torch.float16):
                    loss = nn.functional.linear(module(ids), head).float().square().sum()
                scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale(), f"step {step}"
            torch.testing.assert_close(embedding.table[:], oracle.weight.detach().cpu(), rtol=1e-4, atol=1e-4)


def test_a_rank_without_gradients_goes_through_a_scaler_of_the_device():
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        before, optimizer, scaler = embedding.table[:], SparseAdam([embedding]), torch.amp.GradScaler("cuda")
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(embedding.table[:], before) and store.tensor("emb").shape == (ROWS, DIM)


def test_embeddings_on_the_device_and_on_the_host_share_an_optimizer_and_a_scaler():
    with alone() as store:
        embeddings = [DistEmbedding(store, ROWS, DIM, name) for name in ("near", "far")]
        before = [embedding.table[:] for embedding in embeddings]
        optimizer, scaler = SparseAdagrad(embeddings, lr=0.1), torch.amp.GradScaler("cuda")
        for overflow in (True, False):
            loss = embeddings[0](torch.arange(3).cuda()).sum() + embeddings[1](torch.arange(3)).sum().cuda()
            scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            for embedding, rows in zip(embeddings, before, strict=True):
                moved = torch.zeros(ROWS, DIM)
                moved[:3] = 0.0 if overflow else 0.1
                torch.testing.assert_close(rows - embedding.table[:], moved, rtol=1e-4, atol=1e-5)


def test_gradients_of_several_passes_are_added_on_the_device_and_sent_once(monkeypatch):
    with alone(2) as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        oracle = nn.Embedding.from_pretrained(embedding.table[:].cuda(), freeze=False, sparse=True)
        mine, other = SparseAdam([embedding], lr=0.05), torch.optim.SparseAdam(oracle.parameters(), lr=0.05)
        sent, step = [], store.step
        monkeypatch.setattr(
            store, "step", lambda name, ids, *rest, **options: sent.append(ids) or step(name, ids, *rest, **options)
        )
        for number in range(3):
            for passes in range(2):
                ids = random_ids(50, ROWS, seed=2 * number + passes).cuda().view(5, 10)
                for module in (embedding, oracle):
                    module(ids).square().sum().backward()
            mine.step()
            other.step()
            other.zero_grad()
        assert all(ids.device.type == "cpu" and ids.unique().numel() == ids.numel() for ids in sent) and len(sent) == 3
        torch.testing.assert_close(embedding.table[:], oracle.weight.detach().cpu(), rtol=1e-5, atol=1e-6)


def test_norms_and_sums_over_several_backward_passes_are_torchs_on_the_device():
    with alone(2) as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        plain = nn.Embedding.from_pretrained(embedding.table[:].cuda(), freeze=False)
        optimizer = SparseAdagrad([embedding])
        for number in range(4):
            ids = random_ids(200, ROWS, seed=number)
            for module in (embedding, plain):
                given = ids.cuda() if number != 2 or module is plain else ids  # a pass on the host, too
                (module(given) * (1 + 0.1 * number)).square().sum().cuda().backward()
        params = optimizer.param_groups[0]["params"]
        norms = [nn.utils.clip_grad_norm_(each, 1e9) for each in (params, plain.parameters())]
        torch.testing.assert_close(norms[0], norms[1])
        assert params[0].grad.is_cuda
        torch.testing.assert_close(params[0].grad.clone(), plain.weight.grad[plain.weight.grad.abs().sum(1) > 0])
