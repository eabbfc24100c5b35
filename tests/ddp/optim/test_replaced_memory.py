"""ZeroRedundancyOptimizer where parameters get other memory, or what it holds is replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from given_gradients import same_on_all_ranks
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from zero_training import batch, bits, equal_values, net, same

from collectives.ddp import DistributedDataParallel
from collectives.ddp.optim import ZeroRedundancyOptimizer

BUCKET_VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


def clip_data(module):
    """As a Wasserstein GAN clips its critic."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def clip_some(module):
    for parameter in module.wide.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def set_memory(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.set_(parameter.clone())


def transpose(module):
    module.last.weight.data = module.last.weight.data.t().clone().t()


def load(module):
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.05)


def channels_first(module):
    module.to(memory_format=torch.contiguous_format)


def swap(module):
    for parameter in module.last.parameters():
        parameter.grad = None
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() / 2))


def trained_with(group, change, view, kind, options, within):
    """Trains a model by ZeRO and one by the wrapped optimizer; changes the parameters in each step."""
    models = [DistributedDataParallel(net(), process_group=group) for _ in range(2)]
    plain = kind(models[0].parameters(), **options)
    zero = ZeroRedundancyOptimizer(
        models[1].parameters(), kind, process_group=group, parameters_as_bucket_view=view, **options
    )
    states = [[], []]
    for step in range(5):
        for model, optimizer, seen in zip(models, (plain, zero), states, strict=True):
            optimizer.zero_grad()
            model(batch(group.rank(), step)).square().mean().backward()
            if within:
                change(model.module)
            optimizer.step()
            seen.append(bits(model))
            if not within:
                change(model.module)
    assert same(*states)
    assert same_on_all_ranks(group, states[1][-1])


CHANGES = [clip_data, clip_some, set_memory, transpose, load, channels_first]


@BUCKET_VIEWS
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("within", [False, True], ids=["after a step", "before a step"])
def test_parameters_may_get_other_memory(change, view, within) -> None:
    options = {"lr": 0.05, "momentum": 0.9}
    run_ranks(trained_with, 2, change, view, torch.optim.SGD, options, within, backend="host")


@BUCKET_VIEWS
def test_parameters_may_have_their_contents_swapped(view) -> None:
    run_ranks(trained_with, 2, swap, view, torch.optim.SGD, {"lr": 0.05}, False, backend="host")


def leave(module):
    pass


class OutOfPlace(torch.optim.Optimizer):
    """Gives parameters other memory in each step."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


@BUCKET_VIEWS
def test_the_wrapped_optimizer_may_give_parameters_other_memory(view) -> None:
    run_ranks(trained_with, 2, leave, view, OutOfPlace, {}, False, backend="host")


@BUCKET_VIEWS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@on_ranks(2)
def test_parameters_may_be_converted_between_steps(group, view, dtype):
    """Converts a module between steps, all of it or one parameter, and trains on in the other data type."""
    models = [net() for _ in range(2)]
    plain = torch.optim.SGD(models[0].parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(
        models[1].parameters(), torch.optim.SGD, process_group=group, parameters_as_bucket_view=view, lr=0.05
    )
    states = [[], []]
    for step in range(4):
        for model, optimizer, seen in zip(models, (plain, zero), states, strict=True):
            if step == 1:
                model.last.weight.data = model.last.weight.data.to(dtype)
            elif step == 2:
                model.to(dtype)
            for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.full_like(parameter, 1 / (3 + index))
            optimizer.step()
            seen.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(equal_values(dict(enumerate(a)), dict(enumerate(b))) for a, b in zip(*states, strict=True))
    assert {parameter.dtype for parameter in models[1].parameters()} == {dtype}
    assert same_on_all_ranks(group, bits(models[1]))


def replaced_state(group):
    """Loads state into the wrapped optimizer itself, and replaces it; the consolidated state follows."""
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, group, lr=0.1, momentum=0.9)

    def step():
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        zero.step()

    def consolidated():
        zero.consolidate_state_dict()
        if group.rank() == 0:
            return {
                place: state["momentum_buffer"].mean().item()
                for place, state in zero.state_dict()["state"].items()
            }
        return None

    step()
    assert consolidated() in (None, {0: 1.0, 1: 1.0})
    inner = copy.deepcopy(zero.optim.state_dict())
    for state in inner["state"].values():
        state["momentum_buffer"].fill_(7.0)
    zero.optim.load_state_dict(inner)
    assert consolidated() in (None, {0: 7.0, 1: 7.0})
    zero.state = {p: {"momentum_buffer": torch.full_like(p, 9.0)} for p in zero.state}
    assert consolidated() in (None, {0: 9.0, 1: 9.0})
    step()
    after = consolidated()
    assert zero.state is zero.optim.state
    return after


def test_state_that_is_replaced_is_the_state() -> None:
    after, _ = run_ranks(replaced_state, 2, backend="host")
    assert after == pytest.approx({0: 9.1, 1: 9.1})


@on_ranks(2)
def test_other_parameters_in_the_groups_are_refused(group):
    """Puts other parameters into the groups, which nobody owns."""
    module = nn.Linear(3, 3)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, group, lr=0.1)
    zero.step()
    zero.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3, 3))
    words = r"parameter 0 of group 0 is another one than was dealt out.*add_param_group"
    with pytest.raises(ValueError, match=words):
        zero.step()
