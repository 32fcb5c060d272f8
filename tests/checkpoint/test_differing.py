"""States that ranks have each otherwise though they are saved once: buffers, moments, scales. None is lost."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gnnsys
from gnnsys.checkpoint import folder as folders
from gnnsys.checkpoint.rank_differences import differing, digest_states, merged
from gnnsys.checkpoint.snapshot import same
from gnnsys.session import Session
from tests.checkpoint.groups import on_ranks


class Model(nn.Module):
    """As every rank has it; `mark` changes what a rank may have for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.5)

    def mark(self, rank: int) -> None:
        self.norm.running_mean += rank
        self.norm.num_batches_tracked += rank
        self.seen[1] = rank


def states_of(rank: int, marked: bool) -> dict:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if marked:
        model.mark(rank)
        for number, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(number + rank))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def read(states: dict) -> dict:
    return {name: value.state_dict() for name, value in states.items()}


def save(folder, num_ranks: int, **options) -> list[dict]:
    def life(group):
        states = states_of(group.rank, marked=True)
        with Session(group, 60) as session, gnnsys.resume(folder, session=session, **options, **states) as saver:
            saver.step()
            saver.save()
        return read(states)

    return on_ranks(num_ranks, life)


def restore(folder, num_ranks: int) -> list[dict]:
    def life(group):
        states = states_of(group.rank, marked=False)
        with Session(group, 60) as session, gnnsys.resume(folder, session=session, **states) as saver:
            assert saver.steps == 1
        return read(states)

    return on_ranks(num_ranks, life)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_rank_gets_back_what_it_had(tmp_path, asynchronous):
    saved = save(tmp_path, 3, asynchronous=asynchronous)
    restored = restore(tmp_path, 3)
    for rank in range(3):
        assert same(restored[rank], saved[rank]), rank
        assert restored[rank]["model"]["norm.running_mean"].tolist() == [rank] * 4
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-0000000001").glob("*.pt")}
    assert sorted(sizes) == ["dense.pt", "differing-1.pt", "differing-2.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt"]


def test_with_another_number_of_ranks_all_have_what_rank_0_had_and_are_told(tmp_path, logged):
    saved = save(tmp_path, 2)
    for num_ranks in (1, 3):
        logged.clear()
        restored = restore(tmp_path, num_ranks)
        assert all(same(each, saved[0]) for each in restored)
        (text,) = [record.getMessage() for record in logged if "different values" in record.getMessage()]
        assert "2 ranks saved different values of model (norm.num_batches_tracked and 2 more), optimizer" in text
        assert f"{num_ranks} are here: all take those that rank 0 saved" in text


