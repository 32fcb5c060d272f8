"""What is in a folder of checkpoints is whole, or it does not count; and a save that fails harms nothing."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import subprocess

import pytest
import torch

import gnnsys
from gnnsys.store import Shard, Store


class Life:
    """A process's life with a table and a model, without a session."""

    def __init__(self, folder, num_rows=100, num_parts=2, **options):
        self.shard = Shard(0)
        self.store = Store(machine_of_part=[0] * num_parts, local=self.shard)
        self.table = self.store.create("t", num_rows, (256,))
        self.model = torch.nn.Linear(4, 4)
        self.saver = gnnsys.resume(folder, table=self.table, model=self.model, **options)

    def step(self, value):
        self.table[:] = torch.full((self.table.shape[0], 256), float(value))
        torch.nn.init.constant_(self.model.weight, value)
        self.saver.step()

    def values(self):
        return self.table[:].unique().tolist(), self.model.weight.unique().tolist()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.saver.close()
        self.shard.close()


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1 and 2."""
    with Life(tmp_path / "checkpoints", every=1) as life:
        life.step(1)
        life.step(2)
    return tmp_path / "checkpoints"


def names_in(folder):
    """All but the file that says whose folder it is, while a saver is open."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".owner")


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_file_of_a_checkpoint_is_checked_and_an_older_one_stands_in(folder):
    newest = folder / "step-0000000002"
    names = [file.relative_to(newest) for file in files_of(newest)]
    assert len(names) == 7, "the manifest, dense, a rank, and two parts with their manifests"
    for name in names:
        file = folder / "step-0000000002" / name
        content = file.read_bytes()
        for damaged in (content[:-1], content[:50] + bytes([content[50] ^ 1]) + content[51:]):
            file.write_bytes(damaged)
            with Life(folder) as life:
                assert life.saver.restored == folder / "step-0000000001" and life.values() == ([1.0], [1.0])
            (aside,) = folder.glob("damaged-step-*")
            aside.rename(newest)
        file.write_bytes(content)
    with Life(folder) as life:
        assert life.values() == ([2.0], [2.0])


def test_files_of_other_names_are_left_alone_and_what_is_restored_is_logged(folder, logged):
    (folder / "step-notes.txt").write_text("mine")
    with Life(folder):
        assert (folder / "step-notes.txt").read_text() == "mine"
    with Life(folder / "new"):
        pass
    assert [record.getMessage() for record in logged] == [
        f"restored step 2 from {folder / 'step-0000000002'}",
        f"no checkpoint in {folder / 'new'}: begins at step 0",
    ]


def test_where_none_is_whole_the_file_is_named_and_nothing_begins_anew(folder):
    for path in folder.iterdir():
        file = path / "dense.pt"
        file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(ValueError, match=r"step-0000000002/dense.pt does not match its checksum.*give another folder"):
        Life(folder)
    (folder / "step-0000000002" / "dense.pt").unlink()
    with pytest.raises(ValueError, match=r"step-0000000002 lacks dense.pt on every machine"):
        Life(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-0000000001", "step-0000000002"]


def test_a_manifest_cannot_lead_out_of_its_folder(folder):
    from gnnsys.graph.manifest import manifest_checksum

    (folder.parent / "outside").write_bytes(b"abc")
    manifest = json.loads((folder / "step-0000000002" / "manifest.json").read_text())
    del manifest["crc32"]
    manifest["files"]["../../outside"] = [3, 0]
    manifest["crc32"] = manifest_checksum(manifest)
    (folder / "step-0000000002" / "manifest.json").write_text(json.dumps(manifest))
    with Life(folder) as life:
        assert life.saver.restored == folder / "step-0000000001"


def test_what_a_job_does_not_name_or_a_checkpoint_does_not_have_is_said(folder):
    with pytest.raises(ValueError, match=r"it has 'table', which resume\(\) was not given"):
        gnnsys.resume(folder, model=torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"it has no 'more'. Its names are model, table"):
        Life(folder, more=torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"(?s)model does not take the state it was saved with.*size mismatch"):
        Life(folder.parent / "x").saver.close()
        gnnsys.resume(folder, model=torch.nn.Linear(3, 4), table=Life(folder.parent / "y").table)


def test_a_disk_that_is_full_is_told_and_the_checkpoint_before_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with Life(disk / "checkpoints", num_rows=400) as life:
            life.step(1)
            assert life.saver.save() is None
            life.saver.wait()
            life.step(2)
            life.saver.save()  # 400 KiB more do fit
            life.step(3)
            with pytest.raises(ValueError, match=r"/\.step-0000000003-\w+/\S+: No space left on device"):
                life.saver.save()
                life.saver.wait()
            assert names_in(disk / "checkpoints") == ["step-0000000001", "step-0000000002"]
            with pytest.raises(ValueError, match="No space left on device"):
                life.saver.save()
                life.saver.wait()
        with Life(disk / "checkpoints", num_rows=400, keep=1) as life:
            assert life.values() == ([2.0], [2.0])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_without_descriptors_a_save_fails_by_name_and_the_next_one_works(tmp_path):
    with Life(tmp_path, every=1, asynchronous=False) as life:
        life.step(1)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        gc.collect()
        gc.disable()  # what others have left would give descriptors back in the middle
        held = []
        try:
            used = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, before[1]))
            with pytest.raises(OSError) as full:
                while True:
                    held.append(os.dup(0))
            assert full.value.errno == errno.EMFILE
            with pytest.raises(ValueError, match=r"cannot save step 2: /.*: Too many open files"):
                life.step(2)
        finally:
            gc.enable()
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in held:
                os.close(descriptor)
        assert not list(tmp_path.glob("*-0000000002*/manifest.json")), "what cannot be removed now does not count"
        assert life.saver.save() == tmp_path / "step-0000000002"
        assert names_in(tmp_path) == ["step-0000000001", "step-0000000002"]


