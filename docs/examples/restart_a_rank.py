"""A rank that was killed is started again and joins the others, which do not start again.

The process that starts the ranks serves the store, so that it outlives all of them. When a rank has died, the
others shrink the group and go on. When a new process has come, they end their world and form one with it.

Run with: python restart_a_rank.py
"""

import json
import os
import signal

import torch
import torch.multiprocessing as mp
from survive_a_death import EXAMINATION, agree, loss_of, network, train_step

import collectives as dist
from collectives.ddp import DistributedDataParallel

DEATH, STEPS_TOGETHER = 10, 30


def newcomers(store, known):
    """Returns how many processes wait to be let in: the same on all ranks, as rank 0 asks the store."""
    count = torch.tensor([store.add("came", 0) - known if dist.get_rank() == 0 else 0])
    dist.broadcast(count, src=0)
    return int(count)


def let_in(store, known, count):
    """Ends the world, and forms one with the processes that wait, which take the last ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for number in range(count):
            store.set(f"place/{known + number}", json.dumps([size + number, size + count, known + count]))
    dist.destroy_process_group()
    join(store, rank, size + count, known + count)
    return known + count


def join(store, rank, size, life):
    dist.init_process_group("host", store=dist.PrefixStore(f"life/{life}", store), rank=rank, world_size=size)


def run(rank, port):
    """Trains; a rank of ``None`` is that of a process that comes later."""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    if rank is None:
        step, number = -1, store.add("came", 1) - 1  # it knows less than the others
        place, size, known = json.loads(store.get(f"place/{number}"))
        join(store, place, size, known)
    else:
        step, known = 0, 0
        join(store, rank, 3, known)
    model, together = None, 0
    while together < STEPS_TOGETHER:
        if model is None:
            step = agree(step)
            model, before = DistributedDataParallel(network), loss_of(network, EXAMINATION).item()
        if (rank, step) == (0, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if waiting := newcomers(store, known):
                known, model = let_in(store, known, waiting), None
                continue
            train_step(model, step)
            step, together = step + 1, together + known
        except dist.PeerLostError as lost:
            dist.shrink_group([lost.rank], shrink_flags=dist.SHRINK_ABORT)
            model = None
    after = loss_of(network, EXAMINATION).item()
    assert after < before, (before, after)
    if dist.get_rank() == 0:
        print(f"worked: {step} steps, {together} of them with the new process; loss {after:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    first, *others = [context.Process(target=run, args=(rank, store.port)) for rank in range(3)]
    for process in (first, *others):
        process.start()
    first.join()
    again = context.Process(target=run, args=(None, store.port))
    again.start()
    for process in (*others, again):
        process.join()
    assert [process.exitcode for process in (first, *others, again)] == [-signal.SIGKILL, 0, 0, 0]
