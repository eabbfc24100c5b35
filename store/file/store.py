"""A store in a file that processes share."""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from collectives.errors import DistStoreError
from collectives.forks import call_in_forked_children
from collectives.store.base import DEFAULT_TIMEOUT, Store
from collectives.store.file.locked_file import LockedFile
from collectives.store.file.log import (
    HEADER_BYTES,
    MAGIC,
    DamagedError,
    Header,
    Join,
    Kind,
    Record,
    encode_join,
    encode_leave,
    encode_record,
    records,
)
from collectives.store.file.run import JoinDecision, Run, launch_token
from collectives.store.process import current_process

__all__ = ["FileStore"]

_ENDING_GRACE_S = 10.0
"""How long one who finds the file of a run that is ending waits for its last members to be gone."""
_LEAVE_S = 5.0
_LEAST_LOCK_S = 1.0
"""How long a call waits for the lock whatever its limit: others hold it for moments."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_LOOKS_PER_READ = 25
"""Looks at the file's size between reads under the lock, which network file systems need to show changes."""

_Answer = TypeVar("_Answer")


class _Content:
    """What a file says, as far as it was read."""

    def __init__(self) -> None:
        self.position = 0  # bytes taken in
        self.run = Run(Header(b"", 0, -1))
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}  # never holds an empty queue

    def there(self, key: str) -> bool:
        """Tells whether a key has a value, or a queue something in it."""
        return key in self.values or key in self.queues

    def count(self, key: str) -> int | None:
        """Returns the counter under a key; ``None`` if the key holds something else."""
        try:
            return int(self.values.get(key, b"0"))
        except ValueError:
            return None

    def take(self, data: bytes) -> None:
        """Takes in the bytes from :attr:`position` on, up to the last whole record."""
        if self.position == 0:
            if len(data) < HEADER_BYTES:
                return
            self.run = Run(Header.from_bytes(data))
            self.position = HEADER_BYTES
            data = data[HEADER_BYTES:]
        start = self.position
        for record, end in records(data):
            self._apply(record)
            self.position = start + end

    def _apply(self, record: Record) -> None:
        key = record.key
        if record.join is not None:
            self.run.joined(record.join)
        elif record.kind is Kind.LEAVE:
            self.run.left(record.member)
        elif record.kind is Kind.SET:
            self.values[key] = record.value
        elif record.kind is Kind.APPEND:
            self.values[key] = self.values.get(key, b"") + record.value
        elif record.kind is Kind.REMOVE:
            self.values.pop(key, None)
        elif record.kind is Kind.PUSH:
            self.queues.setdefault(key, deque()).append(record.value)
        elif key in self.queues:  # POP
            self.queues[key].popleft()
            if not self.queues[key]:
                del self.queues[key]


