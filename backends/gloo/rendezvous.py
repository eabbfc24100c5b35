"""How the ranks of a Gloo group connect, and what they agree on through the store before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch.distributed as torch_distributed

from collectives.backends.gloo.options import connects_on_demand
from collectives.errors import DistBackendError, DistError
from collectives.registry.backends import GroupOptions
from collectives.store.joining.agreement import exchange, give_up
from collectives.store.prefix import PrefixStore
from collectives.store.records import as_bytes, as_text, read, written
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


def connect(
    options: GroupOptions, chosen: Any, devices: int, where: str, lost_ranks: Callable[[], Collection[int]]
) -> Any:
    """Returns torch's group; called by all its ranks, blocks until all of them are connected.

    Gloo's call returns when this rank is connected. Were it to leave then, ranks that still connect to each
    other would find its connection closed and fail.

    Args:
        options: what the group is made of.
        chosen: torch's options.
        devices: number of devices of this rank.
        where: rank and group, to stand in front of a message.
        lost_ranks: which ranks are known to have died; asked again and again.

    Raises:
        DistBackendError: the ranks could not be connected, or differ in the number of devices.
    """
    rank, size = options.rank, options.size

    def failed(what: object) -> str:
        return (
            f"the ranks could not be connected by Gloo: {what}; look whether all {size} ranks run, whether "
            "the store is not one of an earlier run, and whether COLLECTIVES_SOCKET_IFNAME names an "
            "interface that they share"
        )

    meet = partial(
        exchange,
        options.store,
        rank=rank,
        ranks=range(size),
        limit=options.timeout,
        where=where,
        lost_ranks=lost_ranks,
    )
    on_demand = connects_on_demand()
    try:
        mine = f"{devices}{' on demand' if on_demand else ''}"
        meet("devices", record=mine, check=as_text, combine=_check_devices)
        try:
            made = torch_distributed.ProcessGroupGloo(_ProvedStore("gloo", options.store), rank, size, chosen)
        except (RuntimeError, TimeoutError) as error:
            if not on_demand:  # else nobody asks
                why = failed(f"rank {rank} failed with: {error}")
                give_up(options.store, "connected", DistBackendError(why))
            raise
        if not on_demand:
            meet("connected")
    except DistBackendError:
        raise
    except (RuntimeError, TimeoutError) as error:
        details = error.details() if isinstance(error, DistError) else {}
        text = failed(str(error).removeprefix(f"{where} "))
        raise DistBackendError(f"{where} {text}", **details) from error
    return made


def delete_keys_of(store: Any, size: int, contexts: int) -> None:
    """Deletes the addresses that the ranks of a group have told each other, where the store can delete.

    Args:
        store: the store that they connected by.
        size: number of ranks.
        contexts: number of Gloo's contexts.
    """
    delete_keys(store, [f"gloo/{context}/{rank}" for context in range(contexts) for rank in range(size)])


def _check_devices(published: Sequence[str]) -> None:
    """Raises where ranks would connect in different ways: Gloo would wait for what the others do not do."""
    for rank, other in enumerate(published):
        if other != published[0]:
            raise DistBackendError(
                "all ranks must use the same number of network interfaces and connect at the same time, but "
                f"rank 0 has {_in_words(published[0])}, and rank {rank} {_in_words(other)}; "
                "set COLLECTIVES_SOCKET_IFNAME (or GLOO_SOCKET_IFNAME) to as many names, and "
                "TORCH_GLOO_LAZY_INIT to the same value, on every rank"
            )


def _in_words(published: str) -> str:
    count, _, when = published.partition(" ")
    plural = "" if count == "1" else "s"
    return f"{count} interface{plural}, connected {when or 'at once'}"
