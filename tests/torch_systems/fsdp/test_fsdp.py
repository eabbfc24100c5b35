"""FSDP1 of torch over our groups: after training, equal to one process on all the data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - torch's own acronym
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch_systems.small import Block, adam, batch, check, net, share, train, trained
from torch_world import BACKEND, run_torch

POLICY = ModuleWrapPolicy({Block})


def wrap(model, **options):
    """Without a device, FSDP1 looks for an accelerator and refuses to run."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return FSDP(model, auto_wrap_policy=POLICY, **options)


def wrapped(**options):
    return wrap(net(), **options)


def whole(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return {name: value.clone() for name, value in model.state_dict().items()}


def equals_one_process(rank, size, tolerance=None, **options):
    expected = trained(net(), size)
    model = wrapped(**options)
    optimizer = adam(model.parameters())
    train(lambda x: model(x).float(), optimizer, size, share(rank))
    check(whole(model), expected, **(tolerance or {}))
    return model, optimizer


def full(rank, size):
    equals_one_process(rank, size)


def flat_parameters(rank, size):
    equals_one_process(rank, size, use_orig_params=False)


def gradients_and_optimizer_only(rank, size):
    equals_one_process(rank, size, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def nothing_sharded(rank, size):
    equals_one_process(rank, size, sharding_strategy=ShardingStrategy.NO_SHARD)


def prefetched(rank, size):
    equals_one_process(
        rank, size, backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True,
        limit_all_gathers=False,
    )  # fmt: skip


def hybrid_mesh(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    equals_one_process(rank, size, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def hybrid_groups(rank, size):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    equals_one_process(
        rank, size, process_group=(rows[rank // 2], columns[rank % 2]),
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
    )  # fmt: skip


def offloaded(rank, size):
    """FSDP1 offloads from an accelerator only; ``fully_shard`` does not need one."""
    model = wrapped(cpu_offload=CPUOffload(offload_params=True))
    with pytest.raises(RuntimeError, match="accelerator"):
        model(batch(0, size, 3)[0])


def low_precision(rank, size):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    equals_one_process(rank, size, {"rtol": 0.2, "atol": 0.1}, mixed_precision=policy)


def accumulated(rank, size):
    """Gradients of the first half of the rows are reduced with those of the second."""
    x, y = batch(0, size, 3)
    oracle, model = net(), wrapped()
    torch.nn.functional.mse_loss(oracle(x), y).backward()
    x, y = x[share(rank)], y[share(rank)]
    with model.no_sync():
        (torch.nn.functional.mse_loss(model(x[:2]), y[:2]) / 2).backward()
    (torch.nn.functional.mse_loss(model(x[2:]), y[2:]) / 2).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        found = {name: one.grad.clone() for name, one in model.named_parameters()}
    assert len(found) == 8
    expected = {name: one.grad for name, one in oracle.named_parameters()}
    check({clean(name): value for name, value in found.items()}, expected)


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def clipped(rank, size):
    oracle, model, norms = net(), wrapped(), []
    train(
        oracle, adam(oracle.parameters()), size,
        before_step=lambda: norms.append(torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)),
    )  # fmt: skip
    found = []
    train(
        model, adam(model.parameters()), size, share(rank),
        before_step=lambda: found.append(model.clip_grad_norm_(0.1)),
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(found), torch.stack(norms))
    check(whole(model), oracle.state_dict())


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def state_of_the_optimizer(rank, size):
    """What one run saved on rank 0, another goes on from, as one process would.

    With one tensor of state for each parameter; see :func:`moments` for more of them.
    """
    oracle, model = net(), wrapped()
    train(oracle, momentum(oracle.parameters()), size, steps=range(5))
    optimizer = momentum(model.parameters())
    train(model, optimizer, size, share(rank), steps=range(3))
    settings = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
        saved = [model.state_dict(), FSDP.optim_state_dict(model, optimizer)]
    assert bool(saved[0]) == (rank == 0)
    dist.broadcast_object_list(saved)
    other = net()
    other.load_state_dict(saved[0])
    again = wrap(other)
    fresh = momentum(again.parameters())
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, saved[1]))
    train(again, fresh, size, share(rank), steps=range(3, 5))
    check(whole(again), oracle.state_dict())


def older_states_of_the_optimizer(rank, size):
    """The deprecated functions: whole or in shards, on all ranks or one, by name or number."""
    oracle = net()
    own = momentum(oracle.parameters())
    train(oracle, own, size)
    begun, names = (
        {name: one.clone() for name, one in oracle.state_dict().items()},
        OptimStateKeyType.PARAM_NAME,
    )
    by_name = FSDP.rekey_optim_state_dict(copy.deepcopy(own.state_dict()), names, oracle)
    train(oracle, own, size, steps=range(3, 5))
    model = wrapped()
    optimizer = momentum(model.parameters())
    train(model, optimizer, size, share(rank))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        parts = FSDP.sharded_optim_state_dict(model, optimizer)
    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert sorted(everywhere["state"]) == sorted(begun)
    at_rank_0 = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(at_rank_0) == (rank == 0)

    def from_parts(model, optim):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FSDP.flatten_sharded_optim_state_dict(parts, model, optim)

    for make in (
        from_parts,
        lambda model, optim: FSDP.shard_full_optim_state_dict(everywhere, model, optim=optim),
        lambda model, optim: FSDP.shard_full_optim_state_dict(by_name, model, optim=optim),
        lambda model, optim: FSDP.scatter_full_optim_state_dict(at_rank_0 or None, model, optim=optim),
    ):
        plain = net()
        plain.load_state_dict(begun)
        again = wrap(plain)
        fresh = momentum(again.parameters())
        fresh.load_state_dict(make(again, fresh))
        train(again, fresh, size, share(rank), steps=range(3, 5))
        check(whole(again), oracle.state_dict())

    alone = net()
    alone.load_state_dict(begun)
    fresh = momentum(alone.parameters())
    fresh.load_state_dict(FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, alone))
    train(alone, fresh, size, steps=range(3, 5))
    check(alone.state_dict(), oracle.state_dict())


def moments(rank, size):
    """Several tensors of state for a parameter torch gathers into one buffer when they are on the CPU."""
    model = wrapped()
    optimizer = adam(model.parameters())
    train(model, optimizer, size, share(rank), steps=[0])
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        saved = FSDP.optim_state_dict(model, optimizer)["state"]
    assert all(torch.equal(state["exp_avg"], state["exp_avg_sq"]) for state in saved.values())
    assert saved


def sharded_state(rank, size):
    model, optimizer = equals_one_process(rank, size)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        parts = model.state_dict()
        moments = FSDP.optim_state_dict(model, optimizer)
    again = wrapped()
    with FSDP.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
        again.load_state_dict(parts)
        fresh = adam(again.parameters())
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, moments))
    check(whole(again), whole(model))
    for one in (model, again):
        train(one, optimizer if one is model else fresh, size, share(rank), steps=[9])
    check(whole(again), whole(model))


