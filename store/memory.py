"""Values and queues in the memory of a process: what they mean for any store that keeps them so, and one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

from collectives.store.base import Store

_T = TypeVar("_T")


class Change(IntEnum):
    """What happens to a key; the numbers are those of the file format."""

    SET = 1
    APPEND = 2
    REMOVE = 3
    PUSH = 4
    POP = 5


class Content:
    """The values and queues of a store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}  # never holds an empty queue

    def there(self, key: str) -> bool:
        """Tells whether a key has a value, or a queue something in it."""
        return key in self.values or key in self.queues

    def all_there(self, keys: list[str]) -> bool:
        """Tells whether all keys are there."""
        return all(map(self.there, keys))

    def count(self, key: str) -> int | None:
        """Returns the counter under a key; ``None`` if the key holds something else."""
        try:
            return int(self.values.get(key, b"0"))
        except ValueError:
            return None

    def apply(self, change: Change, key: str, value: bytes) -> None:
        """Changes a key."""
        if change is Change.SET:
            self.values[key] = value
        elif change is Change.APPEND:
            self.values[key] = self.values.get(key, b"") + value
        elif change is Change.REMOVE:
            self.values.pop(key, None)
        elif change is Change.PUSH:
            self.queues.setdefault(key, deque()).append(value)
        elif key in self.queues:  # POP
            self.queues[key].popleft()
            if not self.queues[key]:
                del self.queues[key]


class ContentStore(Store):
    """A store whose content each call sees and changes as a whole.

    Derived classes say how a call gets hold of it, how it changes, and how one waits for changes of others.
    """

    def _holding(self, *, exclusive: bool, limit: float | None = None) -> AbstractContextManager[Any]:
        """Holds the content up to date, which nobody else changes meanwhile.

        Args:
            exclusive: whether the caller changes it.
            limit: seconds to wait for others who hold it; ``None`` for the store's time limit.
        """
        raise NotImplementedError

    def _change(self, *changes: tuple[Change, str, bytes]) -> None:
        """Changes the content, all or nothing; the caller holds it exclusively."""
        raise NotImplementedError

    def _ask_until(
        self, ask: Callable[[Content], _T | None], keys: list[str], limit: float, *, exclusive: bool = False
    ) -> _T | None:
        """Asks the content, whenever one of the keys has changed, until there is an answer or time is up."""
        raise NotImplementedError

    def _content(self) -> Content:
        """Returns the content as of the last look."""
        raise NotImplementedError

    def _set(self, key: str, value: bytes) -> None:
        with self._holding(exclusive=True):
            self._change((Change.SET, key, value))

    def _append(self, key: str, value: bytes) -> None:
        with self._holding(exclusive=True):
            self._change((Change.APPEND, key, value))

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        with self._holding(exclusive=True):
            self._change(*((Change.SET, key, value) for key, value in pairs))

    def _add(self, key: str, amount: int, limit: float | None = None) -> int:
        with self._holding(exclusive=True, limit=limit):
            content = self._content()
            before = content.count(key)
            if before is None or not -(2**63) <= before + amount < 2**63:
                self._raise_not_a_counter(key, amount, content.values[key])
            if amount or key not in content.values:  # reading a counter changes nothing
                self._change((Change.SET, key, str(before + amount).encode()))
            return before + amount

    def _check(self, keys: list[str]) -> bool:
        with self._holding(exclusive=False):
            content = self._content()
            return content.all_there(keys)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._holding(exclusive=True):
            content = self._content()
            current = content.values.get(key)
            if current is None and expected:
                return expected
            if current is None or current == expected:
                self._change((Change.SET, key, desired))
                return desired
            return current

    def _delete_key(self, key: str) -> bool:
        with self._holding(exclusive=True):
            content = self._content()
            there = key in content.values
            self._change((Change.REMOVE, key, b""))
            return there

    def _num_keys(self) -> int:
        with self._holding(exclusive=False):
            content = self._content()
            return len(content.values)

    def _list_keys(self) -> list[str]:
        with self._holding(exclusive=False):
            content = self._content()
            return list(content.values)

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        def values(content: Content) -> list[bytes] | None:
            return [content.values.get(key, b"") for key in keys] if content.all_there(keys) else None

        found = self._ask_until(values, keys, limit)
        return self._raise_missing("get", keys, limit) if found is None else found

    def _wait(self, keys: list[str], limit: float) -> None:
        if not self._ask_until(lambda content: content.all_there(keys) or None, keys, limit):
            self._raise_missing("wait", keys, limit)

    def _queue_push(self, key: str, value: bytes) -> None:
        with self._holding(exclusive=True):
            self._change((Change.PUSH, key, value))

    def _queue_pop(self, key: str, limit: float | None) -> bytes:
        def pop(content: Content) -> bytes | None:
            if key not in content.queues:
                return None
            value = content.queues[key][0]
            self._change((Change.POP, key, b""))
            return value

        value = self._ask_until(pop, [key], limit or 0.0, exclusive=True)
        if value is not None:
            return value
        return (
            self._raise_queue_empty(key) if limit is None else self._raise_missing("queue_pop", [key], limit)
        )

    def _queue_len(self, key: str) -> int:
        with self._holding(exclusive=False):
            content = self._content()
            return len(content.queues.get(key, ()))

    def _barrier(self, key: str, world_size: int, limit: float) -> None:
        end = time.monotonic() + limit
        if self._add(key, 1, limit) >= world_size:
            return

        def complete(content: Content) -> bool | None:
            return (content.count(key) or 0) >= world_size or None

        gives_up = True
        try:
            gives_up = self._ask_until(complete, [key], end - time.monotonic()) is None
        finally:
            if gives_up:
                count = self._withdraw(key, world_size)
        if gives_up and count < world_size:
            self._raise_barrier_timeout(key, count, world_size, limit)

    def _withdraw(self, key: str, world_size: int) -> int:
        """Counts this caller out of a barrier unless it has just become complete.

        Returns:
            The count before.
        """
        with self._holding(exclusive=True, limit=0.0):
            content = self._content()
            count = content.count(key) or 0
            if 1 < count < world_size:
                self._change((Change.SET, key, str(count - 1).encode()))
            elif count == 1:
                self._change((Change.REMOVE, key, b""))
            return count

    def _raise_missing(self, operation: str, keys: list[str], limit: float) -> NoReturn:
        missing = [key for key in keys if not self._content().there(key)]
        self._raise_timeout(operation, missing or keys, limit)


