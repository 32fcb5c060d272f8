"""Short rows that a device reads from a copy: which tables, and that nobody sees old rows. The host is the device."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from gnnsys.store import CopiedRows, ReadContext, TensorSource, is_short, short_rows_on
from gnnsys.store.memory_budget import limited

HOST = torch.device("cpu")
IDS = torch.tensor([5, 0, 5, 99])


def read(source: CopiedRows, batch: int = 0) -> torch.Tensor:
    context = ReadContext(batch=batch)
    reading = source.begin(IDS, None, context)
    context.send()
    found = reading.result()
    assert context.counts["bytes_local"] == found.nbytes
    return found


def test_rows_are_those_of_the_tensor_whenever_it_may_be_written() -> None:
    rows = torch.arange(100)
    source = CopiedRows(rows, HOST)
    assert torch.equal(read(source), rows[IDS])
    rows.neg_()  # torch counts its own writes
    assert torch.equal(read(source), rows[IDS]) and int(read(source)[0]) == -5
    rows.numpy()[:] = 7  # nobody counts these: seen once the loader has stopped, and by reads of no batch
    assert torch.equal(read(source, batch=-1), rows[IDS])
    source.forget()
    assert torch.equal(read(source), rows[IDS])
    assert source._device_bytes() == rows.nbytes


def test_a_batch_is_read_from_the_copy() -> None:
    rows = torch.arange(100)
    source = CopiedRows(rows, HOST)
    before = read(source)
    rows.numpy()[:] = 7  # not while a loader reads: here it tells where rows come from
    assert torch.equal(read(source), before)


def test_where_there_is_no_memory_for_a_copy_rows_come_from_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*given: object) -> NoReturn:
        tried.append(given)
        raise torch.OutOfMemoryError("none left")

    rows = torch.arange(100)
    source = CopiedRows(rows, HOST)
    with monkeypatch.context() as patch:
        patch.setattr("gnnsys.store.copied_rows._Copy", refuse)
        for _ in range(2):
            assert torch.equal(read(source), rows[IDS]) and source._device_bytes() == 0
        assert len(tried) == 1  # not for every batch
    source.forget()
    assert torch.equal(read(source), rows[IDS]) and source._device_bytes() == rows.nbytes


def test_only_tables_of_short_rows_that_fit_are_copied() -> None:
    labels = torch.zeros(1 << 16, dtype=torch.int64)
    with limited(HOST, 1 << 30):
        assert is_short(labels, HOST) and is_short(labels.view(-1, 4), HOST)
        assert not is_short(labels.view(-1, 8), HOST)  # a row fills two sectors
        assert not is_short(labels[:100], HOST) and not is_short(labels.view(-1, 4)[:, :0], HOST)
    with limited(HOST, 15 * labels.nbytes):
        assert not is_short(labels, HOST)


def test_only_pinned_rows_that_a_gpu_reads_are_copied() -> None:
    source = TensorSource(torch.zeros(1 << 16, dtype=torch.int64))
    assert short_rows_on(source, HOST) is source
    assert short_rows_on(source, torch.device("cuda", 0)) is source
