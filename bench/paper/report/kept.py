"""The figures that a folder keeps, and how they were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.bench.paper.cells import Measured
from collectives.bench.paper.figures import FIGURES

__all__ = ["SAME", "KeptFigure", "read_folder"]

SAME = ("cpu", "cores_usable", "torch", "collectives", "gpus")
"""What must not differ among the samples of a file, nor among the files of a report."""


@dataclass(frozen=True, slots=True)
class KeptFigure:
    """A figure in a file.

    Attributes:
        records: its cells.
        environment: machine and versions.
        options: what the command line asked for.
    """

    records: list[Measured]
    environment: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def wrong(self) -> int:
        """Elements of results that were wrong."""
        return sum(record.samples.get("wrong", 0) for record in self.records)

    def command(self, name: str) -> str:
        """Returns the command line that measures the figure.

        Args:
            name: of the figure.
        """
        words = ["collectives bench paper", name]
        for option, value in self.options.items():
            if isinstance(value, (list, tuple)):
                words += [f"--{option} {','.join(map(str, value))}"] if value else []
            elif value is True:
                words.append(f"--{option}")
            elif value not in {None, False} and (option, value) != ("machines", 1):
                words.append(f"--{option} {value:g}" if isinstance(value, float) else f"--{option} {value}")
        return " ".join([*words, "--json DIR"])


def read_folder(folder: Path) -> dict[str, KeptFigure]:
    """Returns the figures that a folder keeps, by name.

    Raises:
        ValueError: there is none, or they were measured on different machines.
        OSError: one cannot be read.
        KeyError: one is no figure.
    """
    found = {}
    for name in FIGURES:
        file = folder / f"{name}.json"
        if file.exists():
            plain = json.loads(file.read_text(encoding="utf-8"))
            records = [Measured(record["cell"], record["samples"]) for record in plain["records"]]
            found[name] = KeptFigure(records, plain["environment"], plain["options"])
    if not found:
        raise ValueError(f"{folder} keeps no figure; measure some with --json {folder}")
    for key in SAME:
        values = {str(kept.environment.get(key)) for kept in found.values()}
        if len(values) > 1:
            raise ValueError(f"the figures in {folder} differ in {key}: {', '.join(sorted(values))}")
    return found
