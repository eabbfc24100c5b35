"""The TCP store and processes that die, stop, fork, are busy or interrupted, and what is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import harness
import pytest
from forked import in_child
from ports import free_port, listening
from store_pairs import LONG
from store_server import store_server
from waiting import until

import collectives
from collectives.store import TCPStore


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


def hold_the_lock(count):
    """Runs one bytecode within which the interpreter gives the GIL to nobody; returns its seconds."""
    start = time.monotonic()
    deque(itertools.repeat(None, count), maxlen=0)
    return time.monotonic() - start


def answer_within(rank, size, port):
    """Rank 1 uses the store of rank 0, which holds the GIL all the time; returns the longest answer."""
    if rank == 0:
        server = TCPStore("127.0.0.1", port, is_master=True, timeout=LONG)
        server.get("ready")
        count = 10**7
        seconds = min(hold_the_lock(count) for _ in range(3))
        held = hold_the_lock(int(count * 1.2 / seconds))
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
        monkeypatch.setattr("collectives.store.tcp.store._GRACE_S", 0.2)
        monkeypatch.setattr("collectives.store.tcp.client.ANSWER_S", 0.2)
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

    def test_calls_at_a_server_that_is_stopped_end_soon_after_their_limits(self, monkeypatch):
        monkeypatch.setattr("collectives.store.tcp.store._GRACE_S", 1.0)
        calls = [
            lambda store: store.get("never"),
            lambda store: store.wait(["never"]),
            lambda store: store.queue_pop("never"),
            lambda store: store.barrier("never", 2),
            lambda store: store.set("key", "value"),
            lambda store: store.add("count", 1),
        ]
        with store_server() as server, ThreadPoolExecutor(len(calls)) as threads:
            clients = [TCPStore("127.0.0.1", server.port, timeout=LONG) for _ in calls]
            for client in clients:
                assert client.check([])
                client.queue_len("never")  # knows whose server it is
                client.set_timeout(timedelta(seconds=0.5))
            pid = int(server.evaluate("os.getpid()"))
            os.kill(pid, signal.SIGSTOP)
            until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            try:
                start = time.monotonic()
                for result in [*map(threads.submit, calls, clients)]:
                    with pytest.raises(collectives.DistNetworkError, match=r"gave up|not answer in time"):
                        result.result()
                assert time.monotonic() - start < 5
            finally:
                os.kill(pid, signal.SIGCONT)
            for client in clients:
                client.close()

    def test_closing_ends_a_call_that_still_connects(self, server):
        port = free_port()
        with ThreadPoolExecutor(3) as threads:
            ranks = threads.submit(harness.run_ranks, serve, 2, port, server.port, isolated=True, lost=(0,))
            client = TCPStore("127.0.0.1", port, timeout=LONG)
            pid = int(client.get("pid"))
            calls = [threads.submit(client.barrier, "never", 3)]  # on the connection that there is
            time.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
            try:
                calls.append(threads.submit(client.barrier, "never", 3))
                time.sleep(0.2)
                client.close()
            finally:
                os.kill(pid, signal.SIGCONT)
            for call in calls:
                with pytest.raises(collectives.DistNetworkError, match="closed in this process"):
                    call.result(10)
            os.kill(pid, signal.SIGKILL)
            server.set("end", "")
            ranks.result(20)

    def test_a_busy_interpreter_stalls_nobody(self):
        held, longest = harness.run_ranks(answer_within, 2, free_port(), isolated=True)
        assert longest < 0.5 < held


class TestForking:
    def test_a_child_is_another_client(self, server):
        client = TCPStore("127.0.0.1", server.port)
        client.set("before", "")
        results = in_child(lambda: (client.get("before"), client.add("n", 1), server.add("n", 1)))
        assert results == (b"", 1, 2)
        assert client.add("n", 1) == 3
        assert server.get("before") == b""
        client.close()

    def test_a_clone_in_a_child(self, server):
        assert in_child(lambda: server.clone().add("n", 1)) == 1
        assert server.add("n", 1) == 2

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
        assert in_child(lambda: (client.close(), server.close())) == (None, None)
        client.set("key", "value")
        assert server.get("key") == b"value"
        client.close()


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


def resources():
    gc.collect()
    return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]


@pytest.mark.full
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


@pytest.mark.full
def test_the_interpreter_ends_quietly_with_a_server():
    script = (
        "import collectives.store as s\n"
        "store = s.TCPStore('localhost', 0, is_master=True); store.set('a', 'b')\n"
        "keep = [store]; keep.append(keep)\n"
    )
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ENDS_WHILE_A_THREAD_WAITS = """
import sys, threading, time
from datetime import timedelta
from collectives.store import TCPStore

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = TCPStore("127.0.0.1", server.port)

def look():
    while True:
        try:
            if sys.argv[1] == "expires":
                store.wait(["never"], timedelta(milliseconds=50))
            store.set("key", bytes(1_000_000))
        except Exception:
            pass
        begun.set()

class TakesItsTime:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

begun = threading.Event()
threading.Thread(target=look, daemon=True).start()
begun.wait()
late = TakesItsTime()
late.itself = late  # goes when the interpreter ends
"""


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize("how", ["expires", "returns"])
def test_a_process_may_end_while_a_daemon_thread_waits(how):
    """CPython before 3.14 ends a thread that asks for its lock then, which must not abort the process."""
    command = [sys.executable, "-c", ENDS_WHILE_A_THREAD_WAITS, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


A_THOUSAND_CLIENTS = """
import resource, sys, threading, time
from collectives.store import TCPStore

COUNT = 1000
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if hard < 4 * COUNT:
    sys.exit("skip")
resource.setrlimit(resource.RLIMIT_NOFILE, (4 * COUNT, hard))
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
clients = [TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(COUNT)]
seen = []

def look(client):
    client.add("arrived", 1)
    client.wait(["go"])
    seen.append(client.get("value"))

threading.stack_size(256 * 1024)
threads = [threading.Thread(target=look, args=(client,)) for client in clients]
for thread in threads:
    thread.start()
while server.add("arrived", 0) < COUNT:
    time.sleep(0.01)
server.multi_set(["value", "go"], ["of all", ""])
for thread in threads:
    thread.join()
assert seen == [b"of all"] * COUNT, seen
"""


@pytest.mark.full
@pytest.mark.usefixtures("preloaded_python")
def test_a_thousand_clients_wait_for_one_key():
    command = [sys.executable, "-c", A_THOUSAND_CLIENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.stderr == "skip\n":
        pytest.skip("no process here may have 4,000 descriptors")
    assert done.returncode == 0, done.stderr
