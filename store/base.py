"""The contract of every key/value store."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

from torch.distributed.distributed_c10d import Store as TorchStore

from collectives.dynamo import Uncompiled
from collectives.errors import DistStoreError, QueueEmptyError
from collectives.store.keep_alive import keep_if_held, sweep
from collectives.time_limits import time_limit

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Time limit of a new store, as in torch."""

_KEYS_NAMED = 8


class Store(TorchStore, Uncompiled):
    """A key/value store that the processes (or threads) of one job share, and that torch accepts as one.

    **Keys and values.** A key is a ``str``, a value ``str`` (stored as UTF-8) or bytes; reading gives
    ``bytes``. Counters of :meth:`add` and :meth:`barrier` are values too, as decimal text. Queues are apart
    from values: a key should be used for one of the two. A key *is there* if it holds a value, even an empty
    one, or is a queue with something in it.

    **Blocking.** Only :meth:`get`, :meth:`multi_get`, :meth:`wait`, :meth:`queue_pop` and :meth:`barrier`
    wait for other users of the store; everything else returns as soon as the store has carried it out, and
    what a call has written is seen by every call, of any user, that starts after it has returned.

    **Time limits.** A waiting call that is given no limit uses :attr:`timeout`, in whole milliseconds. Zero
    or a negative limit means: do not wait, fail at once if the key is missing. A limit that passes raises
    :class:`~collectives.DistStoreError` and leaves the store usable.

    **Threads.** Any thread may call any method at any time; a thread that waits delays no other.
    :meth:`clone` is therefore needed only for a different time limit. Waiting is done with the GIL released.

    **Use in torch.** All methods but those of queues may be reached from torch's C++ code; a store lives as
    long as that code holds it.

    Subclasses implement the underscored methods, which get checked arguments, and the limit in seconds.

    Args:
        timeout: time limit of waiting calls that are given none.

    Raises:
        DistStoreError: a time limit passed, or the store refused an operation.
        DistNetworkError: the connection to the store broke. This and wrong arguments leave every key as it
            was.
        TypeError: a key is no ``str``, a value neither ``str`` nor bytes, a limit no ``timedelta``.
        ValueError: a number is out of its range.

    Example:
        In one process::

            store = collectives.HashStore()
            store.set("color", "green")
            store.get("color")  # b"green"
            store.add("arrived", 1)  # 1, then 2, ...
            store.wait(["color", "arrived"])
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        sweep()
        self.set_timeout(timeout)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An argument: an interpreter without a GIL that ends may have cleared the module's own names before.
        if not is_finalizing() and not keep_if_held(self):
            self._release()
            sweep()

    # Public operations.

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value under a key, replacing what was there.

        Args:
            key: where the value is found afterwards.
            value: the value; text is stored as UTF-8.
        """
        self._set(_key(key), _value(value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits up to :attr:`timeout` for the key to appear.

        Args:
            key: where somebody sets a value.

        Raises:
            DistStoreError: nobody has set it in that time.
        """
        return self._get(_key(key), self._seconds(None))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which starts at zero, as one step.

        Args:
            key: where the counter is, for :meth:`get` its decimal text.
            amount: an integer of 64 bits; zero reads the counter.

        Returns:
            The sum, with this amount.

        Raises:
            DistStoreError: the key was :meth:`set` to something that is no integer, or the sum leaves the
                range of 64 bits; nothing was changed.
        """
        return self._add(_key(key), _integer("amount", amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to the value of a key, as one step; a missing key counts as empty.

        Args:
            key: where the value is.
            value: what comes behind it.
        """
        self._append(_key(key), _value(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there; does not wait.

        Args:
            keys: any number of them; ``True`` for none.
        """
        return self._check(_keys(keys))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Stores ``desired_value`` if the key holds ``expected_value``, as one step.

        A missing key is set if ``expected_value`` is empty.

        Args:
            key: where the value is.
            expected_value: what the key has to hold.
            desired_value: what it holds then.

        Returns:
            What the key holds afterwards; ``expected_value`` if the key is missing.
        """
        return self._compare_set(_key(key), _value(expected_value), _value(desired_value))

    def delete_key(self, key: str) -> bool:
        """Removes a key and its value. Queues are not removed.

        Args:
            key: what is removed.

        Returns:
            Whether it was there.

        Raises:
            DistStoreError: the store cannot remove keys (:class:`~collectives.FileStore`).
        """
        return self._delete_key(_key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of several keys; waits up to :attr:`timeout` for all to appear.

        Args:
            keys: any number of them; their values come in this order.

        Raises:
            DistStoreError: some are missing after that time; the message names them.
        """
        keys = _keys(keys)
        return self._multi_get(keys, self._seconds(None)) if keys else []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Stores several values.

        Args:
            keys: the keys.
            values: a value for each key, in their order.

        Raises:
            ValueError: there are not as many values as keys.
        """
        keys = _keys(keys)
        if isinstance(values, (str, bytes)) or len(keys) != len(values):
            raise ValueError(f"multi_set needs one value per key: {len(keys)} keys, {len(values)} values")
        self._multi_set([(key, _value(value)) for key, value in zip(keys, values, strict=True)])

    def num_keys(self) -> int:
        """Returns the number of keys that hold a value.

        A :class:`~collectives.TCPStore` with a fixed number of workers counts one key more than users have
        set.
        """
        return self._num_keys()

    def list_keys(self) -> list[str]:
        """Returns the keys that users have set, in no order."""
        return self._list_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Blocks until all keys are there; of the waiters for a queue, a push wakes one.

        Args:
            keys: may be empty.
            timeout: limit; :attr:`timeout` if not given.
        """
        keys = _keys(keys)
        if keys:
            self._wait(keys, self._seconds(timeout))

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Appends a value to a queue, which needs no making.

        Args:
            key: the queue.
            value: the value.
        """
        self._queue_push(_key(key), _value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Takes the oldest value out of a queue.

        Args:
            key: the queue.
            block: wait up to :attr:`timeout` for a value.

        Returns:
            The value; of several callers, one gets it.

        Raises:
            DistStoreError: no value came in that time.
            QueueEmptyError: the queue is empty and ``block`` is false.
        """
        return self._queue_pop(_key(key), self._seconds(None) if block else None)

    def queue_len(self, key: str) -> int:
        """Returns the number of values in a queue; 0 if there is no such queue.

        Args:
            key: the queue.
        """
        return self._queue_len(_key(key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Blocks until ``world_size`` callers have called it with this key, new for each barrier.

        A caller whose time is up is counted out again, so that it may call once more.

        Args:
            key: name of this barrier; counts the callers.
            world_size: number of callers.
            timeout: limit; :attr:`timeout` if not given.
        """
        if _integer("world_size", world_size) < 1:
            raise ValueError(f"a barrier needs a world_size of at least 1, not {world_size}")
        self._barrier(_key(key), operator.index(world_size), self._seconds(timeout))

    def has_extended_api(self) -> bool:
        """Returns whether :meth:`append` is supported, and whether several keys are one request.

        Without, :meth:`multi_get` and :meth:`multi_set` call :meth:`get` and :meth:`set` for each key.
        """
        mine = type(self)
        return mine.append is not Store.append or mine._append is not Store._append

    def clone(self) -> Store:
        """Returns a store on the same data with a time limit of its own."""
        return self._clone()

    def close(self) -> None:
        """Releases what the store holds (connections, files); it must not be used any more. Idempotent."""

    @property
    def timeout(self) -> timedelta:
        """Time limit of waiting calls that are given none."""
        # Kept in the C++ half, which torch reads directly.
        limit: timedelta = super().timeout  # type: ignore[misc]
        return limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets :attr:`timeout`, for calls from now on.

        Args:
            timeout: the limit; zero or less means not to wait.
        """
        super().set_timeout(time_limit(timeout, positive=False))

    # Names under which torch's C++ code looks two of the methods up.

    def getNumKeys(self) -> int:
        """Returns :meth:`num_keys`."""
        return self.num_keys()

    def deleteKey(self, key: str) -> bool:
        """Other name of :meth:`delete_key`."""
        return self.delete_key(key)

    # What a store implements. Limits are in seconds and never negative.

    def _release(self) -> None:
        """Gives back what the store holds when nobody uses it any more; may be called in any thread."""

    def _clone(self) -> Store:
        raise NotImplementedError(_lacking(self, "clone"))

    def _set(self, key: str, value: bytes) -> None:
        raise NotImplementedError(_lacking(self, "set"))

    def _add(self, key: str, amount: int) -> int:
        raise NotImplementedError(_lacking(self, "add"))

    def _append(self, key: str, value: bytes) -> None:
        raise NotImplementedError(_lacking(self, "append"))

    def _check(self, keys: list[str]) -> bool:
        raise NotImplementedError(_lacking(self, "check"))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        raise NotImplementedError(_lacking(self, "compare_set"))

    def _delete_key(self, key: str) -> bool:
        raise NotImplementedError(_lacking(self, "delete_key"))

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:  # noqa: ARG002
        return [self.get(key) for key in keys]

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        for key, value in pairs:
            self.set(key, value)

    def _num_keys(self) -> int:
        raise NotImplementedError(_lacking(self, "num_keys"))

    def _list_keys(self) -> list[str]:
        raise NotImplementedError(_lacking(self, "list_keys"))

    def _wait(self, keys: list[str], limit: float) -> None:
        raise NotImplementedError(_lacking(self, "wait"))

    def _queue_push(self, key: str, value: bytes) -> None:
        raise NotImplementedError(_lacking(self, "queue_push"))

    def _queue_pop(self, key: str, limit: float | None) -> bytes:
        """``limit`` is ``None`` for a call that must not wait."""
        raise NotImplementedError(_lacking(self, "queue_pop"))

    def _queue_len(self, key: str) -> int:
        raise NotImplementedError(_lacking(self, "queue_len"))

    def _barrier(self, key: str, world_size: int, limit: float) -> None:
        raise NotImplementedError(_lacking(self, "barrier"))

    def _get(self, key: str, limit: float) -> bytes:
        if type(self)._multi_get is Store._multi_get:
            raise NotImplementedError(_lacking(self, "get"))
        return self._multi_get([key], limit)[0]

    # For subclasses.

    def _seconds(self, timeout: timedelta | None) -> float:
        limit = self.timeout if timeout is None else time_limit(timeout, positive=False)
        return max(0.0, limit.total_seconds())

    def _raise_timeout(self, operation: str, missing: Sequence[str], limit: float) -> NoReturn:
        """Raises the error of a waiting call whose time is up."""
        # In parentheses: the words of torch's TCPStore, which programs look for.
        keys = ", ".join(f"/{key}" for key in missing[:_KEYS_NAMED])
        raise DistStoreError(
            f"{operation} gave up at its timeout, after {limit:g} s (wait timeout after {1000 * limit:.0f}ms"
            f", keys: {keys}): {self!r} has no {_named(missing)}. "
            "Does the rank that writes it still run, and does it use the same store, prefix and key?"
        )

    def _raise_barrier_timeout(self, key: str, arrived: int, world_size: int, limit: float) -> NoReturn:
        raise DistStoreError(
            f"barrier {key!r} gave up after {limit:g} s: {arrived} of {world_size} have arrived at {self!r}. "
            "Do all of them run, and do they use the same store, prefix and key?"
        )

    def _raise_queue_empty(self, key: str) -> NoReturn:
        raise QueueEmptyError(f"queue {key!r} of {self!r} is empty; use block=True to wait for a value")

    def _raise_not_a_counter(self, key: str, amount: int, value: bytes) -> NoReturn:
        shown = value if len(value) <= 32 else value[:32] + b"..."
        raise DistStoreError(
            f"cannot add {amount} to key {key!r} of {self!r}: it holds {shown!r}, which is no 64-bit "
            "integer, or the sum would be none; a counter must not be written by set()"
        )


def _lacking(store: Store, method: str) -> str:
    """Returns the error text for a store that lacks a method."""
    return (
        f"Not implemented: {type(store).__name__} has no {method}(), which a store of one's own "
        "may do without; give it one, or use a TCPStore, FileStore or HashStore"
    )


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
    return key


def _keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys must be a list of str, not one {type(keys).__name__}: {keys!r}")
    keys = list(keys)
    for key in keys:
        if type(key) is not str:
            _key(key)
    return keys


def _value(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a value must be str or bytes, not {type(value).__name__}: {value!r}")


def _integer(name: str, number: int) -> int:
    number = operator.index(number)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, is {number}")
    return number


def _named(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_KEYS_NAMED])
    rest = f" and {len(keys) - _KEYS_NAMED} more" if len(keys) > _KEYS_NAMED else ""
    return f"key {shown}" if len(keys) == 1 else f"keys {shown}{rest}"
