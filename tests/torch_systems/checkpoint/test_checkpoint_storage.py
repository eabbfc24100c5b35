"""What lies on the disk after checkpoints over our groups, and readers and writers of other kinds."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - torch's own acronym
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch_systems.small import Block, adam, check, net, share, train, trained
from torch_world import run_torch


def sharded(model=None, **options):
    model = model or net()
    for part in (model.first, model.second, model):
        fully_shard(part, **options)
    return model


def learned(rank, size, **options):
    """Returns a sharded model after training, and what it must be."""
    model = sharded(**options)
    train(model, adam(model.parameters()), size, share(rank))
    return model, trained(net(), size)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def comes_back(folder, expected, **options):
    """Loads a checkpoint to a new sharded model."""
    state = get_model_state_dict(sharded())
    dcp.load(state, checkpoint_id=folder, **options)
    check(state, expected)


def layouts(rank, size, folder):
    """Files by rank, by item, and without coordination; a checkpoint is overwritten whole, or not at all."""
    model, expected = learned(rank, size)
    state = get_model_state_dict(model)
    by_rank = [f"__{i}_0.distcp" for i in range(size)]
    dcp.save(state, checkpoint_id=f"{folder}/missing/a")
    assert names(f"{folder}/missing/a") == [".metadata", *by_rank]
    comes_back(f"{folder}/missing/a", expected)

    writer = dcp.FileSystemWriter(f"{folder}/items", single_file_per_rank=False, thread_count=2)
    metadata = dcp.save(state, storage_writer=writer)
    shards = sum(len(one.chunks) for one in metadata.state_dict_metadata.values())
    found = names(f"{folder}/items")
    assert len([name for name in found if name.endswith(".distcp")]) == shards
    assert {name.split("_")[2] for name in found[1:]} == {str(i) for i in range(size)}
    comes_back(f"{folder}/items", expected)

    alone = {"rank": torch.full((2,), float(rank))}
    dcp.save(alone, checkpoint_id=f"{folder}/apart", use_collectives=False)
    assert names(f"{folder}/apart") == sorted([f"__{i}.metadata" for i in range(size)] + by_rank)
    alone["rank"].zero_()
    dcp.load(alone, checkpoint_id=f"{folder}/apart")
    assert alone["rank"].tolist() == [rank, rank]

    with pytest.raises(dcp.CheckpointException, match="already exists") as error:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{folder}/items", overwrite=False))
    assert sorted(error.value.failures) == list(range(size))
    assert names(f"{folder}/items") == found
    dcp.save({name: one + 1 for name, one in state.items()}, checkpoint_id=f"{folder}/items")
    comes_back(f"{folder}/items", {name: one + 1 for name, one in expected.items()})
    with pytest.raises(dcp.CheckpointException, match="Missing key") as error:
        dcp.load({"nobody": torch.zeros(1)}, checkpoint_id=f"{folder}/items")
    assert 0 in error.value.failures


class Recorded:
    """Notes the calls of a reader or writer."""

    def __init__(self, path):
        super().__init__(path)
        self.calls = []

    def __getattribute__(self, name):
        if name in {
            "reset", "storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan",
            "write_data", "finish", "read_metadata", "set_up_storage_reader", "read_data",
        }:  # fmt: skip
            self.calls.append(name)
        return super().__getattribute__(name)


class RecordedWriter(Recorded, dcp.FileSystemWriter):
    pass


class RecordedReader(Recorded, dcp.FileSystemReader):
    pass


def in_order(calls):
    """Returns the calls without repetitions."""
    return list(dict.fromkeys(calls))


def call_order(rank, size, folder):
    """The coordinator alone plans for all and finishes; the others prepare and move their own data."""
    model, expected = learned(rank, size)
    state = get_model_state_dict(model)
    for coordinator, way in ((0, dcp.save), (2, None)):
        writer, reader = RecordedWriter(f"{folder}/{coordinator}"), RecordedReader(f"{folder}/{coordinator}")
        leads = rank == coordinator
        again = get_model_state_dict(sharded())
        if way is not None:
            dcp.save(state, storage_writer=writer)
            dcp.load(again, storage_reader=reader)
        else:  # the deprecated names, which alone let somebody else lead
            with pytest.warns(FutureWarning, match="deprecated"):
                dcp.save_state_dict(state, writer, coordinator_rank=coordinator)
            with pytest.warns(FutureWarning, match="deprecated"):
                dcp.load_state_dict(again, reader, coordinator_rank=coordinator)
        check(again, expected)
        written = [one for one in in_order(writer.calls) if one not in ("reset", "storage_meta")]
        assert written == [
            "set_up_storage_writer", "prepare_local_plan", *["prepare_global_plan"][:leads], "write_data",
            *["finish"][:leads],
        ]  # fmt: skip
        read = [one for one in in_order(reader.calls) if one != "reset"]
        assert read == [
            "read_metadata", "set_up_storage_reader", "prepare_local_plan", *["prepare_global_plan"][:leads],
            "read_data",
        ]  # fmt: skip


class Broken(dcp.FileSystemWriter):
    """Cannot write on rank 1."""

    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            raise OSError("no room")
        return super().write_data(plan, planner)


def failed(rank, size, folder):
    """What fails on one rank is raised on all, by its name; the next checkpoint is whole."""
    model, expected = learned(rank, size)
    state = get_model_state_dict(model)
    with pytest.raises(dcp.CheckpointException, match="no room") as error:
        dcp.save(state, storage_writer=Broken(f"{folder}/broken"))
    assert list(error.value.failures) == [1]
    assert ".metadata" not in names(f"{folder}/broken")
    dcp.save(state, checkpoint_id=f"{folder}/broken")
    comes_back(f"{folder}/broken", expected)


def from_torch_save(rank, size, folder):
    """A file of ``torch.save`` is broadcast by its one reader, or made a checkpoint that every rank reads.

    To plain tensors: torch hands shards of the ranks to a broadcast as they are, on which Gloo fails too.
    """
    expected = trained(net(even=True), size, outputs=4)
    path = f"{folder}/all.pt"
    if rank == 0:
        torch.save(expected, path)
        torch_save_to_dcp(path, f"{folder}/made")
        dcp_to_torch_save(f"{folder}/made", f"{folder}/back.pt")
        check(torch.load(f"{folder}/back.pt"), expected)
    else:
        path = f"{folder}/which only rank 0 has"
    dist.barrier()
    broadcast = {"storage_reader": BroadcastingTorchSaveReader(path), "planner": DynamicMetaLoadPlanner()}
    for options in ({"checkpoint_id": f"{folder}/made"}, broadcast):
        plain = net(even=True).state_dict()
        dcp.load(plain, **options)
        check(plain, expected)
    model = get_model_state_dict(sharded(net(even=True)))
    dcp.load(model, checkpoint_id=f"{folder}/made")
    check(model, expected)


def one_group_of_a_hybrid(rank, size, folder):
    """Of two copies in two shards each, the first group of shards saves by itself; all ranks load."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = FSDP(
        net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"),
    )  # fmt: skip
    train(model, adam(model.parameters()), size, share(rank))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        if mesh.get_local_rank("copies") == 0:
            dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group("shards"))
            assert names(folder) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    dist.barrier()
    state = {"model": get_model_state_dict(sharded())}
    dcp.load(state, checkpoint_id=folder)
    check(state["model"], trained(net(), size))


