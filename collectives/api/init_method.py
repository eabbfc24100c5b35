"""How ``init_process_group`` finds the other ranks: by a store, ``init_method`` or the environment."""

from __future__ import annotations

import importlib
import operator
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as _torch_distributed
from torch.distributed.distributed_c10d import Store as TorchStore

from collectives.errors import DistNetworkError
from collectives.registry import backends as registry
from collectives.registry.names import BackendConfig
from collectives.store import PrefixStore, rendezvous
from collectives.store.joining.standby import Standby
from collectives.store.joining.world_rendezvous import KEYS, meet_world
from collectives.store.tcp.client import NoStoreError

_RETRY_SECONDS = 0.05
"""Pause before another try to reach rank 0 after a connection broke."""


def check_arguments(init_method: str | None, store: Any, rank: int, size: int) -> tuple[int, int]:
    """Checks the arguments before anything is sent; returns rank and number of ranks as int."""
    if not isinstance(init_method, str | None):
        raise TypeError(f"init_method must be a str, but is {init_method!r}")
    if store is not None:
        if init_method is not None:
            raise ValueError(
                f"give init_method or store, not both (init_method={init_method!r}, store={store!r})"
            )
        if not isinstance(store, TorchStore):
            raise TypeError(f"store must be a torch.distributed.Store, but is of type {type(store).__name__}")
    numbers = []
    for name, given, least, must in (
        ("world_size", size, 1, "must be positive"),
        ("rank", rank, 0, "must not be negative"),
    ):
        try:
            number = operator.index(given)
        except TypeError:
            raise TypeError(f"{name} must be an int, but is {given!r}") from None
        if number < least and (store is not None or number != -1):
            missing = ", and must be given with a store" if store is not None and number == -1 else ""
            raise ValueError(f"{name} {must}, but is {number}{missing}")
        numbers.append(number)
    size, rank = numbers
    if 0 < size <= rank:
        raise ValueError(f"rank is {rank}, but world_size {size} has the ranks 0 to {size - 1}")
    return rank, size


def choose_init_method(config: BackendConfig, init_method: str | None, rank: int, size: int) -> str:
    """Returns the rendezvous URL: the user's, the environment's, or else that of a backend of the group."""
    if init_method is None:
        named = {
            name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if os.environ.get(name)
        }
        named |= {name for name, given in (("RANK", rank), ("WORLD_SIZE", size)) if given != -1}
        own = [spec for name in config.names() if (spec := registry.backend_spec(name)).init_method]
        if len(named) == 4 or not own:
            return "env://"
        init_method = own[0].init_method
    scheme = init_method.partition("://")[0]
    for name in registry.backend_names():
        spec = registry.backend_spec(name)
        if spec.rendezvous_module and spec.init_method == f"{scheme}://":
            importlib.import_module(spec.rendezvous_module)
    return init_method


def join_default_group(
    store: Any, init_method: str, rank: int, size: int, limit: timedelta, backend: str
) -> tuple[Any, int, int, PrefixStore, Standby]:
    """Finds the other ranks and joins a new world.

    Returns:
        The store, this rank, the number of ranks, the world's part of the store, and who serves it next.
    """
    if store is not None:
        return store, rank, size, *_join(store, rank, size, backend, limit)
    deadline = time.monotonic() + limit.total_seconds()
    left, own, former = limit, rank, ""
    # That all are there, a store of this package need not wait for: joining does, and names who is missing.
    options = {"wait_for_workers": False} if init_method.startswith(("env://", "tcp://")) else {}
    while True:
        base = None
        try:
            base, own, count = next(iter(rendezvous(init_method, rank, size, timeout=left, **options)))
            base.set_timeout(limit)
            return base, own, count, *_join(base, own, count, backend, left)
        except BaseException as error:
            close_store(base)
            if not isinstance(error, _torch_distributed.DistNetworkError) or _own_rank(own) == 0:
                raise
            if base is None and isinstance(error, NoStoreError):  # however often it was tried
                if not former:
                    raise
                raise DistNetworkError(
                    f"{former}; no other server has come within the limit of {limit.total_seconds():g} s"
                ) from error
            left = timedelta(seconds=deadline - time.monotonic())
            if left <= timedelta(0):
                raise
            former = str(error)
        # A rank that begins its next world may still reach the server of rank 0's former one, just before
        # that ends; the next one is there soon.
        time.sleep(_RETRY_SECONDS)


def _join(store: Any, rank: int, size: int, backend: str, limit: timedelta) -> tuple[PrefixStore, Standby]:
    standby = Standby(store)
    try:
        return meet_world(PrefixStore(KEYS, store), rank, size, backend, limit, standby)[1], standby
    except BaseException:
        standby.close()
        raise


def _own_rank(rank: int) -> int:
    """Returns this rank where the arguments or the environment tell, else 0."""
    return rank if rank >= 0 else int(os.environ.get("RANK", "0"))


def close_store(store: Any) -> None:
    """Closes a store that was made here; those of torch close when nothing refers to them."""
    close = getattr(store, "close", None)
    if close is not None:
        close()
