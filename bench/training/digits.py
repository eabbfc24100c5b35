"""Training on the handwritten digits that ship with scikit-learn: data, model, batches, steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

__all__ = [
    "Digits",
    "Recipe",
    "accuracy",
    "batches",
    "build_model",
    "flat_parameters",
    "load_digits",
    "train",
]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    Attributes:
        steps: optimizer steps.
        batch: images of each rank in a step.
        lr: learning rate of SGD.
        momentum: its momentum.
        seed: of the order of the images.
    """

    steps: int
    batch: int = 32
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 20200828


@dataclass(frozen=True, slots=True)
class Digits:
    """The images as ``[n, 1, 8, 8]`` float32 in 0 to 1, and their digits as int64.

    Attributes:
        train: four fifths of the 1,797 images.
        test: the held-out fifth, with every digit in its share.
    """

    train: TensorDataset
    test: TensorDataset

    def to(self, device: str) -> Digits:
        """Returns the same on a type of device; what is there already is not copied."""
        train, test = (
            TensorDataset(*(tensor.to(device) for tensor in part.tensors)) for part in (self.train, self.test)
        )
        return Digits(train, test)


def load_digits() -> Digits:
    """Returns the images, always divided in the same way; reads no network."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, digits = load(return_X_y=True)
    halves = train_test_split(images, digits, test_size=0.2, random_state=0, stratify=digits)
    train_x, test_x = (torch.from_numpy(x).float().div(16).reshape(-1, 1, 8, 8) for x in halves[:2])
    train_y, test_y = (torch.from_numpy(y).long() for y in halves[2:])
    return Digits(TensorDataset(train_x, train_y), TensorDataset(test_x, test_y))


def build_model(seed: int) -> nn.Sequential:
    """Returns a small convolutional network with random parameters.

    It has no batch normalisation: its statistics would depend on how a batch is divided among ranks.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(data: TensorDataset, recipe: Recipe, rank: int, size: int) -> Iterator[list[int]]:
    """Yields a rank's share of every step's batch as places in ``data``; shares of a step are equal."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=size, rank=rank, seed=recipe.seed
    )
    step = epoch = 0
    while True:
        sampler.set_epoch(epoch)
        order = list(sampler)
        for begin in range(0, len(order), recipe.batch):
            if step == recipe.steps:
                return
            yield order[begin : begin + recipe.batch]
            step += 1
        epoch += 1


def train(
    model: nn.Module,
    data: TensorDataset,
    recipe: Recipe,
    shares: Iterator[list[int]],
    after_step: Callable[[int, float], object] | None = None,
) -> None:
    """Trains a model, plain or wrapped for data parallelism: SGD on the mean cross entropy of each share.

    Args:
        model: trained in place.
        data: the images.
        recipe: rate and momentum.
        shares: places in ``data`` for each step.
        after_step: called with the number of steps done and the loss.
    """
    images, digits = data.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    model.train()
    for step, share in enumerate(shares, start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[share]), digits[share])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if after_step is not None:
            after_step(step, loss.item())


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Returns the part of the images that the model reads right, 0 to 1."""
    images, digits = data.tensors
    model.eval()
    return float((model(images).argmax(dim=1) == digits).float().mean())


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """Returns a copy of all parameters, one after the other."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
