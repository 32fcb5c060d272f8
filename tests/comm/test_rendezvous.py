"""Ranks find each other through the launcher's store: real processes, stale keys, absent ranks, other versions."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from gnnsys.comm import TrainerLost
from gnnsys.comm.joining import LaunchInfo, join
from gnnsys.comm.rendezvous import RendezvousError, absence
from tests.support.processes import run_ranks

MEET = """
from gnnsys.comm.joining import join
group = join(timeout=120)
print(group.rank, group.world_size, group.machine, group.num_machines, group.local_rank, group.local_world_size)
print(group.gather("twice", {"rank": group.rank}), group.share("word", "hello" if group.rank == 1 else None, root=1))
group.barrier()
print(group.gather("twice", group.rank), group.nonce)
group.close()
group.close()
"""


def in_threads(act, items):
    """act(item) for all items at once: results, or the errors, in order."""
    items = list(items)
    results = [None] * len(items)

    def one(index):
        try:
            results[index] = act(items[index])
        except (RendezvousError, ValueError) as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive()
    return results


class Launcher:
    """A store as torchrun's agent keeps one, and the variables it gives its ranks."""

    def __init__(self, world_size: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
        self.world_size = world_size

    def environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def join_all(self, timeout=120.0, ranks=None, versions=None):
        """Every rank's group, or the error it got; each joins in a thread of its own."""
        ranks = list(range(self.world_size)) if ranks is None else ranks

        def one(rank):
            return join(timeout, self.environment(rank), (versions or {}).get(rank, "1"))

        return dict(zip(ranks, in_threads(one, ranks), strict=True))


def test_ranks_of_two_machines_meet():
    ranks = run_ranks(MEET, [1, 2])
    lines = [rank.stdout.splitlines() for rank in ranks]
    assert [line[0] for line in lines] == ["0 3 0 2 0 1", "1 3 1 2 0 2", "2 3 1 2 1 2"]
    assert {line[1] for line in lines} == {"[{'rank': 0}, {'rank': 1}, {'rank': 2}] hello"}
    assert len({line[2] for line in lines}) == 1


def test_without_a_launcher_there_is_a_group_of_one_and_no_store():
    group = join(environment={})
    assert (group.rank, group.world_size, group.num_machines, group.is_leader) == (0, 1, 1, True)
    assert group.gather("x", [1]) == [[1]] and group.share("y", 2) == 2 and group.process_group_store is None
    group.barrier()
    group.agree("fine", None)
    group.close()


def test_a_restart_is_not_fooled_by_the_keys_of_the_last_one():
    launcher = Launcher(3)
    nonces = []
    for turn in range(3):
        groups = launcher.join_all()
        nonces.append({group.nonce for group in groups.values()})
        gathered = in_threads(lambda group, turn=turn: group.gather("x", [group.rank, turn]), groups.values())
        assert gathered == [[[rank, turn] for rank in range(3)]] * 3
    assert all(len(nonce) == 1 for nonce in nonces) and len(set.union(*nonces)) == 3


def test_a_rank_that_was_killed_in_the_join_is_replaced_by_its_successor():
    launcher = Launcher(2)
    launcher.store.set("gnnsys/join/1", "deadbeef")  # what a predecessor posted before it was killed
    groups = launcher.join_all()
    assert groups[0].nonce == groups[1].nonce
    assert launcher.store.get("gnnsys/join/1") != b"deadbeef"


def test_a_rank_that_never_arrives_is_named_on_every_other_rank():
    errors = Launcher(4).join_all(timeout=3.0, ranks=[0, 1, 3])
    assert {str(error) for error in errors.values()} == {absence([2], "at the start of the job", 3.0)}
    assert "rank 2 did not arrive at the start of the job within 3 s" in str(errors[3])


def test_an_absent_rank_0_is_named():
    errors = Launcher(3).join_all(timeout=0.5, ranks=[1, 2])
    assert all("rank 0 did not arrive" in str(errors[rank]) for rank in (1, 2))


def test_different_versions_are_one_error_on_every_rank():
    errors = Launcher(3).join_all(versions={2: "9.9"})
    assert len({str(error) for error in errors.values()}) == 1
    assert "rank 0 has 1, rank 2 has 9.9" in str(errors[1])


def test_a_rank_that_misses_a_meeting_is_named_on_the_others():
    launcher = Launcher(3)
    groups = launcher.join_all()
    told = in_threads(lambda group: group.gather("the meeting", timeout=4.0), [groups[0], groups[2]])
    assert {str(error) for error in told} == {absence([1], "at 'the meeting'", 4.0)}


def test_a_rank_0_that_dies_after_it_came_is_noticed_by_the_others():
    launcher = Launcher(2)
    groups = launcher.join_all()
    key = f"{groups[0]._turn('the meeting')}/0"
    groups[0]._call(lambda store: store.set(key, "null"))  # the last it did
    groups[1].watch(lambda ranks: [99.0 if rank == 0 else 0.0 for rank in ranks], 0.2)
    groups[1]._store.seconds = 120  # the store itself may be slow
    with pytest.raises(TrainerLost, match="rank 0 was not heard of for 99"):
        groups[1].gather("the meeting", timeout=120)


def test_what_one_rank_complains_of_every_rank_raises():
    launcher = Launcher(2)
    groups = launcher.join_all()

    def agree(group):
        group.agree("all well", None)
        group.agree("opening", OSError("part 3 is gone") if group.rank == 1 else None)

    told = in_threads(agree, groups.values())
    assert [(type(error), str(error)) for error in told] == [(ValueError, "part 3 is gone")] * 2


def test_a_store_that_is_gone_is_an_error_within_the_deadline():
    launcher = Launcher(2)
    environment = launcher.environment(1)
    launcher.store = None
    with pytest.raises(RendezvousError, match=r"rank 1 cannot reach torchrun's store at 127\.0\.0\.1"):
        join(1.0, environment)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "two"}, "RANK must be a whole number, got 'two'"),
        ({"RANK": "5"}, r"RANK must be in \[0, WORLD_SIZE\), got 5 of 3"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a whole number"),
    ],
)
def test_variables_that_make_no_sense_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        LaunchInfo.from_environment(Launcher(3).environment(1) | change)


def test_a_launcher_that_does_not_say_which_machine_is_asked_through_the_host():
    launcher = Launcher(2)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        launcher.environment = lambda rank, name=name, earlier=launcher.environment: {
            key: value for key, value in earlier(rank).items() if key != name
        }
    groups = launcher.join_all()
    assert [(g.machine, g.num_machines, g.local_rank, g.local_world_size) for _, g in sorted(groups.items())] == [
        (0, 1, 0, 2),
        (0, 1, 1, 2),
    ]
