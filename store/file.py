r"""A store in a file that processes share: its format, the locked file, the runs that use it, and the store.

The file holds a header, then a log that only grows. Integers are little endian.

Header, 64 bytes:

======  ====  ==============================================================================================
offset  size  content
======  ====  ==============================================================================================
0       8     magic ``\x8bCLSTORE``
8       4     u32 version: 1
12      4     u32 CRC-32 of bytes 16 to 63
16      16    id of the run, random
32      8     u64 time of creation, nanoseconds since 1970 (UTC)
40      8     i64 number of members of the run; negative if not fixed
48      16    zero
======  ====  ==============================================================================================

Record:

======  ====  ==============================================================================================
offset  size  content
======  ====  ==============================================================================================
0       4     u32 n: size of the body
4       4     u32 CRC-32 of the body
8       1     u8 kind; the body begins here
9       ...   what the table below says, up to byte 8 + n
======  ====  ==============================================================================================

====  ======  ==============================================================================================
kind  name    content after the kind
====  ======  ==============================================================================================
1     SET     u32 k, key of k bytes, value: the key holds the value from here on
2     APPEND  u32 k, key, value: the value is appended to what the key holds
3     REMOVE  u32 k, key: the key is gone
4     PUSH    u32 k, key, value: the value joins the queue
5     POP     u32 k, key: the oldest value leaves the queue
6     JOIN    u64 m, i64 world size that the member knows of (negative: none), u16 t, launch token of t bytes,
              identity of its process (:meth:`ProcessIdentity.to_bytes`): m is a member from here on
7     LEAVE   u64 m: m has closed the store
====  ======  ==============================================================================================

Records are written under the exclusive lock, those of one call by one ``write``. A writer that dies in it
leaves a record at the end that is shorter than it says: readers stop before it, the next writer cuts it off.
A record of full length with a wrong checksum is damage that no crash explains, and is reported.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import operator
import os
import secrets
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NoReturn, TypeVar

import collectives._native as _native
from collectives.errors import DistStoreError
from collectives.forks import call_in_forked_children
from collectives.store.base import DEFAULT_TIMEOUT, Store
from collectives.store.memory import Change, Content, ContentStore
from collectives.store.process import Life, ProcessIdentity, current_process

# ---- the format --------------------------------------------------------------------------------------------

MAGIC = b"\x8bCLSTORE"
_VERSION = 1
_HEADER_START = struct.Struct("<8sII")
_HEADER_REST = struct.Struct("<16sQq16x")
HEADER_BYTES = _HEADER_START.size + _HEADER_REST.size
_RECORD = struct.Struct("<II")
_KEY = struct.Struct("<BI")
_JOIN = struct.Struct("<BQqH")
_LEAVE = struct.Struct("<BQ")
_JOINED, _LEFT = 6, 7
"""Kinds of records beside the changes of keys."""


class DamagedError(Exception):
    """The file is one of ours, but not as we write it."""


@dataclass(frozen=True)
class Header:
    """What the first member of a run writes before anything else."""

    run: bytes
    created_ns: int
    world_size: int

    def to_bytes(self) -> bytes:
        """Returns the header's bytes."""
        rest = _HEADER_REST.pack(self.run, self.created_ns, self.world_size)
        return _HEADER_START.pack(MAGIC, _VERSION, zlib.crc32(rest)) + rest

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Reads a header that begins with the magic."""
        _, version, checksum = _HEADER_START.unpack_from(data)
        if version != _VERSION:
            raise DamagedError(f"its format has version {version}, this program knows {_VERSION}")
        if zlib.crc32(data[_HEADER_START.size : HEADER_BYTES]) != checksum:
            raise DamagedError("its header has a wrong checksum")
        return cls(*_HEADER_REST.unpack_from(data, _HEADER_START.size))


@dataclass
class Member:
    """One that has joined a run, as its JOIN record tells, and may have left it."""

    world_size: int
    token: bytes
    process: ProcessIdentity
    left: bool = False


@dataclass(frozen=True)
class Record:
    """A record of any kind; fields that its kind lacks are empty."""

    kind: Change | None = None
    key: str = ""
    value: bytes = b""
    number: int = -1
    joined: Member | None = None


def encode_record(kind: Change, key: str, value: bytes = b"") -> bytes:
    """Returns a record on a key."""
    name = key.encode(errors="surrogateescape")
    return _framed(_KEY.pack(kind, len(name)) + name + value)


def encode_join(number: int, member: Member) -> bytes:
    """Returns a JOIN record."""
    start = _JOIN.pack(_JOINED, number, member.world_size, len(member.token))
    return _framed(start + member.token + member.process.to_bytes())


def encode_leave(number: int) -> bytes:
    """Returns a LEAVE record."""
    return _framed(_LEAVE.pack(_LEFT, number))


def records(data: bytes) -> Iterator[tuple[Record, int]]:
    """Reads records from the start of ``data``.

    Yields:
        Each whole record, and the offset of its end. Stops before one that is cut off.

    Raises:
        DamagedError: a record is not as we write it.
    """
    position = 0
    while position + _RECORD.size <= len(data):
        size, checksum = _RECORD.unpack_from(data, position)
        start, end = position + _RECORD.size, position + _RECORD.size + size
        if end > len(data):
            return
        body = data[start:end]
        if zlib.crc32(body) != checksum:
            raise DamagedError("a record has a wrong checksum")
        try:
            record = _parsed(body)
        except (struct.error, ValueError, IndexError) as error:
            raise DamagedError(f"a record cannot be read: {error}") from error
        yield record, end
        position = end


def _framed(body: bytes) -> bytes:
    if len(body) >= 2**32:
        raise ValueError(f"a FileStore takes less than 4 GiB at once, but this has {len(body)} bytes")
    return _RECORD.pack(len(body), zlib.crc32(body)) + body


def _parsed(body: bytes) -> Record:
    if body[0] == _JOINED:
        _, number, world_size, token_size = _JOIN.unpack_from(body)
        token_end = _JOIN.size + token_size
        process = ProcessIdentity.from_bytes(body[token_end:])
        return Record(number=number, joined=Member(world_size, body[_JOIN.size : token_end], process))
    if body[0] == _LEFT:
        return Record(number=_LEAVE.unpack(body)[1])
    kind, key_size = _KEY.unpack_from(body)
    key_end = _KEY.size + key_size
    if key_end > len(body):
        raise ValueError("its key is longer than the record")
    key = body[_KEY.size : key_end].decode(errors="surrogateescape")
    return Record(Change(kind), key, body[key_end:])


# ---- the locked file ---------------------------------------------------------------------------------------

_LONGEST_LOCK_PAUSE_S = 0.005
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_FLOCK = struct.Struct("hhqqi4x")  # struct flock where off_t has 64 bits


class LockedFile:
    """An open file with a lock of its own.

    The lock is an fcntl lock of the open file description: local file systems and NFS have it, and, unlike
    the locks of a process, it keeps two openings within one process apart and survives the closing of
    another.

    Raises:
        DistStoreError: the path cannot be opened, is no plain file, or is another user's, who could have laid
            there what they like; root's is taken.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            _raise_open_error(path, error)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise DistStoreError(f"a FileStore needs a plain file, which {path} is not")
        if found.st_uid != 0 and not self._is_own(found):
            self.close()
            raise DistStoreError(
                f"{path} belongs to user {found.st_uid}, while this process runs as {os.geteuid()}; name "
                "another file"
            )

    def _is_own(self, found: os.stat_result) -> bool:
        """Tells whether the file is of this process's user, by the kernel where the number does not tell."""
        if found.st_uid != os.geteuid() or _native.is_own_user(found.st_uid):
            return found.st_uid == os.geteuid()
        try:
            os.fchmod(self._fd, stat.S_IMODE(found.st_mode))  # as its owner alone may
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Closes the file and gives the lock up; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._fd < 0

    @contextlib.contextmanager
    def lock(self, exclusive: bool, limit: float) -> Iterator[None]:
        """Holds the lock; waits up to ``limit`` seconds for it."""
        self._acquire(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, limit)
        try:
            yield
        finally:
            # Closing gives the lock up too.
            if self._fd >= 0:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))

    def _acquire(self, kind: int, limit: float) -> None:
        # The blocking call could not be given up when the holder is a stopped process.
        deadline = time.monotonic() + limit
        pause = 0.0001
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(kind))
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise DistStoreError(
                        f"cannot lock {self.path}: {error.strerror}; a FileStore needs a file system with "
                        "fcntl locks"
                    ) from error
            else:
                return
            if time.monotonic() > deadline:
                raise DistStoreError(
                    f"another process has held the lock of {self.path} for {limit:.3g} s; is it stopped? "
                    "`lsof` on the file shows who has it open"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOCK_PAUSE_S)

    def size(self) -> int:
        """Returns the file's size in bytes."""
        return os.fstat(self._fd).st_size

    def read(self, start: int) -> bytes:
        """Returns the bytes from ``start`` to the end."""
        parts = []
        while part := os.pread(self._fd, 1 << 20, start):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def write(self, start: int, data: bytes) -> None:
        """Cuts the file off at ``start`` and appends ``data``: all of it, or, with an error, none."""
        try:
            if self.size() != start:
                os.ftruncate(self._fd, start)
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], start + written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise DistStoreError(
                f"cannot write to {self.path}: {error.strerror}; what this call was to store is not stored"
            ) from error

    def is_at_path(self) -> bool:
        """Tells whether the path still leads to this file."""
        try:
            there = Path(self.path).stat()
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def unlink(self) -> None:
        """Removes the file from its folder, if the path still leads to it."""
        if self.is_at_path():
            Path(self.path).unlink()

    def reopen(self) -> None:
        """Opens the same file anew, with a lock of its own: in a forked child, which shares the parent's."""
        inherited = self._fd
        self._fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        os.close(inherited)


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _raise_open_error(path: str, error: OSError) -> NoReturn:
    if error.errno == errno.ENOENT:
        raise DistStoreError(
            f"the folder of {path} does not exist; a FileStore makes the file only"
        ) from error
    if error.errno == errno.ELOOP and Path(path).is_symlink():
        raise DistStoreError(
            f"{path} is a symbolic link, which a FileStore does not follow; name the file itself"
        ) from error
    if error.errno in {errno.EACCES, errno.EPERM}:
        try:
            owner = f"it belongs to user {Path(path).stat().st_uid}, this process runs as {os.geteuid()}"
        except OSError:
            owner = f"user {os.geteuid()} may not make it"
        raise DistStoreError(f"no permission for {path}: {owner}; name another file") from error
    raise DistStoreError(f"cannot open {path}: {error.strerror}") from error


