"""vLLM's groups over ours: each operation of the communicator, and engines as users start them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from census import SHARED_MEMORY, shared_memory, unused
from machines import make_machines  # noqa: F401 - a fixture
from ports import free_port

import collectives

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "frameworks"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="no vllm here; the page of serving says how to install it",
    ),
]


def with_communicator(check: Any) -> Any:
    """Runs a function with a communicator of vLLM's tensor parallel group, as vLLM makes it."""
    import torch
    import torch.distributed as dist

    from collectives.integrations.vllm.communicator import CollectivesCommunicator

    dist.init_process_group("collectives")
    ranks = list(range(dist.get_world_size()))
    cpu_group = dist.new_group(ranks, backend="gloo")
    group = dist.new_group(ranks, backend="collectives")
    made = CollectivesCommunicator(cpu_group, torch.device("cpu"), group, "tp:0")
    try:
        return check(made, dist.get_rank())
    finally:
        dist.destroy_process_group()


def collectives_of_a_rank(made: Any, rank: int) -> None:
    import torch

    size = made.world_size
    whole = torch.arange(4 * 3 * 6, dtype=torch.bfloat16).view(4, 3, 6)
    for dim in (0, 1, 2, -1, -2, -3):
        mine = whole * (rank + 1)
        parts = [whole * (one + 1) for one in range(size)]
        assert torch.equal(made.all_gather(mine, dim), torch.cat(parts, dim))
        gathered = made.gather(mine, dst=1, dim=dim)
        assert torch.equal(gathered, torch.cat(parts, dim)) if rank == 1 else gathered is None
    total = sum(range(1, size + 1))
    for given in (whole, whole.transpose(0, 2), whole[:0], whole[:1, :1, :1]):
        mine = given * (rank + 1)
        before = mine.clone()
        assert torch.equal(made.all_reduce(mine), given * total)
        assert torch.equal(mine, before)
    for dim in (0, 2, -1):
        part = whole.shape[dim] // size
        expected = (whole * total).narrow(dim, rank * part, part)
        assert torch.equal(made.reduce_scatter(whole * (rank + 1), dim), expected)
    with pytest.raises(ValueError, match="dimension 1 of shape \\(4, 3, 6\\) is no multiple of 2 ranks"):
        made.reduce_scatter(whole, 1)
    with pytest.raises(ValueError, match="has no dimension 3"):
        made.all_gather(whole, 3)


def uneven_rows_of_a_rank(made: Any, rank: int) -> None:
    import torch

    for sizes in ([1, 4], [3, 3], [0, 2]):
        rows = torch.arange(sum(sizes) * 2.0).view(-1, 2)
        mine = rows.split(sizes)[rank]
        assert torch.equal(made.all_gatherv(mine, 0, sizes), rows)
        first, second = made.all_gatherv([mine, mine + 1], 0, sizes)
        assert torch.equal(first, rows)
        assert torch.equal(second, rows + 1)
        assert torch.equal(made.reduce_scatterv(rows * (rank + 1), 0, sizes), mine * 3)
    with pytest.raises(ValueError, match="this rank has 5 rows, but sizes are \\[1, 4\\]"):
        made.all_gatherv(torch.zeros(5, 2), 0, [1, 4])
    with pytest.raises(ValueError, match="dim must be 0, but is 1"):
        made.reduce_scatterv(torch.zeros(5, 2), 1, [1, 4])
    with pytest.raises(ValueError, match="has 4 rows, but sizes are \\[1, 4\\]"):
        made.reduce_scatterv(torch.zeros(4, 2), 0, [1, 4])


def dictionaries_of_a_rank(made: Any, rank: int) -> None:
    import torch

    hidden = torch.arange(300, dtype=torch.bfloat16).view(30, 10)
    kinds = {
        "hidden": hidden,
        "strided": hidden.t(),
        "empty": hidden[:0],
        "one": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "text": "not a tensor",
    }
    if rank == 0:
        for number in range(5):  # before any is received
            sent = {k: v + number if v is hidden else v for k, v in kinds.items()}
            made.send_tensor_dict(sent, 1)
            sent["hidden"].zero_()  # the next step of a model does so
        return
    for number in range(5):
        got = made.recv_tensor_dict(0)
        assert list(got) == list(kinds)
        for key, value in kinds.items():
            if isinstance(value, torch.Tensor):
                expected = value + number if value is hidden else value
                assert got[key].dtype == value.dtype
                assert torch.equal(got[key], expected), key
            else:
                assert got[key] == value


@pytest.mark.parametrize("check", [collectives_of_a_rank, uneven_rows_of_a_rank, dictionaries_of_a_rank])
def test_communicator(check: Any) -> None:
    collectives.launch(with_communicator, (check,), nproc=2)


def groups_of_gloo() -> None:
    import torch.distributed as dist

    from collectives.integrations.vllm.communicator import CollectivesCommunicator

    dist.init_process_group("gloo")
    group = dist.new_group()
    with pytest.raises(TypeError, match="'tp:0' has to be of the backend 'collectives', but is"):
        CollectivesCommunicator(group, None, group, "tp:0")


