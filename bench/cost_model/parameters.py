"""What the cost model is told: a machine and its network, and where the ranks are."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Parameters", "Scale"]


@dataclass(frozen=True, slots=True)
class Parameters:
    """A machine and its network. Times are in microseconds.

    Attributes:
        cores: processors that the ranks of a machine may use.
        arrival_us: a rank publishes its arrival and sees another's.
        line_us: each further arrival that a rank looks at.
        switch_us: another rank takes its turn on a core.
        flag_us: a chunk is handed from a rank to another.
        copy_us_per_byte: a core copies a byte from memory to memory.
        reduce_us_per_byte: a core reads a byte of a contribution and adds it to the result.
        crowding: part by which a byte costs more for each further rank on a core, as its cache is shared.
        latency_us: from one machine to another, beside the overhead (L of LogP).
        message_us: a core sends or receives a message (o).
        link_us_per_byte: a byte on a machine's link, in each direction (G of LogGP).
        socket_us_per_byte: a core moves a byte to or from the network.
        burst_bytes: what passes a machine's link at once before it counts, as where a token bucket shapes it.
    """

    cores: int = 2
    arrival_us: float = 1.0
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
