"""The limit on what a store server holds for its clients."""

from __future__ import annotations

import os

__all__ = ["max_server_bytes"]

_VARIABLE = "COLLECTIVES_STORE_BYTES"
_DEFAULT = 2**30
_LEAST = 2**20


def max_server_bytes() -> int:
    """Returns the limit for a server that is started now, in bytes.

    Raises:
        ValueError: the environment gives none that can be.
    """
    text = os.environ.get(_VARIABLE, "").strip() or str(_DEFAULT)
    if not (text.isascii() and text.isdecimal()) or not _LEAST <= int(text) < 2**62:
        raise ValueError(
            f"{_VARIABLE} is the number of bytes that the server of a TCPStore may hold, from {_LEAST} to "
            f"{2**62 - 1}, not {text!r}"
        )
    return int(text)
