"""Judges of figure 6: what an iteration consists of, and what overlap saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.bench.paper.cells import Measured
from collectives.bench.paper.report.findings import (
    Figures,
    Finding,
    Judge,
    backend_of,
    communication_share,
    gain,
    is_faster,
    medians,
    parameters_of,
    phases,
    saved_in_words,
    where,
)

__all__ = ["backward_largest", "overlap_saves"]


def overlap_saves(device: str) -> Judge:
    """Returns the judge of what overlap saves with tensors on a device."""

    def judge(figures: Figures) -> Iterator[Finding]:
        for record in figures["fig6"]:
            if record.cell["device"] == device:
                here = saved_in_words(gain(medians(record), "overlap", "no overlap"))
                yield Finding(
                    where(record), here, is_faster(record, "overlap", "no overlap"), _what_changes(record)
                )

    return judge


def _what_changes(record: Measured) -> str:
    """Returns what overlap does to communication that is waited for, and to backward beside it."""
    names = [series["name"] for series in record.cell["series"]]
    apart, beside = (phases(record, names.index(name)) for name in ("no overlap", "overlap"))
    changes = {"waiting for communication": "communication", "backward beside it": "backward"}
    return ", ".join(
        f"{what} takes {apart[phase] / 1e6:.0f} ms without overlap and {beside[phase] / 1e6:.0f} ms with it"
        for what, phase in changes.items()
    )


def backward_largest(figures: Figures) -> Iterator[Finding]:
    """Looks at backward and communication without overlap, then at how both depend on the model."""
    by_backend: dict[str, list[Measured]] = {}
    for record in figures["fig6"]:
        by_backend.setdefault(backend_of(record), []).append(record)
        times = phases(record)
        backward = times["backward"] + times["communication"]
        largest = backward > max(times["forward"], times["step"])
        here = f"backward with communication is {backward / times['iteration']:.0%} of an iteration"
        yield Finding(f"{where(record)}: largest step", here, largest)
        share = times["communication"] / backward
        because = f"the ranks compute for {times['backward'] / 1e6:.0f} ms of {backward / 1e6:.0f} ms"
        yield Finding(
            f"{where(record)}: more than half", f"communication is {share:.0%} of it", share > 0.5, because
        )
    for backend, records in by_backend.items():
        if len({parameters_of(record) for record in records}) > 1:
            yield from _by_model(backend, sorted(records, key=parameters_of))


def _by_model(backend: str, records: Sequence[Measured]) -> Iterator[Finding]:
    """Yields what grows from the smallest model to the largest one, and where overlap saves most."""
    models = [record.cell["model"] for record in records]
    shares = [communication_share(record) for record in records]
    here = ", ".join(f"{model} {share:.0%}" for model, share in zip(models, shares, strict=True))
    grows = shares[-1] > shares[0]
    yield Finding(f"{backend}: grows with the model", here, grows, "computation grows more")
    balances, gains = [], []
    for record in records:
        times = phases(record)
        ratio = times["communication"] / times["backward"]
        balances.append(min(ratio, 1 / ratio) if ratio else 0.0)
        gains.append(gain(medians(record), "overlap", "no overlap"))
    most, nearest = gains.index(max(gains)), balances.index(max(balances))
    here = f"overlap saves most with {models[most]}, {models[nearest]} is nearest to balance"
    shown = zip(models, balances, gains, strict=True)
    because = "; ".join(f"{model}: balance {balance:.2f}, {saved:.0%}" for model, balance, saved in shown)
    yield Finding(f"{backend}: most where balanced", here, most == nearest, because)
