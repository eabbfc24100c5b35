"""Handles as somebody else may write them, and what a process listens on until it serves."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from collectives import DistBackendError
from collectives.secret import SECRET
from collectives.store.joining import meeting_place
from collectives.store.joining.meeting_place import Listener, MeetingPlace, id_of

LONG = timedelta(seconds=20)


def said_by(handle):
    text = handle.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


@pytest.fixture(params=["", "a secret of this test's processes"])
def _secret(request, monkeypatch):
    if request.param:
        monkeypatch.setenv(SECRET, request.param)
    else:
        monkeypatch.delenv(SECRET, raising=False)


@pytest.mark.usefixtures("_secret")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": "evil.example"}, "the host 'evil.example', which is no address"),
        ({"host": "localhost"}, "which is no address"),
        ({"host": "127.0.0.1\n"}, "which is no address"),
        ({"id": "0" * 31}, "the id"),
        ({"id": "../" + "0" * 29}, "the id"),
        ({"place": "Z" * 32}, "the place"),
        ({"port": 0}, "the port 0"),
        ({"port": 2**16}, "the port 65536"),
        ({"port": True}, "port = True"),
        ({"process": None}, "process = None"),
        ({"process": "p" * 4096}, "must be ASCII of at most 4096"),
    ],
)
def test_what_a_handle_says_is_checked(change, words) -> None:
    said = said_by(MeetingPlace().handle)
    assert id_of(meeting_place._written(said)) == said["id"]
    with pytest.raises(ValueError, match=words):
        id_of(meeting_place._written({**said, **change}))


@pytest.mark.usefixtures("_secret")
@pytest.mark.parametrize(
    "handle", ["", "collectives-1", "collectives-1.\udc80.", "ä", "gloo.a.b", "x" * 2**20, "1" * 4097]
)
def test_what_is_no_handle_is_refused(handle) -> None:
    with pytest.raises((ValueError, DistBackendError)):
        id_of(handle)
    with pytest.raises(TypeError):
        id_of(handle.encode(errors="replace"))


def test_an_unlikely_nesting_is_refused() -> None:
    text = base64.urlsafe_b64encode(b"[" * 3000).decode().rstrip("=")
    with pytest.raises(ValueError, match="cannot be read"):
        id_of(f"collectives-1.{text}.{meeting_place._proof(text)}")


@pytest.mark.parametrize(
    "change",
    [
        {"global_ranks": [0, -1]},
        {"global_ranks": [0, 2**31]},
        {"global_ranks": [0, True]},
        {"global_ranks": [0]},
        {"generation": 0},
        {"generation": 2**31 + 1},
    ],
)
def test_what_members_have_come_to_is_checked(change) -> None:
    right = {"global_ranks": [0, 1], "generation": 1}
    assert meeting_place._met(right, 2) == right
    with pytest.raises(ValueError, match="it has the"):
        meeting_place._met({**right, **change}, 2)


@pytest.mark.parametrize("change", [{"global_rank": -1}, {"global_rank": 2**31}, {"generation": -1}])
def test_what_a_member_tells_is_checked(change) -> None:
    right = {"kind": "host", "layout": 1, "global_rank": 0, "generation": 0}
    assert meeting_place._member(right) == right
    with pytest.raises(ValueError, match="it has the"):
        meeting_place._member({**right, **change})


# ---- what a process listens on -----------------------------------------------------------------------------


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def test_threads_that_serve_at_once_get_one_store(monkeypatch) -> None:
    class Slow(meeting_place.PlacedStore):
        def __init__(self, *args, **options):
            time.sleep(0.2)
            super().__init__(*args, **options)

    monkeypatch.setattr(meeting_place, "PlacedStore", Slow)
    listener, found = Listener("localhost"), []
    threads = [
        threading.Thread(target=lambda: found.append(listener.serve("a purpose", LONG))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert {*map(id, found)} == {id(listener.served)}
    found[0].set("a", "b")
    listener.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_listener_that_could_not_serve_listens_on(monkeypatch, late) -> None:
    """Before and after the server has the descriptor."""

    class Failing(meeting_place.PlacedStore):
        def __init__(self, *args, **options):
            if late:
                super().__init__(*args, **options)
                self.close()
            raise OSError("no")

    listener = Listener("localhost")
    socket.create_connection(listener.address).close()
    before = descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(meeting_place, "PlacedStore", Failing)
        for _ in range(3):
            with pytest.raises(OSError, match="no"):
                listener.serve("a purpose", LONG)
    assert descriptors() == before
    store = listener.serve("a purpose", LONG)
    store.set("a", "b")
    assert store.get("a") == b"b"
    listener.close()
    assert listener.serve("a purpose", LONG) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.address)
