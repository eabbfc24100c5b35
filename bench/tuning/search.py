"""Finds thresholds that measure better than others, and only those.

Words. A *setting* is a table of all thresholds. The *incumbent* is the best setting so far, a *candidate*
differs from it in one threshold. In a *round* every setting plays one turn of each probe, so that the
machine's moods meet all of them. The *ratio* of a candidate in a round is the geometric mean over the probes
of its time over the incumbent's. The *twin* is a second group with the incumbent's setting: how far its
ratios are from 1 is what the machine's noise makes of no difference at all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from collectives.backends.host import thresholds as host_tuning
from collectives.bench.tuning.worker import Probe, Rig

__all__ = ["PLAN", "Comparison", "Outcome", "Step", "TooNoisyError", "compare", "search"]

LEAST_GAIN = 0.03
"""Part of the time that a candidate must save at least."""

NOISE_FACTOR = 2.0
"""How many times the twin's typical distance from 1 it must save at least."""

MOST_NOISE = 0.15
"""The twin's typical distance from 1 beyond which nothing is decided."""

WINS = 0.75
"""Part of the rounds in which a candidate must be the faster one."""

MOST_LOSS = 0.10
"""Part of its time that a single probe may lose by the whole new setting, beside the noise."""

TRIALS = 3
"""How often the new thresholds are tried together: each time without the one that saved least before."""

MIN_ROUNDS = 7
MAX_ROUNDS = 25
"""Rounds of a comparison; the time decides between the two."""

TURN_US = 2000.0
"""How long a turn should take, with at least and at most so many calls:"""
MIN_CALLS = 3
MAX_CALLS = 60

_K, _M = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """A threshold, what it is tried with, and what that is timed on.

    Attributes:
        name: the threshold.
        values: what is tried, beside the incumbent's value.
        probes: operations whose way it decides.
    """

    name: str
    values: tuple[int, ...]
    probes: tuple[Probe, ...]


def _probes(*named: tuple[str, tuple[int, ...]]) -> tuple[Probe, ...]:
    return tuple(Probe(name, size) for name, sizes in named for size in sizes)


PLAN = (
    Step(
        "spin_us",
        (0, 5, 20, 50),
        _probes(("barrier", (0,)), ("all_reduce", (8, 4 * _K, 64 * _K, _M))),
    ),
    Step("yields", (0, 2, 8, 32), _probes(("barrier", (0,)), ("all_reduce", (8, 4 * _K, 64 * _K)))),
    Step(
        "one_shot_bytes",
        tuple(_K * n for n in (4, 8, 16, 32, 64, 128)),
        _probes(("all_reduce", tuple(_K * n for n in (4, 8, 16, 32, 64, 128)))),
    ),
    Step(
        "staged_bytes",
        tuple(_K * n for n in (8, 16, 32, 64, 128)),
        _probes(("broadcast", tuple(_K * n for n in (16, 32, 64, 128))), ("all_gather", (64 * _K, 256 * _K))),
    ),
    Step(
        "chunk_bytes",
        tuple(_K * n for n in (32, 64, 96, 128, 256)),
        _probes(("all_reduce", (512 * _K, 4 * _M)), ("all_gather", (4 * _M,)), ("reduce_scatter", (4 * _M,))),
    ),
    Step(
        "unsplit_bytes",
        tuple(_K * n for n in (0, 128, 256, 512)),
        _probes(("all_reduce", (160 * _K, 256 * _K, 512 * _K))),
    ),
    Step(
        "shortest_chunk_bytes",
        tuple(_K * n for n in (8, 16, 32, 64)),
        _probes(("all_reduce", (96 * _K, 192 * _K, 384 * _K))),
    ),
    Step("chunks_wanted", (2, 4, 8), _probes(("all_reduce", (192 * _K, 512 * _K)))),
    Step(
        "ring_bytes",
        (512 * _K, _M, 2 * _M),
        _probes(("all_gather", (_M, 8 * _M)), ("broadcast", (_M, 8 * _M))),
    ),
    Step(
        "past_cache_bytes",
        (2 * _M, 4 * _M, 8 * _M, 16 * _M, 1 << 62),
        _probes(("all_reduce", (4 * _M, 16 * _M)), ("all_gather", (4 * _M, 16 * _M))),
    ),
)
"""Thresholds in the order in which they are decided: each is tried with those before it as decided.

``background_spin_us`` is not among them: what a group's own thread takes from the computing thread beside it
shows in no time of an operation.
"""