def test_a_checkpoint_without_any_difference_has_no_more_files_and_one_of_before_is_read(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "step-0000000001"
    assert sorted(file.name for file in path.glob("*.pt")) == ["dense.pt", "rank-0.pt"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.pop("differing") == {}
    del manifest["crc32"]
    folders.describe(path, manifest)
    assert restore(tmp_path, 1)[0]["optimizer"]["state"][1]["momentum_buffer"].tolist() == [1.0] * 4


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameters_that_went_apart_inside_ddp_are_an_error_that_says_so(tmp_path, process_group):
    models = [nn.parallel.DistributedDataParallel(Model()) for _ in range(2)]  # of two ranks that never meet in DDP
    models[1].module.mark(1)

    def life(group, model, folder):
        with (
            Session(group, 60) as session,
            gnnsys.resume(folder, session=session, asynchronous=False, model=model) as saver,
        ):
            saver.save()

    assert on_ranks(2, lambda group: life(group, models[group.rank], tmp_path / "buffers")) == [None, None]
    with torch.no_grad():
        models[1].module.last.weight += 1
        models[1].module.last.bias += 1
    for error in on_ranks(2, lambda group: life(group, models[group.rank], tmp_path / "apart")):
        assert isinstance(error, ValueError)
        for part in ("model: last.weight and 1 more of rank 1 is not what rank 0 has", "DDP", "model.module"):
            assert part in str(error)
    assert list((tmp_path / "apart").iterdir()) == []
    inner = [model.module for model in models]
    assert on_ranks(2, lambda group: life(group, inner[group.rank], tmp_path / "meant")) == [None, None]


def test_a_digest_depends_on_every_bit_and_its_place_and_on_nothing_else():
    generator = random.Random(0)
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.complex64, torch.int64):
        for size in (0, 1, 3, 63, 9_001, 70_001, 200_003):
            value = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
            first = digest_states({"a": {"b": value}})
            odd = torch.cat([value[:1], value])[1:]  # the same bits at another address
            assert digest_states({"a": {"b": odd}}) == first
            assert digest_states({"a": {"b": value.view(1, -1)}}) != first
            for _ in range(4 if size else 0):
                changed = value.clone()
                bits = changed.view(torch.uint8)
                bits[generator.randrange(bits.numel())] ^= 1 << generator.randrange(8)
                assert digest_states({"a": {"b": changed}}) != first
    rows = torch.rand(1000, 128)
    assert digest_states({"a": rows}) != digest_states({"a": rows.flip(0)})
    assert digest_states({"a": rows.t()}) == digest_states({"a": rows.t().contiguous()})
    assert digest_states({"a": {"x": 1, "y": {2: 0.0, 1: "b"}}}) == digest_states(
        {"a": {"y": {1: "b", 2: 0.0}, "x": 1}}
    )
    for one, other in ((0.0, -0.0), (1, 1.0), ([1], (1,)), ({1}, {2}), ("1", 1), (torch.zeros(2), torch.zeros(2, 1))):
        assert digest_states({"a": {"x": one}}) != digest_states({"a": {"x": other}}), (one, other)
    odd = torch.eye(3).to_sparse()
    assert digest_states({"a": odd}) == digest_states({"a": odd.clone()}) != digest_states({"a": 2 * odd})


def test_a_digest_tells_large_tensors_apart_that_have_the_same_rows_in_another_order():
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(4096, generator=generator)
    labels = nn.functional.one_hot(torch.arange(4096) % 64, 64)
    half = torch.randint(0, 2, (512, 64), generator=generator)
    masks = [torch.stack([each, 1 - each], -1).view(512, 128).float() for each in (half, half[order[:512] % 512])]
    pairs = [(labels, labels[order]), (masks[0], masks[1])]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        one = torch.eye(1024, dtype=dtype)
        for apart in (1, 8, 16, 128, 256, 512):
            two = one.clone()
            two[[0, apart]] = two[[apart, 0]]
            both = two.clone()  # and two others back: the places' sum is what it was
            both[[1, apart + 1]] = both[[apart + 1, 1]]
            pairs += [(one, two), (one, both), (two, both)]
        column = torch.zeros(4096, 256 // dtype.itemsize, dtype=dtype)
        inner, outer = column.clone(), column.clone()
        inner[[1, 2], 0], outer[[0, 3], 0] = 1, 1
        pairs.append((inner, outer))
    digests = {id(each): digest_states({"a": each}) for each in {id(t): t for pair in pairs for t in pair}.values()}
    for one, other in pairs:
        assert not torch.equal(one, other)
        assert digests[id(one)] != digests[id(other)], (one.dtype, one.shape)


def test_states_of_any_form_come_back_from_what_differs():
    for one, other in (
        ({"a": 1, "b": torch.ones(2)}, {"a": 1, "b": torch.zeros(2)}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({1: "a", 2: "b"}, {1: "a", 2: "c"}),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"a": 1}),
    ):
        first, mine = digest_states({"s": one}), digest_states({"s": other})
        own = differing({"s": other}, mine, first).get("s")
        assert (own is None) == same(one, other) and same(merged(one, own), other)
