"""Where a server listens to whom nobody named a port."""

from __future__ import annotations

from datetime import timedelta

import pytest
from ports import free_ports

from collectives import DistNetworkError, TCPStore
from collectives.store.tcp.listen import PORT_RANGE_VARIABLE


def serve(port=0):
    return TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=10))


def test_servers_share_the_ports_of_the_range(monkeypatch):
    ports = free_ports(2)
    monkeypatch.setenv(PORT_RANGE_VARIABLE, f"{ports[0]}-{ports[-1]}")
    stores = [serve(), serve()]
    assert {store.port for store in stores} == set(ports)
    for store in stores:
        store.set("key", "value")
        assert store.get("key") == b"value"
    with pytest.raises(
        DistNetworkError, match=f"all of the 2 ports of COLLECTIVES_PORT_RANGE={ports[0]}-{ports[-1]}"
    ):
        serve()


def test_both_families_of_localhost_get_one_port_of_the_range(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv(PORT_RANGE_VARIABLE, f" {port}-{port} ")
    store = TCPStore("localhost", 0, 1, True, timedelta(seconds=10))
    assert store.port == port


def test_a_named_port_needs_no_place_in_the_range(monkeypatch):
    named, other = free_ports(2)
    monkeypatch.setenv(PORT_RANGE_VARIABLE, f"{other}-{other}")
    assert serve(named).port == named


@pytest.mark.parametrize(
    "text", ["30000", "30001-30000", "0-7", "65535-65536", "a-b", "-5-7", "30000-30001-"]
)
def test_what_is_no_range_is_refused(monkeypatch, text):
    monkeypatch.setenv(PORT_RANGE_VARIABLE, text)
    with pytest.raises(ValueError, match=r"COLLECTIVES_PORT_RANGE='.*' is no range .*as in 30000-30199"):
        serve()
