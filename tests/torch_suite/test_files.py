"""Files in the style of PyTorch's own tests, played on two backends side by side."""

from __future__ import annotations

import sys

from torch_suite import run

FILE = """
import os
from datetime import timedelta

import torch
import torch.distributed as c10d
import torch.multiprocessing as mp
from beside import VALUE
from torch.testing._internal.common_distributed import MultiProcessTestCase, requires_gloo, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import TestCase, load_tests, run_tests

load_tests = load_tests


class CollectivesTest(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @property
    def world_size(self):
        return 2

    @requires_gloo()
    def test_all_reduce(self):
        store = c10d.FileStore(self.file_name, self.world_size)
        about = {"store": store, "rank": self.rank, "world_size": self.world_size}
        backend = c10d.get_default_backend_for_device("cpu")
        c10d.init_process_group(backend, pg_options=c10d.ProcessGroupGloo._Options(), **about)
        tensor = torch.full((3,), VALUE)
        c10d.all_reduce(tensor, group=c10d.new_group([0, 1], backend="gloo"))
        self.assertEqual(tensor, torch.full((3,), 2 * VALUE))
        self.assertEqual(c10d.get_backend(), "gloo")

    def test_class_of_groups(self):
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [c10d.ProcessGroupGloo.create_device(interface="lo")]
        store = c10d.FileStore(self.file_name, self.world_size)
        group = c10d.ProcessGroupGloo(store, self.rank, self.world_size, options)
        tensor = torch.full((3,), VALUE)
        group.allreduce([tensor]).wait()
        self.assertEqual(tensor, torch.full((3,), 2 * VALUE))

    @skip_if_lt_x_gpu(2)
    def test_gpus(self):
        raise AssertionError


def spawned(number):
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    assert c10d.get_backend() == "collectives"


class OtherTest(TestCase):
    def test_processes_of_the_tests_own(self):
        mp.spawn(spawned, nprocs=1)

    def test_that_crashes(self):
        os._exit(3)


if __name__ == "__main__":
    run_tests()
"""

CLASSES = """
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import TestCase, load_tests

load_tests = load_tests


class ClassesTest(TestCase):
    def test_classes(self):
        classes = dist.HashStore, Join, ZeroRedundancyOptimizer, DistributedDataParallel
        ours = [of.__module__.startswith("collectives.") for of in classes]
        self.assertEqual(len(set(ours)), 1)
        if all(ours):
            self.skipTest("ours")

    def test_default_of_a_device_is_the_backend(self):
        name = dist.get_default_backend_for_device("cpu")
        self.assertEqual((name == "collectives", name == "gloo"), (True, True))

    def test_training(self):
        store = dist.PrefixStore("part", dist.HashStore())
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
"""


def test_files_of_a_folder_are_compared(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_one.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("VALUE = 3.0")
    (tmp_path / "test_two.py").write_text("import nothing_of_that_name")
    monkeypatch.setattr(sys, "argv", ["run.py", "--files", str(tmp_path)])
    assert run.main() == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["collectives", "gloo"]
    assert rows[2] == ["test_one.py", "2", "2", "1", "2", "2", "1"]
    assert [tuple(row[:4]) for row in rows[3:5]] == [
        ("CollectivesTest.test_all_reduce", "failed", "on", "collectives:"),
        ("OtherTest.test_processes_of_the_tests_own", "failed", "on", "gloo:"),
    ]
    assert "AssertionError:" in rows[3]
    assert rows[5] == ["test_two.py", "0", "1", "0", "0", "1", "0"]
    assert [(row[0], row[3], row[-1]) for row in rows[6:]] == [
        ("import", "collectives:", "'nothing_of_that_name'"),
        ("import", "gloo:", "'nothing_of_that_name'"),
    ]


def test_our_classes_are_played_in_the_place_of_those_of_torch(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_classes.py").write_text(CLASSES)
    argv = ["run.py", "--files", str(tmp_path), "--backend", "collectives,collectives+dropin"]
    monkeypatch.setattr(sys, "argv", argv)
    assert run.main() == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2] == ["test_classes.py", "3", "0", "0", "2", "0", "1"]
    assert rows[3:] == [["ClassesTest.test_classes", "skipped", "on", "collectives+dropin:", "ours"]]
