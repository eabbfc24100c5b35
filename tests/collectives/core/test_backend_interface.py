"""Operations that the base class derives from those of a backend."""

from __future__ import annotations

import torch
from harness import current_store, run_ranks

from collectives import AllToAllOptions, ProcessGroup
from collectives.backends.host import ProcessGroupHost
from collectives.core.work import CompletedWork


class Blocking(ProcessGroupHost):
    """Leaves collectives of messages to the base class, and receives before ``_recv`` returns."""

    fast_collective = ProcessGroup.fast_collective

    def issue(self, call):
        return getattr(self, call.operation.handler)(call)

    def _recv(self, tensor, src, tag):
        super()._recv(tensor, src, tag).wait()
        return CompletedWork([tensor])


def exchanges(rank, size):
    group = Blocking(current_store(), rank, size)
    outputs = [torch.zeros(3) for _ in range(size)]
    group.alltoall(
        outputs, [torch.full((3,), 10.0 * rank + r) for r in range(size)], AllToAllOptions()
    ).wait()
    flat = torch.zeros(size)
    group.alltoall_base(flat, torch.arange(size) + 10.0 * rank, [], [], AllToAllOptions()).wait()
    group.shutdown()
    return [float(output[0]) for output in outputs], flat.tolist()


def test_all_to_all_over_messages_that_are_received_at_once() -> None:
    for rank, found in enumerate(run_ranks(exchanges, 3)):
        assert found == ([10.0 * r + rank for r in range(3)],) * 2
