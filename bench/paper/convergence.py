"""What skipped synchronisations do to the loss (figure 11): a residual network on images of digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from collectives.bench.paper.cells import Cell, Place
from collectives.bench.training import digits
from collectives.bench.training.models import residual_reader
from collectives.ddp import DistributedDataParallel

__all__ = ["Losses", "load_images"]

SIDES = (8, 64)
"""Least and most pixels of an image's side."""


@dataclass(frozen=True)
class Losses(Cell):
    """Training with one interval.

    Attributes:
        backend: name of the group.
        images: file of :func:`load_images`; empty for the digits of scikit-learn.
        batch: images of each rank in an iteration.
        lr: learning rate.
        interval: iterations from one synchronisation, and step of the optimizer, to the next.
        iterations: number of iterations.
    """

    backend: str
    images: str
    batch: int
    lr: float
    interval: int
    iterations: int

    @property
    def groups(self) -> tuple[str, ...]:
        """The one group."""
        return (self.backend,)

    def measure(self, place: Place, budget_s: float) -> dict[str, Any]:  # noqa: ARG002
        """Returns this rank's loss at each iteration; gradients between two steps add up, as in the paper."""
        data = load_images(self.images) if self.images else digits.load_digits().train
        images, labels = data.tensors
        torch.manual_seed(0)
        model = residual_reader().to(self.device)
        parallel = DistributedDataParallel(model, process_group=place.groups[self.backend])
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        recipe = digits.Recipe(self.iterations, batch=self.batch)
        losses: list[float] = []
        for number, share in enumerate(digits.batches(data, recipe, place.rank, self.ranks), start=1):
            synchronises = number % self.interval == 0
            with nullcontext() if synchronises else parallel.no_sync():
                scores = parallel(images[share].to(self.device))
                loss = nn.functional.cross_entropy(scores, labels[share].to(self.device))
                loss.backward()  # type: ignore[no-untyped-call]
            if synchronises:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses}

    def combine(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the ranks' mean loss at each iteration."""
        return {"losses": np.mean([answer["losses"] for answer in answers], axis=0).tolist()}


def load_images(file: str) -> TensorDataset:
    """Returns the images and labels that a user has in a file, such as MNIST's ``mnist.npz``.

    Args:
        file: an archive of NumPy with ``x_train``, uint8 of shape ``[n, height, width]``, and ``y_train``, n
            labels of 0 to 9.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    with np.load(file, allow_pickle=False) as archive:
        missing = {"x_train", "y_train"} - set(archive.files)
        if missing:
            raise ValueError(f"{file} has no {' and no '.join(sorted(missing))}")
        images, labels = archive["x_train"], archive["y_train"]
    if images.dtype != np.uint8 or images.ndim != 3 or not all(
        SIDES[0] <= side <= SIDES[1] for side in images.shape[1:]
    ):  # fmt: skip
        raise ValueError(
            f"x_train of {file} must be uint8 of shape [n, height, width] with sides of {SIDES[0]} to "
            f"{SIDES[1]}, but is {images.dtype} of shape {list(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "ui":
        raise ValueError(
            f"y_train of {file} must be {len(images)} whole numbers, but is {labels.dtype} of shape "
            f"{list(labels.shape)}"
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"y_train of {file} must hold labels of 0 to 9")
    pixels = torch.from_numpy(images).float().div(255).unsqueeze(1)
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))
