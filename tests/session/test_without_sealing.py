"""Hosts that cannot seal rows: one machine does without, several are refused with what to install."""

from __future__ import annotations

import threading

import pytest

from gnnsys.comm import CURVE
from gnnsys.session import job_servers
from gnnsys.session.job_servers import JobServers
from tests.checkpoint.groups import on_ranks
from tests.session.test_open import make_parts
from tests.support.processes import run_ranks

LACKING = """
import sys
sys.modules["cryptography.hazmat.primitives.ciphers.aead"] = None  # as where the package is missing
import gnnsys, torch
with gnnsys.init(timeout=120) as session:
    graph = gnnsys.open(sys.argv[1], samplers=int(sys.argv[2]))
    batch = next(iter(gnnsys.NeighborLoader(graph, [3], input_nodes=graph.from_global(torch.arange(8)), batch_size=8)))
    assert batch.batch_size == 8 and (graph.samplers is not None) == (sys.argv[2] != "0")
"""


@pytest.mark.parametrize(("num_ranks", "num_samplers"), [(1, 0), (1, 1), (2, 0)])
def test_a_job_on_one_machine_needs_nothing_that_seals(num_ranks, num_samplers, tmp_path):
    run_ranks(LACKING, num_ranks, make_parts(tmp_path / "parts"), num_samplers)


def test_a_job_on_two_machines_is_refused_with_what_to_install(tmp_path):
    for rank in run_ranks(LACKING, [1, 1], make_parts(tmp_path / "parts"), 0, check=False):
        assert rank.returncode != 0 and "pip install 'cryptography" in rank.stderr


@pytest.mark.parametrize("lacking", [0, 1, None])
@pytest.mark.parametrize("encrypts", [True, CURVE, False])
def test_ranks_of_one_machine_agree_on_curve_where_one_of_them_cannot_seal(lacking, encrypts, monkeypatch):
    here = threading.local()
    monkeypatch.setattr(job_servers, "_why_not_sealed", lambda: "install it" if here.rank == lacking else None)

    def body(group):
        here.rank, group.num_machines = group.rank, 1
        servers = JobServers(group, 60.0, 30.0)
        servers.encrypts = encrypts
        return servers._agree_on_encryption()

    chosen = CURVE if encrypts is True and lacking is not None else encrypts
    assert on_ranks(2, body) == [chosen, chosen]
