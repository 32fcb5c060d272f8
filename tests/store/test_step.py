"""A step is applied when all ranks have come, in their order, once; who does not come is named."""

import tempfile

import pytest
import torch

from gnnsys.comm import Client, Kind, Request
from gnnsys.comm.rendezvous import poll
from gnnsys.store import Shard, Store, TableSpec
from gnnsys.store.rounds import Contribution, StepRounds
from tests.store.cluster import cluster, random_ids, random_rows

ADAGRAD = {"kind": "adagrad", "lr": 0.5, "lr_decay": 0.0, "initial": 0.0, "eps": 0.0}
NOTHING = torch.empty(0, dtype=torch.int64), torch.empty(0, 4)


def test_a_step_waits_for_all_ranks_and_is_their_average():
    with cluster([0, 1], num_ranks=3) as c:
        for store in c.stores:
            store.create("t", 100, (4,))
        ids, grads = random_ids(30, 100), random_rows(30, 4)
        first = c.stores[2].step("t", ids[20:], grads[20:], ADAGRAD)
        second = c.stores[0].step("t", ids[:20], grads[:20], ADAGRAD)
        assert not first.done() and not second.done()
        assert not c.shards[0].table("t").part(0).rows.any()
        c.stores[1].step("t", *NOTHING, ADAGRAD).result()
        first.result()
        second.result()
        total = torch.zeros(100, 4).index_add_(0, ids, grads) / 3
        expected = torch.where(total != 0, -0.5 * total / (total * total).sqrt(), torch.zeros(()))
        torch.testing.assert_close(c.stores[1].tensor("t")[:], expected)
        torch.testing.assert_close(c.stores[1].tensor("t/sum")[:], total * total)


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_the_result_does_not_depend_on_the_pieces_that_gradients_travel_in(monkeypatch, kind):
    optimizer = {
        "adam": {"kind": "adam", "lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
        "adagrad": {"kind": "adagrad", "lr": 0.1, "lr_decay": 0.0, "initial": 0.0, "eps": 1e-10},
        "sgd": {"kind": "sgd", "lr": 0.1},
    }[kind]
    ids, grads, results = random_ids(500, 60), random_rows(500, 16), []
    for frame_bytes in (1 << 20, 1024):  # all at once, and 16 rows
        monkeypatch.setattr("gnnsys.store.push.FRAME_BYTES", frame_bytes)
        with cluster([0, 1]) as c:
            table = c.stores[0].create("t", 60, (16,), init=("uniform", -1.0, 1.0, 3))
            for _ in range(2):
                c.stores[0].step("t", ids, grads, optimizer).result()
            results.append(table[torch.arange(60)])
    assert torch.equal(*results)


def test_the_result_does_not_depend_on_who_comes_first():
    results = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        with cluster([0], num_ranks=3) as c:
            for store in c.stores:
                store.create("t", 10, (4,))
            for turn in range(3):
                ids = random_ids(40, 10, seed=turn)
                steps = [c.stores[r].step("t", ids, random_rows(40, 4, seed=9 * r + turn), ADAGRAD) for r in order]
                for step in steps:
                    step.result()
            results.append(c.stores[0].tensor("t")[:])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_steps_that_are_under_way_together_keep_their_order():
    with cluster([0], num_ranks=2) as c:
        for store in c.stores:
            store.create("t", 10, (4,))
        ids, grads = torch.arange(10), torch.ones(10, 4)
        ahead = [c.stores[0].step("t", ids, grads * k, ADAGRAD) for k in (1, 2, 3)]
        behind = [c.stores[1].step("t", ids, grads * k, ADAGRAD) for k in (1, 2, 3)]
        for step in ahead + behind:
            step.result()
        row, total = 0.0, 0.0
        for k in (1, 2, 3):
            total += k * k
            row -= 0.5 * k / total**0.5
        torch.testing.assert_close(c.stores[0].tensor("t")[:], torch.full((10, 4), row))


def test_ranks_that_do_not_come_are_named_before_the_deadline():
    with cluster([0, 1], num_ranks=4) as c:
        for store in c.stores:
            store.create("t", 10, (4,))
        waiting = [c.stores[rank].step("t", *NOTHING, ADAGRAD, timeout=2.0) for rank in (0, 2)]
        for step in waiting:
            with pytest.raises(
                TimeoutError, match=r"table 't': no gradients came from rank (2, )?1, 3|rank 0, 1, 3|1, 3"
            ):
                step.result()
        with pytest.raises(RuntimeError, match="an earlier push was lost, to table 't'"):
            c.stores[0].step("t", *NOTHING, ADAGRAD)


def test_a_late_rank_is_told_apart_from_one_that_is_a_step_behind():
    rounds = StepRounds("t", lambda contributions: None)
    mine = [Contribution(0, 3, ADAGRAD, [], step=step) for step in range(2)]
    other = Contribution(1, 3, ADAGRAD, [])
    for contribution in [*mine, other]:
        rounds.add(contribution)
    rounds.withdraw(mine[0], 1.0)
    for contribution, missing in [(mine[0], "2"), (other, "2"), (mine[1], "1, 2")]:
        with pytest.raises(TimeoutError, match=f"rank {missing} within"):
            contribution.answer.result(0)
    rounds.withdraw(mine[0], 1.0)
    for step in range(3):
        with pytest.raises(TimeoutError, match="step 0 was given up"):
            rounds.add(Contribution(2, 3, ADAGRAD, [], step=step))


def test_steps_of_one_job_and_one_number_alone_meet():
    applied = []
    rounds = StepRounds("t", lambda contributions: applied.append([c.step for c in contributions]))
    old = Contribution(0, 2, ADAGRAD, [], incarnation=1)
    rounds.add(old)
    rounds.add(Contribution(1, 2, ADAGRAD, [], incarnation=2))
    with pytest.raises(RuntimeError, match="another job has begun"):
        old.answer.result(0)
    with pytest.raises(RuntimeError, match="another job has begun"):
        rounds.add(Contribution(1, 2, ADAGRAD, [], incarnation=1))
    rounds.add(Contribution(0, 2, ADAGRAD, [], incarnation=2, step=1))
    assert not applied
    rounds.add(Contribution(0, 2, ADAGRAD, [], incarnation=2))
    with pytest.raises(RuntimeError, match="came already"):
        rounds.add(Contribution(0, 2, ADAGRAD, [], incarnation=2))
    rounds.add(Contribution(1, 2, ADAGRAD, [], incarnation=2, step=1))
    assert applied == [[0, 0], [1, 1]]
    rounds.restart("it was loaded")
    with pytest.raises(RuntimeError, match="Every rank must load"):
        rounds.add(Contribution(0, 2, ADAGRAD, [], incarnation=2, step=2))


def test_gradients_of_a_job_that_died_are_not_summed_into_the_next_ones():
    with cluster([0], 2) as c:
        c.stores[0].create("t", 4, (1,))
        c.stores[0].step("t", torch.tensor([0]), torch.ones(1, 1), ADAGRAD)  # its rank 1 dies
        assert poll(lambda: c.shards[0].table("t").rounds._waiting, 120)  # or it would be the later job
        with Client(c.clients[0].peers, sender=1, incarnation=99, timeout=120) as client:
            new = Store(machine_of_part=[0], client=client, rank=1, world_size=2)
            with pytest.raises(TimeoutError, match="rank 0"):
                new.step("t", torch.tensor([1]), torch.ones(1, 1), ADAGRAD, timeout=2.0).result()
        assert not c.shards[0].table("t").part(0).rows.any()


def test_a_step_that_was_given_up_is_not_matched_with_the_next_one_and_loading_puts_ranks_together_again(tmp_path):
    with cluster([0, 1], 2) as c:
        first, second = c.stores
        first.create("t", 4, (1,))
        first.save("t", str(tmp_path))
        ids, grads = torch.tensor([0, 3]), torch.ones(2, 1)
        for store in c.stores:
            store.step("t", ids[:0], grads[:0], ADAGRAD)  # numbers are known now
        first.flush()
        with pytest.raises(TimeoutError, match="rank 1 within"):
            first.step("t", ids, grads, ADAGRAD, timeout=2.0).result()
        with pytest.raises(TimeoutError, match="given up"):
            second.step("t", ids, grads, ADAGRAD).result()
        for store in c.stores:
            with pytest.raises(RuntimeError, match="load tables from a save"):
                store.step("t", ids, grads, ADAGRAD)
            store.load("t", str(tmp_path))
        for step in [store.step("t", ids, grads, ADAGRAD) for store in c.stores]:
            step.result()
        assert first.tensor("t")[:].flatten().tolist() == [-0.5, 0, 0, -0.5]


def test_a_rank_that_did_not_load_a_table_with_the_others_is_told():
    with cluster([0], 2) as c, tempfile.TemporaryDirectory() as folder:
        for store in c.stores:
            store.create("t", 4, (4,))
        for step in [store.step("t", *NOTHING, ADAGRAD) for store in c.stores]:
            step.result()
        c.stores[0].save("t", folder)
        c.stores[0].load("t", folder)
        with pytest.raises(RuntimeError, match="Every rank must load the table"):
            c.stores[1].step("t", *NOTHING, ADAGRAD).result()


def test_a_step_that_comes_again_counts_once():
    shard, spec = Shard(0), TableSpec("t", (4,), torch.float32, (0, 10), True)
    table = shard.create(spec, [0], {"kind": "zeros"})
    step = shard.handlers()[Kind.STEP]

    def request(sender: int) -> Request:
        options = {"table": spec.number, "step": 0, "world_size": 2, "optimizer": ADAGRAD}
        arrays = [torch.tensor([[0, 1, 2]]), torch.tensor([3]), torch.ones(1, 4)]
        return Request.local(Kind.STEP, arrays, options, sender=sender, incarnation=1)

    first = step(request(0))
    assert step(request(0)) is first and not first.done() and table.steps == 0
    second = step(request(1))
    first.result(60)
    assert step(request(1)) is second and step(request(0)) is first
    assert table.steps == 1 and torch.equal(table.part(0).rows[3], torch.full((4,), -0.5))
    shard.close()


def test_ranks_that_disagree_about_the_optimizer_are_told():
    with cluster([0], num_ranks=2) as c:
        for store in c.stores:
            store.create("t", 10, (4,))
        steps = [c.stores[r].step("t", *NOTHING, {**ADAGRAD, "lr": 0.1 + r}) for r in (0, 1)]
        for step in steps:
            with pytest.raises(ValueError, match="give every rank the same optimizer"):
                step.result()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"kind": "rprop"}, "must be one of"),
        ({**ADAGRAD, "lr": float("inf")}, "lr must be a finite number"),
        ({**ADAGRAD, "momentum": 1.0}, "adagrad takes"),
        ({"kind": "adam", "lr": 0.1, "beta1": 1.0, "beta2": 0.9, "eps": 0.0}, r"beta1 must be in \[0, 1\)"),
    ],
)
def test_optimizers_that_do_not_exist_are_refused(optimizer, message):
    with cluster([0]) as c:
        c.stores[0].create("t", 10, (4,))
        with pytest.raises(ValueError, match=message):
            c.stores[0].step("t", *NOTHING, optimizer).result()


