"""The keys by which the ranks that form a host group talk through the group's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from collectives.backends.host.rendezvous_failures import StoreLostError
from collectives.errors import DistStoreError
from collectives.store.records import Checked, read, written
from collectives.store.waiting import delete_keys

__all__ = ["RendezvousKeys"]

_T = TypeVar("_T")


class RendezvousKeys:
    """The keys of one attempt, of which each rank asks equally few, however many ranks there are.

    Args:
        store: the group's own store.
        size: number of ranks; each announces itself once under a name.

    Attributes:
        store: it.
        prefix: with which keys of this attempt begin; empty as long as that is not known.
    """

    def __init__(self, store: Any, size: int) -> None:
        self.store = store
        self._size = size
        self.prefix = ""
        self._own: list[str] = []
        self._announced = 0
        self._unread: list[int] = []

    def name_after(self, address: str) -> None:
        """Gives this attempt its own keys, so that nothing left by another one is taken for its own."""
        self.prefix = "host/" + address.split(" ", maxsplit=1)[0]

    def name(self, name: str, number: int | None = None) -> str:
        """Returns a key of this attempt."""
        return f"{self.prefix}/{name}" + ("" if number is None else f"/{number}")

    def ask(self, what: str, *arguments: Any) -> Any:
        """Calls the store.

        Raises:
            StoreLostError: it fails.
        """
        try:
            return getattr(self.store, what)(*arguments)
        except Exception as error:
            raise StoreLostError(str(error)) from error

    def set(self, key: str, value: Any) -> None:
        """Publishes a record."""
        self.ask("set", key, written(value, key))

    def set_own(self, key: str, value: Any) -> None:
        """Publishes a record that this rank deletes by :meth:`delete_own`."""
        self._own.append(key)
        self.set(key, value)

    def get(self, key: str, check: Callable[[Any], _T]) -> _T:
        """Returns a record, checked; waits for it."""
        return read(self.ask("get", key), key, check)

    def get_all(self, keys: list[str], check: Callable[[Any], _T]) -> list[_T]:
        """Returns records, checked; waits for them."""
        if not self.ask("has_extended_api"):
            return [self.get(key, check) for key in keys]
        values = self.ask("multi_get", keys)
        return [read(value, key, check) for key, value in zip(keys, values, strict=True)]

    def announce(self, name: str, record: Any) -> None:
        """Publishes a record under the next number of a name, for who calls :meth:`new`."""
        self.set_own(self.name(name, int(self.ask("add", self.name(name), 1))), record)

    def new(self, name: str, check: Callable[[Any], Checked]) -> list[Checked]:
        """Returns what ranks have announced under a name since the last call, checked; does not wait.

        Args:
            name: always the same one.
            check: of the records.

        Raises:
            DistStoreError: there are more announcements than ranks.
        """
        known = self._announced
        self._announced = int(self.ask("add", self.name(name), 0))
        if not known <= self._announced <= self._size:
            raise DistStoreError(
                f"key {self.name(name)!r} of the store counts {self._announced} announcements after {known}, "
                f"of {self._size} ranks; something else than these ranks writes to this store"
            )
        self._unread += range(known + 1, self._announced + 1)
        here = self._unread
        # A number comes a moment before its record.
        if here and not self.ask("check", [self.name(name, number) for number in here]):
            here = [number for number in here if self.ask("check", [self.name(name, number)])]
        if not here:
            return []
        self._unread = [number for number in self._unread if number not in here]
        return self.get_all([self.name(name, number) for number in here], check)

    def delete_own(self) -> None:
        """Deletes what this rank has published by :meth:`set_own` and :meth:`announce`."""
        delete_keys(self.store, self._own)
