"""``fully_shard`` of torch over our groups: after training, equal to one process on all the data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_systems.small import STEPS, adam, batch, check, net, share, train, trained
from torch_world import run_torch


def sharded(model=None, **options):
    """Every block is a group of its own, then what is left."""
    model = model or net()
    for block in (model.first, model.second):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def equals_one_process(rank, size, prepare=lambda model: None, tolerance=None, even=False, **options):
    expected = trained(net(even), size, outputs=4 if even else 3)
    model = sharded(net(even), **options)
    prepare(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    train(model, adam(model.parameters()), size, share(rank), outputs=4 if even else 3)
    check(dict(model.state_dict()), expected, **(tolerance or {}))
    return model


def plain(rank, size):
    """Gradients are averaged by AVG; shards are uneven, some empty."""
    equals_one_process(rank, size)


def sums(rank, size):
    equals_one_process(rank, size, lambda model: model.set_force_sum_reduction_for_comms(True))


def kept_after_forward(rank, size):
    equals_one_process(rank, size, reshard_after_forward=False)


def resharded_to_pairs(rank, size):
    """Between forward and backward each pair of ranks holds the parameters."""
    equals_one_process(rank, size, reshard_after_forward=2)


def offloaded(rank, size):
    equals_one_process(rank, size, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    equals_one_process(rank, size, mesh=mesh)


def hybrid_over_other_backends(rank, size):
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": "collectives_round_robin"},
    )
    equals_one_process(rank, size, mesh=mesh)


def other_dimension(rank, size):
    equals_one_process(
        rank, size, even=True, shard_placement_fn=lambda one: Shard(1) if one.dim() == 2 else Shard(0)
    )


def prefetched(rank, size):
    def prepare(model):
        model.set_modules_to_forward_prefetch([model.first, model.second])
        model.second.set_modules_to_backward_prefetch([model.first])

    equals_one_process(rank, size, prepare)


def low_precision(rank, size):
    """bfloat16 is gathered, float32 reduced."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = trained(net(), size)
    model = sharded(mp_policy=policy)

    def run(x):
        return model(x).float()

    train(run, adam(model.parameters()), size, share(rank))
    check(dict(model.state_dict()), expected, rtol=0.2, atol=0.1)  # AdamW takes steps of the gradients' signs


def gradients(model, size, rows):
    x, y = batch(0, size, 3)
    torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    return {
        name: one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        for name, one in model.named_parameters()
    }


def divided(rank, size):
    """A factor of its own is multiplied in by PREMUL_SUM."""
    model = sharded()
    model.set_gradient_divide_factor(3.0)
    for part in (model.first, model.second):
        part.set_gradient_divide_factor(3.0)
    found = gradients(model, size, share(rank))
    check(found, {k: v * size / 3 for k, v in gradients(net(), size, slice(None)).items()})


def clipped(rank, size):
    oracle, model = net(), sharded()
    expected = trained_clipped(oracle, size)
    norms = []

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())

    train(model, adam(model.parameters()), size, share(rank), before_step=clip)
    torch.testing.assert_close(torch.stack(norms), torch.stack(expected))
    check(dict(model.state_dict()), oracle.state_dict())


def trained_clipped(model, size):
    norms = []
    train(
        model,
        adam(model.parameters()),
        size,
        before_step=lambda: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
    )
    return norms


def accumulated(rank, size):
    """The first half of the rows waits unreduced for the second."""
    model, rows = sharded(), share(rank)
    x, y = (part[rows] for part in batch(0, size, 3))
    for half, last in ((slice(0, 2), False), (slice(2, 4), True)):
        model.set_requires_gradient_sync(last)
        (torch.nn.functional.mse_loss(model(x[half]), y[half]) / 2).backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    check(found, gradients(net(), size, slice(None)))


def hooked(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, seen = sharded(mesh=mesh), []
    for part in (model.first, model.second):
        part.set_all_reduce_hook(lambda gradient: seen.append(gradient.numel()))
    found = gradients(model, size, share(rank))
    check(found, gradients(net(), size, slice(None)))
    assert len(seen) == 2


class Counted:
    """Communicates as the function given does, from and to tensors of its own."""

    def __init__(self, function):
        self.function, self.calls, self.made = function, 0, 0

    def allocate(self, size, *, dtype, device):
        self.made += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, **options):
        self.calls += 1
        return self.function(output_tensor, input_tensor, group=group, **options)


def own_communication(rank, size):
    """One block communicates by the program's functions, the other asks the group for memory."""
    gather, reduce = Counted(dist.all_gather_into_tensor), Counted(dist.reduce_scatter_tensor)

    def prepare(model):
        model.first.set_custom_all_gather(gather)
        model.first.set_custom_reduce_scatter(reduce)
        with pytest.raises(AssertionError, match="custom: Counted"):
            model.first.set_allocate_memory_from_process_group_for_comm(True)
        model.second.set_allocate_memory_from_process_group_for_comm(True)

    equals_one_process(rank, size, prepare)
    assert (gather.calls, reduce.calls) == (2 * STEPS, STEPS)
    assert gather.made == 2 * STEPS
    assert reduce.made >= STEPS


def unsharded_by_hand(rank, size):
    model = sharded()
    handle = model.first.unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.first.up.weight, net().first.up.weight)
    model.first.reshard()
    assert isinstance(model.first.up.weight, DTensor)


def from_meta(rank, size):
    """Storage comes after sharding; rank 0's values reach all."""
    with torch.device("meta"):
        empty = net()
    model = sharded(empty)
    model.to_empty(device="cpu")
    for name, parameter in model.state_dict().items():
        whole = net().state_dict()[name] if rank == 0 else torch.full(parameter.shape, 9.0)
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.copy_(distribute_tensor(whole, mesh, placements))
    expected = trained(net(), size)
    train(model, adam(model.parameters()), size, share(rank))
    check(dict(model.state_dict()), expected)


@pytest.mark.parametrize(
    "body",
    [
        plain, sums, kept_after_forward, resharded_to_pairs, offloaded, hybrid, hybrid_over_other_backends,
        other_dimension, prefetched, low_precision, divided, clipped, accumulated, hooked, own_communication,
        unsharded_by_hand,
        from_meta,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_fully_shard(body):
    run_torch(body, 4)


def test_of_three_ranks():
    assert dist.is_available()
    run_torch(plain, 3)
