"""The side of ``bench hooks`` that runs on every rank: tasks, hooks, training."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import collectives
from collectives.bench.core.barrier import SpinBarrier
from collectives.bench.core.devices import DEVICES, Device
from collectives.bench.core.groups import initialize
from collectives.bench.core.namespaces import enter_as_rank
from collectives.bench.training import digits
from collectives.bench.training.counting_group import CountingGroup
from collectives.bench.training.models import MODELS, checksum, loss_of
from collectives.core.process_group import ProcessGroup
from collectives.ddp import DistributedDataParallel
from collectives.ddp.default_group import resolve_group
from collectives.ddp.hooks.adaptive_hook import AdaptiveState, adaptive_hook
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from collectives.ddp.hooks.one_bit_hook import OneBitState, one_bit_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from collectives.ddp.hooks.top_k_hook import TopKState, top_k_hook
from collectives.ranks.processes import commands

__all__ = ["HOOKS", "TASKS", "Job", "Outcome", "Place", "train"]


def _power(rank: int, hook: Any = powerSGD_hook) -> Callable[[ProcessGroup, int], tuple[Any, Any]]:
    return lambda group, start: (
        PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, start)),
        hook,
    )


HOOKS: dict[str, Callable[[ProcessGroup, int], tuple[Any, Any]] | None] = {
    "none": None,
    "noop": lambda group, _: (group, noop_hook),
    "allreduce": lambda group, _: (group, allreduce_hook),
    "fp16": lambda group, _: (group, fp16_compress_hook),
    "bf16": lambda group, _: (group, bf16_compress_hook),
    "int8-tensor": lambda group, _: (group, quantization_pertensor_hook),
    "int8-block": lambda group, _: (group, quantization_perchannel_hook),
    "powersgd-1": _power(1),
    "powersgd-2": _power(2),
    "powersgd-4": _power(4),
    "powersgd-4-fp16": _power(4, fp16_compress_wrapper(powerSGD_hook)),
    "powersgd-batched": _power(1, batched_powerSGD_hook),
    "one-bit": lambda group, start: (OneBitState(group, start), one_bit_hook),
    "top-k": lambda group, start: (TopKState(group, 0.01, start), top_k_hook),
    "adaptive": lambda group, start: (AdaptiveState(group, start_iter=start), adaptive_hook),
}
"""Hooks by name: makes state and hook of a group and the number of steps that are averaged exactly."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks are.

    Attributes:
        backend: name of the backend.
        memory: path of the memory for :class:`~collectives.bench.core.barrier.SpinBarrier`.
        port: of the parent's store.
        host: address of that store.
        namespaces: the network namespace of each rank, where there are machines.
        device: type of the device that models and data are on.
    """

    backend: str
    memory: str
    port: int
    host: str
    namespaces: tuple[str, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Job:
    """A command: train a task with a hook.

    Attributes:
        task: name of the task.
        hook: name of the hook.
        steps: optimizer steps.
        exact: first of those that a hook with a state averages exactly.
        warmup: first of those that are not timed, nor their bytes counted.
    """

    task: str
    hook: str
    steps: int
    exact: int
    warmup: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rank's answer.

    Attributes:
        iteration_ns: each timed step.
        losses: of this rank at each step.
        sent_bytes: what it sent in the timed steps, as :class:`.counting_group.CountingGroup` counts.
        accuracy: part of the held-out samples that the model reads right; ``None`` where there are none.
        checksum: of all parameters, bit for bit.
        parameters: number of trained parameters.
    """

    iteration_ns: list[int]
    losses: list[float]
    sent_bytes: float
    accuracy: float | None
    checksum: int
    parameters: int


