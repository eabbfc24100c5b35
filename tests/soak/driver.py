"""Runs rounds for as long as asked, counts, and tells of the first one that went wrong how to repeat it."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
from census import SHARED_MEMORY, census, memory_mib, shared_memory, unused
from soak.rank import play
from soak.rounds import BACKENDS, KINDS, Round

HANG_S = 180.0
"""Seconds until a round counts as hung; more than any limit within it."""
_WORLDS = 2
_KEYS_OF_A_WORLD = 5
"""Keys that a world may leave, besides one a rank: which was the last, who was served, and where."""
_WARM_ROUNDS = 20
_MORE_MEMORY_MIB = 128.0
"""What a process may use more than after its first rounds: the oracle keeps some of its values."""
_MORE_DESCRIPTORS = 48
"""Descriptors that this process may have more than at its beginning: for each idle rank a few."""


class Soak:
    """Counts of all rounds."""

    def __init__(self, hang_s: float = HANG_S, plant: Callable[[], None] | None = None) -> None:
        self.hang_s, self.plant = hang_s, plant
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.backends: Counter[str] = Counter()
        self.wrong = dict.fromkeys(["wrong results", "wrong errors", "hangs", "leaks"], 0)
        self.failure = ""
        self._began = time.monotonic()
        self._memory: dict[int, list[float]] = {}
        self._here: dict[str, int] | None = None
        self._keys = harness.number_of_keys()
        self._segments = shared_memory()

    def play(self, drawn: Round) -> None:
        """Plays a round; afterwards ``failure`` says what went wrong in it, if anything."""
        fault = drawn.fault
        lost = [fault.victim] if fault.kind in {"kill", "die"} else []
        try:
            results = harness.run_ranks(
                play, drawn.size, drawn, self.plant,
                placement=drawn.placement, timeout=self.hang_s, lost=lost,
                isolated=bool(lost) or self.plant is not None,
            )  # fmt: skip
        except harness.RankTimeoutError as error:
            self._fail("hangs", str(error))
            return
        except harness.RankFailedError as error:
            self._fail("wrong errors", str(error))
            return
        self.counts["rounds"] += 1
        self.counts["between machines"] += len(set(drawn.placement)) > 1
        self.faults[fault.kind] += 1
        self.backends[drawn.backend] += 1
        for rank, counted in enumerate(results):
            if rank not in lost:
                self._note(rank, counted)
        if not lost:
            self._look_at_memory(results)
        self._look_here(drawn)

    def _fail(self, what: str, text: str) -> None:
        self.wrong[what] += 1
        self.failure += f"{what}: {text}\n"

    def _note(self, rank: int, counted: dict[str, Any]) -> None:
        for name in ("operations", "regrouped"):
            self.counts[name] += counted[name]
        self.errors.update(counted["errors"])
        for text in counted["wrong"]:
            self._fail("wrong results", f"rank {rank}: {text}")
        if counted["left"]:
            left = f"{counted['left']}\n{counted['running']}"
            self._fail("leaks", f"rank {rank} has more than before the round: {left}")

    def _look_at_memory(self, results: Sequence[dict[str, Any]]) -> None:
        used = {counted["pid"]: counted["memory_mib"] for counted in results}
        for pid, mib in {**used, os.getpid(): memory_mib()}.items():
            seen = self._memory.setdefault(pid, [])
            seen.append(mib)
            if len(seen) > _WARM_ROUNDS + 1:
                seen.pop()
                if mib > max(seen) + _MORE_MEMORY_MIB:
                    self._fail("leaks", f"process {pid} has {mib:.0f} MiB after {max(seen):.0f} MiB")

    def _look_here(self, drawn: Round) -> None:
        """Looks at the store, which this process serves, and at its own descriptors and threads."""
        keys = harness.number_of_keys()
        more, self._keys = keys - self._keys, keys
        allowed = _WORLDS * (_KEYS_OF_A_WORLD + drawn.size)
        whole = drawn.fault.kind in {"none", "pause", "mismatch"}
        if whole and drawn.backend != "gloo" and more > allowed:  # Gloo's own connections leave keys
            self._fail("leaks", f"{more} keys in the store, {allowed} are allowed")
        now = census()
        self._here = self._here or now
        for name, more in (("descriptors", _MORE_DESCRIPTORS), ("threads", 0)):
            if now[name] > self._here[name] + more:
                self._fail("leaks", f"{now[name]} {name} here after {self._here[name]}")

    def finish(self) -> None:
        """Looks for what is left behind when no rank is at work."""
        left = unused(shared_memory() - self._segments)
        # Not other programs', and not the folders of other tests.
        left = {name for name in left if "collectives" in name and (SHARED_MEMORY / name).is_file()}
        if left:
            self._fail("leaks", f"in /dev/shm: {sorted(left)}")

    def line(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in (self.counts + Counter()).items())
        wrong = ", ".join(f"{name} {count}" for name, count in self.wrong.items())
        injected = sum(self.faults.values()) - self.faults["none"]
        expected = sum(self.errors.values())
        seconds = time.monotonic() - self._began
        return f"{seconds:.0f} s: {counts}, {injected} faults, {expected} errors as expected; {wrong}"

    def record(self) -> dict[str, Any]:
        """Returns all counts, as JSON can hold them."""
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            **self.counts,
            "backends": self.backends,
            "faults": self.faults,
            "errors as expected": self.errors,
            **self.wrong,
        }


def _spin() -> None:
    while os.getppid() != 1:
        sum(range(10_000))


def main(arguments: Sequence[str] | None = None, plant: Callable[[], None] | None = None) -> int:
    """Runs the command; returns its exit status.

    Args:
        arguments: those of the command line.
        plant: a fault of the program itself, for the tests of this one: called by every rank first.
    """
    parser = argparse.ArgumentParser(prog="python tests/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--round", type=int, help="the only round to play")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="by commas; gloo may be among them")
    parser.add_argument("--faults", default=",".join(KINDS), help="by commas")
    parser.add_argument("--steps", type=int, default=60, help="operations of a round")
    parser.add_argument("--load", type=int, default=0, help="processes that spin beside the ranks")
    parser.add_argument("--hang", type=float, default=HANG_S, help="seconds until a round counts as hung")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between lines of counts")
    parser.add_argument("--json", type=Path, help="file for the counts; standard output without it")
    given = parser.parse_args(arguments)
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(given.load)]
    for process in spinning:
        process.start()
    soak = Soak(given.hang, plant)
    print(f"seed {given.seed}", flush=True)
    drawn_from = (given.backends.split(","), given.faults.split(","), given.steps)
    end = time.monotonic() + 60 * given.minutes
    shown = time.monotonic()
    number = given.round or 0
    try:
        while True:
            drawn = Round(given.seed, number, *drawn_from)
            soak.play(drawn)
            if soak.failure or given.round is not None or time.monotonic() > end:
                soak.finish()
                break
            if time.monotonic() > shown + given.every:
                shown = time.monotonic()
                print(soak.line(), flush=True)
            number += 1
    finally:
        for process in spinning:
            process.terminate()
            process.join()
    print(soak.line())
    record = {"seed": given.seed, **soak.record()}
    if soak.failure:
        record["failed"] = str(drawn)
        options = f"--backends {given.backends} --faults {given.faults} --steps {given.steps}"
        print(f"{drawn.listing()}\n\n{soak.failure}", file=sys.stderr)
        print(f"again: python tests/soak --seed {given.seed} --round {number} {options}", file=sys.stderr)
    text = json.dumps(record, indent=2)
    print(text) if given.json is None else given.json.write_text(text)
    return 1 if soak.failure else 0