def halved_by_a_hook(state, gradient, shard):
    """Reduces as FSDP does, then halves."""
    dist.reduce_scatter_tensor(shard, gradient)
    shard.div_(2 * dist.get_world_size())


def hooked(rank, size):
    x, y = batch(0, size, 3)
    oracle, model = net(), wrapped()
    model.register_comm_hook(None, halved_by_a_hook)
    (torch.nn.functional.mse_loss(oracle(x), y) / 2).backward()
    torch.nn.functional.mse_loss(model(x[share(rank)]), y[share(rank)]).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        found = {clean(name): one.grad.clone() for name, one in model.named_parameters()}
    check(found, {name: one.grad for name, one in oracle.named_parameters()})


@pytest.mark.parametrize(
    "body",
    [
        full, flat_parameters, gradients_and_optimizer_only, nothing_sharded, prefetched, hybrid_mesh,
        hybrid_groups, low_precision, accumulated, clipped, state_of_the_optimizer,
        older_states_of_the_optimizer, sharded_state, hooked,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_fsdp(body):
    run_torch(body, 4)


@pytest.mark.parametrize("backend", [BACKEND, "gloo"])
@pytest.mark.parametrize("body", [offloaded, moments], ids=lambda body: body.__name__)
def test_what_fails_in_torch_fails_on_every_backend(body, backend):
    run_torch(body, 4, backend=backend)
