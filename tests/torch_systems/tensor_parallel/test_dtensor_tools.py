"""DTensors of torch over our groups: their making, their gradients, and what looks into them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from torch.distributed.tensor.debug import CommDebugMode, visualize_sharding
from torch.distributed.tensor.experimental import local_map, register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_systems.small import net
from torch_world import run_torch


def line():
    return init_device_mesh("cpu", (4,))


def whole(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def from_local_tensors(rank, size):
    """Uneven parts need the shape; ``run_check`` compares what it can, and spreads the first replica."""
    mesh = line()
    value = whole(6, 3)
    rows = DTensor.from_local(
        value[2 * rank : 2 * rank + 2].clone(), mesh, [Shard(0)], run_check=True, shape=value.shape,
        stride=value.stride(),
    )  # fmt: skip
    assert torch.equal(rows.full_tensor(), value)
    even = DTensor.from_local(value.clone(), mesh, [Shard(0)], run_check=True)
    assert even.shape == (24, 3)
    with pytest.raises(ValueError, match="Inconsistent tensor metadata"):
        DTensor.from_local(torch.zeros(2 + rank), mesh, [Shard(0)], run_check=True)
    with pytest.raises(RuntimeError, match="both shape and stride"):
        DTensor.from_local(value, mesh, [Shard(0)], shape=value.shape)
    square = init_device_mesh("cpu", (2, 2))
    mixed = DTensor.from_local(torch.full((2,), float(rank)), square, [Shard(0), Replicate()], run_check=True)
    assert mixed.full_tensor().tolist() == [0.0, 0.0, 2.0, 2.0]
    with pytest.raises((AttributeError, RuntimeError)):
        rows.placements = (Replicate(),)


def gradients_and_layouts(rank, size):
    """What gradients are laid out as, and computed in, on the way back."""
    mesh = line()
    value = whole(8, 4)
    rows = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_()
    # every rank's gradient is a part of the whole one
    whole_one = rows.full_tensor(grad_placements=[Partial()])
    (whole_one * (rank + 1)).sum().backward()
    assert torch.equal(rows.grad.full_tensor(), torch.full((8, 4), 10.0))

    rows.grad = None
    local = rows.redistribute(mesh, [Replicate()], async_op=True).to_local(grad_placements=[Partial("avg")])
    assert torch.equal(torch.as_tensor(local), value)
    (local * (rank + 1)).sum().backward()
    assert torch.equal(rows.grad.full_tensor(), torch.full((8, 4), 2.5))

    rows.grad = None
    halved = rows.redistribute(
        mesh, [Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
    )
    assert halved.dtype == torch.bfloat16
    assert torch.equal(halved.to_local(), value.bfloat16())
    halved.float().square().sum().backward()
    assert rows.grad.dtype == torch.float32
    torch.testing.assert_close(rows.grad.full_tensor(), 2 * value.bfloat16().float(), rtol=1e-2, atol=1e-2)
    other = init_device_mesh("cpu", (2, 2))
    with pytest.raises(NotImplementedError, match="Cross device mesh"):
        rows.redistribute(other, [Replicate(), Replicate()])


def made(rank, size):
    """Constants are made where they lie, without communication; random numbers need an accelerator."""
    mesh = line()
    with CommDebugMode() as mode:
        for function, value in (
            (zeros, torch.zeros(6, 3)),
            (ones, torch.ones(6, 3)),
            (lambda *shape, **where: full(shape, 2.5, **where), torch.full((6, 3), 2.5)),
        ):
            for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
                found = function(6, 3, device_mesh=mesh, placements=placements)
                here = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
                assert found.shape == (6, 3)
                assert torch.equal(found.to_local(), here)
        half = empty(6, 3, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float16)
    assert mode.get_total_counts() == 0
    assert (half.dtype, half.to_local().shape) == (torch.float16, ((2, 3), (2, 3), (2, 3), (0, 3))[rank])
    for random in (rand, randn):
        with pytest.raises(AssertionError):
            random(4, 4, device_mesh=mesh, placements=[Shard(0)])


def into_records(rank, size, folder):
    """Tables, JSON and files of what each module communicated."""
    mesh = line()
    plan = {
        f"{block}.{layer}": kind()
        for block in ("first", "second")
        for layer, kind in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    model = parallelize_module(net(even=True), mesh, plan)
    with CommDebugMode() as mode:
        model(torch.ones(4, 4)).sum().backward()
    assert mode.get_total_counts() == 3  # a sum for the output of each block, and for the inputs' gradient
    table = mode.generate_comm_debug_tracing_table(noise_level=1)
    assert "Net.first" in table
    assert table.count("all_reduce") >= 2
    path = Path(folder) / f"{rank}"
    mode.log_comm_debug_tracing_table_to_file(file_name=f"{path}.txt", noise_level=3)
    assert "Net.second.down" in Path(f"{path}.txt").read_text()
    mode.generate_json_dump(file_name=f"{path}.json", noise_level=2)
    assert "all_reduce" in json.dumps(json.loads(Path(f"{path}.json").read_text()))
    return table


def drawn(rank, size):
    """The first rank of the mesh draws, or says what it takes to draw."""
    mesh, picture = line(), io.StringIO()
    tensor = distribute_tensor(whole(8, 4), mesh, [Shard(0)])
    with contextlib.redirect_stdout(picture):
        if rank == 0 and importlib.util.find_spec("tabulate") is None:
            with pytest.raises(ValueError, match="requires either `rich` or `tabulate`"):
                visualize_sharding(tensor)
        else:
            visualize_sharding(tensor)
            shown = ["cpu:0", "cpu:3", "Row 6-7"] if rank == 0 else []
            assert all(word in picture.getvalue() for word in shown)
            assert bool(picture.getvalue()) == (rank == 0)


def where(chunk):
    """Returns the place of a chunk as a hashable index."""
    return tuple(zip(chunk.offsets, chunk.sizes, strict=True))


def cut_for_checkpoints(rank, size, folder):
    """Each rank tells which chunk it has; a checkpoint lists every chunk once, and other layouts read it."""
    rows, square = line(), init_device_mesh("cpu", (2, 2))
    value = whole(6, 3)
    saved = {
        "uneven": distribute_tensor(value, rows, [Shard(0)]),  # the last rank has nothing
        "both": distribute_tensor(value, square, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(value, square, [Shard(0), Shard(0)]),
        "copied": distribute_tensor(value, square, [Replicate(), Shard(0)]),
    }
    found = {}
    for name, tensor in saved.items():
        (chunk,) = tensor.__create_chunk_list__()
        cut = tuple(slice(begin, begin + length) for begin, length in where(chunk))
        assert torch.equal(tensor.to_local(), value[cut]), name
        found[name] = where(chunk)
    with pytest.raises(ValueError, match="partial placements"):
        DTensor.from_local(value, rows, [Partial()]).__create_chunk_list__()
    with pytest.raises(AttributeError):
        saved["both"].device_mesh = rows

    checkpoint.save(saved, checkpoint_id=folder)
    again = {name: zeros(6, 3, device_mesh=rows, placements=[Shard(1)]) for name in saved}
    checkpoint.load(again, checkpoint_id=folder)
    for name, tensor in again.items():
        assert torch.equal(tensor.full_tensor(), value), name
    listed = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return found, {name: sorted(map(where, listed[name].chunks)) for name in saved}


@register_sharding(torch.ops.aten.erfinv.default)
def _of_erfinv(x):
    return [([Replicate()], [Replicate()]), *(([Shard(d)], [Shard(d)]) for d in range(x.ndim))]


def experimental(rank, size):
    """Functions of local tensors, and operators with a layout of their own."""
    mesh = line()
    left, right = whole(8, 4), whole(4, 3)

    def product(one, two):
        return one @ two

    over_rows = local_map(
        product, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]), device_mesh=mesh,
        redistribute_inputs=True,
    )  # fmt: skip
    given = distribute_tensor(left, mesh, [Replicate()]), distribute_tensor(right, mesh, [Shard(0)])
    found = over_rows(*given)
    assert found.placements == (Shard(0),)
    torch.testing.assert_close(found.full_tensor(), left @ right)
    strict = local_map(
        product, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]), device_mesh=mesh
    )
    with pytest.raises(ValueError, match="redistribute_inputs"):
        strict(*given)

    def summed(one):
        """Each rank has a part of the sum over the rows."""
        return one.sum(0)

    total = local_map(summed, out_placements=[Partial()], in_placements=([Shard(0)],), device_mesh=mesh)
    torch.testing.assert_close(total(distribute_tensor(left, mesh, [Shard(0)])).full_tensor(), left.sum(0))

    unit = left.tanh() * 0.9
    inverse = torch.erfinv(distribute_tensor(unit, mesh, [Shard(1)]))
    assert inverse.placements == (Shard(1),)
    torch.testing.assert_close(inverse.full_tensor(), torch.erfinv(unit))


def test_from_local_tensors():
    run_torch(from_local_tensors, 4)


def test_gradients_and_layouts():
    run_torch(gradients_and_layouts, 4)


def test_factories():
    run_torch(made, 4)


def test_records(tmp_path):
    tables = run_torch(into_records, 4, str(tmp_path))
    assert tables == [tables[0]] * 4


def test_chunks(tmp_path):
    found, listed = zip(*run_torch(cut_for_checkpoints, 4, str(tmp_path)), strict=True)
    wanted = {name: sorted({chunks[name] for chunks in found}) for name in found[0]}
    assert listed == (wanted,) * 4
    assert [len(chunks) for chunks in wanted.values()] == [4, 4, 4, 2]


def test_drawing_and_experiments():
    run_torch(drawn, 4)
    run_torch(experimental, 4)
