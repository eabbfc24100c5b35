"""Whom the server of a TCP store lets in, and which servers a client trusts."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import refused_calls
import torch.distributed as dist
from forked import in_child
from store_pairs import LONG
from store_server import store_server
from strangers import NOBODY, visit

from collectives import DistNetworkError, DistStoreError
from collectives.secret import derived_key
from collectives.store import TCPStore
from collectives.store.tcp.client import Connection, prove

SECRET = "a secret that all processes of this job share"
VALIDATE_AND_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 77)
PONG = struct.pack("<I", 77)
GET_SECRET = struct.pack("<BQ", 3, 7) + b"/secret"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A store of a job with a secret, which this process has, too."""
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    store.set("secret", "treasure")
    yield store
    store.close()


def hello() -> bytes:
    """Returns what a client that does not encrypt sends first."""
    return b"collectives auth\0" + os.urandom(32)


def proved(port: int, stack: ExitStack) -> socket.socket:
    """Returns a connection whose ends have proved themselves; nothing else has been sent on it."""
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
    prove(Connection(sock, b""), derived_key("store") or b"", False, time.monotonic() + 30)
    sock.settimeout(30)
    return sock


def answer_to(sock: socket.socket, request: bytes) -> bytes:
    """Returns four bytes; fewer if the server hangs up."""
    answer = b""
    with suppress(ConnectionError):
        sock.sendall(request)
        while len(answer) < 4 and (part := sock.recv(4 - len(answer))):
            answer += part
    return answer


def connections(store: TCPStore) -> int:
    assert store._server is not None
    return store._server.native.connections


