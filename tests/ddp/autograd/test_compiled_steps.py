"""``torch.compile`` of whole training steps: forward, backward and optimizer; bitwise as without it."""

from __future__ import annotations

import pytest
import torch
from compiled_programs import compare_compiled
from harness import run_world
from hook_zoo import HOOKS
from on_ranks import on_ranks
from torch import nn

import collectives as dist
from collectives.ddp import DistributedDataParallel, Join, MixedPrecision, SyncBatchNorm
from collectives.ddp.model_averaging import PeriodicModelAverager
from collectives.ddp.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("preloaded_python")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def step_of(model, optimizer, module=None):
    module = module or model

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return torch.cat([loss.detach().reshape(1), *(p.detach().flatten() for p in module.parameters())])

    return step


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(make=network, **options):
    model = DistributedDataParallel(make(), **options)
    return step_of(model, sgd(model))


def zero(**options):
    model = DistributedDataParallel(network())
    return step_of(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, **options))


def hooked(name):
    make_state, hook, _ = HOOKS[name]
    model = DistributedDataParallel(network())
    if name.startswith("zero"):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01
        )
        hook = hook(HOOKS["allreduce"][1], model, optimizer)
    else:
        optimizer = sgd(model)
    model.register_comm_hook(make_state(dist.GroupMember.WORLD), hook)
    return step_of(model, optimizer)


def accumulating():
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    rest = step_of(model, optimizer)

    def step(x):
        with model.no_sync():
            model(x + 1).square().mean().backward()
        return rest(x)

    return step


def joined():
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def step(x):
        with Join([model, optimizer]):
            for _ in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return step


def averaged():
    model = network()
    return step_of(model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(2)))


class Rows(nn.Module):
    """An embedding with sparse gradients, and a layer that not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(9, 4, sparse=True)
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.rows(x.long())
        return self.layer(x) if dist.get_rank() else self.other(x)


def sparse():
    model = DistributedDataParallel(Rows(), find_unused_parameters=True)
    return step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), SyncBatchNorm(8), nn.Linear(8, 4))


def with_rows(make):
    inner = make()
    return lambda x: inner(torch.stack([x, x.sin()]))


def delayed():
    module = network()
    model = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("2.weight", module[2].weight)],
        param_to_hook_all_reduce=module[0].weight,
    )
    return step_of(model, sgd(model))


def made_within():
    """Wraps the module in the compiled function itself, once."""
    module, models = network(), []
    optimizer = sgd(module)

    def step(x):
        if not models:
            models.append(DistributedDataParallel(module))
        optimizer.zero_grad()
        models[0](x).square().mean().backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    return step


def parameter_hooks():
    """Clips each gradient as it comes, from a hook that the compiler may take up."""
    model = DistributedDataParallel(network())

    def clip(parameter):
        parameter.grad.clamp_(-0.1, 0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return step_of(model, sgd(model))


HOOKED = ["allreduce", "zero", "zero interleaved", "wrapped", "8 bits in parts", "low rank", "adaptive"]
"""Hooks run outside of all graphs, so that one of each make does: with an optimizer, a hook within."""

PROGRAMS = {
    "plain": plain,
    "views": lambda: plain(gradient_as_bucket_view=True, bucket_cap_mb=0),
    "static graph": lambda: plain(static_graph=True),
    "unused": lambda: plain(find_unused_parameters=True),
    "skipped": lambda: plain(skip_all_reduce_unused_params=True),
    "mixed precision": lambda: plain(mixed_precision=MixedPrecision(torch.bfloat16)),
    "sparse": sparse,
    "delayed": delayed,
    "synchronised batch norm": lambda: with_rows(lambda: plain(normalised)),
    "parameter hooks": parameter_hooks,
    "zero": zero,
    "zero, views": lambda: zero(parameters_as_bucket_view=True),
    "accumulating": accumulating,
    "joined": joined,
    "averaged": averaged,
    "made within": made_within,
    **{f"hook: {name}": lambda name=name: hooked(name) for name in HOOKED},
}


def run(rank, size, names, compiler):
    return compare_compiled({name: PROGRAMS[name] for name in names}, compiler)


def parts(names):
    return [names[start : start + 8] for start in range(0, len(names), 8)]


CASES = [
    *(("host", "eager", names) for names in parts(list(PROGRAMS))),
    *(("gloo", "aot_eager", names) for names in parts([name for name in PROGRAMS if "hook:" not in name])),
]
"""Hooks run outside of all graphs, on which ``aot_eager`` works; and it brings gradients in another order, so
that hooks that compress buckets give other values."""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "compiler", "names"), CASES, ids=lambda one: one if isinstance(one, str) else one[0]
)
def test_every_step_trains_as_without_the_compiler(backend, compiler, names) -> None:
    assert run_world(run, 2, names, compiler, backend=backend, timeout=240) == [{}] * 2


@pytest.mark.full
@on_ranks(2, world=True)
def test_compiled_autograd_is_refused(rank, size):
    """It would leave gradients this rank's own."""
    import torch._dynamo

    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(plain(), backend="eager")
        with pytest.raises(RuntimeError, match="compiled autograd tells nobody") as raised:
            step(torch.ones(4))
    torch._dynamo.reset()
    assert str(raised.value).startswith(f"[rank {rank}] DistributedDataParallel(Sequential): ")
