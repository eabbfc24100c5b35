"""State dicts of every kind of parallel model over our groups: one set of names, one set of values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - torch's own acronym
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_systems.small import Block, Net, batch, check, net, share, train
from torch_world import run_torch

WHOLE = StateDictOptions(full_state_dict=True)


def momentum(parameters):
    """One tensor of state for each parameter: of more, torch's FSDP1 gathers a wrong one on the CPU."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain():
    return net(even=True)


def replicated():
    return DistributedDataParallel(plain())


def sharded_flat():
    return FSDP(
        plain(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
        device_id=torch.device("cpu"), device_mesh=init_device_mesh("cpu", (4,)),
    )  # fmt: skip


def sharded():
    model = plain()
    for block in (model.first, model.second):
        fully_shard(block)
    return fully_shard(model)


def split_layers():
    names = ("first", "second")
    plan = {f"{name}.up": ColwiseParallel() for name in names}
    plan.update({f"{name}.down": RowwiseParallel() for name in names})
    return parallelize_module(plain(), init_device_mesh("cpu", (4,)), plan)


def oracle(size, steps):
    """Returns model and optimizer of one process."""
    model = plain()
    optimizer = momentum(model.parameters())
    train(model, optimizer, size, outputs=4, steps=range(steps))
    return model, optimizer


def flat(state):
    """Returns the optimizer's buffers by the parameters' names."""
    return {name: one["momentum_buffer"] for name, one in sorted(state["state"].items())}


def canonical_names(rank, size):
    """Each kind of model goes on from the whole state of the one before, as one process would."""
    alone, alone_optimizer = oracle(size, 3)
    parameters, moments = get_state_dict(alone, alone_optimizer)
    after, _ = oracle(size, 5)
    given = None
    kinds = [replicated, sharded_flat, sharded, split_layers]
    for make in [*kinds, replicated]:
        model = make()
        optimizer = momentum(model.parameters())
        rows = slice(None) if make is split_layers else share(rank)
        if given is None:
            train(model, optimizer, size, rows, outputs=4, steps=range(3))
        else:
            set_state_dict(
                model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=WHOLE
            )
        found, state = get_state_dict(model, optimizer)
        check(found, parameters)
        check(flat(state), flat(moments))
        assert [sorted(group["params"]) for group in state["param_groups"]] == [sorted(parameters)]
        kept_apart = make is not replicated
        assert isinstance(found["first.up.weight"], DTensor) == kept_apart
        assert isinstance(flat(state)["first.up.weight"], DTensor) == kept_apart
        given = copy.deepcopy(get_state_dict(model, optimizer, options=WHOLE))  # those of DDP are its own
        assert not any(
            isinstance(one, DTensor) for part in (given[0], flat(given[1])) for one in part.values()
        )
        check(given[0], parameters)
        check(flat(given[1]), flat(moments))
        train(model, optimizer, size, rows, outputs=4, steps=range(3, 5))
        check(get_model_state_dict(model), dict(after.state_dict()))


def parts_of_states(rank, size):
    """What the options leave out, what they let be missing, and the optimizer's state in one level."""
    model = sharded()
    model.first.requires_grad_(False)
    optimizer = momentum([one for one in model.parameters() if one.requires_grad])
    train(model, optimizer, size, share(rank), outputs=4)
    thawed = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(thawed) == [name for name in plain().state_dict() if name.startswith("second")]
    again = sharded()
    with pytest.raises(RuntimeError, match="Missing key"):
        set_model_state_dict(again, thawed)
    missing = set_model_state_dict(again, thawed, options=StateDictOptions(strict=False))
    assert missing.missing_keys == [name for name in plain().state_dict() if name.startswith("first")]
    check(get_model_state_dict(again), whole_of(model))  # the rest never changed

    in_one_level = StateDictOptions(flatten_optimizer_state_dict=True)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=in_one_level))
    assert {name for name in state if name.startswith("state.")} == {
        f"state.{name}.momentum_buffer" for name in thawed
    }
    again.first.requires_grad_(False)
    fresh = momentum([one for one in again.parameters() if one.requires_grad])
    set_optimizer_state_dict(again, fresh, state, options=in_one_level)
    for one, its in ((model, optimizer), (again, fresh)):
        train(one, its, size, share(rank), outputs=4, steps=[8])
    check(get_model_state_dict(again), whole_of(model))


def whole_of(model):
    return get_model_state_dict(model, options=WHOLE)


def only_of_a_part(rank, size):
    """The deprecated way to the states of a submodule, with its prefix and without."""
    model = sharded()
    for keep in (True, False):
        with pytest.warns(FutureWarning, match="submodules"):
            found = get_model_state_dict(
                model, submodules={model.second}, options=StateDictOptions(keep_submodule_prefixes=keep)
            )
        prefix = "second." if keep else ""
        check(found, {prefix + name: one for name, one in plain().second.state_dict().items()})


def from_rank_0(rank, size):
    """Only rank 0 has a state, of an other seed; the shards, the parameters of layers and copies get it."""
    torch.manual_seed(100 + rank)
    mine = Net(even=True).state_dict()
    torch.manual_seed(100)
    expected = Net(even=True).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for make in (replicated, sharded, split_layers):
        model = make()
        set_model_state_dict(model, dict(mine) if rank == 0 else {}, options=options)
        found = whole_of(model)
        assert all(torch.equal(found[name], one) for name, one in expected.items()), make.__name__
        x, _ = batch(0, size, 4)
        assert torch.isfinite(model(x)).all()


def everything(rank, size):
    canonical_names(rank, size)
    parts_of_states(rank, size)
    only_of_a_part(rank, size)
    from_rank_0(rank, size)


def test_state_dicts():
    run_torch(everything, 4)
