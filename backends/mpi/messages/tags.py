"""Tags of messages within the range that an MPI library has."""

from __future__ import annotations

from typing import Any

__all__ = ["Tags"]


class Tags:
    """The tags of a group's messages: any number below 2^31, whatever the library's largest tag.

    Tags in the lower half of the library's range stand for themselves. For every other one the group's store
    keeps a number of the upper half, given out in the order in which such tags are first used.

    Attributes:
        own: tags below this one stand for themselves.

    Args:
        store: the group's store.
        largest: the library's largest tag (``MPI_TAG_UB``).
    """

    def __init__(self, store: Any, largest: int) -> None:
        self._store = store
        self.own = largest + 1 if largest >= 2**31 - 1 else largest // 2
        self._known: dict[int, int] = {}

    def of(self, tag: int) -> int:
        """Returns MPI's tag for a user's; asks the store where a large one is used for the first time."""
        if tag < self.own:
            return tag
        found = self._known.get(tag)
        if found is None:
            key = f"tag/{tag}"
            if self._store.add(f"{key}/users", 1) == 1:
                self._store.set(key, str(self.own + self._store.add("tags", 1)))
            found = self._known[tag] = int(self._store.get(key))
        return found
