"""Records that ranks publish in a store as JSON, errors among them, checked before they are used.

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

from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
)
from collectives.secret import SECRET, derived_key

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
    values = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
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


_KINDS: dict[str, type[DistError]] = {
    kind.__name__: kind
    for kind in (
        PeerLostError,
        CollectiveTimeoutError,
        CollectiveMismatchError,
        GroupAbortedError,
        DistBackendError,
        DistNetworkError,
        DistStoreError,
        DistError,
    )
}
"""The errors by name, the special ones first."""


def record_of(error: DistError) -> dict[str, Any]:
    """Returns an error as it is published."""
    kind = next(name for name, one in _KINDS.items() if isinstance(error, one))
    cause = None if error.cause is None else record_of(error.cause)
    return {"kind": kind, "text": str(error), "cause": cause, **error.details()}


def error_of(record: Any) -> DistError:
    """Returns the error that a rank has published.

    Args:
        record: what was published, without its JSON; checked here.

    Raises:
        ValueError: it is no such record.
    """
    found = fields(record, kind=str, text=str, rank=int, missing_ranks=list, operation=str, sequence=int)
    kind, text = found.pop("kind"), found.pop("text")
    demand(kind in _KINDS, f"an error of the class {kind!r}")
    # As numbers that the C++ core has room for.
    ranks = [found["rank"], *found["missing_ranks"]]
    demand(all(type(rank) is int and -1 <= rank < 2**31 for rank in ranks), f"the ranks {ranks}")
    demand(-1 <= found["sequence"] < 2**63, f"the sequence number {found['sequence']}")
    cause = record.get("cause")
    return _KINDS[kind](text, **found, cause=None if cause is None else error_of(cause))


class Announcements:
    """Records under the numbers of a counter, for the one process that reads them as they come.

    What it asks does not grow with their number, as long as every number's record is there.

    Args:
        store: the store.
        name: the counter's key.
        most: how many there can be; whoever reaches the store may count on.
        after: the last number that is known already.

    Attributes:
        counted: the last number that was given to a record.
        late: numbers whose records have not come yet; each comes a moment later, unless its process has died.
    """

    def __init__(self, store: Any, name: str, most: int, after: int = 0) -> None:
        self._store = store
        self._name = name
        self._most = most
        self._after = after
        self.counted = after
        self.late: list[int] = []

    def key(self, number: int) -> str:
        """Returns the key of a record."""
        return f"{self._name}/{number}"

    def new(self, check: Callable[[Any], _T]) -> dict[int, _T]:
        """Returns the records that came since the last call by their numbers, checked; does not wait.

        Args:
            check: of each record.

        Raises:
            DistStoreError: there are more than there can be, or one is not as it has to be.
        """
        self.count()
        store, here = self._store, self.late
        if here and not store.check([self.key(number) for number in here]):
            here = [number for number in here if store.check([self.key(number)])]
        if not here:
            return {}
        found = fetch_all(store, [self.key(number) for number in here], check)
        self.late = [number for number in self.late if number not in here]
        return dict(zip(here, found, strict=True))

    def count(self) -> None:
        """Counts what has been announced, without reading it.

        Raises:
            DistStoreError: there is more than there can be.
        """
        store, known = self._store, self.counted
        counted = int(store.add(self._name, 0))
        if not known <= counted <= self._after + self._most:
            raise DistStoreError(
                f"key {self._name!r} of the store counts {counted} announcements after {known}, of at "
                f"most {self._after + self._most}; something else than these ranks writes to this store"
            )
        self.counted = counted
        self.late += range(known + 1, counted + 1)