# ---- the run -----------------------------------------------------------------------------------------------


class JoinDecision(Enum):
    """What one who finds a file may do."""

    JOIN = "join"
    RECLAIM = "reclaim"  # the run is over; the file may be started anew
    WAIT = "wait"  # the run is ending; look again soon
    REFUSE = "refuse"


@dataclass
class Run:
    """The members that a file's log tells of."""

    header: Header
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def world_size(self) -> int | None:
        """Number of members the run will have; ``None`` if no member knows."""
        sizes = [self.header.world_size, *(member.world_size for member in self.members.values())]
        return next((size for size in sizes if size > 0), None)

    @property
    def complete(self) -> bool:
        """Whether all members have joined."""
        return self.world_size is not None and len(self.members) >= self.world_size

    @property
    def over(self) -> bool:
        """Whether all members have joined and left again."""
        return self.complete and all(member.left for member in self.members.values())

    def next_member(self, process: ProcessIdentity) -> int:
        """Returns the number of a new member; a process that comes back has the one that it had."""
        for number, member in self.members.items():
            if member.left and member.process == process and not self.complete:
                return number
        return max(self.members, default=-1) + 1

    def decide_join(
        self, world_size: int, token: bytes, process: ProcessIdentity
    ) -> tuple[JoinDecision, str]:
        """Decides whether the finder belongs to this run.

        A run lives while a process that has joined it runs, or may run where it cannot be seen. A process
        that is all of it may join once more, as one that opens its own store twice.

        Args:
            world_size: that of the finder, negative if not fixed.
            token: launch token of the finder.
            process: the finder.

        Returns:
            The decision, and for WAIT and REFUSE the reason as a clause.
        """
        lives = {number: member.process.life() for number, member in self.members.items()}
        if Life.ALIVE not in lives.values() and Life.UNKNOWN not in lives.values():
            kept = self.world_size is None and world_size < 0 and all(m.left for m in self.members.values())
            return (JoinDecision.JOIN if kept else JoinDecision.RECLAIM), ""
        alone = all(m.process == process and not m.left for m in self.members.values())
        other = self._other_run(world_size, token, full=self.complete and not alone)
        if other:
            # A run that is torn down (or restarted by its launcher) is gone in a moment.
            ending = any(m.left or lives[n] is Life.DEAD for n, m in self.members.items())
            return (JoinDecision.WAIT if ending else JoinDecision.REFUSE), other
        lost = [m for n, m in self.members.items() if lives[n] is Life.DEAD and not m.left]
        if lost and self.world_size is not None:
            return JoinDecision.WAIT, f"its member, {lost[0].process}, has died, others have not yet"
        return JoinDecision.JOIN, ""

    def _other_run(self, world_size: int, token: bytes, *, full: bool) -> str:
        """Returns why the finder is not of this run, or nothing."""
        tokens = {member.token for member in self.members.values()} - {b""}
        if token and tokens and token not in tokens:
            return f"it was launched as {tokens.pop().decode()!r}, this process as {token.decode()!r}"
        if self.world_size is not None and 0 < world_size != self.world_size:
            return f"it has world_size {self.world_size}, this process {world_size}"
        if full:
            return f"all {self.world_size} members have joined"
        return ""

    def description(self) -> str:
        """Says who made the file, and when."""
        age = max(0.0, time.time() - self.header.created_ns / 1e9)
        creator = next(iter(self.members.values()), None)
        who = "an unknown process" if creator is None else str(creator.process)
        state = "" if creator is None else f", {_LIFE[creator.process.life()]}"
        return f"{who}{state}, {_duration(age)} ago"


