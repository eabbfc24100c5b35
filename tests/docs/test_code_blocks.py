"""The code in README.md and docs/ runs as it stands, and what it names exists.

A Python block begins with ``# FILE, run with: COMMAND``; the blocks of a page lie in one folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
COMMANDS = sorted(
    {
        command
        for page in PAGES
        for form in (r"^collectives ((?:.*\\\n)*.*)$", r"`collectives ([^`]+)`")
        for command in re.findall(form, page.read_text("utf-8"), re.MULTILINE)
        if "..." not in command and command not in {"bench", "conformance"}
    }
)
"""Those of blocks and those within text, but for what stands for several."""


class Block(NamedTuple):
    page: Path
    file: str
    command: str


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Returns the Python blocks of a page: the line that heads each, and the whole."""
    texts = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [(text.partition("\n")[0], text) for text in texts]


def parsed(page: Path, head: str) -> Block:
    match = re.fullmatch(r"# (\S+\.py), run with: (.+)", head)
    assert match, f"{page.name}: a block begins with {head!r} instead of '# FILE, run with: COMMAND'"
    return Block(page, *match.groups())


BLOCKS = [parsed(page, head) for page in PAGES for head, _ in blocks_of(page)]


def test_readme_shows_how_to_train_and_how_to_compose_groups():
    assert [block.file for block in BLOCKS if block.page.name == "README.md"] == ["train.py", "lanes.py"]


@pytest.mark.full
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page.stem}-{block.file}")
def test_block_runs_as_its_first_line_says(block, tmp_path, run_program):
    folder = tmp_path / "page"
    folder.mkdir()
    for head, text in blocks_of(block.page):
        (folder / parsed(block.page, head).file).write_text(text, encoding="utf-8")
    run_program(block.command, folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command, monkeypatch):
    """Reads the arguments as the command would, and stops before it does anything."""
    monkeypatch.setattr("collectives.cli._takes_part", lambda arguments: False)
    words = command.replace("\\\n", " ").partition("#")[0].partition("&&")[0]
    assert main(words.split()) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_files_that_contributors_are_sent_to_exist():
    text = (ROOT / "docs/internals/contributing.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/-]+/[\w-]+\.(?:py|hpp|cpp|inl))`", text))
    assert "collectives/api/init_and_destroy.py" in named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
