"""Stores of every kind and combination, as pairs of handles on the same data."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from collectives.store import FileStore, HashStore, PrefixStore, TCPStore

SHORT = timedelta(milliseconds=80)
LONG = timedelta(seconds=20)


BARRIER = hasattr(dist.Store, "barrier")
"""Whether torch's stores have one, and its clients ask for it: from torch 2.12 on."""


def skip_without_barrier(request: pytest.FixtureRequest) -> None:
    """Skips a test of a pair with one of torch's stores, where those have no barrier."""
    if not BARRIER and "torch" in request.node.callspec.id:
        pytest.skip("stores of this torch have no barrier")


def _hash(path):
    store = HashStore()
    return store, store.clone()


def _file(path):
    return FileStore(str(path / "store"), 2), FileStore(str(path / "store"), 2)


def _tcp(path):
    server = TCPStore("127.0.0.1", 0, is_master=True)
    return server, TCPStore("127.0.0.1", server.port)


def _tcp_clients(path):
    server = TCPStore("localhost", 0, is_master=True)
    return TCPStore("localhost", server.port), TCPStore("localhost", server.port), server


def _our_client_torch_server(path, use_libuv=True):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=use_libuv)
    return TCPStore("127.0.0.1", server.port), TCPStore("127.0.0.1", server.port), server


def _our_client_old_torch_server(path):
    return _our_client_torch_server(path, use_libuv=False)


def _torch_client_our_server(path, use_libuv=True):
    server = TCPStore("127.0.0.1", 0, is_master=True)
    clients = [dist.TCPStore("127.0.0.1", server.port, use_libuv=use_libuv) for _ in range(2)]
    return *clients, server


def _old_torch_client_our_server(path):
    return _torch_client_our_server(path, use_libuv=False)


def _our_and_torch_client(path):
    server = TCPStore("127.0.0.1", 0, is_master=True)
    return TCPStore("127.0.0.1", server.port), dist.TCPStore("127.0.0.1", server.port), server


def _torch_server_and_our_client(path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    return server, TCPStore("127.0.0.1", server.port)


def _prefix_hash(path):
    store = HashStore()
    return PrefixStore("a", store), PrefixStore("a", store.clone()), store


def _prefix_prefix_tcp(path):
    store = TCPStore("127.0.0.1", 0, is_master=True)
    return (*(PrefixStore("b", PrefixStore("a", store)) for _ in range(2)), store)


def _prefix_torch_hash(path):
    store = dist.HashStore()
    return PrefixStore("a", store), PrefixStore("a", store)


def _prefix_torch_tcp(path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    return PrefixStore("a", store), PrefixStore("a", store.clone())


def _torch_prefix_tcp(path):
    store = TCPStore("127.0.0.1", 0, is_master=True)
    return dist.PrefixStore("a", store), dist.PrefixStore("a", store), store


def _torch_prefix_hash(path):
    store = HashStore()
    return dist.PrefixStore("a", store), dist.PrefixStore("a", store), store


def _torch_prefix_file(path):
    store = FileStore(str(path / "store"), 1)
    return dist.PrefixStore("a", store), dist.PrefixStore("a", store), store


OURS = {
    "hash": _hash,
    "file": _file,
    "tcp": _tcp,
    "tcp-clients": _tcp_clients,
    "our-client-torch-server": _our_client_torch_server,
    "our-client-old-torch-server": _our_client_old_torch_server,
    "prefix-hash": _prefix_hash,
    "prefix-prefix-tcp": _prefix_prefix_tcp,
    "prefix-torch-hash": _prefix_torch_hash,
    "prefix-torch-tcp": _prefix_torch_tcp,
}
"""Both handles are of our classes."""

EVERY = OURS | {
    "torch-client-our-server": _torch_client_our_server,
    "old-torch-client-our-server": _old_torch_client_our_server,
    "our-and-torch-client": _our_and_torch_client,
    "torch-server-and-our-client": _torch_server_and_our_client,
    "torch-prefix-tcp": _torch_prefix_tcp,
    "torch-prefix-hash": _torch_prefix_hash,
    "torch-prefix-file": _torch_prefix_file,
}


def over(makers):
    """Runs a test with its argument ``pair`` once for each kind."""
    return pytest.mark.parametrize("pair", makers.values(), ids=makers.keys(), indirect=True)


def without(makers, *starts):
    """Leaves out the kinds whose names begin so."""
    return {name: make for name, make in makers.items() if not name.startswith(starts)}
