"""A host that cannot seal rows is named when keys, clients and servers are made, not by a timeout of the first pull."""

from __future__ import annotations

import platform
import re
import sys
import types

import pytest

from gnnsys.comm import CURVE, LOOPBACK, OLDEST_CRYPTOGRAPHY, Client, Keys, Server, check_can_seal
from gnnsys.doctor.software import OLDEST
from gnnsys.session.job_servers import JobServers
from tests.checkpoint.groups import on_ranks

CIPHERS = "cryptography.hazmat.primitives.ciphers.aead"
INSTALL = f"pip install 'cryptography>={OLDEST_CRYPTOGRAPHY}'"


def absent(monkeypatch) -> str:
    monkeypatch.setitem(sys.modules, CIPHERS, None)
    return "has none that can be imported"


def old(monkeypatch) -> str:
    """Ciphers as they were before they could write into memory that is there."""
    module = types.ModuleType(CIPHERS)
    module.AESGCM = type("AESGCM", (), {"encrypt": None, "decrypt": None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CIPHERS, module)
    return "has version "


@pytest.mark.parametrize("lacks", [absent, old])
def test_whatever_seals_says_what_to_install(lacks, monkeypatch):
    check_can_seal()
    sealing, by_curve, plain = (Keys.generate(encrypts=way) for way in (True, CURVE, False))
    found = lacks(monkeypatch)
    makers = [
        Keys.generate,
        lambda: Client({0: f"tcp://{LOOPBACK}:9"}, sender=0, incarnation=0, keys=sealing),
        lambda: Server({}, keys=sealing),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=re.escape(INSTALL)) as refused:
            make()
        assert found in str(refused.value) and platform.node() in str(refused.value)
        assert "gnnsys.init(encrypt='curve')" in str(refused.value)
    for keys in (by_curve, plain):
        Client({0: f"tcp://{LOOPBACK}:9"}, sender=0, incarnation=0, keys=keys).close()
    assert Keys.generate(encrypts=CURVE).encrypts == CURVE


def test_every_rank_of_a_job_on_several_machines_hears_of_it_before_a_server_is_asked(monkeypatch):
    absent(monkeypatch)

    def body(group):
        group.num_machines = 2
        JobServers(group, 60.0, 30.0).order(1, LOOPBACK, True)

    for error in on_ranks(2, body):
        assert isinstance(error, ValueError) and INSTALL in str(error)


def test_the_doctor_asks_for_the_same_version():
    assert OLDEST["cryptography"] == OLDEST_CRYPTOGRAPHY
