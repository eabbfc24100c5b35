"""What a process can tell afterwards: the last operations of its groups, counts of all of them, and dumps.

**Where the record lives.** Each group has a :class:`~collectives.core.recording.flight_record.FlightRecord`:
a ring of its last operations (256; ``COLLECTIVES_FLIGHT_RECORD`` says how many) and running totals by name.
Whoever carries an operation out writes it, when it begins and when it has ended, so that the numbers are
those of error messages, and a wrapper such as ``round_robin`` shows as its lanes. Nothing is sent, and no
tensor is kept alive.

What the C++ core carries out by itself (``host`` as a whole, synchronous calls of ``mpi`` on dense tensors)
it writes into a ring of its own (``backends/native/engine/operation_record.hpp``). The record shows both as
one, in the order in which operations began. Of those of the core it has flat shapes, the number of elements,
and of ``host`` no names of forms: ``all_gather_into_tensor`` is ``all_gather``.

**What it costs.** ``gloo``, ``nccl`` and the general path of ``mpi`` make a description of each operation
anyway, for messages; recording adds two looks at the clock and an append. The core stores to a cache line or
two, without a lock, in memory that it has from the start, and looks at the clock once more, over ``mpi``
twice. Readers hold up nobody: they leave out an entry that is overwritten meanwhile.

**When it is read.** By call, at the first error of a group and on a signal
(:mod:`~collectives.core.recording.dump`, :mod:`~collectives.core.recording.dump_signal`), as JSON;
``collectives trace`` makes of the files of all ranks what viewers and torch's analyzer read.
"""

from __future__ import annotations

__all__: list[str] = []
