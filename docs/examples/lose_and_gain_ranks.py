"""DDP goes on from memory while ranks die and others come, with as many as there are.

Each rank has a launcher of its own, which starts it again when it dies: `launch` here, or on any machine
torchrun --standalone --nproc-per-node 1 --max-restarts 9 lose_and_gain_ranks.py HOST PORT

Run with: python lose_and_gain_ranks.py
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import collectives as dist
from collectives.ddp import DistributedDataParallel


def share(step, network, optimizer):
    """Has all go on from the rank that is furthest: one may have lost a step that another has completed."""
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    state = [(step, network.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    network.load_state_dict(state[0][1])
    optimizer.load_state_dict(state[0][2])
    return state[0][0], DistributedDataParallel(network)


def train(host, port):
    store = dist.TCPStore(host, port, wait_for_workers=False)
    if store.add("ranks", 1) == 1:
        dist.init_process_group("host", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.join_world(store)
    network = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
    step, model, generation, lost, stop = 0, None, None, [], torch.zeros(1, dtype=torch.bool)
    while not stop:
        try:
            if lost:
                dist.shrink_group(lost, shrink_flags=dist.SHRINK_ABORT)
                lost = []
            elif model is not None:
                dist.admit_newcomers(store)
            if model is None or generation != dist.group.WORLD.generation:  # the members have changed
                generation = dist.group.WORLD.generation
                step, model = share(step, network, optimizer)
                store.set(f"rank {dist.get_rank()} of {dist.get_world_size()}", str(os.getpid()))
            inputs = torch.randn(32, 8)
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :2]).square().mean().backward()
            optimizer.step()
            step += 1
            stop[0] = dist.get_rank() == 0 and store.check(["stop"])
            dist.broadcast(stop, 0)
        except dist.PeerLostError as error:  # noqa: PERF203 - one more may die meanwhile
            model, lost = None, [*lost, error.rank]
    dist.destroy_process_group()
    return f"{step} steps, checksum {sum(p.double().sum().item() for p in network.parameters())!r}"


def keep(port, restarts=9):
    try:
        return dist.launch(train, ("127.0.0.1", port), nproc=1)[0]
    except dist.RankFailedError:
        if not restarts:  # the fault is its own
            raise
        return keep(port, restarts - 1)


if __name__ == "__main__" and len(sys.argv) == 3:
    print(train(sys.argv[1], int(sys.argv[2])))
elif __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives all ranks
    with ThreadPoolExecutor() as launchers:
        ends = [launchers.submit(keep, store.port) for _ in range(3)]
        victim = int(store.get("rank 0 of 3"))
        store.delete_key("rank 0 of 3")
        os.kill(victim, signal.SIGKILL)
        store.wait(["rank 0 of 3"])
        store.set("stop", "")
    said = {end.result() for end in ends}
    assert len(said) == 1, said
    print("worked:", said.pop())