class TestGuarded:
    def test_who_knows_the_secret_comes_in(self, guarded: TCPStore) -> None:
        client = TCPStore("127.0.0.1", guarded.port, timeout=LONG)
        assert client.get("secret") == b"treasure"
        waiting = threading.Thread(target=client.wait, args=(["later"],))  # on a further connection
        waiting.start()
        client.set("more", "x" * 1_000_000)
        guarded.set("later", "")
        waiting.join()
        assert guarded.get("more") == b"x" * 1_000_000
        copy = client.clone()
        assert copy.get("secret") == b"treasure"
        copy.close()
        client.close()

    def test_who_has_none_is_told_so_at_once(
        self, guarded: TCPStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COLLECTIVES_SECRET")
        with pytest.raises(
            DistNetworkError, match="takes only processes that know its job's secret"
        ) as caught:
            TCPStore("127.0.0.1", guarded.port, timeout=LONG)
        assert SECRET not in str(caught.value)

    def test_who_has_another_is_told_so_long_before_the_limit(
        self, guarded: TCPStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLLECTIVES_SECRET", "the secret of quite another job")
        told = "it closed the connection before both had proved this job's secret"
        with pytest.raises(DistNetworkError, match=told) as caught:
            TCPStore("127.0.0.1", guarded.port, timeout=timedelta(hours=1))
        assert "quite another" not in str(caught.value)

    @pytest.mark.parametrize(
        ("resets", "told"),
        [
            (False, "it closed the connection before both had proved"),
            (True, "the connection broke before both had proved"),
        ],
    )
    def test_a_server_that_then_answers_no_more_is_not_trusted_either(
        self, monkeypatch: pytest.MonkeyPatch, resets: bool, told: str
    ) -> None:
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
        monkeypatch.setattr("collectives.store.tcp.client.ANSWER_S", 0.5)

        def break_off() -> None:
            plug = listener.accept()[0]
            assert len(plug.recv(len(hello()), socket.MSG_WAITALL)) == len(hello())
            if resets:
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            plug.close()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(30)
            first = threading.Thread(target=break_off)
            first.start()
            with pytest.raises(DistNetworkError, match=f"is not trusted: {told} this job's secret"):
                TCPStore("127.0.0.1", listener.getsockname()[1], timeout=timedelta(hours=1))
            first.join()

    def test_a_server_that_proves_another_secret_is_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)

        def say_anything() -> None:
            with suppress(OSError):
                while True:
                    with listener.accept()[0] as plug:
                        plug.sendall(bytes(64))
                        plug.recv(1000, socket.MSG_WAITALL)

        listener = socket.create_server(("127.0.0.1", 0))
        saying = threading.Thread(target=say_anything)
        saying.start()
        with pytest.raises(DistNetworkError, match="is not trusted: it does not know this job's secret"):
            TCPStore("127.0.0.1", listener.getsockname()[1], timeout=timedelta(hours=1))
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        saying.join()

    def test_a_client_of_torch_is_refused(self, guarded: TCPStore) -> None:
        with pytest.raises(RuntimeError):
            dist.TCPStore("127.0.0.1", guarded.port, timeout=timedelta(seconds=1))

    def test_a_server_of_torch_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True)
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
        with pytest.raises(DistNetworkError, match="no answer to the proof of the job's secret"):
            TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1))

    def test_a_server_without_the_secret_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True)
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
        with pytest.raises(DistNetworkError, match="before both had proved this job's secret"):
            TCPStore("127.0.0.1", server.port, timeout=timedelta(hours=1))
        server.close()

    @pytest.mark.full
    def test_strangers_get_nothing(self, guarded: TCPStore) -> None:
        before = connections(guarded)
        attempts = [VALIDATE_AND_PING + GET_SECRET, b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1_000_000]
        attempts += [hello(), hello() + bytes(32), hello() + VALIDATE_AND_PING + GET_SECRET]
        got = visit(guarded.port, *attempts)
        # What a client of torch takes for a wrong answer, and a nonce for what looks like a hello.
        assert got[:3] == [b"auth", b"", b"auth"]
        assert got[3] in {b"auth", b""}
        assert [len(answer) for answer in got[4:]] == [32, 32, 32]
        assert guarded.get("secret") == b"treasure"
        deadline = time.monotonic() + 30
        while connections(guarded) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert connections(guarded) == before

    def test_what_was_overheard_is_worth_nothing(self, guarded: TCPStore) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        heard: list[bytes] = []

        def overhear() -> None:
            ours, _ = listener.accept()
            with ours, socket.create_connection(("127.0.0.1", guarded.port)) as theirs:
                back = threading.Thread(target=_copy, args=(theirs, ours, []))
                back.start()
                _copy(ours, theirs, heard)
                back.join()

        tap = threading.Thread(target=overhear)
        tap.start()
        client = TCPStore("127.0.0.1", listener.getsockname()[1], timeout=LONG)
        assert client.get("secret") == b"treasure"
        client.close()
        tap.join()
        listener.close()
        said = b"".join(heard)
        assert len(said) > 90
        (answer,) = visit(guarded.port, said)
        assert len(answer) == 32  # a nonce of its own
        assert SECRET.encode() not in said

    def test_a_crowd_that_stays_silent_keeps_nobody_out(self, guarded: TCPStore) -> None:
        crowd = [socket.create_connection(("127.0.0.1", guarded.port)) for _ in range(100)]
        client = TCPStore("127.0.0.1", guarded.port, timeout=LONG)
        assert client.get("secret") == b"treasure"
        for one in crowd:
            one.settimeout(30)
            assert one.recv(1) == b""  # hung up on
            one.close()
        assert client.get("secret") == b"treasure"
        client.close()

    def test_after_the_proof_the_limits_hold_as_without_one(
        self, guarded: TCPStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLLECTIVES_STORE_BYTES", str(2**20))
        small = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
        client = TCPStore("127.0.0.1", small.port, timeout=LONG)
        with pytest.raises(DistStoreError, match="65537 bytes, of at most 65536"):
            client.set("big", bytes(65537))
        client.set("key", "goes on")
        client.close()
        small.close()
        with ExitStack() as stack:
            assert answer_to(proved(guarded.port, stack), VALIDATE_AND_PING) == PONG
            assert answer_to(proved(guarded.port, stack), GET_SECRET) == b""
            long_key = struct.pack("<BQ", 1, 4096) + bytes(1024)
            assert answer_to(proved(guarded.port, stack), long_key) == b""

    @pytest.mark.full
    def test_who_proves_itself_and_does_not_greet_is_hung_up_on(self, guarded: TCPStore) -> None:
        with ExitStack() as stack:
            silent = proved(guarded.port, stack)
            idle = proved(guarded.port, stack)
            assert answer_to(idle, VALIDATE_AND_PING) == PONG
            assert silent.recv(1) == b""
            assert answer_to(idle, VALIDATE_AND_PING[5:]) == PONG

    @pytest.mark.full
    def test_strangers_cannot_take_all_descriptors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
        with store_server() as server, ExitStack() as stack:
            server.limit("RLIMIT_NOFILE", 256)
            for word in (hello(), b"", hello()[:20]) * 100:
                stranger = socket.create_connection(("127.0.0.1", server.port), timeout=30)
                stack.enter_context(stranger)
                with suppress(ConnectionError):
                    stranger.sendall(word)
            client = TCPStore("127.0.0.1", server.port, timeout=LONG)
            client.set("key", "value")
            assert client.get("key") == b"value"
            client.close()

    @pytest.mark.full
    def test_where_there_is_no_room_strangers_learn_no_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
        with store_server() as server, ExitStack() as stack:
            client = TCPStore("127.0.0.1", server.port, timeout=LONG)
            server.limit("RLIMIT_NOFILE", 256)

            def fill() -> None:
                for _ in range(256):
                    assert answer_to(proved(server.port, stack), VALIDATE_AND_PING) == PONG

            with pytest.raises(
                ConnectionRefusedError, match="has no room for another connection; raise `ulim"
            ):
                fill()
            assert visit(server.port, hello()) == [b"collectives: no room for another connection"]
            with pytest.raises(DistNetworkError, match="no store server answers"):
                TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1))
            client.set("key", "value")
            assert client.get("key") == b"value"
            client.close()

    def test_the_store_of_an_agent_needs_no_proof(self, monkeypatch: pytest.MonkeyPatch) -> None:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
        monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        client = TCPStore("127.0.0.1", agent.port, timeout=LONG)
        client.set("key", "value")
        assert agent.get("key") == b"value"
        client.close()


