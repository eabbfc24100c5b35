"""How the ranks that form a host group talk through the group's store, of failures too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import DistError, PeerLostError
from collectives.store.records import Announcements, Checked, fetch, fetch_all, next_key, publish
from collectives.store.waiting import delete_keys

__all__ = ["READERS_S", "RendezvousKeys", "StoreLostError", "await_readers"]

_T = TypeVar("_T")

READERS_S = 2.0
"""How long a rank that fails stays for the others to read why."""
_LOOK_AGAIN_S = 0.002


class StoreLostError(Exception):
    """The store cannot be asked any more; its own error is the cause."""


class AskedStore:
    """Calls the methods of a store, all of whose errors are :class:`StoreLostError`.

    Args:
        store: the store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.scope = getattr(store, "scope", "")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def ask(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except Exception as error:
                raise StoreLostError(str(error)) from error

        return ask


def await_readers(store: AskedStore, key: str, size: int, failed: DistError) -> None:
    """Waits a moment until all who can have read why the group fails: the store may go with this rank.

    Args:
        store: the group's store.
        key: counts the ranks that have read it.
        size: number of ranks.
        failed: why; those that are lost or missing read nothing.
    """
    gone = {*failed.missing_ranks, *([failed.rank] if isinstance(failed, PeerLostError) else [])}
    end = time.monotonic() + READERS_S
    readers = store.add(key, 1)
    while readers < size - len(gone) and time.monotonic() < end:
        time.sleep(_LOOK_AGAIN_S)
        readers = store.add(key, 0)


class RendezvousKeys:
    """The keys of one attempt, of which each rank asks equally few, however many ranks there are.

    Args:
        store: the group's own store.
        size: number of ranks; each announces itself once under a name.

    Attributes:
        store: it.
        asked: it; each call raises :class:`StoreLostError` where it fails.
        prefix: with which keys of this attempt begin; empty as long as that is not known.
    """

    def __init__(self, store: Any, size: int) -> None:
        self.store = store
        self.asked = AskedStore(store)
        self._size = size
        self.prefix = ""
        self._own: list[str] = []
        self._announcements: Announcements | None = None

    def name_after(self, address: str) -> str:
        """Gives this attempt its own keys, so that nothing left by another one is taken for its own.

        Args:
            address: of rank 0, which it has made for this attempt.

        Returns:
            What tells this attempt from all others, of other groups and worlds too.
        """
        self.prefix = f"host/{address}"
        return self.scope_of(address)

    def scope_of(self, address: str) -> str:
        """Returns what :meth:`name_after` does, for an address that is not known to the others yet."""
        return f"{self.asked.scope}host/{address}"

    def name(self, name: str, number: int | None = None) -> str:
        """Returns a key of this attempt."""
        return f"{self.prefix}/{name}" + ("" if number is None else f"/{number}")

    def set(self, key: str, value: Any) -> None:
        """Publishes a record."""
        publish(self.asked, key, value)

    def set_own(self, key: str, value: Any) -> None:
        """Publishes a record that this rank deletes by :meth:`delete_own`."""
        self._own.append(key)
        self.set(key, value)

    def get(self, key: str, check: Callable[[Any], _T]) -> _T:
        """Returns a record, checked; waits for it."""
        return fetch(self.asked, key, check)

    def get_all(self, keys: list[str], check: Callable[[Any], _T]) -> list[_T]:
        """Returns records, checked; waits for them."""
        return fetch_all(self.asked, keys, check)

    def announce(self, name: str, record: Any) -> None:
        """Publishes a record under the next number of a name, for who calls :meth:`new`."""
        self.set_own(next_key(self.asked, self.name(name)), record)

    def new(self, name: str, check: Callable[[Any], Checked]) -> list[Checked]:
        """Returns what ranks have announced under a name since the last call, checked; does not wait.

        Args:
            name: always the same one.
            check: of the records.

        Raises:
            DistStoreError: there are more announcements than ranks.
        """
        if self._announcements is None:
            self._announcements = Announcements(self.asked, self.name(name), self._size)
        return list(self._announcements.new(check).values())

    def delete_own(self) -> None:
        """Deletes what this rank has published by :meth:`set_own` and :meth:`announce`."""
        delete_keys(self.store, self._own)
