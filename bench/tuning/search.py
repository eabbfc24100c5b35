"""Finds thresholds that measure better than the present ones, and only those.

Groups with different thresholds are timed in rounds, so that the machine's noise meets all of them alike. One
of them, the *control*, has the same thresholds as the *current* group: how far its times are from those is
what noise makes of no difference at all (an A/A test). The *ratio* of a candidate in a round is the geometric
mean, over the probes, of its time over the current group's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from collectives.backends.host import tuning_file
from collectives.bench.tuning.timing import Probe, TimedGroups

__all__ = ["PLAN", "Comparison", "Outcome", "Step", "TooNoisyError", "compare", "search"]

LEAST_GAIN = 0.03
"""Part of the time that a candidate must save at least."""

NOISE_FACTOR = 2.0
"""How many times the noise it must save at least."""

MOST_NOISE = 0.15
"""Noise beyond which nothing is decided."""

LEAST_WINS = 0.75
"""Part of the rounds in which a candidate must be the faster one."""

MOST_LOSS = 0.10
"""Part of its time that a single probe may lose by new thresholds, beside the noise."""

TRIALS = 3
"""How often the new thresholds are tried together: each time without the one that saved least before."""

MIN_ROUNDS = 7
MAX_ROUNDS = 25
"""Rounds of a comparison; the time decides between the two."""

BATCH_US = 2000.0
"""How long the calls of a round should take for each group and probe, with at least and at most so many:"""
MIN_CALLS = 3
MAX_CALLS = 60

CURRENT, CONTROL = 0, 1
"""Places of two of the compared groups; candidates follow."""


@dataclass(frozen=True, slots=True)
class Step:
    """A threshold, what it is tried with, and what that is timed on.

    Attributes:
        name: the threshold.
        values: what is tried, beside the current one.
        probes: operations that it decides about.
    """

    name: str
    values: tuple[int, ...]
    probes: tuple[Probe, ...]


def _step(name: str, values: tuple[int, ...], **sizes: tuple[int, ...]) -> Step:
    return Step(name, values, tuple(Probe(name, size) for name, of in sizes.items() for size in of))


def _kib(*numbers: int) -> tuple[int, ...]:
    return tuple(number << 10 for number in numbers)


_M = 1 << 20

PLAN = (
    _step("spin_us", (0, 5, 20, 50), barrier=(0,), all_reduce=(8, *_kib(4, 64, 1024))),
    _step("yields", (0, 2, 8, 32), barrier=(0,), all_reduce=(8, *_kib(4, 64))),
    _step("one_shot_bytes", _kib(4, 8, 16, 32, 64, 128), all_reduce=_kib(4, 8, 16, 32, 64, 128)),
    _step(
        "staged_bytes", _kib(8, 16, 32, 64, 128), broadcast=_kib(16, 32, 64, 128), all_gather=_kib(64, 256)
    ),
    _step(
        "chunk_bytes", _kib(32, 64, 96, 128, 256),
        all_reduce=_kib(512, 4096), all_gather=(4 * _M,), reduce_scatter=(4 * _M,),
    ),
    _step("unsplit_bytes", _kib(0, 128, 256, 512), all_reduce=_kib(160, 256, 512)),
    _step("shortest_chunk_bytes", _kib(8, 16, 32, 64), all_reduce=_kib(96, 192, 384)),
    _step("chunks_wanted", (2, 4, 8), all_reduce=_kib(192, 512)),
    _step("ring_bytes", _kib(512, 1024, 2048), all_gather=(_M, 8 * _M), broadcast=(_M, 8 * _M)),
    _step(
        "past_cache_bytes", (2 * _M, 4 * _M, 8 * _M, 16 * _M, 1 << 62),
        all_reduce=(4 * _M, 16 * _M), all_gather=(4 * _M, 16 * _M),
    ),
)  # fmt: skip
"""Thresholds in the order in which they are decided: each is tried with those before it as decided.

