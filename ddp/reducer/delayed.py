"""Gradients that are averaged by themselves, in one message, beside what the reducer does with all others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from collectives import Work
from collectives.ddp.reducer.averaging import Averager

__all__ = ["DelayedGradients"]


class DelayedGradients:
    """The gradients of ``delay_all_reduce_named_params``: averaged in every pass, whatever else is set.

    A gradient that did not come counts as zeros. What was averaged before stays as it is when it is averaged
    again, but for rounding.

    Attributes:
        hooked: the parameters, and at the end the one that they wait for; :meth:`note` takes their indices.

    Args:
        parameters: the parameters.
        trigger: their message leaves when it has its gradient and they have theirs, else at the end.
        averager: averages over the ranks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        trigger: torch.nn.Parameter | None,
        averager: Averager,
    ) -> None:
        kinds = {p: (str(p.dtype), str(p.device)) for p in parameters}
        self._parameters = sorted(parameters, key=kinds.__getitem__)
        self.hooked = [*self._parameters, *([] if trigger is None else [trigger])]
        self._averager = averager
        for parameter in parameters:
            averager.op_for(parameter.dtype, parameter.device)
        self._kinds = [list(alike) for _, alike in groupby(self._parameters, kinds.__getitem__)]
        self._dtypes = [alike[0].dtype for alike in self._kinds]
        self._flats: list[torch.Tensor] = []
        self._sent: list[Work] = []
        self._came: set[int] = set()
        self._came_late = False

    @property
    def is_ready(self) -> bool:
        """Whether all gradients have come."""
        return len(self._came) == len(self.hooked)

    def note(self, index: int) -> bool:
        """Takes note of a gradient; returns whether it is one of those to be averaged."""
        self._came.add(index)
        delayed = index < len(self._parameters)
        self._came_late |= delayed and bool(self._sent)
        return delayed

    def launch(self, *, zeros: bool = False) -> None:
        """Sends the gradients as they are, if that was not done in this pass; does not wait.

        Args:
            zeros: whether zeros are sent for all of them.
        """
        if self._sent or not self._parameters:
            return
        self._flats = [
            torch.cat([_flat_grad(parameter, zeros) for parameter in parameters]).to(dtype)
            for parameters, dtype in zip(self._kinds, self._dtypes, strict=True)
        ]
        real = [torch.view_as_real(flat) if flat.is_complex() else flat for flat in self._flats]
        self._sent.append(self._averager.start(real))

    def finish(self) -> None:
        """Waits for the averages and writes them to ``.grad``; sends before what was not sent."""
        if not self._parameters:
            return
        if self._came_late:  # their gradient was added to, as in reentrant checkpoints
            self._wait()
        self.launch()
        self._wait()
        for parameters, flat in zip(self._kinds, self._flats, strict=True):
            averages = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, average in zip(parameters, averages, strict=True):
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(average.view(parameter.shape))

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    def reset(self) -> list[Work]:
        """Ends the pass; returns what was sent in it and not waited for."""
        sent, self._sent = self._sent, []
        self._flats, self._came_late = [], False
        self._came.clear()
        return sent


def _flat_grad(parameter: torch.nn.Parameter, zeros: bool) -> torch.Tensor:
    grad = parameter.grad
    if zeros or grad is None:
        return parameter.new_zeros(parameter.numel())
    return (grad if grad.layout is torch.strided else grad.to_dense()).reshape(-1)
