"""Records that ranks publish in a store as JSON, checked before they are used.

Whoever reaches the store can write to it, and move what ranks have written; another program may use the same
keys. So where the job has a secret, every record is followed by a newline and a proof, HMAC-SHA-256 over the
scope of its store, its key and itself in hexadecimal digits. The scope says which world and group it is of
(:attr:`collectives.PrefixStore.scope`), so that a record proves nothing under another key, in another group
or in another world. Who wrote it is part of its key, or of the record.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from collectives.errors import DistStoreError
from collectives.secret import SECRET, derived_key

__all__ = [
    "Checked",
    "as_bytes",
    "as_text",
    "demand",
    "fetch",
    "fetch_all",
    "fields",
    "publish",
    "publish_all",
    "read",
    "written",
]

Checked = dict[str, Any]
"""A record whose fields have been checked."""

_T = TypeVar("_T")


def publish(store: Any, key: str, value: Any) -> None:
    """Sets a key of a store to a record.

    Args:
        store: the store.
        key: the key.
        value: what :mod:`json` can write.
    """
    store.set(key, written(store, key, value))


def publish_all(store: Any, records: Mapping[str, Any]) -> None:
    """Publishes records.

    Args:
        store: the store.
        records: by key.
    """
    values = {key: written(store, key, record) for key, record in records.items()}
    if len(values) > 1 and store.has_extended_api():
        store.multi_set(list(values), list(values.values()))
        return
    for key, value in values.items():
        store.set(key, value)


def fetch(store: Any, key: str, check: Callable[[Any], _T]) -> _T:
    """Returns a record, checked; waits for it.

    Args:
        store: the store.
        key: the key.
        check: see :func:`read`.
    """
    return read(store, key, store.get(key), check)


def fetch_all(store: Any, keys: list[str], check: Callable[[Any], _T]) -> list[_T]:
    """Returns records, checked; waits for them.

    Args:
        store: the store.
        keys: of the records.
        check: of each, see :func:`read`.
    """
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return [read(store, key, value, check) for key, value in zip(keys, values, strict=True)]


def written(store: Any, key: str, value: Any) -> str:
    """Returns what to set a key of a store to.

    Args:
        store: the store.
        key: the key.
        value: what :mod:`json` can write.
    """
    text = json.dumps(value)
    proof = _proof(store, key, text.encode())
    return f"{text}\n{proof}" if proof else text


def read(store: Any, key: str, value: bytes, check: Callable[[Any], _T]) -> _T:
    """Returns what :func:`written` has made for a key of a store, as ``check`` returns it.

    Args:
        store: the store.
        key: the key.
        value: what the store gave for it.
        check: takes the decoded JSON; calls :func:`demand` and :func:`fields`.

    Raises:
        DistStoreError: it is not as ranks publish it, or without a proof where the job has a secret.
    """
    text, _, proof = bytes(value).partition(b"\n")
    if not hmac.compare_digest(proof, _proof(store, key, text).encode()):
        raise DistStoreError(
            f"what the store holds under {key!r} is not proved by this process's job secret: either {SECRET} "
            f"(or {SECRET}_FILE) is not the same for all processes of the job, or somebody else writes to "
            "the store, such as what ranks have written elsewhere"
        )
    try:
        return check(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DistStoreError(
            f"the store holds something unusable under {key!r}: {error}; no other program may use the same "
            "store and prefix, and all ranks must run the same version"
        ) from error


def _proof(store: Any, key: str, text: bytes) -> str:
    """Returns the proof of a record; nothing where there is no secret."""
    secret = derived_key("records")
    if secret is None:
        return ""
    place = f"{getattr(store, 'scope', '')}{key}".encode(errors="surrogateescape")
    return hmac.new(secret, place + b"\0" + text, hashlib.sha256).hexdigest()


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