@dataclass(slots=True)
class _Training:
    """A task on one rank.

    Attributes:
        model: the model.
        optimizer: its optimizer.
        losses: yields a function for each step, which returns the loss of a model on this rank's share.
        accuracy: returns that of a model; ``None`` where it means nothing.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: Iterator[Callable[[nn.Module], torch.Tensor]]
    accuracy: Callable[[nn.Module], float] | None = None


def _digits(rank: int, size: int, steps: int, device: str) -> _Training:
    """A small convolutional network reads handwritten digits; SGD with momentum."""
    data = digits.load_digits().to(device)
    recipe = digits.Recipe(steps)
    model = digits.build_model(0).to(device)
    images, labels = data.train.tensors

    def losses() -> Iterator[Callable[[nn.Module], torch.Tensor]]:
        for share in digits.batches(data.train, recipe, rank, size):
            x, y = images[share], labels[share]
            yield lambda parallel, x=x, y=y: nn.functional.cross_entropy(parallel(x), y)  # type: ignore[misc]

    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    return _Training(model, optimizer, losses(), lambda module: digits.accuracy(module, data.test))


_WORDS = 64
_LENGTH = 32
_BATCH = 8


def _language(rank: int, size: int, steps: int, device: str) -> _Training:  # noqa: ARG001
    """A transformer learns which word follows which: random texts of a random Markov chain; Adam."""
    transformers: Any = importlib.import_module("transformers")

    generator = torch.Generator().manual_seed(0)
    follows = torch.softmax(3 * torch.randn(_WORDS, _WORDS, generator=generator), dim=1)
    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=_WORDS, n_positions=_LENGTH, n_embd=128, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.to(device)
    model.loss_type = "ForCausalLM"  # transformers does not know so by the class's name, and warns

    def losses() -> Iterator[Callable[[nn.Module], torch.Tensor]]:
        own = torch.Generator().manual_seed(1 + rank)
        for _ in range(steps):
            words = torch.randint(_WORDS, (_BATCH, 1), generator=own)
            text = [words]
            for _ in range(_LENGTH - 1):
                text.append(torch.multinomial(follows[text[-1][:, 0]], 1, generator=own))
            ids = torch.cat(text, dim=1).to(device)
            yield lambda parallel, ids=ids: parallel(input_ids=ids, labels=ids).loss  # type: ignore[misc]

    return _Training(model.train(), torch.optim.Adam(model.parameters(), lr=2e-3), losses())


def _random(name: str) -> Callable[[int, int, int, str], _Training]:
    """Returns a task that is only good for its times: a model of the field on one batch of random data."""

    def make(rank: int, size: int, steps: int, device: str) -> _Training:  # noqa: ARG001
        spec = MODELS[name]
        torch.manual_seed(0)
        model = spec.build().to(device)
        made = spec.inputs(spec.batch, spec.length, torch.Generator().manual_seed(100 + rank))
        inputs = {key: tensor.to(device) for key, tensor in made.items()}
        losses = (lambda parallel: loss_of(parallel(**inputs)) for _ in range(steps))
        return _Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), losses)

    return make


TASKS: dict[str, Callable[[int, int, int, str], _Training]] = {
    "digits": _digits,
    "language": _language,
    **{name: _random(name) for name in MODELS},
}
"""Tasks by name: made from rank, number of ranks, steps and type of the device."""


def train(rank: int, connection: Connection, size: int, place: Place) -> None:
    """Body of a rank: sends an :class:`Outcome` for every :class:`Job` it gets.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        size: number of ranks.
        place: where it is.
    """
    torch.set_num_threads(1)
    enter_as_rank(place.namespaces, rank)
    device = DEVICES[place.device]
    device.take(rank, size)
    initialize(rank, size, place.port, place.backend, place.host)
    barrier = SpinBarrier(place.memory, rank, size)
    for job in commands(connection):
        connection.send(_run(job, rank, size, device.starting(barrier), device))
        gc.collect()
    barrier.close()
    collectives.destroy_process_group()


def _run(job: Job, rank: int, size: int, barrier: Callable[[], None], device: Device) -> Outcome:
    group = CountingGroup(resolve_group(None))
    training = TASKS[job.task](rank, size, job.steps, device.kind)
    parallel = DistributedDataParallel(training.model, process_group=group)
    make = HOOKS[job.hook]
    if make is not None:
        parallel.register_comm_hook(*make(group, job.exact))
    torch.manual_seed(200 + rank)  # the same dropout for all hooks
    times: list[int] = []
    losses: list[float] = []
    for step, compute in enumerate(training.losses):
        if step == job.warmup:
            group.sent_bytes = 0.0
        barrier()
        begin = device.mark()
        training.optimizer.zero_grad()
        loss = compute(parallel)
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        times.append(device.between_ns(begin, device.mark()))
        losses.append(loss.item())
    sent = group.sent_bytes
    return Outcome(
        iteration_ns=times[job.warmup :],
        losses=losses,
        sent_bytes=sent,
        accuracy=None if training.accuracy is None else training.accuracy(training.model),
        checksum=checksum(training.model),
        parameters=sum(p.numel() for p in training.model.parameters() if p.requires_grad),
    )
