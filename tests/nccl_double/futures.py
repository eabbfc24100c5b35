"""Futures of tensors on the double's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nccl_double import do
from nccl_double.accesses import is_on_host, tensors_in
from nccl_double.calls import current_stream, pool_stream, thread
from nccl_double.memory import share

_collect_all = torch.futures.collect_all


class DoubleFuture(torch.futures.Future[Any]):
    """A future of tensors on a device, as torch's: complete as soon as it has a value.

    Streams of those who wait for the value wait for the stream that it was set on. Callbacks run at once, on
    a stream of torch's pool, which has others' work to do before theirs.
    """

    def __init__(self, *, devices: Sequence[object] | None = None) -> None:
        super().__init__()
        self._devices = list(devices or ())
        self._event: int | None = None

    def __class_getitem__(cls, _: object) -> type[DoubleFuture]:
        """Lets ``Future.then`` of torch, which looks its own class up, name the type of what it returns."""
        return cls

    def set_result(self, result: Any) -> None:
        if not self._devices:
            if any(not is_on_host(tensor) for tensor in tensors_in(result)):
                raise RuntimeError(
                    "the value has tensors on a device that the future was not told of, so that nobody would "
                    "wait for them"
                )
            super().set_result(result)
            return
        self._event = do("event_create")
        do("event_record", self._event, current_stream())
        super().set_result(result)

    def order(self, stream: int) -> None:
        """Makes a stream wait for the value, and tells the allocator that it uses it."""
        if self._event is not None:
            do("event_wait", self._event, stream)
            for tensor in tensors_in(super().wait()):
                share(tensor, stream)

    def wait(self) -> Any:
        value = super().wait()
        self.order(current_stream())
        return value

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def call(_: object) -> None:
            with _on_pool_stream([self]):
                callback(self)

        super().add_done_callback(call)

    def then(self, callback: Callable[[Any], Any]) -> DoubleFuture:
        following = DoubleFuture(devices=self._devices)

        def call(_: object) -> None:
            try:
                value = callback(self)
            except Exception as error:  # noqa: BLE001 - handed on, as torch does
                following.set_exception(error)
            else:
                following.set_result(value)

        self.add_done_callback(call)
        return following


@contextlib.contextmanager
def _on_pool_stream(futures: list[DoubleFuture]) -> Iterator[None]:
    stream, before = pool_stream(), current_stream()
    for future in futures:
        future.order(stream)
    do("stream_sleep", stream, 20)
    thread.stream = stream
    try:
        yield
    finally:
        thread.stream = before


def collect_all(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """Returns a future of futures that are done, as ``torch.futures.collect_all``."""
    ours = [future for future in futures if isinstance(future, DoubleFuture)]
    collected = DoubleFuture(devices=ours[0]._devices if ours else None)

    def complete(_: object) -> None:
        with _on_pool_stream(ours):
            collected.set_result(futures)

    _collect_all(futures).add_done_callback(complete)
    return collected
