"""Which addresses a process offers to other machines."""

from __future__ import annotations

import pytest

import collectives as dist
from collectives import _native
from collectives.store.tcp import interfaces
from collectives.store.tcp.interfaces import choose_addresses

INTERFACES = [
    ("lo", "127.0.0.1", True),
    ("eth0", "10.0.0.5", False),
    ("eth0", "fd00::5", False),
    ("eth1", "fe80::1%eth1", False),
    ("eth1", "fd00::6", False),
    ("ib0", "192.168.7.1", False),
    ("docker0", "172.17.0.1", False),
]


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    for variable in ("COLLECTIVES_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(_native, "interfaces", lambda: INTERFACES)
    monkeypatch.setattr(
        interfaces, "_addresses_towards", lambda host: iter({"near": ["192.168.7.1"]}.get(host, []))
    )


class _Store:
    host = "near"


class _Prefixed:
    underlying_store = _Store()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eth0", ["10.0.0.5"]),
        ("eth", ["10.0.0.5"]),
        ("eth1", ["fd00::6"]),
        ("=ib0", ["192.168.7.1"]),
        ("ib0, eth0", ["192.168.7.1", "10.0.0.5"]),
        ("eth0,eth0", ["10.0.0.5", "10.0.0.5"]),
    ],
)
@pytest.mark.parametrize("variable", ["COLLECTIVES_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_named_interfaces_give_an_address_each(monkeypatch, variable, text, expected):
    monkeypatch.setenv(variable, text)
    assert choose_addresses(_Store(), False) == (expected, True)


def test_own_variable_goes_before_gloos(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("COLLECTIVES_SOCKET_IFNAME", "eth0")
    assert choose_addresses(_Store(), False).addresses == ["10.0.0.5"]


@pytest.mark.parametrize("text", ["wlan0", "=eth", "eth0,wlan0"])
def test_unknown_interface_is_refused_with_a_list_of_those_there_are(monkeypatch, text):
    monkeypatch.setenv("COLLECTIVES_SOCKET_IFNAME", text)
    with pytest.raises(dist.DistNetworkError, match=r"COLLECTIVES_SOCKET_IFNAME=.*ib0 \(192.168.7.1\)"):
        choose_addresses(_Store(), False)


@pytest.mark.parametrize(
    ("text", "expected"), [("^ib0", "10.0.0.5"), ("^ib,eth0", "172.17.0.1"), ("^=ib", "192.168.7.1")]
)
def test_excluded_interfaces_are_not_chosen(monkeypatch, text, expected):
    monkeypatch.setenv("COLLECTIVES_SOCKET_IFNAME", text)
    assert choose_addresses(_Prefixed(), False).addresses == [expected]


def test_without_a_name_the_way_to_the_store_decides():
    assert choose_addresses(_Store(), False) == (["192.168.7.1"], False)
    assert choose_addresses(object(), False) == (["10.0.0.5"], False)


def test_loopback_serves_only_where_it_reaches_everyone(monkeypatch):
    monkeypatch.setattr(_native, "interfaces", lambda: INTERFACES[:1])
    assert choose_addresses(object(), True).addresses == ["127.0.0.1"]
    with pytest.raises(dist.DistNetworkError, match="name an interface in COLLECTIVES_SOCKET_IFNAME"):
        choose_addresses(object(), False)