``background_spin_us`` is not among them: what a group's own thread takes from the computing thread beside it
shows in no time of an operation.
"""


class TooNoisyError(RuntimeError):
    """Two groups with the same thresholds differ too much to tell thresholds apart."""


class Comparison:
    """Times of groups side by side.

    Args:
        times_us: median time by group (:data:`CURRENT`, :data:`CONTROL`, candidates), probe and round.
    """

    def __init__(self, times_us: npt.ArrayLike) -> None:
        self.times_us: npt.NDArray[np.float64] = np.asarray(times_us, dtype=np.float64)
        self._by_probe = self.times_us / self.times_us[CURRENT]
        self._ratios = np.exp(np.log(self._by_probe).mean(axis=1))
        self.noise = float(np.median(np.abs(self._ratios[CONTROL] - 1)))
        """The control's typical distance from 1."""
        self.gain_needed = max(LEAST_GAIN, NOISE_FACTOR * self.noise)
        """What a candidate must save to count as better."""

    def check_noise(self) -> None:
        """Raises :exc:`TooNoisyError` where the control differs too much from the current group."""
        if self.noise > MOST_NOISE:
            raise TooNoisyError(
                f"two groups with the same thresholds differ by {self.noise:.0%} here, more than the "
                f"{MOST_NOISE:.0%} with which anything can be told"
            )

    def probe_us(self, group: int) -> list[float]:
        """Returns the median time of each probe."""
        return [float(us) for us in np.median(self.times_us[group], axis=1)]

    def gain(self, group: int) -> float:
        """Returns the part of the time that a group typically saves."""
        return 1 - float(np.median(self._ratios[group]))

    def slower(self, group: int) -> list[int]:
        """Returns the places of the probes that a group makes slower than it may."""
        limit = 1 + max(MOST_LOSS, NOISE_FACTOR * self.noise)
        return [int(place) for place in np.flatnonzero(np.median(self._by_probe[group], axis=1) > limit)]

    def is_better(self, group: int) -> bool:
        """Returns whether a group is faster than the current one beyond noise, and slower at no probe."""
        wins = float((self._ratios[group] < 1).mean())
        return self.gain(group) >= self.gain_needed and wins >= LEAST_WINS and not self.slower(group)

    def best(self) -> int | None:
        """Returns the candidate that saves most among those that are better; ``None`` where none is."""
        better = [group for group in range(CONTROL + 1, len(self.times_us)) if self.is_better(group)]
        return max(better, key=self.gain, default=None)


@dataclass(slots=True)
class Outcome:
    """What a search found for one number of ranks.

    Attributes:
        ranks: number of ranks.
        before: the thresholds that it began with.
        after: those that measured better, which may be none.
        steps: for each threshold decided on its own: name, the comparison's noise, the value and its gain.
        probes: all probes of the last comparison.
        before_us: their times with the first thresholds.
        after_us: their times with the last ones.
        gain: part of the time that the last ones save.
        noise: noise of the last comparison.
        conclusion: in words, why thresholds are kept or not.
    """

    ranks: int
    before: Mapping[str, int]
    after: dict[str, int] = field(default_factory=dict)
    steps: list[tuple[str, float, int, float]] = field(default_factory=list)
    probes: tuple[Probe, ...] = ()
    before_us: list[float] = field(default_factory=list)
    after_us: list[float] = field(default_factory=list)
    gain: float = 0.0
    noise: float = 0.0
    conclusion: str = ""


