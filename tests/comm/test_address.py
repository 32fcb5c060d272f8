"""Which address a machine is reached under: found by the route to the master, settled between the machines."""

from __future__ import annotations

import socket

import pytest

from gnnsys.comm.address import (
    AddressReport,
    endpoint,
    find_address,
    interface_of,
    is_bindable,
    is_loopback,
    settle_address,
)

NO_VARIABLES: dict[str, str] = {}


def _has_ipv6() -> bool:
    return socket.has_ipv6 and is_bindable("::1")


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_the_way_to_a_master_on_this_host_is_loopback(master):
    found = find_address(master, NO_VARIABLES)
    assert is_loopback(found.own) and is_loopback(found.master) and not found.fixed


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("master", ["::1", "[::1]"])
def test_an_ipv6_master_gives_an_ipv6_address(master):
    assert find_address(master, NO_VARIABLES).own == "::1"


def test_the_address_found_is_one_this_host_can_listen_on():
    assert is_bindable(find_address(socket.gethostname(), NO_VARIABLES).own)


def test_the_variable_overrules_the_route():
    found = find_address("localhost", {"GNNSYS_ADDRESS": "10.1.2.3"})
    assert found == AddressReport("10.1.2.3", "", fixed=True)
    assert settle_address([found, AddressReport("10.0.0.2", "10.0.0.1")], 0) == "10.1.2.3"


def test_a_master_that_nobody_knows_is_named():
    with pytest.raises(ValueError, match=r"MASTER_ADDR='no\.such\.host\.invalid'.*neither an address nor a known host"):
        find_address("no.such.host.invalid", NO_VARIABLES)
    with pytest.raises(ValueError, match="GNNSYS_ADDRESS='nonsense address'"):
        find_address("localhost", {"GNNSYS_ADDRESS": "nonsense address"})


def test_machines_with_real_addresses_keep_them():
    found = [
        AddressReport("10.0.0.1", "10.0.0.1"),
        AddressReport("10.0.0.2", "10.0.0.1"),
        AddressReport("fd00::3", "fd00::1"),
    ]
    assert [settle_address(found, machine) for machine in range(3)] == ["10.0.0.1", "10.0.0.2", "fd00::3"]


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_master_that_knows_itself_as_loopback_takes_the_address_that_others_reach(own):
    found = [AddressReport(own, own), AddressReport("10.0.0.2", "10.0.0.1"), AddressReport("10.0.0.3", "10.0.0.1")]
    assert settle_address(found, 0, is_own={"10.0.0.1"}.__contains__) == "10.0.0.1"


def test_of_several_addresses_of_the_master_the_one_that_is_its_own_is_taken():
    found = [
        AddressReport("127.0.1.1", "127.0.1.1"),
        AddressReport("10.0.0.2", "10.0.0.9"),
        AddressReport("fd00::3", "fd00::1"),
    ]
    assert settle_address(found, 0, is_own={"fd00::1"}.__contains__) == "fd00::1"


def test_machines_that_all_know_only_loopback_are_on_one_host():
    found = [AddressReport("127.0.0.1", "127.0.0.1"), AddressReport("127.0.0.1", "127.0.0.1")]
    assert [settle_address(found, machine) for machine in range(2)] == ["127.0.0.1", "127.0.0.1"]


def test_a_master_behind_a_translated_address_is_asked_for_the_variable():
    found = [AddressReport("127.0.1.1", "127.0.1.1"), AddressReport("10.0.0.2", "203.0.113.7")]
    with pytest.raises(ValueError, match=r"machine 0 knows itself only as 127\.0\.1\.1.*GNNSYS_ADDRESS"):
        settle_address(found, 0, is_own=lambda _: False)


def test_endpoints_put_ipv6_addresses_in_brackets():
    assert endpoint("10.0.0.1") == "tcp://10.0.0.1:*"
    assert endpoint("fd00::1", 5000) == "tcp://[fd00::1]:5000"


def test_what_one_machine_found_survives_json():
    found = AddressReport("fd00::1", "fd00::2", fixed=True)
    assert AddressReport.from_json(found.to_json()) == found


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") is None
    if _has_ipv6():
        assert interface_of("::1") == "lo"