def safetensors(rank, size, folder):
    """Files of other programs: in shards, and put together."""
    from safetensors.torch import load_file

    model, expected = learned(rank, size)
    state = get_model_state_dict(model)
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    files = [path for path in Path(folder).iterdir() if path.suffix == ".safetensors"]
    assert len(files) == 1
    check(dict(sorted(load_file(files[0]).items())), dict(sorted(expected.items())))
    for place in (folder, f"{folder}/sharded"):
        again = get_model_state_dict(sharded())
        dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(place))
        check(again, expected)


@pytest.mark.parametrize(
    "body",
    [layouts, call_order, failed, from_torch_save, one_group_of_a_hybrid],
    ids=lambda body: body.__name__,
)
def test_storage(body, tmp_path):
    run_torch(body, 4, str(tmp_path))


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    run_torch(safetensors, 4, str(tmp_path))


def in_another_process(rank, size, folder):
    """A process of each rank writes while training goes on; ours tells them where to meet by Gloo."""
    try:
        model, expected = learned(rank, size)
        state = get_model_state_dict(model)
        for name in ("first", "second"):
            writing = dcp.async_save(
                state, checkpoint_id=f"{folder}/{name}", async_checkpointer_type=AsyncCheckpointerType.PROCESS
            )
            train(model, adam(model.parameters()), size, share(rank), steps=[7])
            writing.result(timeout=50)
            assert len(multiprocessing.active_children()) == 1
            if name == "first":
                comes_back(f"{folder}/first", expected)
                expected = {key: one.full_tensor() for key, one in state.items()}
                expected = {key: one.clone() for key, one in expected.items()}
        comes_back(f"{folder}/second", expected)
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
    dist.barrier()


def test_saved_by_processes(tmp_path):
    run_torch(
        in_another_process, 2, str(tmp_path), isolated=True, env={"MASTER_ADDR": "127.0.0.1"}, timeout=100
    )
