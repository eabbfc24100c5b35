"""The communicator of vLLM's groups: vLLM says which tensors go where, our groups move them."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from collectives.api.collectives import (
    all_gather_into_tensor,
    all_reduce_into_tensor,
    gather,
    reduce_scatter_tensor,
)
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work
from collectives.torch_bridge.group import TorchGroup

__all__ = ["CollectivesCommunicator"]

_ALIGNED = 64
"""Bytes: tensors of a dictionary begin at multiples of it in the message that carries them."""


class _Place(NamedTuple):
    """Stands for a tensor in the description of a dictionary."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


class CollectivesCommunicator(DeviceCommunicatorBase):
    """Carries out the collectives and messages of one of vLLM's groups on CPUs; made by each of its ranks.

    All results are new tensors, which the operators of compiled models must return.

    Args:
        cpu_group: vLLM's group of torch's Gloo.
        device: the CPU.
        device_group: the group of the same ranks with the backend ``collectives``.
        unique_name: name of the group in vLLM.
        use_all2all: whether experts of vLLM's mixture-of-experts layers are shared out among the group.

    Raises:
        TypeError: ``device_group`` is of another backend.
    """

    supports_tensor_dict = True  # vLLM asks for it: dictionaries go through this class, not through Gloo

    # what vLLM's class has set
    world_size: int
    rank_in_group: int
    global_rank: int
    all2all_manager: Any

    def __init__(
        self,
        cpu_group: torch.distributed.ProcessGroup,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all=use_all2all)
        if not isinstance(device_group, TorchGroup):
            raise TypeError(
                f"[rank {self.global_rank}] vLLM's group {unique_name!r} has to be of the backend "
                f"'collectives', but is {device_group!r}; unset VLLM_DISTRIBUTED_USE_SPLIT_GROUP if it is set"
            )
        self._group: ProcessGroup = device_group.inner
        self._sent: deque[tuple[Work, torch.Tensor]] = deque()
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    # ---- collectives ---------------------------------------------------------------------------------------

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks; called by all, and blocks until it is there.

        Args:
            input_: same shape and data type on every rank; unchanged.
        """
        output = torch.empty_like(input_, memory_format=torch.contiguous_format)
        all_reduce_into_tensor(output, input_, group=self._group)
        return output

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Returns the tensors of all ranks, one after the other along a dimension; called by all, blocks.

        Args:
            input_: same shape and data type on every rank.
            dim: the dimension; a negative one counts from the last.
        """
        parts = input_.new_empty((self.world_size, *input_.shape))
        all_gather_into_tensor(parts, input_, group=self._group)
        return _joined(parts, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Returns what :meth:`all_gather` does on one rank, ``None`` on the others; called by all, blocks.

        Args:
            input_: same shape and data type on every rank.
            dst: the rank that gathers, within the group.
            dim: see :meth:`all_gather`.
        """
        if self.rank_in_group != dst:
            gather(input_, None, group=self._group, group_dst=dst)
            return None
        parts = input_.new_empty((self.world_size, *input_.shape))
        gather(input_, list(parts), group=self._group, group_dst=dst)
        return _joined(parts, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Returns this rank's part of the sum over all ranks; called by all, and blocks until it is there.

        Args:
            input_: same shape and data type on every rank; unchanged.
            dim: the dimension that is cut into a part for each rank; a negative one counts from the last.

        Raises:
            ValueError: its length is no multiple of the number of ranks.
        """
        dim = _dimension(input_, dim)
        if input_.shape[dim] % self.world_size:
            raise ValueError(
                f"[rank {self.global_rank}] reduce_scatter in {self.unique_name!r}: dimension {dim} of shape "
                f"{tuple(input_.shape)} is no multiple of {self.world_size} ranks"
            )
        shape = (*input_.shape[:dim], self.world_size, -1, *input_.shape[dim + 1 :])
        parts = input_.reshape(shape).movedim(dim, 0).contiguous()
        output = torch.empty_like(parts[0])
        reduce_scatter_tensor(output, parts, group=self._group)
        return output

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Returns the rows of all ranks, of which ranks may have different numbers; called by all, blocks.

        Args:
            input_: this rank's rows, or several such tensors.
            dim: 0, the only one that vLLM asks for.
            sizes: how many rows each rank has; ``None`` if all have as many.

        Raises:
            ValueError: ``dim`` is not 0, or this rank has another number of rows than ``sizes`` says.
        """
        if isinstance(input_, list):
            return [self._all_gather_rows(one, dim, sizes) for one in input_]
        return self._all_gather_rows(input_, dim, sizes)

    def _all_gather_rows(self, input_: torch.Tensor, dim: int, sizes: Sequence[int] | None) -> torch.Tensor:
        sizes = self._rows("all_gatherv", dim, sizes, input_.shape[0])
        if sizes[self.rank_in_group] != input_.shape[0]:
            raise ValueError(
                f"[rank {self.global_rank}] all_gatherv in {self.unique_name!r}: this rank has "
                f"{input_.shape[0]} rows, but sizes are {list(sizes)}"
            )
        padded = input_
        if input_.shape[0] < max(sizes):
            padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
            padded[: input_.shape[0]] = input_
        parts = input_.new_empty((self.world_size, *padded.shape))
        all_gather_into_tensor(parts, padded, group=self._group)
        if len(set(sizes)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns this rank's rows of the sum over all ranks; called by all, and blocks until it is there.

        Args:
            input_: same shape and data type on every rank; unchanged.
            dim: 0, the only one that vLLM asks for.
            sizes: how many rows each rank gets; ``None`` if all get as many.

        Raises:
            ValueError: ``dim`` is not 0, or ``sizes`` are not those of the tensor's rows together.
        """
        sizes = self._rows("reduce_scatterv", dim, sizes, input_.shape[0] // self.world_size)
        if sum(sizes) != input_.shape[0]:
            raise ValueError(
                f"[rank {self.global_rank}] reduce_scatterv in {self.unique_name!r}: the tensor has "
                f"{input_.shape[0]} rows, but sizes are {list(sizes)}"
            )
        if len(set(sizes)) == 1:
            return self.reduce_scatter(input_, 0)
        begin = sum(sizes[: self.rank_in_group])
        return self.all_reduce(input_)[begin : begin + sizes[self.rank_in_group]]

    def _rows(self, name: str, dim: int, sizes: Sequence[int] | None, equal: int) -> Sequence[int]:
        if dim != 0:
            raise ValueError(
                f"[rank {self.global_rank}] {name} in {self.unique_name!r}: dim must be 0, but is {dim}"
            )
        return [equal] * self.world_size if sizes is None else sizes

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Returns tokens and router logits of all ranks, where the group shares out experts."""
        if self.all2all_manager is None:
            return super().dispatch_router_logits(*args, **kwargs)
        return self.all2all_manager.dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Returns tokens and chosen experts of all ranks, where the group shares out experts."""
        if self.all2all_manager is None:
            return super().dispatch(*args, **kwargs)
        return self.all2all_manager.dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's tokens, summed over the experts of all ranks, where they are shared out."""
        if self.all2all_manager is None:
            return super().combine(*args, **kwargs)
        return self.all2all_manager.combine(*args, **kwargs)

    # ---- dictionaries between stages of a pipeline ---------------------------------------------------------

    def send_tensor_dict(self, tensor_dict: Mapping[str, Any], dst: int) -> None:
        """Sends a dictionary; called by one rank, and returns when the caller may change the tensors again.

        What is sent is a copy, so that this stage of a pipeline goes on while the next one is busy.

        Args:
            tensor_dict: tensors, and other values that can be pickled.
            dst: the receiver, within the group.

        Raises:
            DistBackendError: an earlier dictionary could not be sent.
        """
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()
        tensors: list[tuple[int, torch.Tensor]] = []
        entries: dict[str, Any] = {}
        end = 0
        for key, value in tensor_dict.items():
            entries[key] = value
            if isinstance(value, torch.Tensor):
                entries[key] = _Place(end, value.dtype, value.shape)
                tensors.append((end, value))
                end += _aligned(value.nbytes)
        described = bytearray(pickle.dumps(entries))
        begin = _aligned(len(described))
        message = torch.empty(begin + end, dtype=torch.uint8)
        message[: len(described)] = torch.frombuffer(described, dtype=torch.uint8)
        for offset, tensor in tensors:
            _slot(message, begin, _Place(offset, tensor.dtype, tensor.shape)).copy_(tensor)
        lengths = torch.tensor([len(described), message.numel()])
        for part in (lengths, message):
            self._sent.append((self._group.send([part], dst), part))

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """Returns the next dictionary that a rank sends; called by one rank, and blocks until it has come.

        Args:
            src: the sender, within the group.
        """
        lengths = torch.empty(2, dtype=torch.int64)
        self._group.recv([lengths], src).wait()
        described, length = lengths.tolist()
        message = torch.empty(length, dtype=torch.uint8)
        self._group.recv([message], src).wait()
        entries: dict[str, Any] = pickle.loads(message[:described].numpy().tobytes())
        begin = _aligned(described)
        return {
            key: _slot(message, begin, value) if isinstance(value, _Place) else value
            for key, value in entries.items()
        }


def _dimension(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the ranks' parts one after the other along a dimension; a view where memory allows it."""
    dim = _dimension(parts[0], dim)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _slot(message: torch.Tensor, begin: int, place: _Place) -> torch.Tensor:
    """Returns a tensor of a dictionary where it lies in the message."""
    count = place.shape.numel() * place.dtype.itemsize
    offset = begin + place.offset
    return message[offset : offset + count].view(place.dtype).view(place.shape)