_LIFE: Mapping[Life, str] = {
    Life.ALIVE: "which still runs",
    Life.DEAD: "which has ended",
    Life.UNKNOWN: "which cannot be seen from here",
}


def launch_token() -> bytes:
    """Returns what tells one start of a job from another where a launcher says so, as torchrun does."""
    run, restarts = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return f"{run}, start {restarts}".encode()[:1024] if run and restarts else b""


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


# ---- the store ---------------------------------------------------------------------------------------------

_ENDING_GRACE_S = 10.0
"""How long one who finds the file of a run that is ending waits for its last members to be gone."""
_LEAVE_S = 5.0
_LEAST_LOCK_S = 1.0
"""How long a call waits for the lock whatever its limit: others hold it for moments."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_LOOKS_PER_READ = 25
"""Looks at the file's size between reads under the lock, which network file systems need to show changes."""

_T = TypeVar("_T")


class _LoggedContent(Content):
    """What a file says, as far as it was read.

    Attributes:
        position: number of bytes taken in.
        run: the members.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position = 0
        self.run = Run(Header(b"", 0, -1))

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
            if record.kind is not None:
                self.apply(record.kind, record.key, record.value)
            elif record.joined is not None:
                self.run.members[record.number] = record.joined
            elif record.number in self.run.members:
                self.run.members[record.number].left = True
            self.position = start + end


class _Shared:
    """The file, its content and the membership in its run, which a store and its clones share."""

    def __init__(self, path: str, world_size: int) -> None:
        self.path = str(Path(path).absolute())  # the program may change its folder
        self.users = 1
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._member = -1
        self._held = False
        self.content = _LoggedContent()
        self._file = self._join(world_size)
        _opened.add(self)
        call_in_forked_children(self, _Shared.after_fork)

    @contextlib.contextmanager
    def locked(self, exclusive: bool, limit: float) -> Iterator[_LoggedContent]:
        """Holds the file, and gives its content up to date; waits up to ``limit`` seconds for others."""
        limit = max(limit, _LEAST_LOCK_S)
        end = time.monotonic() + limit
        if not self._lock.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
            raise DistStoreError(f"other threads have waited for the lock of {self.path} for {limit:g} s")
        try:
            if self._held:  # by this thread: what it reads or writes now would come between
                raise DistStoreError(
                    f"{self.path} is in use by this thread: a signal's handler cannot use the store then"
                )
            if self._file.closed:
                raise DistStoreError(f"the store on {self.path} was closed")
            self._held = True
            try:
                with self._file.lock(exclusive, end - time.monotonic()):
                    self._read()
                    yield self.content
            finally:
                self._held = False
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
        self._lock, self._held = threading.RLock(), False
        # A thread that does not exist here may have been changing it.
        self.content = _LoggedContent()
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
                        self.content = _LoggedContent()
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
        self.content = _LoggedContent()
        self._enter(world_size, token, header.to_bytes())

    def _enter(self, world_size: int, token: bytes, header: bytes) -> None:
        process = current_process()
        self._member = self.content.run.next_member(process)
        self.write(header + encode_join(self._member, Member(world_size, token, process)))

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


class FileStore(ContentStore):
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
    format is described byte by byte in ``collectives.store.file``.

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
        if world_size >= 2**63:
            raise ValueError(f"world_size of a FileStore must fit in 64 bits, but is {world_size}")
        self._path = path
        self._shared = _Shared(path, max(world_size, -1))
        self._closed = False

    @property
    def path(self) -> str:
        """Path of the file, as given."""
        return self._path

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
        copy._path, copy._shared = self._path, self._shared
        copy._closed = False
        return copy

    def _content(self) -> Content:
        return self._shared.content

    def _holding(
        self, *, exclusive: bool, limit: float | None = None
    ) -> contextlib.AbstractContextManager[Content]:
        return self._shared.locked(exclusive, self._seconds(None) if limit is None else limit)

    def _change(self, *changes: tuple[Change, str, bytes]) -> None:
        self._shared.write(b"".join(encode_record(*change) for change in changes))

    def _delete_key(self, key: str) -> bool:
        raise DistStoreError(
            f"a FileStore cannot delete keys, so {key!r} stays in {self.path}; use a TCPStore or a HashStore "
            "where keys must go"
        )

    def _ask_until(
        self,
        ask: Callable[[Content], _T | None],
        keys: list[str],  # noqa: ARG002 - the file does not tell which keys have changed
        limit: float,
        *,
        exclusive: bool = False,
    ) -> _T | None:
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
        if self._shared.replaced():
            raise DistStoreError(
                f"{operation} gave up after {limit:g} s: {self.path} was deleted or replaced while this "
                "process used it, so that others cannot see what it stores; end the run and start it anew"
            )
        super()._raise_missing(operation, keys, limit)