class TooNoisyError(RuntimeError):
    """Two groups with the same thresholds differ too much to tell thresholds apart."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Settings against the incumbent, side by side.

    Attributes:
        times_us: median time of every turn, by setting (the incumbent, its twin, the candidates), then by
            probe, then by round.
    """

    times_us: Sequence[Sequence[Sequence[float]]]

    def ratios(self, setting: int) -> list[float]:
        """Returns the ratio of a setting in each round."""
        pairs = list(zip(self.times_us[setting], self.times_us[0], strict=True))
        rounds = len(self.times_us[0][0])
        return [
            math.exp(statistics.fmean(math.log(mine[i] / theirs[i]) for mine, theirs in pairs))
            for i in range(rounds)
        ]

    def probe_us(self, setting: int) -> list[float]:
        """Returns the median time of each probe."""
        return [statistics.median(rounds) for rounds in self.times_us[setting]]

    @property
    def noise(self) -> float:
        """The twin's typical distance from 1."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios(1))

    @property
    def gain_needed(self) -> float:
        """What a candidate must save to count as better."""
        return max(LEAST_GAIN, NOISE_FACTOR * self.noise)

    def gain(self, setting: int) -> float:
        """Returns the part of the time that a setting typically saves."""
        return 1 - statistics.median(self.ratios(setting))

    def better(self, setting: int) -> bool:
        """Returns whether a setting is faster than the incumbent beyond noise, and slower at no probe."""
        ratios = self.ratios(setting)
        wins = sum(ratio < 1 for ratio in ratios) / len(ratios)
        clear = self.noise <= MOST_NOISE and self.gain(setting) >= self.gain_needed and wins >= WINS
        return clear and not self.loses(setting)

    def best(self) -> int | None:
        """Returns the candidate that saves most among those that are better; ``None`` where none is."""
        better = [setting for setting in range(2, len(self.times_us)) if self.better(setting)]
        return max(better, key=self.gain, default=None)

    def loses(self, setting: int) -> list[int]:
        """Returns the numbers of the probes that a setting makes slower than it may."""
        limit = 1 + max(MOST_LOSS, NOISE_FACTOR * self.noise)
        pairs = zip(self.times_us[setting], self.times_us[0], strict=True)
        ratios = [
            statistics.median(a / b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs
        ]
        return [number for number, ratio in enumerate(ratios) if ratio > limit]


@dataclass(slots=True)
class Outcome:
    """What a search found for one number of ranks.

    Attributes:
        ranks: number of ranks.
        before: the setting that it began with.
        after: the thresholds that measured better, which may be none.
        steps: for each threshold decided on its own, the comparison's noise, the value and its gain.
        probes: all probes of the last comparison.
        before_us: their times with the first setting.
        after_us: their times with the last setting.
        gain: part of the time that the last setting saves.
        noise: noise of the last comparison.
        verdict: in words, why thresholds are kept or not.
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
    verdict: str = ""


