"""Lightning and pytorch_lightning with our ``DistributedDataParallel``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from torch import nn

from collectives.ddp import DistributedDataParallel

__all__ = ["CollectivesStrategy"]


def _package() -> str:
    """Returns which of the two packages the program uses; their classes do not know each other."""
    if "lightning.pytorch" in sys.modules:
        return "lightning.pytorch"
    other = "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
    return "pytorch_lightning" if other else "lightning.pytorch"


_DDPStrategy: Any = importlib.import_module(f"{_package()}.strategies").DDPStrategy


class CollectivesStrategy(_DDPStrategy):
    """Lightning's DDP strategy over a backend of ours, with our ``DistributedDataParallel`` around the model.

    Right in automatic and in manual optimization: our wrapper averages a backward pass that runs within
    forward when it ends, as ``manual_backward`` in ``training_step`` does. Unlike in Lightning's strategy, a
    communication hook is used on CPUs, too. Import this module after the package that the program uses,
    ``lightning.pytorch`` or ``pytorch_lightning``. The page of frameworks has a program.

    Args:
        process_group_backend: ``"collectives"`` or another name of ours in torch.
        kwargs: arguments of Lightning's ``DDPStrategy`` (such as ``start_method`` and ``ddp_comm_hook``), and
            those of our :class:`~collectives.ddp.DistributedDataParallel`.
    """

    model: Any

    def __init__(self, *, process_group_backend: str = "collectives", **kwargs: Any) -> None:
        super().__init__(process_group_backend=process_group_backend, **kwargs)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, hook if wrapper is None else wrapper(hook))

    def teardown(self) -> None:
        """Takes the model out of the wrapper, and ends as Lightning's strategy does."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()
