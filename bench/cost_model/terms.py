"""What the cost model is made of: the machine, where the ranks are, and the terms of a time.

A *term* is one cause of time, in microseconds; the time of an operation is the sum of its terms, where what
overlaps counts only as far as it is not hidden. :mod:`collectives.bench.cost_model.model` defines the other
words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "COPIES",
    "FLAGS",
    "LATENCY",
    "LINES",
    "LINK",
    "MEETING",
    "MESSAGES",
    "REDUCTION",
    "SOCKETS",
    "SWITCHES",
    "Parameters",
    "Scale",
    "Terms",
    "add",
    "exchange_of_leaders",
    "local_meeting",
    "overlapped",
    "scaled",
    "turns_of_a_core",
    "work",
]

MEETING = "meeting of the local ranks"
LINES = "arrival lines of all ranks"
COPIES = "copies in memory"
REDUCTION = "reduction"
FLAGS = "flags of chunks"
SWITCHES = "switches between ranks on a core"
LATENCY = "network latency"
MESSAGES = "messages of a leader"
LINK = "link of a machine"
SOCKETS = "copies through sockets"

Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class Parameters:
    """A machine and its network. Times are in microseconds.

    Attributes:
        cores: processors that the ranks of a machine may use.
        meeting_us: a rank publishes its arrival and sees another's.
        line_us: each further arrival line that a rank looks at.
        switch_us: another rank takes its turn on a core.
        flag_us: a chunk is handed from a rank to another.
        copy_us_per_byte: a core copies a byte from memory to memory.
        reduce_us_per_byte: a core reads a byte of a contribution and adds it to the result.
        crowding: part by which a byte costs more for each further rank on a core, as its cache is shared.
        latency_us: from one machine to another, beside the overhead (L).
        message_us: a leader's core sends or receives a message (o).
        link_us_per_byte: a byte on a machine's link, in each direction (G).
        socket_us_per_byte: a core moves a byte to or from the network.
        burst_bytes: what passes a machine's link at once before it counts, as where a token bucket shapes it.
    """

    cores: int = 2
    meeting_us: float = 1.0
    line_us: float = 0.1
    switch_us: float = 4.0
    flag_us: float = 0.3
    copy_us_per_byte: float = 1e-4
    reduce_us_per_byte: float = 5e-5
    crowding: float = 0.5
    latency_us: float = 20.0
    message_us: float = 3.0
    link_us_per_byte: float = 8e-4
    socket_us_per_byte: float = 2e-4
    burst_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How many ranks there are and where.

    Attributes:
        machines: number of machines.
        ranks_per_machine: ranks on each.
    """

    machines: int
    ranks_per_machine: int

    def __post_init__(self) -> None:
        if self.machines < 1 or self.ranks_per_machine < 1:
            raise ValueError(f"there must be a machine and a rank, but this is {self}")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.machines * self.ranks_per_machine


def add(*parts: Mapping[str, float]) -> Terms:
    """Adds up terms by name."""
    total: Terms = {}
    for part in parts:
        for name, us in part.items():
            total[name] = total.get(name, 0.0) + us
    return total


def scaled(factor: float, part: Mapping[str, float]) -> Terms:
    """Multiplies each term."""
    return {name: us * factor for name, us in part.items()}


def overlapped(chunks: float, *stages: Mapping[str, float]) -> Terms:
    """Stages of a pipeline of so many chunks: the longest, and of the others the first chunk."""
    longest = max(range(len(stages)), key=lambda i: sum(stages[i].values()))
    return add(
        *(stage if i == longest else scaled(1 / max(chunks, 1), stage) for i, stage in enumerate(stages))
    )


def turns_of_a_core(p: Parameters, s: Scale) -> float:
    """How many ranks a core serves."""
    return max(1.0, s.ranks_per_machine / p.cores)


def work(p: Parameters, s: Scale, copied: float, reduced: float = 0.0) -> Terms:
    """Every local rank copies and reduces so many bytes."""
    turns = turns_of_a_core(p, s)
    each = turns * (1 + p.crowding * (turns - 1))
    return {COPIES: each * copied * p.copy_us_per_byte, REDUCTION: each * reduced * p.reduce_us_per_byte}


def local_meeting(p: Parameters, s: Scale) -> Terms:
    """The ranks of a machine publish what they do and see what the others do."""
    if s.ranks_per_machine == 1:
        return {}
    return {MEETING: p.meeting_us, SWITCHES: p.switch_us * (turns_of_a_core(p, s) - 1)}


def exchange_of_leaders(p: Parameters, peers: float, sent: float, times: float = 1.0) -> Terms:
    """A leader exchanges ``sent`` bytes each way with ``peers`` leaders, so many times one by one."""
    return {
        LATENCY: times * p.latency_us,
        MESSAGES: times * 2 * peers * p.message_us,
        LINK: times * sent * p.link_us_per_byte,
        SOCKETS: times * 2 * sent * p.socket_us_per_byte,
    }
