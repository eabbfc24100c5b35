"""Records of processes and departures, by which groups learn that ranks are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from collectives import CollectiveTimeoutError, DistError, GroupAbortedError, PeerLostError
from collectives.backends._shared.exit_reasons import Departure
from collectives.backends._shared.health import Health
from collectives.backends._shared.operation import Operation
from collectives.core.recording.flight_record import FlightRecord
from collectives.store import PrefixStore
from collectives.store.process import current_process
from collectives.store.records import publish


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_health_asks_the_store_as_little_on_many_ranks() -> None:
    store, size = dist.HashStore(), 64
    ranks = [Health(store, rank, size, "") for rank in range(size)]
    assert ranks[0].poll_lost() is None  # which reads the records
    asked = mock.Mock(wraps=ranks[0]._store)
    ranks[0]._store = asked
    for _ in range(3):
        assert ranks[0].poll_lost() is None
    assert len(asked.method_calls) <= 3 * 2
    ranks[5].publish(Departure(5, DistError("it went home")))
    departure = ranks[0].poll_lost()
    assert departure is not None
    assert (departure.rank, str(departure.reason)) == (5, "it went home")


@pytest.mark.parametrize("secret", [None, "a secret that all processes of this job share"])
def test_departures(monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    if secret is not None:
        monkeypatch.setenv("COLLECTIVES_SECRET", secret)
    store = dist.HashStore()
    ranks = [Health(PrefixStore("x", store), rank, 5, "") for rank in range(4)]
    assert ranks[0].find_lost() is None

    def found(health: Health) -> tuple[int, str]:
        departure = health.find_lost()
        assert departure is not None
        assert isinstance(departure.reason, DistError)
        return departure.rank, str(departure.reason)

    def set_record(rank: int, **different: Any) -> None:
        record = replace(current_process(), **different)
        publish(PrefixStore("health", PrefixStore("x", store)), f"process/{rank}", record.to_bytes().hex())

    # An exit reason is known of ranks of other machines too.
    ranks[3].publish(Departure(3, GroupAbortedError("went home", 3)))
    assert found(ranks[0]) == (3, "went home")
    ranks[2].publish(Departure(1, PeerLostError("its process 5 has ended", 1)))
    assert found(ranks[0]) == (1, "its process 5 has ended")
    # A process that is seen to be dead comes first; one of another machine is never looked for.
    pid = ended_process()
    set_record(3, host="elsewhere", namespace=1, pid=pid, start=77)
    assert found(ranks[0])[0] == 1
    set_record(4, pid=pid, start=77)
    assert found(ranks[0]) == (4, f"its process {pid} has ended")
    # The number of a process that is used again is another process.
    set_record(4, start=77)
    newcomer = Health(PrefixStore("x", store), 0, 5, "")  # records are read once
    assert found(newcomer) == (4, f"its process {os.getpid()} has ended")
    # What no rank of the job has written tells nothing.
    spoilt = '"0"' if secret is None else json.dumps(replace(current_process(), start=77).to_bytes().hex())
    store.set("x/health/process/4", spoilt)
    assert found(Health(PrefixStore("x", store), 0, 5, ""))[0] == 1


class SilentStore(PrefixStore):
    """A store that answers until it is told not to."""

    answers = threading.Event()

    def _check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return super()._check(keys)


def test_ends_are_known_though_the_store_does_not_answer_or_a_handler_asks() -> None:
    store = SilentStore("x", dist.HashStore())
    store.answers.set()
    ended = replace(current_process(), pid=ended_process(), start=77)
    publish(PrefixStore("health", store), "process/1", ended.to_bytes().hex())
    health = Health(store, 0, 3, "")
    assert health.lost_ranks() == [1]
    told: list[list[int]] = []

    def asks(*_: object) -> None:
        told.append(health.lost_ranks())

    before = signal.signal(signal.SIGALRM, asks)
    try:
        store.answers.clear()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert health.lost_ranks() == [1]
        assert told == [[1]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        store.answers.set()


class SlowStore(PrefixStore):
    """A store of which every question takes a while, as on a machine with too much to do."""

    def _check(self, keys: list[str]) -> bool:
        time.sleep(0.25)
        return super()._check(keys)


def test_a_slow_store_still_tells_who_gave_up() -> None:
    store = dist.HashStore()
    seeking = Health(SlowStore("x", store), 0, 4, "")
    leaving = Health(PrefixStore("x", store), 3, 4, "")
    leaving.publish(Departure(3, GroupAbortedError("went home", 3)))
    departure = seeking.find_lost()
    assert departure is not None
    assert (departure.rank, str(departure.reason)) == (3, "went home")


class LateStore(PrefixStore):
    """A store that takes longer to write than a rank waits that leaves."""

    def _set(self, key: str, value: bytes) -> None:
        if "exit" in key:
            time.sleep(1.5)
        super()._set(key, value)


def test_who_left_before_the_store_was_told_is_found() -> None:
    store = dist.HashStore()
    seeking, leaving = Health(PrefixStore("x", store), 0, 2, ""), Health(LateStore("x", store), 1, 2, "")
    leaving.publish(Departure(1, GroupAbortedError("went home", 1)))  # and closes its connections now
    departure = seeking.find_lost()
    assert departure is not None
    assert (departure.rank, str(departure.reason)) == (1, "went home")


def test_a_word_that_does_not_count_hides_no_other() -> None:
    store = dist.HashStore()
    ranks = [Health(store, rank, 4, "") for rank in range(4)]
    ranks[2].publish_waiting("barrier #1 (of all)")
    ranks[3].publish_waiting("all_reduce #2 (of 3 elements)")
    store.set("health/waiting/1", "all_reduce #2")
    operation = Operation(FlightRecord(lambda _: None), "all_reduce", 2, [], timedelta(seconds=5))
    raised: list[DistError] = []
    ranks[0].expire(operation, raised.append)
    (error,) = raised
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 2 waits in barrier #1 (of all); rank 3 waits in all_reduce #2" in str(error)
    assert "nothing is known of rank 1: the store holds something unusable" in str(error)
    assert error.missing_ranks == (2,)
