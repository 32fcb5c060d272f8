"""States on the device are compared between ranks bit for bit, and each rank gets back what it had there."""

import pytest
import torch
from torch import nn

import gnnsys
from gnnsys.checkpoint.rank_differences import digest_states
from gnnsys.session import Session
from tests.checkpoint.groups import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_digest_of_what_is_on_the_device_depends_on_every_bit():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        for size in (0, 1, 63, 9_001, 200_003):
            count = size * dtype.itemsize
            value = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).cuda().view(dtype)
            first = digest_states({"a": {"b": value, "c": torch.ones(3)}})
            assert first == digest_states({"a": {"b": value.clone(), "c": torch.ones(3)}})
            if size:
                changed = value.clone()
                changed.view(torch.uint8)[int(torch.randint(count, (), generator=generator))] ^= 4
                assert digest_states({"a": {"b": changed, "c": torch.ones(3)}})["a"]["b"] != first["a"]["b"]


def test_buffers_that_differ_come_back_to_the_device_of_each_rank(tmp_path):
    def life(group, marked):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        if marked:
            model[1].running_mean += group.rank
        with Session(group, 60) as session, gnnsys.resume(tmp_path, session=session, model=model) as saver:
            if marked:
                saver.save()
        assert model[1].running_mean.is_cuda
        return model[1].running_mean.tolist()

    for marked in (True, False):
        assert on_ranks(2, lambda group, marked=marked: life(group, marked)) == [[0.0] * 4, [1.0] * 4]
