"""The models that training is measured with: random weights, no files and no network.

Those of the field are built from the configurations in the package transformers, with its default sizes; the
others need torch alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Model", "checksum", "install_command", "loss_of", "residual_reader", "why_unavailable"]

PACKAGE = "transformers"

_MODULES = {"scikit-learn": "sklearn"}
"""What packages are imported as, where they have another name."""

VOCABULARY = 30522
"""Words of BERT; GPT-2 has more."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        name: as the command line calls it.
        about: what it is.
        batch: samples of a rank in an iteration where the user names no number.
        length: of a sample where the user names none: width and height of an image, tokens of a text,
            rows of a table.
        build: returns it with fresh random weights, in training mode.
        inputs: returns random keyword arguments of its forward for so many samples of such length, drawn from
            the generator.
        package: the package that it comes from; empty where torch is enough.
    """

    name: str
    about: str
    batch: int
    length: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], dict[str, torch.Tensor]]
    package: str = ""


def why_unavailable(package: str) -> str | None:
    """Returns why a model cannot be built that needs a package; ``None`` where it can, or needs none."""
    if package and importlib.util.find_spec(_MODULES.get(package, package)) is None:
        return f"needs {package}, not installed"
    return None


def install_command(package: str) -> str:
    """Returns the command that adds a package that a model needs; empty for none."""
    if not package:
        return ""
    wanted = [
        requirement.partition(";")[0].strip()
        for requirement in importlib.metadata.requires("torch-collectives") or []
        if requirement.startswith(package)
    ]
    return f"python -m pip install '{(wanted or [package])[0]}'"


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


def _small() -> nn.Module:
    return _Small().train()


class _Spare(_Small):
    """The same with one more layer behind the others, which forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1000, 10)


def _spare() -> nn.Module:
    return _Spare().train()


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


DEPTH = 500
WIDTH = 64


class _Layers(nn.Module):
    """Many small layers, each of which adds a little to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the input's shape."""
        for layer in self.layers:
            rows = rows + layer(rows) / DEPTH
        return rows


def _rows(batch: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"rows": torch.randn(batch, length, WIDTH, generator=generator)}


_MINI = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}

MODELS = {
    model.name: model
    for model in (
        Model(
            "resnet50",
            "ResNet-50 without its classifier, 23.5 M parameters",
            1,
            224,
            functools.partial(_from_config, "ResNet"),
            _images,
            PACKAGE,
        ),
        Model(
            "resnet152",
            "ResNet-152 without its classifier, 58.1 M parameters",
            1,
            224,
            functools.partial(_from_config, "ResNet", depths=[3, 8, 36, 3]),
            _images,
            PACKAGE,
        ),
        Model(
            "bert-base",
            "BERT-base, 109.5 M parameters",
            1,
            128,
            functools.partial(_from_config, "Bert"),
            _tokens,
            PACKAGE,
        ),
        Model(
            "bert-mini",
            "BERT of 4 layers of width 256, 11.2 M parameters",
            4,
            64,
            functools.partial(_from_config, "Bert", **_MINI),
            _tokens,
            PACKAGE,
        ),
        Model(
            "gpt2",
            "GPT-2 of 12 layers of width 768, 124.4 M parameters",
            1,
            128,
            functools.partial(_from_config, "GPT2", use_cache=False),
            _tokens,
            PACKAGE,
        ),
        Model(
            "small",
            "a residual network of torch's own layers, 4.1 M parameters",
            2,
            64,
            _small,
            _images,
        ),
        Model(
            "spare",
            "small with a layer that is not used; needs peers that look for unused parameters",
            2,
            64,
            _spare,
            _images,
        ),
        Model(
            "layers500",
            "500 linear layers of width 64, 2.1 M parameters in 1000 tensors",
            4,
            64,
            lambda: _Layers().train(),
            _rows,
        ),
    )
}
"""All models by name."""