def test_groups_of_another_backend_are_refused() -> None:
    collectives.launch(groups_of_gloo)


def left_since(before: set[str]) -> set[str]:
    """Returns what of vLLM's, Python's, torch's or ours lies in /dev/shm since then and serves no process.

    Python's processes that clear up after killed ones have 10 seconds.
    """
    kinds = ("vllm", "psm_", "sem.mp-", "torch", "collectives")
    deadline = time.monotonic() + 10
    while True:
        left = {name for name in unused(shared_memory() - before) if name.startswith(kinds)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "collectives",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **more,
    }


def test_a_platform_that_would_not_be_asked_for_is_an_error() -> None:
    program = "from vllm.plugins import load_general_plugins as load; load()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(VLLM_TARGET_DEVICE="cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RuntimeError: VLLM_PLUGINS names collectives, but vLLM took the platform" in done.stderr
    assert done.returncode == 1


def test_tokens_are_those_over_the_kernel_of_vllm(tmp_path: Path) -> None:
    """vLLM's kernel leaves files in /dev/shm behind, of which we clear away those of this test."""
    before = shared_memory()
    results = {}
    for backend in ("collectives", "gloo"):
        result = tmp_path / f"{backend}.json"
        command = [sys.executable, "vllm_generate.py", "--backend", backend, "--result", str(result)]
        done = subprocess.run(
            command, cwd=EXAMPLES, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        results[backend] = result.read_text("utf-8")
        left = left_since(before)
        if backend == "gloo":
            for name in left:
                if name.startswith("vllm"):
                    (SHARED_MEMORY / name).unlink()
        else:
            assert not left
    assert results["collectives"] == results["gloo"]


RANK = """
import sys
from vllm import LLM, SamplingParams
by_dynamo = {"compilation_config": {"mode": 2, "backend": "eager"}}  # alone, which is quicker
llm = LLM(
    sys.argv[1], tensor_parallel_size=int(sys.argv[2]), pipeline_parallel_size=int(sys.argv[3]),
    dtype="float32", max_model_len=128, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26, seed=0,
    distributed_executor_backend="external_launcher",
    **(by_dynamo if int(sys.argv[4]) else {"enforce_eager": True}),
)
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
out, = llm.generate([{"prompt_token_ids": list(range(1, 33))}], sampling, use_tqdm=False)
print("tokens", *out.outputs[0].token_ids, flush=True)
sys.stdin.read()
"""
"""A rank of an engine, which stays until its standard input ends."""


class Engine:
    """The ranks of an engine, each started by the command that ``place`` makes of its number and words."""

    def __init__(self, llama: Path, place: Any, stages: int = 1, compiled: bool = False, **more: str) -> None:
        port = str(free_port())
        self.ranks = []
        for rank in range(2):
            shape = [str(2 // stages), str(stages), str(int(compiled))]
            words = [sys.executable, "-c", RANK, str(llama), *shape]
            about = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
            env = environment(MASTER_ADDR="127.0.0.1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
            self.ranks.append(
                subprocess.Popen(
                    place(rank, words), env=env | about | more, stdin=PIPE, stdout=PIPE, text=True
                )
            )

    def tokens(self) -> list[str]:
        found = []
        for rank in self.ranks:
            lines = iter(rank.stdout.readline, "")
            found.append(next((line for line in lines if line.startswith("tokens ")), "none"))
        return found

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(llama: Path) -> str:
    """Returns what an engine of two ranks on one machine says; killed, it leaves nothing behind."""
    before = shared_memory()
    engines = [Engine(llama, lambda rank, words: words) for _ in range(2)]  # which do not disturb each other
    try:
        (first, second), (third, fourth) = (engine.tokens() for engine in engines)
    finally:
        for engine in engines:
            engine.kill()
    assert first == second == third == fourth != "none"
    assert left_since(before) == set()
    return first


def test_two_engines_on_a_machine_leave_nothing_when_killed(expected: str) -> None:
    assert len(expected.split()) == 1 + 8


@pytest.mark.parametrize(("stages", "compiled"), [(1, False), (1, True), (2, True)])
def test_tensor_and_pipeline_parallel_on_two_machines(
    llama: Path,
    expected: str,
    stages: int,
    compiled: bool,
    make_machines: Any,  # noqa: F811
) -> None:
    """With more than one stage, vLLM on CPUs needs its warm-up, which models have that are compiled."""
    machines = make_machines(2)
    address = {"MASTER_ADDR": machines.address(0), "COLLECTIVES_SECRET": "0123456789abcdef" * 4}
    address["GLOO_SOCKET_IFNAME"] = "link0"
    engine = Engine(llama, machines.command, stages, compiled, **address)
    try:
        assert engine.tokens() == [expected, expected]
    finally:
        engine.kill()
