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
        c10d.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
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

    def test_class_of_torch(self):
        with self.assertRaises(TypeError):
            c10d.HashStore().set("key", 1)
        if type(c10d.HashStore()).__module__.startswith("collectives"):
            self.skipTest("ours")

    def test_that_crashes(self):
        os._exit(3)


if __name__ == "__main__":
    run_tests()
"""


def test_files_of_a_folder_are_compared(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_one.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("VALUE = 3.0")
    (tmp_path / "test_two.py").write_text("import nothing_of_that_name")
    argv = ["run.py", "--files", str(tmp_path), "--backend", "collectives,collectives+dropin,gloo"]
    monkeypatch.setattr(sys, "argv", argv)
    assert run.main() == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["collectives", "collectives+dropin", "gloo"]
    assert rows[2] == ["test_one.py", "3", "2", "1", "2", "2", "2", "3", "2", "1"]
    assert [tuple(row[:4]) for row in rows[3:7]] == [
        ("CollectivesTest.test_all_reduce", "failed", "on", "collectives:"),
        ("CollectivesTest.test_all_reduce", "failed", "on", "collectives+dropin:"),
        ("OtherTest.test_class_of_torch", "skipped", "on", "collectives+dropin:"),
        ("OtherTest.test_processes_of_the_tests_own", "failed", "on", "gloo:"),
    ]
    assert "AssertionError:" in rows[3]
    assert rows[7] == ["test_two.py", "0", "1", "0", "0", "1", "0", "0", "1", "0"]
    assert {(row[0], row[-1]) for row in rows[8:]} == {("import", "'nothing_of_that_name'")}
