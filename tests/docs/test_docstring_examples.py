"""The examples in docstrings run, one after the other, on two ranks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from sources import modules

pytestmark = pytest.mark.usefixtures("preloaded_python")

BEGIN = """
import torch

import collectives

collectives.init_process_group("host")
rank, size = collectives.get_rank(), collectives.get_world_size()
"""


EXAMPLE = re.compile(r"^( +)Example:\n(?P<text>.*?)(?=^ *\"\"\"|^\1\w)", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    """Returns the module and the code of every example."""
    return [
        (module, textwrap.dedent(example["text"].partition("::\n")[2]).strip() + "\n")
        for module, path in modules().items()
        for example in EXAMPLE.finditer(path.read_text("utf-8"))
    ]


EXAMPLES = examples()


def test_examples_are_python() -> None:
    assert len(EXAMPLES) > 30
    for module, code in EXAMPLES:
        assert compile(code, module, "exec").co_names, f"{module} has an example without code"


@pytest.mark.full
def test_examples_run(tmp_path: Path, run_program: Callable[[str, Path], str]) -> None:
    each = "".join(
        f"def example_{number}():\n{textwrap.indent(code, '    ')}\n\nexample_{number}()\n"
        "collectives.barrier()\n"
        for number, (_, code) in enumerate(EXAMPLES)
        if "init_process_group(" not in code  # which has its own beginning and end
    )
    (tmp_path / "examples.py").write_text(f"{BEGIN}{each}collectives.destroy_process_group()\n", "utf-8")
    run_program("torchrun --standalone --nproc-per-node 2 examples.py", tmp_path)
