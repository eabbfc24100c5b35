"""Ranks that mpirun starts; MPI tells them who they are, so nothing else is configured.

Run with: mpirun -n 2 python under_mpirun.py
"""

import torch

import collectives as dist

dist.init_process_group("mpi")  # "host" with init_method="mpi://" uses our own transport instead
total = torch.full((4,), dist.get_rank() + 1.0)
dist.all_reduce(total)
ranks = dist.get_world_size()
assert total.tolist() == [ranks * (ranks + 1) / 2] * 4

gathered = [None] * ranks
dist.all_gather_object(gathered, {"rank": dist.get_rank()})
assert [one["rank"] for one in gathered] == list(range(ranks))
if dist.get_rank() == 0:
    print(f"worked: {ranks} ranks of {dist.get_backend()}")
dist.destroy_process_group()
