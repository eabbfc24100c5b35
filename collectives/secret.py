"""The job's secret, by which its processes recognise each other, and the keys that are derived from it.

It comes from the environment, so that children inherit it, and goes nowhere else: neither into a store, nor
onto a command line, nor into a message. Without it, only processes of one user on one machine take
connections from each other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

SECRET = "COLLECTIVES_SECRET"  # noqa: S105 - the name of a variable
SECRET_FILE = "COLLECTIVES_SECRET_FILE"  # noqa: S105 - likewise
INSECURE = "COLLECTIVES_INSECURE"

LEAST_CHARACTERS = 16

WAY_OUT = (
    "make a secret once, (umask 077; openssl rand -hex 32 > ~/.collectives_secret), copy the file to every "
    f"machine, and give it to all processes of the job: export {SECRET_FILE}=~/.collectives_secret; where "
    f"everybody who reaches the network is trusted, export {INSECURE}=1 instead"
)
"""For errors where machines have no secret in common."""


def derived_key(purpose: str) -> bytes | None:
    """Returns the key for a purpose, 32 bytes, derived from the job's secret; ``None`` without a secret.

    Args:
        purpose: what the key is for; keys of different purposes tell nothing of each other.

    Raises:
        ValueError: the environment names a secret that cannot be used; the message does not show it.
    """
    secret = _secret()
    if not secret:
        return None
    # HKDF (RFC 5869) with one block of output.
    extracted = hmac.digest(b"collectives", secret, hashlib.sha256)
    return hmac.digest(extracted, purpose.encode(errors="surrogateescape") + b"\x01", hashlib.sha256)


def is_insecure() -> bool:
    """Returns whether the user lets in everybody who reaches the ports of this process.

    Raises:
        ValueError: there is a secret as well, or the variable is neither ``0`` nor ``1``.
    """
    value = os.environ.get(INSECURE, "")
    if value not in {"", "0", "1"}:
        raise ValueError(f"{INSECURE} must be 0 or 1, is {value!r}")
    if value != "1":
        return False
    if os.environ.get(SECRET) or os.environ.get(SECRET_FILE):
        raise ValueError(
            f"{INSECURE}=1 lets everybody in, and {SECRET} or {SECRET_FILE} only those who know it; unset one"
        )
    return True


@contextlib.contextmanager
def provided() -> Iterator[None]:
    """Context in which this process, and the children that it starts, have a secret: a new one if need be.

    For launchers, which start all processes of a job. Does nothing where the user chose to have none.
    """
    if is_insecure() or _secret():
        yield
        return
    os.environ[SECRET] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ[SECRET]


def _secret() -> bytes:
    """Returns the secret; nothing where there is none."""
    text = os.environ.get(SECRET, "").encode(errors="surrogateescape")
    if text:
        return _checked(text, SECRET)
    path = os.environ.get(SECRET_FILE, "")
    return _checked(_content(path), SECRET_FILE) if path else b""


@functools.lru_cache(maxsize=1)
def _content(path: str) -> bytes:
    """Returns what is in a file that nobody else may read or write."""
    try:
        file_descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(file_descriptor, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError(f"{SECRET_FILE} names {path!r}, which is no file")
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ValueError(
                    f"{SECRET_FILE} names {path!r}, which belongs to user {about.st_uid} with mode "
                    f"{stat.S_IMODE(about.st_mode):04o}, so that others could know it; make a new one "
                    f"in a file of user {os.geteuid()} with mode 0600"
                )
            return file.read(4096)
    except OSError as error:
        raise ValueError(f"{SECRET_FILE} names {path!r}, which cannot be read: {error.strerror}") from error


def _checked(text: bytes, variable: str) -> bytes:
    text = text.strip()
    if len(text) < LEAST_CHARACTERS:
        raise ValueError(
            f"the secret of {variable} has {len(text)} characters, fewer than {LEAST_CHARACTERS}, so that it "
            "could be guessed; make one with: openssl rand -hex 32"
        )
    return text
