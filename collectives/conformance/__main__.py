"""``collectives conformance --backend NAME``: tries what backends of torch can do.

Prints for each function the data types that are ``ok`` (right values for every count and root),
``unsupported`` (all ranks raised at the first call, at once, and no failure of group or device), ``wrong``
(other values, a rank that died, or raised when others did not) and ``hang``. Behind a data type stands how
many reductions are offered of those that are defined, where some are not. Ends with status 1 where something
is wrong or hangs. ``--markdown`` prints one short table of all the backends, with numbers of data types.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from collectives.cli.output_files import output_file
from collectives.cli.tables import Table, markdown
from collectives.conformance.examination import Answer, Question, Status, examine, questions
from collectives.conformance.functions import MOVING, PLAIN, REDUCING

_SHORT = {
    Status.OK: "right",
    Status.UNSUPPORTED: "refused",
    Status.WRONG: "**wrong**",
    Status.HANG: "**hang**",
}


def table(answers: Mapping[Question, Answer]) -> list[str]:
    """Returns the lines of the table."""
    by_function: dict[str, dict[Question, Answer]] = defaultdict(dict)
    for question, answer in answers.items():
        by_function[question.title][question] = answer
    lines = []
    for function, some in by_function.items():
        title = function
        for status in Status:
            cells = [_cell(question, answer) for question, answer in some.items() if answer.status is status]
            if cells:
                every = len(cells) == len(some) and len(some) > 1 and not any("(" in cell for cell in cells)
                said = f"every data type ({len(some)})" if every else " ".join(cells)
                lines.append(f"{title:32}{status.value:13}{said}")
                title = ""
    return lines


def short_table(found: Mapping[str, Mapping[Question, Answer]]) -> Table:
    """Returns a table of the numbers of data types, by function and backend.

    Args:
        found: answers by backend, of the same questions.
    """
    titles = dict.fromkeys(question.title for answers in found.values() for question in answers)
    lines = [["function", *found]]
    for title in titles:
        lines.append([title])
        for answers in found.values():
            some = {q.dtype: answer.status for q, answer in answers.items() if q.title == title}
            counts = {status: [*some.values()].count(status) for status in Status}
            words = (_SHORT[v] if None in some else f"{n} {_SHORT[v]}" for v, n in counts.items() if n)
            lines[-1].append(", ".join(words))
    return lines


def _cell(question: Question, answer: Answer) -> str:
    if question.dtype is None:
        return "-"
    name = str(question.dtype).removeprefix("torch.")
    some = answer.status is Status.OK and answer.offered < answer.asked
    return f"{name}({answer.offered}/{answer.asked})" if some else name


def _data_type(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r} is no data type of torch")
    return dtype


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; give more than 0 seconds")
    return seconds


def _why(backend: str, error: RuntimeError) -> str:
    """Returns the report of a backend that cannot make a group."""
    known = ", ".join(sorted(n for n in torch_dist.Backend.backend_list if ":" not in n and n != "undefined"))
    if torch_dist.is_backend_available(backend):
        return str(error)
    return f"{error}\ntorch knows {known}; a module that registers another is named with --import"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the program's options to a parser."""
    known = [*PLAIN, *REDUCING, *MOVING]
    parser.add_argument(
        "--backend", dest="backends", action="append", required=True, metavar="NAME",
        help="its name in torch.distributed; may be given more than once",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)"
    )
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="module that registers the backend",
    )  # fmt: skip
    parser.add_argument(
        "--function", dest="functions", action="append", choices=known, metavar="NAME",
        help=f"only this function; may be given more than once: {'; '.join(known)}",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", dest="dtypes", action="append", type=_data_type, metavar="NAME", help="only this data type"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=20.0, metavar="S", help="seconds after which a function hangs"
    )
    parser.add_argument("--details", action="store_true", help="also print why something is not ok")
    parser.add_argument("--markdown", action="store_true", help="print one short table of all backends")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all answers into FILE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command as ``python -m collectives.conformance``; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Examines the backends as the command line asks; returns 1 where something is wrong or hangs, else 0."""
    if options.ranks < 2:
        sys.exit("--ranks must be 2 or more: one rank has nobody to agree with")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "--device cuda: torch finds no CUDA device here; leave the option out for tensors of the CPU"
        )
    asked = questions(options.dtypes, options.functions)
    imports = ["collectives", *options.imports]
    found: dict[str, dict[Question, Answer]] = {}
    for backend in options.backends:
        try:
            found[backend] = examine(
                backend, options.ranks, asked, options.timeout, imports, device=options.device
            )
        except RuntimeError as error:
            sys.exit(_why(backend, error))
        if not options.markdown:
            print(f"# {backend}, {options.ranks} ranks, torch {torch.__version__}")
            print("\n".join(table(found[backend])))
        if options.details:
            for question, answer in found[backend].items():
                for what, why in answer.details.items():
                    print(f"# {backend}: {question.title} {_cell(question, answer)} {what}: {why}")
    if options.markdown:
        print(markdown(short_table(found)))
    if options.json is not None:
        options.json.write_text(json.dumps(_records(found), indent=1))
    answers = [answer for answers in found.values() for answer in answers.values()]
    return int(any(answer.status in {Status.WRONG, Status.HANG} for answer in answers))


def _records(found: Mapping[str, Mapping[Question, Answer]]) -> list[dict[str, Any]]:
    return [
        {
            "backend": backend,
            "function": question.title,
            "dtype": None if question.dtype is None else str(question.dtype),
            "verdict": answer.status.value,
            "offered": answer.offered,
            "asked": answer.asked,
            "details": answer.details,
        }
        for backend, answers in found.items()
        for question, answer in answers.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
