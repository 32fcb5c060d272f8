"""`gnnsys.init(order=...)`, `session.order`, `session.flows`: every server has the order, batches stay the same."""

from __future__ import annotations

import json

import pytest

import gnnsys
from tests.session.test_plan import make_parts
from tests.support.processes import run_ranks

PROGRAM = """
import hashlib, json, sys, gnnsys
with gnnsys.init(timeout=120, process_group=False, order=sys.argv[2]) as session:
    graph = gnnsys.open(sys.argv[1])
    told = [[each["order"] for each in session.flows()]]
    def digest():
        loader = gnnsys.NeighborLoader(
            graph, [4, 3], input_nodes=graph.from_global(range(session.rank, 120, 3)), batch_size=7, seed=5,
            pipeline=gnnsys.loader.PipelineOptions(priority="background" if session.rank else None),
        )
        found = hashlib.sha256()
        for batch in loader:
            found.update(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes())
        loader.close()
        return found.hexdigest()
    digests = [digest()]
    for order in ("auto", "fair", "fifo"):
        session.barrier()
        session.order(order)
        session.barrier()
        told.append([each["order"] for each in session.flows()])
        digests.append(digest())
    try:
        session.order("lifo")
    except ValueError as error:
        told.append(str(error))
    session.barrier()
    flows = session.flows()
    print(json.dumps([told, digests, flows]))
"""


def test_every_server_sends_in_the_order_that_is_said_and_batches_stay_the_same(tmp_path) -> None:
    parts = make_parts(tmp_path / "parts", 2)
    ranks = [json.loads(rank.stdout) for rank in run_ranks(PROGRAM, [1, 1], parts, "fair")]
    for told, digests, flows in ranks:
        assert told[:4] == [["fair"] * 2, ["auto"] * 2, ["fair"] * 2, ["fifo"] * 2]
        assert told[4] == "order must be one of 'auto', 'fair', 'fifo', got 'lifo'"
        assert len(set(digests)) == 1
        assert [each["machine"] for each in flows] == [0, 1]
    classes = ranks[0][2][0]["classes"]  # of the first server, which rank 1 asks from another machine
    assert list(classes) == ["waited", "ahead", "background"]
    assert classes["background"]["replies"] > 0 and classes["background"]["bytes"] > 0


def test_an_order_that_is_none_is_refused_and_one_process_alone_has_no_servers() -> None:
    with pytest.raises(ValueError, match="order must be one of 'auto', 'fair', 'fifo', got None"):
        gnnsys.init(order=None)  # type: ignore[arg-type]
    with gnnsys.init(order="fifo") as session:
        assert session.flows() == []
        session.order("auto")
        with pytest.raises(ValueError, match="got 'first'"):
            session.order("first")
