"""What FSDP1 of torch takes and tells, over our groups: wrapping, whole parameters, states and precisions."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - torch's own acronym
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch_systems.small import Block, adam, batch, check, net, share, train, trained
from torch_world import run_torch

CPU = torch.device("cpu")


def wrap(model, **options):
    """Without a device, FSDP1 looks for an accelerator and refuses to run."""
    options = {
        "use_orig_params": True,
        "device_id": CPU,
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
    } | options
    return FSDP(model, **options)


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def whole(model):
    with FSDP.summon_full_params(model, writeback=False):
        return {clean(name): value.detach().clone() for name, value in model.named_parameters()}


def trains(model, rank, size, expected):
    train(model, adam(model.parameters()), size, share(rank))
    check(whole(model), expected)


def wrapped(model):
    """Returns the names of the parts that are units of their own."""
    return [clean(name) for name, part in model.named_modules() if isinstance(part, FSDP) and name]


def policies(rank, size):
    """Units are chosen by class, by size, or by a function that may set their arguments."""
    expected = trained(net(), size)
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=90)
    model = wrap(net(), auto_wrap_policy=by_size)
    assert wrapped(model) == ["first"]  # 138 parameters; the 63 of the second stay with the root
    trains(model, rank, size, expected)

    oracle = net()

    def choose(module):
        if module is oracle.first:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, Block)

    model = wrap(oracle, auto_wrap_policy=CustomPolicy(choose), process_group=dist.new_group())
    assert wrapped(model) == ["first", "second"]
    kinds = [part.sharding_strategy for part in FSDP.fsdp_modules(model)]
    assert kinds == [
        ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD,
    ]  # fmt: skip
    assert [part.check_is_root() for part in FSDP.fsdp_modules(model)] == [True, False, False]
    trains(model, rank, size, expected)


def from_meta(rank, size):
    """Storage and values are made unit by unit."""
    values = net().state_dict()
    with torch.device("meta"):
        empty = net()
    names = {id(part): name for name, part in empty.named_modules()}

    def fill(module):
        module.to_empty(device="cpu", recurse=False)
        prefix = names[id(module)]
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(values[f"{prefix}.{name}"])

    trains(wrap(empty, param_init_fn=fill), rank, size, trained(net(), size))


def left_out(rank, size):
    """Ignored parts are neither sharded nor reduced, by module or by parameter."""
    for option in ("ignored_modules", "ignored_states"):
        model = net()
        kept = model.second.down
        given = [kept] if option == "ignored_modules" else list(kept.parameters())
        model = wrap(model, auto_wrap_policy=None, **{option: given})
        x, y = batch(0, size, 3)
        nn.functional.mse_loss(model(x[share(rank)]), y[share(rank)]).backward()
        assert kept.weight.shape == (3, 5)
        mine, oracle = net(), net()
        nn.functional.mse_loss(mine(x[share(rank)]), y[share(rank)]).backward()
        nn.functional.mse_loss(oracle(x), y).backward()
        torch.testing.assert_close(kept.weight.grad, mine.second.down.weight.grad)  # of this rank alone
        with FSDP.summon_full_params(model, with_grads=True):
            found = {
                clean(name): one.grad for name, one in model.named_parameters() if one is not kept.weight
            }
            check(
                {name: value for name, value in found.items() if not name.startswith("second.down")},
                {n: p.grad for n, p in oracle.named_parameters() if not n.startswith("second.down")},
            )


def whole_parameters(rank, size):
    """Whole parameters can be read, on one rank only, and written; ``apply`` writes them."""
    model, values = wrap(net()), net().state_dict()
    with FSDP.summon_full_params(model, writeback=False):
        model.first.up.weight.data.zero_()
    check(whole(model), values)
    with FSDP.summon_full_params(model, writeback=True):
        model.first.up.weight.data.fill_(2.0)
    values["first.up.weight"] = torch.full((10, 4), 2.0)
    check(whole(model), values)
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        sizes = [one.numel() for one in model.parameters()]
    assert (sizes == [one.numel() for one in values.values()]) == (rank == 0)
    with (
        pytest.raises(NotImplementedError, match="not supported yet"),
        FSDP.summon_full_params(model, rank0_only=True, writeback=True),
    ):
        pass

    seen = []

    def halve(module):
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            module.weight.data.mul_(0.5)

    assert model.apply(halve) is model
    assert seen == [(10, 4), (8, 10), (5, 8), (3, 5)]
    check(whole(model), {n: v / 2 if n.endswith("weight") else v for n, v in values.items()})


def kinds_of_state(rank, size):
    """Whole on the first rank only; local as it lies; the kind is set for good, or for a block.

    Whole states are not offloaded here: torch then gives out memory that it has freed, if it was the CPU's.
    """
    model, expected = wrap(net()), net().state_dict()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        found = model.state_dict()
    check(found, expected if rank == 0 else {})
    before = FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    assert before.state_dict_type == StateDictType.FULL_STATE_DICT
    set_now = FSDP.get_state_dict_type(model)
    assert set_now.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert set_now.state_dict_config.offload_to_cpu
    assert set_now.optim_state_dict_config.offload_to_cpu
    assert type(next(iter(model.state_dict().values()))).__name__ in {"ShardedTensor", "DTensor"}

    flat, other = (wrap(net(), use_orig_params=False) for _ in range(2))
    train(flat, adam(flat.parameters()), size, share(rank), steps=[0])
    for one in (flat, other):
        FSDP.set_state_dict_type(one, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())
    other.load_state_dict(copy.deepcopy(flat.state_dict()))
    check(whole_flat(other), whole_flat(flat))


def whole_flat(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def tripled(state, gradient):
    state.append(gradient.numel())
    dist.all_reduce(gradient)
    gradient.mul_(3 / dist.get_world_size())


def hooked_without_shards(rank, size):
    """Where nothing is sharded, a hook gets the gradient alone; there is one hook."""
    x, y = batch(0, size, 3)
    oracle, model, state = net(), wrap(net(), sharding_strategy=ShardingStrategy.NO_SHARD), []
    with pytest.raises(ValueError, match="must be callable"):
        model.register_comm_hook(state, "average")
    model.register_comm_hook(state, tripled)
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(state, tripled)
    (nn.functional.mse_loss(oracle(x), y) * 3).backward()
    nn.functional.mse_loss(model(x[share(rank)]), y[share(rank)]).backward()
    found = {clean(name): one.grad for name, one in model.named_parameters()}
    check(found, {name: one.grad for name, one in oracle.named_parameters()})
    assert len(state) == 2  # one flat gradient for each block


class Normed(nn.Module):
    """Two layers around a norm, with a buffer, which notes the types of what it sees."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((4,), 1.5))
        self.seen = {}

    def forward(self, x):
        self.seen["input"], self.seen["scale"] = x.dtype, self.scale.dtype
        x = self.up(x * self.scale)
        self.seen["up"] = x.dtype
        x = self.norm(x)
        self.seen["norm"] = self.norm.weight.dtype
        return self.down(x)


