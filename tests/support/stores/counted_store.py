"""A part of a store that counts what it is asked."""

from __future__ import annotations

from typing import Any

from collectives.store import PrefixStore


class CountedStore(PrefixStore):
    """Passes requests on, and counts them; a wait counts once, however long it takes.

    Attributes:
        requests: how many there were.
        keys: how many keys they named.
    """

    requests = 0
    keys = 0

    def _key(self, key: str) -> str:
        self.keys += 1
        return super()._key(key)

    def take(self) -> tuple[int, int]:
        """Returns requests and keys since the last call."""
        taken = self.requests, self.keys
        self.requests = self.keys = 0
        return taken


def _counting(name: str) -> Any:
    passed_on = getattr(PrefixStore, name)

    def method(self: CountedStore, *arguments: Any) -> Any:
        self.requests += 1
        return passed_on(self, *arguments)

    return method


_REQUESTS = [
    *("_set", "_get", "_add", "_append", "_check", "_compare_set", "_delete_key", "_wait", "_barrier"),
    *("_multi_get", "_multi_set", "_num_keys", "_list_keys", "_queue_push", "_queue_pop", "_queue_len"),
]
for _name in _REQUESTS:
    setattr(CountedStore, _name, _counting(_name))
