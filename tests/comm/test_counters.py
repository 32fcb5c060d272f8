"""What an endpoint counts."""

from gnnsys.comm.counters import Tally
from gnnsys.comm.kinds import Kind


def test_messages_of_a_kind_are_counted_however_many_peers_have_sent_them():
    """Peers name themselves, so what is kept of each is bounded; who waits for the last request must see it."""
    tally = Tally()
    for peer in range(3000):
        for kind in (Kind.PULL, Kind.SAMPLE):
            tally.received(peer, kind, 10)
    assert tally.num_received([Kind.PULL]) == 3000
    assert tally.num_received([Kind.PULL, Kind.SAMPLE, Kind.PUSH]) == 6000
    assert len(tally.to_json()["peers"]) < 6000
