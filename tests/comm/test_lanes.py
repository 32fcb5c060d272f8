"""Several connections of a client to one server: who travels where, and that nothing else is different."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from gnnsys.comm import (
    Client,
    Closed,
    Keys,
    Kind,
    Limits,
    Reply,
    Request,
    Server,
    default_lanes,
    default_server_io_threads,
    default_server_threads,
)
from gnnsys.comm.client import MAX_LANES
from gnnsys.comm.client_quotas import client_of
from gnnsys.comm.kinds import BULK, is_change, is_spread, is_structure, traffic_class
from tests.comm.endpoints import DEADLINE, Proxy, joined, until

LANES = 3


class Held:
    """Answers PULL at once with what came; SAMPLE and PUSH wait in `futures` until they are told."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[Reply]] = {}  # by request id
        self.handlers = {
            Kind.PULL: lambda request: Reply(request.arrays),
            Kind.SAMPLE: self._hold,
            Kind.PUSH: self._hold,
        }

    def _hold(self, request: Request) -> Future[Reply]:
        return self.futures.setdefault(request.request_id, Future())

    def release(self) -> None:
        for request_id, future in [*self.futures.items()]:  # a copy: others may come meanwhile
            if not future.done():
                future.set_result(Reply(options={"id": request_id}))


def fill(client: Client) -> list:
    """A request that is not answered on every lane, one after the other; those requests."""
    waiting = []
    for lane in client._links[0].lanes:
        client.request(0, Kind.PULL).result(DEADLINE)  # has been answered on this one, which opens the next
        assert lane.is_heard
        waiting.append(client.request(0, Kind.SAMPLE))
        assert [*lane.outstanding.values()] == waiting[-1:]
    return waiting


@pytest.mark.parametrize("keys", [None, Keys.generate()], ids=["open", "encrypted"])
def test_a_request_takes_the_lane_with_the_least_to_carry(keys):
    held = Held()
    with joined(held.handlers, client={"lanes": LANES}, keys=keys, io_threads=LANES) as (_, client):
        fill(client)
        heavy = [client.request(0, Kind.SAMPLE, reply_bytes=1 << 30) for _ in range(LANES - 1)]
        lanes = client._links[0].lanes
        free = min(lanes, key=lambda lane: lane.load)
        for _ in range(4):
            pending = client.request(0, Kind.SAMPLE)
            assert pending.request_id in free.outstanding and heavy[0].request_id not in free.outstanding
        array = torch.arange(100_000)
        assert torch.equal(client.request(0, Kind.PULL, [array]).result(DEADLINE).arrays[0], array)
        until(lambda: len(held.futures) == 2 * LANES + 3)
        held.release()
        until(lambda: client.counters()["outstanding"] == 0)
        assert [lane.load for lane in lanes] == [0] * LANES


def test_what_changes_rows_has_one_connection_for_itself_and_control_has_no_lanes():
    held = Held()
    with joined(held.handlers, client={"lanes": LANES}) as (_, client):
        link = client._links[0]
        client.request(0, Kind.PUSH)
        assert [lane.socket for lane in link.lanes] == [None] * LANES, "rows may be asked for before it is answered"
        fill(client)
        for _ in range(5):
            client.request(0, Kind.PUSH)
        assert {pending.kind for pending in link.changes.outstanding.values()} == {Kind.PUSH}
        until(lambda: len(held.futures) == 6 + LANES)
        held.release()
    assert all(not is_spread(kind) for kind in Kind if traffic_class(kind) != BULK)
    assert {kind for kind in Kind if traffic_class(kind) == BULK and not is_spread(kind)} == {Kind.PUSH, Kind.STEP}
    assert all(is_change(kind) for kind in (Kind.PUSH, Kind.STEP)) and not is_change(Kind.PULL)


def test_a_lane_is_opened_once_the_one_before_it_was_answered_and_is_needed():
    held = Held()
    with joined(held.handlers, client={"lanes": LANES}) as (_, client):
        lanes = client._links[0].lanes
        client.request(0, Kind.SAMPLE)
        client.request(0, Kind.SAMPLE)
        assert [lane.socket is not None for lane in lanes] == [True, False, False], "nothing has come on the first yet"
        until(lambda: len(held.futures) == 2)
        held.release()
        until(lambda: client.counters()["outstanding"] == 0)
        for _ in range(5):
            client.request(0, Kind.PULL).result(DEADLINE)
        assert [lane.socket is not None for lane in lanes] == [True, False, False], "one is enough"


