"""The examples in docstrings run, one after the other, on two ranks, and give what is known of them."""

from __future__ import annotations

import re
import textwrap

import torch
from harness import run_world
from sources import modules

import collectives

EXAMPLE = re.compile(r"^( +)Example:\n(?P<text>.*?)(?=^ *\"\"\"|^\1\w)", re.MULTILINE | re.DOTALL)

RESULTS = {
    "broadcast": ("tensor", [[1.0, 1.0]] * 2),
    "reduce": ("tensor", [[2.0, 2.0], [1.0, 1.0]]),
    "all_gather_single": ("output", [[0.0, 0.0, 1.0, 1.0]] * 2),
    "scatter": ("output", [[0.0, 0.0], [1.0, 1.0]]),
    "reduce_scatter": ("output", [[2.0, 2.0], [4.0, 4.0, 4.0]]),
    "reduce_scatter_single": ("output", [[0.0, 2.0], [4.0, 6.0]]),
    "all_to_all_single": ("output", [[0.0, 10.0], [1.0, 11.0]]),
    "all_gather_object": ("everyone", [[{"rank": 0}, {"rank": 1}]] * 2),
    "broadcast_object_list": ("objects", [["a", {"b": 1}]] * 2),
    "scatter_object_list": ("mine", [["zero"], ["one"]]),
    "batch_isend_irecv": ("received", [[1.0, 1.0], [0.0, 0.0]]),
}
"""By function: a variable of its example, and its value on each rank."""


def examples() -> list[tuple[str, str]]:
    """Returns the function, or the module, and the code of every example."""
    found = []
    for module, path in modules().items():
        text = path.read_text("utf-8")
        for example in EXAMPLE.finditer(text):
            functions = re.findall(r"^def (\w+)\(", text[: example.start()], re.MULTILINE)
            code = textwrap.dedent(example["text"].partition("::\n")[2]).strip() + "\n"
            name = functions[-1] if functions and module.startswith("collectives.api.") else module
            found.append((name, code))
    return found


def run_examples(rank: int, size: int) -> set[str]:
    checked = set()
    for name, code in examples():
        if "init_process_group(" in code:  # which has its own beginning and end
            continue
        names = {"collectives": collectives, "torch": torch, "rank": rank, "size": size}
        exec(compile(code, f"<example of {name}>", "exec"), names)
        collectives.barrier()
        if name in RESULTS:
            variable, expected = RESULTS[name]
            value = names[variable]
            assert (value.tolist() if isinstance(value, torch.Tensor) else value) == expected[rank], name
            checked.add(name)
    return checked


def test_examples_run() -> None:
    found = examples()
    assert len(found) > 30
    for name, code in found:
        assert compile(code, name, "exec").co_names, f"{name} has an example without code"
    assert run_world(run_examples, 2, isolated=True) == [set(RESULTS)] * 2
