"""The figures: the cells that each consists of, given what the user asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from collectives.bench.comparison.peers import TORCH
from collectives.bench.models import MODELS
from collectives.bench.paper.cells import AllReduceSweep, Cell, Iterations, Losses, ReadyGradients, Series

COUNTS = (
    10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000,
    20_000_000,
)  # fmt: skip
"""Parameters of an all-reduce of figure 2, and all of them together:"""
PARAMETERS = 60_000_000
QUICK_COUNTS = (10_000, 100_000, 500_000, 2_000_000)
QUICK_PARAMETERS = 6_000_000

BUCKETS_MB = (0.0, 5.0, 10.0, 25.0, 50.0)
QUICK_LENGTHS = {"small": 32, "bert-mini": 16}
"""Pixels or tokens of the one sample of an iteration."""
CPU_LENGTHS = {"resnet50": 64, "resnet152": 64, "bert-base": 16}
"""Those on CPUs: on the paper's GPUs, too, computation took no longer than communication by far."""

INTERVALS = (1, 2, 4, 8)
LANES = (1, 3, 5)

RATES = {"a": (0.02, 8), "b": (0.06, 256)}
"""Learning rates and batches of figures 11(a) and 11(b)."""
LOSS_ITERATIONS = 400
QUICK_LOSS_ITERATIONS = 16


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for.

    Attributes:
        device: type of the device.
        backends: names of groups, those of torch as ``torch:NAME``.
        models: names of models that are trained.
        ready_model: name of the model whose gradients figure 2 looks at.
        ranks: numbers of ranks, ascending; at least 2.
        main_ranks: that of them for figures that have one number.
        batch: samples of each rank in an iteration; ``None`` for each model's own.
        quick: whether few sizes and iterations are enough.
        images: file of images for figure 11; empty for the digits of scikit-learn.
        optima_mb: the bucket size by backend from which figure 2 gains no more, where that was measured.
        lengths: of a sample, by model, in the place of the usual one.
        loss_iterations: of figure 11; ``None`` for 400, or 16 of a quick run.
    """

    device: str
    backends: tuple[str, ...]
    models: tuple[str, ...]
    ready_model: str
    ranks: tuple[int, ...]
    main_ranks: int
    batch: int | None = None
    quick: bool = False
    images: str = ""
    optima_mb: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    loss_iterations: int | None = None

    @property
    def own_backends(self) -> tuple[str, ...]:
        """Those of this package."""
        return tuple(name for name in self.backends if not name.startswith(TORCH))

    def shape(self, model: str) -> tuple[int, int]:
        """Returns the batch and the length of a model's samples."""
        quick = self.quick and model in QUICK_LENGTHS
        usual = QUICK_LENGTHS if quick else CPU_LENGTHS if self.device == "cpu" else {}
        length = self.lengths.get(model) or usual.get(model, MODELS[model].length)
        return self.batch or (1 if quick else MODELS[model].batch), length


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure.

    Attributes:
        title: what it shows.
        cells: returns what it consists of.
    """

    title: str
    cells: Callable[[Request], Sequence[Cell]]


def _fig2(request: Request) -> list[Cell]:
    counts, parameters = (QUICK_COUNTS, QUICK_PARAMETERS) if request.quick else (COUNTS, PARAMETERS)
    letters = ("(a)", "(c)") if request.device == "cuda" else ("(b)", "(d)")
    batch, length = request.shape(request.ready_model)
    sweeps = [
        AllReduceSweep(f"{letters[0]} {name}", request.main_ranks, request.device, name, parameters, counts)
        for name in request.backends
    ]
    ready = ReadyGradients(
        f"{letters[1]} {request.ready_model}", 1, request.device, request.ready_model, batch, length
    )
    return [*sweeps, ready]


def _training(
    request: Request, ranks: int, series: Callable[[str], Sequence[Series]], backends: Sequence[str]
) -> Iterator[Cell]:
    """Yields a cell for each model and backend, which are a panel."""
    for model in request.models:
        for name in backends:
            yield Iterations(
                f"{model}, {name}",
                ranks,
                request.device,
                model,
                *request.shape(model),
                tuple(series(name)),
            )


def _fig6(request: Request) -> list[Cell]:
    def series(name: str) -> list[Series]:
        return [
            Series("no overlap", name, "after backward"),
            Series("overlap", name, "ours"),
            Series("all-reduce a parameter", name, "per parameter"),
            Series("parameter averaging", name, "averaging"),
        ]

    return list(_training(request, request.main_ranks, series, request.own_backends))


def _buckets(request: Request, ranks: int) -> list[Cell]:
    def series(name: str) -> list[Series]:
        sizes = dict.fromkeys([*BUCKETS_MB, request.optima_mb.get(name, BUCKETS_MB[-1])])
        return [Series(f"{size:g} MB", name, _wrapper(name), size) for size in sorted(sizes)]

    return list(_training(request, ranks, series, request.backends))


def _fig9(request: Request) -> list[Cell]:
    local = [Series("local", "", "local")]
    cells = [
        Iterations(model, 1, request.device, model, *request.shape(model), tuple(local))
        for model in request.models
    ]
    for ranks in request.ranks:
        cells += _training(  # type: ignore[arg-type]
            request, ranks, lambda name: [Series(name, name, _wrapper(name))], request.backends
        )
    return [*cells]


def _fig10(request: Request) -> list[Cell]:
    def series(name: str) -> list[Series]:
        return [Series(f"every {n}", name, _wrapper(name), interval=n) for n in INTERVALS]

    return [cell for ranks in request.ranks for cell in _training(request, ranks, series, request.backends)]


def _fig11(request: Request) -> list[Cell]:
    usual = QUICK_LOSS_ITERATIONS if request.quick else LOSS_ITERATIONS
    iterations = request.loss_iterations or usual
    return [
        Losses(
            f"({letter}) learning rate {lr:g}, batch {batch}", request.main_ranks, request.device, name,
            request.images, batch, lr, interval, iterations,
        )
        for name in request.own_backends[:1]
        for letter, (lr, batch) in RATES.items()
        for interval in INTERVALS
    ]  # fmt: skip


def _fig12(request: Request) -> list[Cell]:
    def series(name: str) -> list[Series]:
        return [Series(f"rr{lanes}", f"round_robin:{lanes}:{name}", "ours") for lanes in LANES]

    return [
        cell for ranks in request.ranks for cell in _training(request, ranks, series, request.own_backends)
    ]


def _wrapper(name: str) -> str:
    return "torch" if name.startswith(TORCH) else "ours"


FIGURES: Mapping[str, Figure] = {
    "fig2": Figure("communication and computation", _fig2),
    "fig6": Figure("latency breakdown of an iteration", _fig6),
    "fig7": Figure(
        "latency of an iteration by bucket size", lambda request: _buckets(request, request.ranks[0])
    ),
    "fig8": Figure(
        "latency of an iteration by bucket size, more ranks",
        lambda request: _buckets(request, request.ranks[-1]),
    ),
    "fig9": Figure("scalability", _fig9),
    "fig10": Figure("skipped synchronisations", _fig10),
    "fig11": Figure("loss with skipped synchronisations", _fig11),
    "fig12": Figure("round-robin groups", _fig12),
}
"""All that are measured, by name."""
