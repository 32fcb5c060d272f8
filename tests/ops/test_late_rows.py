"""Rows that are gathered when somebody looks: exchanged with other libraries, and in code that is compiled later."""

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from gnnsys.ops import SummedRows, late_rows
from gnnsys.ops.summed_rows import SumsOf

ROWS = torch.arange(12.0).view(6, 2)


def made():
    return SummedRows(ROWS[:2], torch.zeros(2, 2), SumsOf("sum", 2, 5), 6, ROWS.clone)


@pytest.mark.parametrize(
    "exchanged",
    [
        np.from_dlpack,
        torch.from_dlpack,
        from_dlpack,
        lambda rows: from_dlpack(rows.__dlpack__()),
        lambda rows: from_dlpack(to_dlpack(rows.rows())),
        np.asarray,
    ],
)
def test_other_libraries_get_all_rows(exchanged):
    rows = made()
    assert torch.equal(torch.as_tensor(exchanged(rows)), ROWS) and rows.is_gathered


def test_who_reads_memory_that_is_not_there_is_told():
    rows = made()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        to_dlpack(rows)
    assert torch.equal(rows + 0, ROWS)


def test_rows_that_were_made_before_anything_was_compiled_go_through_compiled_code(monkeypatch):
    """Until something is compiled dynamo is not there to be told that it need not look into them."""
    compiled = torch.compile(lambda rows: (rows * 2).sum(), backend="eager")
    known = late_rows.LateRows.rows
    monkeypatch.setattr(late_rows.LateRows, "rows", getattr(known, "_torchdynamo_orig_callable", known))
    monkeypatch.setattr(late_rows, "_keep_from_dynamo", lambda: None)
    rows = made()
    assert not hasattr(late_rows.LateRows.rows, "_torchdynamo_orig_callable")
    assert compiled(rows) == (ROWS * 2).sum() and rows.is_gathered
