"""Goals that a user sets for a comparison, such as ``host <= mpi4py/1.2 @ 16K:64K; ranks 2``.

A goal says that one peer's median time is not longer than another's, with a factor or an allowance::

    PEER[.KIND] <= PEER[.KIND] [/ FACTOR | * FACTOR] [+ X us] [@ SIZES] [; ops NAME,...] [; ranks N,...]

KIND is ``cold``, ``hot`` or ``loop``: cold where none is named, and the same on both sides where the right
one is not named. ``limit`` is the memory limit, so that ``host <= limit/0.6`` asks for six tenths of it.
SIZES are sizes and ranges ``FIRST:LAST``, separated by commas; a goal without them is for all that was
measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collectives.bench.comparison.operations import OPERATIONS
from collectives.bench.comparison.records import KINDS, Record
from collectives.bench.core.text import format_bytes, parse_bytes

_TERM = r"(?P<{0}>[\w:-]+?)(?:\.(?P<{0}_kind>\w+))?"
_PATTERN = re.compile(
    r"\s*"
    + _TERM.format("peer")
    + r"\s*<=\s*"
    + _TERM.format("other")
    + r"\s*(?:(?P<sign>[/*])\s*(?P<factor>\d+(?:\.\d+)?))?"
    + r"\s*(?:\+\s*(?P<extra>\d+(?:\.\d+)?)\s*us)?"
    + r"\s*(?:@\s*(?P<sizes>[\w:,\s]+?))?"
    + r"\s*(?P<rest>;.*)?"
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, read.

    Attributes:
        text: as the user wrote it.
        peer: whose time.
        kind: which of its times.
        other: with whose time it is compared.
        other_kind: which of its times.
        factor: what the other's time is multiplied by.
        extra_us: what is added to it.
        sizes: ranges of sizes in bytes, both ends included; empty for all.
        operations: names; empty for all.
        ranks: numbers of ranks; empty for all.
    """

    text: str
    peer: str
    kind: str
    other: str
    other_kind: str
    factor: float
    extra_us: float
    sizes: tuple[tuple[int, int], ...]
    operations: tuple[str, ...]
    ranks: tuple[int, ...]

    def is_for(self, record: Record) -> bool:
        """Returns whether the goal says something of a record's point."""
        return (
            (not self.operations or record.compared_at in self.operations)
            and (not self.ranks or record.ranks in self.ranks)
            and (not self.sizes or any(low <= record.size_bytes <= high for low, high in self.sizes))
        )


@dataclass(frozen=True, slots=True)
class Check:
    """A goal at one point.

    Attributes:
        record: of the goal's peer.
        time_us: what was measured.
        allowed_us: what the goal allows.
    """

    record: Record
    time_us: float
    allowed_us: float

    @property
    def is_met(self) -> bool:
        """Whether the time is not longer than allowed."""
        return self.time_us <= self.allowed_us


def parse_goal(text: str) -> Goal:
    """Returns the goal that a text sets.

    Raises:
        ValueError: it cannot be read.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no goal; write for example 'host <= mpi4py/1.2 @ 16K:64K; ranks 2; ops all_reduce' "
            "or 'host.loop <= mpi4py.loop + 0.8 us'"
        )
    kind = match["peer_kind"] or "cold"
    other_kind = match["other_kind"] or kind
    for name in (kind, other_kind):
        if name not in KINDS:
            raise ValueError(f"{text!r} asks for {name!r}, but times are {', '.join(KINDS)}")
    factor = float(match["factor"] or 1)
    if factor == 0:
        raise ValueError(f"{text!r} has a factor of 0")
    clauses = dict(_clauses(text, match["rest"] or ""))
    return Goal(
        text.strip(),
        match["peer"],
        kind,
        match["other"],
        other_kind,
        1 / factor if match["sign"] == "/" else factor,
        float(match["extra"] or 0),
        tuple(_range(part) for part in (match["sizes"] or "").split(",") if part.strip()),
        _names(text, clauses.get("ops", "")),
        tuple(int(number) for number in clauses.get("ranks", "").split(",") if number),
    )


def _clauses(text: str, rest: str) -> Iterator[tuple[str, str]]:
    for clause in rest.split(";")[1:]:
        name, _, value = clause.strip().partition(" ")
        if name not in {"ops", "ranks"} or not value.strip():
            raise ValueError(
                f"{text!r} has {clause.strip()!r}, which is neither 'ops NAME,...' nor 'ranks N,...'"
            )
        yield name, value.replace(" ", "")


def _range(part: str) -> tuple[int, int]:
    first, _, last = part.partition(":")
    return parse_bytes(first), parse_bytes(last or first)


def _names(text: str, value: str) -> tuple[str, ...]:
    names = tuple(name for name in value.split(",") if name)
    for name in names:
        if name not in OPERATIONS:
            raise ValueError(f"{text!r} names {name!r}, but operations are {', '.join(OPERATIONS)}")
    return names


def check(goal: Goal, records: Sequence[Record]) -> list[Check]:
    """Returns the goal at every point where both peers were measured."""
    others = {
        (record.compared_at, record.ranks, record.size_bytes): record.timing(goal.other_kind)
        for record in records
        if record.peer == goal.other
    }
    checks = []
    for record in records:
        mine = record.timing(goal.kind)
        theirs = others.get((record.compared_at, record.ranks, record.size_bytes))
        if record.peer == goal.peer and goal.is_for(record) and mine is not None and theirs is not None:
            checks.append(Check(record, mine.median_us, theirs.median_us * goal.factor + goal.extra_us))
    return checks


def goal_lines(goals: Sequence[Goal], records: Sequence[Record]) -> tuple[list[str], bool]:
    """Returns the summary of goals as text, and whether all are met; one without a measured point is not."""
    lines: list[str] = []
    all_met = True
    for goal in goals:
        checks = check(goal, records)
        missed = [each for each in checks if not each.is_met]
        result = "MISSED" if missed else "met" if checks else "NOT MEASURED"
        all_met = all_met and result == "met"
        lines.append(f"# goal {goal.text}: {result}, {len(checks) - len(missed)} of {len(checks)} points")
        for each in missed:
            record = each.record
            lines.append(
                f"#   {record.compared_at}, {record.ranks} ranks, {format_bytes(record.size_bytes)}: "
                f"{each.time_us:.4g} us, allowed {each.allowed_us:.4g} us "
                f"({each.time_us / each.allowed_us:.3g}x)"
            )
    return lines, all_met
