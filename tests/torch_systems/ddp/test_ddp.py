"""torch's own DistributedDataParallel on our groups: after training, equal to one process on all the data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_systems.small import adam, check, net, share, train, trained
from torch_world import run_torch


def equals_one_process(rank, size, options):
    module = net()
    if "find_unused_parameters" in options:
        module.unused = nn.Linear(2, 2)
    expected = trained(module, size)
    if rank:  # the constructor must bring every rank to rank 0's parameters
        nn.init.zeros_(module.first.up.weight)
    model = DistributedDataParallel(module, bucket_cap_mb=0.0001, **options)
    train(model, adam(model.parameters()), size, share(rank))
    check(module.state_dict(), expected)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    copies = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(copies, flat)
    assert all(torch.equal(flat, other) for other in copies)
    assert model._get_ddp_logging_data()["backend_name"] == dist.get_backend()


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=str,
)
def test_ddp(options):
    run_torch(equals_one_process, 3 if options else 2, options)
