"""Arguments of commands that name files to write, checked before anything is measured."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def output_file(text: str | Path) -> Path:
    """Converts an argument that names a file; makes its folder.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    with _trying(path, path.unlink):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    return path


def output_folder(text: str | Path) -> Path:
    """Converts an argument that names a folder for files, which whoever writes them makes.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    with _trying(path, path.rmdir):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


@contextlib.contextmanager
def _trying(path: Path, undo: Callable[[], object]) -> Iterator[None]:
    """Context that tries to write something; afterwards nothing is left of it."""
    there = os.path.exists(path)  # noqa: PTH110 - false for names that are too long
    try:
        yield
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    if not there:
        with contextlib.suppress(OSError):  # another process of a launcher may have been here
            undo()
