"""What training is measured with: random weights and data, two models that learn something, no network.

Those of the field are built from the configurations in the package transformers, with its default sizes; the
others need torch alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

PACKAGE = "transformers"

_MODULES = {"scikit-learn": "sklearn"}
"""What packages are imported as, where they have another name."""

VOCABULARY = 30522
"""Words of BERT; GPT-2 has more."""


@dataclass(frozen=True, slots=True)
class Data:
    """What one rank trains on.

    Attributes:
        losses: yields a function for each step, which returns the loss of a model on this rank's share.
        accuracy: returns the part of held-out samples that a model reads right; ``None`` without such.
    """

    losses: Iterator[Callable[[nn.Module], torch.Tensor]]
    accuracy: Callable[[nn.Module], float] | None = None


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Model:
    """One model and its data.

    Attributes:
        batch: samples of a rank in an iteration where the user names no number.
        length: of a sample: width and height of an image, tokens of a text.
        build: returns it with fresh random weights, in training mode.
        package: what it needs besides torch; empty for nothing.
        inputs: returns random keyword arguments of its forward for so many samples of such length, drawn from
            the generator; none of a model that learns something.
        learn: makes a rank's data, see :meth:`data`, of a model that learns something.
        optimizer: the one that it is trained with.
        name: as the command line calls it.
    """

    batch: int
    length: int
    build: Callable[[], nn.Module]
    package: str = ""
    inputs: Callable[[int, int, torch.Generator], dict[str, torch.Tensor]] = lambda *_: {}
    learn: Callable[[int, int, int, str], Data] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    name: str = ""

    @property
    def learns(self) -> bool:
        """Whether its data can be learned."""
        return self.learn is not None

    def data(self, batch: int, rank: int, size: int, device: str) -> Data:
        """Returns what a rank trains on: one random batch again and again where nothing is learned."""
        if self.learn is not None:
            return self.learn(batch, rank, size, device)
        made = self.inputs(batch, self.length, torch.Generator().manual_seed(100 + rank))
        inputs = {name: tensor.to(device) for name, tensor in made.items()}
        return Data(repeat(lambda parallel: loss_of(parallel(**inputs))))


def why_unavailable(package: str) -> str | None:
    """Returns why a model cannot be built that needs a package; ``None`` where it can, or needs none."""
    if package and importlib.util.find_spec(_MODULES.get(package, package)) is None:
        return f"needs {package}, not installed"
    return None


def install_command(*packages: str) -> str:
    """Returns the command that adds packages, as this one wants them; empty for none."""
    known = importlib.metadata.requires("torch-collectives") or []
    wanted = [
        next((one.partition(";")[0].strip() for one in known if one.startswith(package)), package)
        for package in packages
        if package
    ]
    return " ".join(["python -m pip install", *(f"'{one}'" for one in wanted)]) if wanted else ""


def loss_of(output: Any) -> torch.Tensor:
    """Returns a loss that every output tensor takes part in: the sum of their mean squares.

    Args:
        output: a tensor, or a mapping or sequence of tensors.
    """
    return torch.stack([tensor.square().mean() for tensor in _tensors(output)]).sum()


def checksum(model: nn.Module) -> int:
    """Returns a checksum of all parameters, bit for bit."""
    value = 0
    for parameter in model.parameters():
        value = zlib.crc32(parameter.detach().cpu().contiguous().numpy().data.cast("B"), value)
    return value


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif output is not None:
        for value in output.values() if hasattr(output, "values") else output:
            yield from _tensors(value)


def _from_config(kind: str, **sizes: int | Sequence[int]) -> nn.Module:
    package = importlib.import_module(PACKAGE)
    model: nn.Module = getattr(package, f"{kind}Model")(getattr(package, f"{kind}Config")(**sizes))
    return model.train()


def _images(batch: int, size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator)}


def _tokens(batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    shape = (batch, length)
    return {
        "input_ids": torch.randint(VOCABULARY, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }


class _Residual(nn.Module):
    """Two convolutions around which the input goes, too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the input's shape."""
        return torch.relu(x + self.inner(x))


class _Small(nn.Module):
    """A residual network of torch's own layers, with three quarters of its parameters in the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2, padding=1),
            *(_Residual(64) for _ in range(4)),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            *(_Residual(128) for _ in range(2)),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1000))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Returns the scores of a thousand classes."""
        return torch.as_tensor(self.head(self.body(pixel_values)))