def test_a_folder_that_cannot_be_is_refused_before_training_begins(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"machine 0: checkpoints cannot be kept in .*file.*: it is a file, give a folder"
    ):
        Life(tmp_path / "file")


class Trouble:
    """A disk that is full when dense states are written; `saver.on_stage`."""

    def __call__(self, stage):
        if stage == "dense written":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/dense.pt")


WORDS = r"the checkpoint of step 1 was not saved: .*/disk/dense.pt: No space left on device"


def test_what_went_wrong_with_the_last_save_is_raised_when_the_saver_is_closed(tmp_path):
    for end in (
        lambda saver: saver.close(),
        lambda saver: saver.__exit__(None, None, None),
        lambda saver: saver.wait(),
    ):
        life = Life(tmp_path, every=1)
        life.saver.on_stage = Trouble()
        life.step(1)
        with pytest.raises(ValueError, match=WORDS):
            end(life.saver)
        life.saver.close()  # a second time there is nothing to say
        life.shard.close()
        assert list(tmp_path.glob("step-*")) == []


def test_what_went_wrong_with_the_last_save_is_raised_when_the_session_is_closed(tmp_path):
    session = gnnsys.init(process_group=False)
    saver = gnnsys.resume(tmp_path, every=1, model=torch.nn.Linear(2, 2))
    saver.on_stage = Trouble()
    saver.step()
    with pytest.raises(ValueError, match=WORDS):
        session.close()
    assert session.is_closed and gnnsys.session.current() is None
    session.close()
    with pytest.raises(KeyError), gnnsys.init(process_group=False):  # an error of the script's own comes first
        saver = gnnsys.resume(tmp_path, every=1, model=torch.nn.Linear(2, 2))
        saver.on_stage = Trouble()
        saver.step()
        raise KeyError


def test_an_error_of_an_earlier_save_says_which_it_was_and_the_next_one_is_made(tmp_path):
    with Life(tmp_path, every=2) as life:
        life.step(0)
        life.saver.on_stage = Trouble()
        life.step(1)
        life.saver._thread.join()
        life.saver.on_stage = lambda stage: None
        life.step(2)
        with pytest.raises(ValueError, match=WORDS.replace("step 1", "step 2")):
            life.step(3)
        assert life.saver.steps == 4 and life.saver.save() is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000004"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_fits_into_memory_only_once_is_saved_all_the_same(tmp_path, logged, monkeypatch, asynchronous):
    clone, asked = torch.Tensor.clone, []

    def scarce(tensor, **options):
        """No copy of more than 100 KB can be had."""
        if tensor.nbytes > 100_000:
            asked.append(tensor.nbytes)
            raise RuntimeError("not enough memory: you tried to allocate")
        return clone(tensor, **options)

    with Life(tmp_path, num_rows=400, asynchronous=asynchronous) as life:
        life.model.more = torch.nn.Linear(256, 256, bias=False)
        monkeypatch.setattr(torch.Tensor, "clone", scarce)
        for step in (1, 2):
            life.step(step)
            assert life.saver.save() == tmp_path / f"step-{step:010d}", "it is written when this returns"
        monkeypatch.undo()
        assert bool(asked) is asynchronous, "where no copy is wanted none is tried"
        weight = life.model.more.weight.detach().clone()
    warned = [record.getMessage() for record in logged if record.levelname == "WARNING"]
    assert len(warned) == int(asynchronous) and all("no memory for a copy of table 'table'" in text for text in warned)
    with Life(tmp_path.parent / "other", num_rows=400) as life:
        life.model.more = torch.nn.Linear(256, 256, bias=False)
        with gnnsys.resume(tmp_path, table=life.table, model=life.model):
            assert life.values() == ([2.0], [2.0]) and torch.equal(life.model.more.weight, weight)


def test_states_alone_that_do_not_fit_a_second_time_are_written_as_they_are(tmp_path, logged, monkeypatch):
    monkeypatch.setattr(gnnsys.checkpoint.saver, "free_memory", lambda: 50)
    with gnnsys.resume(tmp_path, model=torch.nn.Linear(4, 4)) as saver:
        assert saver.save() == tmp_path / "step-0000000000", "it waited"
        saver.step()
        saver.save()
    assert [record.getMessage() for record in logged if record.levelname == "WARNING"] == [
        "there is no memory for a copy of the states of rank 0, 80 bytes: checkpoints are written straight from it, "
        "and training waits meanwhile"
    ]
