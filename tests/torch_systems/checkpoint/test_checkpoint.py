"""Distributed checkpoints of torch over our groups: what was saved comes back, to other layouts too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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
from torch.distributed.fsdp import fully_shard
from torch_systems.small import adam, check, net, share, train, trained
from torch_world import run_torch


def sharded(**options):
    model = net()
    for part in (model.first, model.second, model):
        fully_shard(part, **options)
    return model, adam(model.parameters())


class Progress:
    """State of the program that is no tensor."""

    def __init__(self, step):
        self.step = step

    def state_dict(self):
        return {"step": self.step, "words": "as they were"}

    def load_state_dict(self, state):
        assert state["words"] == "as they were"
        self.step = state["step"]


def states(model, optimizer, progress):
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "progress": progress}


def goes_on(rank, size, folder, model, optimizer):
    """Loads into a model and trains the steps 3 and 4; the result is one process's after five steps."""
    progress = Progress(0)
    state = states(model, optimizer, progress)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert progress.step == 3
    train(model, optimizer, size, share(rank), steps=range(3, 5))
    check(get_model_state_dict(model), trained(net(), size, steps=range(5)))


def saved_and_loaded(rank, size, folder):
    """Saved from four shards, loaded to four, to two by two, and to a plain model of one process."""
    model, optimizer = sharded()
    train(model, optimizer, size, share(rank), steps=range(3))
    dcp.save(states(model, optimizer, Progress(3)), checkpoint_id=folder)
    goes_on(rank, size, folder, *sharded())
    goes_on(rank, size, folder, *sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))))
    plain = net()
    found = {"model": get_model_state_dict(plain)}
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(plain, found["model"])
    check(plain.state_dict(), trained(net(), size))
    if rank == 0:
        dcp_to_torch_save(folder, f"{folder}/all.pt")
        check(torch.load(f"{folder}/all.pt", weights_only=False)["model"], trained(net(), size))


def saved_while_training(rank, size, folder):
    """A second thread communicates for the checkpoint over a group of its own, while training goes on."""
    own = dist.new_group()
    model, optimizer = sharded()
    train(model, optimizer, size, share(rank), steps=range(3))
    writing = dcp.async_save(states(model, optimizer, Progress(3)), checkpoint_id=folder, process_group=own)
    train(model, optimizer, size, share(rank), steps=range(3, 30))
    writing.result(timeout=30)
    goes_on(rank, size, folder, *sharded())


def loaded_to_a_part(rank, size, folder):
    """Two ranks load what four saved, by a group of theirs."""
    model, optimizer = sharded()
    train(model, optimizer, size, share(rank), steps=range(3))
    dcp.save(states(model, optimizer, Progress(3)), checkpoint_id=folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if rank < 2:
        half, _ = sharded(mesh=mesh["shards"])
        found = {"model": get_model_state_dict(half)}
        dcp.load(found, checkpoint_id=folder, process_group=mesh.get_group("shards"))
        set_model_state_dict(half, found["model"])
        check(get_model_state_dict(half), trained(net(), size))


def whole_states(rank, size, folder):
    """The model's full state goes from rank 0 to all; the optimizer's every rank has.

    Not the optimizer's from rank 0: there torch makes ranks issue different operations, and hangs on Gloo.
    """
    model, optimizer = sharded()
    train(model, optimizer, size, share(rank), steps=range(3))
    parameters = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(parameters) == (rank == 0)
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert moments["state"]["first.up.weight"]["exp_avg"].shape == (10, 4)
    again, fresh = sharded()
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, parameters, options=spread)
    set_optimizer_state_dict(again, fresh, moments, options=StateDictOptions(full_state_dict=True))
    train(again, fresh, size, share(rank), steps=range(3, 5))
    check(get_model_state_dict(again), trained(net(), size, steps=range(5)))


@pytest.mark.parametrize(
    "body",
    [saved_and_loaded, saved_while_training, loaded_to_a_part, whole_states],
    ids=lambda body: body.__name__,
)
def test_checkpoint(body, tmp_path):
    run_torch(body, 4, str(tmp_path))
