"""DistributedDataParallel over a backend that refuses tensors of the CPU, on a device that is not the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from collectives import ProcessGroup, UnsupportedOperationError, Work
from collectives.core.capabilities import Capabilities
from collectives.ddp import DistributedDataParallel

ELSEWHERE = torch.device("lazy")
"""Plays the device: torch lets a subclass say that it is there, and needs no driver for it."""


class OnDevice(torch.Tensor):
    """A tensor whose values the device keeps, which are those of a tensor of the CPU."""

    @staticmethod
    def __new__(cls, kept: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, kept.size(), strides=kept.stride(), storage_offset=kept.storage_offset(), dtype=kept.dtype,
            device=ELSEWHERE, requires_grad=False,
        )  # fmt: skip

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return on_device(function, args, kwargs or {})


def on_device(function: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator on what the device keeps; its results are there, too, unless it copies to the CPU."""
    device = kwargs.get("device")
    there = device == ELSEWHERE or device is None
    kept = tree_map_only(OnDevice, lambda t: t.kept, (args, kwargs))
    if device is not None:
        kept[1]["device"] = torch.device("cpu")
    result = function(*kept[0], **kept[1])
    name = function._schema.name
    if result is None or not there:
        return result
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    return tree_map_only(torch.Tensor, OnDevice, result)


class Device(TorchFunctionMode):
    """Makes new tensors of the device such that have values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            return args[0].kept.tolist()  # torch has it for no subclass
        if kwargs.get("device") != ELSEWHERE:
            return function(*args, **kwargs)
        del kwargs["device"]
        return OnDevice(function(*args, **kwargs))


class Elsewhere(ProcessGroup):
    """A custom backend for tensors of the device only."""

    def __init__(self, inner: ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size(), store=inner.get_group_store(), group_name="elsewhere")
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        inner = self.inner.capabilities
        return Capabilities(devices=frozenset({"lazy"}), reductions=inner.reductions, moves=inner.moves)

    def name(self) -> str:
        return "elsewhere"

    def _refuse(self, *_: object) -> Work:
        raise NotImplementedError

    issue = _send = _recv = _refuse

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()


def pass_on(name: str) -> Any:
    """Returns a method that refuses tensors of the CPU, and communicates what the device keeps."""

    def method(self: Elsewhere, *args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, OnDevice):
                raise UnsupportedOperationError(f"{name}: tensors on {tensor.device} are not taken")
        args, kwargs = tree_map_only(OnDevice, lambda t: t.kept, (args, kwargs))
        return getattr(self.inner, name)(*args, **kwargs)

    return method


for _name in ("allreduce", "broadcast", "allgather", "all_gather_single", "barrier", "call"):
    setattr(Elsewhere, _name, pass_on(_name))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, run):
        for layer in run:
            x = torch.tanh(self.layers[layer](x))
        return x


@on_ranks(2)
def test_unused_parameters_without_tensors_of_the_cpu(inner: ProcessGroup) -> None:
    group = Elsewhere(inner)
    with pytest.raises(UnsupportedOperationError, match="tensors on cpu are not taken"):
        group.allreduce(torch.ones(2))
    me, size = group.rank(), group.size()
    alone = [Layers() for _ in range(size)]
    module = Layers()
    for layer in module.layers:
        for name in ("weight", "bias"):
            setattr(layer, name, nn.Parameter(OnDevice(getattr(layer, name).detach())))
    with Device():
        ddp = DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
        # The last layer is used nowhere; the second on rank 1 only.
        plan = [(0, 2), (0, 1, 2)]
        for step in range(2):
            x = [torch.full((3, 5), 0.1 * rank + step) for rank in range(size)]
            for one in alone:
                one.zero_grad()
            ddp.zero_grad()
            loss = ddp(OnDevice(x[me]), plan[me % 2]).sum()
            # What backward() calls; inside of that itself the mode would be off.
            _engine_run_backward((loss,), (OnDevice(torch.ones(())),), False, False, (), True, True)
            for rank, one in enumerate(alone):
                one(x[rank], plan[rank % 2]).sum().backward()
    for n, layer in enumerate(module.layers):
        for name in ("weight", "bias"):
            got, each = getattr(layer, name).grad, [getattr(one.layers[n], name).grad for one in alone]
            used = [grad for grad in each if grad is not None]
            if n == 3:
                assert got is None
                assert used == []
            else:
                torch.testing.assert_close(got.kept, sum(used) / size)
