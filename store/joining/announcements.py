"""Records that processes publish in a store under the numbers of a counter, read by one as they come.

What the reader asks does not grow with their number, as long as every number's record is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import DistStoreError
from collectives.store.records import fetch_all

__all__ = ["Announcements", "next_key"]

_T = TypeVar("_T")


def next_key(store: Any, name: str) -> str:
    """Returns the key for a new record under a name; whoever takes it sets it at once.

    Args:
        store: the store.
        name: the counter's key.
    """
    return f"{name}/{int(store.add(name, 1))}"


class Announcements:
    """What is announced under a name, for the one process that reads it.

    Args:
        store: the store.
        name: the counter's key.
        most: how many there can be; whoever reaches the store may count on.
        after: the last number that is known already.

    Attributes:
        counted: the last number that was given to a record.
        late: numbers whose records have not come yet; each comes a moment later, unless its process has died.
    """

    def __init__(self, store: Any, name: str, most: int, after: int = 0) -> None:
        self._store = store
        self._name = name
        self._most = most
        self._after = after
        self.counted = after
        self.late: list[int] = []

    def key(self, number: int) -> str:
        """Returns the key of a record."""
        return f"{self._name}/{number}"

    def new(self, check: Callable[[Any], _T]) -> dict[int, _T]:
        """Returns the records that came since the last call by their numbers, checked; does not wait.

        Args:
            check: of each record.

        Raises:
            DistStoreError: there are more than there can be, or one is not as it has to be.
        """
        self.count()
        store, here = self._store, self.late
        if here and not store.check([self.key(number) for number in here]):
            here = [number for number in here if store.check([self.key(number)])]
        if not here:
            return {}
        found = fetch_all(store, [self.key(number) for number in here], check)
        self.late = [number for number in self.late if number not in here]
        return dict(zip(here, found, strict=True))

    def count(self) -> None:
        """Counts what has been announced, without reading it.

        Raises:
            DistStoreError: there is more than there can be.
        """
        store, known = self._store, self.counted
        counted = int(store.add(self._name, 0))
        if not known <= counted <= self._after + self._most:
            raise DistStoreError(
                f"key {self._name!r} of the store counts {counted} announcements after {known}, of at "
                f"most {self._after + self._most}; something else than these ranks writes to this store"
            )
        self.counted = counted
        self.late += range(known + 1, counted + 1)
