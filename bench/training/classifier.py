"""Models of the field as classifiers, and labelled random samples: how the paper's evaluation trains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collectives.bench.training.models import MODELS

__all__ = ["CLASSES", "Classifier", "Samples", "build_classifier", "random_samples"]

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
    """Returns a model of :data:`~collectives.bench.training.models.MODELS` as a classifier, untrained."""
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
        length: of each, as of :class:`~collectives.bench.training.models.Model`.
        seed: of the random numbers.
        device: type of the device that they are moved to.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = MODELS[name].inputs(batch, length, generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    return Samples({key: value.to(device) for key, value in inputs.items()}, labels.to(device))
