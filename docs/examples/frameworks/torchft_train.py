"""torchft over our groups: replicas that are killed come back, and training loses at most a step by each.

torchft's lighthouse says which replicas take part in a step. Each replica is one process here, and starts
anew when it has died; it gets the state from another one. At the end all have the same parameters.

Run with: python torchft_train.py --replicas 3 --kills 2 --every 3
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer
from torchft.checkpointing.pg_transport import PGTransport
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.process_group import ProcessGroupGloo

from collectives.integrations.torchft import ProcessGroupCollectives

LIMIT = timedelta(seconds=20)


def replica(number: int, options: argparse.Namespace) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(number)
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    inner = torch.optim.SGD(network.parameters(), lr=0.05)

    more = torch.zeros(options.megabytes << 18)  # as large models have

    def state_dict() -> dict:
        return {"network": network.state_dict(), "optimizer": inner.state_dict(), "more": more}

    def load_state_dict(state: dict) -> None:
        network.load_state_dict(state["network"])
        inner.load_state_dict(state["optimizer"])
        more.copy_(state["more"])
        if manager.current_step():
            print(f"replica {number}: healed {time.monotonic() - began:.2f} s after it came", flush=True)

    group = {"collectives": ProcessGroupCollectives, "gloo": ProcessGroupGloo}[options.backend](LIMIT)
    manager = Manager(
        group, load_state_dict, state_dict, min_replica_size=1, timeout=LIMIT, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, replica_id=f"replica_{number}",
        checkpoint_transport=PGTransport(group, LIMIT, torch.device("cpu")),
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, inner)
    lost, began = 0, time.monotonic()
    while manager.current_step() < options.steps:
        optimizer.zero_grad()
        inputs = torch.randn(32, 8)
        model(inputs).square().mean().backward()
        before = manager.current_step()
        optimizer.step()
        lost += manager.current_step() == before
        time.sleep(options.pause)
    checksum = sum(p.detach().double().sum().item() for p in network.parameters())
    print(f"replica {number}: step {manager.current_step()}, {lost} lost, checksum {checksum!r}", flush=True)
    manager.shutdown(wait=False)
    group.shutdown()


def supervise(options: argparse.Namespace) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=20)
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}

    def start(number: int) -> subprocess.Popen:
        command = [sys.executable, Path(__file__).resolve(), *sys.argv[1:], "--replica", str(number)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603 - itself

    replicas = [start(number) for number in range(options.replicas)]
    for kill in range(options.kills):
        time.sleep(options.every)
        number = kill % options.replicas
        replicas[number].send_signal(signal.SIGKILL)
        replicas[number].wait()
        replicas[number] = start(number)
    said = [process.communicate()[0] for process in replicas]
    print("".join(said), end="")
    assert all(process.returncode == 0 for process in replicas)
    assert len({text.rsplit(maxsplit=1)[-1] for text in said}) == 1, "the parameters differ"
    lighthouse.shutdown()
    print(f"worked: {options.kills} kills, {options.steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--every", type=float, default=6.0, help="seconds from one kill to the next")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds after each step")
    parser.add_argument("--megabytes", type=int, default=0, help="of state beside the network")
    parser.add_argument("--backend", choices=["collectives", "gloo"], default="collectives")
    parser.add_argument("--replica", type=int, help="set by the program itself")
    options = parser.parse_args()
    if options.replica is None:
        supervise(options)
    else:
        replica(options.replica, options)
