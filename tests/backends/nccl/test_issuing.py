"""Turns of the threads that issue operations on one device."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from collectives.backends.nccl.device.issuing import Issuing


def in_turn(turns: Issuing, *communicators: str) -> tuple[threading.Thread, threading.Event, threading.Event]:
    """Starts a thread that takes a turn; returns it, what tells that it has its turn, and what ends that."""
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with turns.turn(*communicators):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, inside, leave


def test_one_at_a_time_and_past_those_that_stay() -> None:
    turns = Issuing()
    connecting, inside, leave = in_turn(turns, "a", "b")
    assert inside.wait(20)
    same, same_inside, same_leave = in_turn(turns, "b", "c")
    other, other_inside, other_leave = in_turn(turns, "d")
    assert other_inside.wait(20), "held up by a thread that stays in NCCL"
    assert not same_inside.is_set(), "two threads on one communicator"
    other_leave.set()
    other.join()
    assert not same_inside.is_set()
    leave.set()
    connecting.join()
    assert same_inside.wait(20)
    same_leave.set()
    same.join()
    with turns.turn("a"), turns.turn("a", "b"):  # within one of the same thread
        pass


def test_a_signal_breaks_the_wait_off() -> None:
    turns = Issuing()
    thread, inside, leave = in_turn(turns, "a")
    assert inside.wait(20)

    def interrupt(*_: object) -> None:
        raise ZeroDivisionError

    before = signal.signal(signal.SIGUSR2, interrupt)
    later = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2))
    later.start()
    try:
        with pytest.raises(ZeroDivisionError), turns.turn("a"):
            pytest.fail("two threads on one communicator")
    finally:
        later.join()
        signal.signal(signal.SIGUSR2, before)
        leave.set()
        thread.join()
    with turns.turn("a"):  # what was broken off is no turn
        pass


def interrupted(turns: Issuing) -> None:
    with turns.turn("a"):
        raise ZeroDivisionError


def test_an_error_ends_the_turn() -> None:
    turns = Issuing()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            interrupted(turns)
