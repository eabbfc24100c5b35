"""The side of ``bench ddp`` that runs on every rank: builds model and wrapper, and times iterations."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

import collectives
from collectives.bench.comparison.operations import OPERATIONS as MEASURED
from collectives.bench.comparison.operations import bus_factor
from collectives.bench.core.barrier import SpinBarrier
from collectives.bench.core.devices import DEVICES, Device
from collectives.bench.core.groups import LOCALHOST, initialize, initialize_torch
from collectives.bench.core.machine import bind_to_core
from collectives.bench.core.namespaces import enter_as_rank
from collectives.bench.training.ddp_peers import Peer
from collectives.bench.training.hooks import register
from collectives.bench.training.models import checksum
from collectives.bench.training.tasks import TASKS, Data
from collectives.core.operations import OPERATIONS
from collectives.core.process_group import ProcessGroup
from collectives.ddp import DistributedDataParallel
from collectives.ddp.default_group import resolve_group
from collectives.ranks.processes import commands

__all__ = [
    "OPTIMIZERS",
    "Assignment",
    "End",
    "Ready",
    "Times",
    "Trainer",
    "train",
]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
}


_COLLECTIVE = {operation.name: operation.collective for operation in OPERATIONS}
"""The collective of each operation, of lists or of one tensor."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank trains.

    Attributes:
        peer: the peer.
        task: name of the model.
        batch: samples of each rank in an iteration.
        length: of a sample: width and height of an image, tokens of a text.
        optimizer: name of the optimizer; empty for the model's own.
        exact: first steps that a hook with a state averages exactly.
        arguments: keyword arguments of the wrapper, but for what the peer says itself.
        imports: modules to import first, which register further backends.
        cores: on which each rank stays with all its threads; empty where the kernel chooses.
        device: type of the device that model and data are on.
        host: where the parent's store listens.
        namespaces: the network namespace of each rank, where some play machines.
    """

    peer: Peer
    task: str
    batch: int
    length: int
    optimizer: str
    exact: int
    arguments: Mapping[str, Any]
    imports: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    device: str = "cpu"
    host: str = LOCALHOST
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank's first answer, after one iteration.

    Attributes:
        parameters: number of trained parameters.
        parameter_tensors: number of tensors they lie in.
        grad_norm: norm of all gradients.
        start_memory_bytes: memory of the device that the rank held before the model was built.
        loss: of this rank.
    """

    parameters: int
    parameter_tensors: int
    grad_norm: float
    start_memory_bytes: int
    loss: float


@dataclass(slots=True)
class Times:
    """A rank's answer to a number of iterations.

    Attributes:
        iteration_ns: nanoseconds of each, whole, and by phase.
        losses: of this rank in each.
        sent_bytes: the least that a rank sends in each for what its group did, on the average of all ranks;
            empty of a group that does not count it.
    """

    iteration_ns: list[int] = field(default_factory=list)
    forward_ns: list[int] = field(default_factory=list)
    backward_ns: list[int] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class End:
    """A rank's answer to the number zero.

    Attributes:
        checksum: of all parameters, bit for bit.
        peak_memory_bytes: most memory of the device that the rank held at any time.
        accuracy: part of the held-out samples that the model reads right; ``None`` where there are none.
    """

    checksum: int
    peak_memory_bytes: int
    accuracy: float | None = None