def precisions(rank, size):
    """Parameters, buffers, inputs and gradients each have a type; norms over the batch keep theirs."""
    low = torch.bfloat16
    torch.manual_seed(5)
    oracle = Normed()
    x, y = batch(0, size, 3)
    x = x[:4]  # the same on all ranks, so that norms over batches are those of one process
    nn.functional.mse_loss(oracle(x), y[:4]).backward()
    for kept in (True, False):
        torch.manual_seed(5)
        policy = MixedPrecision(
            param_dtype=low, reduce_dtype=low, buffer_dtype=low, keep_low_precision_grads=kept,
            cast_forward_inputs=True,
        )  # fmt: skip
        model = FSDP(
            Normed(), device_id=CPU, use_orig_params=True, mixed_precision=policy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )  # fmt: skip
        out = model(x)
        assert model.module.seen == {"input": low, "scale": low, "up": low, "norm": torch.float32}
        nn.functional.mse_loss(out.float(), y[:4]).backward()
        kinds = {
            one.grad.dtype
            for name, one in model.named_parameters()
            if one.grad is not None and "norm" not in name
        }
        assert kinds == {low if kept else torch.float32}
    with FSDP.summon_full_params(model, with_grads=True):
        for name, one in model.named_parameters():
            expected = oracle.get_parameter(clean(name)).grad
            torch.testing.assert_close(one.grad, expected, rtol=0.1, atol=0.05)

    torch.manual_seed(5)
    uncast = FSDP(
        Normed(), device_id=CPU, use_orig_params=True,
        mixed_precision=MixedPrecision(
            param_dtype=low, cast_forward_inputs=False, cast_root_forward_inputs=False,
            _module_classes_to_ignore=(),
        ),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="dtype"):  # bfloat16 layers on float32 inputs
        uncast(x)
    assert uncast.module.seen["input"] == torch.float32


def from_an_accelerator_only(rank, size):
    """FSDP1 spreads the first rank's values by an accelerator only, and says so."""
    with pytest.raises(ValueError, match="requires them to be on GPU"):
        wrap(net(), sync_module_states=True)


BODIES = [
    policies, from_meta, left_out, whole_parameters, kinds_of_state, hooked_without_shards, precisions,
    from_an_accelerator_only,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_settings(body):
    run_torch(body, 2)
