"""The TCP store: where it listens, whom it waits for, who shares it, and what it says of errors."""

from __future__ import annotations

import datetime as dt
import errno
import gc
import inspect
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from ports import free_port, listening
from store_pairs import LONG
from waiting import until

import collectives
from collectives.store import TCPStore

SECOND = timedelta(seconds=1)


@contextmanager
def garbage_stays():
    """What is in a cycle is not collected."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def later(seconds, function):
    time.sleep(seconds)
    return function()


class TestListening:
    LOOPBACK4, LOOPBACK6 = "0100007F", "00000000000000000000000001000000"
    ALL6 = "0" * 32

    def test_loopback_address(self, server):
        assert listening(server.port, own=True) == {self.LOOPBACK4}

    def test_localhost(self):
        store = TCPStore("localhost", 0, is_master=True)
        assert self.LOOPBACK4 in listening(store.port, own=True) <= {self.LOOPBACK4, self.LOOPBACK6}
        store.close()

    @pytest.mark.full
    def test_localhost_without_ipv4(self, tmp_path):
        """In a network of its own, where the name and the only interface have one address."""
        hosts = tmp_path / "hosts"
        hosts.write_text("::1 localhost\n")
        prepare = (
            f"mount --bind {hosts} /etc/hosts && ip link set lo up && ip address flush dev lo && "
            "ip address add ::1/128 dev lo"
        )
        unshare = ["unshare", "--net", "--mount", "sh", "-c"]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*unshare, prepare], check=False, capture_output=True).returncode
        ):
            pytest.skip("no network of its own for a process here")
        script = (
            "from collectives.store import TCPStore\n"
            "server = TCPStore('localhost', 0, is_master=True)\n"
            "client = TCPStore('localhost', server.port)\n"
            "client.set('key', 'value')\n"
            "assert server.get('key') == b'value'\n"
        )
        command = [*unshare, f'{prepare} && exec "$0" -c "$1"', sys.executable, script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    def test_another_loopback_address(self):
        store = TCPStore("127.0.0.2", 0, is_master=True)
        assert listening(store.port, own=True) == {"0200007F"}
        store.set("key", "value")
        store.close()

    @pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
    def test_ipv6(self):
        try:
            store = TCPStore("::1", 0, is_master=True)
        except collectives.DistNetworkError as error:
            pytest.skip(str(error))
        assert listening(store.port, own=True) == {self.LOOPBACK6}
        client = TCPStore("::1", store.port)
        client.set("key", "value")
        assert store.get("key") == b"value"
        assert repr(client) == f"TCPStore([::1]:{store.port}, client)"
        store.close()

    def test_host_name_means_all_interfaces(self):
        store = TCPStore(socket.gethostname(), 0, is_master=True)
        assert listening(store.port, own=True) & {self.ALL6, "00000000"}
        assert TCPStore("127.0.0.1", store.port).add("n", 1) == 1
        store.close()

    def test_an_address_that_is_not_here_means_all_interfaces(self):
        # 192.0.2.0/24 is for documentation: a machine behind address translation is told such an address.
        store = TCPStore("192.0.2.1", 0, is_master=True)
        assert listening(store.port, own=True) & {self.ALL6, "00000000"}
        store.set("key", "value")
        store.close()

    def test_properties(self, server):
        assert server.host == "127.0.0.1"
        assert server.port > 0
        assert server.libuvBackend is True
        client = TCPStore("localhost", server.port, use_libuv=False)
        assert (client.host, client.port, client.libuvBackend) == ("localhost", server.port, False)
        client.close()

    def test_port_in_use(self, server):
        with pytest.raises(collectives.DistNetworkError) as caught:
            TCPStore("127.0.0.1", server.port, is_master=True)
        assert isinstance(caught.value, dist.DistNetworkError)
        message = str(caught.value)
        assert f"port {server.port} is already in use" in message
        words = rf"^The server socket has failed to listen on any local .*{server.port}.*EADDRINUSE"
        assert re.search(words, message)  # what programs that choose another port look for
        assert "port 0" in message
        assert "MASTER_PORT" in message
        server.set("key", "still works")

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_port_out_of_range(self, port):
        with pytest.raises(ValueError, match=f"from 0 to 65535, is {port}"):
            TCPStore("127.0.0.1", port, is_master=True)

    def test_port_is_free_again_at_once(self, server):
        port = server.port
        clients = [TCPStore("127.0.0.1", port) for _ in range(3)]
        server.close()  # the server closes first, so that its side lingers in TIME_WAIT
        again = TCPStore("127.0.0.1", port, is_master=True)
        assert again.add("n", 1) == 1
        again.close()
        for client in clients:
            client.close()

    @pytest.mark.parametrize("tells_the_port", [False, True])
    def test_listen_fd(self, tells_the_port):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            given = 0 if tells_the_port else port
            store = TCPStore("127.0.0.1", given, is_master=True, master_listen_fd=sock.detach())
        assert store.port == port
        assert TCPStore("127.0.0.1", port).add("n", 1) == 1
        store.close()

    def test_wrong_listen_fd(self):
        with socket.socket() as sock:
            with pytest.raises(ValueError, match="not bound"):
                TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=sock.fileno())
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            with pytest.raises(ValueError, match=f"bound to port {port}, but port is 1"):
                TCPStore("127.0.0.1", 1, is_master=True, master_listen_fd=sock.fileno())
            sock.listen()  # it was left open
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
            pytest.raises(ValueError, match="no TCP"),
        ):
            TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=sock.fileno())
        with pytest.raises(ValueError, match="no socket"):
            TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=0)


class TestConnecting:
    def test_nobody_answers(self):
        port = free_port()
        start = time.monotonic()
        with pytest.raises(collectives.DistNetworkError) as caught:
            TCPStore("127.0.0.1", port, timeout=SECOND / 2)
        assert time.monotonic() - start < 5
        message = str(caught.value)
        assert f"127.0.0.1:{port}" in message
        assert "0.5 s" in message
        assert re.search(r"rank 0.*MASTER_ADDR and MASTER_PORT", message)

    def test_a_name_that_nobody_has(self):
        with pytest.raises(collectives.DistNetworkError, match=r"no host:1.* not known"):
            TCPStore("no host", 1, timeout=SECOND / 10)
        with pytest.raises(ValueError, match=r"'a\.\.b' cannot be the name of a machine"):
            TCPStore("a..b", 1)

    def test_clients_wait_for_the_server(self):
        port = free_port()
        with ThreadPoolExecutor(1) as threads:
            client = threads.submit(TCPStore, "127.0.0.1", port, timeout=LONG)
            time.sleep(0.2)
            server = TCPStore("127.0.0.1", port, is_master=True)
            assert client.result(10).add("n", 1) == 1
        server.close()

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_a_client_that_had_to_wait_ends_with_its_owner(self, host):
        port = free_port()
        with ThreadPoolExecutor(1) as threads, garbage_stays():
            server = threads.submit(later, 0.1, lambda: TCPStore("127.0.0.1", port, is_master=True))
            client = TCPStore(host, port, timeout=LONG)
            native = server.result(10)._server.native
            gone = weakref.ref(client)
            del client
            assert gone() is None
            until(lambda: native.connections == 1)  # the server's own
            server.result().close()

    def test_another_service(self):
        with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as threads:

            def answer():
                connection, _ = other.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"SSH-2.0-OpenSSH")

            served = threads.submit(answer)
            with pytest.raises(
                collectives.DistNetworkError, match=r"is no store server: it answered b'SSH-'"
            ):
                TCPStore("127.0.0.1", other.getsockname()[1], timeout=LONG)
            served.result(10)

    def test_something_that_accepts_and_hangs_up(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            stop = threading.Event()

            def hang_up():
                other.settimeout(0.05)
                while not stop.is_set():
                    with suppress(TimeoutError):
                        other.accept()[0].close()

            with ThreadPoolExecutor(1) as threads:
                threads.submit(hang_up)
                try:
                    with pytest.raises(
                        collectives.DistNetworkError, match=r"gave up after [\d.]+ s \(limit 0\.5 s\)"
                    ):
                        TCPStore("127.0.0.1", other.getsockname()[1], timeout=SECOND / 2)
                finally:
                    stop.set()

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="cannot be 0"):
            TCPStore("127.0.0.1", 0, 0, True)
        with pytest.raises(TypeError, match="host_name"):
            TCPStore(None, 0, 1, True)
        TCPStore("127.0.0.1", 0, -1, True).close()  # not fixed, as None

    def test_signature_is_torchs(self):
        text = dist.TCPStore.__init__.__doc__.partition("(")[2].partition(") -> None")[0]
        theirs = [part.partition(":")[::2] for part in re.split(r", (?=\w+: )", text)][1:]
        ours = list(inspect.signature(TCPStore).parameters.values())
        assert [name for name, _ in theirs] == [parameter.name for parameter in ours]
        for (_, rest), parameter in zip(theirs, ours, strict=True):
            _, equals, default = rest.rpartition(" = ")
            theirs_default = eval(default, {"datetime": dt}) if equals else inspect.Parameter.empty
            assert parameter.default == theirs_default


class TestWorkers:
    def test_the_master_waits_for_all(self):
        port = free_port()
        with ThreadPoolExecutor(3) as threads:
            master = threads.submit(TCPStore, "127.0.0.1", port, 3, True, LONG)
            one = threads.submit(TCPStore, "127.0.0.1", port, 3, False, LONG)
            one.result(10)
            time.sleep(0.1)
            assert not master.done()
            # torch's workers count themselves in likewise.
            two = dist.TCPStore("127.0.0.1", port, 3, False, LONG)
            store = master.result(10)
            two.set("key", "value")
            assert store.get("key") == b"value"
            assert store.num_keys() == 2
            assert store.list_keys() == ["key"]
            store.close()

    def test_our_worker_is_counted_by_torchs_master(self):
        port = free_port()
        with ThreadPoolExecutor(1) as threads:
            master = threads.submit(dist.TCPStore, "127.0.0.1", port, 2, True, LONG)
            worker = TCPStore("127.0.0.1", port, 2, False, LONG)
            worker.set("key", "value")
            assert master.result(10).get("key") == b"value"
            worker.close()

    def test_some_do_not_come(self):
        with pytest.raises(
            collectives.DistStoreError,
            match=r"^Timed out after 0\.3 seconds waiting for clients\. 1/3 clients joined",
        ):
            TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=0.3))

    def test_not_waiting(self):
        store = TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
        assert store.num_keys() == 0
        store.close()


class TestSharing:
    def test_multi_tenant(self):
        one = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
        two = TCPStore("127.0.0.1", one.port, is_master=True, multi_tenant=True)
        one.set("key", "value")
        assert two.get("key") == b"value"
        one.close()
        assert two.get("key") == b"value"
        with pytest.raises(collectives.DistNetworkError, match="in use"):
            TCPStore("127.0.0.1", two.port, is_master=True)
        two.close()
        TCPStore("127.0.0.1", two.port, is_master=True, multi_tenant=True).close()

    def test_a_loopback_server_is_not_shared_as_a_public_one(self):
        one = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
        with pytest.raises(collectives.DistNetworkError, match="in use"):
            TCPStore("0.0.0.0", one.port, is_master=True, multi_tenant=True)
        one.close()

    def test_clones_keep_the_server(self, server):
        copy = server.clone()
        client = TCPStore("127.0.0.1", server.port)
        server.close()
        copy.set("key", "value")
        assert client.get("key") == b"value"
        copy.close()
        with pytest.raises(collectives.DistNetworkError):
            client.get("key")

    def test_the_server_ends_with_its_owner(self):
        store = TCPStore("127.0.0.1", 0, is_master=True)
        port = store.port
        client = TCPStore("127.0.0.1", port)
        del store
        gc.collect()
        assert not listening(port, own=True)
        for call in (lambda: client.set("key", "value"), lambda: client.get("key")):
            with pytest.raises(collectives.DistNetworkError, match=f"127.0.0.1:{port} broke"):
                call()

    def test_closing_is_final(self, server):
        client = TCPStore("127.0.0.1", server.port)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.get, "key")
            time.sleep(0.05)
            client.close()
            client.close()
            with pytest.raises(collectives.DistNetworkError, match="closed in this process"):
                waiting.result(10)
        with pytest.raises(collectives.DistNetworkError, match="closed in this process"):
            client.set("key", "value")
        server.set("key", "value")

    def test_torchelastic_agent_has_the_port(self, monkeypatch):
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        store = TCPStore("127.0.0.1", agent.port, is_master=True)
        store.set("key", "value")
        assert agent.get("key") == b"value"
        store.close()


class TestLimits:
    def test_key(self, server):
        with pytest.raises(ValueError, match=r"8191 bytes, this one has 8192"):
            server.set("k" * 8192, "")
        server.set("k" * 8191, "")
        assert server.check(["k" * 8191])

    @pytest.mark.parametrize("letter", ["é", "\udcff", "\0"])
    def test_the_beginning_of_any_key_that_is_too_long_is_shown(self, server, letter):
        key = "a" + letter * 8192
        for call in (lambda: server.set(key, ""), lambda: server.check(["b", key])):
            with pytest.raises(ValueError, match=r"8191 bytes") as raised:
                call()
            assert type(raised.value) is ValueError
            assert str(raised.value).endswith(f": {key[:32]!r}...")
        server.set("key", "value")  # nothing was sent
        assert server.get("key") == b"value"

    def test_value(self, server):
        largest = 8 * 2**20
        with pytest.raises(ValueError, match=f"{largest} bytes, that for key 'big' has {largest + 1}"):
            server.set("big", bytes(largest + 1))
        server.set("big", bytes(largest))
        server.append("big", b"more")
        assert len(server.get("big")) == largest + 4

    def test_count(self, server):
        with pytest.raises(ValueError, match="at most 131072 keys"):
            server.check(["k"] * (128 * 1024 + 1))
        assert not server.check(["k"] * (128 * 1024))

    def test_wait_for_many(self, server):
        keys = [f"key{i}" for i in range(3000)]
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.multi_get, keys)
            server.multi_set(keys[:2000], keys[:2000])
            server.multi_set(keys[2000:], keys[2000:])
            assert waiting.result(20) == [key.encode() for key in keys]


def test_a_kernel_without_ipv6(server, monkeypatch):
    real, look = socket.socket, socket.getaddrinfo

    class WithoutIPv6(real):
        def __init__(self, family=-1, *args, **kwargs):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "no IPv6")
            super().__init__(family, *args, **kwargs)

    def both(host, port, **kwargs):
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        return [six, *look("127.0.0.1", port, **kwargs)]

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    monkeypatch.setattr(socket, "getaddrinfo", both)
    TCPStore("localhost", server.port, timeout=timedelta(seconds=5)).close()


def test_a_clone_of_a_store_that_does_not_wait(server):
    server.set("key", "value")
    server.set_timeout(timedelta(0))
    copy = server.clone()
    assert copy.get("key") == b"value"
    copy.close()


def test_add_at_a_full_server(monkeypatch):
    monkeypatch.setenv("COLLECTIVES_STORE_BYTES", str(2**20))
    store = TCPStore("127.0.0.1", 0, is_master=True)
    for size in (3000, 1):  # to the last byte
        with suppress(collectives.DistStoreError):
            for number in range(10**5):
                store.set(f"{size}/{number}", "x" * size)
    with pytest.raises(collectives.DistStoreError, match="COLLECTIVES_STORE_BYTES"):
        store.add("another counter", 1)
    store.close()


def test_a_barrier_whose_key_somebody_sets(server):
    other = server.clone()
    threading.Timer(0.2, other.set, ("key", "text")).start()
    with pytest.raises(collectives.DistStoreError):
        server.barrier("key", 2, timedelta(seconds=0.6))
    other.close()
