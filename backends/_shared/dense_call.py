"""A collective as the C++ core takes it: addresses and codes of dense tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.backends._shared.arithmetic import kernel_factor
from collectives.backends._shared.tensor_memory import Part, equal_parts, part_of, split_parts
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.native_dtypes import NATIVE_CODES, native_count
from collectives.core.operations import BARRIER, Call, Operand


class DenseCall:
    """A collective on dense stand-ins for its tensors, as the core takes it.

    Args:
        call: the collective.
        rank: this rank.
        size: number of ranks.
        on_host: whether CUDA tensors have stand-ins on the CPU.

    Attributes:
        staged: the outputs' stand-ins, and the way back; of none where the rank gets no result.
        targets: what the core writes; what it reads as well of a collective in place.
        sources: what it only reads.
        received: each rank's part of an output that has parts.
        sent: each rank's part of an input that has parts.
        input_ptr: address of an input that has none, or 0.
    """

    def __init__(self, call: Call, rank: int, size: int, on_host: bool = False) -> None:
        self._call, self._size = call, size
        writes = call.writes_on(rank)
        self.staged = dense_outputs(call.outputs if writes else (), on_host=on_host)
        self.targets = (
            self.staged.stand_ins if writes else dense_outputs(call.outputs, on_host=on_host).stand_ins
        )
        self.sources = [dense(tensor).cpu() if on_host else dense(tensor) for tensor in call.inputs]
        self.received = self._parts(call.operation.output, self.targets, call.output_splits)
        self.sent = self._parts(call.operation.input, self.sources, call.input_splits)
        self.input_ptr = self.sources[0].data_ptr() if call.operation.input is Operand.ONE else 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All stand-ins, whose memory must stay until the collective is done."""
        return (*self.sources, *self.targets)

    def arguments(self) -> tuple[int, int, int, int, int, int, float, int, list[Part], list[Part]]:
        """Returns the first arguments of the core's collectives, from the opcode to the input's parts."""
        call = self._call
        operation = call.operation
        data = self.targets[0] if operation.output is Operand.ONE else None
        main = self.sources[0] if data is None and operation.input is Operand.ONE else data
        return (
            operation.opcode,
            0 if data is None else data.data_ptr(),
            self.input_ptr,
            0 if main is None else native_count(main),
            NATIVE_CODES[torch.uint8 if operation is BARRIER else call.tensor.dtype],
            call.op.code,
            kernel_factor(call.op, self._size),
            call.root,
            self.received,
            self.sent,
        )

    def _parts(
        self, operand: Operand, tensors: Sequence[torch.Tensor], splits: Sequence[int] | None
    ) -> list[Part]:
        if operand is Operand.EACH:
            return [part_of(tensor) for tensor in tensors]
        if operand is Operand.PARTS:
            tensor = tensors[0]
            return equal_parts(tensor, self._size) if splits is None else split_parts(tensor, splits)
        return []
