"""Hugging Face Accelerate, and transformers' Trainer over it, with our backends and our wrapper."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.state import DistributedType, PartialState
from torch import nn

from collectives.ddp import DistributedDataParallel

__all__ = ["Accelerator", "register"]


def register() -> None:
    """Lets Accelerate take the names of our backends for tensors on the CPU, where it insists on Gloo.

    ``InitProcessGroupKwargs(backend="collectives")`` and transformers' ``ddp_backend="collectives"`` work
    then. Called once in each process, before the first ``Accelerator``, ``PartialState`` or
    ``TrainingArguments``; a second call does nothing. Does not communicate.

    Raises:
        AttributeError: this version of Accelerate chooses backends in another way.
    """
    # Accelerate has no public way to let a name in: this method alone decides which backend CPUs get.
    theirs: Any = PartialState._prepare_backend
    if theirs.__module__ == __name__:
        return

    def prepare(
        self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        chosen, kind = theirs(self, cpu, sagemaker_dp, backend)
        ours = backend is not None and backend.removeprefix("cpu:").startswith("collectives")
        return (backend if ours and kind == DistributedType.MULTI_CPU else chosen), kind

    PartialState._prepare_backend = prepare


class Accelerator(accelerate.Accelerator):
    """Accelerate's class, which wraps models in our ``DistributedDataParallel`` for several ranks on CPUs.

    The group is torch's default one, of a backend of ours; see :func:`register`. All arguments and methods
    are those of Accelerate's; ``DistributedDataParallelKwargs`` go to our class, which knows the same ones,
    communication hooks included.
    """

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares a model as Accelerate does, but wraps it in our class; called by all ranks.

        Blocks until rank 0's parameters have come.

        Args:
            model: the model; one that is prepared already comes back as it is.
            device_placement: whether to move it to this process's device; ``None`` for what the accelerator
                was made with.
            evaluation_mode: whether it is never trained, and not wrapped.

        Returns:
            The model in our wrapper, or as Accelerate prepares it where it is not trained on several ranks.

        Raises:
            TypeError: torch's default group is not of this package.
        """
        wraps = self.distributed_type == DistributedType.MULTI_CPU and not evaluation_mode
        prepared = getattr(model, "_is_accelerate_prepared", False)
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if prepared or not wraps or not trained:
            same: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return same
        inner = super().prepare_model(model, device_placement, evaluation_mode=True)
        kwargs = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        wrapped = DistributedDataParallel(inner, **kwargs)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models[-1] = wrapped
        return wrapped

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the model that was given to ``prepare``, out of our wrapper, too.

        Args:
            model: what ``prepare`` returned.
            args: those of Accelerate's method.
            kwargs: as ``args``.

        Returns:
            The model.
        """
        if isinstance(model, DistributedDataParallel):
            model = model.module
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped
