"""Iterations on more ranks than there are here (figure 9): measured computation, predicted communication."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from collectives.bench.core.namespaces import bytes_a_second
from collectives.bench.cost_model.algorithms import host_algorithm
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.predictions import predict, scales_up_to
from collectives.bench.paper.cells import Measured
from collectives.bench.paper.report.kept import KeptFigure

__all__ = ["MOST_RANKS", "Predicted", "predicted_s", "predicted_scales", "predictions", "read_parameters"]

MOST_RANKS = 256
"""Ranks of the paper's largest run."""

DEFAULT_BUCKET_MB = 25.0

BYTES = 4
"""Of a parameter."""

FIRST_CAP_BYTES = 1 << 20
"""Size at which the wrapper's first bucket is full."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """An iteration that was not measured.

    Attributes:
        panel: where it is drawn.
        ranks: number of ranks.
        seconds: how long the cost model says it takes.
        network: what that takes for the network, in words.
    """

    panel: str
    ranks: int
    seconds: float
    network: str


def read_parameters(file: Path) -> Parameters:
    """Returns the parameters that ``collectives bench model --json FILE`` predicted with.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file.
    """
    plain = json.loads(file.read_text(encoding="utf-8"))
    given = plain.get("predicted_for") if isinstance(plain, dict) else None
    known = {field.name for field in fields(Parameters)}
    if not isinstance(given, dict) or set(given) - known:
        raise ValueError(f"{file} was not written by 'collectives bench model --json'")
    return Parameters(**given)


def predicted_scales(beyond: int, ranks_per_machine: int) -> list[Scale]:
    """Returns the scales with more ranks than so many, in powers of two up to those of the paper."""
    return [scale for scale in scales_up_to(MOST_RANKS, ranks_per_machine) if scale.ranks > beyond]


def predictions(figure: KeptFigure, parameters: Parameters | None) -> list[Predicted]:
    """Returns iterations on more ranks than were measured, where one rank by itself was; none of GPUs.

    Args:
        figure: figure 9.
        parameters: of the cost model; ``None`` for those of a usual network, or of the measured links.
    """
    if figure.options["device"] != "cpu":
        return []
    found = []
    records, machines, link = figure.records, figure.options["machines"], figure.options["link"]
    local: Mapping[str, Measured] = {
        record.cell["model"]: record for record in records if record.cell["ranks"] == 1
    }
    most = max((record.cell["ranks"] for record in records), default=1)
    per_machine = figure.environment["cores_usable"] if machines == 1 else max(1, most // machines)
    if parameters is None:
        parameters = Parameters(cores=per_machine)
        if link is not None:
            parameters = replace(parameters, link_us_per_byte=1e6 / bytes_a_second(link))
    network = f"{8e-3 / parameters.link_us_per_byte:.3g} Gb/s, {parameters.latency_us:.3g} us"
    panels = {
        record.cell["panel"]: record for record in records if record.cell["model"] in local
        and record.cell["ranks"] > 1
    }  # fmt: skip
    for panel, record in panels.items():
        one = local[record.cell["model"]]
        backend = record.cell["series"][0]["group"]
        for scale in predicted_scales(most, per_machine):
            seconds = predicted_s(
                one.samples["series"][0], one.samples["sizes"], DEFAULT_BUCKET_MB, scale, parameters,
                host=backend == "host",
            )  # fmt: skip
            found.append(Predicted(panel, scale.ranks, seconds, network))
    return found


def predicted_s(
    local: Mapping[str, Sequence[int]],
    sizes: Sequence[int],
    bucket_mb: float,
    scale: Scale,
    parameters: Parameters,
    *,
    host: bool,
) -> float:
    """Returns the seconds of an iteration on so many ranks.

    The computation is that of one rank by itself. Gradients are ready at equal distances over the backward
    pass, from the last parameter to the first, fill buckets in that order, and a bucket is sent as soon as
    it is full and the one before it is done. Only what is left when backward is over costs time.

    Args:
        local: nanoseconds of iterations on one rank, by phase.
        sizes: elements of each parameter, in the order of registration.
        bucket_mb: size of a bucket in MiB.
        scale: where the ranks are.
        parameters: of the cost model.
        host: whether the host backend reduces; else a ring does.
    """
    forward, backward, step = (median(local[name]) / 1e9 for name in ("forward", "backward", "step"))
    free = 0.0
    for ready, size_bytes in _buckets(sizes, bucket_mb):
        algorithm = host_algorithm("all_reduce", size_bytes, scale) if host else "ring"
        us = predict(algorithm, size_bytes, scale, parameters).time_us
        free = max(free, ready * backward) + us / 1e6
    return forward + max(backward, free) + step


def _buckets(sizes: Sequence[int], bucket_mb: float) -> Iterator[tuple[float, int]]:
    """Yields, bucket by bucket, the part of the backward pass after which it is full, and its bytes."""
    cap = min(FIRST_CAP_BYTES, bucket_mb * (1 << 20))
    filled = 0
    for number, size in enumerate(reversed(sizes), start=1):
        filled += size * BYTES
        if filled >= cap or number == len(sizes):
            yield number / len(sizes), filled
            filled, cap = 0, bucket_mb * (1 << 20)
