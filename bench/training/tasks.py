"""What ``bench ddp`` trains: models of the field on random data, and two models that learn something."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import torch
from torch import nn

from collectives.bench.training import digits
from collectives.bench.training.models import MODELS, Model, loss_of

__all__ = ["LEARNING_STEPS", "TASKS", "Data", "Task"]

LEARNING_STEPS = 300
"""Steps after which the tasks that learn something have learned it."""


@dataclass(frozen=True, slots=True)
class Data:
    """What one rank trains on.

    Attributes:
        losses: yields a function for each step, which returns the loss of a model on this rank's share.
        accuracy: returns the part of held-out samples that a model reads right; ``None`` without such.
    """

    losses: Iterator[Callable[[nn.Module], torch.Tensor]]
    accuracy: Callable[[nn.Module], float] | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A model and its data.

    Attributes:
        name: as the command line calls it.
        batch: samples of a rank in an iteration where the user names no number.
        length: of a sample where the user names none.
        package: what it needs besides torch; empty for nothing.
        build: returns the model with fresh random weights, in training mode.
        data: makes a rank's data of batch, length, rank, number of ranks, and type of the device.
        optimizer: the one that it learns with; ``None`` where it learns nothing, and any will do.
    """

    name: str
    batch: int
    length: int
    package: str
    build: Callable[[], nn.Module]
    data: Callable[[int, int, int, int, str], Data]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None


def _random(model: Model) -> Task:
    """Returns a task that is only good for its times: one batch of random data, again and again."""

    def data(batch: int, length: int, rank: int, size: int, device: str) -> Data:  # noqa: ARG001
        made = model.inputs(batch, length, torch.Generator().manual_seed(100 + rank))
        inputs = {name: tensor.to(device) for name, tensor in made.items()}
        return Data(repeat(lambda parallel: loss_of(parallel(**inputs))))

    return Task(model.name, model.batch, model.length, model.package, model.build, data)


_RECIPE = digits.Recipe(LEARNING_STEPS)


def _digits(batch: int, length: int, rank: int, size: int, device: str) -> Data:  # noqa: ARG001
    """A small convolutional network reads handwritten digits; SGD with momentum."""
    data = digits.load_digits().to(device)
    images, labels = data.train.tensors

    def losses() -> Iterator[Callable[[nn.Module], torch.Tensor]]:
        for share in digits.batches(data.train, digits.Recipe(1 << 60, batch), rank, size):
            x, y = images[share], labels[share]
            yield lambda parallel, x=x, y=y: nn.functional.cross_entropy(parallel(x), y)  # type: ignore[misc]

    return Data(losses(), lambda model: digits.accuracy(model, data.test))


_WORDS = 64
_LENGTH = 32


def _language_model() -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=_WORDS, n_positions=_LENGTH, n_embd=128, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.loss_type = "ForCausalLM"  # transformers does not know so by the class's name, and warns
    trained: nn.Module = model.train()
    return trained


def _language(batch: int, length: int, rank: int, size: int, device: str) -> Data:  # noqa: ARG001
    """A transformer learns which word follows which: random texts of a random Markov chain; Adam."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.softmax(3 * torch.randn(_WORDS, _WORDS, generator=generator), dim=1)
    own = torch.Generator().manual_seed(1 + rank)

    def losses() -> Iterator[Callable[[nn.Module], torch.Tensor]]:
        while True:
            text = [torch.randint(_WORDS, (batch, 1), generator=own)]
            for _ in range(length - 1):
                text.append(torch.multinomial(follows[text[-1][:, 0]], 1, generator=own))
            ids = torch.cat(text, dim=1).to(device)
            yield lambda parallel, ids=ids: parallel(input_ids=ids, labels=ids).loss  # type: ignore[misc]

    return Data(losses())


TASKS: Final[Mapping[str, Task]] = {
    **{name: _random(model) for name, model in MODELS.items()},
    "digits": Task(
        "digits",
        _RECIPE.batch,
        8,
        "scikit-learn",
        functools.partial(digits.build_model, 0),
        _digits,
        lambda parameters: torch.optim.SGD(parameters, lr=_RECIPE.lr, momentum=_RECIPE.momentum),
    ),
    "language": Task(
        "language",
        8,
        _LENGTH,
        "transformers",
        _language_model,
        _language,
        lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    ),
}
"""All by name."""