def _copy(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
    while part := source.recv(65536):
        seen.append(part)
        target.sendall(part)
    target.shutdown(socket.SHUT_WR)


class TestWithoutSecret:
    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
    def test_another_user_is_turned_away(self, server: TCPStore) -> None:
        server.set("secret", "treasure")
        assert visit(server.port, VALIDATE_AND_PING + GET_SECRET, b"", user=NOBODY) == [b"", b""]
        assert server.get("secret") == b"treasure"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
    def test_last_words_of_another_user_do_no_harm(self, server: TCPStore) -> None:
        """The kernel shows a connection that has been closed as one of root."""
        set_key = struct.pack("<BQ", 1, 5) + b"/evil" + struct.pack("<Q", 1) + b"x"

        def say() -> None:
            os.setuid(NOBODY)
            for _ in range(50):
                with socket.socket() as plug:
                    plug.connect(("127.0.0.1", server.port))
                    plug.sendall(VALIDATE_AND_PING + set_key)

        in_child(say)
        assert not server.check(["evil"])

    @pytest.mark.full
    @pytest.mark.skipif(not refused_calls.AVAILABLE, reason="needs the numbers of system calls here")
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", socket.gethostname()])
    def test_users_are_told_apart_without_sock_diag(self, host: str) -> None:
        """The name of the machine stands for a socket of IPv6 that may speak IPv4."""
        with store_server() as server:
            assert server.evaluate("__import__('refused_calls').refuse_sock_diag()") == "None"
            arguments = "timeout=__import__('datetime').timedelta(seconds=10)"
            make = f"globals().update(own=TCPStore({host!r}, 0, is_master=True, {arguments}))"
            assert server.evaluate(make) == "None"
            assert server.evaluate(f"TCPStore({host!r}, own.port, {arguments}).add('count', 1)") == "1"
            if os.geteuid() == 0:
                port = int(server.evaluate("own.port"))
                assert visit(port, VALIDATE_AND_PING, host=host, user=NOBODY) == [b""]
                assert visit(port, VALIDATE_AND_PING + b"?", host=host) == [PONG]

    def test_too_few_descriptors_do_not_read_as_a_stranger(self, server: TCPStore) -> None:
        def connect(spare: int) -> str:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            taken = []
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for descriptor in taken[:spare]:
                os.close(descriptor)
            try:
                TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=0.3)).close()
            except DistNetworkError as error:
                return str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            return "came in"

        told = [in_child(lambda spare=spare: connect(spare)) for spare in range(1, 5)]  # type: ignore[misc]
        for text in told:
            assert text == "came in" or "Too many open files" in text, text
        assert told[0] != "came in"
        assert told[-1] == "came in"

    def test_a_server_on_another_machine_is_refused_with_a_line_to_copy(self) -> None:
        with pytest.raises(
            DistNetworkError, match="is on another machine, and this process has no job secret"
        ) as caught:
            TCPStore("192.0.2.1", 29500, timeout=timedelta(hours=1))
        line = "(umask 077; openssl rand -hex 32 > ~/.collectives_secret)"
        assert line in str(caught.value)
        assert "export COLLECTIVES_SECRET_FILE=~/.collectives_secret" in str(caught.value)

    def test_the_user_may_let_everybody_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLLECTIVES_INSECURE", "1")
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)

        def ask() -> bytes:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            with socket.create_connection(("127.0.0.1", store.port)) as plug:
                plug.sendall(VALIDATE_AND_PING)
                return plug.recv(4)

        assert in_child(ask) == PONG
        store.close()
