"""A file that processes lock, read, and append to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import collectives._native as _native
from collectives.errors import DistStoreError

__all__ = ["LockedFile"]

_LONGEST_PAUSE_S = 0.005
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
            pause = min(2 * pause, _LONGEST_PAUSE_S)

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
