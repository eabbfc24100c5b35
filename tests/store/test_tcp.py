"""The TCP store: where it listens, whom it waits for, what it says of errors, and what it leaves behind."""

from __future__ import annotations

import datetime as dt
import gc
import inspect
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import harness
import pytest
import torch.distributed as dist
from ports import free_port

import collectives
from collectives.store import TCPStore

SECOND = timedelta(seconds=1)
LONG = timedelta(seconds=20)


@pytest.fixture
def server():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    yield store
    store.close()


def listening(port):
    """Returns the addresses, as the kernel shows them in hexadecimal, on which somebody listens on a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, local_port = local.partition(":")
            if state == "0A" and int(local_port, 16) == port:
                found.add(address)
    return found


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class TestListening:
    LOOPBACK4, LOOPBACK6 = "0100007F", "00000000000000000000000001000000"
    ALL6 = "0" * 32

    def test_loopback_address(self, server):
        assert listening(server.port) == {self.LOOPBACK4}

    def test_localhost(self):
        store = TCPStore("localhost", 0, is_master=True)
        assert self.LOOPBACK4 in listening(store.port) <= {self.LOOPBACK4, self.LOOPBACK6}
        store.close()

    def test_another_loopback_address(self):
        store = TCPStore("127.0.0.2", 0, is_master=True)
        assert listening(store.port) == {"0200007F"}
        store.set("key", "value")
        store.close()

    @pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
    def test_ipv6(self):
        try:
            store = TCPStore("::1", 0, is_master=True)
        except collectives.DistNetworkError as error:
            pytest.skip(str(error))
        assert listening(store.port) == {self.LOOPBACK6}
        client = TCPStore("::1", store.port)
        client.set("key", "value")
        assert store.get("key") == b"value"
        assert repr(client) == f"TCPStore([::1]:{store.port}, client)"
        store.close()

    def test_host_name_means_all_interfaces(self):
        store = TCPStore(socket.gethostname(), 0, is_master=True)
        assert listening(store.port) & {self.ALL6, "00000000"}
        assert TCPStore("127.0.0.1", store.port).add("n", 1) == 1
        store.close()

    def test_an_address_that_is_not_here_means_all_interfaces(self):
        # 192.0.2.0/24 is for documentation: a machine behind address translation is told such an address.
        store = TCPStore("192.0.2.1", 0, is_master=True)
        assert listening(store.port) & {self.ALL6, "00000000"}
        store.set("key", "value")
        store.close()

    def test_properties(self, server):
        assert server.host == "127.0.0.1"
        assert server.port > 0
        assert server.libuvBackend is True
        client = TCPStore("localhost", server.port, use_libuv=False)
        assert (client.host, client.port, client.libuvBackend) == ("localhost", server.port, True)
        client.close()

    def test_port_in_use(self, server):
        with pytest.raises(collectives.DistNetworkError) as caught:
            TCPStore("127.0.0.1", server.port, is_master=True)
        assert isinstance(caught.value, dist.DistNetworkError)
        message = str(caught.value)
        assert f"port {server.port} is already in use" in message
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

    def test_listen_fd(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            store = TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=sock.detach())
        assert store.port == port
        assert TCPStore("127.0.0.1", port).add("n", 1) == 1
        store.close()

    def test_listen_fd_tells_the_port(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            store = TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=sock.detach())
        assert store.port == port
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
        with pytest.raises(collectives.DistStoreError, match=r"only 1 of 3 workers .* within 0\.3 s"):
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
        assert not listening(port)
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


def hold(rank, size, port):
    """All ranks but the last wait until they are killed; the last lets the test say when that is over."""
    store = TCPStore("127.0.0.1", port, timeout=LONG)
    if rank == size - 1:
        store.get("end")
        return
    store.set(f"pid{rank}", str(os.getpid()))
    store.get("never")


def serve(rank, size, port, control):
    """Rank 0 serves until it is killed; rank 1 lets the test say when that is over."""
    if rank == 1:
        TCPStore("127.0.0.1", control, timeout=LONG).get("end")
        return
    store = TCPStore("127.0.0.1", port, is_master=True, timeout=LONG)
    store.set("pid", str(os.getpid()))
    while True:
        signal.pause()


def count_in_processes(rank, size, port, rounds):
    store = TCPStore("127.0.0.1", port, timeout=LONG)
    sums = [store.add("n", 1) for _ in range(rounds)]
    store.barrier("done", size)
    store.close()
    return sums


def answer_within(rank, size, port):
    """Rank 1 uses the store of rank 0, which holds the GIL all the time; returns the longest answer."""
    if rank == 0:
        server = TCPStore("127.0.0.1", port, is_master=True, timeout=LONG)
        server.get("ready")
        # One bytecode, within which the interpreter gives the GIL to nobody.
        start = time.monotonic()
        deque(itertools.repeat(None, 4 * 10**8), maxlen=0)
        held = time.monotonic() - start
        server.get("done")
        server.close()
        return held
    client = TCPStore("127.0.0.1", port, timeout=LONG)
    client.set("ready", "")
    longest = 0.0
    for _ in range(50):
        start = time.monotonic()
        client.add("n", 1)
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.005)
    client.set("done", "")
    return longest


class TestProcesses:
    def test_counting(self, server):
        sums = harness.run_ranks(count_in_processes, 3, server.port, 50)
        assert sorted(total for some in sums for total in some) == list(range(1, 151))

    def test_a_killed_client_is_forgotten(self, server):
        native = server._server.native
        with ThreadPoolExecutor(1) as threads:
            ranks = threads.submit(harness.run_ranks, hold, 3, server.port, isolated=True, lost=(0, 1))
            pids = [int(server.get(f"pid{rank}")) for rank in range(2)]
            until(lambda: native.waiting == 3)
            before = native.connections
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            until(lambda: (native.waiting, native.connections) == (1, before - 2))
            server.set("end", "")
            assert [died.exitcode for died in ranks.result(20)[:2]] == [-9, -9]
        server.set("never", "")
        assert server.get("never") == b""

    def test_a_server_that_dies(self, server):
        port = free_port()
        with ThreadPoolExecutor(2) as threads:
            ranks = threads.submit(harness.run_ranks, serve, 2, port, server.port, isolated=True, lost=(0,))
            client = TCPStore("127.0.0.1", port, timeout=LONG)
            got = threads.submit(client.get, "never")
            time.sleep(0.05)
            start = time.monotonic()
            os.kill(int(client.get("pid")), signal.SIGKILL)
            with pytest.raises(collectives.DistNetworkError, match=r"get: the connection .* broke"):
                got.result(10)
            with pytest.raises(collectives.DistNetworkError, match=r"set: the connection .* broke"):
                client.set("key", "value")
            assert time.monotonic() - start < 5
            server.set("end", "")
            ranks.result(20)

    def test_a_server_that_is_stopped(self, server, monkeypatch):
        monkeypatch.setattr("collectives.store.tcp._GRACE_S", 0.2)
        monkeypatch.setattr("collectives.store.tcp_client._ANSWER_S", 0.2)
        port = free_port()
        with ThreadPoolExecutor(1) as threads:
            ranks = threads.submit(harness.run_ranks, serve, 2, port, server.port, isolated=True, lost=(0,))
            client = TCPStore("127.0.0.1", port, timeout=LONG)
            pid = int(client.get("pid"))
            client.set_timeout(timedelta(seconds=0.1))
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(
                    collectives.DistNetworkError, match="did not answer in time; is its process"
                ):
                    client.wait(["never"])
                with pytest.raises(
                    collectives.DistNetworkError, match=r"gave up after|did not answer in time"
                ):
                    client.set("key", "value")
            finally:
                os.kill(pid, signal.SIGKILL)
            server.set("end", "")
            ranks.result(20)
        client.close()

    def test_a_busy_interpreter_stalls_nobody(self):
        held, longest = harness.run_ranks(answer_within, 2, free_port(), isolated=True)
        assert longest < 0.5 < held


class TestForking:
    def test_a_child_is_another_client(self, server):
        client = TCPStore("127.0.0.1", server.port)
        client.set("before", "")
        results = run_in_child(lambda: (client.get("before"), client.add("n", 1), server.add("n", 1)))
        assert results == "(b'', 1, 2)"
        assert client.add("n", 1) == 3
        assert server.get("before") == b""
        client.close()

    def test_a_child_does_not_hold_the_server(self):
        server = TCPStore("127.0.0.1", 0, is_master=True)
        client = TCPStore("127.0.0.1", server.port)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(read_end, 1)  # lives on, with all that it inherited
            os._exit(0)
        try:
            server.close()
            until(lambda: not listening(server.port))
            with pytest.raises(collectives.DistNetworkError, match="broke"):
                client.get("key")
        finally:
            os.write(write_end, b"x")
            os.waitpid(pid, 0)
            os.close(read_end)
            os.close(write_end)
            client.close()

    def test_closing_in_a_child_closes_nothing_here(self, server):
        client = TCPStore("127.0.0.1", server.port)
        assert run_in_child(lambda: (client.close(), server.close())) == "(None, None)"
        client.set("key", "value")
        assert server.get("key") == b"value"
        client.close()


def run_in_child(function):
    """Returns the text of a function's result in a forked child, or of its error."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(function())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            text = repr(error)
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


