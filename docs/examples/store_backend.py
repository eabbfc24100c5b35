"""A backend of your own: tensors pass through the group's store, as bytes under a key for each.

Run with: collectives conformance --import store_backend --backend store
"""

import ctypes
import time
from collections import Counter

import torch

import collectives as dist
from collectives.core.arguments.staging import dense, dense_outputs
from collectives.core.capabilities import OPERATIONS, Capabilities
from collectives.core.operations import ALL_GATHER
from collectives.core.work import CompletedWork, FinishingWork
from collectives.torch_bridge import register_backend

REDUCE = {"SUM": torch.sum, "AVG": torch.mean, "MIN": torch.amin, "MAX": torch.amax}


class StoreGroup(dist.ProcessGroup):
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        reductions=dict.fromkeys((torch.float32, torch.float64), frozenset(REDUCE)),
        operations=frozenset(OPERATIONS) - {"recv_anysource"},
    )

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size, timeout=timeout, store=store)
        self.numbers, self.ended = Counter(), False

    def name(self):
        return "store"

    def key(self, *about):
        self.numbers[about] += 1
        return f"{about} {self.numbers[about]}"

    def put(self, key, tensor):
        given = dense(tensor)
        self._store.set(key, ctypes.string_at(given.data_ptr(), given.nbytes))
        return CompletedWork([tensor])

    def take(self, keys, outputs, timeout=None):
        limit = timeout or self.timeout
        deadline = time.monotonic() + limit.total_seconds()
        staged = dense_outputs(outputs)

        def read():
            for key, into in zip(keys, staged.stand_ins, strict=True):
                while not self._store.check([key]):
                    if self.ended:
                        raise dist.GroupAbortedError(f"{self.where()} aborted on this rank")
                    if time.monotonic() > deadline:
                        raise dist.CollectiveTimeoutError(f"{self.where()} no {key!r} within {limit}")
                    time.sleep(1e-4)
                data = bytes(self._store.get(key))
                ctypes.memmove(into.data_ptr(), data, min(len(data), into.nbytes))
            staged.write_back()

        return FinishingWork(CompletedWork(), read, outputs, async_op=False)  # reads when somebody waits

    def _all_gather(self, call):
        key = self.key("collective")
        self.put(f"{key} from {self._rank}", call.input)
        return self.take([f"{key} from {r}" for r in range(self._size)], call.outputs, call.timeout)

    def _all_reduce(self, call):
        parts = [torch.empty_like(call.output) for _ in range(self._size)]
        gathered = self.issue(call.as_(ALL_GATHER, parts, call.outputs))

        def add_up():
            call.output.detach().copy_(REDUCE[call.op.name](torch.stack(parts), 0))

        return FinishingWork(gathered, add_up, call.outputs, async_op=False)

    def _broadcast(self, call):
        key, mine = self.key("collective"), self._rank == call.root
        return self.put(key, call.output) if mine else self.take([key], call.outputs, call.timeout)

    def _barrier(self, call):
        nothing = torch.empty(0)
        return self.issue(call.as_(ALL_GATHER, [nothing] * self._size, [nothing]))

    def _send(self, tensor, dst, tag):
        return self.put(self.key(self._rank, dst, tag), tensor)

    def _recv(self, tensor, src, tag):
        return self.take([self.key(src, self._rank, tag)], [tensor])

    def abort(self):
        self.ended = True

    def shutdown(self):
        self.ended = True


dist.Backend.register_backend("store", StoreGroup, devices="cpu")  # for collectives.init_process_group
register_backend("store", "store")  # for torch.distributed.init_process_group
