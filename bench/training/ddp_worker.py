"""The side of ``bench ddp`` that runs on every rank: builds model and wrapper, and times iterations."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import collectives
from collectives.bench.core.barrier import SpinBarrier
from collectives.bench.core.devices import DEVICES, Device
from collectives.bench.core.groups import initialize, initialize_torch
from collectives.bench.core.machine import bind_to_core
from collectives.bench.training.ddp_peers import Peer
from collectives.bench.training.models import MODELS, checksum, loss_of
from collectives.ddp import DistributedDataParallel
from collectives.ddp.hooks import debugging_hooks, default_hooks
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


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank trains.

    Attributes:
        peer: the peer.
        model: name of the model.
        batch: samples of each rank in an iteration.
        length: of a sample: width and height of an image, tokens of a text.
        optimizer: name of the optimizer.
        arguments: keyword arguments of the wrapper, but for what the peer says itself.
        imports: modules to import first, which register further backends.
        cores: on which each rank stays with all its threads; empty where the kernel chooses.
        device: type of the device that model and data are on.
    """

    peer: Peer
    model: str
    batch: int
    length: int
    optimizer: str
    arguments: Mapping[str, Any]
    imports: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank's first answer, after one iteration.

    Attributes:
        parameters: number of trained parameters.
        parameter_tensors: number of tensors they lie in.
        grad_norm: norm of all gradients.
        start_memory_bytes: memory of the device that the rank held before the model was built.
    """

    parameters: int
    parameter_tensors: int
    grad_norm: float
    start_memory_bytes: int


@dataclass(slots=True)
class Times:
    """A rank's answer to a number of iterations: nanoseconds of each, whole and by phase."""

    iteration_ns: list[int]
    forward_ns: list[int]
    backward_ns: list[int]
    step_ns: list[int]


@dataclass(frozen=True, slots=True)
class End:
    """A rank's answer to the number zero.

    Attributes:
        checksum: of all parameters, bit for bit.
        peak_memory_bytes: most memory of the device that the rank held at any time.
    """

    checksum: int
    peak_memory_bytes: int


class Trainer:
    """Trains one peer on one rank, on one batch of random data.

    Args:
        model: the model.
        parallel: the same, wrapped or not.
        inputs: keyword arguments of forward.
        optimizer: name of the optimizer.
        barrier: lets all ranks go at the same time.
        device: where model and inputs are.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: nn.Module,
        inputs: dict[str, torch.Tensor],
        optimizer: str,
        barrier: Callable[[], None],
        device: Device,
    ) -> None:
        self.model = model
        self._parallel = parallel
        self._inputs = inputs
        self._barrier = device.starting(barrier)
        self._device = device
        make = OPTIMIZERS[optimizer]
        self._optimizer = None if make is None else make(model.parameters())

    def iterate(self, times: Times) -> None:
        """Runs an iteration; called by all ranks, which begin together."""
        self._barrier()
        mark, between_ns = self._device.mark, self._device.between_ns
        begin = mark()
        self.model.zero_grad()
        loss = loss_of(self._parallel(**self._inputs))
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

    def run(self, iterations: int) -> Times:
        """Runs some iterations without garbage collection within; returns their times."""
        times = Times([], [], [], [])
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
    if given.cores:
        bind_to_core(given.cores[rank])
    for module in given.imports:
        importlib.import_module(module)
    spec = MODELS[given.model]
    if spec.package:
        importlib.import_module(spec.package)
    device = DEVICES[given.device]
    device.take(rank, size)
    start_bytes = device.held_bytes()
    torch.manual_seed(rank)  # every rank begins with other weights: the wrapper must bring them together
    model = spec.build().to(device.kind)
    made = spec.inputs(given.batch, given.length, torch.Generator().manual_seed(100 + rank))
    inputs = {name: tensor.to(device.kind) for name, tensor in made.items()}
    wrap, leave = _join(given, rank, size, port)
    barrier = SpinBarrier(memory, rank, size)
    trainer = Trainer(model, wrap(model), inputs, given.optimizer, barrier, device)
    torch.manual_seed(200 + rank)  # the same dropout for all peers
    trainer.run(1)
    tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    number = sum(tensor.numel() for tensor in tensors)
    connection.send(Ready(number, len(tensors), trainer.grad_norm(), start_bytes))
    for iterations in commands(connection):
        if iterations:
            connection.send(trainer.run(iterations))
        else:
            connection.send(End(checksum(model), device.most_held_bytes()))
    barrier.close()
    del trainer
    leave()


def _join(
    given: Assignment, rank: int, size: int, port: int
) -> tuple[Callable[[nn.Module], nn.Module], Callable[[], None]]:
    """Makes the peer's group; returns the function that wraps a model, and the one that leaves the group."""
    peer = given.peer
    arguments = dict(given.arguments)
    if peer.find_unused:
        arguments["find_unused_parameters"] = True
    if peer.kind == "alone":
        return (lambda model: model), (lambda: None)
    if peer.kind == "ours":
        initialize(rank, size, port, peer.backend)

        def wrap_ours(model: nn.Module) -> nn.Module:
            parallel = DistributedDataParallel(model, **arguments)
            if peer.hook:
                parallel.register_comm_hook(None, _hook(peer.hook, default_hooks, debugging_hooks))
            return parallel

        return wrap_ours, collectives.destroy_process_group

    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

    initialize_torch(rank, size, port, peer.backend)

    def wrap_torch(model: nn.Module) -> nn.Module:
        parallel = nn.parallel.DistributedDataParallel(model, **arguments)
        if peer.hook:
            parallel.register_comm_hook(None, _hook(peer.hook, torch_default, torch_debugging))
        return parallel

    return wrap_torch, dist.destroy_process_group


def _hook(name: str, default: Any, debugging: Any) -> Callable[..., Any]:
    hook: Callable[..., Any]
    hook = debugging.noop_hook if name == "noop" else getattr(default, f"{name}_compress_hook")
    return hook
