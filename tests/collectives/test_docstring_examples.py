"""The examples in the docstrings of the user functions run as they are."""

from __future__ import annotations

import inspect
import re
import textwrap
from types import FunctionType

import torch
from harness import run_world

import collectives

EXAMPLE = re.compile(r"With 2 ranks::\n\n((?: {8}.*\n|\n)+)")


def examples() -> dict[str, str]:
    """Returns the examples for two ranks by function."""
    found = {}
    for name in collectives.__all__:
        function = getattr(collectives, name)
        if isinstance(function, FunctionType):
            match = EXAMPLE.search((inspect.getdoc(function) or "") + "\n")
            if match is not None:
                found[name] = textwrap.dedent(match.group(1))
    return found


def run_examples(rank: int, size: int) -> None:
    for name, code in examples().items():
        names = {"collectives": collectives, "torch": torch, "rank": rank}
        exec(compile(code, f"<example of {name}>", "exec"), names)
        check = RESULTS.get(name)
        if check is not None:
            variable, expected = check
            value = names[variable]
            assert (value.tolist() if isinstance(value, torch.Tensor) else value) == expected[rank], name


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


def test_examples() -> None:
    assert len(examples()) >= 18
    run_world(run_examples, 2)
