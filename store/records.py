"""Records that ranks publish in a store as JSON, checked before they are used.

Whoever reaches the store can write to it, and another program may use the same keys. So where the job has a
secret, every record is followed by a newline and a proof, HMAC-SHA-256 over its key and itself in hexadecimal
digits. A key is known by its name below the prefixes of the store that it is written to.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import DistStoreError
from collectives.secret import SECRET, derived_key

__all__ = ["Checked", "as_bytes", "as_text", "demand", "fields", "read", "written"]

Checked = dict[str, Any]
"""A record whose fields have been checked."""

_T = TypeVar("_T")


def written(value: Any, key: str) -> str:
    """Returns what to set a key to.

    Args:
        value: what :mod:`json` can write.
        key: the key.
    """
    text = json.dumps(value)
    proof = _proof(text.encode(), key)
    return f"{text}\n{proof}" if proof else text


def read(value: bytes, key: str, check: Callable[[Any], _T]) -> _T:
    """Returns what :func:`written` has made for a key, as ``check`` returns it.

    Args:
        value: what the store gave for the key.
        key: the key, for the error.
        check: takes the decoded JSON; calls :func:`demand` and :func:`fields`.

    Raises:
        DistStoreError: it is not as ranks publish it, or without a proof where the job has a secret.
    """
    text, _, proof = bytes(value).partition(b"\n")
    if not hmac.compare_digest(proof, _proof(text, key).encode()):
        raise DistStoreError(
            f"what the store holds under {key!r} is not proved by this process's job secret: either {SECRET} "
            f"(or {SECRET}_FILE) is not the same for all processes of the job, or somebody else writes to "
            "the store"
        )
    try:
        return check(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DistStoreError(
            f"the store holds something unusable under {key!r}: {error}; no other program may use the same "
            "store and prefix, and all ranks must run the same version"
        ) from error


def _proof(text: bytes, key: str) -> str:
    """Returns the proof of a record; nothing where there is no secret."""
    secret = derived_key("records")
    return hmac.new(secret, key.encode() + b"\0" + text, hashlib.sha256).hexdigest() if secret else ""


def fields(record: Any, **kinds: type) -> Checked:
    """Returns the fields of a record, each of its type."""
    demand(isinstance(record, dict), f"{record!r} instead of a record")
    for name, kind in kinds.items():
        demand(type(record.get(name)) is kind, f"{name} = {record.get(name)!r}")
    return {name: record[name] for name in kinds}


def as_text(record: Any) -> str:
    """Returns a record that is a text."""
    demand(isinstance(record, str), f"{record!r} instead of a text")
    return str(record)


def as_bytes(record: Any) -> bytes:
    """Returns bytes that were written as a text of hexadecimal digits."""
    return bytes.fromhex(as_text(record))


def demand(true: bool, found: str) -> None:
    """Refuses a record that has something else than ranks publish."""
    if not true:
        raise ValueError(f"it has {found}")