class TestInterrupts:
    def test_a_wait_ends_and_the_store_stays(self, server):
        def interrupt(number, frame):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                server.get("never")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        until(lambda: server._server.native.waiting == 0)
        server.set("key", "value")
        assert server.get("key") == b"value"


class TestLimits:
    def test_key(self, server):
        with pytest.raises(ValueError, match=r"8191 bytes, this one has 8192"):
            server.set("k" * 8192, "")
        server.set("k" * 8191, "")
        assert server.check(["k" * 8191])

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


def resources():
    gc.collect()
    return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]


def test_nothing_is_left_after_a_hundred_rounds():
    def round_trip():
        server = TCPStore("localhost", 0, is_master=True)
        client = TCPStore("localhost", server.port)
        client.set("key", "value")
        assert server.get("key") == b"value"
        with pytest.raises(collectives.DistStoreError):
            client.wait(["missing"], timedelta(0))

    round_trip()
    before = resources()
    for _ in range(100):
        round_trip()
    assert resources() == before


def test_waiting_costs_no_time(server):
    clients = [TCPStore("127.0.0.1", server.port) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(client.get, "key") for client in clients]
        until(lambda: server._server.native.waiting == 8)
        start = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start < 0.1
        server.set("key", "value")
        assert [wait.result(10) for wait in waits] == [b"value"] * 8
    for client in clients:
        client.close()


def test_the_interpreter_ends_quietly_with_a_server():
    script = (
        "import collectives.store as s\n"
        "store = s.TCPStore('localhost', 0, is_master=True); store.set('a', 'b')\n"
        "keep = [store]; keep.append(keep)\n"
    )
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