class _Shared:
    """The file, its content and the membership in its run, which a store and its clones share."""

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.users = 1
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._member = -1
        self.content = _Content()
        self._file = self._join(world_size)
        _opened.add(self)
        call_in_forked_children(self, _Shared.after_fork)

    @contextlib.contextmanager
    def locked(self, exclusive: bool, limit: float) -> Iterator[_Content]:
        """Holds the file, and gives its content up to date; waits up to ``limit`` seconds for others."""
        limit = max(limit, _LEAST_LOCK_S)
        end = time.monotonic() + limit
        if not self._lock.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
            raise DistStoreError(f"other threads have waited for the lock of {self.path} for {limit:g} s")
        try:
            if self._file.closed:
                raise DistStoreError(f"the store on {self.path} was closed")
            with self._file.lock(exclusive, end - time.monotonic()):
                self._read()
                yield self.content
        finally:
            self._lock.release()

    def write(self, data: bytes) -> None:
        """Appends records; the caller holds the file exclusively."""
        # Beyond the content lies at most what a writer that died has left of a record.
        self._file.write(self.content.position, data)
        self.content.take(data)

    def unread(self) -> bool:
        """Tells, without the file's lock, whether there is something to read."""
        if not self._lock.acquire(blocking=False):  # of a thread that may wait for long
            return True
        try:
            return self._file.closed or self._file.size() != self.content.position
        finally:
            self._lock.release()

    def replaced(self) -> bool:
        """Tells whether the path has come to lead to another file, or to none."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._file.closed and not self._file.is_at_path()
        finally:
            self._lock.release()

    def release(self) -> None:
        """Ends the use by one store; the last one leaves the run."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self.leave()

    def leave(self) -> None:
        """Leaves the run, and closes the file. Idempotent."""
        with self._lock:
            if self._file.closed:
                return
            if self._owner == os.getpid():
                # Best effort: a run that was not left in order is recognised by its dead processes.
                with contextlib.suppress(OSError, DistStoreError), self._file.lock(True, _LEAVE_S):
                    self._read()
                    self.write(encode_leave(self._member))
                    if self.content.run.over:
                        self._file.unlink()
            self._file.close()

    def after_fork(self) -> None:
        """Makes the store usable in a forked child, which is no member of the run."""
        self._lock = threading.RLock()
        # A thread that does not exist here may have been changing it.
        self.content = _Content()
        if not self._file.closed:
            self._file.reopen()

    def _read(self) -> None:
        size = self._file.size()
        if size < self.content.position:
            self._raise_damaged("it was cut off, or another run has taken it over")
        if size > self.content.position:
            try:
                self.content.take(self._file.read(self.content.position))
            except DamagedError as error:
                self._raise_damaged(str(error))

    def _raise_damaged(self, reason: str) -> NoReturn:
        raise DistStoreError(
            f"{self.path} is damaged at byte {self.content.position} of {self._file.size()}: {reason}. "
            "End the run, and delete the file"
        )

    # Joining.

    def _join(self, world_size: int) -> LockedFile:
        """Opens the file and becomes a member of the run that it belongs to, or of a new one."""
        token = launch_token()
        deadline = time.monotonic() + _ENDING_GRACE_S
        while True:
            file = LockedFile(self.path)
            try:
                with file.lock(True, DEFAULT_TIMEOUT.total_seconds()):
                    # Its last member may have removed it between the opening and the locking.
                    if file.is_at_path():
                        self._file = file
                        self.content = _Content()
                        reason = self._try_to_join(world_size, token)
                        if reason is None:
                            return file
                        if time.monotonic() > deadline:
                            self._refuse(reason)
            except BaseException:
                file.close()
                raise
            file.close()
            time.sleep(_LONGEST_PAUSE_S)

    def _try_to_join(self, world_size: int, token: bytes) -> str | None:
        """Joins if it may; else returns why it must wait. The file is held exclusively."""
        start = self._file.read(0)[:HEADER_BYTES]
        if not start.startswith(MAGIC[: len(start)]):
            raise DistStoreError(
                f"{self.path} exists and is no file of a FileStore (it begins with {start[:16]!r}). It was "
                "left as it is; name a path where there is no file"
            )
        if len(start) < HEADER_BYTES:  # new, or its creator died in making it
            self._create(world_size, token)
            return None
        self._read()
        decision, reason = self.content.run.decide_join(world_size, token, current_process())
        if decision is JoinDecision.WAIT:
            return reason
        if decision is JoinDecision.REFUSE:
            self._refuse(reason)
        if decision is JoinDecision.RECLAIM:
            self._create(world_size, token)
        else:
            self._enter(world_size, token, b"")
        return None

    def _create(self, world_size: int, token: bytes) -> None:
        """Starts the file anew.

        Whoever waits for the lock finds the new run then, and nobody alive uses the old one.
        """
        header = Header(secrets.token_bytes(16), time.time_ns(), world_size)
        self.content = _Content()
        self._enter(world_size, token, header.to_bytes())

    def _enter(self, world_size: int, token: bytes, header: bytes) -> None:
        process = current_process()
        self._member = self.content.run.next_member(process)
        self.write(header + encode_join(Join(self._member, world_size, token, process)))

    def _refuse(self, reason: str) -> NoReturn:
        raise DistStoreError(
            f"{self.path} belongs to another run: {reason}. It was made by {self.content.run.description()}. "
            "Name another file, or end that run; if you know that it is over, delete the file"
        )