def compare(
    rig: Rig, settings: Sequence[Mapping[str, int]], probes: Sequence[Probe], budget_s: float
) -> Comparison:
    """Times settings on probes, in rounds; the first is the incumbent and gets a twin.

    Args:
        rig: the ranks.
        settings: the incumbent and the candidates.
        probes: what is timed.
        budget_s: seconds that it should take; the least number of rounds is made even if it takes longer.
    """
    end = time.monotonic() + budget_s
    numbers = [rig.make(setting) for setting in (settings[0], *settings)]
    calls: list[int] = []
    for probe in probes:
        for number in numbers:
            rough_us = rig.time_us(number, probe, 2)
        calls.append(min(MAX_CALLS, max(MIN_CALLS, int(TURN_US / rough_us))))
    times: list[list[list[float]]] = [[[] for _ in probes] for _ in numbers]
    for this in range(MAX_ROUNDS):
        if this >= MIN_ROUNDS and time.monotonic() > end:
            break
        for index, probe in enumerate(probes):
            for turn in range(len(numbers)):
                setting = (this + turn) % len(numbers)  # another one begins each round
                times[setting][index].append(rig.time_us(numbers[setting], probe, calls[index]))
    for number in numbers:
        rig.drop(number)
    return Comparison(times)


def search(
    rig: Rig,
    ranks: int,
    before: Mapping[str, int],
    budget_s: float,
    plan: Sequence[Step] = PLAN,
    progress: Callable[[str], object] | None = None,
) -> Outcome:
    """Decides one threshold after another, then all of them together against the first setting.

    Args:
        rig: the ranks.
        ranks: their number.
        before: the setting to begin with.
        budget_s: seconds that it should take.
        plan: the thresholds.
        progress: called with a short line from time to time.

    Raises:
        TooNoisyError: the same setting measures too differently from itself.
    """
    outcome = Outcome(ranks, dict(before))
    share_s = budget_s / (len(plan) + 2 * TRIALS)
    best = dict(before)
    for step in plan:
        if progress is not None:
            progress(f"{ranks} ranks: {step.name}")
        values = [
            value
            for value in step.values
            if value != best[step.name] and host_tuning.fits({**best, step.name: value}, ranks)
        ]
        result = compare(rig, [best, *({**best, step.name: value} for value in values)], step.probes, share_s)
        _check_noise(result)
        winner = result.best()
        if winner is not None:
            best[step.name] = values[winner - 2]
            outcome.steps.append((step.name, result.noise, best[step.name], result.gain(winner)))
    outcome.probes = tuple(dict.fromkeys(probe for step in plan for probe in step.probes))
    new = {name: value for name, _, value, _ in sorted(outcome.steps, key=lambda step: -step[3])}
    for trial in range(TRIALS):
        if progress is not None:
            progress(f"{ranks} ranks: all together, {trial + 1}")
        final = compare(rig, [before, {**before, **new}], outcome.probes, 2 * share_s)
        _check_noise(final)
        outcome.before_us, outcome.after_us = final.probe_us(0), final.probe_us(2)
        outcome.gain, outcome.noise = final.gain(2), final.noise
        outcome.verdict = _verdict(outcome, new, final)
        if not new:
            break
        if final.better(2):
            outcome.after = new
            break
        new.popitem()
        while not host_tuning.fits({**before, **new}, ranks):  # what is left may have needed it
            new.popitem()
    return outcome


def _check_noise(result: Comparison) -> None:
    if result.noise > MOST_NOISE:
        raise TooNoisyError(
            f"two groups with the same thresholds differ by {result.noise:.0%} here, more than the "
            f"{MOST_NOISE:.0%} with which anything can be told"
        )


def _verdict(outcome: Outcome, new: Mapping[str, int], final: Comparison) -> str:
    """Returns what the last comparison says about the new thresholds together."""
    if not new and outcome.steps:
        return "no new thresholds are kept: what measures faster alone does not over all operations"
    if not new:
        return "no thresholds measure better than the defaults"
    lost = [outcome.probes[number] for number in final.loses(2)]
    if lost:
        slower = ", ".join(f"{probe.operation} of {probe.size_bytes} B" for probe in lost)
        return f"the new thresholds are not kept: together they slow down {slower}"
    if not final.better(2):
        return (
            f"the new thresholds are not kept: together they save {outcome.gain:.1%} of the time, and "
            f"{final.gain_needed:.1%} in most rounds are needed beside the noise"
        )
    return f"the new thresholds save {outcome.gain:.1%} of the time, typically"