@pytest.mark.parametrize("keys", [None, Keys.generate()], ids=["open", "encrypted"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_structure_is_answered_while_rows_that_were_asked_for_before_are_still_on_their_way(lanes, keys):
    """On one connection a reply is behind all that is sent before it, however long that takes on a slow link."""
    rows: dict[int, Future[Reply]] = {}
    handlers = {
        Kind.PULL: lambda request: rows.setdefault(request.request_id, Future()),
        Kind.SAMPLE: lambda request: Reply(request.arrays),
    }
    with joined(handlers, client={"lanes": lanes}, keys=keys) as (_, client):
        link, ids = client._links[0], torch.arange(5)
        client.request(0, Kind.SAMPLE, [ids]).result(DEADLINE)
        assert link.aside.socket is None, "as long as no rows are on their way, lanes do"
        pulls = []
        for lane in link.lanes:
            pulls.append(client.request(0, Kind.PULL))
            assert [*lane.outstanding.values()] == pulls[-1:]
            sample = client.request(0, Kind.SAMPLE, [ids])
            assert (sample.connection is link.aside) == (lane is link.lanes[-1])
            assert torch.equal(sample.result(DEADLINE).arrays[0], ids)
        assert not any(pull.done() for pull in pulls)
        assert all(is_structure(kind) <= is_spread(kind) for kind in Kind) and not is_structure(Kind.PULL)
        until(lambda: len(rows) == lanes)
        for future in rows.values():
            future.set_result(Reply())
        for pull in pulls:
            pull.result(DEADLINE)


def test_a_client_s_quota_counts_all_its_lanes():
    held, allowed = Held(), 10
    limits = Limits(max_client_requests=allowed)
    with joined(held.handlers, client={"lanes": LANES}, limits=limits) as (server, client):
        waiting = fill(client)
        waiting += [client.request(0, Kind.SAMPLE) for _ in range(allowed + 5 - LANES)]
        assert min(len(lane.outstanding) for lane in client._links[0].lanes) == (allowed + 5) // LANES
        until(lambda: server.counters()["events"].get("busy", 0) >= 5)
        until(lambda: server.counters()["unanswered"] == allowed)  # and no more, but for one that is being refused
        assert server.counters()["clients"] == 1
        held.release()

        def answered() -> bool:
            held.release()  # those that were sent again too
            return all(pending.done() for pending in waiting)

        until(answered)
        assert {pending.result().options["id"] for pending in waiting} == {p.request_id for p in waiting}
        until(lambda: server.counters()["held_bytes"] == 0)


def test_lanes_are_one_client_and_strangers_with_other_names_are_others():
    with joined({16: lambda _: Reply()}, client={"lanes": LANES}) as (_, client):
        link = client._links[0]
        for connection in link.connections:
            client._open(link, connection)
        names = [connection.socket._socket.routing_id for connection in link.connections]
        assert len(set(names)) == 3 + LANES
        assert len({client_of(name) for name in names}) == 2, "its control connection, and all for rows and structure"
    assert client_of(b"\0abcd") == b"\0abcd" and client_of(b"") == b""


def test_a_cut_of_one_lane_is_ridden_out_and_the_others_do_not_notice():
    held = Held()
    with Server(held.handlers) as server:
        proxy = Proxy(server.endpoints[0])
        options = {"lanes": 2, "resend_after": 0.1, "ping_interval": 5.0, "lost_after": 40.0}
        try:
            with Client({0: proxy.endpoint}, sender=0, incarnation=0, timeout=DEADLINE, **options) as client:
                client.request(0, Kind.PULL).result(DEADLINE)
                until(lambda: proxy.num_joined == 2)  # the first lane, and control
                waiting = fill(client)
                assert proxy.num_joined == 3
                waiting.append(client.request(0, Kind.SAMPLE, reply_bytes=1 << 30))
                until(lambda: len(held.futures) == 3)
                first, second = client._links[0].lanes
                assert first.load > 1 << 30 > second.load
                proxy.cut_off(2)
                waiting += [client.request(0, Kind.SAMPLE) for _ in range(5)]
                assert len(second.outstanding) == 6
                until(lambda: len(held.futures) == 8)  # what was lost came again
                until(lambda: proxy.num_joined == 4)  # and the connection was made anew
                held.release()
                assert [p.result(DEADLINE).options["id"] for p in waiting] == [p.request_id for p in waiting]
                assert waiting[0].resent == waiting[2].resent == 0
        finally:
            proxy.close()


def test_closing_a_client_fails_what_is_outstanding_on_every_lane():
    held = Held()
    with joined(held.handlers, client={"lanes": LANES}) as (_, client):
        waiting = fill(client)
        client.close()
        for pending in waiting:
            with pytest.raises(Closed):
                pending.result(DEADLINE)


@pytest.mark.parametrize("lanes", [0, -1, MAX_LANES + 1])
def test_a_number_of_lanes_that_makes_no_sense_is_refused(lanes):
    with pytest.raises(ValueError, match=f"lanes is {lanes}; it must be a whole number from 1 to {MAX_LANES}"):
        Client({}, sender=0, incarnation=0, lanes=lanes)


def test_two_cores_have_one_lane_one_io_thread_and_two_threads_for_requests():
    assert [default_lanes(2, 1), default_lanes(2, 2), default_server_io_threads(2), default_server_threads(2)] == [
        1, 1, 1, 2,
    ]  # fmt: skip
    assert default_lanes(16, 2) == default_server_io_threads(16) == default_server_threads(16) == 4


def test_more_cores_are_never_fewer_lanes_and_more_ranks_never_more():
    by_cores = [default_lanes(cores, 2) for cores in range(1, 200)]
    by_ranks = [default_lanes(64, ranks) for ranks in range(1, 200)]
    assert by_cores == sorted(by_cores) and by_ranks == sorted(by_ranks, reverse=True)
    assert min(by_cores + by_ranks) == 1 and max(by_cores + by_ranks) <= MAX_LANES
    for cores in range(4, 200):
        assert default_server_io_threads(cores) <= cores // 4 and default_lanes(cores, 1) <= cores // 2
