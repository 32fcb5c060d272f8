"""A job that is left and resumed does what an unbroken one does, bit for bit."""

import json

import pytest
import torch

import gnnsys
from gnnsys.checkpoint import folder as folders
from gnnsys.comm.rendezvous import poll
from tests.checkpoint.training import Job, assert_same, make_parts, train

STEPS, EPOCH = 13, 5
DEADLINE = 30.0


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("checkpoint") / "parts")


@pytest.fixture(scope="module")
def unbroken(parts, tmp_path_factory):
    return train(parts, tmp_path_factory.mktemp("unbroken") / "checkpoints", STEPS)


@pytest.mark.parametrize(
    ("left_after", "asynchronous"), [(3, True), (EPOCH, False), (2 * EPOCH - 1, True), (2 * EPOCH, True)]
)
def test_a_resumed_job_ends_with_the_bits_of_an_unbroken_one(parts, unbroken, tmp_path, left_after, asynchronous):
    _, before = train(parts, tmp_path, left_after, every=left_after, asynchronous=asynchronous)
    values, after = train(parts, tmp_path, STEPS, asynchronous=asynchronous)
    assert sorted(after) == list(range(left_after, STEPS)), "the next step is the one after the last"
    assert before | after == unbroken[1]
    assert_same(values, unbroken[0])


def test_what_a_script_does_at_the_end_of_an_epoch_is_not_lost_behind_the_last_batch(tmp_path):
    graph = gnnsys.Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)

    def life(folder, ends_at=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader = gnnsys.NeighborLoader(graph, [1], input_nodes=None, batch_size=1, shuffle=True)
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        with gnnsys.resume(folder, every=len(loader), **states) as saver:
            for _ in range(loader.epoch, 3):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch.n_id.float().view(-1, 1)).sum().backward()
                    optimizer.step()
                    saver.step()
                    if saver.steps == ends_at:
                        loader.close()
                        return None
                scheduler.step()
        loader.close()
        return model.weight.item(), scheduler.get_last_lr()

    life(tmp_path / "left", ends_at=4)
    life(tmp_path / "left", ends_at=8)
    assert life(tmp_path / "left") == life(tmp_path / "unbroken")


def test_an_epoch_has_the_steps_these_tests_think_it_has(parts):
    with gnnsys.init(process_group=False):
        assert len(Job(gnnsys.open(parts)).loader) == EPOCH


def test_what_was_done_after_the_last_checkpoint_is_done_again(parts, unbroken, tmp_path):
    train(parts, tmp_path, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000003", "step-0000000006"]
    values, losses = train(parts, tmp_path, STEPS)
    assert sorted(losses) == list(range(6, STEPS))
    assert_same(values, unbroken[0])


def test_a_save_under_way_is_finished_where_training_fails_and_the_next_job_of_the_process_resumes_from_it(tmp_path):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), gnnsys.resume(tmp_path, model=model) as saver:

        def on_stage(stage: str) -> None:  # the files are still being written when the job ends
            if stage == "dense written":
                assert poll(lambda: saver._is_closed, DEADLINE)

        saver.on_stage = on_stage
        saver.step()
        saver.save()
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]
    with gnnsys.resume(tmp_path, model=model) as after:
        assert after.steps == 1


def test_the_first_start_has_nothing_to_restore_and_the_newest_ones_are_kept(parts, tmp_path):
    seen = []
    train(parts, tmp_path, 5, every=1, keep=3, prepare=lambda saver: seen.append((saver.steps, saver.restored)))
    train(parts, tmp_path, 5, prepare=lambda saver: seen.append((saver.steps, saver.restored, saver.newest)))
    assert seen == [(0, None), (5, tmp_path / "step-0000000005", tmp_path / "step-0000000005")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:010d}" for n in (3, 4, 5)]


def test_a_job_without_tables_or_parts_needs_no_session(tmp_path):
    def life(until):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with gnnsys.resume(tmp_path, model=model, optimizer=optimizer) as saver:
            while saver.steps < until:
                optimizer.zero_grad()
                model(torch.rand(4, 3)).sum().backward()
                optimizer.step()
                saver.step()
            assert saver.save() is None, "it is written in the background"
            saver.wait()
            assert saver.newest == tmp_path / f"step-{until:010d}"
        return model.weight.detach()

    life(2)
    resumed = life(5)
    (tmp_path / "step-0000000002").rename(tmp_path / "aside")
    (tmp_path / "step-0000000005").rename(tmp_path / "aside too")
    assert torch.equal(life(5), resumed)


def manifest_without(path, key):
    """Makes a checkpoint what it was when manifests did not have this."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"], manifest[key]
    folders.describe(path, manifest)


def test_the_state_of_another_optimizer_is_refused_by_both_names_and_changes_nothing(tmp_path):
    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gnnsys.resume(tmp_path, model=model, optimizer=adam) as saver:
        saver.save()
    with pytest.raises(ValueError, match=r"has optimizer as Adam, resume\(\) was given SGD: .* Give it Adam again"):
        gnnsys.resume(tmp_path, model=model, optimizer=sgd)
    assert sgd.param_groups[0]["lr"] == 0.1
    with gnnsys.resume(tmp_path, model=model, optimizer=torch.optim.Adam(model.parameters())) as saver:
        assert saver.restored is not None


def test_a_checkpoint_that_does_not_say_its_optimizers_is_restored(tmp_path):
    model = torch.nn.Linear(2, 1)
    with gnnsys.resume(tmp_path, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.5)) as saver:
        saver.save()
    manifest_without(tmp_path / "step-0000000000", "optimizers")
    again = torch.optim.Adam(model.parameters())
    with gnnsys.resume(tmp_path, model=model, optimizer=again) as saver:
        assert saver.restored is not None and again.param_groups[0]["lr"] == 0.5


def test_without_every_only_save_saves(tmp_path):
    with gnnsys.resume(tmp_path, model=torch.nn.Linear(2, 1)) as saver:
        assert not any(saver.step() for _ in range(5))
        assert saver.newest is None
        saver.save()
    assert saver.newest == tmp_path / "step-0000000005"


def test_a_file_in_the_place_of_the_folder_is_called_one(tmp_path):
    (tmp_path / "data.pt").touch()
    with pytest.raises(ValueError, match=r"cannot be kept in .*data\.pt: it is a file, give a folder"):
        gnnsys.resume(tmp_path / "data.pt", model=torch.nn.Linear(2, 1))