def compare(
    groups: TimedGroups, candidates: Sequence[Mapping[str, int]], probes: Sequence[Probe], budget_s: float
) -> Comparison:
    """Times thresholds on probes, in rounds; the first are the current ones and get a control.

    Args:
        groups: the ranks.
        candidates: the current thresholds, then the candidates.
        probes: what is timed.
        budget_s: seconds that it should take; the least number of rounds is made even if it takes longer.
    """
    end = time.monotonic() + budget_s
    numbers = [groups.make(values) for values in (candidates[0], *candidates)]
    calls = []
    for probe in probes:
        rough_us = [groups.time_us(number, probe, 2) for number in numbers][-1]
        calls.append(min(MAX_CALLS, max(MIN_CALLS, int(BATCH_US / rough_us))))
    times: list[list[list[float]]] = [[[] for _ in probes] for _ in numbers]
    for this in range(MAX_ROUNDS):
        if this >= MIN_ROUNDS and time.monotonic() > end:
            break
        for place, probe in enumerate(probes):
            for turn in range(len(numbers)):
                group = (this + turn) % len(numbers)  # another one begins each round
                times[group][place].append(groups.time_us(numbers[group], probe, calls[place]))
    for number in numbers:
        groups.drop(number)
    return Comparison(times)


def search(
    groups: TimedGroups,
    ranks: int,
    before: Mapping[str, int],
    budget_s: float,
    plan: Sequence[Step] = PLAN,
    progress: Callable[[str], object] = lambda _: None,
) -> Outcome:
    """Decides one threshold after another, then all of them together against those to begin with.

    Args:
        groups: the ranks.
        ranks: their number.
        before: the thresholds to begin with.
        budget_s: seconds that it should take.
        plan: the thresholds.
        progress: called with a short line from time to time.

    Raises:
        TooNoisyError: the same thresholds measure too differently.
    """
    outcome = Outcome(ranks, dict(before))
    share_s = budget_s / (len(plan) + 2 * TRIALS)
    current = dict(before)
    for step in plan:
        progress(f"{ranks} ranks: {step.name}")
        others = ({**current, step.name: value} for value in step.values if value != current[step.name])
        candidates = [current, *(values for values in others if tuning_file.fits(values, ranks))]
        result = compare(groups, candidates, step.probes, share_s)
        result.check_noise()
        winner = result.best()
        if winner is not None:
            current = dict(candidates[winner - CONTROL])
            outcome.steps.append((step.name, result.noise, current[step.name], result.gain(winner)))
    outcome.probes = tuple(dict.fromkeys(probe for step in plan for probe in step.probes))
    new = {name: value for name, _, value, _ in sorted(outcome.steps, key=lambda step: -step[3])}
    candidate = CONTROL + 1
    for trial in range(TRIALS):
        progress(f"{ranks} ranks: all together, {trial + 1}")
        final = compare(groups, [before, {**before, **new}], outcome.probes, 2 * share_s)
        final.check_noise()
        outcome.before_us, outcome.after_us = final.probe_us(CURRENT), final.probe_us(candidate)
        outcome.gain, outcome.noise = final.gain(candidate), final.noise
        outcome.conclusion = _conclusion(outcome, new, final)
        if not new:
            break
        if final.is_better(candidate):
            outcome.after = new
            break
        new.popitem()
        while not tuning_file.fits({**before, **new}, ranks):  # what is left may have needed it
            new.popitem()
    return outcome


def _conclusion(outcome: Outcome, new: Mapping[str, int], final: Comparison) -> str:
    """Returns what the last comparison says about the new thresholds together."""
    if not new and outcome.steps:
        return "no new thresholds are kept: what measures faster alone does not over all operations"
    if not new:
        return "no thresholds measure better than the defaults"
    slower = [outcome.probes[place] for place in final.slower(CONTROL + 1)]
    if slower:
        named = ", ".join(f"{probe.operation} of {probe.size_bytes} B" for probe in slower)
        return f"the new thresholds are not kept: together they slow down {named}"
    if not final.is_better(CONTROL + 1):
        return (
            f"the new thresholds are not kept: together they save {outcome.gain:.1%} of the time, and "
            f"{final.gain_needed:.1%} in most rounds are needed beside the noise"
        )
    return f"the new thresholds save {outcome.gain:.1%} of the time, typically"
