"""Records that processes publish in a store under the numbers of a counter, read by one as they come.

What the reader asks does not grow with their number, as long as every number's record is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from collectives.errors import DistStoreError
from collectives.store.records import read, written

__all__ = ["Announcements", "Ask", "get_all", "next_key", "set_all"]

Ask = Callable[..., Any]
"""Calls a method of a store: takes its name and its arguments."""

_T = TypeVar("_T")


def next_key(ask: Ask, name: str) -> str:
    """Returns the key for a new record under a name; whoever takes it sets it at once.

    Args:
        ask: calls the store.
        name: the counter's key.
    """
    return f"{name}/{int(ask('add', name, 1))}"


def get_all(ask: Ask, keys: list[str], check: Callable[[Any], _T]) -> list[_T]:
    """Returns records, checked; waits for them.

    Args:
        ask: calls the store.
        keys: of the records.
        check: of each, see :func:`~collectives.store.records.read`.
    """
    values = ask("multi_get", keys) if ask("has_extended_api") else [ask("get", key) for key in keys]
    return [read(value, key, check) for key, value in zip(keys, values, strict=True)]


def set_all(ask: Ask, records: Mapping[str, Any]) -> None:
    """Publishes records.

    Args:
        ask: calls the store.
        records: by key.
    """
    values = {key: written(record, key) for key, record in records.items()}
    if len(values) > 1 and ask("has_extended_api"):
        ask("multi_set", list(values), list(values.values()))
        return
    for key, value in values.items():
        ask("set", key, value)


class Announcements:
    """What is announced under a name, for the one process that reads it.

    Args:
        name: the counter's key.
        most: how many there can be; whoever reaches the store may count on.
        after: the last number that is known already.

    Attributes:
        counted: the last number that was given to a record.
        late: numbers whose records have not come yet; each comes a moment later, unless its process has died.
    """

    def __init__(self, name: str, most: int, after: int = 0) -> None:
        self._name = name
        self._most = most
        self._after = after
        self.counted = after
        self.late: list[int] = []

    def key(self, number: int) -> str:
        """Returns the key of a record."""
        return f"{self._name}/{number}"

    def new(self, ask: Ask, check: Callable[[Any], _T]) -> dict[int, _T]:
        """Returns the records that came since the last call by their numbers, checked; does not wait.

        Args:
            ask: calls the store.
            check: of each record.

        Raises:
            DistStoreError: there are more than there can be, or one is not as it has to be.
        """
        known = self.counted
        self.counted = int(ask("add", self._name, 0))
        if not known <= self.counted <= self._after + self._most:
            raise DistStoreError(
                f"key {self._name!r} of the store counts {self.counted} announcements after {known}, of at "
                f"most {self._after + self._most}; something else than these ranks writes to this store"
            )
        here = self.late = [*self.late, *range(known + 1, self.counted + 1)]
        if here and not ask("check", [self.key(number) for number in here]):
            here = [number for number in here if ask("check", [self.key(number)])]
        if not here:
            return {}
        self.late = [number for number in self.late if number not in here]
        found = get_all(ask, [self.key(number) for number in here], check)
        return dict(zip(here, found, strict=True))
