"""docs/paper.md is what the command makes of the samples beside it."""

from __future__ import annotations

from pathlib import Path

from collectives.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_made_of_the_samples(tmp_path):
    page = tmp_path / "paper.md"
    assert main(["bench", "paper", "report", "--json", str(DOCS / "paper"), "--page", str(page)]) == 0
    made, kept = page.read_text("utf-8"), (DOCS / "paper.md").read_text("utf-8")
    assert made == kept, "make it anew: collectives bench paper report --json docs/paper --page docs/paper.md"


def test_the_samples_are_small():
    assert sum(file.stat().st_size for file in (DOCS / "paper").glob("*.json")) < 1_000_000
