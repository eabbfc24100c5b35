"""Tables of words: lines of cells, of which the first has the titles of the columns."""

from __future__ import annotations

from collections.abc import Sequence

Table = Sequence[Sequence[str]]
"""Lines of as many cells each; titles first."""


def plain_text(table: Table) -> str:
    """Returns a table for a terminal: columns apart by two blanks."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def markdown(table: Table) -> str:
    """Returns a table for a document in Markdown."""
    header, *rows = table
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
