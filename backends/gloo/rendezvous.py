"""How the ranks of a Gloo group connect, and what they agree on through the store before."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_distributed

from collectives.backends.gloo.options import connects_on_demand
from collectives.errors import DistBackendError
from collectives.registry.backends import GroupOptions
from collectives.store.prefix import PrefixStore
from collectives.store.records import as_bytes, as_text, fetch_all, publish, read, written
from collectives.store.waiting import delete_keys

__all__ = ["connect", "delete_keys_of"]


class _ProvedStore(PrefixStore):
    """A part of a store in which every value carries a proof where the job has a secret.

    Gloo writes addresses into it. It has no other way to find out whose they are.
    """

    def has_extended_api(self) -> bool:
        """Returns that several keys are several requests."""
        return False

    def _set(self, key: str, value: bytes) -> None:
        super()._set(key, written(self, key, value.hex()).encode())

    def _get(self, key: str, limit: float) -> bytes:
        return read(self, key, super()._get(key, limit), as_bytes)

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        return [self._get(key, limit) for key in keys]

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        for key, value in pairs:
            self._set(key, value)

    def _clone(self) -> PrefixStore:
        return _ProvedStore(self._prefix, self._store.clone(), self.scope.removesuffix("/"))


def connect(options: GroupOptions, chosen: Any, devices: int, where: str) -> Any:
    """Returns torch's group; called by all its ranks, blocks until all of them are connected.

    Args:
        options: what the group is made of.
        chosen: torch's options.
        devices: number of devices of this rank.
        where: rank and group, to stand in front of a message.

    Raises:
        DistBackendError: the ranks could not be connected, or differ in the number of devices.
    """
    store = _ProvedStore("gloo", options.store)
    try:
        _agree_on_devices(options, devices)
        if connects_on_demand():
            return torch_distributed.ProcessGroupGloo(store, options.rank, options.size, chosen)
        return _connect_together(options, store, chosen)
    except DistBackendError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise DistBackendError(
            f"{where} the ranks could not be connected by Gloo: {error}; look whether all "
            f"{options.size} ranks run, whether the store is not one of an earlier run, and whether "
            "COLLECTIVES_SOCKET_IFNAME names an interface that they share"
        ) from error


def delete_keys_of(store: Any, size: int, contexts: int) -> None:
    """Deletes what the ranks of a group have told each other to connect, where the store can delete.

    Args:
        store: the store that they connected by.
        size: number of ranks.
        contexts: number of Gloo's contexts.
    """
    kinds = ["devices", "connected", *(f"gloo/{context}" for context in range(contexts))]
    delete_keys(store, [f"{kind}/{rank}" for kind in kinds for rank in range(size)])


def _connect_together(options: GroupOptions, store: Any, chosen: Any) -> Any:
    """Returns torch's group when it is made on all ranks.

    Gloo's call returns when this rank is connected. Were it to leave then, ranks that still connect to each
    other would find its connection closed and fail.

    Args:
        options: what the group is made of.
        store: where Gloo exchanges addresses.
        chosen: torch's options.

    Raises:
        RuntimeError: this rank could not connect, or another one could not or did not come.
    """
    try:
        made = torch_distributed.ProcessGroupGloo(store, options.rank, options.size, chosen)
    except RuntimeError as error:
        _publish(options, "connected", f"failed with: {error}")
        raise
    for rank, said in enumerate(_exchange(options, "connected", "yes")):
        if said != "yes":
            raise RuntimeError(f"rank {rank} {said}")
    return made


def _exchange(options: GroupOptions, subject: str, value: str) -> list[str]:
    """Returns what every rank has to say on a subject; called by all of them, and waits for them.

    Args:
        options: what the group is made of.
        subject: prefix of the keys.
        value: what this rank says.

    Raises:
        RuntimeError: a rank did not come.
    """
    _publish(options, subject, value)
    keys = [f"{subject}/{rank}" for rank in range(options.size)]
    store: Any = options.store
    store.wait(keys, options.timeout)
    return fetch_all(store, keys, as_text)


def _publish(options: GroupOptions, subject: str, value: str) -> None:
    """Says something on a subject, under this rank's number."""
    publish(options.store, f"{subject}/{options.rank}", value)


def _agree_on_devices(options: GroupOptions, count: int) -> None:
    """Raises on every rank where they would connect in different ways; called by all of them, and waits.

    Gloo would wait for the connections that the others do not make.

    Args:
        options: what the group is made of.
        count: number of devices of this rank.

    Raises:
        RuntimeError: a rank did not come.
        DistBackendError: the ranks differ.
    """
    mine = f"{count}{' on demand' if connects_on_demand() else ''}"
    published = _exchange(options, "devices", mine)
    for rank, other in enumerate(published):
        if other != published[0]:
            raise DistBackendError(
                f"[rank {options.rank}] gloo group {options.group_name!r}: all ranks must use the same "
                "number of network interfaces and connect at the same time, but rank 0 has "
                f"{_in_words(published[0])}, and rank {rank} {_in_words(other)}; "
                "set COLLECTIVES_SOCKET_IFNAME (or GLOO_SOCKET_IFNAME) to as many names, and "
                "TORCH_GLOO_LAZY_INIT to the same value, on every rank"
            )


def _in_words(published: str) -> str:
    count, _, when = published.partition(" ")
    plural = "" if count == "1" else "s"
    return f"{count} interface{plural}, connected {when or 'at once'}"