class Trainer:
    """Trains one peer on one rank.

    Args:
        model: the model.
        parallel: the same, wrapped or not.
        data: what it is trained on.
        optimizer: its optimizer; ``None`` for none.
        barrier: lets all ranks go at the same time.
        device: where model and data are.
        sent: returns the bytes sent so far; ``None`` where they are not counted.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: nn.Module,
        data: Data,
        optimizer: torch.optim.Optimizer | None,
        barrier: Callable[[], None],
        device: Device,
        sent: Callable[[], float] | None,
    ) -> None:
        self.model = model
        self._parallel = parallel
        self._losses = data.losses
        self._barrier = device.starting(barrier)
        self._device = device
        self._optimizer = optimizer
        self._sent = sent

    def iterate(self, times: Times) -> None:
        """Runs an iteration; called by all ranks, which begin together."""
        compute = next(self._losses)
        before = self._sent() if self._sent else 0.0
        self._barrier()
        mark, between_ns = self._device.mark, self._device.between_ns
        begin = mark()
        self.model.zero_grad()
        loss = compute(self._parallel)
        forward = mark()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = mark()
        if self._optimizer is not None:
            self._optimizer.step()
        end = mark()
        times.iteration_ns.append(between_ns(begin, end))
        times.forward_ns.append(between_ns(begin, forward))
        times.backward_ns.append(between_ns(forward, backward))
        times.step_ns.append(between_ns(backward, end))
        times.losses.append(loss.item())
        if self._sent:
            times.sent_bytes.append(self._sent() - before)

    def run(self, iterations: int) -> Times:
        """Runs some iterations without garbage collection within; returns their times."""
        times = Times()
        gc.collect()
        gc.disable()
        try:
            for _ in range(iterations):
                self.iterate(times)
        finally:
            gc.enable()
        return times

    def grad_norm(self) -> float:
        """Returns the norm of all gradients."""
        squares = [
            parameter.grad.double().square().sum()
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        return float(torch.stack(squares).sum().sqrt())


def train(rank: int, connection: Connection, size: int, given: Assignment, memory: str, port: int) -> None:
    """Body of a rank: sends :class:`Ready`, then :class:`Times` for every number of iterations it gets.

    The number zero asks for :class:`End`.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        size: number of ranks.
        given: what it trains.
        memory: path of the memory for :class:`~collectives.bench.core.barrier.SpinBarrier`.
        port: of the parent's store.
    """
    torch.set_num_threads(1)
    enter_as_rank(given.namespaces, rank)
    if given.cores:
        bind_to_core(given.cores[rank])
    for module in given.imports:
        importlib.import_module(module)
    task = TASKS[given.task]
    device = DEVICES[given.device]
    device.take(rank, size)
    torch.manual_seed(rank)  # every rank begins with other weights: the wrapper must bring them together
    data = task.data(given.batch, given.length, rank, size, device.kind)
    start_bytes = device.held_bytes()
    model = task.build().to(device.kind)
    make = OPTIMIZERS[given.optimizer] if given.optimizer else task.optimizer
    optimizer = None if make is None else make(model.parameters())
    wrap, sent, leave = _join(given, rank, size, port)
    barrier = SpinBarrier(memory, rank, size)
    trainer = Trainer(model, wrap(model), data, optimizer, barrier, device, sent)
    torch.manual_seed(200 + rank)  # the same dropout for all peers
    first = trainer.run(1)
    tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    number = sum(tensor.numel() for tensor in tensors)
    connection.send(Ready(number, len(tensors), trainer.grad_norm(), start_bytes, first.losses[0]))
    for iterations in commands(connection):
        if iterations:
            connection.send(trainer.run(iterations))
        else:
            accuracy = None if data.accuracy is None else data.accuracy(model)
            connection.send(End(checksum(model), device.most_held_bytes(), accuracy))
    barrier.close()
    del trainer
    leave()


def _join(
    given: Assignment, rank: int, size: int, port: int
) -> tuple[Callable[[nn.Module], nn.Module], Callable[[], float] | None, Callable[[], None]]:
    """Makes the peer's group.

    Returns:
        The function that wraps a model, the one that returns the bytes that a rank had to send so far, where
        the group counts, and the one that leaves the group.
    """
    peer = given.peer
    arguments = dict(given.arguments)
    if peer.find_unused:
        arguments["find_unused_parameters"] = True
    if peer.kind == "alone":
        return (lambda model: model), None, (lambda: None)
    ours = peer.kind == "ours"
    (initialize if ours else initialize_torch)(rank, size, port, peer.backend, given.host)
    group = resolve_group(None) if ours else None

    def wrap(model: nn.Module) -> nn.Module:
        wrapper = DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
        parallel: nn.Module = wrapper(model, **arguments)
        register(parallel, peer.kind, peer.hook, group, given.exact)
        return parallel

    if group is None:
        return wrap, None, torch_dist.destroy_process_group
    return wrap, lambda: _least_sent(group), collectives.destroy_process_group


def _least_sent(group: ProcessGroup) -> float:
    """Returns the bytes that a rank had to send so far, on the average of all ranks."""
    sent = 0.0
    for name, total in group.stats().items():
        collective = _COLLECTIVE.get(name, name)
        if collective in MEASURED:
            sent += total["bytes"] * (bus_factor(collective, group.size()) or 0.0)
    return sent
