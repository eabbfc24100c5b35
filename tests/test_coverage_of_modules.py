"""Each module of the package is named by a test.

A module is named by the test file of its own name in the mirrored folder (``ddp/reducer/bucket_order.py`` by
``tests/ddp/reducer/test_bucket_order.py``), by a test that imports it, or in ``TESTED_THROUGH``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sources import ROOT, modules

TESTS = ROOT / "tests"

TESTED_THROUGH = {
    "backends/_shared": (
        "conformance",
        "parts of every group",
        "bounded_calls operation tensor_memory",
    ),
    "backends/gloo": (
        "backends/gloo",
        "parts of its group",
        "failures messages options torch_group work",
    ),
    "backends/host": (
        "backends/host",
        "parts of its group",
        "options process_exit work",
    ),
    "backends/mpi": (
        "backends/mpi",
        "parts of its group, which a job of MPI alone can make",
        (
            "communicators dispatch engine fast_path group libmpi native_exchange progress_thread "
            "rendezvous unfinished work"
        ),
    ),
    "backends/mpi/messages": (
        "backends/mpi",
        "messages of its group",
        "buffers exchange tags",
    ),
    "backends/nccl": (
        "backends/nccl",
        "parts of its group, over the double of NCCL",
        "communicators loopback watchdog work",
    ),
    "backends/nccl/device": (
        "backends/nccl",
        "the double's device has their interface",
        "base cuda used",
    ),
    "backends/nccl/libnccl": (
        "backends/nccl/test_library.py",
        "both providers through one interface",
        "config cupy pynccl",
    ),
    "backends/nccl/operations": (
        "backends/nccl",
        "parts of its group, over the double of NCCL",
        "enqueue in_flight nccl_calls",
    ),
    "backends/round_robin": (
        "backends/round_robin",
        "parts of its group",
        "options work",
    ),
    "bench/acceptance": (
        "bench/acceptance",
        "parts of the command, and of its ranks",
        "cases rank",
    ),
    "bench/comparison": (
        "bench/test_allreduce.py",
        "peers by name",
        "command plot table_columns torch_peer",
    ),
    "bench/core": (
        "bench/test_allreduce.py",
        "parts of every program",
        "image",
    ),
    "bench/cost_model": (
        "bench/cost_model/test_command.py",
        "what the program prints",
        "plot report",
    ),
    "bench/paper": (
        "bench/paper/test_command.py",
        "figures as users make them",
        "bucketing drawing tables team",
    ),
    "bench/paper/report": (
        "bench/paper/test_report.py",
        "statements judged on the page",
        "advice all_reduces bucket_sizes convergence findings overlap scaling",
    ),
    "bench/scale": (
        "bench/scale/test_command.py",
        "what the program counts",
        "figures",
    ),
    "bench/training": (
        "bench/test_ddp.py",
        "what the program measures",
        "ddp_worker hook_worker",
    ),
    "collectives": (
        "collectives/cli",
        "runs as `python -m collectives`",
        "__main__",
    ),
    "collectives/api": (
        "collectives/api",
        "public as names of `collectives`",
        "barriers breakpoints deprecated flight_record init_and_destroy init_method reductions subgroups",
    ),
    "collectives/cli": (
        "collectives/cli",
        "subcommands",
        "backends mpi_job",
    ),
    "collectives/conformance": (
        "collectives/conformance",
        "the command examines them",
        "functions",
    ),
    "collectives/core": (
        "conformance",
        "what groups of every backend do with arguments, members and opcodes",
        "dynamo forwarding membership monitored_barrier",
    ),
    "collectives/core/arguments": (
        "conformance",
        "wrong arguments, and all forms of the right ones, to groups of every backend",
        "operations option_records overloads staging validation",
    ),
    "collectives/integrations": (
        "integrations/test_frameworks.py",
        "frameworks train with them",
        "accelerate ignite lightning",
    ),
    "collectives/registry": (
        "collectives/registry",
        "the table that test_backends asks for",
        "names",
    ),
    "collectives/torch_bridge": (
        "collectives/torch_bridge",
        "what torch calls; programs see torch.distributed alone",
        "creation group_base issuing operands",
    ),
    "ddp/autograd": (
        "ddp/reducer/test_backward_pass.py",
        "parts of a backward pass",
        "engine",
    ),
    "ddp/hooks/support": (
        "ddp/hooks",
        "parts of the hooks that users name",
        "adapter error_feedback gathering hook_state powersgd uncompressed",
    ),
    "ddp/join": (
        "ddp/join",
        "parts of `Join`",
        "joinable_model protocol shadow_collectives",
    ),
    "ddp/model_averaging": (
        "ddp/model_averaging",
        "public as names of `collectives.ddp.model_averaging`",
        "averagers hierarchical_model_averager utils",
    ),
    "ddp/module": (
        "ddp/test_distributed.py",
        "what the wrapper's arguments steer",
        "arguments buffers mixed_precision",
    ),
    "ddp/optim": (
        "ddp/optim",
        "parts of the optimizers that users name",
        "partition post_local_sgd shards",
    ),
    "ddp/reducer": (
        "ddp/reducer/test_backward_pass.py",
        "parts of a backward pass",
        "averaging bucket_reducer grad_bucket gradient_memory reducer",
    ),
    "ddp/sync": (
        "ddp/sync",
        "what ranks tell each other, seen in what training does",
        "broadcast end_of_pass error_report model_agreement",
    ),
    "ddp/unused_parameters": (
        "ddp/unused_parameters",
        "seen in what training does",
        "errors graph_search tracker",
    ),
    "collectives/ranks": (
        "collectives/ranks/test_launching.py",
        "the program of a rank",
        "launched",
    ),
    "store": (
        "store/test_contract.py",
        "public as names of `collectives.store`",
        "keep_alive memory prefix",
    ),
    "store/file": (
        "store/file/test_store.py",
        "public as `FileStore`",
        "run",
    ),
    "store/tcp": (
        "store/tcp/test_store.py",
        "public as `TCPStore`",
        "listen",
    ),
}
"""By folder: the tests that run modules which no test names, what these are to users, and their names."""


def imported_by_tests() -> set[str]:
    """Returns the modules that tests and their helpers import."""
    found = set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def without_a_name() -> dict[str, set[str]]:
    """Returns the modules, by folder, that no test file has the name of and no test imports."""
    imported = imported_by_tests()
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        folder = path.relative_to(ROOT).parent
        has_file = (TESTS / folder / f"test_{path.stem}.py").exists()
        if path.name != "__init__.py" and not has_file and name not in imported:
            found.setdefault(str(folder), set()).add(path.stem)
    return found


def test_each_module_is_named() -> None:
    listed = {folder: set(names.split()) for folder, (_, _, names) in TESTED_THROUGH.items()}
    found = without_a_name()
    wrong = []
    for folder in sorted({*listed, *found}):
        missing = found.get(folder, set()) - listed.get(folder, set())
        needless = listed.get(folder, set()) - found.get(folder, set())
        if missing:
            wrong.append(f"{folder}: no test names {', '.join(sorted(missing))}")
        if needless:
            wrong.append(
                f"{folder}: to be taken out of the list (gone, or named): {', '.join(sorted(needless))}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", TESTED_THROUGH)
def test_the_listed_tests_are_there(folder: str) -> None:
    tests = TESTS / Path(TESTED_THROUGH[folder][0])
    assert tests.exists()
    assert tests.is_file() or list(tests.glob("test_*.py"))
