"""Agreement of the ranks on what they must have in common: the model, before any tensor of it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives import ProcessGroup
from collectives.ddp.errors import ModelMismatchError

__all__ = ["describe_model", "gather_records", "tensor_in_words", "verify_agreement"]

Row = tuple[str, str]
"""Something that must be equal on all ranks: its name and its description."""

_SHOWN = 10
"""Number of differences that a message lists."""


def describe_model(
    parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], options: Mapping[str, object]
) -> list[Row]:
    """Returns what must be equal on all ranks, in order.

    Args:
        parameters: parameters by name, in order of registration.
        buffers: buffers by name, in order of registration.
        options: options of DistributedDataParallel that decide what is sent.
    """
    rows: list[Row] = [("option " + name, str(value)) for name, value in options.items()]
    for name, parameter in parameters.items():
        words = tensor_in_words(parameter)
        rows.append(("parameter " + name, words + ("" if parameter.requires_grad else " frozen")))
    rows += [("buffer " + name, tensor_in_words(buffer)) for name, buffer in buffers.items()]
    return rows


def tensor_in_words(tensor: torch.Tensor) -> str:
    """Returns data type, shape and, where they are not the usual ones, layout and strides of a tensor."""
    words = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{words} {tensor.layout}"
    return words if tensor.is_contiguous() else f"{words} strides {list(tensor.stride())}"


def verify_agreement(group: ProcessGroup, rows: Sequence[Row], device: torch.device, model: str) -> None:
    """Checks that all ranks describe the same model; called by all of them. Blocks.

    One exchange of 16 bytes where they agree; where not, others tell all ranks what differs.

    Args:
        group: the ranks.
        rows: this rank's description, from :func:`describe_model`.
        device: device of tensors that the group takes.
        model: the model in words.

    Raises:
        ModelMismatchError: ranks differ; raised on all of them, naming the parameters and the ranks.
    """
    text = json.dumps(rows).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    mine = torch.tensor([len(text), digest], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * 2, dtype=torch.int64, device=device)
    group.all_gather_single(everyone, mine).wait()
    digests = group.to_host(everyone).view(-1, 2)
    if bool((digests == digests[0]).all()):
        return
    models = [
        [(name, words) for name, words in json.loads(rank)] for rank in _gather_texts(group, text, device)
    ]
    lines = _differences(models)
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise ModelMismatchError(
        "\n".join(
            [
                f"[rank {group.rank()}] {model} over {group.describe()}: ranks do not agree on the model:",
                *lines[:_SHOWN],
                *more,
            ]
        )
    )


def _differences(models: Sequence[Sequence[Row]]) -> list[str]:
    """Returns a line for each name that some ranks describe differently, lack, or have at another place."""
    tables = [dict(rows) for rows in models]
    names = list(dict.fromkeys(name for table in tables for name in table))
    lines = []
    for name in names:
        by_words: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            by_words.setdefault(table.get(name, "absent"), []).append(rank)
        if len(by_words) > 1:
            lines.append(f"  {name}: {_by_rank(by_words)}")
    if not lines:
        for place, rows in enumerate(zip(*models, strict=True)):
            by_words = {}
            for rank, row in enumerate(rows):
                by_words.setdefault(row[0], []).append(rank)
            if len(by_words) > 1:
                lines.append(f"  place {place} in the order of registration: {_by_rank(by_words)}")
    return lines


def _by_rank(by_words: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(
        f"{words} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for words, ranks in by_words.items()
    )


def gather_records(group: ProcessGroup, record: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Returns the records of all ranks; called by all of them, blocks.

    Args:
        group: the ranks.
        record: this rank's, of values that JSON has; the same names on all ranks.
        device: device of tensors that the group takes.
    """
    return [json.loads(text) for text in _gather_texts(group, json.dumps(record).encode(), device)]


def _gather_texts(group: ProcessGroup, text: bytes, device: torch.device) -> list[bytes]:
    """Returns the texts of all ranks, padded by blanks."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        everyone = mine.new_empty(group.size() * mine.numel(), device=device)
        group.all_gather_single(everyone, mine.to(device)).wait()
        return group.to_host(everyone).view(group.size(), -1)

    longest = int(gather(torch.tensor([len(text)])).max())
    rows = gather(torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]
