"""Agreement of the ranks on what they must have in common: the model, before any tensor of it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives import GatherOptions, ProcessGroup
from collectives.ddp.errors import ModelMismatchError

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

    Args:
        group: the ranks.
        rows: this rank's description, from :func:`describe_model`.
        device: device of tensors that the group takes.
        model: the model in words.

    Raises:
        ModelMismatchError: ranks differ; raised on all of them, naming the parameters and the ranks.
    """
    lines = differences(group, rows, device)
    if lines:
        head = f"[rank {group.rank()}] {model} over {group.describe()}: ranks do not agree on the model:"
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ModelMismatchError("\n".join([head, *lines[:_SHOWN], *more]))


def differences(group: ProcessGroup, rows: Sequence[Row], device: torch.device) -> list[str]:
    """Returns a line for each thing that some ranks describe differently, lack, or have at another place.

    Called by all of them; blocks. One exchange of 16 bytes where they agree; where not, others tell all ranks
    what differs.

    Args:
        group: the ranks.
        rows: this rank's description.
        device: device of tensors that the group takes.
    """
    text = json.dumps(rows).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    mine = torch.tensor([len(text), digest], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * 2, dtype=torch.int64, device=device)
    group.all_gather_single(everyone, mine).wait()
    digests = group.to_host(everyone).view(-1, 2)
    if bool((digests == digests[0]).all()):
        return []
    models = [json.loads(rank) for rank in gather_bytes(group, text, device)]
    tables = [dict(rows) for rows in models]
    lines = []
    for name in dict.fromkeys(name for table in tables for name in table):
        lines += _line(name, [table.get(name, "absent") for table in tables])
    if not lines:
        for place, there in enumerate(zip(*models, strict=True)):
            lines += _line(f"place {place} in the order of registration", [name for name, _ in there])
    return lines


def _line(what: str, words_of: Sequence[str]) -> list[str]:
    """Returns a line on something that ranks describe in different words, and none where they do not."""
    ranks: dict[str, list[str]] = {}
    for rank, words in enumerate(words_of):
        ranks.setdefault(words, []).append(str(rank))
    parts = [f"{words} on rank{'s' * (len(on) > 1)} {', '.join(on)}" for words, on in ranks.items()]
    return [f"  {what}: {'; '.join(parts)}"] if len(parts) > 1 else []


def gather_records(group: ProcessGroup, record: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Returns the records of all ranks; called by all of them, blocks.

    Args:
        group: the ranks.
        record: this rank's, of values that JSON has; the same names on all ranks.
        device: device of tensors that the group takes.
    """
    return [json.loads(text) for text in gather_bytes(group, json.dumps(record).encode(), device)]


def gather_bytes(
    group: ProcessGroup, mine: bytes, device: torch.device, to: int | None = None
) -> list[bytes]:
    """Returns what all ranks have, by rank; called by all of them, blocks.

    Args:
        group: the ranks.
        mine: what this one has, of any length.
        device: device of tensors that the group takes.
        to: rank that gets all, while others get nothing; ``None`` for all ranks.
    """
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    group.all_gather_single(lengths, torch.tensor([len(mine)], device=device)).wait()
    counts = group.to_host(lengths).tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = padded.new_empty(group.size() if to in {None, group.rank()} else 0, padded.numel())
    if to is None:
        group.all_gather_single(everyone, padded).wait()
    else:
        group.gather(list(everyone), [padded], GatherOptions(rootRank=to)).wait()
    rows = zip(everyone, counts, strict=False)
    return [group.to_host(row)[:count].numpy().tobytes() for row, count in rows]
