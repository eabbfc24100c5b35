"""The examples of docs/examples run as they are, each by the line that says how."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from ports import free_port

from collectives import TCPStore
from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError

pytestmark = pytest.mark.usefixtures("preloaded_python")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PYTHON = sorted(EXAMPLES.glob("*.py"))
SHELL = sorted(EXAMPLES.glob("*.sh"))


def check_said(output: str) -> None:
    assert [line for line in output.splitlines() if line.startswith("worked: ")], output


@pytest.fixture
def launchers(tmp_path, monkeypatch):
    """Puts a folder in front of the path, with a torchrun of this environment; returns it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    add_program(folder, "torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def add_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def run_script(name: str) -> str:
    done = subprocess.run(
        ["bash", str(EXAMPLES / name)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "example", [path for path in PYTHON if path.stem != "store_backend"], ids=lambda p: p.name
)
def test_example_works(example, run_program):
    command = re.search(r"Run with: (.+)", example.read_text("utf-8")).group(1)
    check_said(run_program(command, EXAMPLES))


@pytest.mark.full
def test_training_survives_a_rank_that_serves_no_store(run_program):
    check_said(run_program("python survive_a_death.py --kill 1", EXAMPLES))


@pytest.mark.full
def test_each_rank_may_have_a_torchrun_of_its_own(run_program):
    """As the docstring says; one that is killed is started again by its own, and the other goes on."""
    example = (EXAMPLES / "lose_and_gain_ranks.py").read_text("utf-8")
    command = re.search(r"torchrun .+ HOST PORT", example).group(0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = command.replace("HOST PORT", f"127.0.0.1 {store.port}")
    with ThreadPoolExecutor() as launchers:
        ends = [launchers.submit(run_program, command, EXAMPLES) for _ in range(2)]
        victim = int(store.get("rank 1 of 2"))
        store.delete_key("rank 1 of 2")
        os.kill(victim, signal.SIGKILL)
        assert int(store.get("rank 1 of 2")) != victim
        store.set("stop", "")
    said = {end.result() for end in ends}
    assert len(said) == 1, said
    assert re.fullmatch(r"\d+ steps, checksum [\d.]+\n", said.pop())


@pytest.mark.full
@pytest.mark.timeout(400)
def test_own_backend_conforms(run_program):
    """As written, which ends with status 0 where all is right that it offers."""
    command = re.search(r"Run with: (.+)", (EXAMPLES / "store_backend.py").read_text("utf-8")).group(1)
    said = run_program(command, EXAMPLES, limit_s=350)
    for name in ("barrier", "all_reduce", "isend, recv", "object collectives"):
        assert re.search(rf"^{name} +ok ", said, re.MULTILINE), said


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_script_is_well_formed(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    if (checker := shutil.which("shellcheck")) is not None:
        subprocess.run([checker, str(script)], check=True, timeout=60)


@pytest.mark.full
def test_slurm_batch_file(launchers, monkeypatch):
    """Slurm starts a task on each node; here both nodes are this machine."""
    add_program(launchers, "srun", '"$@" & other=$!; "$@" || exit; wait "$other"')
    add_program(
        launchers, "scontrol", '[ "$*" = "show hostnames node[1-2]" ] && echo localhost && echo node2'
    )
    with socket.socket() as free:
        free.bind(("", 0))
        monkeypatch.setenv("RENDEZVOUS_PORT", str(free.getsockname()[1]))
    for name, value in {
        "SLURM_SUBMIT_DIR": str(EXAMPLES),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "7",
    }.items():
        monkeypatch.setenv(name, value)
    check_said(run_script("slurm.sh"))


@pytest.mark.full
def test_two_machines(launchers):
    try:
        Machines(1).close()
    except NamespacesUnavailableError as error:
        pytest.skip(f"no machines out of network namespaces here: {error}")
    named = subprocess.run(
        ["ip", "netns", "add", "collectives-probe"], capture_output=True, text=True, check=False
    )
    if named.returncode != 0:
        pytest.skip(f"no named network namespaces here: {named.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", "collectives-probe"], check=True)
    check_said(run_script("two_machines.sh"))


def kubernetes_objects() -> dict[str, dict]:
    """Returns the objects of kubernetes.yaml by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text("utf-8"))}


def test_pods_of_kubernetes_have_the_names_that_they_are_given():
    service, job = kubernetes_objects()["Service"], kubernetes_objects()["Job"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert f"--nnodes={job['spec']['completions']}" in container["command"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


@pytest.mark.full
def test_kubernetes_job(launchers):
    """Kubernetes runs the command in each pod; here all pods are this machine."""
    job = kubernetes_objects()["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    secret = secrets.token_hex(32)
    given = {one["name"]: one.get("value", secret) for one in container["env"]}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pods = []
    for index in range(job["completions"]):
        env = given | {"JOB_COMPLETION_INDEX": str(index)}
        command = " ".join(container["command"]).replace("/app", str(EXAMPLES))
        words = string.Template(re.sub(r"\$\((\w+)\)", r"${\1}", command)).substitute(env).split()
        pods.append(subprocess.Popen(words, env=os.environ | env, stdout=subprocess.PIPE, text=True))
    said = [pod.communicate(timeout=100)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0]
    check_said("".join(said))
