"""torch knows the backends without an import of the package, and pays next to nothing for it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.metadata import entry_points

import pytest
import torch.distributed as dist
from sources import SAFE_PATH

import collectives
import collectives_registration
from collectives.torch_bridge import register_backend

NAME = collectives_registration.__name__
AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
BY_NAME = hasattr(dist.Backend, "_ensure_backend_registered")
"""Whether torch loads a backend that it does not know, which 2.14 and newer do."""


def run(folder, env, *command):
    done = subprocess.run(
        [sys.executable, *SAFE_PATH, "-W", "error", *map(str, command)],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LIGHT = """
import sys
import torch
import torch.distributed as dist
from importlib.metadata import entry_points

(entry,) = [one for one in entry_points(group="torch.backends") if one.name == "collectives"]
assert not dist.is_backend_available("collectives") or hasattr(dist.Backend, "_ensure_backend_registered")
before = set(sys.modules)
entry.load()()
print(sorted(set(sys.modules) - before))
assert dist.is_backend_available("collectives_round_robin:8")

# somebody else's backend of our name: torch can still be imported, and only we complain
import collectives_registration
def theirs(*_):
    pass
dist.Backend._plugins.pop("COLLECTIVES")
dist.Backend.register_backend("collectives", theirs, devices=["cpu"])
collectives_registration.autoload()
assert dist.Backend._plugins["COLLECTIVES"].creator_fn is theirs
try:
    import collectives
except ValueError as error:
    print(error)
"""


def test_the_entry_point_imports_nothing(tmp_path):
    loaded, complaint = run(tmp_path, NO_AUTOLOAD, "-c", LIGHT).splitlines()
    expected = "['collectives_registration']"
    # where torch has asked by name, the module is there already
    assert loaded == ("[]" if BY_NAME else expected)
    assert "already has a backend 'collectives', registered by another package (module __main__)" in complaint


def test_torch_without_process_groups_is_left_alone(tmp_path):
    program = "import sys, collectives_registration as r; r.autoload(); print('torch' in sys.modules)"
    assert run(tmp_path, {}, "-c", program).strip() == "False"


def test_entry_points_by_name_are_those_of_the_table():
    entries = {entry.name: entry for entry in entry_points(group="torch.distributed.backends")}
    made = {name: plugin.creator_fn for name, plugin in dist.Backend._plugins.items()}
    ours = [name for name, maker in made.items() if maker.__module__ == NAME and hasattr(maker, "backend")]
    plain = {name.lower() for name in ours if ":" not in name} - {"collectives_gloo"}
    assert plain == {name for name in entries if name.startswith("collectives")}
    assert {entries[name].load() for name in plain} == {collectives_registration.register}


@pytest.mark.parametrize(
    ("plugins", "asked"),
    [(None, False), ("", False), ("other", False), ("collectives", True), ("other,collectives", True)],
)
def test_vllm_takes_our_platform_where_it_is_told(monkeypatch, plugins, asked):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    (platform,) = [one for one in entry_points(group="vllm.platform_plugins") if one.name == "collectives"]
    (check,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "collectives"]
    name = platform.load()()
    assert name == ("collectives.integrations.vllm.platform.CollectivesPlatform" if asked else None)

    vllm = types.ModuleType("vllm.platforms")
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", vllm)
    ours = type("CollectivesPlatform", (), {"__module__": "collectives.integrations.vllm.platform"})
    vllm.current_platform = ours()
    check.load()()
    vllm.current_platform = type("CpuPlatform", (), {"__module__": "vllm.platforms.cpu"})()
    if asked:
        with pytest.raises(RuntimeError, match="vLLM took the platform CpuPlatform; unset VLLM_TARGET"):
            check.load()()
    else:
        check.load()()


def test_default_backends_stay():
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert collectives.torch_bridge.register() is None
    assert dist.get_default_backend_for_device("cpu") == "gloo"


def test_a_name_of_others_is_refused():
    dist.Backend.register_backend("somebody_elses", lambda *_: None, devices=["cpu"])
    try:
        with pytest.raises(ValueError, match="somebody_elses"):
            register_backend("somebody_elses", "host")
    finally:
        del dist.Backend._plugins["SOMEBODY_ELSES"]
        del dist.Backend.SOMEBODY_ELSES
        dist.Backend.backend_list.remove("somebody_elses")
        del dist.Backend.backend_type_map["somebody_elses"]
        del dist.Backend.backend_capability["somebody_elses"]


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

def total(group=None):
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()

assert "collectives" not in sys.modules
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
assert total() == [1.0] * 3
assert type(dist.group.WORLD).__name__ == "TorchGroup", type(dist.group.WORLD)
for name in {others!r}:
    group = dist.new_group(backend=name)
    assert type(group).__name__ == "TorchGroup" and dist.get_backend(group) == name
    assert total(group) == [1.0] * 3
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
assert total(mesh.get_group("inner")) == [1.0] * 3
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
dist.destroy_process_group()
print("rank is done")
"""


def carry_out(folder, env, backend, others):
    program = PROGRAM.format(backend=backend, others=others)
    assert run(folder, {**env, "PYTHONWARNINGS": "ignore"}, "-W", "ignore", "-c", program) == "rank is done\n"


@pytest.mark.full
def test_a_program_without_an_import(tmp_path):
    others = ["collectives_round_robin", "collectives_round_robin:2", "cpu:collectives"]
    carry_out(tmp_path, AUTOLOAD, "cpu:collectives,cuda:nccl", others)


@pytest.mark.skipif(not BY_NAME, reason="this torch does not load backends by name")
def test_backends_loaded_by_name(tmp_path):
    carry_out(tmp_path, NO_AUTOLOAD, "collectives", ["cpu:collectives_round_robin"])
