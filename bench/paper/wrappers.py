"""What the paper's evaluation trains: models as classifiers, in wrappers that keep those of ranks equal.

The wrappers without overlap are the steps by which the paper (VLDB 2020, sections 2.2 and 3.2) comes to its
design: parameter averaging, one all-reduce for each gradient after backward, buckets after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import collectives
from collectives.bench.models import MODELS
from collectives.ddp import DistributedDataParallel
from collectives.ddp.model_averaging import average_parameters

CLASSES = 1000
"""Labels of a random sample, as many as those of ImageNet."""


class Classifier(nn.Module):
    """A model whose pooled output goes through one linear layer to the scores of :data:`CLASSES` classes.

    Args:
        body: the model; its output is the scores, or has them or what leads to them as ``pooler_output``.
        width: features of that pooled output; 0 where the body's output is the scores.
    """

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, CLASSES) if width else nn.Identity()

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Returns the scores of each sample."""
        output: Any = self.body(**inputs)
        pooled = getattr(output, "pooler_output", output)
        return torch.as_tensor(self.head(pooled.flatten(1)))


@dataclass(frozen=True, slots=True)
class Samples:
    """Random samples.

    Attributes:
        inputs: keyword arguments of a classifier's forward.
        labels: the class of each sample.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Returns the mean cross entropy of a classifier, wrapped or not, on these samples."""
        return nn.functional.cross_entropy(model(**self.inputs), self.labels)


def build_classifier(name: str) -> nn.Module:
    """Returns a model of :data:`~collectives.bench.models.MODELS` as a classifier, untrained."""
    body = MODELS[name].build()
    config: Any = getattr(body, "config", None)
    if config is None:
        return Classifier(body, 0).train()
    sizes = getattr(config, "hidden_sizes", None)
    return Classifier(body, sizes[-1] if sizes else config.hidden_size).train()


def random_samples(name: str, batch: int, length: int, seed: int, device: str) -> Samples:
    """Returns labelled random samples for a classifier.

    Args:
        name: of the model.
        batch: number of samples.
        length: of each, as of :class:`~collectives.bench.models.Model`.
        seed: of the random numbers.
        device: type of the device that they are moved to.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = MODELS[name].inputs(batch, length, generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    return Samples({key: value.to(device) for key, value in inputs.items()}, labels.to(device))


BUCKET_MB = 25.0
"""Size of a bucket where none is named: that of both wrappers."""


class Wrapper:
    """The bare model, and the interface of all others.

    Args:
        model: the model.
        group: the ranks; ``None`` of a rank by itself.
        bucket_mb: size of a bucket in MiB; 0 puts every gradient alone, ``None`` stands for 25.

    Attributes:
        module: what forward goes through.
    """

    def __init__(self, model: nn.Module, group: Any, bucket_mb: float | None) -> None:
        self.module = model
        self._model = model
        self._group = group
        self._bucket_mb = BUCKET_MB if bucket_mb is None else bucket_mb

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context for forward and backward of an iteration whose gradients stay this rank's."""
        return nullcontext()

    def after_backward(self) -> None:
        """Does what is still to be done with gradients; blocks until they are averaged."""

    def after_step(self) -> None:
        """Does what is to be done with parameters after the optimizer's step; blocks until it is done."""


class _Ours(Wrapper):
    """This package's wrapper."""

    def __init__(self, model: nn.Module, group: Any, bucket_mb: float | None) -> None:
        super().__init__(model, group, bucket_mb)
        self.module = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()  # type: ignore[no-any-return, operator]


class _Torchs(Wrapper):
    """torch's wrapper, over a group of ``torch.distributed``."""

    def __init__(self, model: nn.Module, group: Any, bucket_mb: float | None) -> None:
        super().__init__(model, group, bucket_mb)
        self.module = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()  # type: ignore[no-any-return, operator]


class _FromRank0(Wrapper):
    """A model whose ranks begin with the parameters and buffers of rank 0."""

    def __init__(self, model: nn.Module, group: Any, bucket_mb: float | None) -> None:
        super().__init__(model, group, bucket_mb)
        first = collectives.get_process_group_ranks(group)[0]
        for tensor in (*model.parameters(), *model.buffers()):
            collectives.broadcast(tensor.detach(), first, group=group)

    def _gradients(self) -> list[torch.Tensor]:
        """Returns the gradients in the order in which they usually come: that of parameters, reversed."""
        found = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return found[::-1]


class _AfterBackward(_FromRank0):
    """Buckets of gradients like the wrappers', but none is sent before backward is over."""

    def after_backward(self) -> None:
        buckets = list(_buckets(self._gradients(), self._bucket_mb * (1 << 20)))
        flat = [torch.cat([gradient.reshape(-1) for gradient in bucket]) for bucket in buckets]
        works = [_average(tensor, self._group) for tensor in flat]
        for bucket, tensor, work in zip(buckets, flat, works, strict=True):
            work.wait()
            parts = torch.split(tensor, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class _PerParameter(_FromRank0):
    """One all-reduce for each gradient, one after the other: the naive solution of section 3.2.1."""

    def after_backward(self) -> None:
        for gradient in self._gradients():
            _average(gradient, self._group).wait()


class _Averaging(_FromRank0):
    """No gradient is sent; parameters are averaged after each of the optimizer's steps (section 2.2)."""

    def after_step(self) -> None:
        average_parameters(self._model.parameters(), self._group)


def _average(tensor: torch.Tensor, group: Any) -> Any:
    return collectives.all_reduce(tensor, op=collectives.ReduceOp.AVG, group=group, async_op=True)


def _buckets(gradients: Iterable[torch.Tensor], cap_bytes: float) -> Iterable[list[torch.Tensor]]:
    """Yields gradients in order, in buckets that are full at so many bytes; data types do not mix."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size >= cap_bytes or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


WRAPPERS: Final[Mapping[str, Callable[[nn.Module, Any, float | None], Wrapper]]] = {
    "local": Wrapper,
    "ours": _Ours,
    "torch": _Torchs,
    "after backward": _AfterBackward,
    "per parameter": _PerParameter,
    "averaging": _Averaging,
}
"""All by name; ``local`` communicates nothing, and all but ``torch`` take a group of this package."""
