"""DDP goes on from memory while ranks die and others come, with as many as there are.

The first process trains alone at first. The others join its world, also the one that takes the place of a
rank that was killed. Whoever comes gets parameters and optimizer from the rank that is furthest.

Run with: python lose_and_gain_ranks.py
"""

import subprocess
import sys
import time

import torch

import collectives as dist
from collectives.ddp import DistributedDataParallel

torch.manual_seed(0)
teacher, network = (
    torch.randn(8, 2),
    torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)),
)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)


def share(step):
    """Has all go on from the rank that is furthest: one may have lost a step that another has completed."""
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    state = [(step, network.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    step, parameters, momenta = state[0]
    network.load_state_dict(parameters)
    optimizer.load_state_dict(momenta)
    return step, DistributedDataParallel(network)


def train(store):
    if store.add("processes", 1) == 1:
        dist.init_process_group("host", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.join_world(store)
    step, generation, lost = 0, None, []
    stop = torch.zeros(1, dtype=torch.bool)
    while not stop:
        try:
            if lost:
                dist.shrink_group(lost, shrink_flags=dist.SHRINK_ABORT)
                lost = []
            elif generation is not None:
                dist.admit_newcomers(store)
            if generation != dist.group.WORLD.generation:  # the members have changed
                step, model = share(step)
                generation = dist.group.WORLD.generation
                continue
            inputs = torch.randn(32, 8)
            optimizer.zero_grad()
            (model(inputs) - inputs @ teacher).square().mean().backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                stop[0] = store.check(["stop"])
                store.set("size", str(dist.get_world_size()))
            dist.broadcast(stop, 0)
        except dist.PeerLostError as error:  # one more may die meanwhile
            generation, lost = None, [*lost, error.rank]
    checksum = sum(p.detach().double().sum().item() for p in network.parameters())
    print(f"{step} steps, checksum {checksum!r}", flush=True)
    dist.destroy_process_group()


def wait_for(store, size, ranks):
    while not store.check(["size"]) or store.get("size") != b"%d" % size:
        assert all(process.poll() is None for process in ranks)
        time.sleep(0.05)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        train(dist.TCPStore("127.0.0.1", int(sys.argv[1]), wait_for_workers=False))
        sys.exit()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives all ranks
    command = [sys.executable, __file__, str(store.port)]

    def start():
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this very file

    ranks = []
    for size in (1, 2, 3):
        ranks.append(start())
        wait_for(store, size, ranks)
    ranks.pop(0).kill()
    wait_for(store, 2, ranks)
    ranks.append(start())
    wait_for(store, 3, ranks)
    store.set("stop", "")
    said = {process.communicate()[0] for process in ranks}
    assert len(said) == 1, said
    print("worked:", said.pop(), end="")
