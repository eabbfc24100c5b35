"""Repeats failures of host groups under load for as long as asked; the suite has no time for that.

::

    python -P tests/backends/host/failures/stress.py --minutes 5 --seed 1 --load 2

Each round draws what happens: a rank is killed in the middle of all workloads, ranks disagree, a limit
passes, a rank stops, groups are aborted, or made and ended many times, on one machine or several, while
``--load`` processes spin. The first failure ends it with the round's number, which ``--only`` repeats, and
the stacks of the ranks that hang.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
PLACEMENTS = ("aaaa", "aabb", "abab", "abcd", "aaab")


def load(name: str) -> ModuleType:
    """Loads a module of the suite as pytest does, so that ranks find its functions."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def spin() -> None:
    while os.getppid() != 1:
        sum(range(10_000))


def rounds() -> dict[str, Callable[[random.Random], str]]:
    """Returns what can happen in a round; each returns a description of what it drew, or raises."""
    import harness

    deaths, hangs = load("test_deaths"), load("test_hangs")
    mismatches, failures = load("test_mismatches"), load("test_failures")

    def death(dice: random.Random) -> str:
        placement, victim, delay = dice.choice(PLACEMENTS), dice.randrange(4), dice.uniform(0.0, 0.8)
        what = f"{placement} kill {victim} after {delay:.3f} s"
        results = harness.run_ranks(
            deaths.run_workloads, 4, victim, delay, isolated=True, lost=[victim], placement=placement
        )
        complaints = deaths.complaints_of(results, victim)
        assert not complaints, what + "\n" + "\n".join(complaints)
        return what

    def mismatch(dice: random.Random) -> str:
        placement, asynchronous = dice.choice(["aa", "ab", "aab", "aaa"]), dice.random() < 0.5
        harness.run_ranks(
            mismatches.disagree, len(placement), asynchronous, backend="host", placement=placement
        )
        return f"{placement} {asynchronous=}"

    def limit(dice: random.Random) -> str:
        placement = dice.choice(["aaa", "aab", "abc"])
        harness.run_ranks(hangs.absent_rank, 3, placement=placement)
        return placement

    def stop(dice: random.Random) -> str:
        placement = dice.choice(["aaa", "aab", "abc"])
        harness.run_ranks(hangs.stop_in_the_middle, 3, isolated=True, lost=[1], placement=placement)
        return placement

    def abort(dice: random.Random) -> str:
        what, placement = dice.choice(["synchronous", "asynchronous", "receive"]), dice.choice(["aaa", "aab"])
        harness.run_ranks(failures._abort, 3, what, placement=placement)
        return f"{placement} {what}"

    def again(dice: random.Random) -> str:
        placement = dice.choice(["aa", "ab"])
        harness.run_ranks(failures._rounds, 2, 200, isolated=True, placement=placement, timeout=120)
        return placement

    return {f.__name__: f for f in (death, mismatch, limit, stop, abort, again)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=int, default=2, help="processes that spin beside the ranks")
    parser.add_argument("--only", type=int, help="the one round to repeat")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(HERE.parents[2] / folder) for folder in ("", "support")]
    import harness

    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(given.load)]
    for process in spinning:
        process.start()
    kinds = rounds()
    names = [*kinds, "death", "death"]  # the one that is hardest to get right
    end = time.monotonic() + 60 * given.minutes
    done = 0
    try:
        while time.monotonic() < end:
            number = done if given.only is None else given.only
            dice = random.Random(f"{given.seed} {number}")
            name = dice.choice(names)
            begin = time.monotonic()
            try:
                said = kinds[name](dice)
            except Exception:  # noqa: BLE001 - shown with the round that it came in
                traceback.print_exc()
                print(f"round {number} of seed {given.seed} failed: {name}", flush=True)
                return 1
            print(f"{number} {name} {said}: {time.monotonic() - begin:.1f} s", flush=True)
            done += 1
    finally:
        for process in spinning:
            process.terminate()
            process.join()
        harness.close()
    print(f"{done} rounds without a failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
