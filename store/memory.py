"""A store within one process."""

from __future__ import annotations

import threading
import time
from collections import deque

from collectives.store.base import Store

__all__ = ["HashStore"]


class _Waiter:
    """One waiting call: what it waits for, and how it is woken."""

    def __init__(self, keys: list[str], barrier: int | None = None) -> None:
        self.keys = keys
        self.barrier = barrier  # members of the barrier `keys[0]`; None for a plain wait
        self.woken = threading.Event()


class _Data:
    """What a store and its clones share. Everything is touched under the lock only."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}  # never holds an empty queue
        self.waiters: list[_Waiter] = []  # the longest waiting first

    def there(self, key: str) -> bool:
        return key in self.values or key in self.queues

    def appeared(self, key: str) -> None:
        """Wakes all waits that a key was the last missing one of."""
        for waiter in self.waiters.copy():
            if waiter.barrier is None and key in waiter.keys and all(map(self.there, waiter.keys)):
                self.wake(waiter)

    def pushed(self, key: str) -> None:
        """Wakes the first wait that a queue was the last missing key of."""
        for waiter in self.waiters:
            if waiter.barrier is None and key in waiter.keys and all(map(self.there, waiter.keys)):
                self.wake(waiter)
                return

    def wake(self, waiter: _Waiter) -> None:
        self.waiters.remove(waiter)
        waiter.woken.set()

    def count(self, key: str) -> int | None:
        """Returns the counter under a key; ``None`` if the key holds something else."""
        try:
            return int(self.values.get(key, b"0"))
        except ValueError:
            return None


class HashStore(Store):
    """A store in the memory of this process, shared by its threads; other processes cannot reach it."""

    def __init__(self) -> None:
        super().__init__()
        self._data = _Data()

    def _clone(self) -> HashStore:
        copy = HashStore()
        copy.set_timeout(self.timeout)
        copy._data = self._data
        return copy

    def __repr__(self) -> str:
        return f"HashStore({len(self._data.values)} keys)"

    def _set(self, key: str, value: bytes) -> None:
        with self._data.lock:
            self._data.values[key] = value
            self._data.appeared(key)

    def _add(self, key: str, amount: int) -> int:
        with self._data.lock:
            before = self._data.count(key)
            if before is None or not -(2**63) <= before + amount < 2**63:
                self._raise_not_a_counter(key, amount, self._data.values[key])
            self._data.values[key] = str(before + amount).encode()
            self._data.appeared(key)
            return before + amount

    def _append(self, key: str, value: bytes) -> None:
        with self._data.lock:
            self._data.values[key] = self._data.values.get(key, b"") + value
            self._data.appeared(key)

    def _check(self, keys: list[str]) -> bool:
        with self._data.lock:
            return all(map(self._data.there, keys))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._data.lock:
            current = self._data.values.get(key)
            if current is None and expected:
                return expected
            if current is None or current == expected:
                self._data.values[key] = current = desired
                self._data.appeared(key)
            return current

    def _delete_key(self, key: str) -> bool:
        with self._data.lock:
            return self._data.values.pop(key, None) is not None

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        deadline = time.monotonic() + limit
        while True:
            self._wait_until("get", keys, deadline, limit)
            with self._data.lock:
                # One may have been deleted again since.
                if all(map(self._data.there, keys)):
                    return [self._data.values.get(key, b"") for key in keys]

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        with self._data.lock:
            for key, value in pairs:
                self._data.values[key] = value
                self._data.appeared(key)

    def _num_keys(self) -> int:
        with self._data.lock:
            return len(self._data.values)

    def _list_keys(self) -> list[str]:
        with self._data.lock:
            return list(self._data.values)

    def _wait(self, keys: list[str], limit: float) -> None:
        self._wait_until("wait", keys, time.monotonic() + limit, limit)

    def _wait_until(self, operation: str, keys: list[str], deadline: float, limit: float) -> None:
        with self._data.lock:
            if all(map(self._data.there, keys)):
                return
            waiter = _Waiter(keys)
            self._data.waiters.append(waiter)
        if not self._sleep(waiter, deadline):
            with self._data.lock:
                missing = [key for key in keys if not self._data.there(key)]
            self._raise_timeout(operation, missing or keys, limit)

    def _sleep(self, waiter: _Waiter, deadline: float) -> bool:
        """Waits to be woken; tells whether it was. The waiter is off the list afterwards."""
        try:
            # Event.wait takes no more than threading.TIMEOUT_MAX.
            waiter.woken.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        except BaseException:
            with self._data.lock:
                if waiter in self._data.waiters:
                    self._data.waiters.remove(waiter)
                else:  # woken just now: the value that this thread will not take is for another
                    for key in waiter.keys:
                        if key in self._data.queues:
                            self._data.pushed(key)
            raise
        with self._data.lock:
            if waiter in self._data.waiters:
                self._data.waiters.remove(waiter)
                return False
            return True

    def _queue_push(self, key: str, value: bytes) -> None:
        with self._data.lock:
            self._data.queues.setdefault(key, deque()).append(value)
            self._data.pushed(key)

    def _queue_pop(self, key: str, limit: float | None) -> bytes:
        deadline = time.monotonic() + (limit or 0.0)
        while True:
            with self._data.lock:
                queue = self._data.queues.get(key)
                if queue is not None:
                    value = queue.popleft()
                    if not queue:
                        del self._data.queues[key]
                    return value
                if limit is None:
                    self._raise_queue_empty(key)
                waiter = _Waiter([key])
                self._data.waiters.append(waiter)
            if not self._sleep(waiter, deadline):
                self._raise_timeout("queue_pop", [key], limit)

    def _queue_len(self, key: str) -> int:
        with self._data.lock:
            return len(self._data.queues.get(key, ()))

    def _barrier(self, key: str, world_size: int, limit: float) -> None:
        data = self._data
        deadline = time.monotonic() + limit
        with data.lock:
            before = data.count(key)
            if before is None:
                self._raise_not_a_counter(key, 1, data.values[key])
            data.values[key] = str(before + 1).encode()
            data.appeared(key)
            if before + 1 >= world_size:
                for waiter in data.waiters.copy():
                    if waiter.barrier is not None and waiter.keys == [key]:
                        data.wake(waiter)
                return
            waiter = _Waiter([key], world_size)
            data.waiters.append(waiter)
        woken = False
        arrived = before + 1
        try:
            woken = self._sleep(waiter, deadline)
        finally:
            if not woken:
                with data.lock:
                    arrived = data.count(key) or 1
                    if arrived > 1:
                        data.values[key] = str(arrived - 1).encode()
                    else:
                        data.values.pop(key, None)
        if not woken:
            self._raise_barrier_timeout(key, arrived, world_size, limit)
