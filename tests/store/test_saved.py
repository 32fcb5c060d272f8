"""Tables on disk are whole or not there, and come back as they were."""

import pytest
import torch

from gnnsys.store.saved import part_folder
from tests.store.cluster import alone, cluster, random_rows

NAME = "node/paper/../trained"


def test_a_table_comes_back_as_it_was_saved(tmp_path):
    rows = random_rows(50, 3, 2).bfloat16()
    with cluster([0, 1, 1], num_ranks=2) as c:
        table = c.stores[0].create(NAME, 50, (3, 2), torch.bfloat16)
        table[:] = rows
        c.stores[0].save(NAME, tmp_path)
        table[:] = torch.zeros(50, 3, 2)
        with pytest.raises(ValueError, match="exists: choose another, or overwrite"):
            c.stores[0].save(NAME, tmp_path)
        c.stores[1].load(NAME, tmp_path)
        assert torch.equal(table[:], rows), "a table that exists is filled again"
        c.stores[0].drop(NAME)
        assert torch.equal(c.stores[1].load(NAME, tmp_path)[:], rows)
    with cluster([0, 1, 1]) as c:
        assert torch.equal(c.stores[0].load(NAME, tmp_path)[:], rows)
    assert all(path.resolve().is_relative_to(tmp_path) for path in tmp_path.rglob("*"))


def test_saves_that_do_not_belong_together_are_refused(tmp_path):
    with cluster([0, 1]) as c:
        table = c.stores[0].create("t", 10)
        c.stores[0].save("t", tmp_path)
        keep = part_folder(str(tmp_path), "t", 1).rename(tmp_path / "kept")
        table[:] = torch.ones(10)
        c.stores[0].save("t", tmp_path, overwrite=True)
        part_folder(str(tmp_path), "t", 1).rename(tmp_path / "gone")
        keep.rename(part_folder(str(tmp_path), "t", 1))
        with pytest.raises(ValueError, match="different saves"):
            c.stores[0].load("t", tmp_path)


def test_what_is_missing_altered_or_another_table_is_named(tmp_path):
    with alone(2) as store:
        store.create("t", 10)
        with pytest.raises(ValueError, match=r"part00000' is not a saved table"):
            store.load("t", tmp_path)
        with pytest.raises(ValueError, match="table 'none' does not exist"):
            store.save("none", tmp_path)
        store.save("t", tmp_path)
        file = part_folder(str(tmp_path), "t", 1) / "0000.npy"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(ValueError, match=r"part00001/0000.npy does not match its checksum"):
            store.load("t", tmp_path)
    with alone(2) as store:
        store.create("t", 12)
        with pytest.raises(ValueError, match=r"checksum|exists and is another one"):
            store.load("t", tmp_path)
