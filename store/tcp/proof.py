"""How a client and a server of a store prove to each other that they are of one job.

The client's side of the handshake of ``backends/native/security/handshake.hpp``.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Protocol

from collectives.secret import SECRET
from collectives.store.tcp.wire import TURNED_AWAY

__all__ = ["PROOF_WANTED", "UnprovedError", "hello", "prove"]

_HELLO = b"collectives auth"
_NONCE_BYTES = 32
PROOF_WANTED = b"auth"
"""What a server that asks for a proof answers to a client that sends a request instead."""
_NO_ROOM = "the store's server has no room for another connection; raise `ulimit -n` where the server runs"
_DIFFERENT = (
    "it does not know this job's secret: its process has none, or another one; set "
    f"{SECRET}, or {SECRET}_FILE, to the same for all processes of the job"
)


class UnprovedError(ConnectionError):
    """The server has not shown that it is to be trusted."""


class _Connection(Protocol):
    def send(self, data: bytes, deadline: float) -> None: ...
    def receive(self, size: int, deadline: float) -> bytes: ...


def prove(connection: _Connection, key: bytes, deadline: float) -> None:
    """Proves that this process knows the key, and has the server prove it.

    Args:
        connection: a connection on which nothing has been sent.
        key: what both ends know.
        deadline: until when, by ``time.monotonic()``.

    Raises:
        ConnectionRefusedError: the server cannot keep the connection.
        UnprovedError: the server closed the connection, or does not know the key.
        OSError: the connection broke, or time ran out.
    """
    opening = hello()
    try:
        connection.send(opening, deadline)
        nonce = connection.receive(_NONCE_BYTES, deadline)
        if nonce.startswith(TURNED_AWAY):
            raise ConnectionRefusedError(_NO_ROOM)  # not its words: it has proved nothing
        connection.send(_proof(key, b"dial", opening + nonce), deadline)
        answer = connection.receive(_NONCE_BYTES, deadline)
    except TimeoutError as error:
        raise TimeoutError("no answer to the proof of the job's secret, as of a TCPStore of torch") from error
    except ConnectionRefusedError:
        raise
    except ConnectionError as error:
        raise UnprovedError(_DIFFERENT) from error
    if not hmac.compare_digest(answer, _proof(key, b"accept", opening + nonce)):
        raise UnprovedError(_DIFFERENT)


def hello() -> bytes:
    """Returns what a client sends first."""
    return _HELLO + secrets.token_bytes(_NONCE_BYTES)


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, role + said, hashlib.sha256)
