"""What a process can tell afterwards: the last operations of its groups, counts of all of them, and dumps.

**Where the record lives.** Each group has a :class:`~collectives.core.recording.flight_record.FlightRecord`:
a ring of its last operations (256; ``COLLECTIVES_FLIGHT_RECORD`` says how many) and running totals by name.
Whoever carries an operation out writes it, when it begins and when it has ended, so that the numbers are
those of error messages, and a wrapper such as ``round_robin`` shows as its lanes. Nothing is sent, and no
tensor is kept alive.

**What it costs.** ``gloo``, ``nccl`` and the general path of ``mpi`` make a description of each operation
anyway, for messages; recording adds two looks at the clock and an append. The fast paths, which take a
microsecond and never touch Python, do not write into this ring: what the core carries out by itself (``host``
as a whole, synchronous calls of ``mpi`` on dense tensors) is not recorded yet.

**When it is read.** By call, at the first error of a group and on a signal
(:mod:`~collectives.core.recording.dump`, :mod:`~collectives.core.recording.dump_signal`), as JSON;
``collectives trace`` makes of the files of all ranks what viewers and torch's analyzer read.
"""

from __future__ import annotations

__all__: list[str] = []
