"""`gnnsys.open(pace=...)`: who is told which rate, that batches stay the same, and what is refused on every rank."""

from __future__ import annotations

import json
import math

import pytest

import gnnsys
from gnnsys.comm import LINK_PAYLOAD
from gnnsys.planning import LaunchPlan, PlannedHost, parse_launch_plan
from gnnsys.session.paced_links import PacedLink, assisting_links, paced_link
from tests.session.test_plan import NUM_NODES, digest_of, make_parts
from tests.support.processes import run_ranks

PLAN = LaunchPlan(
    hosts=(
        PlannedHost(name="h1", num_ranks=2, rate_in=8e6, rate_out=4e6),
        PlannedHost(name="h2", num_ranks=1, rate_in=2e6),
        PlannedHost(name="h3", num_ranks=1),
    )
)


def test_rates_are_of_this_hosts_link_and_headers_take_their_part():
    assert paced_link(None, PLAN, "h1") == paced_link(False, None, "h1") == PacedLink(None, None)
    assert paced_link("8mbit", None, "anything") == pytest.approx((1e6 * LINK_PAYLOAD,) * 2)
    assert paced_link(True, PLAN, "h1.lan") == pytest.approx((8e6 * LINK_PAYLOAD, 4e6 * LINK_PAYLOAD))
    assert paced_link(True, PLAN, "h2") == (2e6 * LINK_PAYLOAD, None)
    assert paced_link("unlimited", None, "h1") == PacedLink(None, None)
    assert assisting_links(PLAN, ["h2", "h9"]) == [(2e6 * LINK_PAYLOAD, None), (None, None)]


@pytest.mark.parametrize(
    ("given", "plan", "words"),
    [
        (True, None, "takes the rates of links from a plan, and there is none"),
        (True, PLAN, "the plan has no rate_in or rate_out of host h3"),
        ("fast", None, "a rate looks like 10gbit"),
        (0, None, "a rate must be more than 0"),
    ],
)
def test_a_pace_that_is_no_rate_is_one_line(given, plan, words):
    with pytest.raises(ValueError, match=words) as caught:
        paced_link(given, plan, "h3")
    assert "\n" not in str(caught.value)


def test_a_plan_keeps_the_rates_of_links_for_ranks_and_in_files():
    for text in (PLAN.text(), PLAN.line_for_ranks()):
        assert parse_launch_plan(text, "plan").hosts == PLAN.hosts
    assert math.isinf(PLAN.hosts[2].rate_in) and "rate" not in json.loads(PLAN.text())["hosts"][2]
    wrong = json.loads(PLAN.text())
    wrong["hosts"][1]["rate_out"] = "10gb"
    with pytest.raises(ValueError, match="host h2: rate_out: a rate looks like"):
        parse_launch_plan(json.dumps(wrong), "plan")


PROGRAM = """
import hashlib, json, os, sys, torch, gnnsys
from gnnsys.comm import Kind
folder = sys.argv[1]
os.environ["GNNSYS_LAUNCH_HOST"] = "h%d" % (1 + int(os.environ["GROUP_RANK"]))
told = []
with gnnsys.init(timeout=120, process_group=False) as session:
    parts = os.path.join(folder, "parts")
    for given in ({"pace": True}, {"pace": "fast" if session.rank else "1gbit"}):
        try:
            gnnsys.open(parts, **given)
        except ValueError as error:
            told.append(str(error))
    graph = gnnsys.open(parts, plan=os.path.join(folder, "plan.json"), pace=True)
    def batches():
        loader = gnnsys.NeighborLoader(
            graph, [4, 3], input_nodes=graph.from_global(range(session.rank, 120, 3)), batch_size=7,
            shuffle=True, seed=5,
        )
        found = []
        for batch in loader:
            digest = hashlib.sha256()
            for part in (batch.n_id, batch.edge_index, batch.e_id, batch.x, batch.weight):
                digest.update(part.contiguous().numpy().tobytes())
            found.append(digest.hexdigest())
        loader.close()
        return found
    paced, rate = batches(), session.client._share.rate
    session.barrier()
    session.pace(False)
    plain = batches()
    print(json.dumps([told, rate, session.client._share.rate, paced, plain]))
"""


def test_ranks_that_are_paced_make_the_batches_of_one_process(tmp_path):
    path = make_parts(tmp_path / "parts")
    plan = LaunchPlan(hosts=(PLAN.hosts[0], PLAN.hosts[1]))
    (tmp_path / "plan.json").write_text(plan.text())
    ranks = [json.loads(rank.stdout) for rank in run_ranks(PROGRAM, [2, 1], tmp_path)]
    assert all("there is none" in rank[0][0] and "a rate looks like" in rank[0][1] for rank in ranks)
    assert [rank[1] for rank in ranks] == pytest.approx([4e6 * LINK_PAYLOAD, 4e6 * LINK_PAYLOAD, 2e6 * LINK_PAYLOAD])
    assert all(rank[2] is None for rank in ranks), "switched off again"
    with gnnsys.init(process_group=False) as session:
        graph = session.open(path, pace="1gbit")  # alone there is no link
        for number, rank in enumerate(ranks):
            inputs = graph.from_global(range(number, NUM_NODES, 3))
            loader = gnnsys.NeighborLoader(graph, [4, 3], input_nodes=inputs, batch_size=7, shuffle=True, seed=5)
            assert rank[3] == rank[4] == [digest_of(batch) for batch in loader]
