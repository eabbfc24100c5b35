"""A store that a user writes: what the base class does for it, and what it says where a method is missing."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from threads import on_threads

import collectives


class Least(collectives.Store):
    """A store of the user's own with what torch asks of one."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.data[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self.data[key]

    def add(self, key: str, amount: int) -> int:
        self.set(key, str(int(self.data.get(key, b"0")) + amount))
        return int(self.data[key])


def test_store_with_set_get_and_add_alone() -> None:
    store = Least()
    for seen in (store, collectives.PrefixStore("x", store)):
        assert not seen.has_extended_api()
        seen.multi_set(["a", "b"], ["1", b"2"])
        assert seen.multi_get(["a", "b"]) == [b"1", b"2"]
        assert seen.add("a", 2) == 3
        with pytest.raises(NotImplementedError, match=r"Least has no append\(\)"):
            seen.append("a", "2")
    with pytest.raises(NotImplementedError, match=r"Least has no queue_len\(\)"):
        store.queue_len("q")


def test_store_without_any_method_says_what_it_lacks() -> None:
    class Nothing(collectives.Store):
        """Implements none of the methods."""

    for call, name in (
        (lambda: Nothing().get("a"), "get"),
        (lambda: Nothing().multi_get(["a", "b"]), "get"),
        (lambda: Nothing().multi_set(["a"], ["1"]), "set"),
        (lambda: Nothing().append("a", "1"), "append"),
    ):
        with pytest.raises(NotImplementedError, match=rf"^Not implemented: Nothing has no {name}\(\)"):
            call()


@pytest.mark.parametrize(("call", "told"), [("wait", None), ("multi_get", [b"value"])])
def test_a_key_that_is_deleted_at_once_has_been_there(call: str, told: object) -> None:
    """Whoever waits in a HashStore is told of a key, even if it is gone before the thread runs."""
    store, done = collectives.HashStore(), threading.Event()

    def ask() -> object:
        try:
            return getattr(store, call)(["key"])
        finally:
            done.set()

    def set_and_delete() -> None:
        for _ in range(10):  # the other thread waits before the first, or one of the others
            if done.wait(0.2):
                return
            store.set("key", "value")
            store.delete_key("key")

    store.set_timeout(timedelta(seconds=2))
    assert on_threads(ask, set_and_delete) == [told, None]