_opened: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _leave_all() -> None:
    for shared in list(_opened):
        shared.leave()


atexit.register(_leave_all)


class FileStore(Store):
    """A store in a file, for processes of one machine or of several.

    All of them must reach the file, on a file system that has fcntl locks, as local ones and NFS do.

    **Runs.** A file belongs to one run. The first process makes it; up to ``world_size`` members (stores,
    other than clones) join it; the last one to close it (or to end) removes it. A file that is found is

    * *joined* while members of its run live and it is not complete;
    * *taken over*, and started empty, if all processes that had joined have died or ended: the left-over of a
      crash needs no cleaning up, and its keys are never seen;
    * *refused*, with an error that names the run, if it is alive and complete, or has another world size or
      another launch by ``torchrun``. If that run is just ending, opening waits up to 10 s for it to be gone.

    A process that cannot be seen from here (on another machine, in another container) counts as alive.

    **Unfixed size.** Without ``world_size`` anybody may join, the file is never removed, and its keys stay
    for later stores on it, unless a member died without closing it.

    Waiting is done by looking at the file (about every 10 ms). A push to a queue wakes all waiters; one of
    them gets the value. The file grows with every write, and is read only from the last position on. Its
    format is described byte by byte in ``collectives.store.file.log``.

    Args:
        file_name: path of the file, in a folder that exists; an empty file there is taken as none.
        world_size: number of members; negative if not fixed.

    Raises:
        DistStoreError: the file belongs to another run, is something else, or cannot be used.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__()
        path = os.fspath(file_name)
        if not isinstance(path, str):
            raise TypeError(f"file_name must be a str, not {type(file_name).__name__}: {file_name!r}")
        world_size = operator.index(world_size)
        if world_size == 0:
            raise ValueError("world_size of a FileStore cannot be 0; negative means that it is not fixed")
        self._shared = _Shared(path, max(world_size, -1))
        self._closed = False

    @property
    def path(self) -> str:
        """Path of the file, as given."""
        return self._shared.path

    def close(self) -> None:
        """Leaves the run; the last member removes the file if the size was fixed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._shared.release()

    def _release(self) -> None:
        if hasattr(self, "_shared"):  # unless the constructor failed
            self.close()

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    def _clone(self) -> FileStore:
        copy = FileStore.__new__(FileStore)
        Store.__init__(copy, self.timeout)
        with self._shared.locked(False, self._seconds(None)):
            self._shared.users += 1
        copy._shared = self._shared
        copy._closed = False
        return copy

    def _reading(self) -> contextlib.AbstractContextManager[_Content]:
        return self._shared.locked(False, self._seconds(None))

    def _writing(self, limit: float | None = None) -> contextlib.AbstractContextManager[_Content]:
        return self._shared.locked(True, self._seconds(None) if limit is None else limit)

    def _set(self, key: str, value: bytes) -> None:
        with self._writing():
            self._shared.write(encode_record(Kind.SET, key, value))

    def _append(self, key: str, value: bytes) -> None:
        with self._writing():
            self._shared.write(encode_record(Kind.APPEND, key, value))

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        with self._writing():
            self._shared.write(b"".join(encode_record(Kind.SET, key, value) for key, value in pairs))

    def _add(self, key: str, amount: int, limit: float | None = None) -> int:
        with self._writing(limit) as content:
            before = content.count(key)
            if before is None or not -(2**63) <= before + amount < 2**63:
                self._raise_not_a_counter(key, amount, content.values[key])
            if amount or key not in content.values:  # reading a counter need not grow the file
                self._shared.write(encode_record(Kind.SET, key, str(before + amount).encode()))
            return before + amount

    def _check(self, keys: list[str]) -> bool:
        with self._reading() as content:
            return all(map(content.there, keys))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._writing() as content:
            current = content.values.get(key)
            if current is None and expected:
                return expected
            if current is None or current == expected:
                self._shared.write(encode_record(Kind.SET, key, desired))
                return desired
            return current

    def _delete_key(self, key: str) -> bool:
        raise DistStoreError(
            f"a FileStore cannot delete keys, so {key!r} stays in {self.path}; use a TCPStore or a HashStore "
            "where keys must go"
        )

    def _num_keys(self) -> int:
        with self._reading() as content:
            return len(content.values)

    def _list_keys(self) -> list[str]:
        with self._reading() as content:
            return list(content.values)

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        def values(content: _Content) -> list[bytes] | None:
            if all(map(content.there, keys)):
                return [content.values.get(key, b"") for key in keys]
            return None

        found = self._poll(values, limit)
        return self._raise_missing("get", keys, limit) if found is None else found

    def _wait(self, keys: list[str], limit: float) -> None:
        if not self._poll(lambda content: all(map(content.there, keys)) or None, limit):
            self._raise_missing("wait", keys, limit)

    def _queue_push(self, key: str, value: bytes) -> None:
        with self._writing():
            self._shared.write(encode_record(Kind.PUSH, key, value))

    def _queue_pop(self, key: str, limit: float | None) -> bytes:
        def pop(content: _Content) -> bytes | None:
            if key not in content.queues:
                return None
            value = content.queues[key][0]
            self._shared.write(encode_record(Kind.POP, key))
            return value

        value = self._poll(pop, limit or 0.0, exclusive=True)
        if value is not None:
            return value
        return (
            self._raise_queue_empty(key) if limit is None else self._raise_missing("queue_pop", [key], limit)
        )

    def _queue_len(self, key: str) -> int:
        with self._reading() as content:
            return len(content.queues.get(key, ()))

    def _barrier(self, key: str, world_size: int, limit: float) -> None:
        end = time.monotonic() + limit
        if self._add(key, 1, limit) >= world_size:
            return

        def complete(content: _Content) -> bool | None:
            return (content.count(key) or 0) >= world_size or None

        arrived = True
        try:
            arrived = self._poll(complete, end - time.monotonic()) is None
        finally:
            if arrived:
                count = self._withdraw(key, world_size)
        if arrived and count < world_size:
            self._raise_barrier_timeout(key, count, world_size, limit)

    def _withdraw(self, key: str, world_size: int) -> int:
        """Counts this caller out of a barrier unless it has just become complete.

        Returns:
            The count before.
        """
        with self._writing(0.0) as content:
            count = content.count(key) or 0
            if 1 < count < world_size:
                self._shared.write(encode_record(Kind.SET, key, str(count - 1).encode()))
            elif count == 1:
                self._shared.write(encode_record(Kind.REMOVE, key))
            return count

    def _poll(
        self, ask: Callable[[_Content], _Answer | None], limit: float, exclusive: bool = False
    ) -> _Answer | None:
        """Asks the content until there is an answer or the time is up."""
        deadline = time.monotonic() + limit
        pause = _FIRST_PAUSE_S
        looks = 0
        while True:
            if looks % _LOOKS_PER_READ == 0 or self._shared.unread():
                with self._shared.locked(exclusive, deadline - time.monotonic()) as content:
                    answer = ask(content)
                if answer is not None:
                    return answer
            looks += 1
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            time.sleep(min(pause, remaining))
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def _raise_missing(self, operation: str, keys: list[str], limit: float) -> NoReturn:
        missing = [key for key in keys if not self._shared.content.there(key)]  # as of the last look
        if self._shared.replaced():
            raise DistStoreError(
                f"{operation} gave up after {limit:g} s: {self.path} was deleted or replaced while this "
                "process used it, so that others cannot see what it stores; end the run and start it anew"
            )
        self._raise_timeout(operation, missing or keys, limit)
