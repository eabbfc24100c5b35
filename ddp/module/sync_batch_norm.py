"""SyncBatchNorm: batch normalisation over the batches of all ranks together.

For each channel, ranks exchange the number of their values, their mean and the sum of squared deviations from
it, and combine these pairwise without cancellation (Chan, Golub and LeVeque 1983, "Algorithms for computing
the sample variance", formula 1.5 for several samples), so that batches may differ in size and one may be
empty. The derivative is that of batch normalisation (Ioffe and Szegedy 2015, section 3), with both of its
sums taken over all ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from collectives import AllgatherOptions, AllreduceOptions, ProcessGroup, ReduceOp
from collectives.ddp.default_group import default_group_or_none, resolve_group
from collectives.dynamo import leave_uncompiled

_BatchNorm = nn.modules.batchnorm._BatchNorm

_GATHER = AllgatherOptions(asyncOp=False)
_SUM = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.SUM)


class SyncBatchNorm(_BatchNorm):
    """Normalises each channel by the mean and the variance of the batches of all ranks together.

    Same as ``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` on the concatenation of the ranks' batches, in the
    form of ``torch.nn.SyncBatchNorm``: the same arguments and ``state_dict``. Serves every device that its
    group does, the CPU included. Batches may differ in size between ranks, and be empty; memory formats are
    kept.

    In training, and where there are no running statistics, all ranks of the group run forward in the same
    order, and also backward where the input needs a gradient; both communicate and block: ``2 C + 1`` numbers
    of float64 from each rank forward, ``2 C`` backward, for C channels. All ranks update their running
    statistics with bitwise the same values. Where the group has one rank, or is the default group and there
    is none, and in evaluation, nothing is communicated.

    The gradients of weight and bias are this rank's part, which DistributedDataParallel averages. Give a
    group of its own where ranks may leave out other parameters of the model: the operations of this layer
    then cannot meet those of DistributedDataParallel in another order.

    Args:
        num_features: number of channels, dimension 1 of the input.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; ``None`` for the plain average of all.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics; where not, evaluation, too, uses those of
            this rank's batch.
        process_group: the ranks; ``None`` for the default group.
        device: of parameters and statistics.
        dtype: of parameters and statistics.
        bias: whether there is a bias where ``affine``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if affine and not bias:
            self.register_parameter("bias", None)
        self.process_group = None if process_group is None else resolve_group(process_group)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes inputs of 2 dimensions or more, but got {input.dim()}")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels got an input of shape {tuple(input.shape)}, "
                f"which has {input.size(1)} in dimension 1"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalised input; in training, called by all ranks and blocking.

        Args:
            input: shape ``(N, C)`` or ``(N, C, *)``; N may differ between ranks, and be zero.

        Raises:
            ValueError: the shape is wrong, or all ranks together have one value in each channel.
        """
        self._check_input_dim(input)
        group = self._group_to_ask()
        if group is None:
            return super().forward(input)
        return self._forward_together(input, group)

    @leave_uncompiled
    def _group_to_ask(self) -> ProcessGroup | None:
        """Returns the group whose ranks normalise together; ``None`` where this rank does so alone."""
        if not self.training:
            return None
        group = default_group_or_none(make=True) if self.process_group is None else self.process_group
        return None if group is None or group.size() == 1 else group

    @leave_uncompiled
    def _forward_together(self, input: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        with torch.no_grad():
            total, mean, variance = _statistics(input, group)
            self._track(total, mean, variance)
        output: torch.Tensor = _Normalisation.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, total, mean, variance, self.eps, group
        )
        return output

    def _track(self, total: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Updates the running statistics; an empty batch leaves them as they are."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor: torch.Tensor | float = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.double()
        factor = factor * (total > 0).double()
        unbiased = variance * (total / (total - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - factor) + new * factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Returns a copy over the same group."""
        clone = self.__new__(type(self))
        memo[id(self)] = clone
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves; the reader's default group takes the place of the default group here.

        Raises:
            TypeError: the layer has a group of its own.
        """
        if self.process_group is not None:
            raise TypeError(
                f"SyncBatchNorm over {self.process_group.describe()} cannot be pickled; save state_dict(), "
                "or revert_sync_batchnorm(module)"
            )
        return dict(self.__dict__)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Other name of :func:`convert_sync_batchnorm`."""
        return convert_sync_batchnorm(module, process_group)


def _statistics(input: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns count, mean and variance of all ranks' values, in float64; bitwise the same on all ranks.

    Raises:
        ValueError: the count is one; raised on all ranks.
    """
    channels = input.size(1)
    count = input.numel() // channels if channels else 0
    # Count, means, squared deviations.
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    mine[0] = count
    if count:
        mean, variance = torch.batch_norm_update_stats(input.to(_wide(input.dtype)), None, None, 0.0)
        mine[1 : channels + 1] = mean
        torch.mul(variance, count, out=mine[channels + 1 :])
    everyones = mine.new_empty(group.size(), mine.numel())
    group.all_gather_single(everyones, mine, _GATHER).wait()
    counts, means, squares = torch.split(everyones, [1, channels, channels], dim=1)
    total = counts.sum()
    # A rank with more need not look, and wait for the device.
    if count <= 1 and group.to_host(total).item() == 1:
        raise ValueError(
            f"[rank {group.rank()}] batch normalisation needs more than 1 value in each channel in training, "
            f"but all ranks of {group.describe()} together have 1; give larger batches"
        )
    divisor = total.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / divisor
    return total, mean, variance


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the data type that a layer computes in for inputs of ``dtype``."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@leave_uncompiled
class _Normalisation(torch.autograd.Function):
    """Normalises by statistics that all ranks know, and differentiates through them."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        total: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
        group: ProcessGroup,
    ) -> torch.Tensor:
        """Returns ``(input - mean) / sqrt(variance + eps) * weight + bias``."""
        wide = _wide(input.dtype)
        mean, variance = mean.to(wide), variance.to(wide)
        ctx.eps, ctx.group = eps, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, total, mean, variance)
        return _scaled(input, mean, variance, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of input, weight and bias; communicates where the input needs one."""
        given, weight, total, mean, variance = ctx.saved_tensors
        eps, group = ctx.eps, ctx.group
        wide = mean.dtype
        if given.numel():
            # The kernel for given statistics: the sums of grad * normalised input, and of grad.
            _, with_input, plain = torch.ops.aten.native_batch_norm_backward(
                grad, given, torch.ones_like(mean), mean, variance, None, None, False, eps,
                [False, True, True],
            )  # fmt: skip
        else:
            with_input, plain = torch.zeros_like(mean), torch.zeros_like(mean)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([with_input, plain]).double()
            group.allreduce([sums], _SUM).wait()
            slope, offset = (sums / total.clamp(min=1)).to(wide)
            scale = torch.rsqrt(variance + eps)
            if weight is not None:
                scale = scale * weight.to(wide)
            along = _scaled(given.to(wide), mean, variance, slope, offset, eps)
            shape = [1, -1, *[1] * (given.dim() - 2)]
            of_input = torch.sub(grad, along).mul_(scale.view(shape)).to(given.dtype)
        of_weight = with_input.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = plain.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None, None, None


def _scaled(
    input: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Returns the input normalised by given statistics, times weight, plus bias, in the input's type."""
    weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
    return nn.functional.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)


class _LocalBatchNorm(_BatchNorm):
    """Batch normalisation on this rank for any dimensions: what a layer made as SyncBatchNorm goes to."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch normalisation takes 2 dimensions or more, but got {input.dim()}")


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convert_sync_batchnorm(module: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
    """Replaces all batch normalisation in a module by :class:`SyncBatchNorm`, in place.

    Parameters, buffers, hooks and all other attributes of a layer go over to its replacement as they are, and
    a layer that is used in several places stays one. Wrap the module afterwards. Layers of a class of the
    user's with a forward of its own are left as they are, with a warning.

    Args:
        module: the module.
        process_group: the ranks that normalise together; ``None`` for the default group.

    Returns:
        The module; where it is such a layer itself, its replacement.

    Raises:
        ValueError: a layer is not initialised yet.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel, convert_sync_batchnorm

            network = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
            model = DistributedDataParallel(convert_sync_batchnorm(network))
    """
    group = None if process_group is None else resolve_group(process_group)

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = group
            return layer
        if not isinstance(layer, _BatchNorm):
            return layer
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"{type(layer).__name__} does not know its number of channels yet; run forward once before "
                "convert_sync_batchnorm"
            )
        if type(layer).forward not in {kind.forward for kind in _KINDS}:
            warnings.warn(
                f"{type(layer).__qualname__} has a forward of its own, which SyncBatchNorm would not run; it "
                "is left as it is",
                stacklevel=2,
            )
            return layer
        new = _retyped(layer, SyncBatchNorm)
        new._converted_from = type(layer), layer.__dict__.get("process_group")
        new.process_group = group
        replacement: nn.Module = new
        return replacement

    return _replace(module, convert, {})


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Undoes :func:`convert_sync_batchnorm`, in place, for evaluation or export without a group.

    A layer gets back the class that it had; one that was made as a :class:`SyncBatchNorm` gets one for inputs
    of any dimensions.

    Args:
        module: the module.

    Returns:
        The module; where it is such a layer itself, its replacement.
    """

    def revert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        kind, group = layer.__dict__.get("_converted_from", (_LocalBatchNorm, None))
        new = _retyped(layer, kind)
        new.__dict__.pop("_converted_from", None)
        new.__dict__.pop("process_group", None)
        if kind is nn.SyncBatchNorm:
            new.process_group = group
        replacement: nn.Module = new
        return replacement

    return _replace(module, revert, {})


def _retyped(layer: nn.Module, kind: Any) -> Any:
    """Returns a module of another class that has all attributes of ``layer``, and shares them."""
    new = kind.__new__(kind)
    new.__dict__.update(layer.__dict__)
    return new


def _replace(
    module: nn.Module, change: Callable[[nn.Module], nn.Module], done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Returns what ``change`` makes of a module after it has changed all those within."""
    if module not in done:
        done[module] = module  # for a module within itself
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _replace(child, change, done)
        done[module] = change(module)
    return done[module]
