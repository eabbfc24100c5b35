"""torchft's process group over ours: its ``Manager`` makes a new one for each quorum of replicas."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torchft import process_group

from collectives.torch_bridge import creation
from collectives.torch_bridge.group import TorchGroup

__all__ = ["ProcessGroupCollectives"]

_CPU = torch.device("cpu")


class ProcessGroupCollectives(process_group.ProcessGroupWrapper):
    """A reconfigurable group over ``host`` for torchft's ``Manager``, in place of its ``ProcessGroupGloo``.

    Tensors of replicas on one machine move through shared memory. A replica that dies is noticed within a
    tenth of a second, so that the step it dies in is the only one that is lost; all operations of torchft's
    interface are there.

    Args:
        timeout: time limit for the replicas to meet, and of operations.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> TorchGroup:
        return creation.create_independent(
            "collectives", "host", store, rank, world_size, self._timeout, _CPU
        )

    def getBackendName(self) -> str:
        """Returns the name under which torchft registers it."""
        return "torchft-collectives"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of operations from now on, and for the replicas to meet the next time."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def errored(self) -> Exception | None:
        """Returns why the group of this quorum is of no more use; ``None`` while it is."""
        return None if self._pg is None else self._pg.failure()

    def shutdown(self) -> None:
        """Ends the group of this quorum; a further call does nothing.

        Blocks until the operations already issued have ended, each within its time limit; those that the
        others do without this replica go on. A group that has failed is aborted, which does not block.
        """
        pg = self._pg
        super().shutdown()
        if pg is None:
            return
        if pg.failure() is None:
            pg.shutdown()
        else:
            pg.abort()