class _Waiter:
    """One waiting call: what it waits for, and how it is woken.

    Attributes:
        ask: what it asks when the keys are there; ``None`` for one that is to ask itself, as it takes values.
        answer: what it was told when it was woken, since keys may be deleted before it runs.
    """

    def __init__(self, keys: list[str], ask: Callable[[Content], Any] | None) -> None:
        self.keys = keys
        self.ask = ask
        self.answer: Any = None
        self.woken = threading.Event()

    def is_ready(self, content: Content) -> bool:
        if not content.all_there(self.keys):
            return False
        if self.ask is None:
            return True
        self.answer = self.ask(content)
        return self.answer is not None


class _Shared:
    """What a store and its clones share: the content, touched under the lock only, and who waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.content = Content()
        self.waiters: list[_Waiter] = []  # the longest waiting first

    def wake(self, key: str, most: int | None = None) -> None:
        """Wakes waits that a key was the last missing one of: all, or the first."""
        ready = [one for one in self.waiters if key in one.keys and one.is_ready(self.content)]
        for waiter in ready[:most]:
            self.waiters.remove(waiter)
            waiter.woken.set()


class HashStore(ContentStore):
    """A store in the memory of this process, shared by its threads; other processes cannot reach it."""

    def __init__(self) -> None:
        super().__init__()
        self._shared = _Shared()

    def _clone(self) -> HashStore:
        copy = HashStore()
        copy.set_timeout(self.timeout)
        copy._shared = self._shared
        return copy

    def __repr__(self) -> str:
        return f"HashStore({len(self._content().values)} keys)"

    def _content(self) -> Content:
        return self._shared.content

    def _holding(self, *, exclusive: bool, limit: float | None = None) -> AbstractContextManager[Any]:  # noqa: ARG002
        # Not a context manager in Python, in which a signal's handler that raises could leave the lock held.
        return self._shared.lock

    def _change(self, *changes: tuple[Change, str, bytes]) -> None:
        for change, key, value in changes:
            self._shared.content.apply(change, key, value)
            if change in {Change.SET, Change.APPEND, Change.PUSH}:
                self._shared.wake(key, 1 if change is Change.PUSH else None)

    def _ask_until(
        self,
        ask: Callable[[Content], _T | None],
        keys: list[str],
        limit: float,
        *,
        exclusive: bool = False,
    ) -> _T | None:
        deadline = time.monotonic() + limit
        while True:
            with self._shared.lock:
                content = self._shared.content
                answer = ask(content)
                if answer is not None:
                    return answer
                waiter = _Waiter(keys, None if exclusive else ask)
                self._shared.waiters.append(waiter)
            if not self._sleep(waiter, deadline):
                return None
            if waiter.answer is not None:
                return waiter.answer  # type: ignore[no-any-return]

    def _sleep(self, waiter: _Waiter, deadline: float) -> bool:
        """Waits to be woken; tells whether it was. The waiter is off the list afterwards."""
        try:
            # Event.wait takes no more than threading.TIMEOUT_MAX.
            waiter.woken.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        except BaseException:
            with self._shared.lock:
                content = self._shared.content
                if waiter in self._shared.waiters:
                    self._shared.waiters.remove(waiter)
                else:  # woken just now: the value that this thread will not take is for another
                    for key in content.queues.keys() & waiter.keys:
                        self._shared.wake(key, 1)
            raise
        with self._shared.lock:
            if waiter in self._shared.waiters:
                self._shared.waiters.remove(waiter)
                return False
            return True
