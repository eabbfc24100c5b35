"""Dense stand-ins for tensors whose memory is not one plain run of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from collectives.core.work import FinishingWork, Work

_UNCOPIED = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8))
"""Types that torch has no copy for; an element takes a byte."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether memory holds the values in row-major order, without gaps or lazy conjugation."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself where it is dense, else a dense copy; detached from autograd."""
    if is_dense(tensor):
        return tensor.detach()
    if tensor.dtype in _UNCOPIED:
        return tensor.detach().view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Returns whether several elements of a strided tensor share their memory, as after ``expand``.

    Those of windows that overlap (``unfold``) are not found, as torch does not find them either.
    """
    return tensor.numel() > 0 and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def clusters(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the numbers of strided tensors whose memory lies within common bounds, by two and more.

    Views whose elements alternate in memory are among them.
    """
    bounds = []
    for i, tensor in enumerate(tensors):
        nbytes = tensor.nbytes
        if nbytes:
            if not tensor.is_contiguous():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                elements = 1 + sum((size - 1) * stride for size, stride in steps)
                nbytes = elements * tensor.element_size()
            first = tensor.data_ptr()
            bounds.append((first, first + nbytes, i))
    bounds.sort()
    found: list[list[int]] = []
    end = 0
    for first, past, i in bounds:
        if first < end:
            found[-1].append(i)
        else:
            found.append([i])
        if past > end:
            end = past
    return [sorted(cluster) for cluster in found if len(cluster) > 1]


def write(output: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values, of any shape with as many elements, into the output of an operation."""
    # Whoever waits may be another thread than that of the call, and the mode is a thread's own.
    with torch.inference_mode() if output.is_inference() else torch.no_grad():
        if output.dtype in _UNCOPIED:
            output, values = output.view(torch.uint8), values.view(torch.uint8)
        output.copy_(values.reshape(output.shape))


class dense_outputs:  # noqa: N801 - used like a function
    """Dense stand-ins for the outputs of one operation, and the way back.

    ``stand_ins`` holds for each output the tensor to give to the operation: the output itself where it is
    dense, else a dense copy of it. :meth:`finish` wraps the operation's Work so that the copies are written
    back once, when it is done.

    Args:
        outputs: tensors that the operation writes (and may read).
        separate: whether each stand-in has memory of its own, though outputs may share theirs; what is
            written back last stays.
        on_host: whether those of CUDA tensors are copies on the CPU.
    """

    def __init__(
        self, outputs: Iterable[torch.Tensor], separate: bool = False, on_host: bool = False
    ) -> None:
        self.outputs = list(outputs)
        self.stand_ins = []
        copied = set()
        for i, tensor in enumerate(self.outputs):
            if is_dense(tensor) and not (on_host and tensor.is_cuda):
                self.stand_ins.append(tensor.detach())
            else:
                self.stand_ins.append(dense(tensor).cpu() if on_host else dense(tensor))
                copied.add(i)
        for i in {i for cluster in clusters(self.outputs) for i in cluster[1:]} if separate else ():
            self.stand_ins[i] = self.stand_ins[i].clone()
            copied.add(i)
        self._copied = [(self.outputs[i], self.stand_ins[i]) for i in sorted(copied)]

    def finish(self, work: Work, async_op: bool = True, result: Sequence[torch.Tensor] | None = None) -> Work:
        """Returns ``work``, or a :class:`FinishingWork` around it that also writes the copies back."""
        if not self._copied:
            return work
        return FinishingWork(work, self.write_back, self.outputs if result is None else result, async_op)

    @property
    def last_step(self) -> Callable[[], None] | None:
        """:meth:`write_back` where there is something to write back, for backends that run it themselves."""
        return self.write_back if self._copied else None

    def write_back(self) -> None:
        """Copies the stand-ins that are copies back; called once, when the operation is done."""
        for tensor, stand_in in self._copied:
            write(tensor, stand_in)
