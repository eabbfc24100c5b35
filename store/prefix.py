"""A store that is a part of another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch.distributed as _torch_distributed
from torch.distributed.distributed_c10d import Store as TorchStore

from collectives.errors import DistNetworkError, DistStoreError, QueueEmptyError
from collectives.store.base import Store
from collectives.store.waiting import root_of

_ANSWER = timedelta(seconds=5)
"""How long a store whose limit is zero may take to send a value that it has."""

_answering = threading.Lock()
"""Held while a store has that limit: of two threads, the second would take it for the user's, and keep it."""


class PrefixStore(Store):
    """Puts ``prefix + "/"`` before every key of a store, so that its users cannot collide with others.

    Keys that :meth:`list_keys` returns are without the prefix; errors of the underlying store name keys as it
    has them, and :meth:`num_keys` counts all of that. The time limit is that of the underlying store.

    Args:
        prefix: name of the part.
        store: any :class:`torch.distributed.Store`, one of torch's own too.
        scope: what :attr:`scope` begins with; ``None`` for that of the underlying store, and the prefix.
    """

    def __init__(self, prefix: str, store: TorchStore, scope: str | None = None) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, not {type(prefix).__name__}: {prefix!r}")
        if not isinstance(store, TorchStore):
            raise TypeError(f"store must be a torch.distributed.Store, not {type(store).__name__}: {store!r}")
        self._prefix = prefix
        self._scope = f"{getattr(store, 'scope', '')}{prefix}/" if scope is None else f"{scope}/"
        # Not torch's type from here on: its type stubs lack half of the methods.
        self._store = cast("Any", store)
        self._passed_on: timedelta = self._store.timeout
        super().__init__(self._passed_on)

    @property
    def scope(self) -> str:
        """The world, as far as known, and all prefixes, which the proof of a record puts before its key."""
        return self._scope

    @property
    def underlying_store(self) -> TorchStore:
        """The store that holds the keys."""
        store: TorchStore = self._store
        return store

    @property
    def _underlying_non_prefix_store(self) -> TorchStore:
        """The store below all layers of prefixes; torch has this property too."""
        store: TorchStore = root_of(self)
        return store

    @property
    def timeout(self) -> timedelta:
        """Time limit of the underlying store."""
        # A torch.distributed.PrefixStore around this one sets the limit of the C++ half only.
        own = super().timeout
        if own != self._passed_on:
            self._passed_on = own
            self._store.set_timeout(own)
        limit: timedelta = self._store.timeout
        return limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of the underlying store."""
        super().set_timeout(timeout)
        self._passed_on = super().timeout
        self._store.set_timeout(self._passed_on)

    def has_extended_api(self) -> bool:
        """Tells whether the underlying store supports append, multi_get and multi_set."""
        supported: bool = self._store.has_extended_api()
        return supported

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    def _clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone(), self._scope.removesuffix("/"))

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Turns torch's errors into ours of the same meaning."""
        try:
            yield
        except (DistStoreError, DistNetworkError):
            raise
        except _torch_distributed.QueueEmptyError as error:
            raise QueueEmptyError(self._explained(error)) from error
        except _torch_distributed.DistStoreError as error:
            raise DistStoreError(self._explained(error)) from error
        except _torch_distributed.DistNetworkError as error:
            raise DistNetworkError(self._explained(error)) from error
        except NotImplementedError:
            raise
        except RuntimeError as error:
            # torch's FileStore has no better class for a time limit.
            if "timeout" not in str(error):
                raise
            raise DistStoreError(self._explained(error)) from error

    def _explained(self, error: Exception) -> str:
        """Returns torch's message without the C++ stack, and where it happened."""
        return f"{str(error).partition(chr(10))[0]} ({self!r}, timeout {self._seconds(None):g} s)"

    def _refuse_to_wait(self, operation: str, keys: list[str], limit: float) -> None:
        """Raises if there is no time to wait for a missing key; some stores take zero for no limit."""
        if limit == 0 and not self._check(keys):
            self._raise_timeout(operation, [key for key in keys if not self._check([key])], limit)

    @contextlib.contextmanager
    def _time_to_answer(self, limit: float | None) -> Iterator[None]:
        """Gives a store of torch time to send what is there: its TCPStore counts the way as waiting."""
        if limit != 0 or isinstance(self._store, Store):
            yield
            return
        with _answering:
            limit_of_user = self._store.timeout
            self._store.set_timeout(_ANSWER)
            try:
                yield
            finally:
                self._store.set_timeout(limit_of_user)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _keys(self, keys: list[str]) -> list[str]:
        return [self._key(key) for key in keys]

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the underlying store."""
        with self._own_errors():
            return getattr(self._store, method)(*arguments)

    def _set(self, key: str, value: bytes) -> None:
        self._ask("set", self._key(key), value)

    def _add(self, key: str, amount: int) -> int:
        with self._own_errors():
            try:
                return int(self._store.add(self._key(key), amount))
            except ValueError:  # torch's HashStore and FileStore
                self._raise_not_a_counter(key, amount, self._store.get(self._key(key)))

    def _append(self, key: str, value: bytes) -> None:
        self._ask("append", self._key(key), value)

    def _check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", self._keys(keys)))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._ask("compare_set", self._key(key), expected, desired))

    def _delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", self._key(key)))

    def _get(self, key: str, limit: float) -> bytes:
        self._refuse_to_wait("get", [key], limit)
        with self._time_to_answer(limit):
            return bytes(self._ask("get", self._key(key)))

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        self._refuse_to_wait("get", keys, limit)
        with self._time_to_answer(limit):
            return list(self._ask("multi_get", self._keys(keys)))

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        self._ask("multi_set", [self._key(key) for key, _ in pairs], [value for _, value in pairs])

    def _num_keys(self) -> int:
        return int(self._ask("num_keys"))

    def _list_keys(self) -> list[str]:
        start = self._key("")
        return [key.removeprefix(start) for key in self._ask("list_keys") if key.startswith(start)]

    def _wait(self, keys: list[str], limit: float) -> None:
        self._refuse_to_wait("wait", keys, limit)
        if limit > 0:  # else all are there; a limit of torch's TCPStore counts the way, too
            self._ask("wait", self._keys(keys), _foreign_limit(limit))

    def _queue_push(self, key: str, value: bytes) -> None:
        self._ask("queue_push", self._key(key), value)

    def _queue_pop(self, key: str, limit: float | None) -> bytes:
        if limit is not None:
            self._refuse_to_wait("queue_pop", [key], limit)
        end = time.monotonic() + (limit or 0.0)
        while True:
            try:
                with self._time_to_answer(limit):
                    return bytes(self._ask("queue_pop", self._key(key), limit is not None))
            except QueueEmptyError:  # noqa: PERF203
                # torch's TCPStore raises it from a blocking pop too when another client was quicker.
                if limit is None or time.monotonic() > end:
                    raise

    def _queue_len(self, key: str) -> int:
        return int(self._ask("queue_len", self._key(key)))

    def _barrier(self, key: str, world_size: int, limit: float) -> None:
        self._ask("barrier", self._key(key), world_size, _foreign_limit(limit))


def _foreign_limit(limit: float) -> timedelta:
    """Returns a limit that no store takes for none, as torch's HashStore does zero."""
    return max(timedelta(seconds=limit), timedelta(milliseconds=1))