def residual_reader() -> nn.Module:
    """Returns a residual network that reads digits from grey images of 8 x 8 pixels or more."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        _Residual(32),
        _Residual(32),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        _Residual(64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).train()


_MINI = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}


def _named(models: Mapping[str, Model]) -> dict[str, Model]:
    return {name: replace(model, name=name) for name, model in models.items()}


def _of_the_field(batch: int, length: int, inputs: Any, kind: str, **sizes: Any) -> Model:
    return Model(batch, length, functools.partial(_from_config, kind, **sizes), PACKAGE, inputs)


MODELS: Final = _named(
    {
        # 23.5 M and 58.1 M parameters without the classifier
        "resnet50": _of_the_field(1, 224, _images, "ResNet"),
        "resnet152": _of_the_field(1, 224, _images, "ResNet", depths=[3, 8, 36, 3]),
        # 109.5 M, 11.2 M and 124.4 M parameters
        "bert-base": _of_the_field(1, 128, _tokens, "Bert"),
        "bert-mini": _of_the_field(4, 64, _tokens, "Bert", **_MINI),
        "gpt2": _of_the_field(1, 128, _tokens, "GPT2", use_cache=False),
        # torch's own layers, 4.1 M parameters
        "small": Model(2, 64, _Small, inputs=_images),
    }
)
"""Models that are only good for their times, by name."""


DIGITS_BATCH = 32
"""Images of each rank in a step where nobody names a number."""

_SEED = 20200828
"""Of the order of the images."""


@dataclass(frozen=True, slots=True)
class Digits:
    """The images as ``[n, 1, 8, 8]`` float32 in 0 to 1, and their digits as int64.

    Attributes:
        train: four fifths of the 1,797 images.
        test: the held-out fifth, with every digit in its share.
    """

    train: TensorDataset
    test: TensorDataset


def load_digits(device: str = "cpu") -> Digits:
    """Returns the images on a type of device, always divided in the same way; reads no network."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, digits = load(return_X_y=True)
    halves = train_test_split(images, digits, test_size=0.2, random_state=0, stratify=digits)
    x = [torch.from_numpy(part).float().div(16).reshape(-1, 1, 8, 8).to(device) for part in halves[:2]]
    y = [torch.from_numpy(part).long().to(device) for part in halves[2:]]
    train, test = (TensorDataset(*both) for both in zip(x, y, strict=True))
    return Digits(train, test)


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


def batches(data: TensorDataset, batch: int, rank: int, size: int) -> Iterator[list[int]]:
    """Yields a rank's share of every step, at most ``batch`` places in ``data``, and does not end.

    Shares of a step are equal.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=size, rank=rank, seed=_SEED)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        order = list(sampler)
        for begin in range(0, len(order), batch):
            yield order[begin : begin + batch]


def digits_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer that networks learn digits with."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_digits(
    model: nn.Module,
    data: TensorDataset,
    shares: Iterable[list[int]],
    after_step: Callable[[int, float], object] | None = None,
) -> None:
    """Trains a model, plain or wrapped for data parallelism: SGD on the mean cross entropy of each share.

    Args:
        model: trained in place.
        data: the images.
        shares: places in ``data`` for each step.
        after_step: called with the number of steps done and the loss.
    """
    images, digits = data.tensors
    optimizer = digits_optimizer(model.parameters())
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


LEARNING_STEPS = 300
"""Steps after which the tasks that learn something have learned it."""


def _digits(batch: int, rank: int, size: int, device: str) -> Data:
    """A convolutional network reads handwritten digits; SGD with momentum."""
    data = load_digits(device)
    images, labels = data.train.tensors

    def losses() -> Iterator[Callable[[nn.Module], torch.Tensor]]:
        for share in batches(data.train, batch, rank, size):
            x, y = images[share], labels[share]
            yield lambda parallel, x=x, y=y: nn.functional.cross_entropy(parallel(x), y)  # type: ignore[misc]

    return Data(losses(), lambda model: accuracy(model, data.test))


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


def _language(batch: int, rank: int, size: int, device: str) -> Data:  # noqa: ARG001
    """A transformer learns which word follows which: random texts of a random Markov chain; Adam."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.softmax(3 * torch.randn(_WORDS, _WORDS, generator=generator), dim=1)
    own = torch.Generator().manual_seed(1 + rank)

    def losses() -> Iterator[Callable[[nn.Module], torch.Tensor]]:
        while True:
            text = [torch.randint(_WORDS, (batch, 1), generator=own)]
            for _ in range(_LENGTH - 1):
                text.append(torch.multinomial(follows[text[-1][:, 0]], 1, generator=own))
            ids = torch.cat(text, dim=1).to(device)
            yield lambda parallel, ids=ids: parallel(input_ids=ids, labels=ids).loss  # type: ignore[misc]

    return Data(losses())


def _of_digits(build: Callable[[], nn.Module]) -> Model:
    return Model(DIGITS_BATCH, 8, build, "scikit-learn", learn=_digits, optimizer=digits_optimizer)


TASKS: Final = MODELS | _named(
    {
        "digits": _of_digits(functools.partial(build_model, 0)),
        "digits-resnet": _of_digits(residual_reader),
        "language": Model(
            8,
            _LENGTH,
            _language_model,
            PACKAGE,
            learn=_language,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        ),
    }
)
"""All models by name: those, and three that learn something."""
