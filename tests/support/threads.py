"""Ranks as threads of one process, for what needs no more than a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Runs each call on a thread, named ``rank 0`` and so on; returns what they return or raise."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), name=f"rank {number}") for number in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def on_ranks(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Runs a function on as many threads, each with its rank; returns what they return or raise."""
    return on_threads(*(lambda rank=rank: body(rank) for rank in range(size)))  # type: ignore[misc]
