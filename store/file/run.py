"""The run that a FileStore's file belongs to: its members, and whether one more process may join."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from collectives.store.file.log import Header, Join
from collectives.store.process import Life, ProcessIdentity

__all__ = ["JoinDecision", "Member", "Run", "launch_token"]


@dataclass
class Member:
    """One that has joined a run."""

    join: Join
    left: bool = False


class JoinDecision(Enum):
    """What one who finds a file may do."""

    JOIN = "join"
    RECLAIM = "reclaim"  # the run is over; the file may be started anew
    WAIT = "wait"  # the run is ending; look again soon
    REFUSE = "refuse"


@dataclass
class Run:
    """The members that a file's log tells of."""

    header: Header
    members: dict[int, Member] = field(default_factory=dict)

    def joined(self, join: Join) -> None:
        """Takes a JOIN record in."""
        self.members[join.member] = Member(join)

    def left(self, member: int) -> None:
        """Takes a LEAVE record in."""
        if member in self.members:
            self.members[member].left = True

    @property
    def world_size(self) -> int | None:
        """Number of members the run will have; ``None`` if no member knows."""
        sizes = [self.header.world_size, *(member.join.world_size for member in self.members.values())]
        return next((size for size in sizes if size > 0), None)

    @property
    def complete(self) -> bool:
        """Whether all members have joined."""
        return self.world_size is not None and len(self.members) >= self.world_size

    @property
    def over(self) -> bool:
        """Whether all members have joined and left again."""
        return self.complete and all(member.left for member in self.members.values())

    def next_member(self, process: ProcessIdentity) -> int:
        """Returns the number of a new member; a process that comes back has the one that it had."""
        for number, member in self.members.items():
            if member.left and member.join.process == process and not self.complete:
                return number
        return max(self.members, default=-1) + 1

    def decide_join(
        self, world_size: int, token: bytes, process: ProcessIdentity
    ) -> tuple[JoinDecision, str]:
        """Decides whether the finder belongs to this run.

        A run lives while a process that has joined it runs, or may run where it cannot be seen. A process
        that is all of it may join once more, as one that opens its own store twice.

        Args:
            world_size: that of the finder, negative if not fixed.
            token: launch token of the finder.
            process: the finder.

        Returns:
            The decision, and for WAIT and REFUSE the reason as a clause.
        """
        lives = {number: member.join.process.life() for number, member in self.members.items()}
        if Life.ALIVE not in lives.values() and Life.UNKNOWN not in lives.values():
            kept = self.world_size is None and world_size < 0 and all(m.left for m in self.members.values())
            return (JoinDecision.JOIN if kept else JoinDecision.RECLAIM), ""
        alone = all(m.join.process == process and not m.left for m in self.members.values())
        other = self._other_run(world_size, token, full=self.complete and not alone)
        if other:
            # A run that is torn down (or restarted by its launcher) is gone in a moment.
            ending = any(m.left or lives[n] is Life.DEAD for n, m in self.members.items())
            return (JoinDecision.WAIT if ending else JoinDecision.REFUSE), other
        lost = [m for n, m in self.members.items() if lives[n] is Life.DEAD and not m.left]
        if lost and self.world_size is not None:
            return JoinDecision.WAIT, f"its member, {lost[0].join.process}, has died, others have not yet"
        return JoinDecision.JOIN, ""

    def _other_run(self, world_size: int, token: bytes, *, full: bool) -> str:
        """Returns why the finder is not of this run, or nothing."""
        tokens = {member.join.token for member in self.members.values()} - {b""}
        if token and tokens and token not in tokens:
            return f"it was launched as {tokens.pop().decode()!r}, this process as {token.decode()!r}"
        if self.world_size is not None and 0 < world_size != self.world_size:
            return f"it has world_size {self.world_size}, this process {world_size}"
        if full:
            return f"all {self.world_size} members have joined"
        return ""

    def description(self) -> str:
        """Says who made the file, and when."""
        age = max(0.0, time.time() - self.header.created_ns / 1e9)
        creator = next(iter(self.members.values()), None)
        who = "an unknown process" if creator is None else str(creator.join.process)
        state = "" if creator is None else f", {_LIFE[creator.join.process.life()]}"
        return f"{who}{state}, {_duration(age)} ago"


_LIFE: Mapping[Life, str] = {
    Life.ALIVE: "which still runs",
    Life.DEAD: "which has ended",
    Life.UNKNOWN: "which cannot be seen from here",
}


def launch_token() -> bytes:
    """Returns what tells one start of a job from another where a launcher says so, as torchrun does."""
    run, restarts = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return f"{run}, start {restarts}".encode()[:1024] if run and restarts else b""


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
