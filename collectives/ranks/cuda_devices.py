"""The CUDA device of a rank: one each where there are enough, else devices that ranks share.

NCCL before 2.30 refuses two ranks of one machine on one device. It takes ranks with different NCCL_HOSTID for
ranks of different machines, which then talk through sockets; the other variables keep it from trying anything
else, and its kernels small, so that those of all ranks fit at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import torch

ON_ONE_GPU: Final[Mapping[str, str]] = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""Environment of ranks that share a GPU, beside an NCCL_HOSTID of each."""


def shared_gpu_environment(rank: int, given: Mapping[str, str]) -> dict[str, str]:
    """Returns what to add to the environment of a rank that shares its GPU, before it first calls NCCL.

    Args:
        rank: the rank.
        given: its environment; what it says of :data:`ON_ONE_GPU` stays.
    """
    return {name: given.get(name, value) for name, value in ON_ONE_GPU.items()} | {
        "NCCL_HOSTID": f"rank{rank}"
    }


def take_cuda_device(rank: int, ranks: int) -> None:
    """Makes a rank's GPU the current one; where GPUs are shared, sets :data:`ON_ONE_GPU` in the environment.

    Called before anything of NCCL.

    Args:
        rank: the rank that this process is.
        ranks: number of ranks on this machine.
    """
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        os.environ.update(shared_gpu_environment(rank, os.environ))
    torch.cuda.set_device(rank % gpus)
