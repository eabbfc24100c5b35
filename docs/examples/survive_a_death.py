"""Training goes on after the death of a rank, from what the others have in memory.

The rank is killed in the middle of a backward pass. The others shrink the group, and go on from their
parameters and the states of their optimizers.

Run with: python survive_a_death.py --kill 0
"""

import argparse
import os
import signal
import socket

import torch
import torch.multiprocessing as mp

import collectives as dist
from collectives.ddp import DistributedDataParallel

STEPS, DEATH = 40, 15
torch.manual_seed(0)
TEACHER, EXAMINATION = torch.randn(8, 2), torch.randn(256, 8)
network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)


def loss_of(model, inputs):
    return (model(inputs) - inputs @ TEACHER).square().mean()


def agree(step):
    """Takes over the state of the rank that is furthest: one may have lost what another has completed."""
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    state = [(step, network.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    network.load_state_dict(state[0][1])
    optimizer.load_state_dict(state[0][2])
    return state[0][0]


def train_step(model, step):
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    loss_of(model, torch.randn(32, 8)).backward()
    optimizer.step()


def run(rank, port, victim):
    dist.init_process_group("host", f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    model, step, losses = DistributedDataParallel(network), 0, []
    while step < STEPS:
        if (rank, step) == (victim, DEATH):
            network[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            train_step(model, step)
            step += 1
        except dist.PeerLostError as lost:
            dist.shrink_group([lost.rank], shrink_flags=dist.SHRINK_ABORT)
            step = agree(step)
            model = DistributedDataParallel(network)
            losses.append(loss_of(network, EXAMINATION).item())
    losses.append(loss_of(network, EXAMINATION).item())
    assert dist.get_world_size() == 2
    assert losses[1] < losses[0] / 2, losses
    if dist.get_rank() == 0:
        print(f"worked: rank {victim} died in step {DEATH} with loss {losses[0]:.4f}, now {losses[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, default=0, choices=range(3))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    victim = parser.parse_args().kill
    ranks = mp.start_processes(run, (port, victim), 3, join=False, start_method="forkserver").processes
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [
        -signal.SIGKILL if rank == victim else 0 for rank in range(3)
    ]