def test_only_float_tables_that_exist_are_trained_and_dropping_ends_the_wait():
    with cluster([0], num_ranks=2) as c:
        c.stores[0].create("half", 10, (4,), torch.bfloat16)
        with pytest.raises(ValueError, match="optimizers work on float32 rows"):
            c.stores[0].step("half", *NOTHING, ADAGRAD).result()
        c.stores[0].create("t", 10, (4,))
        waiting = c.stores[0].step("t", *NOTHING, ADAGRAD)
        c.stores[1].drop("t")
        with pytest.raises(ValueError, match="was dropped"):
            waiting.result()


@pytest.mark.parametrize(
    ("ids", "grads", "words"),
    [
        (torch.tensor([5]), torch.ones(1, 4), "part 1 has 5 rows, not all of the ids"),
        (torch.tensor([0]), torch.ones(1, 3), "rows do not fit table 't'"),
        (torch.tensor([0]), torch.ones(1, 4).half(), "must be torch.float32, got torch.float16"),
        (torch.tensor([0.0]), torch.ones(1, 4), "must be int32 or int64"),
    ],
)
def test_a_step_with_a_fault_in_its_second_part_changes_nothing_of_the_first(ids, grads, words):
    shard = Shard(0)
    table = shard.create(TableSpec("t", (4,), torch.float32, (0, 5, 10)), [0, 1], {"kind": "zeros"})
    step = Contribution(0, 1, ADAGRAD, [(0, torch.tensor([1]), torch.ones(1, 4)), (1, ids, grads)])
    table.step(step)
    with pytest.raises(ValueError, match=f"rank 0: .*{words}.*Nothing of this step was applied"):
        step.answer.result(0)
    assert not table.part(0).rows.any() and table.steps == 0 and shard.names() == ["t"]
    again = Contribution(0, 1, ADAGRAD, [(0, torch.tensor([1]), torch.ones(1, 4))], step=1)
    table.step(again)
    again.answer.result(0)
    assert table.part(0).rows[1].all() and table.steps == 1
    shard.close()
