"""Which process is meant, whether it still runs, and whom a process without a job secret trusts."""

from __future__ import annotations

import functools
import os
import platform
import socket
import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import collectives._native as _native
from collectives.errors import DistBackendError, DistNetworkError
from collectives.secret import WAY_OUT, derived_key, is_insecure

_FIXED = struct.Struct("<16s16sQQQ")


class Life(Enum):
    """What can be told of another process from here."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # on another machine, or in another container


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, told from all others, of other machines and times too.

    Attributes:
        host: name of the machine.
        machine: id of the installed system, 16 bytes; zero if it has none.
        boot: id of the machine's current run, 16 bytes; zero if it has none.
        namespace: number of the namespace of process ids (containers have their own).
        pid: process id in that namespace.
        start: when the process started, in clock ticks since the boot: process ids are used again.
    """

    host: str
    machine: bytes
    boot: bytes
    namespace: int
    pid: int
    start: int

    def to_bytes(self) -> bytes:
        """Returns 56 bytes (machine, boot, then namespace, pid and start as u64), then the host's name."""
        fixed = _FIXED.pack(self.machine, self.boot, self.namespace, self.pid, self.start)
        return fixed + self.host.encode(errors="surrogateescape")

    @classmethod
    def from_bytes(cls, data: bytes) -> ProcessIdentity:
        """Reads what :meth:`to_bytes` wrote; raises :class:`struct.error` if it is too short."""
        machine, boot, namespace, pid, start = _FIXED.unpack_from(data)
        host = data[_FIXED.size :].decode(errors="surrogateescape")
        return cls(host, machine, boot, namespace, pid, start)

    def life(self) -> Life:
        """Tells whether the process still runs; a zombie does not."""
        here = current_process()
        if self.boot != here.boot:
            same_machine = self.machine == here.machine != bytes(16) and self.host == here.host
            return Life.DEAD if same_machine else Life.UNKNOWN
        if self.namespace != here.namespace or self.host != here.host:
            return Life.UNKNOWN
        return Life.ALIVE if _start_of(self.pid) == self.start else Life.DEAD

    def __str__(self) -> str:
        here = "this machine" if self.host == current_process().host else "another machine"
        return f"process {self.pid} on {self.host} ({here})"


def current_process() -> ProcessIdentity:
    """Returns the identity of this process."""
    return _identity(os.getpid())


def system() -> str:
    """Returns what tells running systems and their network name spaces apart.

    Raises:
        DistBackendError: this process cannot find out.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except (FileNotFoundError, PermissionError):
        return socket.gethostname()
    except OSError as error:  # such as too many open files, which says nothing of the system
        raise DistBackendError(f"cannot find out on which system this process runs: {error}") from error


def kernel_of(system: str) -> str:
    """Returns what of :func:`system` tells running kernels apart: that of a host, which its containers share.

    Args:
        system: of a process.
    """
    return system.partition(" ")[0]


def own_user_only() -> bool:
    """Returns whether connections of other users, and of other machines, are refused: without a job secret.

    Raises:
        DistNetworkError: they would have to be, and the kernel cannot tell other users from this one.
    """
    if derived_key("user") is not None or is_insecure():
        return False
    user = os.geteuid()
    if not _native.is_own_user(user):
        raise DistNetworkError(
            f"this process runs as user {user}, as do all users whom its user namespace does not know (see "
            "/proc/self/uid_map), so that the processes of this job cannot be told from those of others "
            f"without a job secret; {WAY_OUT}"
        )
    return True


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(
        host=platform.node(),
        machine=_id_in("/etc/machine-id"),
        boot=_id_in("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        pid=pid,
        start=_start_of(pid) or 0,
    )


def _id_in(path: str) -> bytes:
    try:
        return bytes.fromhex(Path(path).read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _start_of(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks, or ``None`` if none of that id runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    state, start = fields[0], int(fields[19])
    return None if state in {"Z", "X", "x"} else start
