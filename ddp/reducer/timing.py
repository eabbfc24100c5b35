"""Times of the sampled iterations: forward, backward, communication, and how much of that was overlapped.

Section 3.2.3 of PyTorch Distributed (VLDB 2020): communication overlaps with the backward computation until
the last gradient is ready; the rest of it is exposed.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

import torch

from collectives.core.process_group import ProcessGroup
from collectives.logs import Log

__all__ = ["ALWAYS_SAMPLED", "SAMPLE_RATE", "STATISTICS_LEVEL", "IterationClock", "IterationTimes", "Mark"]

ALWAYS_SAMPLED = 10
"""Iterations at the beginning that are all timed."""

SAMPLE_RATE = 100
"""After those, one of so many is timed, where the user names no number."""

STATISTICS_LEVEL = 5
"""Level of the logger ``collectives`` for the times of single iterations; the debug level DETAIL with
``TORCH_CPP_LOG_LEVEL=INFO`` lets it through."""

_log = Log(__name__)

_EPOCH_NS = time.time_ns() - time.perf_counter_ns()


class Mark(enum.Enum):
    """Moments of an iteration."""

    FORWARD_BEGIN = enum.auto()
    FORWARD_END = enum.auto()
    BACKWARD_BEGIN = enum.auto()
    COMMUNICATION_BEGIN = enum.auto()
    BACKWARD_END = enum.auto()
    """The last gradient is there."""
    COMMUNICATION_END = enum.auto()
    """All averages are there."""


@dataclass(frozen=True)
class IterationTimes:
    """Times of one iteration, or their averages over several, in nanoseconds.

    Attributes:
        forward: the module's forward.
        backward: from the first gradient that comes to the last.
        communication: from the launch of the first bucket to the last average.
        overlap: part of the communication that went on beside backward.
        exposed: the rest of it, which the iteration waited for.
    """

    def __str__(self) -> str:
        parts = (f"{name} {value / 1e6:.3f} ms" for name, value in vars(self).items())
        return ", ".join(parts)

    forward: int = 0
    backward: int = 0
    communication: int = 0
    overlap: int = 0
    exposed: int = 0


class IterationClock:
    """Times the iterations of one module: a clock reading for each mark, and none where not sampled.

    On CUDA devices the marks are events on the current stream, whose times are read when they are asked for,
    or when the next iteration is sampled.

    Attributes:
        sample_rate: after the first iterations, one of so many is timed.
        samples: number of iterations that were timed to their end.

    Args:
        device: device of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = SAMPLE_RATE
        self.samples = 0
        self._cuda = device.type == "cuda"
        self._device = device
        self._sampling = False
        self._host_ns: dict[Mark, int] = {}
        self._events: dict[Mark, torch.cuda.Event] = {}
        self._finished: tuple[dict[Mark, int], dict[Mark, torch.cuda.Event]] | None = None
        self._latest: tuple[IterationTimes, dict[Mark, int]] | None = None
        self._sums = IterationTimes()

    def begin(self, iteration: int, is_captured: bool = False) -> None:
        """Marks the beginning of forward.

        Args:
            iteration: number of iterations that were averaged before this one.
            is_captured: whether it becomes part of a CUDA graph, whose marks have no times.
        """
        self._sampling = not is_captured and (iteration < ALWAYS_SAMPLED or iteration % self.sample_rate == 0)
        if self._sampling:
            self._host_ns, self._events = {}, {}
            self.mark(Mark.FORWARD_BEGIN)

    def mark(self, what: Mark) -> None:
        """Notes a moment, once in each sampled iteration; forward's are those of the last one."""
        if not self._sampling or (
            what in self._host_ns and what not in {Mark.FORWARD_BEGIN, Mark.FORWARD_END}
        ):
            return
        self._host_ns[what] = time.perf_counter_ns()
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events[what] = event

    def end(self) -> bool:
        """Marks the end of communication; returns whether the iteration was timed as a whole."""
        if not self._sampling:
            return False
        self.mark(Mark.COMMUNICATION_END)
        self._sampling = False
        if len(self._host_ns) < len(Mark):  # forward ran without gradients, or a pass came without forward
            return False
        self._read()
        self._finished = self._host_ns, self._events
        self.samples += 1
        if not self._cuda:
            self._read()
        return True

    def _read(self) -> None:
        """Takes the times of the last sampled iteration; blocks until the device has passed its marks."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        host_ns, events = finished
        if events:
            events[Mark.COMMUNICATION_END].synchronize()
            first = events[Mark.FORWARD_BEGIN]
            at = {mark: int(first.elapsed_time(event) * 1e6) for mark, event in events.items()}
        else:
            at = host_ns
        begin, end = at[Mark.COMMUNICATION_BEGIN], at[Mark.COMMUNICATION_END]
        computed = at[Mark.BACKWARD_END]
        times = IterationTimes(
            forward=at[Mark.FORWARD_END] - at[Mark.FORWARD_BEGIN],
            backward=computed - at[Mark.BACKWARD_BEGIN],
            communication=end - begin,
            overlap=max(0, min(computed, end) - begin),
            exposed=end - max(begin, min(computed, end)),
        )
        self._latest = times, {mark: ns + _EPOCH_NS for mark, ns in host_ns.items()}
        self._sums = IterationTimes(
            *(getattr(self._sums, field) + getattr(times, field) for field in vars(times))
        )

    def log(self, group: ProcessGroup, where: str) -> None:
        """Logs the times of the last sampled iteration.

        Args:
            group: the model's group.
            where: model and iteration.
        """
        if _log.isEnabledFor(STATISTICS_LEVEL) and (latest := self.latest()) is not None:
            _log.of(group).log(STATISTICS_LEVEL, "%s: %s", where, latest[0])

    def latest(self) -> tuple[IterationTimes, dict[Mark, int]] | None:
        """Returns the times of the last sampled iteration, and its marks in nanoseconds since 1970.

        ``None`` where there was none. On a CUDA device, blocks until it has passed the marks.
        """
        self._read()
        return self._latest

    def averages(self) -> IterationTimes:
        """Returns the averages over all sampled iterations; zeros where there was none."""
        self._read()
        count = max(1, self.samples)
        return IterationTimes(*(getattr(self._sums, field) // count for field in vars(self._sums)))
